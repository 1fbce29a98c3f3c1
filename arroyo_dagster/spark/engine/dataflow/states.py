"""States of a dataflow as Spark DataFrames at one epoch.

counts = state_frame(session, store, dataflow, "count.counts")
register_states(session, store, dataflow)
session.sql("select _key, n from last_seen order by n desc")
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from arroyo_dagster.dataflow.definition.definition import Dataflow, StateDef, ValueKind
from arroyo_dagster.dataflow.storage.columns import UPDATED_AT
from arroyo_dagster.dataflow.views.snapshots import SnapshotReader, empty_frame
from arroyo_dagster.dataflow.views.view import StateView, Views, service_paths
from arroyo_dagster.spark.columns import for_spark
from arroyo_dagster.spark.jobs import slots
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.model.clock import wall_clock_ms
from arroyo_dagster.state.model.ids import Epoch
from arroyo_dagster.state.model.keys import range_for_server
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.storage.store import ObjectStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_BATCH_ROWS = 65_536


def state_frame(
    session: SparkSession,
    store: ObjectStore,
    dataflow: Dataflow,
    state: str,
    *,
    live: bool = False,
    views: Views | None = None,
) -> DataFrame:
    """Return a state at its owner's newest ready epoch.

    The epoch and the time that expires rows are those of this call, whenever the frame is computed.
    The computation fails if the epoch was deleted in the meantime.

    Args:
        session: the session.
        store: the object store of the states.
        dataflow: the definition.
        state: `service.state`, or the name of the state if it is unique.
        live: for a windowed state, read the open windows, not the one that closed last.
        views: the epochs to read; None = the newest.

    Returns:
        A frame with `_key`, the columns and `_updated_at`, or for a primitive state `_key` and
        `value`. Unsigned numbers have the next wider type; u64 is a decimal.

    Raises:
        InputError: there is no such state, or more than one.
        CheckpointError: the newest epoch of an owner cannot be read (E51).
    """
    seen = views or Views(store, dataflow)
    state_def = seen.state(state)
    head = seen.head(state_def.owner)
    ranges = slots(session) if state_def.value_kind is ValueKind.ROW else 1
    reading = _RangeReader(
        store=store,
        paths=service_paths(dataflow, state_def.owner),
        state=state_def,
        epoch=None if head is None else head.epoch,
        ranges=ranges,
        live=live,
        now_ms=wall_clock_ms(),
    )
    parts = session.range(0, ranges, 1, ranges)
    return parts.mapInArrow(reading.function(), _ddl(reading.schema))


def register_states(
    session: SparkSession, store: ObjectStore, dataflow: Dataflow
) -> Mapping[str, Epoch | None]:
    """Register every state as a temporary view, with all states of one owner at the same epoch.

    A view has the name of the state's SQL table, or `service__state` if several owners have a table
    of this name.

    Returns:
        The epoch of each owner; None = it has none yet, and its states are empty.
    """
    views = Views(store, dataflow)
    tables = [state.table for state in views.states.values()]
    for name, state in views.states.items():
        table = state.table if tables.count(state.table) == 1 else f"{state.owner}__{state.table}"
        frame = state_frame(session, store, dataflow, name, views=views)
        frame.createOrReplaceTempView(table.replace("-", "_"))
    return views.epochs


@dataclass(frozen=True, slots=True, kw_only=True)
class _RangeReader:
    """Reads the key ranges of one state at one epoch, in Spark's workers."""

    store: ObjectStore
    paths: JobPaths
    state: StateDef
    epoch: Epoch | None
    ranges: int
    live: bool
    now_ms: int

    @property
    def schema(self) -> pa.Schema:
        """The schema of the rows for Spark."""
        frame = self._view(empty_frame(self.state, live=self.live)).frame()
        return _for_spark(frame.to_arrow()).schema

    def function(self) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
        """Return a function for `mapInArrow`, which accepts plain functions only."""

        def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                for index in batch.column(0).to_pylist():
                    yield from self._range(index).to_batches(max_chunksize=_BATCH_ROWS)

        return read

    def _range(self, index: int) -> pa.Table:
        keys = range_for_server(index, self.ranges)
        reader = SnapshotReader(self.store, self.state, live=self.live, keys=keys)
        backend = ParquetBackend(self.store, self.paths)
        head = None if self.epoch is None else backend.load(self.epoch)
        return _for_spark(self._view(reader.at(head)).frame().to_arrow())

    def _view(self, stored: Any) -> StateView:
        return StateView(self.state, self.epoch, stored, lambda: self.now_ms)


def _for_spark(rows: pa.Table) -> pa.Table:
    index = rows.schema.get_field_index(UPDATED_AT)
    if index >= 0:
        times = rows.column(index).cast(pa.timestamp("us", "UTC"))
        rows = rows.set_column(index, UPDATED_AT, times)
    return for_spark(rows)


def _ddl(schema: pa.Schema) -> str:
    from pyspark.sql.pandas.types import from_arrow_schema

    columns = from_arrow_schema(schema)
    return ", ".join(f"`{field.name}` {field.dataType.simpleString()}" for field in columns)
