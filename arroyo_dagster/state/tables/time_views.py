"""Views of an expiring table: the rows of one subtask's key range, and their changes.

Source: crates/arroyo-state/src/tables/expiring_time_key_map.rs, `ExpiringTimeKeyView`,
`KeyTimeView`, `UncachedKeyValueView`.
Differs: in managed jobs, each single row leaves every view when its time falls below the cutoff.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.codec.operations import (
    INSERT,
    DataOperation,
    DeleteKey,
    DeleteTimeKey,
    DeleteTimeRange,
    DeleteValue,
    delete_keys_of,
    encode_count,
    encode_key,
    encode_operation,
)
from arroyo_dagster.state.model.ids import TableName
from arroyo_dagster.state.model.keys import KeyRange
from arroyo_dagster.state.model.tables import TimeFile
from arroyo_dagster.state.tables.expiring_time_key import ExpiringTimeKeyTable
from arroyo_dagster.state.tables.generational import Newest, RowLayout
from arroyo_dagster.state.tables.grouping import group_codes
from arroyo_dagster.state.tables.key_index import Hashes, KeyIndex
from arroyo_dagster.state.tables.live_rows import (
    NANOS_PER_MICRO,
    LiveRows,
    Selection,
    StoredRows,
    at_time,
    equal_rows,
    not_older,
    within,
)
from arroyo_dagster.state.tables.messages import RecordBatch, TableChange
from arroyo_dagster.state.tables.rows_by_key import RowsByKey, plain

_WAITING_ROWS = 1 << 21
"""How many rows a restore collects before it drops those of older row generations."""


class TimeView:
    """The common part of all views of an expiring table: checks rows and sends them on."""

    def __init__(self, table: ExpiringTimeKeyTable, send: Callable[[TableChange], None]) -> None:
        self._table = table
        self._name = TableName(table.config.table)
        self._send = send

    @property
    def schema(self) -> pa.Schema:
        """The schema of the rows, `_timestamp` included."""
        return self._table.memory_schema

    def insert(self, rows: pa.RecordBatch | pa.Table) -> None:
        """Add rows of the table's schema (columns by position, cast where that is lossless).

        Raises:
            InputError: the columns differ, a null is not allowed, or a `_timestamp` is null or
                before 1970; nothing changed.
        """
        checked = self._checked(rows)
        self._add(checked, INSERT)
        self._keep(checked)

    def delete_keys(self, rows: pa.RecordBatch | pa.Table) -> None:
        """Delete the rows of many storage keys at once.

        Args:
            rows: one per key, of the table's schema. Their `_timestamp` must not be before that of
                any row deleted: a delete lasts as long as the file that contains it.

        Raises:
            InputError: as `insert`.
        """
        checked = self._checked(rows)
        if not checked.num_rows:
            return
        indices = self._table.key_indices
        batch = checked.combine_chunks().to_batches()[0]
        operations = delete_keys_of(
            [self.schema.field(i) for i in indices], [batch.column(i) for i in indices]
        )
        self._send(TableChange(self._name, RecordBatch(batch, operations)))
        self._drop(checked)

    def _keep(self, rows: pa.Table) -> None:
        """Add inserted rows to memory, if this view keeps rows there."""

    def _drop(self, keys: pa.Table) -> None:
        """Drop the rows of deleted keys from memory, if this view keeps rows there."""

    def _checked(self, rows: pa.RecordBatch | pa.Table) -> pa.Table:
        table = pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows
        schema = self._table.memory_schema
        if table.schema.names != schema.names:
            raise InputError(
                "the columns of the rows do not match their table",
                table=self._name,
                expected=schema.names,
                found=table.schema.names,
                next_step="give the columns in the table's order",
            )
        try:
            table = pa.Table.from_arrays(
                [col.cast(field.type) for col, field in zip(table.columns, schema, strict=True)],
                schema=schema,
            )
        except (pa.ArrowException, ValueError) as error:
            raise InputError(
                f"rows do not fit the schema of their table ({error})", table=self._name
            ) from error
        self._check_values(table)
        return table

    def _check_values(self, table: pa.Table) -> None:
        for column, field in zip(table.columns, self.schema, strict=True):
            if column.null_count and not field.nullable:
                raise InputError(
                    "a column without nulls contains a null",
                    table=self._name,
                    column=field.name,
                    nulls=column.null_count,
                )
        times = table.column(self._table.timestamp_index)
        earliest = pc.min(times).value if table.num_rows else None
        if times.null_count or (earliest is not None and earliest < 0):
            raise InputError(
                "_timestamp is null or before 1970",
                table=self._name,
                next_step="drop such rows, or give them an event time, before they are written "
                "to a table",
            )

    def _add(self, rows: pa.Table, operation: bytes) -> None:
        for batch in rows.to_batches():
            self._send(TableChange(self._name, RecordBatch(batch, operation)))


class ExpiringTimeKeyView(TimeView):
    """The live rows of this subtask's key range, in memory.

    Rows are a multiset in replay order. A row is removed when its time falls below the cutoff
    (watermark minus retention), or when it is deleted; the next restore has the same rows.
    """

    def __init__(self, table: ExpiringTimeKeyTable, send: Callable[[TableChange], None]) -> None:
        super().__init__(table, send)
        self._live = self._empty()

    def _empty(self) -> LiveRows:
        return LiveRows(self._table.form)

    def _keep(self, rows: pa.Table) -> None:
        self._live.append(rows)

    def _drop(self, keys: pa.Table) -> None:
        self._live.remove_keys(keys)

    # ---- reading ---------------------------------------------------------------------------------

    def rows(self) -> pa.Table:
        """Return all live rows."""
        return self._live.rows()

    def rows_between(self, start_micros: int, end_micros: int) -> pa.Table:
        """Return the live rows with start ≤ `_timestamp` < end."""
        rows = self.rows()
        return rows.filter(self._between(rows, start_micros, end_micros))

    def _between(self, rows: pa.Table, start_micros: int, end_micros: int) -> pa.ChunkedArray:
        times = rows.column(self._table.timestamp_index)
        return within(times, start_micros * NANOS_PER_MICRO, end_micros * NANOS_PER_MICRO)

    def __len__(self) -> int:
        return len(self._live)

    # ---- deleting --------------------------------------------------------------------------------

    def delete_key(self, *key: object) -> int:
        """Delete the rows of a storage key, and return their number."""
        operation = DeleteKey(self._key_bytes(key))
        selection = self._live.select(self._key_scalars(key))
        return self._delete(operation, selection, selection.mask)

    def delete_time_key(self, timestamp_micros: int, *key: object) -> int:
        """Delete the rows of a storage key at one time, and return their number."""
        nanos = timestamp_micros * NANOS_PER_MICRO
        operation = DeleteTimeKey(nanos, self._key_bytes(key))
        selection = self._live.select(self._key_scalars(key))
        times = selection.rows.column(self._table.timestamp_index)
        return self._delete(operation, selection, pc.and_(selection.mask, at_time(times, nanos)))

    def delete_time_range(self, start_micros: int, end_micros: int, *key: object) -> int:
        """Delete the rows of a key with start ≤ `_timestamp` < end, and return their number."""
        operation = DeleteTimeRange(
            self._key_bytes(key), start_micros * NANOS_PER_MICRO, end_micros * NANOS_PER_MICRO
        )
        selection = self._live.select(self._key_scalars(key))
        between = self._between(selection.rows, start_micros, end_micros)
        return self._delete(operation, selection, pc.and_(selection.mask, between))

    def delete_value(self, row: pa.RecordBatch | pa.Table) -> int:
        """Delete the rows equal to the one row given, and return their number."""
        target = self._checked(row)
        if target.num_rows != 1:
            raise InputError(f"delete_value takes one row, not {target.num_rows}", table=self._name)
        time = target.column(self._table.timestamp_index)[0].value
        scalars = [target.column(index)[0] for index in self._table.key_indices]
        # The row contains every value; the operation contains the number of such rows.
        key = encode_key(
            [self.schema.field(index) for index in self._table.key_indices],
            [plain(scalar) for scalar in scalars],
        )
        selection = self._live.select(scalars)
        mask = equal_rows(selection.rows, target, target.num_columns)
        count = encode_count(pc.sum(mask).as_py() or 0)
        return self._delete(DeleteValue(key, time, count), selection, mask)

    def _key_bytes(self, key: Sequence[object]) -> bytes:
        columns = [self.schema.field(index) for index in self._table.key_indices]
        scalars = self._key_scalars(key)
        return encode_key(columns, [plain(scalar) for scalar in scalars])

    def _key_scalars(self, key: Sequence[object]) -> list[pa.Scalar]:
        indices = self._table.key_indices
        if len(key) != len(indices):
            raise InputError(
                f"the storage key has {len(indices)} columns, {len(key)} values were given",
                table=self._name,
                columns=[self.schema.field(index).name for index in indices],
            )
        try:
            return [
                pa.scalar(value, self.schema.field(index).type)
                for value, index in zip(key, indices, strict=True)
            ]
        except (pa.ArrowException, TypeError, OverflowError) as error:
            raise InputError(f"not a storage key ({error})", table=self._name) from error

    def _delete(self, operation: DataOperation, selection: Selection, mask: pa.ChunkedArray) -> int:
        deleted = selection.rows.filter(mask)
        if not deleted.num_rows:
            return 0  # the subtask has every row of its keys, so no older file holds one of them
        # The operation is stored with the newest of the rows that it deletes: its file then
        # outlives every file that holds one of them.
        times = deleted.column(self._table.timestamp_index)
        latest = pc.index(times, pc.max(times)).as_py()
        self._add(deleted.slice(latest, 1), encode_operation(operation))
        self._live.remove_selected(selection, mask)
        return int(deleted.num_rows)

    # ---- following the files ---------------------------------------------------------------------

    def replay(self, stored: Sequence[StoredRows]) -> None:
        """Apply the rows of files, in replay order, to the present rows."""
        self._live.replay(stored)

    def evict(self, cutoff_micros: int) -> None:
        """Drop rows older than the cutoff from memory."""
        self._live.evict(cutoff_micros)

    def forget(self) -> None:
        """Drop every row from memory, before a replay of all files."""
        self._live = self._empty()


class KeyTimeView(ExpiringTimeKeyView):
    """The live rows by storage key, in memory, as a join needs them.

    `get` and every change cost what they return or change, not what the table holds, unless a
    column of the key is nested.
    """

    def __init__(self, table: ExpiringTimeKeyTable, send: Callable[[TableChange], None]) -> None:
        super().__init__(table, send)
        keys = set(table.key_indices)
        self._values = [i for i in range(len(table.memory_schema)) if i not in keys]

    def _empty(self) -> LiveRows:
        nested = (pa.types.is_nested(self.schema.field(i).type) for i in self._table.key_indices)
        return LiveRows(self._table.form) if any(nested) else RowsByKey(self._table.form)

    @property
    def value_schema(self) -> pa.Schema:
        """The columns that are not keys, in the order of the table."""
        return pa.schema([self.schema.field(index) for index in self._values])

    def get(self, *key: object) -> pa.Table:
        """Return the rows of a storage key, without its columns; no rows if there is no such key.

        Raises:
            InputError: the number of values is not that of the key's columns, or their types
                differ.
        """
        scalars = self._key_scalars(key)
        if isinstance(self._live, RowsByKey):
            return self._live.select(scalars).rows.select(self._values)
        rows = self.rows()
        # Which rows have these values, as `of_scalars`, but also for nested values.
        columns = [
            pa.chunked_array([pa.repeat(scalar, 1), *rows.column(index).chunks], scalar.type)
            for index, scalar in zip(self._table.key_indices, scalars, strict=True)
        ]
        codes = group_codes(columns, rows.num_rows + 1)
        mask = pa.chunked_array([pa.array(codes[1:] == codes[0])])
        return rows.filter(mask).select(self._values)

    def keys(self) -> pa.Table:
        """Return each storage key once, in the order of first appearance; only the key columns."""
        keys = self.rows().select(list(self._table.key_indices))
        codes = group_codes(keys.columns, len(self))
        first = np.sort(np.unique(codes, return_index=True)[1])
        return keys.take(pa.array(first, pa.int64()))


class UncachedKeyValueView(TimeView):
    """A view that sends rows on and keeps none in memory; an operator reads all rows when it
    starts.

    Reads return the rows of the epoch from which the operator continues, without rows inserted
    since.
    """

    def __init__(
        self, table: ExpiringTimeKeyTable, send: Callable[[TableChange], None], keys: KeyRange
    ) -> None:
        super().__init__(table, send)
        self._keys = keys
        self._files: tuple[TimeFile, ...] = ()
        self._cutoff_micros = 0

    def go_on_from(self, files: Sequence[TimeFile], cutoff_micros: int) -> None:
        """Set the files that the epoch lists for this table, and the cutoff of its event times."""
        self._files, self._cutoff_micros = tuple(files), cutoff_micros

    def get_all(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Yield all rows of this subtask's keys, in replay order, some ten thousand at a time.

        If the files contain deletes, all rows come at once, because the deletes must be applied. Of
        generational tables every row generation is returned; see `get_newest`.

        Args:
            columns: read only these columns, in the order of the table; None = all.

        Raises:
            InputError: a name is not a column.
        """
        names = self.schema.names
        unknown = sorted(set(columns or ()) - set(names))
        if unknown:
            raise InputError(
                f"the table has no column {unknown[0]!r}", table=self._name, columns=names
            )
        places = [i for i, name in enumerate(names) if columns is None or name in columns]
        if not all(part.inserts_only for part in self._stream(())):
            yield self._load(places)
            return
        time = self._table.timestamp_index
        needed = sorted({*places, time})
        for part in self._stream(needed):
            fresh = self._fresh(part.rows, needed.index(time))
            rows = fresh.select([needed.index(place) for place in places])
            if rows.num_rows:
                yield rows

    def _stream(self, columns: Sequence[int]) -> Iterator[StoredRows]:
        return self._table.stream(
            self._files, self._keys, columns=columns, cutoff_micros=self._cutoff_micros
        )

    def get_newest(self) -> pa.Table:
        """Return the row of the largest row generation of each storage key.

        Raises:
            InputError: the table is not generational.
        """
        return self._newest().rows()

    def indexed(self) -> tuple[pa.Table, KeyIndex]:
        """Return all rows, in replay order, and an index of the newest row of each storage key.

        Less work than `get_newest` if few of the keys are needed. Only for keys of texts, bytes and
        whole numbers. Errors as `get_newest`.
        """
        return self._newest().index()

    def _newest(self) -> Newest:
        if not self._table.config.generational:
            raise InputError(
                "the rows of this table have no generations",
                table=self._name,
                next_step="register it with generational=True, or read it with get_all",
            )
        layout = RowLayout.of(self._table.config, self.schema, managed=True)
        newest = Newest(layout, _WAITING_ROWS)
        newest.add(self.schema.empty_table())

        def hashed(part: StoredRows) -> tuple[pa.Table, Hashes] | None:
            rows = self._fresh(part.rows, self._table.timestamp_index)
            return (rows, newest.hashes(rows)) if part.inserts_only else None

        for read in self._table.ahead(
            self._files, self._keys, hashed, cutoff_micros=self._cutoff_micros
        ):
            if read is None:  # rows were deleted: all rows must be loaded to apply that
                newest = Newest(layout)
                newest.add(self._load(range(len(self.schema))))
                break
            newest.add(*read)
        return newest

    def _fresh(self, rows: pa.Table, time: int) -> pa.Table:
        """Return the rows that are not older than the cutoff; `time`: the index of event time."""
        if self._cutoff_micros <= 0:
            return rows
        return rows.filter(not_older(rows.column(time), self._cutoff_micros))

    def _load(self, places: Sequence[int]) -> pa.Table:
        return self._table.load(
            self._files, self._keys, cutoff_micros=self._cutoff_micros, columns=places
        )
