"""What an operator is and is given: its tables, its watermark, its output.

Source: crates/arroyo-operator/src/operator.rs, `ArrowOperator`, and context.rs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.ids import Epoch, TableName
from arroyo_dagster.state.model.tables import TableConfig
from arroyo_dagster.state.tables.manager import TableManager
from arroyo_dagster.state.tables.table import TaskInfo

Offset = dict[str, Any]
"""Where a source stands: a JSON object. Its members are the source's own business."""


NO_EPOCH = Epoch(0)
"""What comes before a job's first epoch."""


class Collector:
    """Takes what an operator puts out.

    Args:
        operator: for errors.
        schema: what every batch must look like; None = the operator puts out nothing.
    """

    def __init__(self, operator: str, schema: pa.Schema | None) -> None:
        self._operator = operator
        self._schema = schema
        self._batches: list[pa.RecordBatch] = []

    def collect(self, rows: pa.RecordBatch | pa.Table) -> None:
        """Put rows out, behind those put out before.

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
        """Give what was collected, and forget it."""
        batches, self._batches = self._batches, []
        return batches


def _columns(schema: pa.Schema | None) -> list[str] | None:
    return None if schema is None else [f"{field.name}: {field.type}" for field in schema]


@dataclass(slots=True)
class OperatorContext:
    """What an operator is given with every call.

    Attributes:
        task_info: which subtask this is.
        table_manager: the tables registered by `Operator.tables`.
        watermark_micros: event time reached before this epoch's rows, in `on_start` that of the
            epoch restored; None = none yet.
        epoch: the epoch being written.
        then_stop: whether this epoch is the last of the run.
    """

    task_info: TaskInfo
    table_manager: TableManager
    watermark_micros: int | None = None
    epoch: Epoch = NO_EPOCH
    then_stop: bool = False


class Operator:
    """User code with state. Subclass it; every method but `process_batch` may be left out.

    State that must survive lies in the tables of `ctx.table_manager`; attributes set in `on_start`
    are for views and caches only. An instance must pickle: one copy is made for each subtask.
    """

    output_schema: pa.Schema | None = None
    """The schema of what `collector` takes; None = nothing is emitted."""

    def tables(self) -> Sequence[TableConfig]:
        """The tables to register."""
        return ()

    def on_start(self, ctx: OperatorContext) -> None:
        """Called when the tables have been loaded: at the start, at a restart, and on Spark
        whenever another process of this subtask had gone on meanwhile."""

    def process_batch(
        self, batch: pa.RecordBatch, ctx: OperatorContext, collector: Collector
    ) -> None:
        """Take rows of the only input, in the order of the source. `_timestamp` is event time."""
        raise NotImplementedError(f"{type(self).__name__} does not implement process_batch")

    def process_batch_index(
        self, index: int, batch: pa.RecordBatch, ctx: OperatorContext, collector: Collector
    ) -> None:
        """Take rows of input `index`, for operators with several."""
        self.process_batch(batch, ctx, collector)

    def handle_watermark(
        self, watermark_micros: int, ctx: OperatorContext, collector: Collector
    ) -> None:
        """Event time has reached `watermark_micros`; called behind the rows, when it advances."""

    def handle_checkpoint(self, ctx: OperatorContext, collector: Collector) -> None:
        """The barrier has come: the last chance to change tables in this epoch."""

    def tables_watermark(self, watermark_micros: int | None) -> int | None:
        """The event time that the operator's tables have reached at this barrier.

        It decides which rows of expiring tables are kept. Rows of operators that find event time
        in the rows themselves expire by that, not by the watermark of the sources.

        Args:
            watermark_micros: of the sources.
        """
        return watermark_micros

    def on_close(self, ctx: OperatorContext) -> None:
        """Called behind the checkpoint with `then_stop`."""


class Sink(Operator):
    """An operator whose effect lies outside, made visible in the second phase of a commit.

    In `handle_checkpoint` it prepares, invisibly, and leaves commit data in a table configured
    with `two_phase_commit=True`; when the checkpoint has become the owner of its epoch, `commit`
    is called with the commit data of all subtasks, again after a crash. It must be idempotent.
    """

    def commit(self, epoch: Epoch, data: Mapping[TableName, Mapping[int, bytes]]) -> None:
        """Make visible what the epoch prepared. `data`: commit data by table and subtask."""
        raise NotImplementedError(f"{type(self).__name__} does not commit")


class Source:
    """Rows that can be read again from any offset it has given. An instance must pickle."""

    schema: pa.Schema
    """The columns of its rows; `_timestamp` is added from the column named to `Pipeline.source`."""

    def initial_offset(self) -> Offset:
        """Where a job without state begins."""
        raise NotImplementedError

    def latest_offset(self, start: Offset) -> Offset:
        """How far one epoch may go from `start`; `start` itself when there is nothing new."""
        raise NotImplementedError

    def partitions(self, start: Offset, end: Offset) -> Sequence[Any]:
        """Split the rows from `start` (included) to `end` (excluded), in order; splits pickle."""
        raise NotImplementedError

    def read(self, partition: Any) -> Iterator[pa.RecordBatch]:
        """Read one split, the same rows in the same order every time."""
        raise NotImplementedError

    def exhausted(self, offset: Offset) -> bool:
        """Whether nothing will ever follow `offset`."""
        return False


def registered(operator: Operator) -> dict[TableName, TableConfig]:
    """The tables of an operator by name.

    Raises:
        InputError: two tables of one name.
    """
    configs: dict[TableName, TableConfig] = {}
    tables: Iterable[TableConfig] = operator.tables()
    for config in tables:
        if config.table in configs:
            raise InputError("two tables of one operator have one name", table=config.table)
        configs[config.table] = config
    return configs
