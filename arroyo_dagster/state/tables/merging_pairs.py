"""One merge of a global keyed table: the last write of each key, removals among them.

Two ways lead to what the last writes are: polars finds the rows to keep, and the proof goes by
hashes of keys alone. Memory grows with the keys that are left, as it does for every subtask that
restores the table, and not with the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from arroyo_dagster.state.codec.digest import key_codes, row_codes
from arroyo_dagster.state.codec.parquet import (
    GLOBAL_KEY_VALUE_SCHEMA,
    REMOVAL_SCHEMA,
    encode_pair_columns,
)
from arroyo_dagster.state.model.compaction import (
    MergedPairs,
    MergeOutcome,
    PairsMerge,
    RowsDigest,
)
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.layout import REMOVED, compacted
from arroyo_dagster.state.model.tables import TableConfig
from arroyo_dagster.state.storage.concurrency import read_ahead
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.global_keyed import PairColumns, decode_pair_columns

_AHEAD_BYTES = 3 << 24
_UNKNOWN_BYTES = 1 << 20
_TOGETHER_BYTES = 1 << 26
_REMOVED = -1
"""Stands for the state version of a removal."""
_Codes = npt.NDArray[np.uint64]


def merge_pairs(
    config: TableConfig,
    store: ObjectStore,
    merge: PairsMerge,
    name: Callable[[str], StatePath],
    on_bytes: Callable[[int], None] = lambda count: None,
) -> MergeOutcome:
    """Carry out one merge and read its outputs back.

    One file comes of each state version, and one of removals unless the merge begins at the oldest
    file: without an older file nothing is left that could bring a key back.

    Args:
        name: gives a fresh path; its argument ends the name.
        on_bytes: told of every input how many of its bytes were read.

    Raises:
        FormatError: an input is broken.
        NotFoundError: an input is gone.
    """
    writes, proof = _Writes(), _LastCodes()
    sizes = merge.sizes or (_UNKNOWN_BYTES,) * len(merge.inputs)
    read: dict[StatePath, int] = {}
    files = _files(store, list(zip(merge.inputs, sizes, strict=True)))
    for size, file in zip(sizes, files, strict=True):
        read[file.path] = len(file.keys)
        writes.add(file)
        proof.add(file)
        on_bytes(size)
    kept = writes.last()
    removed = kept.filter(pl.col("version") == _REMOVED)
    written = _written(config, kept, removed, name, merge)
    outputs = tuple(path for path, _ in written)
    for path, data in written:
        store.put(path, data)
    again = _LastCodes()
    for file in _files(store, [(path, len(data)) for path, data in written]):
        again.add(file)
    rows_in = sum(read.values())
    dropped = {
        "older writes of a key": rows_in - len(kept),
        "removals, applied": len(removed) if merge.from_oldest else 0,
    }
    after = again.digest(removals=not merge.from_oldest)
    return MergeOutcome(
        merged=MergedPairs(
            operator=merge.operator, table=merge.table, inputs=merge.inputs, outputs=outputs
        ),
        rows_in=rows_in,
        rows_out=after.rows,
        dropped={reason: count for reason, count in dropped.items() if count},
        size_bytes_in=merge.size_bytes,
        size_bytes_out=sum(len(data) for _, data in written),
        before=proof.digest(removals=not merge.from_oldest),
        after=after,
        input_rows=read,
    )


def _files(store: ObjectStore, files: Sequence[tuple[StatePath, int]]) -> Iterator[PairColumns]:
    weighed = ((path, size) for path, size in files)
    for (path, _), data in zip(files, read_ahead(store.read, weighed, _AHEAD_BYTES), strict=True):
        yield decode_pair_columns(data, path)


def _written(
    config: TableConfig,
    kept: pl.DataFrame,
    removed: pl.DataFrame,
    name: Callable[[str], StatePath],
    merge: PairsMerge,
) -> list[tuple[StatePath, bytes]]:
    parts = [
        (version, "", GLOBAL_KEY_VALUE_SCHEMA)
        for version in sorted(set(kept["version"].unique()) - {_REMOVED})
    ]
    if len(removed) and not merge.from_oldest:
        parts.insert(0, (_REMOVED, REMOVED, REMOVAL_SCHEMA))
    return [
        (
            name(suffix + compacted(merge.level)),
            encode_pair_columns(
                *_columns(kept.filter(pl.col("version") == version)),
                schema,
                version=config.state_version if version == _REMOVED else version,
            ),
        )
        for version, suffix, schema in parts
    ]


def _columns(rows: pl.DataFrame) -> tuple[pa.Array, pa.Array]:
    rows = rows.sort("key")
    found = []
    for column in ("key", "second"):
        large = rows[column].to_arrow()
        found.append(large.cast(pa.binary()) if large.nbytes < 2**31 else large)
    return found[0], found[1]


class _Writes:
    """The last write of each key, of the files so far."""

    def __init__(self) -> None:
        self._frames: list[pl.DataFrame] = []
        self._bytes = 0

    def add(self, file: PairColumns) -> None:
        """Go on with the next file in replay order."""
        version = _REMOVED if file.removals else file.version
        frame = pl.DataFrame(
            {"key": pl.from_arrow(file.keys), "second": pl.from_arrow(file.seconds)}
        ).with_columns(version=pl.lit(version, pl.Int64))
        self._frames.append(frame)
        self._bytes += int(frame.estimated_size())
        if self._bytes > _TOGETHER_BYTES:
            self._frames, self._bytes = [self._unique()], 0

    def last(self) -> pl.DataFrame:
        """Columns `key`, `second` (value, or operation) and `version`, in any order."""
        self._frames = [self._unique()]
        return self._frames[0]

    def _unique(self) -> pl.DataFrame:
        return pl.concat(self._frames).unique(subset="key", keep="last", maintain_order=False)


class _LastCodes:
    """The same by hashes: of each key's hash the hash of its last write."""

    def __init__(self) -> None:
        self._keys: list[_Codes] = []
        self._rows: list[_Codes] = []
        self._removed: list[npt.NDArray[np.bool_]] = []

    def add(self, file: PairColumns) -> None:
        """Go on with the next file in replay order."""
        keys = key_codes(file.keys)
        self._keys.append(keys)
        version = np.full(len(keys), _REMOVED if file.removals else file.version, np.int64)
        columns = [pa.chunked_array([pa.array(version)]), file.seconds]
        self._rows.append(row_codes(keys, columns))
        self._removed.append(np.full(len(keys), file.removals))

    def digest(self, *, removals: bool) -> RowsDigest:
        """The digest of the last writes, with removals or without."""
        if not self._keys:
            return RowsDigest()
        keys = np.concatenate(self._keys)[::-1]
        last = np.unique(keys, return_index=True)[1]
        rows = np.concatenate(self._rows)[::-1][last]
        if not removals:
            rows = rows[~np.concatenate(self._removed)[::-1][last]]
        return RowsDigest(len(rows), int(rows.sum(dtype=np.uint64)))
