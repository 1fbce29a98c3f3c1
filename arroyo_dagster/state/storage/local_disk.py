"""Objects as files below a directory on local disk, as Arroyo's workers write them."""

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
from typing import Any, BinaryIO

from arroyo_dagster.errors import InputError, NotFoundError, StorageError
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.storage.directories import (
    Directories,
    Synced,
    is_link,
    link_refused,
    open_directory,
    sync_directory,
)
from arroyo_dagster.state.storage.failures import explained, translated
from arroyo_dagster.state.storage.names import (
    LinkName,
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

    Only the first write creates the root, with its parents. A write creates `name#digits` beside
    its target, syncs it, then renames it (put) or hard-links it (create). Then it syncs the
    directory, and the parents of new directories. Remains of a crash are never listed. Deleting
    objects keeps directories.

    The root and its parents may be symbolic links. A link below the root is an object that cannot
    be addressed: it is listed with size 0, and nothing behind it is listed, written or deleted,
    even if it replaces a directory during the operation. Reading an object by its path follows
    links.

    Args:
        url: a URL on local disk.
        sync: False omits every sync, so that a power failure may lose written objects.

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
        self._synced: Synced | None = set() if sync else None
        self.url = str(self._parsed)
        if os.path.exists(self._root) and not os.path.isdir(self._root):
            raise InputError(
                "the URL names a file, not a directory",
                url=self.url,
                next_step="give the directory that holds the checkpoints",
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_synced": None if self._synced is None else set()}

    def __repr__(self) -> str:
        return f"LocalDiskStore({self.url!r})"

    def read(self, path: StatePath) -> bytes:
        """Read the whole object; see `ObjectStore.read`."""
        with self.open_input(path) as file, translated(self.url, path):
            check_size(self.url, path, os.fstat(file.fileno()).st_size)
            return file.read()

    def read_range(self, path: StatePath, start: int, length: int) -> bytes:
        """Read a part of the object; see `ObjectStore.read_range`."""
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
        """Write the object and replace an older one; see `ObjectStore.put`.

        Raises:
            InputError: the path is, or leads through, a symbolic link below the root.
        """
        with translated(self.url, path), self._staged(path, data) as (parent, staged, name):
            self._replace(parent, staged, name, path)

    def create(self, path: StatePath, data: bytes) -> bool:
        """Write the object unless one exists; see `ObjectStore.create`.

        Raises:
            InputError: the path is, or leads through, a symbolic link below the root.
            StorageError: not retryable if the file system has no hard links.
        """
        with translated(self.url, path):
            if self._holds(path):
                return False
            with self._staged(path, data) as (parent, staged, name):
                return self._link(parent, staged, name, path)

    def copy(self, source: StatePath, target: StatePath, *, create: bool = False) -> bool:
        """Copy an object within the store; see `ObjectStore.copy`.

        Differs: creates no hard link, because both names would share one modification time.

        Raises:
            InputError: the target is, or leads through, a symbolic link below the root.
        """
        with self.open_input(source) as original, translated(self.url, target):
            if create and self._holds(target):
                return False
            with self._staged(target, original) as (parent, staged, name):
                _keep_mode(staged, original.fileno(), parent)
                return (self._link if create else self._replace)(parent, staged, name, target)

    def list(self, prefix: str = "", *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """Iterate over all objects below a directory; see `ObjectStore.list`.

        Raises:
            InputError: `prefix` is, or leads through, a symbolic link below the root.
        """
        below, after = stored_prefix(prefix), stored_start(start_after)
        with self._listed(below) as handle:
            if handle is not None:
                yield from self._walk(handle, below, after)

    def list_dir(self, prefix: str = "") -> Listing:
        """List one level; see `ObjectStore.list_dir`. Empty directories are included.

        Raises:
            InputError: as in `list`.
        """
        below = stored_prefix(prefix)
        objects: list[ObjectInfo] = []
        prefixes: list[StatePath] = []
        with self._listed(below) as handle:
            for name, entry in self._entries(handle, below) if handle is not None else ():
                if name.endswith("/"):
                    prefixes.append(listed_path(below + name[:-1]))
                else:
                    objects.extend(self._described(below + name, entry))
        return Listing(objects=tuple(objects), prefixes=tuple(prefixes))

    def head(self, path: StatePath) -> ObjectInfo | None:
        """Describe the object; see `ObjectStore.head`."""
        with translated(self.url, path):
            try:
                info = os.stat(self._file(path))
            except (FileNotFoundError, NotADirectoryError):
                return None
        return info_of_file(StatePath(path), info) if stat.S_ISREG(info.st_mode) else None

    def delete_many(self, paths: Iterable[StatePath]) -> DeleteOutcome:
        """Delete objects; see `ObjectStore.delete_many`.

        Symbolic links, and paths through one below the root, are never deleted; they are in
        `failed`. Only files are objects; any other entry counts as missing and stays. Nothing is
        synced: an object that a power failure restores is deleted again by the caller's next run.
        """
        targets = {path: encode_path(path) for path in paths}
        with Directories(self._root) as directories:
            problems = {path: delete_error(directories, stored) for path, stored in targets.items()}
        return DeleteOutcome(
            deleted=tuple(path for path, problem in problems.items() if problem is None),
            failed={path: problem for path, problem in problems.items() if problem is not None},
        )

    def prune(self, prefix: StatePath) -> int:
        """Delete the empty directories below `prefix`, except itself, and return their number."""
        with Directories(self._root) as directories:
            try:
                return _prune(directories.open(encode_path(prefix)))
            except (FileNotFoundError, NotADirectoryError, InputError):
                return 0

    def _file(self, path: str) -> str:
        return os.path.join(self._root, encode_path(path))

    def _holds(self, path: StatePath) -> bool:
        """Return whether the object exists; a link is no object."""
        folder, _, name = encode_path(path).rpartition("/")
        with Directories(self._root) as directories:
            try:
                parent = directories.open(folder)
                info = os.stat(name, dir_fd=parent, follow_symlinks=False)
            except (FileNotFoundError, NotADirectoryError):
                return False
        return stat.S_ISREG(info.st_mode)

    def _sync(self, directory: int) -> None:
        if self._synced is not None:
            sync_directory(directory)

    @contextlib.contextmanager
    def _staged(self, path: StatePath, data: bytes | BinaryIO) -> Iterator[tuple[int, str, str]]:
        """Write `data` to a new file beside its target, creating directories as needed.

        Yields:
            The handle of their directory, the name of the new file, which is deleted afterwards,
            and the name of the target.
        """
        folder, _, name = encode_path(path).rpartition("/")
        staged = f"{name}#{os.getpid()}{next(_STAGED)}{secrets.randbelow(10**9):09}"
        with Directories(self._root, self._synced) as directories:
            parent, file = _opened(directories, folder, staged)
            try:
                with file:
                    if isinstance(data, (bytes, bytearray, memoryview)):
                        file.write(data)
                    else:
                        shutil.copyfileobj(data, file, _COPIED_BYTES)
                    file.flush()
                    if self._synced is not None:
                        os.fsync(file.fileno())
                yield parent, staged, name
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(staged, dir_fd=parent)

    def _replace(self, parent: int, staged: str, name: str, path: str) -> bool:
        if is_link(name, parent):
            raise link_refused(path)
        _keep_mode(staged, name, parent)
        os.replace(staged, name, src_dir_fd=parent, dst_dir_fd=parent)
        self._sync(parent)
        return True

    def _link(self, parent: int, staged: str, name: str, path: str) -> bool:
        try:
            os.link(staged, name, src_dir_fd=parent, dst_dir_fd=parent)
        except FileExistsError:
            mode = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
            if stat.S_ISLNK(mode):
                raise link_refused(path) from None
            if stat.S_ISDIR(mode):
                raise IsADirectoryError(errno.EISDIR, "directory", path) from None
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
        self._sync(parent)
        return True

    # ---- listing ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _listed(self, below: str) -> Iterator[int | None]:
        """Yield the handle of a directory to list; None if it does not exist."""
        with Directories(self._root) as directories:
            handle: int | None = None
            with translated(self.url, below or None):
                try:
                    handle = directories.open(below.rstrip("/"))
                except (FileNotFoundError, NotADirectoryError) as error:
                    if not os.path.isdir(self._root):
                        raise NotFoundError(
                            "the root directory does not exist",
                            url=self.url,
                            next_step="check the URL: nothing was ever written below it",
                        ) from error
            yield handle

    def _walk(self, handle: int, below: str, after: str) -> Iterator[ObjectInfo]:
        for name, entry in self._entries(handle, below):
            stored = below + name
            if not name.endswith("/"):
                if stored > after:
                    yield from self._described(stored, entry)
            elif stored > after or after.startswith(stored):
                yield from self._walk_into(name[:-1], handle, stored, after)

    def _walk_into(self, name: str, parent: int, below: str, after: str) -> Iterator[ObjectInfo]:
        try:
            with translated(self.url, below):
                handle = open_directory(name, parent, below[:-1])
        except NotFoundError:
            return  # it was deleted after it was listed
        except InputError:
            yield _link_info(below[:-1], None)  # a link replaced it after it was listed
            return
        try:
            yield from self._walk(handle, below, after)
        finally:
            os.close(handle)

    def _entries(self, handle: int, below: str) -> Sequence[tuple[str, os.DirEntry[str]]]:
        """Return the entries of a directory, directories with a `/`, in the order of full paths."""
        with translated(self.url, below or None), os.scandir(handle) as entries:
            named = ((_entry_name(entry), entry) for entry in entries)
            return sorted(((n, e) for n, e in named if n), key=operator.itemgetter(0))

    def _described(self, stored: str, entry: os.DirEntry[str]) -> tuple[ObjectInfo, ...]:
        """Describe one file; empty if it was deleted after it was listed."""
        with translated(self.url, stored):
            try:
                info = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                return ()
            if stat.S_ISLNK(info.st_mode):
                return (_link_info(stored, info.st_mtime_ns // 1000),)
            return (info_of_file(listed_path(stored), info),)


def remove_empty_directories(store: ObjectStore, prefix: StatePath) -> int:
    """Delete the empty directories below `prefix`, which only local disk has.

    A writer that finds its directory deleted creates it again, as Arroyo's gc expects.

    Returns:
        The number of deleted directories.
    """
    disk = local_disk(store)
    return 0 if disk is None else disk.prune(prefix)


def local_disk(store: ObjectStore) -> LocalDiskStore | None:
    """Return the store on local disk behind wrappers; None if it is another."""
    inner: object = store
    while not isinstance(inner, LocalDiskStore) and inner is not None:
        inner = getattr(inner, "inner", None)
    return inner


def info_of_file(path: StatePath, found: os.stat_result) -> ObjectInfo:
    micros = found.st_mtime_ns // 1000
    return ObjectInfo(
        path=path,
        size_bytes=found.st_size,
        modified_micros=micros,
        etag=f"{found.st_ino:x}-{micros:x}-{found.st_size:x}",
        addressable=not isinstance(path, StoredName),
    )


def _link_info(stored: str, modified_micros: int | None) -> ObjectInfo:
    return ObjectInfo(
        path=LinkName(stored),
        size_bytes=0,
        modified_micros=modified_micros,
        etag=None,
        addressable=False,
    )


def _entry_name(entry: os.DirEntry[str]) -> str | None:
    if entry.is_symlink():
        return entry.name
    if entry.is_dir(follow_symlinks=False):
        return f"{entry.name}/"
    return entry.name if entry.is_file() and not is_staging(entry.name) else None


def _opened(directories: Directories, folder: str, staged: str) -> tuple[int, BinaryIO]:
    # Arroyo's gc deletes empty directories, possibly between their creation and the open.
    for _ in range(5):
        try:
            parent = directories.open(folder, create=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            return parent, os.fdopen(os.open(staged, flags, 0o666, dir_fd=parent), "wb")
        except FileNotFoundError:
            directories.close()
    raise OSError(errno.EIO, "its directory is deleted as soon as it is created", staged)


def _keep_mode(staged: str, original: str | int, parent: int) -> None:
    """Give a new file the mode of the one that it replaces or copies, if there is one.

    Args:
        original: a name in the directory `parent`, or an open file.
    """
    with contextlib.suppress(FileNotFoundError):
        info = (
            os.fstat(original)
            if isinstance(original, int)
            else os.stat(original, dir_fd=parent, follow_symlinks=False)
        )
        os.chmod(staged, stat.S_IMODE(info.st_mode), dir_fd=parent)


def delete_error(directories: Directories, stored: str) -> str | None:
    folder, _, name = stored.rpartition("/")
    try:
        parent = directories.open(folder)
        info = os.stat(name, dir_fd=parent, follow_symlinks=False)
        if stat.S_ISLNK(info.st_mode):
            raise link_refused(stored)
        if stat.S_ISREG(info.st_mode):
            os.unlink(name, dir_fd=parent)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except InputError as error:
        return f"{error.message}: {error.facts['path']}"
    except OSError as error:
        return explained(error)[0]
    return None


def _prune(handle: int) -> int:
    removed = 0
    with os.scandir(handle) as entries:
        names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    for name in names:
        # A directory with a new entry stays: only an empty one can be deleted.
        with contextlib.suppress(OSError, InputError):
            inner = open_directory(name, handle, name)
            try:
                removed += _prune(inner)
            finally:
                os.close(inner)
            os.rmdir(name, dir_fd=handle)
            removed += 1
    return removed
