"""Plans and outcomes of edits: what becomes of each table, the evidence, what outputs will show."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

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
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.rewrite import RewriteShard
from arroyo_dagster.state.model.surgery.edits import AnyEdit, Rollback
from arroyo_dagster.state.model.surgery.evolve import OperatorMatch


class TableAction(enum.Enum):
    """What becomes of one table.

    Attributes:
        KEPT: it stays as it is.
        CHANGED: some of its rows or entries change.
        CARRIED: it takes the rows of the other job's table, or of the older epoch's.
        FILLED: it takes them, with values in columns that the other job does not have.
        EMPTIED: it has no rows any more; the operator starts with an empty table.
        DROPPED: a table of the other job, which no table takes.
    """

    KEPT = "kept"
    CARRIED = "carried"
    FILLED = "filled"
    CHANGED = "changed"
    EMPTIED = "left empty"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryChange:
    """The new value of one entry of a global keyed table.

    Attributes:
        file: the data file that holds the entry; several subtasks may hold one key.
        key, before, after: JSON texts; `after` is the value as it will be decoded.
    """

    file: StatePath
    key: str
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TableStep:
    """What becomes of one table, and why.

    Attributes:
        reason: why it changes, or stays.
        rows: of an expiring table the rows that a restore loads; of a global keyed table its
            entries. None = not counted, because the table stays.
        removed: how many of them are removed.
        entries: the entries that change.
        files: the data files that the epoch lists for it now; of a table that is carried, filled or
            dropped those of the other job, or of the older epoch.
        source: the other job's operator whose table it takes. Of a dropped table, `operator` is
            the other job's.
    """

    operator: OperatorId
    table: TableName
    action: TableAction
    reason: str
    rows: int | None = None
    removed: int = 0
    entries: tuple[EntryChange, ...] = ()
    files: tuple[StatePath, ...] = ()
    source: OperatorId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WatermarkStep:
    """The new watermark of one operator, in microseconds since 1970; None = it has none."""

    operator: OperatorId
    before_micros: int | None
    after_micros: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EditPrecondition:
    """One thing that must hold before a job is changed, and what was found.

    Attributes:
        met: False = the edit is refused.
    """

    name: str
    met: bool
    evidence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EditPlan:
    """An edit of one job at the epoch that its next start restores.

    Attributes:
        ref: the object that makes the epoch exist.
        condition: the status of the job, and `run_id` its run; UNKNOWN and None if not reported.
        why_not: why nothing may be changed now; None = it may.
        tables: every table of the epoch; of an evolve also those of the source that are dropped.
        matches: the operators whose state is taken; empty if they match by their ids.
        preconditions: with evidence; if one is not met, `why_not` says so.
        unknown: what nobody has tried, or what could not be checked.
        duplicate_outputs, missing_outputs: outputs that will be seen twice, or never.
        objects: SHA-256 of each metadata object as it was read, in hex.
        publishes: the number of the epoch that an edit of a managed job is published as; None = it
            is made in place.
        creates: whether the epoch does not exist yet.
        afterwards: what is left to do by hand, in this order.
    """

    pipeline: PipelineId | None
    job: JobId
    edit: AnyEdit
    epoch: Epoch
    worker_generation: WorkerGeneration | None
    ref: StatePath
    condition: JobCondition = JobCondition.UNKNOWN
    run_id: int | None = None
    why_not: str | None = None
    tables: tuple[TableStep, ...] = ()
    matches: tuple[OperatorMatch, ...] = ()
    watermarks: tuple[WatermarkStep, ...] = ()
    preconditions: tuple[EditPrecondition, ...] = ()
    unknown: tuple[str, ...] = ()
    duplicate_outputs: tuple[str, ...] = ()
    missing_outputs: tuple[str, ...] = ()
    objects: Mapping[StatePath, str] = field(default_factory=dict)
    publishes: Epoch | None = None
    creates: bool = False
    afterwards: tuple[str, ...] = ()

    @property
    def paths(self) -> JobPaths:
        """The object paths of the job."""
        return JobPaths(self.job, self.pipeline)

    @property
    def changed(self) -> tuple[TableStep, ...]:
        """The tables that change."""
        stays = (TableAction.KEPT, TableAction.DROPPED)
        return tuple(step for step in self.tables if step.action not in stays)

    @property
    def empty(self) -> bool:
        """Whether nothing changes."""
        return (
            not self.creates
            and not self.changed
            and all(mark.before_micros == mark.after_micros for mark in self.watermarks)
        )

    @property
    def needs_whole(self) -> bool:
        """Whether the epoch must be restorable before it is changed."""
        return not self.creates and not isinstance(self.edit, Rollback)

    @property
    def digest(self) -> str:
        """The identity that an approval refers to: changes with the request, the metadata of the
        epoch, everything that would be written, and the doubts that were told.
        """
        return hashlib.blake2b(
            repr(
                (
                    (self.pipeline, self.job, self.epoch, self.worker_generation),
                    (self.edit, self.tables, self.watermarks),
                    self.unknown,
                    sorted(self.objects.items()),
                )
            ).encode(),
            digest_size=16,
        ).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class EditOutcome:
    """What an edit did.

    Attributes:
        shards: the rewritten shards of expiring tables, read back and compared.
        published: whether the epoch lists the new files.
        record: the record that undoes it, until the job is started.
        objects: the metadata objects that changed: SHA-256 before and after, in hex; None = it was
            missing. For a managed job they are those of the epoch that was published, and of the
            edited one before.
        unlisted: data files that the epoch no longer lists. Files that no other epoch lists are
            orphans once the job has continued.
        older_epochs: the epochs before, which still hold what was removed.
        evidence: what the new files were found to load.
    """

    plan: EditPlan
    shards: tuple[RewriteShard, ...] = ()
    published: bool = False
    record: StatePath | None = None
    objects: Mapping[StatePath, tuple[str | None, str]] = field(default_factory=dict)
    unlisted: tuple[StatePath, ...] = ()
    older_epochs: tuple[Epoch, ...] = ()
    evidence: tuple[str, ...] = ()
