"""Partial reads of a data file: some of its columns, by position, and some of its row groups.

Columns are not selected by name, because names may repeat and contain dots.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from arroyo_dagster.errors import FormatError
from arroyo_dagster.state.codec.parquet import (
    check_chunks,
    check_footer,
    check_rows,
    decoding,
    open_pages,
    read_groups,
    rows_at_once,
    source_size,
    state_version,
)

_FETCHED_BYTES = 1 << 26
_TEXTS = (pa.string(), pa.binary())
_NARROW = 6
"""Bytes per text in the file, up to which texts repeat: a plain one takes four and its own."""

Bound = int | bytes | None
"""A value as the statistics of a Parquet column hold it; None = no bound."""


@dataclass(frozen=True, slots=True)
class GroupSize:
    """The size of a row group: encoded, and compressed as it is stored."""

    rows: int
    size_bytes: int
    compressed_bytes: int


@dataclass(frozen=True, slots=True)
class ValueLimits:
    """The smallest and largest value of a column in a row group; None = not in the statistics."""

    least: Bound
    most: Bound
    has_nulls: bool


class KnownFooter:
    """The footer of a data file, and what was decoded of it so far.

    Attributes:
        metadata: as pyarrow has it.
        size_bytes: of the file.
        limits: by Parquet column and row group; filled as they are asked for.
    """

    def __init__(self, metadata: pq.FileMetaData, size_bytes: int) -> None:
        self.metadata = metadata
        self.size_bytes = size_bytes
        self.limits: dict[tuple[int, int], ValueLimits] = {}

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """The number of rows in each row group."""
        groups = range(self.metadata.num_row_groups)
        return tuple(self.metadata.row_group(group).num_rows for group in groups)

    @cached_property
    def encoded_bytes(self) -> tuple[int, ...]:
        """The size of each row group, not compressed."""
        groups = range(self.metadata.num_row_groups)
        return tuple(max(0, self.metadata.row_group(group).total_byte_size) for group in groups)

    @cached_property
    def stored_bytes(self) -> tuple[int, ...]:
        """About how many bytes of the file each row group takes, by their encoded sizes."""
        whole = max(1, sum(self.encoded_bytes))
        return tuple(self.size_bytes * size // whole for size in self.encoded_bytes)


class DataFile:
    """A data file that can be read in parts; opening it reads the footer.

    Args:
        source: its bytes, or a file that reads ranges of them.
        path: for errors.
        footer: of this file, if it was opened before.

    Raises:
        FormatError: here and in every method: it is not Parquet, or a part is broken.
    """

    def __init__(
        self, source: bytes | BinaryIO, path: str, footer: KnownFooter | None = None
    ) -> None:
        self._path = path
        # A small file needs no threads. And an Arrow thread that releases Python's bytes while the
        # interpreter shuts down aborts the process (SIGABRT), as seen with short commands.
        self._threads = not isinstance(source, bytes)
        with decoding(self._path):
            size_bytes = source_size(source) if footer is None else footer.size_bytes
            self._source = pa.BufferReader(source) if isinstance(source, bytes) else source
            self._file = pq.ParquetFile(
                self._source,
                metadata=footer and footer.metadata,
                page_checksum_verification=True,
                pre_buffer=self._threads,
            )
            if footer is None:
                check_footer(self._file.metadata)
            self.footer = footer or KnownFooter(self._file.metadata, size_bytes)
            self.schema: pa.Schema = self._file.schema_arrow
            self._leaves = list(_leaves(self.schema))

    @property
    def size_bytes(self) -> int:
        """The size of the file."""
        return self.footer.size_bytes

    def close(self) -> None:
        """Close the given file; nothing can be read afterwards."""
        self._source.close()

    @property
    def version(self) -> int:
        """The state version of its values; 0 if it has none."""
        return state_version(self._file)

    @property
    def row_groups(self) -> tuple[int, ...]:
        """The number of rows in each row group."""
        return self.footer.rows

    @property
    def group_sizes(self) -> tuple[GroupSize, ...]:
        """The size of each row group, by the footer; reads a value of each column."""
        footer = self._file.metadata
        self._check(range(footer.num_columns))
        groups = [footer.row_group(index) for index in range(footer.num_row_groups)]
        return tuple(
            GroupSize(
                rows=group.num_rows,
                size_bytes=group.total_byte_size,
                compressed_bytes=sum(
                    group.column(index).total_compressed_size for index in range(group.num_columns)
                ),
            )
            for group in groups
        )

    def _check(self, leaves: Sequence[int]) -> None:
        groups = range(self._file.metadata.num_row_groups)
        with decoding(self._path):
            check_chunks(self._source, self._file.metadata, groups, leaves)

    def read(
        self, columns: Sequence[int], groups: Sequence[int], *, repeating: Sequence[str] = ()
    ) -> pa.Table:
        """Read columns by index, in the order given, of row groups by index.

        Args:
            repeating: columns of text or bytes with few different values, read as dictionaries.
        """
        leaves = self._leaves_of(columns)
        with decoding(self._path):
            file = self._file if not repeating else self._with_dictionaries(repeating)
            rows = self._rows_of(file, groups, leaves)
        return self._in_order(rows, columns)

    def _rows_of(
        self, file: pq.ParquetFile, groups: Sequence[int], leaves: Sequence[int]
    ) -> pa.Table:
        return read_groups(
            file,
            groups,
            leaves,
            path=self._path,
            size_bytes=self.size_bytes,
            use_threads=self._threads,
        )

    def _with_dictionaries(self, names: Sequence[str]) -> pq.ParquetFile:
        return pq.ParquetFile(
            self._source,
            metadata=self._file.metadata,
            read_dictionary=list(names),
            page_checksum_verification=True,
            pre_buffer=self._threads,
        )

    def slices(self, columns: Sequence[int], group: int, most: int) -> Iterator[pa.Table]:
        """Yield columns of one row group, at most `most` rows at a time, fewer if they are large.

        Each slice but the last has a multiple of 1024 rows. Only some pages of each column are in
        memory at a time.
        """
        leaves = self._leaves_of(columns)
        with decoding(self._path):
            pages = open_pages(self._source, self._file.metadata)
            batches = pages.reader.iter_batches(
                batch_size=rows_at_once(pages.metadata, most, group),
                row_groups=[group],
                column_indices=leaves,
                use_threads=False,
            )
        for batch in self._all_of(batches, group):
            yield self._in_order(pa.Table.from_batches([batch]), columns)

    def _leaves_of(self, columns: Sequence[int]) -> list[int]:
        return [leaf for column in sorted(set(columns)) for leaf in self._leaves[column]]

    def _in_order(self, rows: pa.Table, columns: Sequence[int]) -> pa.Table:
        indexes = sorted(set(columns))
        if rows.num_columns != len(indexes):
            raise FormatError(
                "the columns of a data file do not match its Arrow schema",
                path=self._path,
                next_step="keep the object; restore an epoch that does not list it",
            )
        places = [indexes.index(column) for column in columns]
        columns_in_order = [rows.column(place) for place in places]
        fields = [
            self.schema.field(column).with_type(values.type)
            for column, values in zip(columns, columns_in_order, strict=True)
        ]
        return pa.Table.from_arrays(columns_in_order, schema=pa.schema(fields))

    def stream(self, batch_rows: int, *, dictionaries: Collection[int] = ()) -> Iterator[pa.Table]:
        """Yield all rows in order, `batch_rows` at a time, with little more of the file in memory.

        Args:
            dictionaries: text columns by index, to return as dictionaries if the file encodes them
                so. Others of the same name may be returned as dictionaries, too.
        """
        texts = [self.schema.field(i).name for i in dictionaries if self._has_dictionary(i)]
        leaves = [leaf for column in self._leaves for leaf in column]
        if self.rows <= batch_rows and not texts:
            with decoding(self._path):
                rows = self._rows_of(self._file, range(len(self.row_groups)), leaves)
            yield rows
            return
        for group in range(len(self.row_groups)):
            batches = self._reader(group, texts).reader.iter_batches(
                batch_size=batch_rows, row_groups=[group], column_indices=leaves, use_threads=False
            )
            for batch in self._all_of(batches, group):
                yield pa.Table.from_batches([batch])

    def _reader(self, group: int, dictionaries: list[str]) -> pq.ParquetFile:
        # Prefetched bytes stay in memory while their row group is read.
        fetched = self._file.metadata.row_group(group).total_byte_size <= _FETCHED_BYTES
        if fetched and not dictionaries:
            return self._file
        with decoding(self._path):
            return pq.ParquetFile(
                self._source,
                metadata=self._file.metadata,
                read_dictionary=dictionaries,
                pre_buffer=fetched and self._threads,
                buffer_size=0 if fetched else 1 << 20,
                page_checksum_verification=True,
            )

    @property
    def repeating_texts(self) -> frozenset[int]:
        """The text columns, by index, whose values repeat so often that dictionaries save work."""
        texts = [column for column, field in enumerate(self.schema) if field.type in _TEXTS]
        self._check([self._leaves[column].start for column in texts])
        return frozenset(i for i in texts if self._has_dictionary(i) and self._width(i) <= _NARROW)

    def _chunks(self, column: int) -> list[pq.ColumnChunkMetaData]:
        footer, leaf = self._file.metadata, self._leaves[column].start
        return [footer.row_group(group).column(leaf) for group in range(footer.num_row_groups)]

    def _has_dictionary(self, column: int) -> bool:
        chunks = self._chunks(column)
        return bool(chunks) and all(chunk.has_dictionary_page for chunk in chunks)

    def _width(self, column: int) -> float:
        size_bytes = sum(chunk.total_uncompressed_size for chunk in self._chunks(column))
        return float(size_bytes / max(1, self.rows))

    def _all_of(self, batches: Iterator[pa.RecordBatch], group: int) -> Iterator[pa.RecordBatch]:
        """Yield the batches of a row group. Raises FormatError: their number of rows is wrong."""
        rows = 0
        while True:
            with decoding(self._path):
                batch = next(batches, None)
            if batch is None:
                break
            rows += batch.num_rows
            yield batch
        check_rows(self._path, rows, self._file.metadata.row_group(group).num_rows)

    @property
    def rows(self) -> int:
        """The number of rows in the file."""
        return int(self._file.metadata.num_rows)

    def groups_within(
        self,
        column: int,
        low: Bound,
        high: Bound,
        groups: Sequence[int],
        *,
        nulls: bool = True,
    ) -> list[int]:
        """Return the row groups that may contain a value from `low` to `high`, or a null.

        Args:
            column: the index of a column of whole numbers or times (as numbers in their unit), or
                of texts or bytes (as bytes).
            low, high: both ends included; None = no bound.
            nulls: whether a row group with a null is returned whatever its values are.
        """
        return self._limits(column).within(low, high, groups, nulls=nulls)

    def smallest(self, column: int) -> int | None:
        """Return the smallest value of a column of whole numbers or times, by statistics.

        Returns:
            None if statistics are missing, or a value is null.
        """
        return self._limits(column).smallest(range(len(self.row_groups)))

    def _limits(self, column: int) -> _ColumnLimits:
        (leaf,) = self._leaves[column]
        return _ColumnLimits(
            self._source, self.footer, leaf, self.schema.field(column).type, self._path
        )


@dataclass(frozen=True, slots=True)
class _ColumnLimits:
    """The values that row groups may have in one Parquet column, by their statistics."""

    source: pa.BufferReader | BinaryIO
    footer: KnownFooter
    leaf: int
    kind: pa.DataType
    path: str

    def within(self, low: Bound, high: Bound, groups: Sequence[int], *, nulls: bool) -> list[int]:
        """Return the row groups that may hold a value from `low` to `high`, or a null."""
        if isinstance(low, int) and isinstance(high, int) and self._ascends():
            return self._between(low, high, groups)
        spans = self._of(groups)
        return [
            group
            for group, span in zip(groups, spans, strict=True)
            if (nulls and span.has_nulls) or not (_less(span.most, low) or _less(high, span.least))
        ]

    def smallest(self, groups: Sequence[int]) -> int | None:
        """Return the smallest whole number; None if it is unknown, or a value is null."""
        spans = self._of(groups)
        if any(span.has_nulls for span in spans):
            return None
        least = [span.least for span in spans if isinstance(span.least, int)]
        return min(least) if least and len(least) == len(spans) else None

    def _ascends(self) -> bool:
        """Whether rows ascend by the column, of whole numbers without nulls, as the footer says."""
        metadata = self.footer.metadata
        order = metadata.row_group(0).sorting_columns if metadata.num_row_groups > 1 else ()
        if [(key.column_index, key.descending) for key in order[:1]] != [(self.leaf, False)]:
            return False
        (first,) = self._of([0])
        return isinstance(first.least, int) and not first.has_nulls

    def _between(self, low: int, high: int, groups: Sequence[int]) -> list[int]:
        """Return the groups of an ascending column; statistics of few groups are read."""

        def limit(end: str) -> Callable[[int], int]:
            def of_group(group: int) -> int:
                value = getattr(self._of([group])[0], end)
                if not isinstance(value, int):
                    raise FormatError("a sorted column has no statistics", path=self.path)
                return value

            return of_group

        first = bisect.bisect_left(groups, low, key=limit("most"))
        last = bisect.bisect_right(groups, high, key=limit("least"))
        return list(groups[first:last])

    def _of(self, groups: Sequence[int]) -> list[ValueLimits]:
        limits, leaf = self.footer.limits, self.leaf
        missing = [group for group in groups if (leaf, group) not in limits]
        if missing:
            with decoding(self.path):
                check_chunks(self.source, self.footer.metadata, missing, [leaf])
                limits |= {(leaf, group): self._read(group) for group in missing}
        return [limits[leaf, group] for group in groups]

    def _read(self, group: int) -> ValueLimits:
        statistics = self.footer.metadata.row_group(group).column(self.leaf).statistics
        if statistics is None or not statistics.has_min_max:
            return ValueLimits(None, None, has_nulls=True)
        has_nulls = not statistics.has_null_count or statistics.null_count > 0
        least, most = statistics.min_raw, statistics.max_raw
        if pa.types.is_unsigned_integer(self.kind) and isinstance(least, int):
            # Statistics store an unsigned number as a signed one with the same bits.
            bits = (1 << self.kind.bit_width) - 1
            least, most = least & bits, most & bits
        if not isinstance(least, int | bytes):
            least = most = None
        return ValueLimits(least, most, has_nulls)


def _less(one: Bound, other: Bound) -> bool:
    """Whether one value is certainly less than another; values of two kinds are not compared."""
    if isinstance(one, int) and isinstance(other, int):
        return one < other
    return isinstance(one, bytes) and isinstance(other, bytes) and one < other


def _leaves(schema: pa.Schema) -> Iterator[range]:
    """Yield for each column the range of its Parquet columns."""
    start = 0
    for field in schema:
        count = _leaf_count(field.type)
        yield range(start, start + count)
        start += count


def _leaf_count(kind: pa.DataType) -> int:
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return _leaf_count(kind.storage_type)
    if types.is_struct(kind):
        return sum(_leaf_count(kind.field(i).type) for i in range(kind.num_fields))
    if types.is_map(kind):
        return _leaf_count(kind.key_type) + _leaf_count(kind.item_type)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _leaf_count(kind.value_type)
    return 1
