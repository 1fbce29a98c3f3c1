"""The few verbs of an object store and what each promises."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import BinaryIO, Protocol, cast, runtime_checkable

from arroyo_dagster.errors import FormatError, InputError
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.sizes import size_limit
from arroyo_dagster.state.storage.names import LinkName

CHUNK_BYTES = 8 * 2**20
"""How much of an object is in memory where it is read piece by piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """One object, as a listing or `head` shows it.

    Attributes:
        path: the raw path; a `StoredName` if not `addressable`.
        modified_micros: when it was written, by the store's clock, since 1970 in UTC; None if the
            store does not say. A listing may tell fractions of a second that `head` leaves out.
        etag: changes whenever the object does; opaque; None if the store does not say.
        addressable: False for an object whose stored name no raw path encodes to; it can be
            shown, but every verb refuses its path.
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
    """What became of the paths given to `delete_many`, in the order given.

    Attributes:
        deleted: certainly gone now, whether or not they were there before.
        failed: perhaps still there, with the reason.
    """

    deleted: tuple[StatePath, ...] = ()
    failed: Mapping[StatePath, str] = field(default_factory=dict)


@runtime_checkable
class ObjectStore(Protocol):
    """Bytes at a path. Synchronous, safe to share between threads, pickled by reopening.

    Paths are raw: the store percent-encodes them. Every verb may raise `StorageError` (the store
    failed; the outcome of a write is then unknown) and `InputError` (not a path).
    """

    @property
    def url(self) -> str:
        """The canonical URL of the root; never holds a secret."""

    def read(self, path: StatePath) -> bytes:
        """Give the whole object.

        Raises:
            NotFoundError: there is no object at `path`.
            FormatError: it is larger than an object of its name can be; it was not read.
        """

    def read_range(self, path: StatePath, start: int, length: int) -> bytes:
        """Give up to `length` bytes from byte `start`: fewer, or none, beyond the end.

        Raises:
            NotFoundError: there is no object at `path`.
            InputError: `start` or `length` is negative.
        """

    def put(self, path: StatePath, data: bytes) -> None:
        """Write the object, over an older one if there is one.

        Atomic: a reader sees the old bytes or the new ones, never a part. Nothing but the object
        is ever visible, whatever fails.
        """

    def create(self, path: StatePath, data: bytes) -> bool:
        """Write the object unless there is one; of any number of callers one gets True.

        Returns:
            True: created. False: there is one already, left as it was. Where a client repeats a
            request whose answer was lost, that one may be the caller's own: read it to know.
        """

    def copy(self, source: StatePath, target: StatePath, *, create: bool = False) -> bool:
        """Copy an object within the store, holding no more than some megabytes of it in memory.

        Atomic, as `put` and `create` are. The copy is a new object: its time is that of the copy.

        Args:
            create: leave an object that is at `target` as it is; otherwise it is overwritten.

        Returns:
            True: copied. False: there is an object at `target` and `create` was asked for.

        Raises:
            NotFoundError: there is no object at `source`.
        """

    def list(self, prefix: str = "", *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """Go through all objects below a directory, at any depth.

        In ascending order of stored name (for names without special characters, of path), so that
        `start_after` the last path seen goes on where an earlier listing stopped. What is written
        or deleted meanwhile may or may not be seen. Errors come as the iterator is used.

        Args:
            prefix: whole segments, so `a/b` is no prefix of `a/bc`; "" for the root. One that
                does not exist is empty.
            start_after: leave out this path and everything before it.

        Raises:
            NotFoundError: the root itself does not exist: a wrong URL never looks like an empty
                store. Where stores have no directories, a root is what holds an object.
        """

    def list_dir(self, prefix: str = "") -> Listing:
        """Give the objects and directories directly in a directory; arguments as for `list`.

        On local disk a directory may be empty; elsewhere each holds an object.

        Raises:
            NotFoundError: the root itself does not exist.
        """

    def head(self, path: StatePath) -> ObjectInfo | None:
        """Describe the object; None if there is none."""

    def delete_many(self, paths: Iterable[StatePath]) -> DeleteOutcome:
        """Delete objects; one that is missing counts as deleted, a failure is in the outcome.

        Raises:
            InputError: one of `paths` is not a path; nothing was deleted.
        """

    def open_input(self, path: StatePath) -> BinaryIO:
        """Open the object for random access (`pyarrow.parquet.ParquetFile` takes what it gives).

        Raises:
            NotFoundError: there is no object at `path`.
        """


class RangeFile(io.RawIOBase):
    """An object read by ranges, as a seekable file that never changes size."""

    def __init__(self, store: ObjectStore, path: StatePath, size_bytes: int) -> None:
        super().__init__()
        self._store = store
        self._path = path
        self._size_bytes = size_bytes
        self._position = 0

    def readable(self) -> bool:
        """Say that it can be read."""
        return True

    def seekable(self) -> bool:
        """Say that it can be read in any order."""
        return True

    def tell(self) -> int:
        """Give the position of the next byte read."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position counted from the start, the present position or the end."""
        bases = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size_bytes}
        if whence not in bases or bases[whence] + offset < 0:
            raise InputError("cannot seek before the start", path=self._path, offset=offset)
        self._position = bases[whence] + offset
        return self._position

    def read(self, size: int | None = -1, /) -> bytes:
        """Read up to `size` bytes, all that is left if negative or None."""
        left = max(0, self._size_bytes - self._position)
        wanted = left if size is None or size < 0 else min(size, left)
        if not wanted:
            return b""
        data = self._store.read_range(self._path, self._position, wanted)
        self._position += len(data)
        return data

    def readall(self) -> bytes:
        """Read all that is left."""
        return self.read()

    def readinto(self, buffer: object, /) -> int:
        """Read into `buffer` as much as fits."""
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)


def open_by_ranges(store: ObjectStore, path: StatePath, size_bytes: int) -> BinaryIO:
    """Open an object of a known size as a file whose every read is one `read_range`."""
    return cast(BinaryIO, RangeFile(store, path, size_bytes))


def check_range(path: StatePath, start: int, length: int) -> None:
    """Refuse a range that no object has.

    Raises:
        InputError: `start` or `length` is negative.
    """
    if start < 0 or length < 0:
        raise InputError("a range starts at 0 or later", path=path, start=start, length=length)


def check_size(url: str, path: StatePath, size_bytes: int) -> None:
    """Refuse an object that is larger than one of its name can be.

    Raises:
        FormatError: it is.
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


def read_in_chunks(
    store: ObjectStore, path: StatePath, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[bytes]:
    """Give the whole object piece by piece, each `chunk_bytes` long but the last.

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
        del piece  # or two of them are there while the next one is read


def read_many(
    store: ObjectStore, paths: Iterable[StatePath], concurrency: int = 16
) -> dict[StatePath, bytes]:
    """Read many objects at once; the answer is in the order of `paths`.

    Raises:
        The first error in the order of `paths`; what had not been started then is left out.
    """
    wanted = list(dict.fromkeys(paths))
    if len(wanted) < 2 or concurrency < 2:
        return {path: store.read(path) for path in wanted}
    with ThreadPoolExecutor(min(concurrency, len(wanted)), "arroyo-read") as pool:
        return dict(zip(wanted, pool.map(store.read, wanted), strict=True))
