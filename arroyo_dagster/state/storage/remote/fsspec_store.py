"""Objects on any remote filesystem that fsspec supports; the only module that imports it."""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, BinaryIO

import fsspec

from arroyo_dagster.errors import InputError, NotFoundError, StorageError
from arroyo_dagster.optional_packages import explain_import
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.sizes import size_limit
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.conditional_create import prove_once
from arroyo_dagster.state.storage.failures import (
    explained,
    no_conditional_create,
    root_missing,
    translated,
    understood,
)
from arroyo_dagster.state.storage.names import (
    StoredName,
    encode_path,
    listed_path,
    stored_prefix,
    stored_start,
)
from arroyo_dagster.state.storage.store import (
    CHUNK_BYTES,
    DeleteOutcome,
    Listing,
    ObjectInfo,
    ObjectStore,
    check_range,
    check_size,
    open_by_ranges,
)

# fsspec's fallback for mode="create" checks for the object and then writes, which is a race.
_CREATES_ATOMICALLY = frozenset({"s3", "gs", "abfs"})
_LOCAL = frozenset({"file", "local"})
_MODIFIED = ("LastModified", "last_modified", "updated", "mtime", "modified", "created")
_ETAG = ("ETag", "etag", "e_tag", "generation", "md5Hash")

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


class FsspecStore:
    """An `ObjectStore` over an fsspec filesystem whose writes replace whole objects.

    The filesystem is opened at its first use, and again after a fork or in another process. A
    pickled store contains its options, including secrets; its `repr` never does.

    Args:
        protocol: fsspec's name of it: s3, gs, abfs…
        root: bucket and encoded key prefix, with which keys begin.
        url: the canonical URL for display.
        options: by the names of `options.py`, or as the filesystem accepts them.
        words: converts the options to those of the filesystem, each time it is opened, so that the
            environment of the opening process applies.

    Raises:
        InputError: it is local disk, where only `LocalDiskStore` meets the contract.
    """

    def __init__(
        self,
        protocol: str,
        root: str,
        *,
        url: str,
        options: Mapping[str, Any] | None = None,
        words: Callable[[Mapping[str, Any]], dict[str, Any]] = dict,
    ) -> None:
        if protocol in _LOCAL:
            raise InputError(
                "fsspec's local files follow symbolic links, so nothing is deleted through them",
                url=url,
                next_step="open the directory as a file:// URL",
            )
        self.url = url
        self._protocol = protocol
        self._root = root.strip("/")
        self._options = dict(options or {})
        self._words = words
        self._opened: tuple[int, Any] | None = None
        self.probes_deleted_by: ObjectStore = self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    @property
    def filesystem(self) -> Any:
        """The fsspec filesystem of this process; it does not survive a fork.

        Raises:
            InputError: the package that supports this kind of store is not installed.
        """
        opened = self._opened
        if opened is not None and opened[0] == os.getpid():
            return opened[1]
        try:
            # Cached listings hide objects of other writers.
            options = {"use_listings_cache": False, **self._words(self._options)}
            filesystem = fsspec.filesystem(self._protocol, **options)
        except ImportError as error:
            raise explain_import(error, url=self.url) or InputError(
                f"a package is missing for {self._protocol} URLs: {error}",
                url=self.url,
                next_step="install it, or let obstore open the URL",
            ) from error
        self._opened = (os.getpid(), filesystem)
        return filesystem

    def read(self, path: StatePath) -> bytes:
        """Read the whole object; see `ObjectStore.read`."""
        most_bytes = size_limit(path).size_bytes
        # One request; if the object is too large it returns one byte more than the limit.
        data = self.read_range(path, 0, most_bytes + 1)
        if len(data) > most_bytes:
            check_size(self.url, path, self._size(path))
        return data

    def read_range(self, path: StatePath, start: int, length: int) -> bytes:
        """Read a part of the object; see `ObjectStore.read_range`."""
        check_range(path, start, length)
        key = self._key(path)
        with translated(self.url, path):
            try:
                if length:
                    return bytes(self.filesystem.cat_file(key, start=start, end=start + length))
            except FileNotFoundError:
                raise
            except Exception as error:
                # Stores refuse a range that begins beyond the end of the object.
                if not self._may_be_probed(error) or start < self._size(path):
                    raise
            self._size(path)
            return b""

    def open_input(self, path: StatePath) -> BinaryIO:
        """Open the object for random access; see `ObjectStore.open_input`."""
        return open_by_ranges(self, path, self._size(path))

    def put(self, path: StatePath, data: bytes) -> None:
        """Write the object and replace an older one; see `ObjectStore.put`."""
        key = self._key(path)
        with translated(self.url, path):
            try:
                self.filesystem.pipe_file(key, bytes(data))
            except FileNotFoundError as error:
                raise root_missing(self.url) from error

    def create(self, path: StatePath, data: bytes) -> bool:
        """Write the object unless one exists; see `ObjectStore.create`.

        Raises:
            InputError: fsspec has no atomic create for this kind of store, or the server ignores
                the condition; nothing was written.
        """
        if self._protocol not in _CREATES_ATOMICALLY:
            raise InputError(
                f"the filesystem {self._protocol!r} has no conditional create",
                url=self.url,
                path=path,
                next_step="use local disk, S3, R2, GCS or Azure for everything that writes",
            )
        prove_once(self, self._options, self._create, path, self.probes_deleted_by)
        return self._create(path, data)

    def _create(self, path: StatePath, data: bytes) -> bool:
        key = self._key(path)
        with translated(self.url, path):
            try:
                self.filesystem.pipe_file(key, bytes(data), mode="create")
            except FileNotFoundError as error:
                raise root_missing(self.url) from error
            except Exception as error:
                if self._means_exists(error):
                    return False
                if understood(error).status == 501:
                    raise no_conditional_create(self.url, path) from error
                raise
            return True

    def copy(self, source: StatePath, target: StatePath, *, create: bool = False) -> bool:
        """Copy an object within the store, on the server if possible; see `ObjectStore.copy`.

        Raises:
            StorageError: not retryable if a large object is to be created: fsspec cannot create an
                object in parts.
        """
        source_key, target_key = self._key(source), self._key(target)
        if create:
            size_bytes = self._size(source)
            if size_bytes <= CHUNK_BYTES:
                return self.create(target, self.read_range(source, 0, size_bytes))
            if self.head(target) is not None:
                return False
            return self._create_multipart(source, target, size_bytes)
        with translated(self.url, source):
            self.filesystem.cp_file(source_key, target_key)
        return True

    def list(self, prefix: str = "", *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """Iterate over all objects below a directory; see `ObjectStore.list`.

        Differs: fsspec returns a whole listing at once, so it is kept in memory.
        """
        below, after = stored_prefix(prefix), stored_start(start_after)
        with translated(self.url, prefix or None):
            infos = self.filesystem.find(f"{self._root}/{below}", detail=True)
        # adlfs returns a list if there is an object in place of the directory.
        infos = infos if isinstance(infos, dict) else {}
        kept = {self._stored(name): info for name, info in infos.items() if _is_file(info)}
        if not kept:
            self._require_root()
        for stored in sorted(kept):
            if stored.startswith(below) and stored > after:
                yield info_of(stored, kept[stored])

    def list_dir(self, prefix: str = "") -> Listing:
        """List one level; see `ObjectStore.list_dir`."""
        below = stored_prefix(prefix)
        with translated(self.url, prefix or None):
            try:
                infos = self.filesystem.ls(f"{self._root}/{below}".rstrip("/"), detail=True)
            except FileNotFoundError:
                infos = []
        named = ((self._stored(info["name"].rstrip("/")), info) for info in infos)
        inside = [(stored, info) for stored, info in named if f"{stored}/" != below]
        # A directory's name sorts with its slash: `a.b/` is before `a/`.
        inside.sort(key=lambda item: item[0] if _is_file(item[1]) else f"{item[0]}/")
        if not inside:
            self._require_root()
        return Listing(
            objects=tuple(info_of(stored, info) for stored, info in inside if _is_file(info)),
            prefixes=tuple(listed_path(stored) for stored, info in inside if not _is_file(info)),
        )

    def head(self, path: StatePath) -> ObjectInfo | None:
        """Describe the object; see `ObjectStore.head`."""
        key = self._key(path)
        with translated(self.url, path):
            try:
                info = self.filesystem.info(key)
            except FileNotFoundError:
                return None
            return info_of(encode_path(path), info) if _is_file(info) else None

    def delete_many(self, paths: Iterable[StatePath]) -> DeleteOutcome:
        """Delete objects concurrently; see `ObjectStore.delete_many`."""
        keys = {path: self._key(path) for path in paths}
        problems = dict(zip(keys, concurrently(self._delete_error, keys.values()), strict=True))
        return DeleteOutcome(
            deleted=tuple(path for path in keys if problems[path] is None),
            failed={path: problem for path, problem in problems.items() if problem is not None},
        )

    def _create_multipart(self, source: StatePath, target: StatePath, size_bytes: int) -> bool:
        raise StorageError(
            f"an object of {size_bytes} bytes cannot be created in parts through fsspec",
            retryable=False,
            url=self.url,
            path=target,
            next_step="open the URL through obstore: remove the option client=fsspec",
        )

    def _delete_error(self, key: str) -> str | None:
        try:
            self.filesystem.rm_file(key)
        except FileNotFoundError:
            return None
        except Exception as error:
            return explained(error)[0]
        return None

    def _key(self, path: str) -> str:
        return f"{self._root}/{encode_path(path)}"

    def _stored(self, name: str) -> str:
        return name.lstrip("/").removeprefix(f"{self._root}/")

    def _may_be_probed(self, error: Exception) -> bool:
        """Return whether a range may have been refused because it begins beyond the end."""
        return True

    def _means_exists(self, error: Exception) -> bool:
        return isinstance(error, FileExistsError)

    def _size(self, path: StatePath) -> int:
        info = self.head(path)
        if info is None:
            raise NotFoundError("there is no such object", url=self.url, path=path)
        return info.size_bytes

    def _require_root(self) -> None:
        """Raise NotFoundError if the root is empty: the URL may be wrong."""
        with translated(self.url):
            if "/" in self._root:
                exists = bool(self.filesystem.find(f"{self._root}/", maxdepth=1, withdirs=True))
            else:
                exists = self.filesystem.exists(self._root)
        if not exists:
            raise root_missing(self.url)


def info_of(stored: str, found: Mapping[str, Any]) -> ObjectInfo:
    """Describe an object from fsspec's facts, whose names depend on the filesystem."""
    path = listed_path(stored)
    etag = next((str(found[name]) for name in _ETAG if found.get(name)), None)
    return ObjectInfo(
        path=path,
        size_bytes=int(found["size"]),
        modified_micros=next((_micros(found[name]) for name in _MODIFIED if found.get(name)), None),
        etag=etag.strip('"') if etag else None,
        addressable=not isinstance(path, StoredName),
    )


def _micros(moment: object) -> int | None:
    if isinstance(moment, str):
        moment = dt.datetime.fromisoformat(moment)
    if isinstance(moment, dt.datetime):
        aware = moment if moment.tzinfo else moment.replace(tzinfo=dt.UTC)
        return (aware - _EPOCH) // dt.timedelta(microseconds=1)
    return int(moment * 1_000_000) if isinstance(moment, (int, float)) else None


def _is_file(found: Mapping[str, Any]) -> bool:
    return found.get("type") != "directory"
