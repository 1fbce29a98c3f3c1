"""Garbage collection as values: what is referenced and how that is known, what goes and why.

Times are microseconds since the Unix epoch.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.checkpoints import CheckpointState
from arroyo_dagster.state.model.ids import (
    Epoch,
    JobId,
    OperatorId,
    PipelineId,
    StatePath,
    WorkerGeneration,
)
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.objects import NOTHING, Packed
from arroyo_dagster.state.model.settings import Setting

HOUR_MICROS = 3_600_000_000
DAY_MICROS = 24 * HOUR_MICROS
GRACE_MICROS = 3 * DAY_MICROS
"""Unreferenced objects stay this long, unless another time is given."""

GRACE_FLOOR_MICROS = HOUR_MICROS
"""The minimum: objects that are being written, or were just moved, are not referenced yet."""

SKEW_MICROS = 5 * 60 * 1_000_000
"""How much the clocks of store, writer and gc may differ."""

MARGIN_MICROS = 60 * 1_000_000
"""Files of an epoch were seen to be older than its start by some milliseconds."""

PURGE_MICROS = 7 * DAY_MICROS


# ---- what metadata says --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class References:
    """What one manifest, or the metadata of one operator, says that a collector needs.

    Attributes:
        pipeline, worker_generation, parent_ref: of the protocol layout only.
        operators: each with its parallelism.
        managed: whether a job of ours wrote it.
        rolled_back_to: the epoch that a rollback restored, if one published it.
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
    managed: bool = False
    rolled_back_to: Epoch | None = None
    files: tuple[StatePath, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """An object that was read to know what is referenced.

    Attributes:
        digest: of its bytes, 32 hexadecimal digits: changes whenever the object does.
        time_micros: when what it describes was finished or written; None if it does not say.
    """

    path: StatePath
    digest: str
    time_micros: int | None = None


DIGEST_BYTES = 16


def digest_of(data: bytes) -> str:
    """The digest of an object's bytes."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRoot:
    """One epoch, or one attempt at it, by what it refers to.

    Attributes:
        ref: the object that makes it exist, or would.
        outside: a file that it lists and that does not lie below its job; None if all do.
        gone: objects of its metadata that are not there: a collection of it has begun.
        rolled_back_to: the epoch that a rollback restored, if one published it.
        rolled_back: whether the newest epoch does not build on it.
        unreadable: why its metadata does not say what it lists; None if it does. Only an epoch that
            was rolled back is kept so.
        by_name: of an unreadable epoch, the objects that go with it, what makes it exist last.
        roots: what was read of it.
        written_at_micros: when the store says that what makes it exist was written: its age. None
            if the store does not say, or was not asked.
        oldest_object_micros: likewise of the oldest object of its metadata, which a rewrite, a
            cleanup or a late claim of the others leaves as it is; of the newest epoch only.
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
        owner, reason: for people to read.
        released: it was unpinned, and goes with the next expiry. Until then it is known that the
            gap between it and newer epochs is none that should worry anybody.
    """

    epoch: Epoch
    owner: str
    pinned_at_micros: int
    reason: str = ""
    released: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantined:
    """A run whose objects were moved aside, and can be moved back.

    Attributes:
        name: of its directory below the quarantine.
        needs: what the epochs in it list and was not moved: it stays as long as they can come back.
        moved_at_micros: when, by the clock of the store.
        parts: its index has no more parts than this, so that they are known by name; 0 = nobody
            says, and they are known by a listing.
    """

    name: str
    needs: Packed
    moved_at_micros: int
    parts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """One object in quarantine: where it was, where its copy is, and what it was."""

    path: StatePath
    copy: StatePath
    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UndeletePlan:
    """What comes back from quarantine.

    Attributes:
        quarantines: their names, oldest first: several if an epoch is split between them.
        objects: in the order in which they come back.
        incomplete: epochs that do not come back, because an object they need lies nowhere any more.
    """

    quarantines: tuple[str, ...]
    objects: tuple[Moved, ...]
    incomplete: tuple[Epoch, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPins:
    """What stays besides the newest epochs, known by its name: no listing is needed for it.

    Attributes:
        rewrites: names of the records that undo rewrites of an epoch of Arroyo's.
    """

    pins: tuple[Pin, ...] = ()
    quarantines: tuple[str, ...] = ()
    rewrites: tuple[str, ...] = ()
    version: int = 1

    @property
    def pinned(self) -> frozenset[Epoch]:
        return frozenset(pin.epoch for pin in self.pins if not pin.released)

    @property
    def ever_pinned(self) -> frozenset[Epoch]:
        """Those that were unpinned and have not gone yet included."""
        return frozenset(pin.epoch for pin in self.pins)


@dataclass(frozen=True, slots=True, kw_only=True)
class Roots:
    """Everything of one job that refers to data files, read in full.

    Attributes:
        worker_generation: the newest that was started; None in the legacy layout.
        resolved_from: the generation whose manifest leads to the newest epoch.
        restorable: the oldest epoch that a start may choose, an Arroyo's included.
        restored: what the newest run went on from; None if it began without state, or by which
            nobody knows (the legacy layout).
        epochs: every epoch that exists, newest first, what a collection has half removed included.
        attempts: manifests and operator metadata that own no epoch.
        compactions: the files that compactions which wait for their writer touch, and those that
            putting back a rewrite needs, by record.
        generations: the manifests of worker generations that are there, as far as they were looked
            for.
        more: what else was read: fence, records of generations, pins.
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
    more: tuple[Root, ...] = ()

    @property
    def head(self) -> EpochRoot:
        return self.epochs[0]

    @property
    def current(self) -> tuple[EpochRoot, ...]:
        """The epochs that were not rolled back, newest first."""
        return tuple(one for one in self.epochs if not one.rolled_back)

    def behind_rollback(self, epoch: Epoch) -> bool:
        """Whether a rollback went back behind this number."""
        return any(
            one.rolled_back_to is not None and one.rolled_back_to < epoch < one.epoch
            for one in self.current
        )

    @property
    def managed(self) -> bool:
        return self.head.managed

    @property
    def read(self) -> tuple[Root, ...]:
        """Every object that was read."""
        epochs = (root for one in (*self.epochs, *self.attempts) for root in one.roots)
        return (*self.more, *epochs)


# ---- the proof -----------------------------------------------------------------------------------


class PathsDigest:
    """The digest of a set of paths, whatever their order; also answers whether one is in it.

    An answer can be wrong in one way only: that a path is in it, so that it is kept.
    """

    def __init__(self, paths: Iterable[str] = ()) -> None:
        self._known: set[int] = set()
        self._sum = 0
        self.add(paths)

    def add(self, paths: Iterable[str]) -> None:
        """Take in more paths; those that are in it already change nothing."""
        for path in paths:
            number = _number(path)
            if number not in self._known:
                self._known.add(number)
                self._sum += number

    def __contains__(self, path: str) -> bool:
        return _number(path) in self._known

    def __len__(self) -> int:
        return len(self._known)

    @property
    def hexdigest(self) -> str:
        return f"{self._sum % 2**128:032x}"

    @staticmethod
    def joined(digests: Iterable[str]) -> str:
        """The digest of a set by those of its parts, which have nothing in common."""
        return f"{sum(int(one, 16) for one in digests) % 2**128:032x}"


def _number(path: str) -> int:
    data = path.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=16).digest(), "big")


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """How it is known that nothing which stays refers to what goes.

    Attributes:
        roots: every object that was read, each with the digest of its bytes and its time.
        epochs: how many epochs they make up.
        referenced: how many data files those of them that stay list.
        digest: of the set of these files, whatever their order.
        head: what makes the newest epoch exist.
        worker_generation, run_id: who writes the job: its newest generation, Arroyo's run id.
        condition: what the job was doing, and who said so; None for a job of ours.
        listed: how many objects a listing showed; None if none was needed.
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


# ---- what is asked -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Which epochs stay, besides pinned ones. Given both, an epoch stays if either keeps it.

    Attributes:
        keep_epochs: so many of the newest, at least two.
        keep_micros: those that were written no longer ago than this, by the clock of the store.

    Raises:
        InputError: neither is given, or one is out of its range.
    """

    keep_epochs: Annotated[
        int | None, Setting(option="keep", minimum=2, help="Keep this many newest epochs.")
    ] = None
    keep_micros: Annotated[
        int | None,
        Setting(
            option="keep-for",
            config="keep_days",
            scale=DAY_MICROS,
            fractions=True,
            duration=True,
            minimum=0,
            help="Keep epochs younger than this {duration}.",
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.keep_epochs is None and self.keep_micros is None:
            raise InputError(
                "retention missing: expected a number of newest epochs, an age, or both",
                next_step="give a number of newest epochs, an age, or both",
            )
        if self.keep_epochs is not None and self.keep_epochs < 2:
            raise InputError(
                "at least 2 epochs are kept: recovery needs the newest and its parent",
                keep_epochs=self.keep_epochs,
            )
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
        Setting(
            option="older-than",
            config="older_than_days",
            scale=DAY_MICROS,
            fractions=True,
            duration=True,
            above=0,
            help="Keep objects younger than this {duration}; at least an hour.",
        ),
    ] = GRACE_MICROS


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletionSettings:
    """How the objects of a plan are deleted.

    Attributes:
        quarantine: move objects to the job's quarantine instead of deleting them; `undelete`
            restores them.
    """

    quarantine: Annotated[
        bool,
        Setting(
            help="Move objects to quarantine instead of deleting them. `gc undelete` restores them."
        ),
    ] = False


def checked_grace(grace_micros: int) -> int:
    """Give back how old what nothing references must be.

    Raises:
        InputError: it lies in the future, or is below the floor of an hour.
    """
    if grace_micros < 0:
        raise InputError(
            "the age is negative: the time before which objects are deleted lies in the future",
            grace_seconds=grace_micros // 1_000_000,
            next_step="give an age, for example 3 days",
        )
    if grace_micros < GRACE_FLOOR_MICROS:
        raise InputError(
            "the age is below an hour: younger objects may be about to be referenced",
            grace_seconds=grace_micros // 1_000_000,
            floor_seconds=GRACE_FLOOR_MICROS // 1_000_000,
            next_step="give an age of an hour or more; 3 days is the default",
        )
    return grace_micros


# ---- the plan ------------------------------------------------------------------------------------


class PlanKind(enum.Enum):
    """Which of the three plans it is."""

    EXPIRE = "expire"
    ORPHANS = "orphans"
    DEAD_JOB = "dead-job"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpirePlan:
    """What goes when epochs expire: each step is complete before the next begins.

    Attributes:
        keep_from: the oldest epoch that stays, pinned ones aside.
        epochs: the epochs that go, oldest first.
        data: data files that no epoch which stays lists.
        records: markers, subtask objects, notes and epoch records.
        metadata: what refers to the others, oldest first, last of all: a run that stops half way
            leaves no gap in the chain of parents, and the next finds again what is left.
    """

    keep_from: Epoch
    epochs: tuple[Epoch, ...] = ()
    data: Packed = NOTHING
    records: Packed = NOTHING
    metadata: Packed = NOTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class GcPlan:
    """What is to be deleted of one job: each step is complete before the next begins.

    Attributes:
        made_at_micros: when, by the clock that ages were taken from.
        rule: what was asked, as JSON values: planning anew by the same rule gives a fresh plan.
        keep_from: the oldest epoch that stays, pinned ones aside; None where no epoch goes.
        epochs: the epochs that go, oldest first.
        data: data files, the bulk.
        records: markers, subtask objects, notes and epoch records.
        metadata: what refers to the others, oldest first, one after the other.
        stays: for each reason why something stays, how many objects and bytes.
        foreign: names that nobody here gives, the first of them; they are never deleted.
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

    @property
    def paths(self) -> JobPaths:
        return JobPaths(self.job, self.pipeline)

    @property
    def objects(self) -> int:
        return len(self.data) + len(self.records) + len(self.metadata)

    @property
    def size_bytes(self) -> int:
        """What comes free, as far as sizes are known."""
        return self.data.size_bytes + self.records.size_bytes + self.metadata.size_bytes

    @property
    def digest(self) -> str:
        """What an approval is of: changes with anything that goes, and with why it may."""
        head = repr((self.kind.value, self.pipeline, self.job, self.keep_from, self.epochs))
        found = hashlib.blake2b(head.encode(), digest_size=16)
        found.update(repr((sorted(self.rule.items()), self.proof.worker_generation)).encode())
        for step in (self.data, self.records, self.metadata):
            found.update(b"\0step\0")
            for one in step:
                found.update(repr((str(one.path), one.size_bytes, one.etag)).encode())
        return found.hexdigest()
