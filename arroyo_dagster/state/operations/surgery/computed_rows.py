"""Rows that were computed outside of a job, as data files of one of its tables.

Columns are checked against the table of the job; routing keys are computed as the job's build of
Arroyo computes them; rows are split by the key ranges of the operator's subtasks and sorted.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.errors import InputError, ProtocolError
from arroyo_dagster.state.codec.digest import digest_rows
from arroyo_dagster.state.codec.hashing.ahash import HashVariant
from arroyo_dagster.state.codec.hashing.routing import key_hashes
from arroyo_dagster.state.codec.operations import INSERT
from arroyo_dagster.state.codec.parquet import decode_file, encode_rows, encode_single_rows
from arroyo_dagster.state.codec.schema import file_schema, memory_schema
from arroyo_dagster.state.model.checkpoints import Checkpoint, OperatorCheckpoint
from arroyo_dagster.state.model.compaction import RowsDigest
from arroyo_dagster.state.model.ids import OperatorId
from arroyo_dagster.state.model.keys import range_for_server
from arroyo_dagster.state.model.layout import JobPaths, rewritten_attempt
from arroyo_dagster.state.model.tables import ExpiringTimeKeyConfig, TimeFile
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.live_rows import NANOS_PER_MICRO
from arroyo_dagster.state.tables.merge.range_files import routes
from arroyo_dagster.state.tables.time_files import write_time_file

_OTHER_ROWS = "leave such rows out, or compute the column otherwise"


@dataclass(frozen=True, slots=True)
class RowFacts:
    """Computed rows as they would be stored.

    Attributes:
        expired: how many are older than the retention at the new watermark.
        oldest_nanos: the event time of the oldest; None = there is none.
    """

    digest: RowsDigest = field(default_factory=RowsDigest)
    expired: int = 0
    oldest_nanos: int | None = None

    def __add__(self, other: RowFacts) -> RowFacts:
        times = [nanos for nanos in (self.oldest_nanos, other.oldest_nanos) if nanos is not None]
        return RowFacts(
            self.digest + other.digest, self.expired + other.expired, min(times, default=None)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TableTarget:
    """A table of a stopped job that gets computed rows.

    Attributes:
        variant: how the job's build of Arroyo hashes keys.
        cutoff_micros: rows before it are not loaded by a restore; 0 = none.
    """

    checkpoint: Checkpoint
    operator: OperatorId
    config: ExpiringTimeKeyConfig
    variant: HashVariant
    cutoff_micros: int

    @property
    def columns(self) -> pa.Schema:
        """The columns that computed rows must have, in this order."""
        return memory_schema(self.config)

    @property
    def keys(self) -> tuple[str, ...] | None:
        """The columns of which an aggregate has one row for each value; empty = one row in all;
        None = any number.
        """
        if not self.config.generational:
            return None
        return tuple(self.columns.field(at).name for at in self.config.schema.key_indices or ())

    @property
    def one_by_one(self) -> bool:
        """Whether each row needs a row group of its own: without GROUP BY Arroyo restores the first
        row of each batch only.
        """
        return self.config.generational and not self.config.schema.hashed_indices

    def stored(self, rows: pa.Table) -> pa.Table:
        """Return computed rows as a data file has them.

        Values of another type are converted if none of them changes.

        Args:
            rows: with the columns of the table, as `column_errors` checks them.

        Raises:
            InputError: a value does not fit its type, or is NULL where the job's table has none.
        """
        columns = [self._cast(rows.column(index), spec) for index, spec in enumerate(self.columns)]
        indices = self.config.schema.hashed_indices
        hashes = key_hashes(
            [columns[index] for index in indices], rows=rows.num_rows, variant=self.variant
        )
        operations = pa.repeat(pa.scalar(INSERT, pa.binary()), rows.num_rows)
        return pa.Table.from_arrays([*columns, hashes, operations], schema=file_schema(self.config))

    @property
    def _where(self) -> dict[str, Any]:
        return {"operator": str(self.operator), "table": str(self.config.table)}

    def _cast(self, column: pa.ChunkedArray, field: pa.Field) -> pa.ChunkedArray:
        try:
            if pa.types.is_timestamp(field.type) and pa.types.is_timestamp(column.type):
                # Spark's timestamps are instants; Arroyo's are instants in UTC without a zone.
                column = column.cast(pa.timestamp(column.type.unit))
            cast = column.cast(field.type, safe=True)
        except (pa.ArrowException, NotImplementedError) as error:
            raise InputError(
                f"column {field.name!r} does not fit the type {field.type} of the job ({error})",
                **self._where,
                next_step=_OTHER_ROWS,
            ) from error
        event_time = field.name == self.columns.field(self.config.schema.timestamp_index).name
        if cast.null_count and (event_time or not field.nullable):
            raise InputError(
                f"column {field.name!r} has {cast.null_count} NULL, and may have none",
                **self._where,
                next_step=_OTHER_ROWS,
            )
        if event_time and cast.length() and pc.min(cast).value < 0:
            raise InputError("event time lies before 1970", **self._where, next_step=_OTHER_ROWS)
        return cast

    def facts(self, stored: pa.Table) -> RowFacts:
        """Return the digest of stored rows, how many have expired, and the oldest event time."""
        times = stored.column(self.config.schema.timestamp_index).cast(pa.int64())
        old = pc.sum(pc.less(times, self.cutoff_micros * NANOS_PER_MICRO)).as_py() or 0
        return RowFacts(digest_rows(stored), old, pc.min(times).as_py())

    def write(self, store: ObjectStore, stored: pa.Table) -> tuple[TimeFile, ...]:
        """Write stored rows, one file for each subtask that owns some, and read each file back.

        Raises:
            ProtocolError: a file reads back different.
        """
        operator = self.checkpoint.operator(self.operator)
        assert operator is not None
        ranges = [range_for_server(at, operator.parallelism) for at in range(operator.parallelism)]
        times = self.config.schema.timestamp_index
        return tuple(
            self._write(store, operator, subtask, _in_order(rows, times))
            for subtask, rows in routes(stored, ranges)
        )

    def _write(
        self, store: ObjectStore, operator: OperatorCheckpoint, subtask: int, rows: pa.Table
    ) -> TimeFile:
        path = JobPaths(self.checkpoint.job, self.checkpoint.pipeline).data_file(
            self.operator,
            self.config.table,
            subtask,
            self.checkpoint.epoch,
            self.checkpoint.worker_generation,
            attempt=rewritten_attempt(uuid.uuid4().hex),
        )
        file, _ = write_time_file(
            store,
            rows,
            path,
            epoch=operator.epoch,
            timestamp_index=self.config.schema.timestamp_index,
            encode=encode_single_rows if self.one_by_one else encode_rows,
        )
        again, _ = decode_file(store.read(path), path)
        if not again.schema.equals(rows.schema) or digest_rows(again) != digest_rows(rows):
            raise ProtocolError(
                "a new file reads back different from what was written; nothing was published",
                path=path,
            )
        return file


def _in_order(rows: pa.Table, timestamp_index: int) -> pa.Table:
    """Return rows by event time, then by routing key: columns may share a name."""
    places = pa.table(
        {"time": rows.column(timestamp_index), "hash": rows.column(rows.num_columns - 2)}
    )
    return rows.take(pc.sort_indices(places, [("time", "ascending"), ("hash", "ascending")]))


class ComputedRows(Protocol):
    """Rows that are computed when they are asked for: in this process, or on Spark."""

    @property
    def schema(self) -> pa.Schema:
        """Their columns, known before the rows are computed."""

    def facts(self, target: TableTarget) -> RowFacts:
        """Compute the rows and describe them; write nothing.

        Raises:
            InputError: they do not fit the table.
        """

    def doubled(self, target: TableTarget) -> bool:
        """Whether two rows have the same values in `target.keys`, which is not None."""

    def write(self, target: TableTarget, store: ObjectStore) -> tuple[RowFacts, Sequence[TimeFile]]:
        """Compute the rows, and write them to data files that nothing lists yet."""
