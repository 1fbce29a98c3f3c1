"""Garbage collection as values: references and their proof, and plans of what to delete.

Times are microseconds since the Unix epoch.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.checkpoints import CheckpointState, LostObject
from arroyo_dagster.state.model.ids import (
    Epoch,
    JobId,
    OperatorId,
    PipelineId,
    StatePath,
    WorkerGeneration,
)
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.leases import MAX_CHECKPOINT_SLOWDOWN, SLOWDOWN_SETTING
from arroyo_dagster.state.model.objects import NOTHING, Packed
from arroyo_dagster.state.model.settings import Setting

HOUR_MICROS = 3_600_000_000
DAY_MICROS = 24 * HOUR_MICROS
GRACE_MICROS = 3 * DAY_MICROS
"""Default age that unreferenced objects must reach before they are deleted."""

GRACE_FLOOR_MICROS = HOUR_MICROS
"""The minimum age: objects that are being written or were just moved are not referenced yet."""

SKEW_MICROS = 5 * 60 * 1_000_000
"""The maximum difference between the clocks of store, writer and gc."""

MARGIN_MICROS = 60 * 1_000_000
"""Tolerance: files of an epoch were observed to be some milliseconds older than its start."""

NO_EPOCH = Epoch(0)
"""Less than every epoch."""

PURGE_MICROS = 7 * DAY_MICROS
"""Default age at which a gc of orphans purges quarantines."""


# ---- what metadata says --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class References:
    """The facts that gc needs from one manifest, or from the metadata of one operator.

    Attributes:
        pipeline, worker_generation, parent_ref: of the protocol layout only.
        operators: each with its parallelism.
        tables: the tables of each operator.
        managed: whether a managed job wrote it.
        rolled_back_to: the epoch that a rollback restored, if a rollback published this one.
        dropped: as of `RunProgress`.
        files: the data files it lists, each once, in order.
    """

    pipeline: PipelineId | None = None
    job: JobId
    worker_generation: WorkerGeneration | None = None
    epoch: Epoch
    min_epoch: Epoch
    start_time_micros: int = 0
    finish_time_micros: int = 0
    needs_commit: bool = False
    parent_ref: StatePath | None = None
    operators: tuple[tuple[OperatorId, int], ...] = ()
    tables: tuple[tuple[OperatorId, frozenset[str]], ...] = ()
    managed: bool = False
    rolled_back_to: Epoch | None = None
    dropped: tuple[str, ...] = ()
    files: tuple[StatePath, ...] = ()

    @property
    def operator(self) -> OperatorId:
        """The operator, in the metadata of one."""
        return self.operators[0][0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """An object that was read to find references.

    Attributes:
        digest: of its bytes, 32 hexadecimal digits; changes whenever the object does.
        time_micros: when the described epoch was finished or the object written; None if the object
            has no time.
    """

    json_as_list: ClassVar[bool] = True
    path: StatePath
    digest: str
    time_micros: int | None = None


DIGEST_BYTES = 16


def digest_of(data: bytes) -> str:
    """Return the digest of an object's bytes."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRoot:
    """One epoch, or one attempt at it, with its references.

    Attributes:
        ref: the object that makes it exist, or would.
        tables: the tables of each operator whose metadata exists.
        dropped: as of `RunProgress`.
        outside: a file that it lists outside of its job; None if there is none.
        gone: metadata objects of it that are missing: gc of it has begun.
        rolled_back_to: the epoch that a rollback restored, if a rollback published this one.
        rolled_back: whether the newest epoch does not build on it.
        unreadable: why its file list cannot be read; None if it can. Set only for epochs that were
            rolled back.
        by_name: of an unreadable epoch, the objects to delete with it; the one that makes it exist
            comes last.
        roots: the objects that were read for it.
        written_at_micros: its age: when the store wrote the object that makes it exist. None if
            the store reports no time, or was not asked.
        oldest_object_micros: likewise for the oldest object of its metadata; a rewrite, a cleanup
            or a late claim of other objects does not change it. Only for the newest epoch.
    """

    epoch: Epoch
    worker_generation: WorkerGeneration | None
    ref: StatePath
    parent_ref: StatePath | None
    state: CheckpointState
    min_epoch: Epoch
    start_time_micros: int
    finish_time_micros: int
    needs_commit: bool
    operators: tuple[tuple[OperatorId, int], ...]
    managed: bool
    files: Packed
    tables: tuple[tuple[OperatorId, frozenset[str]], ...] = ()
    dropped: tuple[str, ...] = ()
    outside: StatePath | None = None
    gone: tuple[StatePath, ...] = ()
    rolled_back_to: Epoch | None = None
    rolled_back: bool = False
    unreadable: str | None = None
    by_name: tuple[StatePath, ...] = ()
    roots: tuple[Root, ...] = ()
    written_at_micros: int | None = None
    oldest_object_micros: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """An epoch that stays until it is unpinned.

    Attributes:
        owner, reason: for display.
        released: it was unpinned, and expires with the next gc run. Until then this record explains
            the gap between it and newer epochs.
    """

    epoch: Epoch
    owner: str
    pinned_at_micros: int
    reason: str = ""
    released: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantined:
    """A gc run whose objects were moved to quarantine, and can be moved back.

    Attributes:
        name: of its directory below the quarantine.
        needs: the files that its epochs list and that were not moved; they stay while the epochs
            can be restored from quarantine.
        moved_at_micros: when, by the clock of the store.
        parts: upper bound of the number of its index parts, which determines their names.
        ended: whether its run was completed; otherwise the next run moves objects to it, too.
    """

    name: str
    needs: Packed
    moved_at_micros: int
    parts: int = 0
    ended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """One object in quarantine: its original path, its copy, its size and digest."""

    json_as_list: ClassVar[bool] = True
    path: StatePath
    copy: StatePath
    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UndeletePlan:
    """The objects to move back from quarantine.

    Attributes:
        quarantine: its name.
        objects: in the order in which they are moved back.
    """

    quarantine: str
    objects: tuple[Moved, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPins:
    """What stays in addition to the newest epochs; read by name, without a listing.

    Attributes:
        changes: names of the records that undo changes in place of epochs of an Arroyo job.
        compactions: names of compaction records, including some that were adopted meanwhile.
        expired_below: epochs below this one may have been deleted by gc, or left out of a copy of
            the job: that they do not exist is no loss.
    """

    pins: tuple[Pin, ...] = ()
    quarantines: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    compactions: tuple[str, ...] = ()
    expired_below: Epoch = NO_EPOCH
    version: int = 1

    @property
    def pinned(self) -> frozenset[Epoch]:
        return frozenset(pin.epoch for pin in self.pins if not pin.released)

    @property
    def ever_pinned(self) -> frozenset[Epoch]:
        """The pinned epochs, including unpinned ones that have not expired yet."""
        return frozenset(pin.epoch for pin in self.pins)

    def with_pin(self, pin: Pin) -> JobPins:
        """Return these with a pin, in place of one of the same epoch."""
        others = (other for other in self.pins if other.epoch != pin.epoch)
        return replace(self, pins=tuple(sorted((*others, pin), key=lambda pinned: pinned.epoch)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Roots:
    """All objects of one job that refer to data files, completely read.

    Attributes:
        worker_generation: the newest that was started; None in the legacy layout.
        resolved_from: the generation whose manifest leads to the newest epoch.
        restorable: the oldest epoch that a start may choose, including a start by Arroyo.
        restored: the checkpoint that the newest run restored; None if it began without state, or
            if that is unknown (the legacy layout).
        epochs: every existing epoch, newest first, including partially collected ones.
        attempts: manifests and operator metadata that own no epoch.
        compactions: by record, the files of compactions that wait for the job's writer, and the
            files that undoing a rewrite needs.
        generations: the worker generations with a manifest, among those that were looked up.
        lost: the manifest that the newest run published last, if it does not exist.
        cut: metadata objects that do not name all that lies in the directory of their epoch.
        more: the other objects read: fence, generation manifests, pins.
    """

    paths: JobPaths
    worker_generation: WorkerGeneration | None
    resolved_from: WorkerGeneration | None = None
    restorable: Epoch | None = None
    restored: StatePath | None = None
    epochs: tuple[EpochRoot, ...]
    attempts: tuple[EpochRoot, ...] = ()
    compactions: Mapping[StatePath, Packed] = field(default_factory=dict)
    job_pins: JobPins = field(default_factory=JobPins)
    quarantined: tuple[Quarantined, ...] = ()
    generations: tuple[WorkerGeneration, ...] = ()
    lost: StatePath | None = None
    cut: tuple[LostObject, ...] = ()
    more: tuple[Root, ...] = ()

    @property
    def head(self) -> EpochRoot:
        return self.epochs[0]

    @property
    def current(self) -> tuple[EpochRoot, ...]:
        """The epochs that were not rolled back, newest first."""
        return tuple(root for root in self.epochs if not root.rolled_back)

    def behind_rollback(self, epoch: Epoch) -> bool:
        """Return whether a rollback has removed this number from the chain of epochs."""
        return any(
            root.rolled_back_to is not None and root.rolled_back_to < epoch < root.epoch
            for root in self.current
        )

    @property
    def managed(self) -> bool:
        return self.head.managed

    @property
    def read(self) -> tuple[Root, ...]:
        """Every object that was read."""
        epochs = (root for epoch in (*self.epochs, *self.attempts) for root in epoch.roots)
        return (*self.more, *epochs)


# ---- the proof -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The evidence that no object which stays refers to an object to be deleted.

    Attributes:
        roots: every object that was read, each with the digest of its bytes and its time.
        epochs: the number of epochs that they describe.
        referenced: the number of data files that the epochs which stay list.
        digest: of the set of these files, in any order.
        head: the object that makes the newest epoch exist.
        worker_generation, run_id: of the job's writer: its newest generation, Arroyo's run id.
        condition: the status of the job, and its source; None for a managed job.
        listed: the number of objects in a listing; None if none was needed.
    """

    roots: tuple[Root, ...]
    epochs: int
    referenced: int
    digest: str
    head: StatePath | None
    worker_generation: WorkerGeneration | None = None
    run_id: int | None = None
    condition: str | None = None
    listed: int | None = None


# ---- the request ---------------------------------------------------------------------------------


def _days(
    option: str,
    config: str,
    help_text: str,
    *,
    minimum: int | None = None,
    above: int | None = None,
) -> Setting:
    """Return the setting of an age: a duration on the command line, days in a configuration."""
    return Setting(
        option=option,
        config=config,
        scale=DAY_MICROS,
        fractions=True,
        duration=True,
        minimum=minimum,
        above=above,
        help=help_text,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Which epochs stay, in addition to pinned ones. With both, an epoch stays if either keeps it.

    Attributes:
        keep_epochs: this number of newest epochs. One only of a managed job at rest: of others two
            stay, as recovery needs the newest and its parent.
        keep_micros: epochs that were written no longer ago than this, by the clock of the store.

    Raises:
        InputError: neither is given, or one is out of its range.
    """

    keep_epochs: Annotated[
        int | None,
        Setting(
            option="keep",
            minimum=1,
            help="Keep this many newest epochs; 1 only of a managed job at rest, else 2 stay.",
        ),
    ] = None
    keep_micros: Annotated[
        int | None,
        _days("keep-for", "keep_days", "Keep epochs younger than this {duration}.", minimum=0),
    ] = None

    def __post_init__(self) -> None:
        if self.keep_epochs is None and self.keep_micros is None:
            raise InputError(
                "retention missing: expected a number of newest epochs, an age, or both",
                next_step="give a number of newest epochs, an age, or both",
            )
        if self.keep_epochs is not None and self.keep_epochs < 1:
            raise InputError("at least 1 epoch is kept", keep_epochs=self.keep_epochs)
        if self.keep_micros is not None and self.keep_micros < 0:
            raise InputError(
                "the retention is negative: the time that epochs stay lies in the future",
                keep_seconds=self.keep_micros // 1_000_000,
                next_step="give a duration, for example 7 days",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GraceSettings:
    """How long unreferenced objects stay.

    Attributes:
        grace_micros: objects that were written no longer ago than this stay, by the clock of the
            store; at least an hour.
    """

    grace_micros: Annotated[
        int,
        _days(
            "older-than",
            "older_than_days",
            "Keep objects younger than this {duration}; at least an hour.",
            above=0,
        ),
    ] = GRACE_MICROS


@dataclass(frozen=True, slots=True, kw_only=True)
class OrphanSettings:
    """What a gc of orphans does with them, and with what earlier runs moved to quarantine.

    Attributes:
        delete: delete orphans; by default they are moved to quarantine.
        purge_after_micros: first purge quarantines of this age, by the clock of the store; at least
            an hour.
    """

    delete: Annotated[
        bool, Setting(help="orphans: delete objects instead of moving them to quarantine.")
    ] = False
    purge_after_micros: Annotated[
        int,
        _days(
            "purge-after",
            "purge_after_days",
            "First purge quarantines older than this {duration}; at least an hour.",
            above=0,
        ),
    ] = PURGE_MICROS

    def moves(self, kind: PlanKind, *, quarantine: bool) -> bool:
        """Return whether objects of a plan are moved to quarantine; else they are deleted.

        Args:
            quarantine: whether that was asked for.

        Raises:
            InputError: `delete` with `quarantine`, or of another plan than orphans.
        """
        if self.delete and (quarantine or kind is not PlanKind.ORPHANS):
            reason = "with --quarantine" if quarantine else f"of {kind.value}"
            raise InputError(
                f"--delete {reason} has no meaning: it deletes orphans instead of moving them",
                next_step="leave --delete out",
            )
        return quarantine or (kind is PlanKind.ORPHANS and not self.delete)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletionSettings:
    """How the objects of a plan are deleted.

    Attributes:
        quarantine: move objects to the job's quarantine instead of deleting them; `undelete`
            restores them.
        max_checkpoint_slowdown: once checkpoints of a running job take more than this many times as
            long as before, there is a pause after each request.
        journal_micros: delete the journal's records of runs that are older; None = none.
    """

    quarantine: Annotated[
        bool,
        Setting(
            help="Move objects to quarantine instead of deleting them; the default for orphans. "
            "`gc undelete` restores them."
        ),
    ] = False
    max_checkpoint_slowdown: Annotated[float, SLOWDOWN_SETTING] = MAX_CHECKPOINT_SLOWDOWN
    journal_micros: Annotated[
        int | None,
        Setting(
            option="journal-days",
            config="journal_days",
            scale=DAY_MICROS,
            fractions=True,
            above=0,
            help="Delete the journal's runs older than this many days. By default they stay for "
            "ever.",
        ),
    ] = None


# ---- the plan ------------------------------------------------------------------------------------


class PlanKind(enum.Enum):
    """The three kinds of plans."""

    EXPIRE = "expire"
    ORPHANS = "orphans"
    DEAD_JOB = "dead-job"


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteRemains:
    """A file that an interrupted write has left beside its target on local disk, in no listing.

    Attributes:
        name: as stored, below the checkpoint URL; it ends in `#digits`.
    """

    name: str
    size_bytes: int
    modified_micros: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GcPlan:
    """The objects of one job to delete; each step completes before the next begins.

    Attributes:
        made_at_micros: when, by the clock that ages were computed with.
        rule: the request, as JSON values; planning again with the same rule returns a fresh plan.
        keep_from: the oldest epoch that stays, not counting pinned ones; None if none expires.
        epochs: the epochs that expire, oldest first.
        data: data files; most of the objects.
        records: markers, subtask objects, notes and epoch records.
        metadata: the objects that refer to the others, oldest first, deleted one after the other.
        stays: for each reason why objects stay, their number and bytes.
        foreign: the first names that neither Arroyo nor this package creates; never deleted.
        purges: the quarantines that are old enough to be purged first.
        remains: what interrupted writes have left, older than a day; deleted, never quarantined.
    """

    kind: PlanKind
    pipeline: PipelineId | None
    job: JobId
    made_at_micros: int
    rule: Mapping[str, object]
    proof: Proof
    keep_from: Epoch | None = None
    epochs: tuple[Epoch, ...] = ()
    data: Packed = NOTHING
    records: Packed = NOTHING
    metadata: Packed = NOTHING
    stays: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    foreign: tuple[StatePath, ...] = ()
    purges: tuple[str, ...] = ()
    remains: tuple[WriteRemains, ...] = ()

    @property
    def paths(self) -> JobPaths:
        return JobPaths(self.job, self.pipeline)

    @property
    def objects(self) -> int:
        return len(self.data) + len(self.records) + len(self.metadata)

    @property
    def size_bytes(self) -> int:
        """The bytes that are freed, as far as sizes are known."""
        return self.data.size_bytes + self.records.size_bytes + self.metadata.size_bytes

    @property
    def digest(self) -> str:
        """The identity that an approval refers to: changes with the objects and with the rule."""
        head = repr((self.kind.value, self.pipeline, self.job, self.keep_from, self.epochs))
        digest = hashlib.blake2b(head.encode(), digest_size=16)
        digest.update(repr((sorted(self.rule.items()), self.proof.worker_generation)).encode())
        for step in (self.data, self.records, self.metadata):
            digest.update(b"\0step\0")
            for entry in step:
                digest.update(repr((str(entry.path), entry.size_bytes, entry.etag)).encode())
        if self.purges:
            digest.update(repr(("purges", self.purges)).encode())
        if self.remains:
            digest.update(repr(self.remains).encode())
        return digest.hexdigest()
