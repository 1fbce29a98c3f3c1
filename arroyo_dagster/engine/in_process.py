"""Run a pipeline in this process: every subtask in turn, epoch after epoch."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Self

from arroyo_dagster.engine.coordinator import JobRun, finished
from arroyo_dagster.engine.exchange import (
    ExchangeChunk,
    arrived,
    as_it_is,
    read_split,
    source_chunks,
)
from arroyo_dagster.engine.pipeline import Pipeline
from arroyo_dagster.engine.pipeline_run import (
    EpochReports,
    OnEpoch,
    PipelineRun,
    RunOutcome,
    SourceSplit,
)
from arroyo_dagster.engine.task import EpochPlan, LevelTask, merged_watermarks
from arroyo_dagster.state.model.checkpoints import SubtaskCheckpoint
from arroyo_dagster.state.model.ids import OperatorId
from arroyo_dagster.state.storage.store import ObjectStore


def run_pipeline(
    pipeline: Pipeline,
    store: ObjectStore,
    *,
    max_epochs: int | None = None,
    follow: bool = False,
    interval_seconds: float = 0.0,
    allow_dropped: Collection[str] = (),
    on_epoch: OnEpoch | None = None,
) -> RunOutcome:
    """Run a pipeline in this process, starting from its newest checkpoint.

    Args:
        max_epochs: stop with a last checkpoint after this many epochs.
        follow: wait for new rows when the sources have none; otherwise stop then.
        interval_seconds: the minimum time between two epochs.
        allow_dropped: as in `JobRun.start`.
        on_epoch: called with every epoch once it is published and committed.

    Raises:
        ConflictError: a newer run was started. Nothing is lost.
        ArroyoStateError: see `JobRun`.
    """
    if (newest := finished(store, pipeline)) is not None:
        return RunOutcome(epochs=0, newest=newest, exhausted=True)
    runner = LocalRun.start(pipeline, store, allow_dropped)
    with contextlib.closing(runner.job):
        return runner.run(
            max_epochs=max_epochs,
            follow=follow,
            interval_seconds=interval_seconds,
            on_epoch=on_epoch,
        )


class LocalRun(PipelineRun):
    """One run in this process. Created by `start`."""

    def __init__(self, job: JobRun) -> None:
        super().__init__(job)
        self._tasks = [
            [
                LevelTask(job.pipeline, level, index, job.store, as_it_is)
                for index in range(job.pipeline.parallelism)
            ]
            for level in range(1, job.pipeline.levels + 1)
        ]

    @classmethod
    def start(
        cls, pipeline: Pipeline, store: ObjectStore, allow_dropped: Collection[str] = ()
    ) -> Self:
        """Start the next run of a job; arguments and errors as of `run_pipeline`."""
        job = JobRun.start(store, pipeline, allow_dropped=allow_dropped)
        with job.closed_on_failure():
            return cls(job)

    def process(self, plan: EpochPlan, splits: Sequence[SourceSplit]) -> EpochReports:
        """Process the rows of one epoch, level by level."""
        waiting: dict[tuple[int, int], list[ExchangeChunk]] = {}
        for chunk in self._chunks(splits):
            waiting.setdefault((chunk.level, chunk.subtask), []).append(chunk)
        reports: list[tuple[OperatorId, SubtaskCheckpoint]] = []
        marks: list[Mapping[OperatorId, int | None]] = []
        for level, tasks in enumerate(self._tasks, start=1):
            for index, task in enumerate(tasks):
                for chunk in task.run(plan, arrived(waiting.pop((level, index), []), as_it_is)):
                    waiting.setdefault((chunk.level, chunk.subtask), []).append(chunk)
                reports.extend(task.reports.items())
                marks.append(task.watermarks_micros)
        return EpochReports(reports, merged_watermarks(marks))

    def _chunks(self, splits: Sequence[SourceSplit]) -> Iterator[ExchangeChunk]:
        for split in splits:
            node = self.pipeline.sources[split.source]
            rows = read_split(node, split.split)
            yield from source_chunks(self.pipeline, node, rows, split.index, as_it_is)
