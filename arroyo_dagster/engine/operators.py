"""The interface of operators, sources and sinks, and the context they are called with.

Source: crates/arroyo-operator/src/operator.rs, `ArrowOperator`, and context.rs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from arroyo_dagster.engine.keyed.states import ListState, MapState, ValueState
from arroyo_dagster.engine.keyed.timers import Timers
from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.ids import Epoch, TableName
from arroyo_dagster.state.model.tables import TableConfig
from arroyo_dagster.state.tables.manager import TableManager
from arroyo_dagster.state.tables.table import TaskInfo

Offset = dict[str, Any]
"""The position of a source: a JSON object, whose members only the source interprets."""


NO_EPOCH = Epoch(0)
"""The epoch number before a job's first epoch."""


class Collector:
    """Collects the output of an operator.

    Args:
        operator: its name, for errors.
        schema: the schema of every batch; None = the operator emits nothing.
    """

    def __init__(self, operator: str, schema: pa.Schema | None) -> None:
        self._operator = operator
        self._schema = schema
        self._batches: list[pa.RecordBatch] = []

    def collect(self, rows: pa.RecordBatch | pa.Table) -> None:
        """Append rows to the output.

        Raises:
            InputError: the operator declares no output, or another schema.
        """
        if self._schema is None or not rows.schema.equals(self._schema):
            raise InputError(
                "an operator emits rows of another schema than its output_schema"
                if self._schema is not None
                else "an operator without output_schema emits rows",
                operator=self._operator,
                expected=_columns(self._schema),
                found=_columns(rows.schema),
            )
        batches = rows.to_batches() if isinstance(rows, pa.Table) else [rows]
        self._batches.extend(batch for batch in batches if batch.num_rows)

    def drain(self) -> list[pa.RecordBatch]:
        """Return the collected rows, and empty the collector."""
        batches, self._batches = self._batches, []
        return batches


def _columns(schema: pa.Schema | None) -> list[str] | None:
    return None if schema is None else [f"{field.name}: {field.type}" for field in schema]


@dataclass(slots=True)
class OperatorContext:
    """The context of every call of an operator.

    Attributes:
        task_info: the subtask.
        table_manager: the tables registered by `Operator.tables`.
        watermark_micros: event time reached before this epoch's rows, in `on_start` that of the
            restored epoch; None = none yet.
        epoch: the epoch being written.
        then_stop: whether this epoch is the last of the run.
        clock_micros: the engine's clock in microseconds since 1970: read once for an epoch, the
            same in all subtasks, never earlier than in the run's epoch before, than that one's end,
            or than rows by key; 0 in `on_start`.
        side_output: collects rows of the operator's `side_schema`; see `Stream.side_output`.
    """

    task_info: TaskInfo
    table_manager: TableManager
    watermark_micros: int | None = None
    epoch: Epoch = NO_EPOCH
    then_stop: bool = False
    clock_micros: int = 0
    side_output: Collector = field(default_factory=lambda: Collector("", None))

    def value_state(self, name: str) -> ValueState:
        """Return the state registered with `keyed_state`, if its value is neither list nor map.

        Raises:
            InputError: no such table, or it has another form.
        """
        return self.table_manager.get_keyed_state(name, ValueState)

    def list_state(self, name: str) -> ListState:
        """Return the state as `value_state`, if its value is a list."""
        return self.table_manager.get_keyed_state(name, ListState)

    def map_state(self, name: str) -> MapState:
        """Return the state as `value_state`, if its value is a map."""
        return self.table_manager.get_keyed_state(name, MapState)

    def timers(self, name: str) -> Timers:
        """Return the timers registered with `keyed_timers`. Errors as `value_state`."""
        return self.table_manager.get_keyed_state(name, Timers)


class Operator:
    """User code with state. Subclass it; every method except `process_batch` is optional.

    Keep state that must survive in the tables of `ctx.table_manager`; use attributes set in
    `on_start` for views and caches only. Instances must be picklable: one copy is made for each
    subtask.
    """

    output_schema: pa.Schema | None = None
    """The schema of the rows that `collector` accepts; None = nothing is emitted."""

    side_schema: pa.Schema | None = None
    """The schema of the rows that `ctx.side_output` accepts, such as errors; None = none."""

    def tables(self) -> Sequence[TableConfig]:
        """Return the tables to register."""
        return ()

    def on_start(self, ctx: OperatorContext) -> None:
        """Handle a start: called after the tables are loaded, at the start, at a restart, and on
        Spark whenever another process of this subtask has continued meanwhile.
        """

    def process_batch(
        self, batch: pa.RecordBatch, ctx: OperatorContext, collector: Collector
    ) -> None:
        """Process rows of the only input, in the source's order. `_timestamp` is event time."""
        raise NotImplementedError(f"{type(self).__name__} does not implement process_batch")

    def process_batch_index(
        self, index: int, batch: pa.RecordBatch, ctx: OperatorContext, collector: Collector
    ) -> None:
        """Process rows of input `index`, for operators with several inputs."""
        self.process_batch(batch, ctx, collector)

    def process_batches(
        self,
        index: int,
        batches: Sequence[pa.RecordBatch],
        ctx: OperatorContext,
        collector: Collector,
    ) -> None:
        """Process all rows of input `index` in an epoch, for operators that work ahead.

        Without an override, `process_batch_index` is called with each batch.
        """
        for batch in batches:
            self.process_batch_index(index, batch, ctx, collector)

    def on_timers(
        self, name: str, timers: pa.RecordBatch, ctx: OperatorContext, collector: Collector
    ) -> None:
        """Handle the timers of a table that are due; called after the epoch's rows.

        Timers that it registers for a time that has come fire in the next call, in this epoch.

        Args:
            name: the table, as given to `keyed_timers`.
            timers: `at` and the columns of the key, in the order of time, then of the key. They are
                removed.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement on_timers")

    def handle_watermark(
        self, watermark_micros: int, ctx: OperatorContext, collector: Collector
    ) -> None:
        """Handle the new watermark `watermark_micros`; called after the rows, when it advances."""

    def handle_checkpoint(self, ctx: OperatorContext, collector: Collector) -> None:
        """Handle the barrier: the last chance to change tables in this epoch."""

    def tables_watermark(self, watermark_micros: int | None) -> int | None:
        """Return the event time that the operator's tables have reached at this barrier.

        It determines which rows of expiring tables are kept. Operators that read event time from
        the rows themselves return that time; their rows do not expire by the sources' watermark.

        Args:
            watermark_micros: of the sources.
        """
        return watermark_micros

    def epoch_report(self) -> Any:
        """Return what `Pipeline.epoch_check` needs to know of this epoch; called after the barrier.

        It must be picklable. None = nothing.
        """
        return None

    def on_close(self, ctx: OperatorContext) -> None:
        """Handle the end of the run: called after the checkpoint with `then_stop`."""


class Sink(Operator):
    """An operator with external effects, which become visible in the second phase of a commit.

    `handle_checkpoint` prepares the effects invisibly and writes commit data to a table configured
    with `two_phase_commit=True`. When the checkpoint owns its epoch, `commit` is called with the
    commit data of all subtasks, and called again after a crash. It must be idempotent.
    """

    def check(self, rows: pa.Schema) -> None:
        """Refuse a run in which the sink could not commit; called before anything is written.

        Args:
            rows: the columns of the rows that it gets.

        Raises:
            InputError: it cannot, for example because it needs Spark.
        """

    def commit(self, epoch: Epoch, data: Mapping[TableName, Mapping[int, bytes]]) -> None:
        """Make the epoch's prepared effects visible. `data`: commit data by table and subtask."""
        raise NotImplementedError(f"{type(self).__name__} does not commit")


class Source:
    """Rows that can be read again from any returned offset. Instances must be picklable."""

    schema: pa.Schema
    """The columns of its rows; `_timestamp` is added from the column named in `Pipeline.source`."""

    renamable: bool = True
    """Whether `renamed_from` may give it a new name; False if it stores rows below its name."""

    def check(self) -> None:
        """Refuse a run that could not read the source; called before anything is written.

        Raises:
            InputError: it cannot, for example because it needs Spark.
        """

    def initial_offset(self) -> Offset:
        """Return the offset at which a job without state begins."""
        raise NotImplementedError

    def check_offset(self, offset: Offset) -> None:
        """Refuse to continue from an offset of other rows; called before anything is written.

        Raises:
            InputError: what was read is not what the source has there now.
        """

    def latest_offset(self, start: Offset) -> Offset:
        """Return the end of one epoch that begins at `start`; `start` itself if nothing is new."""
        raise NotImplementedError

    def partitions(self, start: Offset, end: Offset) -> Sequence[Any]:
        """Split the rows from `start` (inclusive) to `end` (exclusive), in order; splits pickle."""
        raise NotImplementedError

    def read(self, partition: Any) -> Iterator[pa.RecordBatch]:
        """Read one split, with the same rows in the same order every time."""
        raise NotImplementedError

    def exhausted(self, offset: Offset) -> bool:
        """Whether no row will ever follow `offset`."""
        return False


def registered(operator: Operator) -> dict[TableName, TableConfig]:
    """Return the tables of an operator by name.

    Raises:
        InputError: two tables have the same name.
    """
    configs: dict[TableName, TableConfig] = {}
    tables: Iterable[TableConfig] = operator.tables()
    for config in tables:
        if config.table in configs:
            raise InputError("two tables of one operator have one name", table=config.table)
        configs[config.table] = config
    return configs
