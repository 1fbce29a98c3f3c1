"""A power cut loses nothing that local disk said was written: what was synced, and in which order.

A recording file system notes what is created, written, renamed and synced. After a power cut only
the entries of directories and the contents of files are left that were synced.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from arroyo_dagster.state import StatePath
from tests.stores import LocalDiskStore

P = StatePath


class Recorder:
    """The namespace below a directory, and what of it is on disk."""

    def __init__(self, top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._top = str(top)
        self._numbers = itertools.count(1)
        self._live: dict[str, int] = {self._top: 0}
        self._waiting: dict[int, list[tuple[str, int | None]]] = {}
        self._on_disk: dict[int, dict[str, int]] = {}
        self._contents: set[int] = set()
        self.syncs = 0
        for name in ("mkdir", "open", "fsync", "replace", "link", "unlink", "rmdir"):
            real = getattr(os, name)
            monkeypatch.setattr(os, name, self._wrapped(getattr(self, f"_{name}"), real))

    @staticmethod
    def _wrapped(note: Callable[..., None], real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **options: Any) -> Any:
            found = real(*given, **options)
            note(*given, **options)
            return found

        return call

    def _path(self, name: Any, handle: int | None) -> str:
        below = "" if handle is None else os.readlink(f"/proc/self/fd/{handle}")
        return os.path.join(below, os.fspath(name))

    def _entry(self, path: str, node: int | None) -> None:
        folder, name = os.path.split(path)
        if folder not in self._live:
            return
        self._waiting.setdefault(self._live[folder], []).append((name, node))
        if node is None:
            self._live.pop(path, None)
        else:
            self._live[path] = node

    def _mkdir(self, name: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        self._entry(self._path(name, dir_fd), next(self._numbers))

    def _open(self, name: Any, flags: int, mode: int = 0, *, dir_fd: int | None = None) -> None:
        if flags & os.O_CREAT:
            self._entry(self._path(name, dir_fd), next(self._numbers))

    def _replace(self, old: Any, new: Any, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        source = self._path(old, src_dir_fd)
        node = self._live[source]
        self._entry(source, None)
        self._entry(self._path(new, dst_dir_fd), node)

    def _link(self, old: Any, new: Any, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        self._entry(self._path(new, dst_dir_fd), self._live[self._path(old, src_dir_fd)])

    def _unlink(self, name: Any, *, dir_fd: int | None = None) -> None:
        self._entry(self._path(name, dir_fd), None)

    _rmdir = _unlink

    def _fsync(self, handle: int) -> None:
        self.syncs += 1
        node = self._live[os.readlink(f"/proc/self/fd/{handle}")]
        self._contents.add(node)
        entries = self._on_disk.setdefault(node, {})
        for name, entry in self._waiting.pop(node, ()):
            if entry is None:
                entries.pop(name, None)
            else:
                entries[name] = entry

    def survives(self, path: Path) -> bool:
        """Whether a file is there, whole and the same, after a power cut now."""
        node = 0
        for name in path.relative_to(self._top).parts:
            found = self._on_disk.get(node, {}).get(name)
            if found is None:
                return False
            node = found
        return node in self._contents and node == self._live.get(str(path))


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(tmp_path, monkeypatch)


def put(store: LocalDiskStore, path: StatePath) -> None:
    store.put(path, b"1")


def create(store: LocalDiskStore, path: StatePath) -> None:
    assert store.create(path, b"1")


WRITES = pytest.mark.parametrize("write", [put, create])


@WRITES
def test_what_is_written_below_a_new_root_survives(
    write: Callable[[LocalDiskStore, StatePath], None], disk: Recorder, tmp_path: Path
) -> None:
    root = tmp_path / "not" / "there" / "yet"
    store = LocalDiskStore(str(root))
    for name in ("a/b/c/d", "a/b/c/e", "a/x/y", "z", "SessionWindow<3s>/t"):
        write(store, P(name))
        stored = name.replace("<", "%3C").replace(">", "%3E")
        assert disk.survives(root / stored), name
    assert disk.survives(root / "a/b/c/d")


def test_overwritten_object_survives_with_new_content(disk: Recorder, tmp_path: Path) -> None:
    store = LocalDiskStore(str(tmp_path / "root"))
    store.put(P("a/b"), b"old")
    store.put(P("a/b"), b"new")
    assert disk.survives(tmp_path / "root/a/b")
    assert not store.create(P("a/b"), b"other")
    assert disk.survives(tmp_path / "root/a/b")


@WRITES
def test_a_directory_that_somebody_else_created_and_did_not_sync_survives(
    write: Callable[[LocalDiskStore, StatePath], None], disk: Recorder, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    LocalDiskStore(str(root), sync=False).put(P("a/b/c"), b"")
    assert not disk.survives(root / "a/b/c")
    write(LocalDiskStore(str(root)), P("a/b/d"))
    assert disk.survives(root / "a/b/d")


@WRITES
def test_a_directory_that_was_removed_and_created_again_survives(
    write: Callable[[LocalDiskStore, StatePath], None],
    disk: Recorder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # File systems give a new directory the inode of one that is gone.
    real = os.fstat
    monkeypatch.setattr(os, "fstat", lambda fd: os.stat_result((real(fd)[0], 1, *real(fd)[2:])))
    root = tmp_path / "root"
    store = LocalDiskStore(str(root))
    write(store, P("a/b/c"))
    store.delete_many([P("a/b/c")])
    assert store.prune(P("a")) == 1
    write(store, P("a/b/c"))
    assert disk.survives(root / "a/b/c")


def test_without_sync_nothing_is_synced(disk: Recorder, tmp_path: Path) -> None:
    store = LocalDiskStore(str(tmp_path / "root"), sync=False)
    put(store, P("a/b"))
    create(store, P("a/c"))
    assert disk.syncs == 0


def test_object_in_a_known_directory_costs_two_syncs(disk: Recorder, tmp_path: Path) -> None:
    store = LocalDiskStore(str(tmp_path / "root"))
    put(store, P("a/b/c"))
    before = disk.syncs
    put(store, P("a/b/d"))
    create(store, P("a/b/e"))
    assert disk.syncs == before + 4
