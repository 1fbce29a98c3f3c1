"""Exact keys of global keyed tables, without loading their values.

Memory holds the keys of the files as concatenated bytes, never their values: a table of large
values costs no more than one of small values.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.errors import FormatError
from arroyo_dagster.state.codec.hashing.routing import key_hashes
from arroyo_dagster.state.codec.parquet import GLOBAL_KEY_VALUE_SCHEMA, REMOVAL_SCHEMA
from arroyo_dagster.state.codec.row_groups import DataFile
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.storage.concurrency import ahead
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.data_files import SLICE_ROWS, open_data_file
from arroyo_dagster.state.tables.grouping import group_codes

EntryPlaces = npt.NDArray[np.int64]
_BINARY = pa.binary()
_DIGEST_BYTES = 12


@dataclass(frozen=True, slots=True)
class KeyedFile:
    """An open data file of a global keyed table.

    Attributes:
        removes: whether it removes its keys instead of setting their values.
        version: the state version of its values.
        rows: the number of its keys.
    """

    path: StatePath
    data: DataFile
    places: tuple[int, int]
    removes: bool
    version: int
    rows: int

    def keys(self) -> pa.ChunkedArray:
        """Return its keys, in their order."""
        return pa.chunked_array(
            [chunk for rows in self._slices(self.places[:1]) for chunk in rows.column(0).chunks],
            _BINARY,
        )

    def seconds(self) -> Iterator[pa.ChunkedArray]:
        """Yield its values, or the operations that remove, a few thousand at a time."""
        return (rows.column(0) for rows in self._slices(self.places[1:]))

    def entries(self) -> Iterator[tuple[pa.ChunkedArray, pa.ChunkedArray]]:
        """Yield its keys and values, or operations, a few thousand at a time."""
        return ((rows.column(0), rows.column(1)) for rows in self._slices(self.places))

    def _slices(self, places: Sequence[int]) -> Iterator[pa.Table]:
        for group in range(len(self.data.row_groups)):
            yield from self.data.slices(places, group, SLICE_ROWS)


def open_keyed_files(store: ObjectStore, files: Sequence[StatePath]) -> Iterator[KeyedFile]:
    """Open data files of a global keyed table, in the order given.

    Raises:
        FormatError: a file has columns other than key and value (or `_operation`), or types other
            than binary.
        NotFoundError: a file does not exist.
    """
    return ahead(lambda path: open_keyed_file(store, path), files)


def open_keyed_file(store: ObjectStore, path: StatePath) -> KeyedFile:
    """Open a data file of a global keyed table. Errors as `open_keyed_files`."""
    data = open_data_file(store, path)
    names = data.schema.names
    second = "value" if "value" in names else "_operation"
    for name in ("key", second):
        if names.count(name) != 1 or data.schema.field(name).type != _BINARY:
            raise FormatError(
                f"a global keyed table has the columns {GLOBAL_KEY_VALUE_SCHEMA.names}, or "
                f"{REMOVAL_SCHEMA.names}, of type binary; this file has {data.schema.to_string()}",
                path=path,
                next_step="keep the object; restore an epoch that does not list it",
            )
    return KeyedFile(
        path=path,
        data=data,
        places=(names.index("key"), names.index(second)),
        removes=second == "_operation",
        version=data.version,
        rows=sum(data.row_groups),
    )


@dataclass(frozen=True, slots=True)
class Entries:
    """The entries of a global keyed table: their number, and the first of them.

    Attributes:
        count: the number of keys that have a value.
        first: by key, the state version of the file and the value, in the order of first
            appearance.
    """

    count: int
    first: dict[bytes, tuple[int, bytes]]


def first_entries(store: ObjectStore, files: Sequence[StatePath], limit: int) -> Entries:
    """Count the entries that result from `files`, in replay order, and read the first `limit`.

    Raises:
        FormatError, NotFoundError: as `open_keyed_files`.
    """
    live = _live_keys(store, files)
    first_rows = live.rows[:limit]
    values: dict[int, tuple[int, bytes]] = {}
    for path, (start, end) in zip(files, itertools.pairwise(live.starts), strict=True):
        in_file = np.sort(first_rows[(first_rows >= start) & (first_rows < end)])
        if len(in_file):
            values.update(zip(in_file.tolist(), _values(store, path, in_file - start), strict=True))
    names = live.keys.take(pa.array(first_rows)).to_pylist()
    return Entries(
        count=len(live.rows),
        first={key: values[row] for key, row in zip(names, first_rows.tolist(), strict=True)},
    )


def stream_entries(
    store: ObjectStore, files: Sequence[StatePath]
) -> Iterator[tuple[pa.ChunkedArray, pa.ChunkedArray]]:
    """Yield the entries that result from `files`, in replay order: keys and values, in no order.

    Memory holds all keys, and a few thousand values.

    Raises:
        FormatError, NotFoundError: as `open_keyed_files`.
    """
    live = _live_keys(store, files)
    keep = np.zeros(int(live.starts[-1]), bool)
    keep[live.rows] = True
    pairs = zip(files, itertools.pairwise(live.starts), strict=True)
    needed = [(path, keep[start:end]) for path, (start, end) in pairs if keep[start:end].any()]
    opened = ahead(lambda path: open_keyed_file(store, path), [path for path, _ in needed])
    for file, (_, mask) in zip(opened, needed, strict=True):
        with closing(file.data):
            before = 0
            for keys, values in file.entries():
                mask_here = pa.array(mask[before : before + len(keys)])
                before += len(keys)
                yield keys.filter(mask_here), values.filter(mask_here)


@dataclass(frozen=True, slots=True)
class _LiveKeys:
    """The keys in some files, and which of them have a value.

    Attributes:
        keys: all keys, those of the first file first.
        rows: indices of the last writes that are no removals, by first appearance of their keys.
        starts: the index of the first key of each file; the last one is the number of keys.
    """

    keys: pa.ChunkedArray
    rows: EntryPlaces
    starts: EntryPlaces


def _live_keys(store: ObjectStore, files: Sequence[StatePath]) -> _LiveKeys:
    chunks: list[pa.Array] = []
    rows, removes = [0], []
    for file in open_keyed_files(store, files):
        with closing(file.data):
            chunks += file.keys().chunks
        rows.append(file.rows)
        removes.append(file.removes)
    keys = pa.chunked_array(chunks, _BINARY)
    last, starts = _last_rows(keys), np.cumsum(rows)
    in_file = np.searchsorted(starts, last, side="right") - 1
    return _LiveKeys(keys, last[~np.array(removes, bool)[in_file]], starts)


def _values(store: ObjectStore, path: StatePath, rows: EntryPlaces) -> list[tuple[int, bytes]]:
    """Read the values of some rows of a file, in ascending order, each with its state version."""
    file = open_keyed_file(store, path)
    values: list[bytes] = []
    before = 0
    with closing(file.data):
        for part in file.seconds():
            indexes = rows[(rows >= before) & (rows < before + len(part))] - before
            values += part.take(pa.array(indexes)).to_pylist()
            before += len(part)
            if len(values) == len(rows):
                break
    return [(file.version, value) for value in values]


def _last_rows(keys: pa.ChunkedArray) -> EntryPlaces:
    """Return the last row of each key; keys in the order of first appearance."""
    order, starts = _grouped(keys)
    ends = np.append(starts[1:], len(order)) - 1
    return order[ends][np.argsort(order[starts])] if len(order) else order


def _grouped(keys: pa.ChunkedArray) -> tuple[EntryPlaces, EntryPlaces]:
    """Return the rows grouped by key, ascending within each, and where each key begins in them."""
    # By the hash that routes rows, because it is fast and needs one word per row.
    hashes = key_hashes([keys], len(keys)).to_numpy()
    order = np.argsort(hashes, kind="stable")
    same = np.zeros(len(order), bool)
    same[1:] = hashes[order[1:]] == hashes[order[:-1]]
    repeats = np.flatnonzero(same)
    pairs = (keys.take(pa.array(order[repeats - back])) for back in (0, 1))
    if not pc.all(pc.equal(*pairs), min_count=0).as_py():
        codes = group_codes([keys], len(keys))  # two keys have the same hash
        order = np.argsort(codes, kind="stable")
        same[1:] = codes[order[1:]] == codes[order[:-1]]
    return order, np.flatnonzero(~same)


# ---- keys that several subtasks wrote ------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysOfSeveral:
    """Keys that occur in more than one of several groups of files.

    Attributes:
        keys: their number.
        differ: how many of them have another value, or are removed, in another group.
        example: the first of them.
        groups: the indices of the groups that have any of them.
    """

    keys: int
    differ: int
    example: bytes
    groups: tuple[int, ...]


def keys_of_several(groups: Sequence[Sequence[KeyedFile]]) -> KeysOfSeveral | None:
    """Find the keys that occur in files of several groups; None if there are none."""
    files = [(place, file) for place, group in enumerate(groups) for file in group]
    chunks = [chunk for _, file in files for chunk in file.keys().chunks]
    keys = pa.chunked_array(chunks, _BINARY)
    group_of = np.repeat([place for place, _ in files], [file.rows for _, file in files])
    order, starts = _grouped(keys)
    if not len(order):
        return None
    sizes = np.diff(np.append(starts, len(order)))
    writers = group_of[order]
    several = np.minimum.reduceat(writers, starts) < np.maximum.reduceat(writers, starts)
    if not several.any():
        return None
    rows = np.zeros(len(order), bool)
    rows[order] = np.repeat(several, sizes)
    codes = np.zeros(len(order), np.int64)
    codes[order] = np.repeat(np.arange(len(starts)), sizes)
    return KeysOfSeveral(
        keys=int(several.sum()),
        differ=_differing(files, codes, rows),
        example=keys[int(np.argmax(rows))].as_py(),
        groups=tuple(np.unique(group_of[rows]).tolist()),
    )


def _differing(files: Sequence[tuple[int, KeyedFile]], codes: EntryPlaces, rows: Any) -> int:
    """Return how many of the keys in `rows` do not have the same value in all of their rows."""
    digests: dict[int, bytes] = {}
    differ: set[int] = set()
    row = 0
    for _, file in files:
        for part in file.seconds():
            indexes = np.flatnonzero(rows[row : row + len(part)])
            seconds = part.take(pa.array(indexes)).to_pylist()
            for code, second in zip(codes[row + indexes].tolist(), seconds, strict=True):
                digest = blake2b(second, digest_size=_DIGEST_BYTES).digest()
                if digests.setdefault(code, digest) != digest:
                    differ.add(code)
            row += len(part)
    return len(differ)
