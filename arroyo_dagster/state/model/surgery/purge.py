"""The purge of a key as values: what holds it, what is deleted for it, and what was done."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from arroyo_dagster.state.model.ids import Epoch, JobId, OperatorId, StatePath, TableName
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.rollback import CommittedOutput
from arroyo_dagster.state.model.surgery.plans import EditOutcome, EditPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldObject:
    """An object with rows of the key.

    Attributes:
        place: `epochs`, `unlisted` or `quarantine`.
        epochs: the epochs that list it.
        rows: the stored rows of the key.
        sha256: of the object, in hex.
    """

    operator: OperatorId
    table: TableName
    path: StatePath
    place: str
    epochs: tuple[Epoch, ...]
    rows: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueRows:
    """Rows of the table `checkpoints` in Arroyo's own database, of epochs that no longer exist.

    They hold numbers, times and sizes, and no value of the state. This package never writes there.

    Attributes:
        below: the epochs before this one are meant.
        states: of the rows that a source lists, by epoch; those of deleted epochs that Arroyo has
            marked itself are not listed. None = no source lists the rows.
    """

    job: JobId
    below: Epoch
    states: Mapping[Epoch, str] | None = None

    @property
    def statement(self) -> str:
        """The SQL statement that deletes the rows."""
        job = self.job.replace("'", "''")
        return f"DELETE FROM checkpoints WHERE job_id = '{job}' AND epoch < {self.below}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PurgePlan:
    """The deletion of a key from all that a job stores.

    Attributes:
        edit: of the newest epoch; empty if it does not hold the key.
        objects: everything that holds the key now.
        keep_from: the oldest epoch that stays; None = no epoch expires.
        expires: the epochs that expire: those that hold the key, and all older ones.
        releases: the pinned epochs among them, whose pins edits have set: they cannot be undone.
        quarantines: that are deleted as a whole: they hold the key, or keep a file that does.
        settles: whether a further epoch without the key is published: recovery needs the parent of
            the newest epoch.
        delivered: what sinks made visible with the existing epochs: it stays.
        sinks: by operator, the targets that the state of its sink names.
        catalogue: what stays in Arroyo's database, and how to delete it; None = nothing. Only jobs
            of Arroyo in the legacy layout have such rows.
        unknown: what was not searched.
        why_not: why nothing may be changed now; None = it may.
    """

    edit: EditPlan
    objects: tuple[HeldObject, ...]
    keep_from: Epoch | None
    expires: tuple[Epoch, ...]
    releases: tuple[Epoch, ...]
    quarantines: tuple[str, ...]
    settles: bool
    delivered: tuple[CommittedOutput, ...]
    sinks: Mapping[OperatorId, tuple[str, ...]]
    unknown: tuple[str, ...]
    catalogue: CatalogueRows | None = None
    why_not: str | None = None

    @property
    def paths(self) -> JobPaths:
        """The object paths of the job."""
        return self.edit.paths

    @property
    def empty(self) -> bool:
        """Whether nothing holds the key."""
        return self.edit.empty and not self.objects

    @property
    def digest(self) -> str:
        """The identity that an approval refers to."""
        told = (self.edit.digest, self.objects, self.keep_from, self.expires, self.releases)
        more = (self.quarantines, self.settles)
        return hashlib.blake2b(repr((told, more)).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class PurgeOutcome:
    """What a purge did: the certificate of a deletion.

    Attributes:
        edit: of the newest epoch; None = it did not hold the key.
        epoch: the newest epoch afterwards.
        deleted: of the objects of the plan those that no longer exist.
        remaining: those that still hold the key.
        unsearched: whether remains of interrupted writes, or older versions, may hold the key. The
            purge is complete if neither is left.
        journal_runs: the runs in the journal of deletions that name every deleted object.
    """

    plan: PurgePlan
    edit: EditOutcome | None = None
    epoch: Epoch | None = None
    deleted: tuple[StatePath, ...] = ()
    remaining: tuple[StatePath, ...] = ()
    unsearched: bool = False
    journal_runs: tuple[str, ...] = ()
    done: bool = False
