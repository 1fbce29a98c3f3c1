"""Expiring time-key tables: Arrow rows with an event time, kept for a retention.

Source: crates/arroyo-state/src/tables/expiring_time_key_map.rs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.errors import FormatError, InputError
from arroyo_dagster.state.codec.hashing import key_hashes
from arroyo_dagster.state.codec.operations import (
    INSERT,
    DataOperation,
    DeleteKey,
    DeleteTimeKey,
    DeleteTimeRange,
    DeleteValue,
    decode_operation,
    encode_key,
    encode_operation,
)
from arroyo_dagster.state.codec.parquet import decode_file, encode_rows
from arroyo_dagster.state.codec.schema import file_schema, memory_schema, stored_schema
from arroyo_dagster.state.model.checkpoints import ExpiringTimeKeyReport
from arroyo_dagster.state.model.ids import Epoch, StatePath, TableName
from arroyo_dagster.state.model.keys import KeyRange
from arroyo_dagster.state.model.layout import COMPACTED
from arroyo_dagster.state.model.tables import ExpiringTimeKeyConfig, TableConfig, TimeFile
from arroyo_dagster.state.planning.checkpoint import cutoff_micros, files_to_carry
from arroyo_dagster.state.storage.store import ObjectStore, read_many
from arroyo_dagster.state.tables.messages import CommitData, KeyedData, RowData, TableData
from arroyo_dagster.state.tables.table import Compaction, EpochFiles

_NANOS_PER_MICRO = 1000


class ExpiringTimeKeyTable:
    """The stored side of one expiring table: reads files, opens checkpointers."""

    def __init__(self, config: TableConfig, store: ObjectStore) -> None:
        if not isinstance(config.config, ExpiringTimeKeyConfig):
            raise InputError("not the configuration of an expiring table", table=config.table)
        self.config = config.config
        self.memory_schema = memory_schema(self.config)
        self.file_schema = file_schema(self.config)
        self._store = store

    @property
    def timestamp_index(self) -> int:
        return self.config.schema.timestamp_index

    def cutoff_micros(self, watermark_micros: int | None) -> int:
        """The oldest event time that is still kept at a watermark."""
        return cutoff_micros(watermark_micros, self.config.retention_micros)

    @property
    def key_indices(self) -> tuple[int, ...]:
        return self.config.schema.key_indices or ()

    def read(self, files: Iterable[TimeFile], keys: KeyRange) -> list[StoredRows]:
        """Read the rows of `files` that lie in `keys`, in replay order.

        Raises:
            FormatError: a file has other columns than the table's configuration says.
        """
        width = list(range(len(self.memory_schema)))
        return [
            StoredRows(part.rows.select(width), part.operations)
            for part in self._whole(files, keys)
        ]

    def _whole(self, files: Iterable[TimeFile], keys: KeyRange) -> list[StoredRows]:
        wanted = [f for f in files if keys.intersects(f.min_routing_key, f.max_routing_key)]
        data = read_many(self._store, [file.path for file in wanted])
        return [self._whole_rows(data[file.path], file, keys) for file in wanted]

    def _whole_rows(self, data: bytes, file: TimeFile, keys: KeyRange) -> StoredRows:
        """The rows as stored, `_key_hash` and `_operation` among the columns."""
        rows, _ = decode_file(data, file.path)
        if not rows.schema.equals(self.file_schema):
            raise FormatError(
                "the columns of a data file are not those of its table",
                table=self.config.table,
                path=file.path,
                expected=[f"{field.name}: {field.type}" for field in self.file_schema],
                found=[f"{field.name}: {field.type}" for field in rows.schema],
                next_step="keep the file; an operator's schema cannot change under its state: "
                "give the table a new name, or go back to the old schema",
            )
        if not keys.covers(file.min_routing_key, file.max_routing_key):
            rows = rows.filter(in_range(rows.column(rows.num_columns - 2), keys))
        return StoredRows(rows, rows.column(rows.num_columns - 1))

    def live_rows(
        self,
        files: Iterable[TimeFile],
        keys: KeyRange,
        *,
        cutoff_micros: int,
        from_oldest: bool,
    ) -> LiveRows:
        """The rows in `keys` that `files` add to a restore at this cutoff, as they are stored.

        Args:
            from_oldest: nothing older is listed: deletes are applied, else they are rows too.
        """
        live = LiveRows(self, self.file_schema)
        parts = self._whole(files, keys)
        if from_oldest:
            live.replay(parts)
        else:
            live.append(*(part.rows for part in parts))
        live.evict(cutoff_micros)
        return live

    def compact_data(
        self,
        files: Sequence[TimeFile],
        name_file: Callable[[str], StatePath],
        keys: KeyRange,
        *,
        cutoff_micros: int,
        from_oldest: bool,
    ) -> Compaction[TimeFile]:
        """Merge the rows of `files` that lie in `keys` into one new file; none if none are left.

        Hashes are copied, order is kept, rows older than the cutoff are dropped.

        Args:
            files: neighbours in the replay order of `keys`.
            from_oldest: nothing older is listed: deletes are applied and disappear.
        """
        parts = self._whole(files, keys)
        live = LiveRows(self, self.file_schema)
        dropped: dict[str, int] = {}
        if from_oldest:
            live.replay(parts)
            dropped["delete operations, applied"] = sum(part.deletes for part in parts)
        else:
            live.append(*(part.rows for part in parts))
        rows_in = sum(part.rows.num_rows for part in parts)
        dropped["rows deleted"] = rows_in - len(live) - sum(dropped.values())
        before = len(live)
        live.evict(cutoff_micros)
        dropped["rows older than the retention"] = before - len(live)
        outputs: tuple[TimeFile, ...] = ()
        size = 0
        if len(live):
            output, size = write_time_file(
                self._store,
                live.rows(),
                name_file(COMPACTED),
                epoch=max(file.epoch for file in files),
                timestamp_index=self.timestamp_index,
            )
            level = 1 + max(file.compaction_generation for file in files)
            outputs = (replace(output, compaction_generation=level),)
        return Compaction(
            outputs=outputs,
            rows_in=rows_in,
            rows_out=len(live),
            dropped={reason: count for reason, count in dropped.items() if count},
            size_bytes=size,
        )

    def checkpoint(self, files: EpochFiles) -> ExpiringTimeKeyTableCheckpointer:
        """Open a checkpointer for what changes until the barrier of `files.epoch`."""
        return ExpiringTimeKeyTableCheckpointer(self, self._store, files)


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows of a memory schema and the operation of each."""

    rows: pa.Table
    operations: pa.ChunkedArray

    @property
    def deletes(self) -> int:
        """How many of the rows are no inserts."""
        return int(pc.sum(pc.not_equal(self.operations, INSERT), min_count=0).as_py())

    @property
    def inserts_only(self) -> bool:
        return not self.deletes


def in_range(hashes: pa.ChunkedArray, keys: KeyRange) -> pa.ChunkedArray:
    """Which of the routing keys lie in `keys`, both ends included."""
    unsigned = pa.uint64()
    return pc.and_(
        pc.greater_equal(hashes, pa.scalar(keys.start, unsigned)),
        pc.less_equal(hashes, pa.scalar(keys.end, unsigned)),
    )


class ExpiringTimeKeyTableCheckpointer:
    """Collects rows between two barriers, then writes them as one file."""

    def __init__(self, table: ExpiringTimeKeyTable, store: ObjectStore, files: EpochFiles) -> None:
        self._table = table
        self._store = store
        self._files = files
        self._pending: list[RowData] = []
        self._prepared: pa.Table | None = None

    def apply(self, data: KeyedData | RowData | CommitData) -> None:
        """Remember rows until `finish`.

        Raises:
            InputError: pairs, or commit data.
        """
        if not isinstance(data, RowData):
            raise InputError("pairs for an expiring table", table=self._table.config.table)
        self._pending.append(data)

    def prepare(self, watermark_micros: int | None) -> None:
        """Hash the rows that are not older than the cutoff.

        Raises:
            InputError: a row whose key belongs to another subtask; a restore would lose it here.
        """
        rows = self._stored_rows(self._table.cutoff_micros(watermark_micros))
        self._prepared = rows if rows is not None and rows.num_rows else None

    def _stored_rows(self, cutoff: int) -> pa.Table | None:
        batches = [data.rows for data in self._pending if data.rows.num_rows]
        if not batches:
            return None
        rows = pa.Table.from_batches(batches, schema=self._table.memory_schema)
        operations = pa.chunked_array(
            [
                _repeated(data.operation, data.rows.num_rows)
                for data in self._pending
                if data.rows.num_rows
            ],
            pa.binary(),
        )
        hashed = self._hashed(rows)
        columns = [*rows.columns, pa.chunked_array([hashed]), operations]
        stored = pa.Table.from_arrays(columns, schema=self._table.file_schema)
        if cutoff > 0:
            times = rows.column(self._table.timestamp_index)
            fresh = pc.greater_equal(times, _time(cutoff * _NANOS_PER_MICRO))
            stored = stored.filter(pc.fill_null(fresh, True))
        return stored

    def _hashed(self, rows: pa.Table) -> pa.Array:
        indices = self._table.config.schema.hashed_indices
        hashed = key_hashes([rows.column(index) for index in indices], rows=rows.num_rows)
        strangers = pc.sum(pc.invert(in_range(hashed, self._files.keys))).as_py() or 0
        if strangers:
            raise InputError(
                f"{strangers} of {rows.num_rows} rows have keys that belong to other subtasks",
                table=self._table.config.table,
                keys=[self._table.memory_schema.field(index).name for index in indices],
                next_step="key the operator's input by the key columns of the table",
            )
        return hashed

    def finish(
        self, watermark_micros: int | None, listed: Sequence[TimeFile]
    ) -> tuple[ExpiringTimeKeyReport | None, int]:
        """Write what `prepare` made, and carry on what has not expired of what was listed."""
        cutoff = self._table.cutoff_micros(watermark_micros)
        files = files_to_carry(listed, cutoff, self._files.keys)
        size = 0
        if self._prepared is not None:
            file, size = self._write(self._prepared)
            files = (*files, file)
        if not files:
            return None, 0
        return ExpiringTimeKeyReport(watermark_micros=watermark_micros, files=files), size

    def _write(self, rows: pa.Table) -> tuple[TimeFile, int]:
        return write_time_file(
            self._store,
            rows,
            self._files.name_file(""),
            epoch=self._files.epoch,
            timestamp_index=self._table.timestamp_index,
        )


def write_time_file(
    store: ObjectStore, rows: pa.Table, path: StatePath, *, epoch: Epoch, timestamp_index: int
) -> tuple[TimeFile, int]:
    """Write rows of a file schema. Gives what metadata says of the file, bounds exact, and its
    bytes."""
    data = encode_rows(rows)
    hashes = pc.min_max(rows.column(rows.num_columns - 2))
    latest = pc.max(rows.column(timestamp_index))
    store.put(path, data)
    return TimeFile(
        epoch=epoch,
        path=path,
        min_routing_key=hashes["min"].as_py(),
        max_routing_key=hashes["max"].as_py(),
        max_timestamp_micros=max(0, latest.value or 0) // _NANOS_PER_MICRO,
    ), len(data)


def _repeated(value: bytes, count: int) -> pa.Array:
    width = len(value)
    offsets = np.arange(0, (count + 1) * width, width, dtype=np.int32)[: count + 1]
    return pa.Array.from_buffers(
        pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(value * count)]
    )


def _time(nanos: int) -> pa.Scalar:
    return pa.scalar(nanos, pa.timestamp("ns"))


class LiveRows:
    """Rows in replay order, as deletes and the cutoff leave them.

    Args:
        schema: the table's memory schema unless given; wider ones begin with its columns.
    """

    def __init__(self, table: ExpiringTimeKeyTable, schema: pa.Schema | None = None) -> None:
        self._table = table
        self._schema = schema or table.memory_schema
        self._batches: list[pa.Table] = []

    def __len__(self) -> int:
        return sum(batch.num_rows for batch in self._batches)

    def rows(self) -> pa.Table:
        """All of them."""
        if len(self._batches) != 1:
            self._batches = [pa.concat_tables([self._schema.empty_table(), *self._batches])]
        return self._batches[0]

    def append(self, *rows: pa.Table) -> None:
        """Add rows behind the others."""
        self._batches.extend(part for part in rows if part.num_rows)

    def remove(self, mask: pa.ChunkedArray) -> None:
        """Take out the rows where `mask`, one value for each of `rows()`, is true."""
        self._batches = [self.rows().filter(pc.invert(mask))]

    def replay(self, stored: Sequence[StoredRows]) -> None:
        """Apply what files hold, in replay order, on top of what is here."""
        for part in stored:
            if part.inserts_only:
                self.append(part.rows)
            else:
                self._replay_operations(part)

    def _replay_operations(self, part: StoredRows) -> None:
        operations = part.operations.to_pylist()
        start = 0
        for index, operation in enumerate(operations):
            if operation == INSERT:
                continue
            self.append(part.rows.slice(start, index - start))
            self.remove(self._deleted_by(decode_operation(operation), part.rows.slice(index, 1)))
            start = index + 1
        self.append(part.rows.slice(start))

    def _deleted_by(self, operation: DataOperation, carrier: pa.Table) -> pa.ChunkedArray:
        rows = self.rows()
        if isinstance(operation, DeleteValue):
            return equal_rows(rows, carrier, len(self._table.memory_schema))
        indices = self._table.key_indices
        of_key = of_scalars(rows, indices, [carrier.column(index)[0] for index in indices])
        times = rows.column(self._table.timestamp_index)
        if isinstance(operation, DeleteTimeKey):
            at_time = pc.equal(times, _time(operation.timestamp_nanos))
            return pc.and_(of_key, pc.fill_null(at_time, False))
        if isinstance(operation, DeleteTimeRange):
            within = pc.and_(
                pc.greater_equal(times, _time(operation.start_nanos)),
                pc.less(times, _time(operation.end_nanos)),
            )
            return pc.and_(of_key, pc.fill_null(within, False))
        return of_key

    def evict(self, cutoff_micros: int) -> None:
        """Drop the rows older than the cutoff."""
        if cutoff_micros <= 0 or not self._batches:
            return
        rows = self.rows()
        fresh = pc.greater_equal(
            rows.column(self._table.timestamp_index), _time(cutoff_micros * _NANOS_PER_MICRO)
        )
        kept = rows.filter(pc.fill_null(fresh, True))
        if kept.num_rows < rows.num_rows:
            self._batches = [kept.combine_chunks()]


class ExpiringTimeKeyView:
    """The live rows of this subtask's key range, in memory.

    Rows are a multiset in replay order. A row leaves when its time falls below the cutoff
    (watermark minus retention), or when it is deleted; both are seen by the next restore as well.
    """

    def __init__(self, table: ExpiringTimeKeyTable, send: Callable[[TableData], None]) -> None:
        self._table = table
        self._name = TableName(table.config.table)
        self._send = send
        self._live = LiveRows(table)

    @property
    def schema(self) -> pa.Schema:
        """The schema of the rows, `_timestamp` included."""
        return self._table.memory_schema

    # ---- reading ---------------------------------------------------------------------------------

    def rows(self) -> pa.Table:
        """All live rows."""
        return self._live.rows()

    def rows_between(self, start_micros: int, end_micros: int) -> pa.Table:
        """Live rows with start ≤ `_timestamp` < end."""
        rows = self.rows()
        return rows.filter(self._between(rows, start_micros, end_micros))

    def _between(self, rows: pa.Table, start_micros: int, end_micros: int) -> pa.ChunkedArray:
        times = rows.column(self._table.timestamp_index)
        after = pc.greater_equal(times, _time(start_micros * _NANOS_PER_MICRO))
        before = pc.less(times, _time(end_micros * _NANOS_PER_MICRO))
        return pc.fill_null(pc.and_(after, before), False)

    def __len__(self) -> int:
        return len(self._live)

    # ---- writing ---------------------------------------------------------------------------------

    def insert(self, rows: pa.RecordBatch | pa.Table) -> None:
        """Add rows of the table's schema (columns by position, cast where nothing is lost).

        Raises:
            InputError: other columns, a null where none is allowed, or a `_timestamp` that is null
                or before 1970; nothing changed.
        """
        checked = self._checked(rows)
        self._add(checked, INSERT)
        self._live.append(checked)

    def _checked(self, rows: pa.RecordBatch | pa.Table) -> pa.Table:
        table = pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows
        schema = self._table.memory_schema
        if table.schema.names != schema.names:
            raise InputError(
                "rows have other columns than their table",
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
        for column, field in zip(table.columns, schema, strict=True):
            if column.null_count and not field.nullable:
                raise InputError(
                    "a column that must not hold nulls does",
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
                next_step="drop such rows, or give them an event time, before they reach a table",
            )
        return table

    def _add(self, rows: pa.Table, operation: bytes) -> None:
        for batch in rows.to_batches():
            self._send(TableData(self._name, RowData(batch, operation)))

    # ---- deleting --------------------------------------------------------------------------------

    def delete_key(self, *key: object) -> int:
        """Delete the rows of a storage key. Returns how many there were."""
        return self._delete(DeleteKey(self._key_bytes(key)), self._of_key(key))

    def delete_time_key(self, timestamp_micros: int, *key: object) -> int:
        """Delete the rows of a storage key at one time. Returns how many there were."""
        nanos = timestamp_micros * _NANOS_PER_MICRO
        rows = self.rows()
        at_time = pc.equal(rows.column(self._table.timestamp_index), _time(nanos))
        mask = pc.and_(self._of_key(key), pc.fill_null(at_time, False))
        return self._delete(DeleteTimeKey(nanos, self._key_bytes(key)), mask)

    def delete_time_range(self, start_micros: int, end_micros: int, *key: object) -> int:
        """Delete the rows of a key with start ≤ `_timestamp` < end. Returns how many there were."""
        mask = pc.and_(self._of_key(key), self._between(self.rows(), start_micros, end_micros))
        operation = DeleteTimeRange(
            self._key_bytes(key), start_micros * _NANOS_PER_MICRO, end_micros * _NANOS_PER_MICRO
        )
        return self._delete(operation, mask)

    def delete_value(self, row: pa.RecordBatch | pa.Table) -> int:
        """Delete the rows equal to the one row given. Returns how many there were."""
        wanted = self._checked(row)
        if wanted.num_rows != 1:
            raise InputError(f"delete_value takes one row, not {wanted.num_rows}", table=self._name)
        rows = self.rows()
        mask = equal_rows(rows, wanted, rows.num_columns)
        time = wanted.column(self._table.timestamp_index)[0].value
        # The row carries every value; `value` in the operation would only repeat them.
        key = encode_key(
            [self.schema.field(index) for index in self._table.key_indices],
            [_plain(wanted.column(index)[0]) for index in self._table.key_indices],
        )
        return self._delete(DeleteValue(key, time, b""), mask)

    def _key_bytes(self, key: Sequence[object]) -> bytes:
        columns = [self.schema.field(index) for index in self._table.key_indices]
        scalars = self._key_scalars(key)
        return encode_key(columns, [_plain(scalar) for scalar in scalars])

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

    def _of_key(self, key: Sequence[object]) -> pa.ChunkedArray:
        rows = self.rows()
        return of_scalars(rows, self._table.key_indices, self._key_scalars(key))

    def _delete(self, operation: DataOperation, mask: pa.ChunkedArray) -> int:
        rows = self.rows()
        gone = rows.filter(mask)
        if not gone.num_rows:
            return 0  # the subtask has every row of its keys: there is nothing an older file holds
        # The row that carries the operation is the newest of those it deletes: its file then
        # outlives every file that holds one of them.
        newest = pc.index(
            gone.column(self._table.timestamp_index),
            pc.max(gone.column(self._table.timestamp_index)),
        ).as_py()
        self._add(gone.slice(newest, 1), encode_operation(operation))
        self._live.remove(mask)
        return int(gone.num_rows)

    # ---- following the files ---------------------------------------------------------------------

    def replay(self, stored: Sequence[StoredRows]) -> None:
        """Apply what files hold, in replay order, on top of what is here."""
        self._live.replay(stored)

    def evict(self, cutoff_micros: int) -> None:
        """Drop rows older than the cutoff from memory."""
        self._live.evict(cutoff_micros)

    def forget(self) -> None:
        """Drop every row from memory, for a replay of all files."""
        self._live = LiveRows(self._table)


def of_scalars(
    rows: pa.Table, indices: Sequence[int], scalars: Sequence[pa.Scalar]
) -> pa.ChunkedArray:
    """Which rows have these values in these columns; null equals null."""
    mask = pa.chunked_array([pa.repeat(pa.scalar(True), rows.num_rows)])
    for index, scalar in zip(indices, scalars, strict=True):
        column = rows.column(index)
        same = pc.is_null(column) if not scalar.is_valid else pc.equal(column, scalar)
        mask = pc.and_(mask, pc.fill_null(same, False))
    return mask


def equal_rows(rows: pa.Table, wanted: pa.Table, width: int) -> pa.ChunkedArray:
    """Which rows equal the one row `wanted` in the first `width` columns, nulls included."""
    indices = range(width)
    try:
        return of_scalars(rows, indices, [wanted.column(index)[0] for index in indices])
    except pa.ArrowNotImplementedError:
        # Nested columns have no vectorised equality: compare these rows one by one.
        row = [wanted.column(index)[0] for index in indices]
        same = [
            all(rows.column(i)[at].equals(row[i]) for i in indices) for at in range(rows.num_rows)
        ]
        return pa.chunked_array([pa.array(same, pa.bool_())])


def _plain(scalar: pa.Scalar) -> object:
    if not scalar.is_valid:
        return None
    return scalar.value if pa.types.is_temporal(scalar.type) else scalar.as_py()


def timestamp_table_config(
    name: str,
    description: str = "",
    *,
    retention_micros: int,
    schema: pa.Schema,
    keys: Sequence[str] = (),
    routing_keys: Sequence[str] | None = None,
    generational: bool = False,
) -> TableConfig:
    """Configure an expiring time-key table.

    Args:
        retention_micros: how far behind the watermark rows are kept.
        schema: the rows, `_timestamp` (timestamp in ns) among the columns.
        keys: the storage key columns; rows go to the subtask that owns their hash.
        routing_keys: the columns to hash, where these are not `keys`.

    Raises:
        InputError: see `codec.schema.stored_schema`.

    Source: crates/arroyo-state/src/lib.rs, `timestamp_table_config`.
    """
    if retention_micros < 0:
        raise InputError("a retention is not negative", table=name, retention=retention_micros)
    return TableConfig(
        config=ExpiringTimeKeyConfig(
            table=TableName(name),
            description=description,
            retention_micros=retention_micros,
            generational=generational,
            schema=stored_schema(schema, keys=keys, routing_keys=routing_keys),
        )
    )
