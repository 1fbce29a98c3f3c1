"""Run a pipeline in this process: every subtask in turn, epoch after epoch."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Self

from arroyo_dagster.errors import ConflictError
from arroyo_dagster.state.model.checkpoints import Checkpoint, StreamProgress, SubtaskCheckpoint
from arroyo_dagster.state.model.ids import OperatorId
from arroyo_dagster.state.planning.restore.batch_identity import ADOPT
from arroyo_dagster.state.runtime.coordinator import JobRun, finished
from arroyo_dagster.state.runtime.exchange import (
    ExchangeChunk,
    arrived,
    as_it_is,
    read_split,
    source_chunks,
)
from arroyo_dagster.state.runtime.operators import Offset
from arroyo_dagster.state.runtime.pipeline import Pipeline
from arroyo_dagster.state.runtime.task import EpochPlan, LevelTask, merged_watermarks
from arroyo_dagster.state.storage.store import ObjectStore

IN_PROCESS = "in-process"
"""The query id of epochs that no streaming query wrote."""

OnEpoch = Callable[[Checkpoint], None]

_IDLE_SECONDS = 0.2
"""The wait before sources and stop requests are polled again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """The outcome of a run.

    Attributes:
        epochs: how many it wrote.
        newest: the newest checkpoint of the job; None if there is none.
        exhausted: whether every source had ended.
        retention_failures: how often expired epochs could not be deleted.
        overdue_epochs: how many expired epochs are left for the next run.
    """

    epochs: int
    newest: Checkpoint | None
    exhausted: bool
    retention_failures: int = 0
    overdue_epochs: int = 0

    @classmethod
    def of(cls, run: JobRun, epochs: int, exhausted: bool) -> RunOutcome:
        """Return the outcome of a run that wrote this many epochs."""
        return cls(
            epochs=epochs,
            newest=run.base,
            exhausted=exhausted,
            retention_failures=run.retention.failures,
            overdue_epochs=run.retention.overdue_epochs,
        )

    def after(self, before: RunOutcome) -> RunOutcome:
        """Combine this outcome with that of an earlier run."""
        return replace(
            self,
            epochs=before.epochs + self.epochs,
            retention_failures=before.retention_failures + self.retention_failures,
        )


def run_pipeline(
    pipeline: Pipeline,
    store: ObjectStore,
    *,
    max_epochs: int | None = None,
    follow: bool = False,
    interval_seconds: float = 0.0,
    adopt: bool = False,
    on_epoch: OnEpoch | None = None,
) -> RunOutcome:
    """Run a pipeline in this process, starting from its newest checkpoint.

    Args:
        max_epochs: stop with a last checkpoint after this many epochs.
        follow: wait for new rows when the sources have none; otherwise stop then.
        interval_seconds: the minimum time between two epochs.
        adopt: continue from a checkpoint that a streaming query wrote.
        on_epoch: called with every epoch once it is published and committed.

    Raises:
        ConflictError: a newer run was started, or a streaming query wrote the state and `adopt` is
            False. Nothing is lost.
        ArroyoStateError: see `JobRun`.
    """
    if (newest := finished(store, pipeline)) is not None:
        return RunOutcome(epochs=0, newest=newest, exhausted=True)
    runner = LocalRun.start(pipeline, store, adopt=adopt)
    with contextlib.closing(runner.job):
        return _run(runner, max_epochs, follow, interval_seconds, on_epoch)


def _run(
    runner: LocalRun,
    max_epochs: int | None,
    follow: bool,
    interval_seconds: float,
    on_epoch: OnEpoch | None,
) -> RunOutcome:
    count, due = 0, 0.0
    while True:
        while (left := due - time.monotonic()) > 0 and not runner.job.stop_requested():
            time.sleep(min(left, _IDLE_SECONDS))
        due = time.monotonic() + interval_seconds
        last = max_epochs is not None and count + 1 >= max_epochs
        stop = runner.job.stop_requested()
        done = runner.step(then_stop=last or stop, even_if_idle=stop)
        if done is not None:
            count += 1
            if on_epoch is not None:
                on_epoch(done)
        if runner.exhausted or stop or (last and done is not None) or (done is None and not follow):
            runner.job.stop_done()
            return RunOutcome.of(runner.job, count, runner.exhausted)
        if done is None:
            time.sleep(_IDLE_SECONDS)


class LocalRun:
    """One run in this process; `step` writes one epoch."""

    def __init__(self, job: JobRun, offsets: dict[OperatorId, Offset]) -> None:
        self.job = job
        self.pipeline = job.pipeline
        self._offsets = offsets
        self._tasks = [
            [
                LevelTask(job.pipeline, level, index, job.store, as_it_is)
                for index in range(job.pipeline.parallelism)
            ]
            for level in range(1, job.pipeline.levels + 1)
        ]

    @classmethod
    def start(cls, pipeline: Pipeline, store: ObjectStore, *, adopt: bool = False) -> Self:
        """Start the next run of a job; arguments and errors as of `run_pipeline`."""

        def accept(progress: StreamProgress) -> None:
            any_run = progress.rolled_back_to is not None
            if progress.query_id != IN_PROCESS and not any_run and not adopt:
                raise ConflictError(
                    "the job's newest epoch was written by a streaming query",
                    job=pipeline.job,
                    recorded_query=progress.query_id,
                    next_step=f"continue with `arroyo-state run --spark`; or {ADOPT}",
                )

        # Checked before the start: a refused run must not fence a running streaming query.
        job = JobRun.start(store, pipeline, accept=accept)
        with job.closed_on_failure():
            return cls(job, job.offsets())

    @property
    def exhausted(self) -> bool:
        """Whether every source has ended."""
        return self._exhausted(self._offsets)

    def _exhausted(self, offsets: Mapping[OperatorId, Offset]) -> bool:
        return all(
            node.source.exhausted(offsets[name]) for name, node in self.pipeline.sources.items()
        )

    def step(self, *, then_stop: bool = False, even_if_idle: bool = False) -> Checkpoint | None:
        """Write the next epoch and return it; None if there is nothing new and nothing was written.

        Args:
            then_stop: the epoch is the last of this run.
            even_if_idle: write an epoch without rows rather than none.
        """
        ends = {
            name: node.source.latest_offset(self._offsets[name])
            for name, node in self.pipeline.sources.items()
        }
        if ends == self._offsets and not even_if_idle:
            return None
        with self.job.backend.unless_fenced():
            return self._write_epoch(ends, then_stop)

    def _write_epoch(self, ends: dict[OperatorId, Offset], then_stop: bool) -> Checkpoint:
        exhausted = self._exhausted(ends)
        plan = self.job.plan(then_stop or exhausted)
        reports, marks = self._process(plan, self._source_chunks(ends))
        progress = StreamProgress(
            query_id=IN_PROCESS,
            batch_id=plan.epoch,
            offsets=json.dumps(ends, sort_keys=True),
            final=plan.then_stop,
            exhausted=exhausted,
        )
        checkpoint = self.job.finish(plan, reports, ends, marks, progress)
        self._offsets = ends
        return checkpoint

    def _source_chunks(self, ends: Mapping[OperatorId, Offset]) -> Iterator[ExchangeChunk]:
        for name, node in self.pipeline.sources.items():
            splits = node.source.partitions(self._offsets[name], ends[name])
            for index, split in enumerate(splits):
                yield from source_chunks(
                    self.pipeline, node, read_split(node, split), index, as_it_is
                )

    def _process(
        self, plan: EpochPlan, chunks: Iterator[ExchangeChunk]
    ) -> tuple[list[tuple[OperatorId, SubtaskCheckpoint]], dict[OperatorId, int | None]]:
        waiting: dict[tuple[int, int], list[ExchangeChunk]] = {}
        for chunk in chunks:
            waiting.setdefault((chunk.level, chunk.subtask), []).append(chunk)
        reports: list[tuple[OperatorId, SubtaskCheckpoint]] = []
        marks: list[Mapping[OperatorId, int | None]] = []
        for level, tasks in enumerate(self._tasks, start=1):
            for index, task in enumerate(tasks):
                for chunk in task.run(plan, arrived(waiting.pop((level, index), []), as_it_is)):
                    waiting.setdefault((chunk.level, chunk.subtask), []).append(chunk)
                reports.extend(task.reports.items())
                marks.append(task.watermarks_micros)
        return reports, merged_watermarks(marks)
