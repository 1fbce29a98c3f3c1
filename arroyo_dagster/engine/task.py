"""One subtask of every operator of a level, for the lifetime of its process: restore, process,
checkpoint, follow the published epochs. The same code runs in process and in Spark's workers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from arroyo_dagster.engine.exchange import (
    ExchangeChunk,
    ReceivedRows,
    encode_table,
    operator_chunks,
    rechunk,
)
from arroyo_dagster.engine.operators import Collector, Operator, OperatorContext, registered
from arroyo_dagster.engine.pipeline import OperatorNode, Pipeline
from arroyo_dagster.errors import InputError, ProtocolError
from arroyo_dagster.state.metadata.backend import StateBackend
from arroyo_dagster.state.model.checkpoints import OperatorCheckpoint, SubtaskCheckpoint
from arroyo_dagster.state.model.ids import Epoch, OperatorId, WorkerGeneration
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.keyed_forms import KeyedForm
from arroyo_dagster.state.tables.manager import TableManager
from arroyo_dagster.state.tables.messages import Compaction
from arroyo_dagster.state.tables.table import TaskInfo

_MAX_TIMER_CALLS = 1_000_000
"""Timers that register others for times that have come may be called this often in an epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPlan:
    """The facts that every subtask needs about the epoch to write.

    Attributes:
        base: the operators at the previous epoch, as published; empty for the first epoch.
        generation: the worker generation that writes; None in the legacy layout.
        watermarks_micros: of each source at the previous epoch; None = none yet.
        compacted: files merged since then, by operator.
        clock_micros: the engine's clock, read once for this epoch.
    """

    epoch: Epoch
    min_epoch: Epoch
    generation: WorkerGeneration | None
    then_stop: bool
    base_epoch: Epoch
    base: Mapping[OperatorId, OperatorCheckpoint]
    watermarks_micros: Mapping[OperatorId, int | None]
    compacted: Mapping[OperatorId, tuple[Compaction, ...]] = field(default_factory=dict)
    clock_micros: int = 0


def advanced(
    pipeline: Pipeline, before: Mapping[OperatorId, int | None], latest: Mapping[str, int]
) -> dict[OperatorId, int | None]:
    """Return the sources' watermarks after an epoch: latest event time minus lateness,
    never less.
    """
    after: dict[OperatorId, int | None] = {}
    for name, node in pipeline.sources.items():
        reached = latest.get(name)
        mark = None if reached is None else max(0, reached - node.lateness_micros)
        marks = [value for value in (before.get(name), mark) if value is not None]
        after[name] = max(marks, default=None)
    return after


def watermark_of(
    pipeline: Pipeline, node: OperatorId, marks: Mapping[OperatorId, int | None]
) -> int | None:
    """Return an operator's watermark: the smallest of its sources'; None while one has none."""
    values = [marks[name] for name in pipeline.sources_of(node)]
    present = [value for value in values if value is not None]
    return min(present) if len(present) == len(values) else None


class OperatorSubtask:
    """One subtask of one operator: the user's code and its tables."""

    def __init__(
        self,
        pipeline: Pipeline,
        node: OperatorNode,
        index: int,
        store: ObjectStore,
        plan: EpochPlan,
    ) -> None:
        paths = pipeline.paths
        self._template = node.operator
        self._schema = node.operator.output_schema
        self._side_schema = node.operator.side_schema
        self.node = node
        backend = StateBackend(store, paths, generation=plan.generation)
        task = TaskInfo(
            pipeline=paths.pipeline,
            job=paths.job,
            operator=node.operator_id,
            task_index=index,
            parallelism=pipeline.parallelism,
        )
        self._manager = TableManager.load(
            backend,
            task,
            registered(node.operator),
            plan.base.get(node.operator_id),
            base_epoch=plan.base_epoch,
        )
        self._timers = [
            name
            for name, config in self._manager.configs.items()
            if (form := KeyedForm.of(config)) is not None and form.is_timers
        ]
        self._ctx = OperatorContext(task, self._manager)
        self._operator = self._begin()

    def _begin(self) -> Operator:
        operator = copy.deepcopy(self._template)
        self._ctx.watermark_micros = self._manager.watermark_micros
        operator.on_start(self._ctx)
        return operator

    def follow(self, plan: EpochPlan) -> bool:
        """Advance to the epoch that `plan` continues; False if impossible: create a new subtask."""
        for message in plan.compacted.get(self.node.operator_id, ()):
            self._manager.send(message)
        published = plan.base.get(self.node.operator_id)
        if published is None:
            return False
        behind = self._manager.epoch < published.epoch
        if not self._manager.follow(published):
            return False
        if behind:
            self._operator = self._begin()
        return True

    def process(
        self,
        inputs: Mapping[int, list[pa.RecordBatch]],
        before_micros: int | None,
        after_micros: int | None,
        plan: EpochPlan,
    ) -> list[pa.RecordBatch]:
        """Process the rows of one epoch by input, then its timers, its watermark, the barrier."""
        ctx, operator = self._ctx, self._operator
        ctx.watermark_micros, ctx.epoch, ctx.then_stop = before_micros, plan.epoch, plan.then_stop
        ctx.clock_micros = plan.clock_micros
        self._manager.begin_epoch(plan.clock_micros)
        collector = Collector(self.node.operator_id, self._schema)
        ctx.side_output = Collector(f"{self.node.operator_id} (side output)", self._side_schema)
        for index, batches in sorted(inputs.items()):
            operator.process_batches(index, batches, ctx, collector)
        self._fire_timers(after_micros, collector)
        if after_micros is not None and after_micros != before_micros:
            operator.handle_watermark(after_micros, ctx, collector)
            ctx.watermark_micros = after_micros
        operator.handle_checkpoint(ctx, collector)
        return collector.drain()

    def side_output(self) -> list[pa.RecordBatch]:
        """Return the side output of the last `process`, once."""
        return self._ctx.side_output.drain()

    def _fire_timers(self, watermark_micros: int | None, collector: Collector) -> None:
        """Call the operator with the timers that are due, until none is."""
        tables = {name: self._ctx.timers(name) for name in self._timers}
        for _ in range(_MAX_TIMER_CALLS):
            fired = False
            for name, timers in tables.items():
                reached = timers.time_micros(watermark_micros)
                due = None if reached is None else timers.take_due(reached)
                if due is not None:
                    fired = True
                    self._operator.on_timers(name, due, self._ctx, collector)
            if not fired:
                return
        raise InputError(
            f"timers were registered for times that have come, {_MAX_TIMER_CALLS} times in a row",
            operator=self.node.operator_id,
            tables=sorted(tables),
            next_step="let on_timers register only timers for later times",
        )

    def checkpoint(self, plan: EpochPlan, watermark_micros: int | None) -> SubtaskCheckpoint:
        """Write the tables. After the last checkpoint of a run, close the operator."""
        reached = self._operator.tables_watermark(watermark_micros)
        done = self._manager.checkpoint(plan.epoch, plan.min_epoch, reached, plan.then_stop)
        if plan.then_stop:
            self._operator.on_close(self._ctx)
        alarms = [self._ctx.timers(name).next_alarm_micros() for name in self._timers]
        times = [alarm for alarm in alarms if alarm is not None]
        return replace(
            done,
            next_alarm_micros=min(times, default=None),
            epoch_report=self._operator.epoch_report(),
        )


class LevelTask:
    """Subtask `index` of every operator of one level, kept from epoch to epoch.

    Args:
        encode: makes the payload of the chunks that it yields.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        level: int,
        index: int,
        store: ObjectStore,
        encode: Callable[[pa.Table], Any] = encode_table,
    ) -> None:
        self._encode = encode
        self._pipeline = pipeline
        self._nodes = pipeline.at_level(level)
        self._index = index
        self._store = store
        self._subtasks: dict[OperatorId, OperatorSubtask] = {}
        self.reports: dict[OperatorId, SubtaskCheckpoint] = {}
        self.watermarks_micros: dict[OperatorId, int | None] = {}

    def run(self, plan: EpochPlan, work: ReceivedRows) -> Iterator[ExchangeChunk]:
        """Write one epoch. Yields the rows for later levels; afterwards `reports` are complete.

        If it fails, the state in memory is dropped, and the next call restores it.
        """
        subtasks, self._subtasks, self.reports = self._subtasks, {}, {}
        marks = advanced(self._pipeline, plan.watermarks_micros, work.latest_micros)
        self.watermarks_micros = marks
        ready: dict[OperatorId, OperatorSubtask] = {}
        chained: dict[int, list[pa.RecordBatch]] = {}
        for node in self._nodes:
            subtask = self._subtask(node, subtasks.get(node.operator_id), plan)
            before = self._watermark(node, plan.watermarks_micros, plan)
            after = self._watermark(node, marks, plan)
            rows = subtask.process(self._inputs(node, work, chained), before, after, plan)
            self.reports[node.operator_id] = subtask.checkpoint(plan, after)
            ready[node.operator_id] = subtask
            for side, output in ((False, rows), (True, subtask.side_output())):
                edges = self._pipeline.edges_from(node.operator_id, side=side)
                for edge in edges:
                    chained[edge.index] = output
                yield from operator_chunks(
                    self._pipeline, node, edges, output, self._index, self._encode
                )
        self._subtasks = ready

    def _watermark(
        self, node: OperatorNode, marks: Mapping[OperatorId, int | None], plan: EpochPlan
    ) -> int | None:
        # Never decreasing, even if a source is added to the pipeline: expired rows must not return.
        base = plan.base.get(node.operator_id)
        reached = base.min_watermark_micros if base else None
        now = watermark_of(self._pipeline, node.operator_id, marks)
        return max((mark for mark in (now, reached) if mark is not None), default=None)

    def _subtask(
        self, node: OperatorNode, known: OperatorSubtask | None, plan: EpochPlan
    ) -> OperatorSubtask:
        if known is not None and known.follow(plan):
            return known
        return OperatorSubtask(self._pipeline, node, self._index, self._store, plan)

    def _inputs(
        self, node: OperatorNode, work: ReceivedRows, chained: Mapping[int, list[pa.RecordBatch]]
    ) -> dict[int, list[pa.RecordBatch]]:
        inputs: dict[int, list[pa.RecordBatch]] = {}
        for edge in node.inputs:
            schema = self._pipeline.edge_schema(edge)
            if edge.index in chained:
                tables = [pa.Table.from_batches([batch]) for batch in chained[edge.index]]
            else:
                tables = list(work.rows.get(edge.index, ()))
            inputs[edge.input_index] = rechunk(tables, schema)
        return inputs


def merged_watermarks(
    found: Sequence[Mapping[OperatorId, int | None]],
) -> dict[OperatorId, int | None]:
    """Return the watermarks that all tasks of an epoch observed.

    Raises:
        ProtocolError: two tasks observed different ones, so rows of theirs were lost in the
            exchange.
    """
    for other in found[1:]:
        if dict(other) != dict(found[0]):
            raise ProtocolError("subtasks saw different watermarks", found=found)
    return dict(found[0]) if found else {}
