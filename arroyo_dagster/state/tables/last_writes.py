"""The last write of each key of a global keyed table, found by columns, newest file first.

The first write found of a key is its last write. Keys are looked up by a hash, and a write is left
out only if its key equals that of a newer write byte by byte.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.errors import FormatError
from arroyo_dagster.state.codec.digest import combined_codes, value_codes
from arroyo_dagster.state.codec.parquet import decode_file
from arroyo_dagster.state.model.compaction import RowsDigest
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.storage.concurrency import in_background, read_ahead
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.grouping import group_codes

REMOVED = -1
"""Used in place of a state version for removals."""

_AHEAD_BYTES = 1 << 24
_UNKNOWN_BYTES = 1 << 20
_LITTLE_BYTES = 1 << 18
_FIRST_SLOTS = 1 << 12
_FIBONACCI = np.uint64(0x9E3779B97F4A7C15)
_HASH_BITS = 64
_BLOCK_ROWS = 1 << 13
_PLACE = np.uint64(2**32 - 1)
_HALF = np.uint64(32)
_NONE = -1
_Codes = npt.NDArray[np.uint64]
_Places = npt.NDArray[np.int64]
_Scalar = TypeVar("_Scalar", bound=np.generic)


def last_writes(
    store: ObjectStore,
    files: Sequence[tuple[StatePath, int]],
    on_file: Callable[[StatePath, int], None] = lambda path, rows: None,
) -> LastWrites:
    """Find the last write of each key.

    Args:
        files: in replay order, each with its size in bytes, or 0 if unknown.
        on_file: called with each file and its rows; again if files must be read again.

    Raises:
        FormatError: a file is broken.
        NotFoundError: a file does not exist.
    """
    try:
        return _last_writes(store, files, on_file, exact=False)
    except SharedHash:
        return _last_writes(store, files, on_file, exact=True)


def _last_writes(
    store: ObjectStore,
    files: Sequence[tuple[StatePath, int]],
    on_file: Callable[[StatePath, int], None],
    *,
    exact: bool,
) -> LastWrites:
    writes, newest_first = LastWrites(exact=exact), files[::-1]
    with closing(decoded_ahead(store, newest_first)) as decoded:
        for (path, _), pairs in zip(newest_first, decoded, strict=True):
            writes.add(pairs)
            on_file(path, len(pairs))
    return writes


def decoded_ahead(
    store: ObjectStore, files: Sequence[tuple[StatePath, int]]
) -> Generator[CodedPairs, None, None]:
    """Decode files in the order given; some are read before they are requested.

    One thread decodes while the caller works. More of them would only share the caches: to find
    the last writes takes longer than to decode them.
    """
    weighed = [(path, size or _UNKNOWN_BYTES) for path, size in files]
    data = read_ahead(store.read, weighed, _AHEAD_BYTES)
    decoded = (decode_pairs(content, path) for (path, _), content in zip(files, data, strict=True))
    little = sum(size for _, size in weighed) < _LITTLE_BYTES
    return decoded if little else in_background(decoded)


class SharedHash(Exception):
    """Two keys have the same hash: `LastWrites(exact=True)` compares the keys themselves."""


@dataclass(frozen=True, slots=True)
class CodedPairs:
    """The pairs of one file as columns of equal length.

    Attributes:
        keys, seconds: large binary; a second is a value, or the operation of a removal.
        version: the state version of the values, or `REMOVED`.
        codes: a hash of each key.
    """

    keys: pa.Array
    seconds: pa.Array
    version: int
    codes: _Codes

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def ascending(self) -> bool:
        """Whether every key is greater than the one before it."""
        return bool(pc.all(pc.less(self.keys[:-1], self.keys[1:]), min_count=0).as_py())

    def digest(self, rows: _Places | None = None) -> RowsDigest:
        """Return the digest of some pairs, by default of all, hashed directly from the columns."""
        keys = self.codes if rows is None else self.codes[rows]
        version = value_codes(pa.array([self.version], pa.int64()))
        codes = combined_codes([keys, version, value_codes(self.seconds, rows)])
        return RowsDigest(len(keys), int(codes.sum(dtype=np.uint64)))


def decode_pairs(data: bytes, path: StatePath) -> CodedPairs:
    """Decode a file of a global keyed table and hash its keys.

    Raises:
        FormatError: it is not such a file.
    """
    file = decode_pair_columns(data, path)
    keys, seconds = (_large(column) for column in (file.keys, file.seconds))
    version = REMOVED if file.removals else file.version
    return CodedPairs(keys, seconds, version, value_codes(keys))


def _large(column: pa.ChunkedArray) -> pa.Array:
    values = column.cast(pa.large_binary())  # the files together may exceed 2 GiB
    return pa.concat_arrays([pa.array([], pa.large_binary()), *values.chunks])


class LastWrites:
    """The last write of each key in the files added so far.

    Args:
        exact: look keys up themselves, one by one; needed if keys share a hash.
    """

    def __init__(self, *, exact: bool = False) -> None:
        self._ids: dict[bytes, int] | None = {} if exact else None
        self._index = _CodeIndex()
        self._keys = _Texts()
        self._seconds = _Texts()
        self._versions: list[npt.NDArray[np.int64]] = []
        self._digests = {True: RowsDigest(), False: RowsDigest()}

    def add(self, pairs: CodedPairs) -> None:
        """Add the file that precedes those added so far in replay order.

        Raises:
            SharedHash: start again with `exact`.
        """
        codes = pairs.codes if self._ids is None else self._numbered(pairs.keys, self._ids)
        rows: _Places | None = None if pairs.ascending else _last_of_each(pairs.keys)
        indexed = self._index.find(codes if rows is None else codes[rows])
        seen, new = np.flatnonzero(indexed != _NONE), np.flatnonzero(indexed == _NONE)
        places = indexed[seen]
        if rows is not None:
            seen, new = rows[seen], rows[new]
        if not _same(pairs.keys, seen, self._keys.array(), places):
            raise SharedHash
        self._index.insert(codes[new])
        new_rows = pa.array(new)
        self._keys.extend(pairs.keys.take(new_rows))
        self._seconds.extend(pairs.seconds.take(new_rows))
        self._versions.append(np.full(len(new), pairs.version))
        self._digests[pairs.version == REMOVED] += pairs.digest(new)

    def _numbered(self, keys: pa.Array, ids: dict[bytes, int]) -> _Codes:
        numbers = [ids.setdefault(key, len(ids)) for key in keys.to_pylist()]
        return np.array(numbers, np.uint64)

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def removals(self) -> int:
        """How many of the last writes are removals."""
        return self._digests[True].rows

    def digest(self, *, removals: bool) -> RowsDigest:
        """Return the digest of the last writes as stored in the files, with or without removals."""
        return self._digests[False] + (self._digests[True] if removals else RowsDigest())

    def columns(self) -> tuple[pa.Array, pa.Array, npt.NDArray[np.int64]]:
        """Return keys, seconds and versions (`REMOVED` for removals) of the writes, unordered."""
        versions = np.concatenate([np.zeros(0, np.int64), *self._versions])
        return self._keys.array(), self._seconds.array(), versions

    def by_version(self) -> dict[int, tuple[pa.Array, pa.Array]]:
        """Return keys and seconds of the last writes, ordered by key, for each version."""
        keys, seconds, versions = self.columns()
        if len(versions) and (versions == versions[0]).all():
            return {int(versions[0]): _ordered(keys, seconds)}
        by_version = {}
        for version in np.unique(versions).tolist():
            places = pa.array(np.flatnonzero(versions == version))
            by_version[version] = _ordered(keys.take(places), seconds.take(places))
        return by_version


def _ordered(keys: pa.Array, seconds: pa.Array) -> tuple[pa.Array, pa.Array]:
    order = pc.sort_indices(keys)
    return keys.take(order), seconds.take(order)


def _last_of_each(keys: pa.Array) -> _Places:
    """Return the last row of each key in one file."""
    groups = group_codes([keys], len(keys))[::-1]
    first = np.unique(groups, return_index=True)[1]
    return np.sort(len(keys) - 1 - first)


def _blocks(count: int) -> Iterator[slice]:
    """Yield slices of so many rows that what is computed of them stays in the cache of a core."""
    return (slice(start, start + _BLOCK_ROWS) for start in range(0, count, _BLOCK_ROWS))


def _same(keys: pa.Array, rows: _Places, others: pa.Array, places: _Places) -> bool:
    if not len(rows):
        return True
    same = pc.equal(keys.take(pa.array(rows)), others.take(pa.array(places)))
    return bool(pc.all(same).as_py())


class _CodeIndex:
    """Hashes in insertion order, and the place of each: a hash table with linear probing.

    A slot holds the lower half of a hash, and its place: most searches read one slot. Two hashes
    with the same lower half that meet in a slot are taken for the same; `LastWrites` compares the
    keys. Numbers below 2**32 in place of hashes never are.
    """

    def __init__(self) -> None:
        self._codes: _Codes = np.zeros(0, np.uint64)
        self._count = 0
        self._table: _Codes = np.zeros(_FIRST_SLOTS, np.uint64)

    def find(self, codes: _Codes) -> _Places:
        """Return the place of each hash, or -1."""
        slots, places = self._slots(codes), np.empty(len(codes), np.int64)
        missed = [np.zeros(0, np.int64)]
        for block in _blocks(len(codes)):
            places[block], left = self._probe(slots[block], codes[block])
            missed.append(left + block.start)
        left = np.concatenate(missed)
        while len(left):
            slots[left] = self._next(slots[left])
            places[left], missed_again = self._probe(slots[left], codes[left])
            left = left[missed_again]
        return places

    def _probe(self, slots: _Places, codes: _Codes) -> tuple[_Places, _Places]:
        """Return the place in each slot if it is that of the hash, else -1; and which slots hold
        another hash.
        """
        entries = self._table[slots]
        places = (entries & _PLACE).astype(np.int64) - 1
        other = entries >> _HALF != codes & _PLACE
        left = np.flatnonzero(other & (places != _NONE))
        places[other] = _NONE
        return places, left

    def insert(self, codes: _Codes) -> None:
        """Append hashes at the next places."""
        start, self._count = self._count, self._count + len(codes)
        self._codes = _room(self._codes, self._count)
        self._codes[start : self._count] = codes
        if 2 * self._count > len(self._table):
            self._table = np.zeros(1 << (2 * self._count).bit_length(), np.uint64)
            start = 0
        codes = self._codes[start : self._count]
        slots = self._slots(codes)
        entries = (codes << _HALF) | np.arange(start + 1, self._count + 1, dtype=np.uint64)
        while len(entries):
            free = self._table[slots] == 0
            self._table[slots[free]] = entries[free]  # one of several in a slot stays
            left = self._table[slots] != entries
            entries, slots = entries[left], self._next(slots[left])

    def _slots(self, codes: _Codes) -> _Places:
        bits = (len(self._table) - 1).bit_length()
        return ((codes * _FIBONACCI) >> np.uint64(_HASH_BITS - bits)).view(np.int64)

    def _next(self, slots: _Places) -> _Places:
        return (slots + 1) & (len(self._table) - 1)


class _Texts:
    """A growing sequence of binary values, readable as one array at any time."""

    def __init__(self) -> None:
        self._offsets: npt.NDArray[np.int64] = np.zeros(1, np.int64)
        self._data: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def extend(self, values: pa.Array) -> None:
        """Append values (large binary, from the beginning of their buffers)."""
        _, places, data = values.buffers()
        offsets = np.frombuffer(places, np.int64, len(values) + 1, values.offset * 8)
        start, size = int(self._offsets[self._count]), int(offsets[-1] - offsets[0])
        self._data = _room(self._data, start + size)
        if size:
            raw = np.frombuffer(data, np.uint8)
            self._data[start : start + size] = raw[offsets[0] : offsets[-1]]
        count = self._count + len(values)
        self._offsets = _room(self._offsets, count + 1)
        self._offsets[self._count + 1 : count + 1] = offsets[1:] - offsets[0] + start
        self._count = count

    def array(self) -> pa.Array:
        """Return all values without a copy; valid until more are added."""
        buffers = [None, pa.py_buffer(self._offsets), pa.py_buffer(self._data)]
        return pa.Array.from_buffers(pa.large_binary(), self._count, buffers)


def _room(values: npt.NDArray[_Scalar], count: int) -> npt.NDArray[_Scalar]:
    """Return the same values with room for `count`, with spare room if they had to be copied."""
    if count <= len(values):
        return values
    larger: npt.NDArray[_Scalar] = np.empty(max(count, 2 * len(values)), values.dtype)
    larger[: len(values)] = values
    return larger


# ---- data files of global keyed tables, decoded as columns ---------------------------------------
# Source: crates/arroyo-state/src/tables/global_keyed_map.rs.


@dataclass(frozen=True, slots=True)
class PairColumns:
    """One decoded file as columns of type binary: keys, and values or operations.

    Attributes:
        removals: whether it removes its keys.
    """

    keys: pa.ChunkedArray
    seconds: pa.ChunkedArray
    version: int
    removals: bool


def decode_pair_columns(data: bytes, path: StatePath) -> PairColumns:
    """Decode one file of a global keyed table.

    Raises:
        FormatError: it has columns other than key and value (or `_operation`), or types other than
            binary.
    """
    rows, version = decode_file(data, path)
    names = rows.schema.names
    second = "value" if "value" in names else "_operation"
    for name in ("key", second):
        if names.count(name) != 1 or rows.schema.field(name).type != pa.binary():
            raise FormatError(
                "a global keyed table has the columns key and value (or key and _operation), "
                f"of type binary; this file has {rows.schema.to_string()}",
                path=path,
            )
    return PairColumns(rows.column("key"), rows.column(second), version, removals=second != "value")
