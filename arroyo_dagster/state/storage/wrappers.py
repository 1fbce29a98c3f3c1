"""Wrappers of a store: write-protected, with deletes apart, overlaid, counting."""

from __future__ import annotations

import io
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, BinaryIO, TypeVar

from arroyo_dagster.errors import InputError, NotFoundError
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.storage.store import (
    DeleteOutcome,
    Listing,
    ObjectInfo,
    ObjectStore,
    check_range,
    open_by_ranges,
)

T = TypeVar("T")

MUTATING = frozenset({"put", "create", "copy", "delete_many"})


class Wrapper:
    """All methods of `store`, each passed through `_call`.

    Args:
        store: the store to wrap; available as `inner`.
    """

    def __init__(self, store: ObjectStore) -> None:
        self.inner = store
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """The URL of the wrapped store."""
        return self.inner.url

    def read(self, path: StatePath) -> bytes:
        """Read the whole object; see `ObjectStore.read`."""
        return self._call("read", path, lambda: self.inner.read(path))

    def read_range(self, path: StatePath, start: int, length: int) -> bytes:
        """Read a part of the object; see `ObjectStore.read_range`."""
        return self._call("read_range", path, lambda: self.inner.read_range(path, start, length))

    def open_input(self, path: StatePath) -> BinaryIO:
        """Open the object for random access; each of its reads is a `read_range` of this store."""
        info = self.head(path)
        if info is None:
            raise NotFoundError("there is no such object", url=self.url, path=path)
        return open_by_ranges(self, path, info.size_bytes)

    def put(self, path: StatePath, data: bytes) -> None:
        """Write the object and replace an older one; see `ObjectStore.put`."""
        self._call("put", path, lambda: self.inner.put(path, data), data)

    def create(self, path: StatePath, data: bytes) -> bool:
        """Write the object unless one exists; see `ObjectStore.create`."""
        return self._call("create", path, lambda: self.inner.create(path, data), data)

    def copy(self, source: StatePath, target: StatePath, *, create: bool = False) -> bool:
        """Copy an object within the store; see `ObjectStore.copy`."""
        return self._call("copy", target, lambda: self.inner.copy(source, target, create=create))

    def list(self, prefix: str = "", *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """Iterate over all objects below a directory; see `ObjectStore.list`."""
        yield from self._call(
            "list", prefix, lambda: self.inner.list(prefix, start_after=start_after)
        )

    def list_dir(self, prefix: str = "") -> Listing:
        """List one level; see `ObjectStore.list_dir`."""
        return self._call("list_dir", prefix, lambda: self.inner.list_dir(prefix))

    def head(self, path: StatePath) -> ObjectInfo | None:
        """Describe the object; see `ObjectStore.head`."""
        return self._call("head", path, lambda: self.inner.head(path))

    def delete_many(self, paths: Iterable[StatePath]) -> DeleteOutcome:
        """Delete objects; see `ObjectStore.delete_many`."""
        doomed = tuple(paths)
        first_path = doomed[0] if doomed else ""
        return self._call("delete_many", first_path, lambda: self.inner.delete_many(doomed))

    def _call(self, verb: str, path: str, action: Callable[[], T], data: bytes = b"") -> T:
        return action()


class WriteProtected(Wrapper):
    """A store that refuses every method that changes objects.

    Raises:
        InputError: on put, create, copy and delete_many; nothing was changed.
    """

    def open_input(self, path: StatePath) -> BinaryIO:
        """Open the object for random access, as the wrapped store does."""
        return self.inner.open_input(path)

    def _call(self, verb: str, path: str, action: Callable[[], T], data: bytes = b"") -> T:
        if verb in MUTATING:
            raise InputError(
                f"the store is write-protected, so {verb} was refused",
                url=self.url,
                path=path,
                next_step="a read-only command must not get here; report it",
            )
        return action()


class SeparateDeletes(Wrapper):
    """A store whose deletes go through another client of the same place.

    So only deletes need credentials that may delete; no other request is sent with them.

    Args:
        store: everything but deletes.
        deleting: only its `delete_many` is called.

    Raises:
        InputError: the two are not at the same URL.
    """

    def __init__(self, store: ObjectStore, deleting: ObjectStore) -> None:
        super().__init__(store)
        if store.url != deleting.url:
            raise InputError(
                "the store for deletes is at another URL", url=store.url, found=deleting.url
            )
        self._deleting = deleting
        if hasattr(store, "probes_deleted_by"):  # a remote store, which writes probes
            store.probes_deleted_by = deleting

    def open_input(self, path: StatePath) -> BinaryIO:
        """Open the object for random access, as the wrapped store does."""
        return self.inner.open_input(path)

    def delete_many(self, paths: Iterable[StatePath]) -> DeleteOutcome:
        """Delete objects with the other client; see `ObjectStore.delete_many`."""
        return self._deleting.delete_many(paths)


class Overlaid(Wrapper):
    """A store in which some objects have other bytes; writing is refused.

    Args:
        objects: the bytes of these objects, by path; each of them exists in `store`.
    """

    def __init__(self, store: ObjectStore, objects: Mapping[StatePath, bytes]) -> None:
        super().__init__(WriteProtected(store))
        self._objects = dict(objects)

    def read(self, path: StatePath) -> bytes:
        """Read the whole object; see `ObjectStore.read`."""
        return self._objects[path] if path in self._objects else self.inner.read(path)

    def read_range(self, path: StatePath, start: int, length: int) -> bytes:
        """Read a part of the object; see `ObjectStore.read_range`."""
        if path not in self._objects:
            return self.inner.read_range(path, start, length)
        check_range(path, start, length)
        return self._objects[path][start : start + length]

    def head(self, path: StatePath) -> ObjectInfo | None:
        """Describe the object; see `ObjectStore.head`."""
        info = self.inner.head(path)
        if info is None or path not in self._objects:
            return info
        return replace(info, size_bytes=len(self._objects[path]), etag=None)

    def open_input(self, path: StatePath) -> BinaryIO:
        """Open the object for random access, as the wrapped store does."""
        if path not in self._objects:
            return self.inner.open_input(path)
        return io.BytesIO(self._objects[path])


class Scratch(Overlaid):
    """A readable store whose `put` keeps objects in memory, for this instance only."""

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store, {})

    def put(self, path: StatePath, data: bytes) -> None:
        """Keep the object in memory; see `ObjectStore.put`."""
        self._objects[path] = bytes(data)

    def head(self, path: StatePath) -> ObjectInfo | None:
        """Describe the object; see `ObjectStore.head`."""
        if path not in self._objects:
            return self.inner.head(path)
        return ObjectInfo(
            path=path, size_bytes=len(self._objects[path]), modified_micros=None, etag=None
        )


class Extended(Scratch):
    """A store with further objects, which exist in memory only; writing is refused.

    Args:
        objects: the bytes of these objects, by path; they hide those of `store`.
    """

    def __init__(self, store: ObjectStore, objects: Mapping[StatePath, bytes]) -> None:
        super().__init__(store)
        self._objects = dict(objects)

    def put(self, path: StatePath, data: bytes) -> None:
        """Refuse to write; see `WriteProtected`."""
        self.inner.put(path, data)

    def list(self, prefix: str = "", *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """Iterate over all objects below a directory; see `ObjectStore.list`."""
        below = f"{prefix}/" if prefix else ""
        mine = [self._info(path) for path in self._objects if path.startswith(below)]
        theirs = self.inner.list(prefix, start_after=start_after)
        infos = [*(info for info in theirs if info.path not in self._objects), *mine]
        kept = (info for info in infos if start_after is None or info.path > start_after)
        yield from sorted(kept, key=lambda info: info.path)

    def list_dir(self, prefix: str = "") -> Listing:
        """List one level; see `ObjectStore.list_dir`."""
        below = f"{prefix}/" if prefix else ""
        level = self.inner.list_dir(prefix)
        theirs = [info for info in level.objects if info.path not in self._objects]
        mine = [path for path in self._objects if path.startswith(below)]
        rest = [path[len(below) :] for path in mine]
        directories = {StatePath(below + name.split("/")[0]) for name in rest if "/" in name}
        objects = [
            self._info(path) for path, name in zip(mine, rest, strict=True) if "/" not in name
        ]
        return Listing(
            objects=tuple(sorted((*theirs, *objects), key=lambda info: info.path)),
            prefixes=tuple(sorted({*level.prefixes, *directories})),
        )

    def _info(self, path: StatePath) -> ObjectInfo:
        info = self.head(path)
        assert info is not None
        return info


class Counting(Wrapper):
    """A store that counts its calls, by method.

    Attributes:
        calls: the number of calls of each method, including failed calls.
        bytes_read, bytes_written: the number of bytes of successful calls, by method.
    """

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store)
        self.calls: Counter[str] = Counter()
        self.bytes_read: Counter[str] = Counter()
        self.bytes_written: Counter[str] = Counter()

    def _call(self, verb: str, path: str, action: Callable[[], T], data: bytes = b"") -> T:
        with self._lock:
            self.calls[verb] += 1
        answer = action()
        with self._lock:
            if isinstance(answer, bytes):
                self.bytes_read[verb] += len(answer)
            if data and answer is not False:
                self.bytes_written[verb] += len(data)
        return answer
