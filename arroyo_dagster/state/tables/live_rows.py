"""Rows of an expiring table in replay order, after deletes and the cutoff are applied."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.state.codec.operations import (
    INSERT,
    DataOperation,
    DeleteKey,
    DeleteTimeKey,
    DeleteTimeRange,
    DeleteValue,
    decode_count,
    decode_operation,
)
from arroyo_dagster.state.model.tables import ExpiringTimeKeyConfig
from arroyo_dagster.state.tables.grouping import group_codes

NANOS_PER_MICRO = 1000


@dataclass(frozen=True, slots=True)
class RowForm:
    """The columns of a table's rows, for applying operations to them.

    Attributes:
        schema: of the rows; begins with the columns that the operator sees.
        width: the number of these columns.
        timestamp_index, key_indices: of event time, and of the storage key.
    """

    schema: pa.Schema
    width: int
    timestamp_index: int
    key_indices: tuple[int, ...]

    @classmethod
    def of(cls, config: ExpiringTimeKeyConfig, memory: pa.Schema) -> RowForm:
        """Return the form of rows as the operator sees them."""
        schema = config.schema
        return cls(memory, len(memory), schema.timestamp_index, schema.key_indices or ())

    def only(self, columns: Sequence[int]) -> RowForm:
        """Return the form of rows with some of the columns, which must include event time."""
        schema = pa.schema([self.schema.field(index) for index in columns])
        keys = tuple(columns.index(index) for index in self.key_indices if index in columns)
        return RowForm(schema, len(schema), columns.index(self.timestamp_index), keys)

    def as_stored(self, file_schema: pa.Schema) -> RowForm:
        """Return the form of rows with `_key_hash` and `_operation` appended."""
        return replace(self, schema=file_schema)


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows of one file, and the operation of each.

    Attributes:
        operations: bytes, perhaps dictionary-encoded.
        batches: for each row, the number of the record batch in which Arroyo would read it, of at
            most 1024 rows and from one row group; None if not requested.
    """

    rows: pa.Table
    operations: pa.ChunkedArray
    batches: npt.NDArray[np.int64] | None = None

    @property
    def deletes(self) -> int:
        """How many of the rows are not inserts."""
        operations = self.operations
        if pa.types.is_dictionary(operations.type):
            if all(set(chunk.dictionary.to_pylist()) <= {INSERT} for chunk in operations.chunks):
                return 0
            operations = operations.cast(operations.type.value_type)
        return int(pc.sum(pc.not_equal(operations, INSERT), min_count=0).as_py())

    @property
    def inserts_only(self) -> bool:
        return not self.deletes


@dataclass(frozen=True, slots=True)
class Selection:
    """Rows among which are those of one storage key.

    Attributes:
        mask: which of the rows have the key.
        numbers: of the rows, if the rows are found by them.
    """

    rows: pa.Table
    mask: pa.ChunkedArray
    numbers: npt.NDArray[np.int64] | None = None


class LiveRows:
    """Rows in replay order, after deletes and the cutoff are applied."""

    def __init__(self, form: RowForm) -> None:
        self._form = form
        self._batches: list[pa.Table] = []

    def __len__(self) -> int:
        return sum(batch.num_rows for batch in self._batches)

    def rows(self) -> pa.Table:
        """Return all rows."""
        if len(self._batches) != 1:
            self._batches = [pa.concat_tables([self._form.schema.empty_table(), *self._batches])]
        return self._batches[0]

    def append(self, *rows: pa.Table) -> None:
        """Append rows."""
        self._batches.extend(part for part in rows if part.num_rows)

    def remove(self, mask: pa.ChunkedArray) -> None:
        """Remove the rows where `mask`, one value for each of `rows()`, is true."""
        self._batches = [self.rows().filter(pc.invert(mask))]

    def select(self, scalars: Sequence[pa.Scalar]) -> Selection:
        """Return rows among which are all those with this storage key."""
        rows = self.rows()
        return Selection(rows, of_scalars(rows, self._form.key_indices, scalars))

    def remove_selected(self, selection: Selection, mask: pa.ChunkedArray) -> None:
        """Remove the selected rows where `mask` is true; nothing changed since `select`."""
        self.remove(mask)

    def remove_keys(self, keys: pa.Table) -> None:
        """Remove the rows that have the storage key of one of `keys`, rows of the same form."""
        rows, indices = self.rows(), self._form.key_indices
        if not rows.num_rows:
            return
        if not all(_is_exact(rows.column(index).type) for index in indices):
            for key in range(keys.num_rows):
                scalars = [keys.column(index)[key] for index in indices]
                self.remove(of_scalars(self.rows(), indices, scalars))
            return
        both = [pa.chunked_array([*keys.column(i).chunks, *rows.column(i).chunks]) for i in indices]
        codes = group_codes(both, keys.num_rows + rows.num_rows)
        mask = np.isin(codes[keys.num_rows :], codes[: keys.num_rows])
        self.remove(pa.chunked_array([pa.array(mask)]))

    def replay(self, stored: Sequence[StoredRows]) -> None:
        """Apply the rows of files, in replay order, to the present rows."""
        for part in stored:
            if part.inserts_only:
                self.append(part.rows)
            else:
                self._replay_operations(part)

    def _replay_operations(self, part: StoredRows) -> None:
        operations = [
            None if operation == INSERT else decode_operation(operation)
            for operation in part.operations.to_pylist()
        ]
        start = 0
        for kind, run in itertools.groupby(enumerate(operations), key=lambda item: type(item[1])):
            deletes = [(index, operation) for index, operation in run if operation is not None]
            if not deletes:
                continue
            first, last = deletes[0][0], deletes[-1][0]
            self.append(part.rows.slice(start, first - start))
            if kind is DeleteKey:
                self.remove_keys(part.rows.slice(first, last + 1 - first))
            else:
                for index, operation in deletes:
                    self._delete(operation, part.rows.slice(index, 1))
            start = last + 1
        self.append(part.rows.slice(start))

    def _delete(self, operation: DataOperation, carrier: pa.Table) -> None:
        indices = self._form.key_indices
        selection = self.select([carrier.column(index)[0] for index in indices])
        self.remove_selected(selection, self._deleted_by(operation, carrier, selection))

    def _deleted_by(
        self, operation: DataOperation, carrier: pa.Table, selection: Selection
    ) -> pa.ChunkedArray:
        rows = selection.rows
        if isinstance(operation, DeleteValue):
            # `mask` with only its first `count` true rows; None = all of them.
            mask = equal_rows(rows, carrier, self._form.width)
            count = decode_count(operation.value)
            if count is None:
                return mask
            flags = mask.to_numpy()
            return pa.chunked_array([pa.array(flags & (np.cumsum(flags) <= count))])
        assert not isinstance(operation, DeleteKey)  # handled by `remove_keys`
        times = rows.column(self._form.timestamp_index)
        if isinstance(operation, DeleteTimeKey):
            return pc.and_(selection.mask, at_time(times, operation.timestamp_nanos))
        assert isinstance(operation, DeleteTimeRange)
        return pc.and_(selection.mask, within(times, operation.start_nanos, operation.end_nanos))

    def evict(self, cutoff_micros: int) -> None:
        """Drop the rows older than the cutoff; a row at the cutoff is kept."""
        if cutoff_micros <= 0 or not self._batches:
            return
        rows = self.rows()
        kept = rows.filter(not_older(rows.column(self._form.timestamp_index), cutoff_micros))
        if kept.num_rows < rows.num_rows:
            self._batches = [kept.combine_chunks()]


def _is_exact(kind: pa.DataType) -> bool:
    """Whether two values are equal exactly if their bits are; not so for 0.0 and -0.0."""
    return not pa.types.is_floating(kind) and not pa.types.is_nested(kind)


# ---- masks ---------------------------------------------------------------------------------------


def nanos(value: int) -> pa.Scalar:
    """Return an event time in nanoseconds as a value of the column `_timestamp`."""
    return pa.scalar(value, pa.timestamp("ns"))


def not_older(times: pa.ChunkedArray, cutoff_micros: int) -> pa.ChunkedArray:
    """Return which event times are at or after the cutoff; a null is never too old."""
    fresh = pc.greater_equal(times, nanos(cutoff_micros * NANOS_PER_MICRO))
    return pc.fill_null(fresh, True)


def at_time(times: pa.ChunkedArray, wanted_nanos: int) -> pa.ChunkedArray:
    """Return which event times equal this one."""
    return pc.fill_null(pc.equal(times, nanos(wanted_nanos)), False)


def within(times: pa.ChunkedArray, start_nanos: int, end_nanos: int) -> pa.ChunkedArray:
    """Return which event times are at or after the start, and before the end."""
    after = pc.greater_equal(times, nanos(start_nanos))
    return pc.fill_null(pc.and_(after, pc.less(times, nanos(end_nanos))), False)


def of_scalars(
    rows: pa.Table, indices: Sequence[int], scalars: Sequence[pa.Scalar]
) -> pa.ChunkedArray:
    """Return which rows have these values in these columns; null equals null."""
    mask = pa.chunked_array([pa.repeat(pa.scalar(True), rows.num_rows)])
    for index, scalar in zip(indices, scalars, strict=True):
        column = rows.column(index)
        same = pc.is_null(column) if not scalar.is_valid else pc.equal(column, scalar)
        mask = pc.and_(mask, pc.fill_null(same, False))
    return mask


def equal_rows(rows: pa.Table, wanted: pa.Table, width: int) -> pa.ChunkedArray:
    """Return which rows equal the one row `wanted` in the first `width` columns, nulls included."""
    indices = range(width)
    try:
        return of_scalars(rows, indices, [wanted.column(index)[0] for index in indices])
    except pa.ArrowNotImplementedError:
        # Nested columns have no vectorised equality: compare these rows one by one.
        row = [wanted.column(index)[0] for index in indices]
        same = [
            all(rows.column(i)[row_number].equals(row[i]) for i in indices)
            for row_number in range(rows.num_rows)
        ]
        return pa.chunked_array([pa.array(same, pa.bool_())])
