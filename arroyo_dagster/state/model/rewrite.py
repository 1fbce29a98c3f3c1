"""Rewriting the state of Arroyo's own jobs, as values: what would be done, what was.

Arroyo loads files by rules that differ from table to table (`arroyo-state.md` 5.4, 5.5, 5.7); a
rewrite keeps what its rule would load, and the metadata of the epoch then lists other files.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
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
    """Which rows of a table a restore loads, and so a rewrite keeps.

    Attributes:
        ROWS: those at the cutoff or behind it; equal rows are several rows.
        BATCHES: of an updating join: every row of a record batch of which one row is not too old.
        NEWEST: of an updating aggregate: of each key, or tuple, the row of the largest generation.
        UNKEYED: of one without GROUP BY: the same, one row a row group, for Arroyo looks at the
            first row of a record batch only. This repairs what it would lose.
    """

    ROWS = "rows"
    BATCHES = "record batches"
    NEWEST = "newest rows"
    UNKEYED = "newest rows, one a row group"

    @property
    def aggregate(self) -> bool:
        """Whether it is of an updating aggregate, whose two tables belong together."""
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
    """Files of one expiring table to be written anew.

    Attributes:
        inputs: in the order in which a restore reads them.
        parts: key ranges, at most one new file each; none reaches over two subtasks.
        parallelism: of the subtasks that the new files are split for.
        cutoff_micros: rows older than this are dropped; 0 = none.
        compaction_generation: of the new files: above every input's, and above 0, which Arroyo's
            own compaction would take up again.
        lost_rows: how many rows Arroyo would not find at its next start as things are; upper bound.
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
        """Of the inputs."""
        return tuple(one.file.path for one in self.inputs)

    @property
    def size_bytes(self) -> int:
        """Of the inputs."""
        return sum(one.size_bytes for one in self.inputs)

    @property
    def gain(self) -> int:
        """How many files fewer there are afterwards, at least."""
        return len(self.inputs) - len(self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewritePlan:
    """What would be rewritten of a job of Arroyo's, at the epoch that it would restore.

    Attributes:
        ref: what makes the epoch exist.
        condition: what the job is doing, and `run_id` which run of it; None = nobody says.
        why_not: why nothing may be rewritten now; None = it may.
        left_out: what is not rewritten, and why.
        before, after: what a restore reads, and the most that it would read once this is done.
        parallelism: of the restore that is forecast; None = each operator's own.
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
        """How many files a restore reads now."""
        return self.before.files

    @property
    def files_after(self) -> int:
        """How many it would read once this is done; the most there can be."""
        return self.after.files

    @property
    def repairs(self) -> tuple[TableRewrite, ...]:
        """The tables of which Arroyo would lose rows at its next start, were nothing done."""
        return tuple(one for one in self.tables if one.lost_rows)


# ---- what came of it -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriteShard(MergeOutcome):
    """One part of a table, written and read back.

    Attributes:
        repaired: rows that Arroyo finds now, and would have lost or found in an older version.
    """

    repaired: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriteOutcome:
    """What a rewrite did.

    Attributes:
        parts: every part, verified.
        left_out: of the plan, and what only showed in the files.
        published: whether the epoch lists the new files.
        record: what undoes it, as long as the job was not started.
        unlisted: inputs that no epoch lists any more. Arroyo never deletes them; they undo it.
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
        """Rows that Arroyo finds now, and would have lost or found in an older version."""
        return sum(part.repaired for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriteRecord:
    """The metadata objects of an epoch before they were rewritten.

    Attributes:
        token: the lease under which it was done.
        before: the bytes of each object as Arroyo wrote it.
        after: SHA-256 of each as we wrote it, in hex.
        inputs: data files that the old metadata lists and the new one does not.
    """

    pipeline: PipelineId | None
    job: JobId
    epoch: Epoch
    worker_generation: WorkerGeneration | None
    run_id: int | None
    token: int
    created_at_micros: int
    before: Mapping[StatePath, bytes] = field(default_factory=dict)
    after: Mapping[StatePath, str] = field(default_factory=dict)
    inputs: tuple[StatePath, ...] = ()
    version: int = 1
