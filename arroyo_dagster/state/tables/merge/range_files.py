"""Split rows of an expiring table by key range, and write them as files while more rows arrive."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.state.codec.parquet import RowsEncoder
from arroyo_dagster.state.model.compaction import OutputForm, RowsMerge, SortOrder
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.keys import KeyRange
from arroyo_dagster.state.model.layout import compacted
from arroyo_dagster.state.model.tables import TimeFile
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.live_rows import NANOS_PER_MICRO

Route = tuple[int, pa.Table]
"""The index of a key range, and rows of it."""


def routes(rows: pa.Table, ranges: Sequence[KeyRange]) -> list[Route]:
    """Split rows by key range, each part in their order.

    Args:
        rows: of a file schema.
        ranges: ascending, without overlap. Rows outside all ranges are left out.
    """
    hashes = rows.column(rows.num_columns - 2).to_numpy()
    if not len(hashes):
        return []
    starts = np.array([keys.start for keys in ranges], np.uint64)
    ends = np.array([keys.end for keys in ranges], np.uint64)
    low, high = hashes.min(), hashes.max()
    for index, keys in enumerate(ranges):
        if keys.covers(int(low), int(high)):
            return [(index, rows)]
    owners = np.searchsorted(starts, hashes, side="right") - 1
    owners[(owners < 0) | (hashes > ends[owners])] = -1
    count = len(ranges)
    order = np.argsort(owners, kind="stable")
    edges = np.searchsorted(owners[order], np.arange(count + 1))
    ordered = rows.take(pa.array(order[edges[0] :]))
    base = int(edges[0])
    return [
        (i, ordered.slice(int(edges[i]) - base, int(edges[i + 1] - edges[i])))
        for i in range(count)
        if edges[i + 1] > edges[i]
    ]


@dataclass(slots=True)
class _Open:
    """A file that is being written, and the rows for its next row group."""

    encoder: RowsEncoder
    waiting: list[pa.Table] = field(default_factory=list)
    waiting_bytes: int = 0
    waiting_rows: int = 0
    rows: int = 0
    least: int = 2**64 - 1
    most: int = 0
    latest_nanos: int = 0
    timeless: bool = False


class RangeFiles:
    """One or more files, in replay order, for each key range of a merge.

    Rows are buffered until they fill a row group, with a limit for all buffers together. Encoded
    data is written as soon as it fills a file.

    Args:
        name: returns a new path for a file of a key range; its second argument is the suffix.
    """

    def __init__(
        self,
        store: ObjectStore,
        merge: RowsMerge,
        schema: pa.Schema,
        timestamp_index: int,
        name: Callable[[KeyRange, str], StatePath],
    ) -> None:
        self._store = store
        self._merge = merge
        self._schema = schema
        self._timestamp_index = timestamp_index
        self._name = name
        self._open: dict[int, _Open] = {}
        self._closed: dict[int, list[TimeFile]] = {}
        self.sizes: dict[StatePath, int] = {}

    @property
    def size_bytes(self) -> int:
        """The number of bytes written."""
        return sum(self.sizes.values())

    @property
    def _form(self) -> OutputForm:
        return self._merge.form

    def add(self, at: int, rows: pa.Table) -> None:
        """Append rows to the key range with the index `at`."""
        if not rows.num_rows:
            return
        file = self._open.get(at)
        if file is None:
            file = self._open[at] = _Open(self._encoder())
        file.waiting.append(rows)
        file.waiting_bytes += rows.nbytes
        file.waiting_rows += rows.num_rows
        if file.waiting_rows >= self._form.row_group_rows:
            self._encode(at)
        elif sum(file.waiting_bytes for file in self._open.values()) > self._form.memory_bytes:
            self._encode(max(self._open, key=lambda file: self._open[file].waiting_bytes))

    def _encoder(self) -> RowsEncoder:
        hash_at = len(self._schema) - 2
        by_key = self._form.sort is SortOrder.KEY
        return RowsEncoder(
            self._schema,
            sorted_by=hash_at if by_key else None,
            bloom_filter=hash_at if by_key else None,
        )

    def _encode(self, at: int) -> None:
        file = self._open[at]
        self._write(file)
        if file.encoder.size_bytes >= self._form.file_bytes:
            self._close(at)

    def _write(self, one: _Open) -> None:
        rows = pa.concat_tables(one.waiting)
        one.waiting, one.waiting_bytes, one.waiting_rows = [], 0, 0
        bounds = pc.min_max(rows.column(len(self._schema) - 2))
        one.least = min(one.least, bounds["min"].as_py())
        one.most = max(one.most, bounds["max"].as_py())
        times = rows.column(self._timestamp_index)
        one.latest_nanos = max(one.latest_nanos, pc.max(times).value or 0)
        one.timeless |= times.null_count > 0
        one.rows += rows.num_rows
        one.encoder.write(rows, self._form.row_group_rows)

    def close(self) -> Mapping[int, Sequence[TimeFile]]:
        """Write the remaining rows, and return all files: by key range, in replay order."""
        for index in sorted(self._open):
            self._close(index)
        return {index: self._closed[index] for index in sorted(self._closed)}

    def close_files(self) -> None:
        """Close the open files; later rows are written to new ones."""
        for index in list(self._open):
            self._close(index)

    def _close(self, at: int) -> None:
        file = self._open.pop(at)
        if file.waiting:
            self._write(file)
        data = file.encoder.finish()
        path = self._name(self._merge.ranges[at], compacted(self._merge.level))
        self._store.put(path, data)
        self.sizes[path] = len(data)
        self._closed.setdefault(at, []).append(self._described(file, path))

    def _described(self, one: _Open, path: StatePath) -> TimeFile:
        inputs = self._merge.inputs
        latest = one.latest_nanos // NANOS_PER_MICRO
        if one.timeless:
            # A row without event time hides older ones: its file must not expire before theirs.
            latest = max(latest, *(file.max_timestamp_micros for file in inputs))
        return TimeFile(
            epoch=max(file.epoch for file in inputs),
            path=path,
            min_routing_key=one.least,
            max_routing_key=one.most,
            max_timestamp_micros=max(0, latest),
            compaction_generation=max(
                self._merge.level, 1 + max(file.compaction_generation for file in inputs)
            ),
        )

    def abandon(self) -> None:
        """Drop all added rows, and delete the written files if possible."""
        paths = [file.path for files in self._closed.values() for file in files]
        self._open.clear()
        self._closed.clear()
        self.sizes.clear()
        if paths:
            self._store.delete_many(paths)
