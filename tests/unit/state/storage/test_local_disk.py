"""Local disk where it differs from other stores: staging, directories, links, broken disks."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from arroyo_dagster.errors import InputError, NotFoundError, StorageError
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.storage.local_disk import LocalDiskStore

P = StatePath
needs_user = pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "not" / "there" / "yet"


@pytest.fixture
def store(root: Path) -> LocalDiskStore:
    return LocalDiskStore(str(root))


def failing(code: int) -> object:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


def test_opening_creates_nothing_and_the_first_write_creates_all(
    store: LocalDiskStore, root: Path
) -> None:
    assert not root.parent.exists()
    store.put(P("a/SessionWindow<3s>"), b"1")
    assert (root / "a" / "SessionWindow%3C3s%3E").read_bytes() == b"1"


def test_a_url_that_names_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InputError, match="names a file"):
        LocalDiskStore(str(tmp_path / "file"))
    with pytest.raises(InputError, match="not a URL on local disk"):
        LocalDiskStore("s3://bucket")


def test_a_parent_that_is_a_file_is_a_lasting_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = LocalDiskStore(str(tmp_path / "file" / "below"))
    with pytest.raises(StorageError) as caught:
        store.put(P("a"), b"")
    assert not caught.value.retryable
    with pytest.raises(NotFoundError):
        list(store.list())


def test_staging_leftovers_are_never_listed(store: LocalDiskStore, root: Path) -> None:
    store.put(P("a/b"), b"1")
    (root / "a" / "b#1").write_bytes(b"half")
    (root / "a" / "c#99123").write_bytes(b"half")
    assert [info.path for info in store.list()] == ["a/b"]
    assert [info.path for info in store.list_dir("a").objects] == ["a/b"]


def test_a_write_leaves_nothing_beside_the_object(store: LocalDiskStore, root: Path) -> None:
    store.put(P("a"), b"1")
    store.put(P("a"), b"2")
    store.create(P("b"), b"3")
    store.create(P("b"), b"4")
    assert sorted(os.listdir(root)) == ["a", "b"]
    assert (root / "b").stat().st_nlink == 1


@pytest.mark.parametrize("broken", ["fsync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_failed_write_leaves_the_old_object(
    store: LocalDiskStore, root: Path, monkeypatch: pytest.MonkeyPatch, broken: str, code: int
) -> None:
    store.put(P("a"), b"old")
    monkeypatch.setattr(os, broken, failing(code))
    with pytest.raises(StorageError) as caught:
        store.put(P("a"), b"new")
    assert caught.value.facts["path"] == "a"
    assert caught.value.facts["url"] == f"file://{root}"
    assert caught.value.retryable is (code == errno.EIO)
    assert isinstance(caught.value.__cause__, OSError)
    assert store.read(P("a")) == b"old"
    assert os.listdir(root) == ["a"]


def test_a_crash_between_write_and_rename_leaves_only_staging(
    store: LocalDiskStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(P("a"), b"old")

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", die)
    monkeypatch.setattr(os, "unlink", die)
    with pytest.raises(KeyboardInterrupt):
        store.put(P("a"), b"new")
    monkeypatch.undo()
    assert len(os.listdir(root)) == 2
    assert [info.size_bytes for info in store.list()] == [3]
    assert store.read(P("a")) == b"old"


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP])
def test_a_disk_without_hard_links_cannot_create(
    store: LocalDiskStore, root: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    store.put(P("a"), b"")
    monkeypatch.setattr(os, "link", failing(code))
    with pytest.raises(StorageError, match="hard links") as caught:
        store.create(P("b"), b"")
    assert not caught.value.retryable
    assert os.listdir(root) == ["a"]


def test_an_object_in_place_of_a_directory_is_a_lasting_error(store: LocalDiskStore) -> None:
    store.put(P("a/b"), b"")
    for path in (P("a"), P("a/b/c")):
        for verb in (store.put, store.create):
            with pytest.raises(StorageError) as caught:
                verb(path, b"")
            assert not caught.value.retryable
    with pytest.raises(NotFoundError):
        store.read(P("a"))
    assert store.head(P("a")) is None
    assert store.delete_many([P("a")]).deleted == ("a",)
    assert [info.path for info in store.list()] == ["a/b"]


def test_deleting_leaves_directories_which_are_listed_one_level_only(
    store: LocalDiskStore, root: Path
) -> None:
    store.put(P("a/b"), b"")
    store.delete_many([P("a/b")])
    assert (root / "a").is_dir()
    assert list(store.list()) == []
    assert store.list_dir().prefixes == ("a",)


def test_a_directory_removed_while_writing_is_made_again(
    store: LocalDiskStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(P("c"), b"")
    make = os.mkdir
    calls = []

    def make_then_remove(name: str, mode: int = 0o777) -> None:
        make(name, mode)
        calls.append(name)
        if len(calls) == 1:
            os.rmdir(name)

    monkeypatch.setattr(os, "mkdir", make_then_remove)
    store.put(P("a/b"), b"1")
    assert store.read(P("a/b")) == b"1"
    assert len(calls) == 2


def test_a_directory_that_cannot_stay_is_a_failure_of_the_store(
    store: LocalDiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "makedirs", lambda *_, **__: None)
    for verb in (store.put, store.create):
        with pytest.raises(StorageError, match="vanishes"):
            verb(P("a/b"), b"1")


def test_what_may_not_be_read_is_never_silently_left_out(
    store: LocalDiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(P("a/b"), b"")
    monkeypatch.setattr(os, "scandir", failing(errno.EACCES))
    for verb in (lambda: list(store.list()), lambda: store.list_dir("a")):
        with pytest.raises(StorageError, match="permission denied") as caught:
            verb()
        assert not caught.value.retryable


def test_a_failed_delete_is_in_the_outcome(
    store: LocalDiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(P("a"), b"")
    monkeypatch.setattr(os, "unlink", failing(errno.EACCES))
    outcome = store.delete_many([P("a")])
    assert outcome.deleted == ()
    assert "permission denied" in outcome.failed[P("a")]


@needs_user
def test_a_directory_that_is_not_writable_is_said_so(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match="permission denied") as caught:
        LocalDiskStore(str(tmp_path)).put(P("a"), b"")
    tmp_path.chmod(0o700)
    assert not caught.value.retryable


def test_linked_directories_are_followed_but_never_round_in_circles(
    store: LocalDiskStore, root: Path, tmp_path: Path
) -> None:
    store.put(P("job/a"), b"")
    other = tmp_path / "bigger-disk"
    other.mkdir()
    (other / "b").write_bytes(b"")
    (root / "moved").symlink_to(other)
    (root / "job" / "up").symlink_to(root)
    (root / "broken").symlink_to(root / "nowhere")
    os.mkfifo(root / "pipe")
    assert [info.path for info in store.list()] == ["job/a", "moved/b"]


def test_a_name_too_long_for_the_disk_is_a_lasting_error(store: LocalDiskStore) -> None:
    with pytest.raises(StorageError, match="so long a name") as caught:
        store.put(P("x" * 300), b"")
    assert not caught.value.retryable


def test_names_that_are_not_unicode_are_listed(store: LocalDiskStore, root: Path) -> None:
    store.put(P("a"), b"")
    with open(os.fsencode(root) + b"/\xff", "wb"):
        pass
    found = list(store.list())
    assert [info.addressable for info in found] == [True, False]
