"""The methods of an object store and their guarantees."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import BinaryIO, Protocol, cast, runtime_checkable

from arroyo_dagster.errors import FormatError, InputError, NotFoundError
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.sizes import size_limit
from arroyo_dagster.state.storage.names import LinkName

CHUNK_BYTES = 8 * 2**20
"""The bytes of an object that are in memory at a time when it is read in chunks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """One object, as returned by a listing or `head`.

    Attributes:
        path: the raw path; a `StoredName` if not `addressable`.
        modified_micros: when it was written, by the store's clock, since 1970 in UTC; None if the
            store does not report it. A listing may have fractions of a second that `head` lacks.
        etag: changes whenever the object does; opaque; None if the store does not report it.
        addressable: False for an object whose stored name no raw path encodes to; it can be
            displayed, but every method refuses its path.
    """

    path: StatePath
    size_bytes: int
    modified_micros: int | None
    etag: str | None
    addressable: bool = True

    @property
    def is_link(self) -> bool:
        """Whether it is a symbolic link on local disk: not `addressable`, and never followed."""
        return isinstance(self.path, LinkName)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """One level: the objects in a directory and the directories in it, each in order of name."""

    objects: tuple[ObjectInfo, ...]
    prefixes: tuple[StatePath, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteOutcome:
    """The result of `delete_many` for each path, in the order given.

    Attributes:
        deleted: certainly gone now, whether or not they existed before.
        failed: may still exist, with the reason.
    """

    deleted: tuple[StatePath, ...] = ()
    failed: Mapping[StatePath, str] = field(default_factory=dict)


@runtime_checkable
class ObjectStore(Protocol):
    """Bytes at a path. Synchronous, safe to share between threads, pickled by reopening.

    Paths are raw: the store percent-encodes them. Every method may raise `StorageError` (the store
    failed; the outcome of a write is then unknown) and `InputError` (not a path).
    """

    @property
    def url(self) -> str:
        """The canonical URL of the root; never contains a secret."""

    def read(self, path: StatePath) -> bytes:
        """Read the whole object.

        Raises:
            NotFoundError: there is no object at `path`.
            FormatError: it is larger than an object of this name can be; it was not read.
        """

    def read_range(self, path: StatePath, start: int, length: int) -> bytes:
        """Read up to `length` bytes from byte `start`: fewer, or none, beyond the end.

        Raises:
            NotFoundError: there is no object at `path`.
            InputError: `start` or `length` is negative.
        """

    def put(self, path: StatePath, data: bytes) -> None:
        """Write the object and replace an older one.

        Atomic: a reader sees the old bytes or the new ones, never a part. If it fails, no other
        object becomes visible.
        """

    def create(self, path: StatePath, data: bytes) -> bool:
        """Write the object unless one exists; of any number of callers, one gets True.

        Returns:
            True: created. False: an object exists and is unchanged. If the client repeated a
            request after its answer was lost, it may be the caller's own: read it to find out.
        """

    def copy(self, source: StatePath, target: StatePath, *, create: bool = False) -> bool:
        """Copy an object within the store, with at most some megabytes of it in memory.

        Atomic, as `put` and `create`. The copy is a new object with its own modification time.

        Args:
            create: keep an existing object at `target`; otherwise it is overwritten.

        Returns:
            True: copied. False: an object exists at `target`, and `create` is set.

        Raises:
            NotFoundError: there is no object at `source`.
        """

    def list(self, prefix: str = "", *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """Iterate over all objects below a directory, at any depth.

        The order is ascending by stored name (for names without special characters, by path), so
        that `start_after` with the last path continues an earlier listing. Objects that are written
        or deleted meanwhile may or may not be included. Errors are raised during iteration.

        Args:
            prefix: whole segments, so `a/b` is no prefix of `a/bc`; "" for the root. A prefix that
                does not exist is empty.
            start_after: skip this path and everything before it.

        Raises:
            NotFoundError: the root itself does not exist, so that a wrong URL never looks like an
                empty store. Without directories, a root exists if it contains an object.
        """

    def list_dir(self, prefix: str = "") -> Listing:
        """List the objects and directories directly in a directory; arguments as in `list`.

        On local disk a directory may be empty; elsewhere each contains an object.

        Raises:
            NotFoundError: the root itself does not exist.
        """

    def head(self, path: StatePath) -> ObjectInfo | None:
        """Describe the object; None if it does not exist."""

    def delete_many(self, paths: Iterable[StatePath]) -> DeleteOutcome:
        """Delete objects; a missing one counts as deleted, and failures are in the outcome.

        Raises:
            InputError: one of `paths` is not a path; nothing was deleted.
        """

    def open_input(self, path: StatePath) -> BinaryIO:
        """Open the object for random access; `pyarrow.parquet.ParquetFile` accepts the result.

        Raises:
            NotFoundError: there is no object at `path`.
        """


class RangeFile(io.RawIOBase):
    """An object that is read by ranges, as a seekable file of constant size."""

    def __init__(self, store: ObjectStore, path: StatePath, size_bytes: int) -> None:
        super().__init__()
        self._store = store
        self._path = path
        self._size_bytes = size_bytes
        self._position = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position of the next byte to read."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position relative to the start, the present position or the end."""
        bases = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size_bytes}
        if whence not in bases or bases[whence] + offset < 0:
            raise InputError("cannot seek before the start", path=self._path, offset=offset)
        self._position = bases[whence] + offset
        return self._position

    def read(self, size: int | None = -1, /) -> bytes:
        """Read up to `size` bytes; all remaining bytes if negative or None."""
        left = max(0, self._size_bytes - self._position)
        length = left if size is None or size < 0 else min(size, left)
        if not length:
            return b""
        data = self._store.read_range(self._path, self._position, length)
        self._position += len(data)
        return data

    def readall(self) -> bytes:
        """Read all remaining bytes."""
        return self.read()

    def readinto(self, buffer: object, /) -> int:
        """Read as many bytes as fit into `buffer`."""
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)


def open_by_ranges(store: ObjectStore, path: StatePath, size_bytes: int) -> BinaryIO:
    """Open an object of known size as a file; each read of it is one `read_range`."""
    return cast(BinaryIO, RangeFile(store, path, size_bytes))


def check_range(path: StatePath, start: int, length: int) -> None:
    """Refuse an invalid range.

    Raises:
        InputError: `start` or `length` is negative.
    """
    if start < 0 or length < 0:
        raise InputError("a range starts at 0 or later", path=path, start=start, length=length)


def check_size(url: str, path: StatePath, size_bytes: int) -> None:
    """Refuse an object that is larger than an object of its name can be.

    Raises:
        FormatError: it is larger.
    """
    limit = size_limit(path)
    if size_bytes > limit.size_bytes:
        raise FormatError(
            f"larger than the limit of a {limit.kind}: {size_bytes} bytes, expected at most "
            f"{limit.size_bytes}",
            path=path,
            url=url,
            next_step="keep the object, and find out what writes so much",
        )


def read_optional(store: ObjectStore, path: StatePath) -> bytes | None:
    """Read an object; None if it does not exist."""
    try:
        return store.read(path)
    except NotFoundError:
        return None


def read_in_chunks(
    store: ObjectStore, path: StatePath, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[bytes]:
    """Yield the whole object in chunks of `chunk_bytes`; the last one may be shorter.

    Raises:
        NotFoundError: there is no object at `path`.
    """
    start, length = 0, chunk_bytes
    while length == chunk_bytes:
        piece = store.read_range(path, start, chunk_bytes)
        length = len(piece)
        start += length
        if piece:
            yield piece
        del piece  # otherwise two of them would be in memory during the next read


def read_many(
    store: ObjectStore, paths: Iterable[StatePath], concurrency: int = 16
) -> dict[StatePath, bytes]:
    """Read many objects concurrently; the result is in the order of `paths`.

    Raises:
        Exception: the first error in the order of `paths`; reads that have not started are
            skipped.
    """
    distinct = list(dict.fromkeys(paths))
    if len(distinct) < 2 or concurrency < 2:
        return {path: store.read(path) for path in distinct}
    with ThreadPoolExecutor(min(concurrency, len(distinct)), "arroyo-read") as pool:
        return dict(zip(distinct, pool.map(store.read, distinct), strict=True))
