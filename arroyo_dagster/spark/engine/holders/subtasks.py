"""The subtasks that one process holds from epoch to epoch."""

from __future__ import annotations

import gc
import pickle
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from arroyo_dagster.engine.exchange import ExchangeChunk, arrived
from arroyo_dagster.engine.task import EpochPlan, LevelTask
from arroyo_dagster.errors import ArroyoStateError
from arroyo_dagster.spark.engine.chunks import FAILURE, REPORT
from arroyo_dagster.spark.engine.packed_pipeline import PackedPipeline
from arroyo_dagster.spark.workers import DiskProbe
from arroyo_dagster.state.model.checkpoints import SubtaskCheckpoint
from arroyo_dagster.state.model.ids import Epoch, OperatorId
from arroyo_dagster.state.storage.store import ObjectStore


class RunId(NamedTuple):
    """One run of one job. `application`: an id of the run, or one that concurrent runs share."""

    application: str
    job: str


@dataclass(frozen=True, slots=True)
class LevelWork:
    """What the subtasks of one level need to write one epoch, besides their rows.

    Attributes:
        run_id: the run; a process drops the subtasks of earlier runs of the job.
        probe: what a process must see before it writes, if the state is on disk.
    """

    packed: PackedPipeline
    store: ObjectStore
    run_id: RunId
    level: int
    plan: EpochPlan
    probe: DiskProbe | None = None


@dataclass(frozen=True, slots=True)
class TaskReport:
    """The report of one task: the level, its subtasks' checkpoints, and the sources' watermarks."""

    level: int
    subtask: int
    reports: dict[OperatorId, SubtaskCheckpoint]
    watermarks_micros: dict[OperatorId, int | None]


class _SubtaskId(NamedTuple):
    run_id: RunId
    level: int
    subtask: int


class _Held(NamedTuple):
    epoch: Epoch
    task: LevelTask
    until: float


class HeldSubtasks:
    """Subtasks of a process. Not thread-safe: one call of `run` at a time."""

    def __init__(self) -> None:
        self._held: dict[_SubtaskId, _Held] = {}

    def run(
        self,
        work: LevelWork,
        index: int,
        chunks: Iterable[ExchangeChunk],
        idle_seconds: float,
    ) -> Iterator[ExchangeChunk]:
        """Write one epoch of subtask `index`; yield its rows for later levels, then its report.

        An error that is not retryable is yielded as a `FAILURE`. After an error the subtask is
        dropped, and the next call restores it.

        Args:
            idle_seconds: how long the subtask is held without another call.
        """
        self._drop_others(work)
        key = _SubtaskId(work.run_id, work.level, index)
        held = self._held.pop(key, None)
        task = None if held is None else held.task
        try:
            if work.probe is not None:
                work.probe.check()
            if task is None:
                pipeline = work.packed.unpack()
                task = LevelTask(pipeline, work.level, index, work.store)
            yield from task.run(work.plan, arrived(chunks))
        except ArroyoStateError as error:
            yield failure(error, index)
            return
        if not work.plan.then_stop:
            until = time.monotonic() + idle_seconds
            self._held[key] = _Held(work.plan.epoch, task, until)
        report = TaskReport(work.level, index, task.reports, task.watermarks_micros)
        yield ExchangeChunk(0, index, REPORT, work.level, pickle.dumps(report))

    def _drop_others(self, work: LevelWork) -> None:
        """Drop subtasks that no task will ask for: of earlier runs, and those that moved.

        Every subtask writes every epoch: one that is not at the epoch before has moved.
        """
        now = time.monotonic()
        gone = [
            key
            for key, held in self._held.items()
            if (
                held.epoch < work.plan.epoch - 1
                if key.run_id == work.run_id
                else key.run_id.job == work.run_id.job or held.until < now
            )
        ]
        for key in gone:
            del self._held[key]
        if gone:
            gc.collect()  # tables are parts of cycles, and may be large


def failure(error: ArroyoStateError, subtask: int) -> ExchangeChunk:
    """Return an error as a chunk; raise it if it is retryable."""
    if error.retryable:
        raise error  # Spark tries the task again, in this process or another
    return ExchangeChunk(0, subtask, FAILURE, 0, pickle.dumps(error))
