"""A rollback as values: the restored epoch, and the epochs that are given up for it.

Times are microseconds since the Unix epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from arroyo_dagster.state.model.ids import (
    Epoch,
    JobId,
    OperatorId,
    PipelineId,
    StatePath,
    WorkerGeneration,
)
from arroyo_dagster.state.model.layout import JobPaths


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedOutput:
    """What one sink made visible with one epoch.

    Attributes:
        files: the names of the files; None if the sink's commit data does not name files.
    """

    operator: OperatorId
    epoch: Epoch
    files: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUpEpoch:
    """An epoch that the newest epoch will not build on after the rollback.

    Attributes:
        state: as `arroyo-state epochs` shows it; `unreadable` if its metadata cannot be read.
        rows: how many rows it wrote, by the footers of its files; None if unknown.
        problem: why it cannot be restored; None if it can.
    """

    epoch: Epoch
    state: str
    finished_micros: int | None = None
    rows: int | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackPlan:
    """A rollback of one job: checked against fresh facts before it runs.

    Attributes:
        epoch: the epoch that is restored.
        ref: the object that makes it exist.
        newest: the newest epoch before the rollback.
        publishes: the number of the epoch that will hold the restored content.
        given_up: the epochs that were current and will not be, oldest first.
        committed: output that sinks committed with these epochs: it stays visible, and its rows
            are written again.
        offsets_now, offsets_then: the offsets of each source, by its name, as JSON values, in the
            newest epoch and in the restored one; None: the newest epoch cannot be read.
        worker_generation: the newest that was started; None in the legacy layout.
        may_be_running: whether the newest run did not end with a last epoch of its own.
        undoes: whether the abandoned epochs are edits, in which no run has read anything.
        warnings: further facts that the user should know before it runs.
    """

    pipeline: PipelineId | None
    job: JobId
    epoch: Epoch
    ref: StatePath
    newest: Epoch
    publishes: Epoch
    given_up: tuple[GivenUpEpoch, ...]
    committed: tuple[CommittedOutput, ...]
    offsets_now: Mapping[str, object] | None
    offsets_then: Mapping[str, object]
    worker_generation: WorkerGeneration | None = None
    may_be_running: bool = False
    undoes: bool = False
    warnings: tuple[str, ...] = field(default=())

    @property
    def paths(self) -> JobPaths:
        """The object paths of the job."""
        return JobPaths(self.job, self.pipeline)

    @property
    def rows(self) -> int | None:
        """How many rows the epochs that are given up wrote; None if unknown for any of them."""
        counts = [epoch.rows for epoch in self.given_up]
        numbers = [rows for rows in counts if rows is not None]
        return sum(numbers) if len(numbers) == len(counts) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackOutcome:
    """What a rollback did.

    Attributes:
        epoch: the epoch that it published.
        ref: the object that makes this epoch exist.
        worker_generation: the generation that published it; None in the legacy layout.
    """

    plan: RollbackPlan
    epoch: Epoch
    ref: StatePath
    worker_generation: WorkerGeneration | None = None
