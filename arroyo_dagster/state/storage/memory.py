"""Objects in the memory of this process, for tests and experiments."""

from __future__ import annotations

import io
import itertools
import os
import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO
from weakref import WeakValueDictionary

from arroyo_dagster.errors import InputError, NotFoundError
from arroyo_dagster.state.model.clock import Clock, wall_clock
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.storage.names import encode_path, stored_prefix, stored_start
from arroyo_dagster.state.storage.store import (
    DeleteOutcome,
    Listing,
    ObjectInfo,
    check_range,
    check_size,
)
from arroyo_dagster.state.storage.urls import parse_url


class _Root:
    """The objects of all `MemoryStore`s with one name; it exists after the first write."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lock = threading.Lock()
        self.objects: dict[str, tuple[bytes, ObjectInfo]] = {}
        self.keys: list[str] = []  # of all objects, sorted
        self.exists = False


_LOCK = threading.Lock()
_NAMED: dict[str, _Root] = {}
# An unnamed root is freed with its last store: property tests create thousands of them.
_UNNAMED: WeakValueDictionary[str, _Root] = WeakValueDictionary()
_NUMBERS = itertools.count(1)


class MemoryStore:
    """An `ObjectStore` in this process.

    Args:
        name: all stores with this name share their objects, as with `memory://name`; it exists
            after the first write. None: a new, separate store, which exists and is empty.
        clock: returns the microseconds since 1970 with which objects are stamped.
    """

    def __init__(self, name: str | None = None, *, clock: Clock = wall_clock) -> None:
        if name is not None:
            parse_url(f"memory://{name}")
        self._root = _root(name)
        self._clock = clock
        self.url = f"memory://{self._root.name}"

    def __repr__(self) -> str:
        return f"MemoryStore({self._root.name!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return (_reopened, (self._root.name, os.getpid()))

    def read(self, path: StatePath) -> bytes:
        """Read the whole object; see `ObjectStore.read`."""
        data = self._data(path)
        check_size(self.url, path, len(data))
        return data

    def read_range(self, path: StatePath, start: int, length: int) -> bytes:
        """Read a part of the object; see `ObjectStore.read_range`."""
        check_range(path, start, length)
        return self._data(path)[start : start + length]

    def open_input(self, path: StatePath) -> BinaryIO:
        """Open the object for random access; see `ObjectStore.open_input`."""
        return io.BytesIO(self._data(path))

    def put(self, path: StatePath, data: bytes) -> None:
        """Write the object and replace an older one; see `ObjectStore.put`."""
        key = encode_path(path)
        with self._root.lock:
            self._write(key, path, data)

    def create(self, path: StatePath, data: bytes) -> bool:
        """Write the object unless one exists; see `ObjectStore.create`."""
        key = encode_path(path)
        with self._root.lock:
            if key in self._root.objects:
                return False
            self._write(key, path, data)
            return True

    def copy(self, source: StatePath, target: StatePath, *, create: bool = False) -> bool:
        """Copy an object within the store; see `ObjectStore.copy`."""
        key, data = encode_path(target), self._data(source)
        with self._root.lock:
            if create and key in self._root.objects:
                return False
            self._write(key, target, data)
            return True

    def list(self, prefix: str = "", *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """Iterate over all objects below a directory; see `ObjectStore.list`."""
        below, after = stored_prefix(prefix), stored_start(start_after)
        with self._listed() as keys:
            first = max(bisect_left(keys, below), bisect_right(keys, after))
            infos = [self._root.objects[key][1] for key in keys[first : _end(keys, below)]]
        yield from infos

    def list_dir(self, prefix: str = "") -> Listing:
        """List one level; see `ObjectStore.list_dir`."""
        below = stored_prefix(prefix)
        depth = below.count("/") + 1
        objects: list[ObjectInfo] = []
        prefixes: list[StatePath] = []
        with self._listed() as keys:
            index, end = bisect_left(keys, below), _end(keys, below)
            while index < end:
                info = self._root.objects[keys[index]][1]
                slash = keys[index].find("/", len(below))
                if slash < 0:
                    objects.append(info)
                    index += 1
                else:
                    prefixes.append(StatePath("/".join(info.path.split("/")[:depth])))
                    index = _end(keys, keys[index][: slash + 1])
        return Listing(objects=tuple(objects), prefixes=tuple(prefixes))

    def head(self, path: StatePath) -> ObjectInfo | None:
        """Describe the object; see `ObjectStore.head`."""
        entry = self._root.objects.get(encode_path(path))
        return None if entry is None else entry[1]

    def keeps_versions(self) -> bool:
        """Whether replaced or deleted objects stay as older versions."""
        return False

    def delete_many(self, paths: Iterable[StatePath]) -> DeleteOutcome:
        """Delete objects; see `ObjectStore.delete_many`."""
        keys = {path: encode_path(path) for path in paths}
        with self._root.lock:
            for key in keys.values():
                if self._root.objects.pop(key, None) is not None:
                    del self._root.keys[bisect_left(self._root.keys, key)]
        return DeleteOutcome(deleted=tuple(keys))

    def _data(self, path: StatePath) -> bytes:
        entry = self._root.objects.get(encode_path(path))
        if entry is None:
            raise NotFoundError("there is no such object", url=self.url, path=path)
        return entry[0]

    def _write(self, key: str, path: StatePath, data: bytes) -> None:
        info = ObjectInfo(
            path=StatePath(path),
            size_bytes=len(data),
            modified_micros=self._clock(),
            etag=f"v{next(_NUMBERS)}",
        )
        if key not in self._root.objects:
            insort(self._root.keys, key)
        self._root.objects[key] = (bytes(data), info)
        self._root.exists = True

    @contextmanager
    def _listed(self) -> Iterator[Sequence[str]]:
        """Yield the sorted keys of all objects, under the lock."""
        with self._root.lock:
            if not self._root.exists:
                raise NotFoundError(
                    "nothing was ever written to this memory store",
                    url=self.url,
                    next_step="check its name, and that this is the process that wrote to it",
                )
            yield self._root.keys


def _end(keys: Sequence[str], below: str) -> int:
    """Return the end index of the keys that begin with `below`, which ends in `/` or is empty."""
    return bisect_left(keys, f"{below[:-1]}0") if below else len(keys)  # "0" comes next to "/"


def _root(name: str | None) -> _Root:
    with _LOCK:
        if name is not None and name not in _UNNAMED:
            return _NAMED.setdefault(name, _Root(name))
        if name is not None:
            return _UNNAMED[name]
        fresh = _Root(f"unnamed-{next(_NUMBERS)}")
        fresh.exists = True
        _UNNAMED[fresh.name] = fresh
        return fresh


def _reopened(name: str, process_id: int) -> MemoryStore:
    if os.getpid() != process_id:
        raise InputError(
            "a memory store cannot be used from another process than its own",
            url=f"memory://{name}",
            next_step="use a file:// URL if Spark or another process has to read the objects",
        )
    return MemoryStore(name)
