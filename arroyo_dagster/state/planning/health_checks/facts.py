"""The facts about one job that its health checks need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from arroyo_dagster.state.model.catalog import EpochRow, FileRow
from arroyo_dagster.state.model.checkpoints import Checkpoint, CheckpointState
from arroyo_dagster.state.model.garbage import JobPins
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.planning.verify.findings import Finding
from arroyo_dagster.state.planning.verify.fleet import JobAge

Found = list[Finding] | None
"""The findings of a check on one job; None if the facts do not suffice for a judgement."""

LEAST_HISTORY = 10
"""Fewer epochs do not show what is usual for a job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableAtEpoch:
    """The sums over the files that one table of one operator lists at one epoch.

    Attributes:
        rows: None if the rows of a file are unknown.
    """

    epoch: int
    operator: str
    table: str
    files: int
    size_bytes: int
    rows: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthFacts:
    """What the catalogue and the newest epoch of a job show.

    Attributes:
        now_micros: the time of the check.
        epochs: the latest catalogued epochs, ascending, expired ones included.
        tables: of the epochs that are present, ascending.
        files: of the newest catalogued epoch.
        checkpoint: the newest epoch; None if it cannot be read.
        stored_bytes: the size of all files that present epochs list.
        pinned_bytes: the size of the files that only pinned epochs list.
        quarantined_bytes: the size of what was moved to quarantine.
        journal: the findings on its newest runs of gc.
    """

    age: JobAge
    now_micros: int
    epochs: Sequence[EpochRow] = ()
    tables: Sequence[TableAtEpoch] = ()
    files: Sequence[FileRow] = ()
    checkpoint: Checkpoint | None = None
    pins: JobPins = field(default_factory=JobPins)
    stored_bytes: int = 0
    pinned_bytes: int = 0
    quarantined_bytes: int = 0
    journal: Sequence[Finding] = ()

    @property
    def job(self) -> str:
        """The root of the job's paths."""
        return self.age.job

    @property
    def running(self) -> bool:
        """Whether the job should write epochs: it neither rests nor failed, as far as known."""
        return self.age.resting is None and self.age.finished_micros is not None

    @property
    def readable(self) -> list[EpochRow]:
        """The epochs whose metadata could be read and whose data was not deleted."""
        left = CheckpointState.METADATA_ONLY.value
        return [row for row in self.epochs if row.problem is None and row.state != left]

    @property
    def newest(self) -> EpochRow | None:
        """The newest readable epoch that is present."""
        return next((row for row in reversed(self.readable) if row.present), None)

    @property
    def managed(self) -> bool:
        """Whether this package wrote the newest epoch."""
        return self.checkpoint is not None and self.checkpoint.progress is not None

    @property
    def sizes(self) -> Mapping[StatePath, int]:
        """The sizes of the newest epoch's files, in bytes; 0 if unknown."""
        return {StatePath(row.path): row.size_bytes or 0 for row in self.files}

    @property
    def interval_micros(self) -> float | None:
        """The usual time between two epochs; None if too few are known."""
        finished = [
            (row.epoch, row.finished_micros)
            for row in self.readable
            if row.finished_micros is not None
        ]
        return usual(
            [later[1] - one[1] for one, later in pairwise(finished) if later[0] == one[0] + 1]
        )

    def files_by_table(self) -> Mapping[tuple[str, str], list[FileRow]]:
        """Return the files of the newest epoch by operator and table."""
        found: dict[tuple[str, str], list[FileRow]] = {}
        for row in self.files:
            found.setdefault((row.operator, row.table), []).append(row)
        return found

    def history_by_table(self) -> Iterator[tuple[str, TableAtEpoch, list[TableAtEpoch]]]:
        """Yield each table of the newest epoch with its name, and itself at the epochs before.

        Tables with fewer than `LEAST_HISTORY` earlier epochs are left out.
        """
        found: dict[tuple[str, str], list[TableAtEpoch]] = {}
        for one in self.tables:
            found.setdefault((one.operator, one.table), []).append(one)
        newest = max((one.epoch for one in self.tables), default=None)
        for (operator, table), (*earlier, last) in found.items():
            if last.epoch == newest and len(earlier) >= LEAST_HISTORY:
                yield f"{operator}.{table}", last, earlier


def usual(values: Sequence[float]) -> float | None:
    """Return the median of at least `LEAST_HISTORY` values; None for fewer."""
    return median(values) if len(values) >= LEAST_HISTORY else None
