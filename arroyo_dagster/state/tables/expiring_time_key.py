"""Expiring time-key tables: Arrow rows with an event time, kept for a retention.

Source: crates/arroyo-state/src/tables/expiring_time_key_map.rs.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.codec.hashing.routing import key_hashes
from arroyo_dagster.state.codec.schema import file_schema, memory_schema, stored_schema
from arroyo_dagster.state.model.checkpoints import ExpiringTimeKeyReport
from arroyo_dagster.state.model.ids import TableName
from arroyo_dagster.state.model.json_fields import MAX_I64
from arroyo_dagster.state.model.keys import KeyRange
from arroyo_dagster.state.model.tables import ExpiringTimeKeyConfig, TableConfig, TimeFile
from arroyo_dagster.state.planning.restore.checkpoint import cutoff_micros, files_to_carry
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.live_rows import LiveRows, RowForm, StoredRows, not_older
from arroyo_dagster.state.tables.messages import RecordBatch, TableData
from arroyo_dagster.state.tables.table import EpochFiles
from arroyo_dagster.state.tables.time_files import (
    ReadRequest,
    TimeFileReader,
    in_range,
    write_time_file,
)

_Made = TypeVar("_Made")


class ExpiringTimeKeyTable:
    """The stored side of one expiring table: reads files and opens checkpointers."""

    def __init__(self, config: TableConfig, store: ObjectStore) -> None:
        if not isinstance(config.config, ExpiringTimeKeyConfig):
            raise InputError("not the configuration of an expiring table", table=config.table)
        self.config = config.config
        self.memory_schema = memory_schema(self.config)
        self.file_schema = file_schema(self.config)
        self.form = RowForm.of(self.config, self.memory_schema)
        self._store = store
        self._reader = TimeFileReader(self.config, store)

    @property
    def timestamp_index(self) -> int:
        """The index of `_timestamp` among the columns."""
        return self.config.schema.timestamp_index

    def cutoff_micros(self, watermark_micros: int | None) -> int:
        """Return the oldest event time that is still kept at a watermark; 0 = all rows are kept."""
        return cutoff_micros(watermark_micros, self.config.retention_micros)

    @property
    def key_indices(self) -> tuple[int, ...]:
        """The indices of the storage key; empty if rows have no key."""
        return self.config.schema.key_indices or ()

    @property
    def is_divisible(self) -> bool:
        """Whether rows of one storage key, which may affect each other, have one routing key."""
        return set(self.config.schema.hashed_indices) <= set(self.key_indices)

    def read(
        self,
        files: Iterable[TimeFile],
        keys: KeyRange,
        *,
        columns: Sequence[int] | None = None,
        cutoff_micros: int = 0,
        batches: bool = False,
    ) -> list[StoredRows]:
        """Read the rows of `files` whose keys are in `keys`, in replay order, as the operator sees
        them.

        Files of older epochs are read with the table's current schema
        (`planning.restore.schema_evolution`). If only parts of a file are needed, only those ranges
        of it are read.

        Args:
            columns: the indices of the columns to read, ascending; None = all.
            cutoff_micros: older rows need not be read, but may be; 0 = read all rows.
            batches: number the record batches of each file, for rules that depend on them.

        Raises:
            FormatError: a file is broken, or has other columns than its table had at its epoch.
        """
        return self._reader.read(files, self._request(keys, columns, cutoff_micros, batches))

    def stream(
        self,
        files: Iterable[TimeFile],
        keys: KeyRange,
        *,
        columns: Sequence[int] | None = None,
        cutoff_micros: int = 0,
        batches: bool = False,
    ) -> Iterator[StoredRows]:
        """Read rows as `read`, piece by piece: little more than one piece is in memory at a time.

        A record batch is never split between pieces; batch numbers are valid within a piece only.
        """
        return self._reader.stream(files, self._request(keys, columns, cutoff_micros, batches))

    def ahead(
        self,
        files: Iterable[TimeFile],
        keys: KeyRange,
        then: Callable[[StoredRows], _Made],
        *,
        cutoff_micros: int = 0,
    ) -> Iterator[_Made]:
        """Read as `read`, file by file: yield the results of `then`, computed by a few threads."""
        return self._reader.ahead(files, self._request(keys, None, cutoff_micros, False), then)

    def _request(
        self, keys: KeyRange, columns: Sequence[int] | None, cutoff_micros: int, batches: bool
    ) -> ReadRequest:
        indexes = range(len(self.memory_schema)) if columns is None else columns
        return ReadRequest(
            keys=keys, columns=tuple(indexes), cutoff_micros=cutoff_micros, batches=batches
        )

    def load(
        self,
        files: Sequence[TimeFile],
        keys: KeyRange,
        *,
        cutoff_micros: int,
        columns: Sequence[int] | None = None,
    ) -> pa.Table:
        """Return the rows in `keys` that a restore at this cutoff holds; arguments as for `read`.

        All row generations are included: see `tables.generational`.
        """
        everything = tuple(range(len(self.memory_schema)))
        indexes = everything if columns is None else tuple(columns)
        needed = tuple(sorted({*indexes, self.timestamp_index}))
        parts = self.read(files, keys, columns=needed, cutoff_micros=cutoff_micros)
        if needed != everything and not all(part.inserts_only for part in parts):
            needed = everything  # a delete compares the key, or every column
            parts = self.read(files, keys, cutoff_micros=cutoff_micros)
        live = LiveRows(self.form.only(needed))
        live.replay(parts)
        live.evict(cutoff_micros)
        return live.rows().select([needed.index(index) for index in indexes])

    def checkpoint(self, files: EpochFiles) -> ExpiringTimeKeyTableCheckpointer:
        """Open a checkpointer for the changes until the barrier of `files.epoch`."""
        return ExpiringTimeKeyTableCheckpointer(self, self._store, files)


class ExpiringTimeKeyTableCheckpointer:
    """Collects rows between two barriers, then writes them as one file."""

    def __init__(self, table: ExpiringTimeKeyTable, store: ObjectStore, files: EpochFiles) -> None:
        self._table = table
        self._store = store
        self._files = files
        self._pending: list[RecordBatch] = []
        self._prepared: pa.Table | None = None

    def apply(self, data: TableData) -> None:
        """Keep rows until `finish`.

        Raises:
            InputError: pairs, or commit data.
        """
        if not isinstance(data, RecordBatch):
            raise InputError("pairs for an expiring table", table=self._table.config.table)
        self._pending.append(data)

    def prepare(self, watermark_micros: int | None) -> None:
        """Hash the rows that are not older than the cutoff.

        Raises:
            InputError: a row's key belongs to another subtask; a restore would lose the row here.
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
                _operations(data.operation, data.rows.num_rows)
                for data in self._pending
                if data.rows.num_rows
            ],
            pa.binary(),
        )
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
        columns = [*rows.columns, pa.chunked_array([hashed]), operations]
        stored = pa.Table.from_arrays(columns, schema=self._table.file_schema)
        if cutoff > 0:
            times = rows.column(self._table.timestamp_index)
            stored = stored.filter(not_older(times, cutoff))
        return stored

    def finish(
        self, watermark_micros: int | None, listed: Sequence[TimeFile]
    ) -> tuple[ExpiringTimeKeyReport | None, int]:
        """Write the rows that `prepare` made, and carry over listed files that have not expired."""
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


def _operations(value: bytes | Sequence[bytes] | pa.BinaryArray, count: int) -> pa.Array:
    if isinstance(value, pa.Array):
        return value
    if not isinstance(value, bytes):
        return pa.array(value, pa.binary())
    width = len(value)
    offsets = np.arange(0, (count + 1) * width, width, dtype=np.int32)[: count + 1]
    return pa.Array.from_buffers(
        pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(value * count)]
    )


def timestamp_table_config(
    name: str,
    description: str = "",
    retention: dt.timedelta | None = None,
    generational: bool = False,
    schema: pa.Schema | None = None,
    *,
    retention_micros: int | None = None,
    keys: Sequence[str] = (),
    routing_keys: Sequence[str] | None = None,
) -> TableConfig:
    """Configure an expiring time-key table. The positional arguments are in Arroyo's order.

    Args:
        retention: how far behind the watermark rows are kept: a duration of the standard library
            or of Pendulum. Or `retention_micros`, in microseconds.
        schema: of the rows, with `_timestamp` (timestamp in ns) among the columns.
        keys: the storage key columns; rows are routed to the subtask that owns their hash.
        routing_keys: the columns to hash, if they are not `keys`.

    Raises:
        InputError: no schema, not exactly one retention, or one out of bounds; for the rest see
            `codec.schema.stored_schema`.

    Source: crates/arroyo-state/src/lib.rs, `timestamp_table_config`.
    Differs: the schema of Arroyo names the keys; here `keys` does.
    """
    if schema is None:
        raise InputError("a table needs a schema", table=name)
    if (retention is None) == (retention_micros is None):
        raise InputError("a table needs either retention or retention_micros", table=name)
    micros = retention_micros if retention is None else _whole_micros(retention, name)
    if micros is None or not 0 <= micros <= MAX_I64:
        raise InputError(
            "the retention is out of bounds: expected 0 or more microseconds of 63 bits",
            table=name,
            retention_micros=micros,
        )
    return TableConfig(
        config=ExpiringTimeKeyConfig(
            table=TableName(name),
            description=description,
            retention_micros=micros,
            generational=generational,
            schema=stored_schema(schema, keys=keys, routing_keys=routing_keys),
        )
    )


def _whole_micros(retention: object, table: str) -> int:
    if not isinstance(retention, dt.timedelta):
        raise InputError(
            f"a retention is a duration, not {retention!r:.40}",
            table=table,
            next_step="give a timedelta, or retention_micros",
        )
    # Of timedelta itself: a duration of Pendulum has an arithmetic of its own.
    return dt.timedelta.__floordiv__(retention, dt.timedelta(microseconds=1))
