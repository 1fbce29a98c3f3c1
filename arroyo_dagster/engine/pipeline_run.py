"""One run of a pipeline, epoch after epoch, in every runtime.

For each epoch: ask the sources how far it goes, process the splits up to there, publish. The
offsets in the newest epoch are all that the next run needs, in whichever runtime.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from arroyo_dagster.engine.coordinator import JobRun
from arroyo_dagster.engine.operators import Offset
from arroyo_dagster.engine.task import EpochPlan
from arroyo_dagster.state.model.checkpoints import Checkpoint, RunProgress, SubtaskCheckpoint
from arroyo_dagster.state.model.ids import OperatorId

OnEpoch = Callable[[Checkpoint], None]

_IDLE_SECONDS = 0.2
"""The wait before sources and stop requests are polled again."""


@dataclass(frozen=True, slots=True)
class SourceSplit:
    """One split of a source for one epoch.

    Attributes:
        index: its place among the splits of the source in the epoch.
        split: as `Source.partitions` returned it.
    """

    source: OperatorId
    index: int
    split: Any


@dataclass(frozen=True, slots=True)
class EpochReports:
    """What the subtasks of one epoch reported: their checkpoints, and the sources' watermarks."""

    subtasks: Sequence[tuple[OperatorId, SubtaskCheckpoint]]
    watermarks_micros: Mapping[OperatorId, int | None]


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

    def after(self, before: RunOutcome) -> RunOutcome:
        """Combine this outcome with that of an earlier run."""
        return replace(
            self,
            epochs=before.epochs + self.epochs,
            retention_failures=before.retention_failures + self.retention_failures,
        )


class PipelineRun(ABC):
    """One run of a pipeline; `step` writes one epoch, `run` all of them."""

    def __init__(self, job: JobRun) -> None:
        self.job = job
        self.pipeline = job.pipeline
        self._offsets = job.offsets()

    @abstractmethod
    def process(self, plan: EpochPlan, splits: Sequence[SourceSplit]) -> EpochReports:
        """Process the rows of one epoch, and write the tables of every subtask.

        Nothing is published. If it fails, the next call restores the subtasks.
        """

    @property
    def exhausted(self) -> bool:
        """Whether every source has ended."""
        return self._exhausted(self._offsets)

    def _exhausted(self, offsets: Mapping[OperatorId, Offset]) -> bool:
        return all(
            node.source.exhausted(offsets[name]) for name, node in self.pipeline.sources.items()
        )

    def splits(self, ends: Mapping[OperatorId, Offset]) -> list[SourceSplit]:
        """Return the splits between the offsets of the newest epoch and `ends`."""
        return [
            SourceSplit(name, index, split)
            for name, node in self.pipeline.sources.items()
            for index, split in enumerate(node.source.partitions(self._offsets[name], ends[name]))
        ]

    def step(self, *, then_stop: bool = False, even_if_idle: bool = False) -> Checkpoint | None:
        """Write the next epoch and return it; None if there is nothing new and nothing was written.

        A timer that the engine's clock makes due is new, too.

        Args:
            then_stop: the epoch is the last of this run.
            even_if_idle: write an epoch without rows rather than none.

        Raises:
            ConflictError: a newer run was started. Nothing is lost.
        """
        ends = {
            name: node.source.latest_offset(self._offsets[name])
            for name, node in self.pipeline.sources.items()
        }
        if ends == self._offsets and not (even_if_idle or self.job.alarm_due):
            return None
        with self.job.backend.unless_fenced():
            return self._write_epoch(ends, then_stop)

    def _write_epoch(self, ends: dict[OperatorId, Offset], then_stop: bool) -> Checkpoint:
        exhausted = self._exhausted(ends)
        plan = self.job.plan(then_stop or exhausted)
        done = self.process(plan, self.splits(ends))
        before = self.job.base.progress if self.job.base else None
        progress = RunProgress(
            offsets=json.dumps(ends, sort_keys=True),
            final=plan.then_stop,
            exhausted=exhausted,
            dropped=before.dropped if before else (),
        )
        checkpoint = self.job.finish(plan, done.subtasks, ends, done.watermarks_micros, progress)
        self._offsets = ends
        return checkpoint

    def run(
        self,
        *,
        max_epochs: int | None = None,
        follow: bool = False,
        interval_seconds: float = 0.0,
        on_epoch: OnEpoch | None = None,
    ) -> RunOutcome:
        """Write epochs until the sources have ended or have nothing new, or a stop is requested.

        Args:
            max_epochs: stop with a last checkpoint after this many epochs; None = unlimited.
            follow: wait for new rows when the sources have none; otherwise stop then.
            interval_seconds: the minimum time between two epochs.
            on_epoch: called with every epoch once it is published and committed.

        Raises:
            ConflictError: a newer run was started. Nothing is lost.
            ArroyoStateError: see `JobRun`.
        """
        count, due = 0, 0.0
        while True:
            while (left := due - time.monotonic()) > 0 and not self.job.stop_requested():
                time.sleep(min(left, _IDLE_SECONDS))
            due = time.monotonic() + interval_seconds
            last = max_epochs is not None and count + 1 >= max_epochs
            stop = self.job.stop_requested()
            done = self.step(then_stop=last or stop, even_if_idle=stop)
            if done is not None:
                count += 1
                if on_epoch is not None:
                    on_epoch(done)
            idle = done is None and not follow
            if self.exhausted or stop or idle or (last and done is not None):
                self.job.stop_done()
                return RunOutcome(
                    epochs=count,
                    newest=self.job.base,
                    exhausted=self.exhausted,
                    retention_failures=self.job.retention.failures,
                    overdue_epochs=self.job.retention.overdue_epochs,
                )
            if done is None:
                time.sleep(_IDLE_SECONDS)
