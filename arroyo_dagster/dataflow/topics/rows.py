"""Read records from rows of Parquet files. Positions are row numbers."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from arroyo_dagster.dataflow.topics.folders import Folder, FolderEntry
from arroyo_dagster.dataflow.topics.records import MAX_SPLITS, Found, record_batches, text_batch
from arroyo_dagster.errors import FormatError, ProtocolError

MIN_SPLIT_ROWS = 1 << 15
"""The minimum size of a split, so that a task is worth its cost."""

_FOOTER_BYTES = 1024


@dataclass(frozen=True, slots=True)
class ParquetRows:
    """One record per row. A Parquet file is written as a whole and does not grow.

    Args:
        encode: returns the value of a row from its cells by column, as `plain_rows` returns them.
        wants: returns whether to read a column.
        raw: whether the value is the text or the bytes of a single column.
    """

    encode: Callable[[dict[str, Any]], bytes]
    wants: Callable[[str], bool] = lambda column: True
    raw: bool = False
    _lengths: dict[tuple[str, int], int] = field(default_factory=dict, compare=False, repr=False)

    def length(self, folder: Folder, entry: FolderEntry) -> int:
        """Return the number of rows."""
        rows = self._lengths.get((entry.name, entry.size_bytes))
        if rows is None:
            with _opened(folder, entry) as file:
                rows = self._lengths[entry.name, entry.size_bytes] = file.metadata.num_rows
        return rows

    def check(self, folder: Folder, entry: FolderEntry, position: int, fingerprint: int) -> None:
        """Check that the file is the one that was read up to row `position`.

        Raises:
            ProtocolError: it was replaced.
        """
        if self.fingerprint(folder, entry, position) != fingerprint:
            raise ProtocolError(
                "a partly read Parquet file was replaced",
                path=folder.where,
                file=entry.name,
                position=position,
                next_step="give a file of other records another name; nothing was written",
            )

    def fingerprint(self, folder: Folder, entry: FolderEntry, position: int) -> int:
        """Return a checksum of the last `_FOOTER_BYTES` bytes, which contain the footer's end."""
        start = max(0, entry.size_bytes - _FOOTER_BYTES)
        return zlib.crc32(folder.read(entry.name, start, _FOOTER_BYTES))

    def extent(
        self, folder: Folder, entry: FolderEntry, start: int, room: int, *, final: bool
    ) -> tuple[int, int]:
        """Return the end of the range that one epoch reads, at most `room` rows; see `Lines`."""
        end = min(self.length(folder, entry), start + room)
        return end, end - start

    def cuts(self, folder: Folder, name: str, start: int, end: int) -> Sequence[int]:
        """Return positions between `start` and `end`, both exclusive, at which to split."""
        return range(start, end, max(MIN_SPLIT_ROWS, -(-(end - start) // MAX_SPLITS)))[1:]

    def batches(
        self, folder: Folder, name: str, number: int, start: int, end: int
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows from `start` (inclusive) to `end` (exclusive); `number`: partition."""
        for first, rows in self._tables(folder, name, start, end):
            if self.raw and _is_text(rows):
                yield text_batch(rows.column(0).combine_chunks(), number, first)
                continue
            records = (
                Found(i, self.encode(row)) for i, row in enumerate(plain_rows(rows), start=first)
            )
            yield from record_batches(records, number)

    def _tables(
        self, folder: Folder, name: str, start: int, end: int
    ) -> Iterator[tuple[int, pa.Table]]:
        """Yield the requested rows of each row group, with the row number of the first."""
        first = 0
        sizes = {entry.name: entry for entry in folder.entries()}
        with _opened(folder, sizes.get(name, FolderEntry(name, 0))) as file:
            columns = [column for column in file.schema_arrow.names if self.wants(column)]
            for group in range(file.metadata.num_row_groups):
                count = file.metadata.row_group(group).num_rows
                low, high = max(start - first, 0), min(end - first, count)
                if low < high:
                    rows = file.read_row_group(group, columns)
                    yield first + low, rows.slice(low, high - low)
                first += count


def _is_text(rows: pa.Table) -> bool:
    """Return whether the rows are one column of text or bytes without nulls."""
    kinds = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())
    return rows.num_columns == 1 and rows.column(0).type in kinds and not rows.column(0).null_count


def plain_rows(rows: pa.Table) -> list[dict[str, Any]]:
    """Return rows in JSON's types: timestamps as epoch milliseconds; decimals, dates and times of
    day as text.
    """
    columns = [plain_column(column) for column in rows.columns]
    return pa.table(dict(zip(rows.column_names, columns, strict=True))).to_pylist()  # type: ignore[no-any-return]


def plain_column(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Convert one column for `plain_rows`."""
    return column.cast(_coarse(column.type), safe=False).cast(_plain(_coarse(column.type)))


def _coarse(kind: pa.DataType) -> pa.DataType:
    """Return the type with timestamps in milliseconds and without dictionaries, at any depth.

    Python has no type for nanoseconds.
    """
    if pa.types.is_timestamp(kind):
        return pa.timestamp("ms", kind.tz)
    if pa.types.is_dictionary(kind):
        return _coarse(kind.value_type)
    return _inside(kind, _coarse)


def _plain(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind):
        return pa.int64()
    if pa.types.is_decimal(kind) or pa.types.is_date(kind) or pa.types.is_time(kind):
        return pa.string()
    return _inside(kind, _plain)


def _inside(kind: pa.DataType, change: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    if pa.types.is_struct(kind):
        members = [kind.field(index) for index in range(kind.num_fields)]
        return pa.struct([member.with_type(change(member.type)) for member in members])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(kind.value_field.with_type(change(kind.value_type)))
    return kind


@contextlib.contextmanager
def _opened(folder: Folder, entry: FolderEntry) -> Iterator[pq.ParquetFile]:
    try:
        with folder.open(entry.name, entry.size_bytes) as file:
            yield pq.ParquetFile(file)
    except (pa.ArrowException, OSError) as error:
        raise FormatError(
            f"a file cannot be read as Parquet ({error})",
            path=folder.where,
            file=entry.name,
            next_step="give unfinished files a name that begins with '_' or '.'",
        ) from error
