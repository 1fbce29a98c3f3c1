"""Objects as files below a directory of local disk, as Arroyo's own workers write them."""

from __future__ import annotations

import contextlib
import errno
import itertools
import operator
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from typing import BinaryIO

from arroyo_dagster.errors import InputError, NotFoundError, StorageError
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.storage.failures import explained, translated
from arroyo_dagster.state.storage.names import (
    StoredName,
    encode_path,
    is_staging,
    listed_path,
    stored_prefix,
    stored_start,
)
from arroyo_dagster.state.storage.store import (
    DeleteOutcome,
    Listing,
    ObjectInfo,
    ObjectStore,
    check_range,
    check_size,
)
from arroyo_dagster.state.storage.urls import CheckpointUrl, parse_url

_STAGED = itertools.count()
_COPIED_BYTES = 1 << 20
_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS}


class LocalDiskStore:
    """An `ObjectStore` on local disk.

    The root is created, with its parents, by the first write and by nothing else. A write goes to
    `name#digits` beside its target, is synced to disk, then renamed (put) or hard-linked (create);
    what a crash leaves of it is never listed. Deleting leaves directories.

    Args:
        url: a URL on local disk.
        sync: False leaves the sync out, so that a power cut may lose what was written.

    Raises:
        InputError: the URL is not on local disk, or names a file.

    Source: object_store `LocalFileSystem`, as crates/arroyo-storage/src/lib.rs uses it
        (arroyo-state.md 1.3).
    Differs: Arroyo does not sync.
    """

    def __init__(self, url: str | CheckpointUrl, *, sync: bool = True) -> None:
        self._parsed = parse_url(url) if isinstance(url, str) else url
        if self._parsed.backend != "file":
            raise InputError("not a URL on local disk", url=str(self._parsed))
        self._root = self._parsed.directory
        self._sync = sync
        self.url = str(self._parsed)
        if os.path.exists(self._root) and not os.path.isdir(self._root):
            raise InputError(
                "the URL names a file, not a directory",
                url=self.url,
                next_step="give the directory that holds the checkpoints",
            )

    def __repr__(self) -> str:
        return f"LocalDiskStore({self.url!r})"

    def read(self, path: StatePath) -> bytes:
        """Give the whole object; see `ObjectStore.read`."""
        with self.open_input(path) as file, translated(self.url, path):
            check_size(self.url, path, os.fstat(file.fileno()).st_size)
            return file.read()

    def read_range(self, path: StatePath, start: int, length: int) -> bytes:
        """Give a part of the object; see `ObjectStore.read_range`."""
        check_range(path, start, length)
        with self.open_input(path) as file, translated(self.url, path):
            left = os.fstat(file.fileno()).st_size - start
            file.seek(start)
            return file.read(max(0, min(length, left)))

    def open_input(self, path: StatePath) -> BinaryIO:
        """Open the object for random access; see `ObjectStore.open_input`."""
        target = self._file(path)
        with translated(self.url, path):
            try:
                return open(target, "rb")
            except (NotADirectoryError, IsADirectoryError) as error:
                raise NotFoundError("there is no such object", url=self.url, path=path) from error

    def put(self, path: StatePath, data: bytes) -> None:
        """Write the object over an older one; see `ObjectStore.put`."""
        target = self._file(path)
        with translated(self.url, path):
            staged = self._stage(target, data)
            try:
                os.replace(staged, target)
            except BaseException:
                _unlink_quietly(staged)
                raise

    def create(self, path: StatePath, data: bytes) -> bool:
        """Write the object unless there is one; see `ObjectStore.create`.

        Raises:
            StorageError: not retryable if the file system has no hard links.
        """
        target = self._file(path)
        with translated(self.url, path):
            if _is_object(target):
                return False
            staged = self._stage(target, data)
            try:
                return self._link(staged, target, path)
            finally:
                _unlink_quietly(staged)

    def copy(self, source: StatePath, target: StatePath, *, create: bool = False) -> bool:
        """Copy an object within the store; see `ObjectStore.copy`.

        Differs: no hard link, for both names would share one modification time.
        """
        path = self._file(target)
        with self.open_input(source) as original, translated(self.url, target):
            if create and _is_object(path):
                return False
            staged = self._stage(path, original)
            try:
                if create:
                    return self._link(staged, path, target)
                os.replace(staged, path)
                return True
            finally:
                _unlink_quietly(staged)

    def list(self, prefix: str = "", *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """Go through all objects below a directory; see `ObjectStore.list`."""
        below, after = stored_prefix(prefix), stored_start(start_after)
        yield from self._walk(below, after)

    def list_dir(self, prefix: str = "") -> Listing:
        """Give one level; see `ObjectStore.list_dir`. Empty directories are shown."""
        below = stored_prefix(prefix)
        objects: list[ObjectInfo] = []
        prefixes: list[StatePath] = []
        for name, entry in self._entries(below):
            if name.endswith("/"):
                prefixes.append(listed_path(below + name[:-1]))
            else:
                objects.extend(self._described(below + name, entry))
        return Listing(objects=tuple(objects), prefixes=tuple(prefixes))

    def head(self, path: StatePath) -> ObjectInfo | None:
        """Describe the object; see `ObjectStore.head`."""
        with translated(self.url, path):
            try:
                found = os.stat(self._file(path))
            except (FileNotFoundError, NotADirectoryError):
                return None
        return _info(StatePath(path), found) if stat.S_ISREG(found.st_mode) else None

    def delete_many(self, paths: Iterable[StatePath]) -> DeleteOutcome:
        """Delete objects; see `ObjectStore.delete_many`."""
        targets = {path: self._file(path) for path in paths}
        deleted: list[StatePath] = []
        failed: dict[StatePath, str] = {}
        for path, target in targets.items():
            try:
                os.unlink(target)
            except (FileNotFoundError, NotADirectoryError):
                deleted.append(path)
            except OSError as error:
                if os.path.isdir(target):
                    deleted.append(path)
                else:
                    failed[path] = explained(error)[0]
            else:
                deleted.append(path)
        return DeleteOutcome(deleted=tuple(deleted), failed=failed)

    def prune(self, prefix: StatePath) -> int:
        """Remove the directories below `prefix`, not itself, that hold nothing; give how many."""
        top, removed = self._file(prefix), 0
        for folder, _, _ in os.walk(top, topdown=False):
            if folder != top:
                # Whoever writes into it meanwhile keeps it: only an empty one can be removed.
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
                    removed += 1
        return removed

    def _file(self, path: str) -> str:
        return os.path.join(self._root, encode_path(path))

    def _stage(self, target: str, data: bytes | BinaryIO) -> str:
        """Write `data` to a fresh file beside `target`, creating directories as needed."""
        digits = f"{os.getpid()}{next(_STAGED)}{secrets.randbelow(10**9):09}"
        staged = f"{target}#{digits}"
        file = _opened(staged)
        try:
            with file:
                if isinstance(data, (bytes, bytearray, memoryview)):
                    file.write(data)
                else:
                    shutil.copyfileobj(data, file, _COPIED_BYTES)
                file.flush()
                if self._sync:
                    os.fsync(file.fileno())
        except BaseException:
            _unlink_quietly(staged)
            raise
        return staged

    def _link(self, staged: str, target: str, path: str) -> bool:
        try:
            os.link(staged, target)
        except FileExistsError:
            if os.path.isdir(target):
                raise IsADirectoryError(errno.EISDIR, "directory", target) from None
            return False
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            raise StorageError(
                "this file system has no hard links, so nothing can be created atomically on it",
                retryable=False,
                url=self.url,
                path=path,
                next_step="keep checkpoints on a file system with hard links, or on S3",
            ) from error
        return True

    def _walk(self, below: str, after: str) -> Iterator[ObjectInfo]:
        for name, entry in self._entries(below):
            stored = below + name
            if not name.endswith("/"):
                if stored > after:
                    yield from self._described(stored, entry)
            elif stored > after or after.startswith(stored):
                yield from self._walk(stored, after)

    def _entries(self, below: str) -> Sequence[tuple[str, os.DirEntry[str]]]:
        """Give what a directory holds, directories with a `/`: in the order of whole paths."""
        with translated(self.url, below or None):
            try:
                with os.scandir(os.path.join(self._root, below)) as found:
                    named = ((self._entry_name(entry), entry) for entry in found)
                    return sorted(((n, e) for n, e in named if n), key=operator.itemgetter(0))
            except (FileNotFoundError, NotADirectoryError) as error:
                if os.path.isdir(self._root):
                    return []
                raise NotFoundError(
                    "the root directory does not exist",
                    url=self.url,
                    next_step="check the URL: nothing was ever written below it",
                ) from error

    @staticmethod
    def _entry_name(entry: os.DirEntry[str]) -> str | None:
        if entry.is_dir():
            return None if _is_loop(entry) else f"{entry.name}/"
        return entry.name if entry.is_file() and not is_staging(entry.name) else None

    def _described(self, stored: str, entry: os.DirEntry[str]) -> tuple[ObjectInfo, ...]:
        """Describe one file; nothing for one that vanished since it was listed."""
        with translated(self.url, stored):
            try:
                return (_info(listed_path(stored), entry.stat()),)
            except FileNotFoundError:
                return ()


def remove_empty_directories(store: ObjectStore, prefix: StatePath) -> int:
    """Remove the directories below `prefix` that hold nothing; only local disk has such.

    A writer that meets one which has just gone makes it again, as Arroyo's gc expects of it.

    Returns:
        How many.
    """
    while not isinstance(store, LocalDiskStore):
        inner = getattr(store, "inner", None)
        if inner is None:
            return 0
        store = inner
    return store.prune(prefix)


def _info(path: StatePath, found: os.stat_result) -> ObjectInfo:
    micros = found.st_mtime_ns // 1000
    return ObjectInfo(
        path=path,
        size_bytes=found.st_size,
        modified_micros=micros,
        etag=f"{found.st_ino:x}-{micros:x}-{found.st_size:x}",
        addressable=not isinstance(path, StoredName),
    )


def _opened(staged: str) -> BinaryIO:
    # Arroyo's gc removes empty directories, perhaps between makedirs and open.
    for _ in range(5):
        try:
            return open(staged, "xb")
        except FileNotFoundError:
            with contextlib.suppress(FileNotFoundError):
                os.makedirs(os.path.dirname(staged), exist_ok=True)
    raise OSError(errno.EIO, "its directory vanishes as soon as it is made", staged)


def _is_object(target: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(target).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _is_loop(entry: os.DirEntry[str]) -> bool:
    """Whether a symbolic link leads to a directory it lies in."""
    if not entry.is_symlink():
        return False
    parent = os.path.realpath(os.path.dirname(entry.path))
    return f"{parent}/".startswith(f"{os.path.realpath(entry.path).rstrip('/')}/")


def _unlink_quietly(staged: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(staged)
