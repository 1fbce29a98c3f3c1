"""Rewriting the state of Arroyo jobs, as values: plans and outcomes.

Arroyo loads files by rules that differ between tables (`arroyo-state.md` 5.4, 5.5, 5.7). A rewrite
keeps the rows that the table's rule loads; afterwards the metadata of the epoch lists other files.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Annotated

from arroyo_dagster.state.model.compaction import Forecast, LeftOut, MergeOutcome
from arroyo_dagster.state.model.ids import (
    Epoch,
    JobId,
    OperatorId,
    PipelineId,
    StatePath,
    TableName,
    WorkerGeneration,
)
from arroyo_dagster.state.model.job_facts import JobCondition
from arroyo_dagster.state.model.keys import KeyRange
from arroyo_dagster.state.model.settings import Setting
from arroyo_dagster.state.model.tables import TimeFile

NOTHING_READ = Forecast()


@dataclass(frozen=True, slots=True, kw_only=True)
class QuietSettings:
    """How long a stopped Arroyo job must not have changed before it is rewritten.

    Attributes:
        quiet_seconds: how long none of its objects may change before its metadata is written: the
            controller's cleanup goes on for a while after a stop.
    """

    quiet_seconds: Annotated[
        float,
        Setting(
            option="quiet",
            fractions=True,
            minimum=0,
            metavar="SECONDS",
            help="For a stopped Arroyo job: how many seconds none of its objects may change before "
            "its metadata is written. Arroyo's controller continues to clean up for a while after "
            "a stop.",
        ),
    ] = 60.0


class RewriteRule(enum.Enum):
    """Which rows of a table a restore loads, and a rewrite therefore keeps.

    Attributes:
        ROWS: the rows that are not older than the cutoff; duplicates are kept.
        BATCHES: of an updating join: all rows of each record batch with a row that is not too old.
        NEWEST: of an updating aggregate: for each key, or tuple, the row of the largest generation.
        UNKEYED: of an updating aggregate without GROUP BY: as NEWEST, with one row per row group,
            because Arroyo reads only the first row of a record batch. This repairs rows that Arroyo
            would lose.
    """

    ROWS = "rows"
    BATCHES = "record batches"
    NEWEST = "newest rows"
    UNKEYED = "newest rows, one a row group"

    @property
    def aggregate(self) -> bool:
        """Whether it is of an updating aggregate, whose two tables must be rewritten together."""
        return self in (RewriteRule.NEWEST, RewriteRule.UNKEYED)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriteInput:
    """A data file to be rewritten, as it was when the plan was made."""

    file: TimeFile
    size_bytes: int
    modified_micros: int | None = None
    etag: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRewrite:
    """Files of one expiring table to be rewritten.

    Attributes:
        inputs: in the order in which a restore reads them.
        parts: key ranges, with at most one new file each; none spans two subtasks.
        parallelism: the number of subtasks that the new files are split for.
        cutoff_micros: rows older than this are dropped; 0 = none.
        compaction_generation: of the new files: above every input's, and above 0, because Arroyo's
            own compaction would merge files of 0 again.
        lost_rows: upper bound of the rows that Arroyo would lose at its next start without the
            rewrite.
    """

    operator: OperatorId
    table: TableName
    rule: RewriteRule
    inputs: tuple[RewriteInput, ...]
    parts: tuple[KeyRange, ...]
    parallelism: int
    cutoff_micros: int
    compaction_generation: int
    lost_rows: int = 0

    @property
    def paths(self) -> tuple[StatePath, ...]:
        """The paths of the inputs."""
        return tuple(source.file.path for source in self.inputs)

    @property
    def size_bytes(self) -> int:
        """The total size of the inputs."""
        return sum(source.size_bytes for source in self.inputs)

    @property
    def gain(self) -> int:
        """The minimum reduction in the number of files."""
        return len(self.inputs) - len(self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewritePlan:
    """A rewrite of an Arroyo job, at the epoch that its next start would restore.

    Attributes:
        ref: the object that makes the epoch exist.
        condition: the status of the job, and `run_id` its run; UNKNOWN and None if not reported.
        why_not: why nothing may be rewritten now; None = it may.
        left_out: the tables that are not rewritten, and the reasons.
        before, after: what a restore reads now, and at most after the rewrite.
        parallelism: of the forecast restore; None = each operator's own.
    """

    pipeline: PipelineId | None
    job: JobId
    epoch: Epoch
    worker_generation: WorkerGeneration | None
    ref: StatePath
    condition: JobCondition = JobCondition.UNKNOWN
    run_id: int | None = None
    why_not: str | None = None
    tables: tuple[TableRewrite, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    before: Forecast = NOTHING_READ
    after: Forecast = NOTHING_READ
    parallelism: int | None = None

    @property
    def files_before(self) -> int:
        """The number of files that a restore reads now."""
        return self.before.files

    @property
    def files_after(self) -> int:
        """The maximum number of files that a restore reads after the rewrite."""
        return self.after.files

    @property
    def repairs(self) -> tuple[TableRewrite, ...]:
        """The tables of which Arroyo would lose rows at its next start without the rewrite."""
        return tuple(table for table in self.tables if table.lost_rows)


# ---- outcomes ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriteShard(MergeOutcome):
    """One part of a table, written and read back.

    Attributes:
        repaired: rows that Arroyo now finds, and would have lost or found in an older version.
    """

    repaired: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriteOutcome:
    """What a rewrite did.

    Attributes:
        parts: every part, verified.
        left_out: of the plan, and further reasons that only the files showed.
        published: whether the epoch lists the new files.
        record: the record that undoes it, until the job is started.
        unlisted: inputs that no epoch lists any more. Arroyo never deletes them; an undo needs
            them.
        after: what a restore reads from now on.
    """

    plan: RewritePlan
    parts: tuple[RewriteShard, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    published: bool = False
    record: StatePath | None = None
    unlisted: tuple[StatePath, ...] = ()
    after: Forecast = NOTHING_READ

    @classmethod
    def of_plan(cls, plan: RewritePlan) -> RewriteOutcome:
        """The outcome of a dry run: nothing changed."""
        return cls(plan=plan, left_out=plan.left_out, after=plan.before)

    @property
    def changed(self) -> bool:
        """Whether anything was published."""
        return self.published

    @property
    def repaired(self) -> int:
        """The rows that Arroyo now finds, and would have lost or found in an older version."""
        return sum(part.repaired for part in self.parts)
