"""Local disk where it differs from other stores: staging, directories, links, broken disks."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from arroyo_dagster.errors import InputError, StorageError
from arroyo_dagster.state import StatePath
from arroyo_dagster.state.storage.failures import delete_all, delete_step, lasts
from tests.stores import LocalDiskStore

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


def test_staging_leftovers_are_never_listed(store: LocalDiskStore, root: Path) -> None:
    store.put(P("a/b"), b"1")
    (root / "a" / "b#1").write_bytes(b"half")
    (root / "a" / "c#99123").write_bytes(b"half")
    assert [info.path for info in store.list()] == ["a/b"]
    assert [info.path for info in store.list_dir("a").objects] == ["a/b"]


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
    expected = "free some space" if code == errno.ENOSPC else "try again"
    assert expected in (caught.value.next_step or "")
    assert isinstance(caught.value.__cause__, OSError)
    assert store.read(P("a")) == b"old"
    assert os.listdir(root) == ["a"]


def test_a_crash_between_write_and_rename_leaves_only_staging(
    store: LocalDiskStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(P("a"), b"old")

    def die(*_: object, **__: object) -> None:
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


def test_a_directory_removed_while_writing_is_made_again(
    store: LocalDiskStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(P("c"), b"")
    make = os.mkdir
    calls = []

    def make_then_remove(name: str, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        make(name, mode, dir_fd=dir_fd)
        calls.append(name)
        if len(calls) == 1:
            os.rmdir(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "mkdir", make_then_remove)
    store.put(P("a/b"), b"1")
    assert store.read(P("a/b")) == b"1"
    assert len(calls) == 2


def test_what_may_not_be_read_is_never_silently_left_out(
    store: LocalDiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(P("a/b"), b"")
    monkeypatch.setattr(os, "scandir", failing(errno.EACCES))
    for verb in (lambda: list(store.list()), lambda: store.list_dir("a")):
        with pytest.raises(StorageError, match="permission denied") as caught:
            verb()
        assert not caught.value.retryable


@needs_user
def test_a_directory_that_is_not_writable_is_said_so(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match="permission denied") as caught:
        LocalDiskStore(str(tmp_path)).put(P("a"), b"")
    tmp_path.chmod(0o700)
    assert not caught.value.retryable


# ---- symbolic links below the root ---------------------------------------------------------------


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A user's directory outside of the root, with objects of our names in it."""
    found = tmp_path / "elsewhere"
    (found / "deep").mkdir(parents=True)
    for name in ("a", "table-t-000", "deep/table-t-000"):
        (found / name).write_bytes(b"the user's")
    return found


def users(elsewhere: Path) -> dict[str, bytes]:
    found = (path for path in elsewhere.rglob("*") if path.is_file())
    return {str(path.relative_to(elsewhere)): path.read_bytes() for path in found}


def test_link_is_listed_and_not_followed(
    store: LocalDiskStore, root: Path, elsewhere: Path
) -> None:
    store.put(P("job/a"), b"")
    (root / "moved").symlink_to(elsewhere)
    (root / "job" / "up").symlink_to(root)
    (root / "job" / "b").symlink_to(elsewhere / "a")
    (root / "job" / "x#12").symlink_to(elsewhere / "a")
    (root / "broken").symlink_to(root / "nowhere")
    os.mkfifo(root / "pipe")
    found = {str(info.path): (info.is_link, info.addressable) for info in store.list()}
    link = (True, False)
    assert found == {
        "broken": link,
        "job/a": (False, True),
        "job/b": link,
        "job/up": link,
        "job/x#12": link,
        "moved": link,
    }
    assert list(found) == sorted(found)
    level = store.list_dir()
    assert [info.path for info in level.objects] == ["broken", "moved"]
    assert level.prefixes == ("job",)
    assert all(info.size_bytes == 0 for info in store.list())
    assert [info.path for info in store.list(start_after="job/b")] == [
        "job/up",
        "job/x#12",
        "moved",
    ]


def test_nothing_is_written_listed_or_deleted_through_a_link(
    store: LocalDiskStore, root: Path, elsewhere: Path
) -> None:
    store.put(P("job/a"), b"")
    (root / "job" / "operator-evil").symlink_to(elsewhere)
    (root / "job" / "linked").symlink_to(elsewhere / "a")
    before = users(elsewhere)
    evil, deep = P("job/operator-evil/table-t-000"), P("job/operator-evil/deep/table-t-000")
    fresh, linked = P("job/operator-evil/deep/new/b"), P("job/linked")
    for verb in (store.put, store.create):
        for path in (evil, deep, fresh, linked):
            with pytest.raises(InputError, match="symbolic link") as caught:
                verb(path, b"ours")
            assert caught.value.facts["path"] in ("job/operator-evil", "job/linked")
    for list_it in (lambda p: list(store.list(p)), store.list_dir):
        for prefix in ("job/operator-evil", "job/operator-evil/deep"):
            with pytest.raises(InputError, match="symbolic link"):
                list_it(prefix)
    outcome = store.delete_many([evil, P("job/a"), deep, linked, P("job/operator-evil")])
    assert outcome.deleted == ("job/a",)
    assert set(outcome.failed) == {evil, deep, linked, "job/operator-evil"}
    assert "job/operator-evil" in outcome.failed[deep]
    assert all("symbolic link" in reason and lasts(reason) for reason in outcome.failed.values())
    assert users(elsewhere) == before
    assert (root / "job" / "linked").is_symlink()
    assert (root / "job" / "operator-evil").is_symlink()
    assert store.read(evil) == b"the user's", "reading by name follows links"


@pytest.mark.parametrize("before", ["stat", "unlink"])
def test_a_directory_exchanged_for_a_link_before_a_delete_is_not_followed(
    store: LocalDiskStore, root: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    names = [P(f"job/operator-o/{name}") for name in ("a", "table-t-000")]
    for path in names:
        store.put(path, b"ours")
    real, kept, calls = getattr(os, before), users(elsewhere), []

    def exchange_first(*given: object, **options: object) -> object:
        calls.append(given)
        if len(calls) == 1:
            (root / "job" / "operator-o").rename(root / "job" / "away")
            (root / "job" / "operator-o").symlink_to(elsewhere)
        return real(*given, **options)

    monkeypatch.setattr(os, before, exchange_first)
    store.delete_many(names)
    monkeypatch.undo()
    assert users(elsewhere) == kept
    later = store.delete_many(names)
    assert set(later.failed) == set(names)
    assert users(elsewhere) == kept


def test_a_directory_exchanged_for_a_link_while_it_is_listed_is_not_followed(
    store: LocalDiskStore, root: Path, elsewhere: Path
) -> None:
    for name in ("a/1", "b/table-t-000", "c/1"):
        store.put(P(name), b"")
    found = store.list()
    first = next(found)
    (root / "b").rename(root / "away")
    (root / "b").symlink_to(elsewhere)
    rest = list(found)
    assert [(info.path, info.is_link) for info in (first, *rest)] == [
        *(("a/1", False), ("b", True), ("c/1", False))
    ]


def test_denied_deletion_names_its_permission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalDiskStore(str(tmp_path))
    store.put(P("job/a"), b"1")

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.unlink", denied)
    with pytest.raises(StorageError) as error:
        delete_all(store, [P("job/a")])
    assert f"write permission on the directory {tmp_path}/job" in (error.value.next_step or "")
    assert "permission denied" in str(error.value)


@pytest.mark.parametrize(
    ("url", "right"),
    [
        ("s3://bucket/checkpoints", "s3:DeleteObject"),
        ("s3::http://localhost:9000/bucket/checkpoints", "s3:DeleteObject"),
        ("gs://bucket/checkpoints", "storage.objects.delete"),
        ("abfss://box@account.dfs.core.windows.net/checkpoints", "Storage Blob Data Contributor"),
    ],
)
def test_a_denied_deletion_names_the_permission_of_its_store(url: str, right: str) -> None:
    denied = "permission denied (403 AccessDenied: Access Denied)"
    assert right in delete_step(denied, url, P("job/a"))
    assert right not in delete_step("the store is throttling us (503)", url, P("job/a"))
