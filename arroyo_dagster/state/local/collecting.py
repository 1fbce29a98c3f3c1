"""A plan carried out: under the lease, checked against fresh facts, journalled, read back.

Data files go first, then records, then what refers to them, oldest first; each step is read back
from the store before the next begins. Stopped anywhere, every epoch that stays is whole, and the
next run finishes the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from arroyo_dagster.errors import StorageError
from arroyo_dagster.state.backend import ParquetBackend, delete_all
from arroyo_dagster.state.codec.collecting import gc_plan_to_json
from arroyo_dagster.state.codec.records import encode_json
from arroyo_dagster.state.lease import Leased, lease
from arroyo_dagster.state.local.gc_plans import (
    Clock,
    GcRequest,
    check_allowed,
    plan_collection,
    wall_clock,
)
from arroyo_dagster.state.local.journal import Journal, finish_open_runs
from arroyo_dagster.state.local.quarantine import Aside
from arroyo_dagster.state.local.retained import forget_released
from arroyo_dagster.state.local.roots import newest_root
from arroyo_dagster.state.local.roots_read import Progress
from arroyo_dagster.state.local.telling import told_again, unheard
from arroyo_dagster.state.model.collecting import GcPlan, PathsDigest, PlanKind
from arroyo_dagster.state.model.directory import JobFacts
from arroyo_dagster.state.model.ids import Epoch, StatePath
from arroyo_dagster.state.model.layout import JobPaths, Layout
from arroyo_dagster.state.model.objects import BATCH, ObjectKind, Packed, Stored, object_name
from arroyo_dagster.state.planning.collecting import (
    check_gone,
    check_same_job,
    no_longer_planned,
    what_is_left,
)
from arroyo_dagster.state.planning.dead_jobs import check_way
from arroyo_dagster.state.planning.permission import check_store_clock
from arroyo_dagster.state.planning.reachable import refuse
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.failures import lasts
from arroyo_dagster.state.storage.local_disk import remove_empty_directories
from arroyo_dagster.state.storage.store import DeleteOutcome, ObjectStore

Delete = Callable[[ObjectStore, Sequence[Sequence[StatePath]]], list[DeleteOutcome]]
"""Deletes batches of up to 1000 objects; gives what became of each batch, in order."""

Make = Callable[..., GcPlan]
"""Makes a plan, as `plan_collection` does."""

HEADS = 64
"""So few objects are looked up one by one to see whether they are gone; more by a listing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast objects are deleted, and how patiently.

    Attributes:
        in_flight: so many batches of 1000 at once.
        batches_per_second: no more than so many; None = as fast as the store answers.
        tries: how often a failure that may pass is tried again, key by key.
        sleep: how to wait; a test gives its own.
    """

    in_flight: int = 8
    batches_per_second: float | None = None
    tries: int = 5
    sleep: Callable[[float], None] = time.sleep


@dataclass(frozen=True, slots=True, kw_only=True)
class GcProgress:
    """How far a run has come.

    Attributes:
        step: what is being done.
        total: None while nobody knows how much there is.
        left_seconds: at the speed so far; None where that cannot be told.
    """

    step: str
    done: int
    total: int | None
    left_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GcOutcome:
    """What a collection did, or would do.

    Attributes:
        done: False for a dry run, and where there was nothing to do.
        deleted, size_bytes: what was there before and is not there now, as read back from the
            store; in a dry run what would go.
        run: the name of the run in the journal; None if there was nothing to do.
        quarantine: where objects were moved; None if they were deleted.
        open_entries: entries of runs that died, completed by this one.
    """

    plan: GcPlan
    done: bool
    deleted: int
    size_bytes: int
    run: str | None = None
    quarantine: str | None = None
    open_entries: int = 0


def delete_here(store: ObjectStore, batches: Sequence[Sequence[StatePath]]) -> list[DeleteOutcome]:
    """Delete batches in this process, all at once."""
    return concurrently(store.delete_many, batches)


def collect(
    store: ObjectStore,
    paths: JobPaths,
    asked: GcRequest,
    *,
    yes: bool = False,
    plan: GcPlan | None = None,
    aside: bool = False,
    make: Make = plan_collection,
    delete: Delete = delete_here,
    pace: Pace | None = None,
    owner: str = "arroyo-state gc",
    clock: Clock = wall_clock,
    progress: Callable[[GcProgress], None] = unheard,
) -> GcOutcome:
    """Collect what one plan of a job takes; without `yes` say what would go.

    Args:
        plan: carry out this one, made earlier, if everything in it may still go.
        aside: move objects to the job's quarantine instead, from where they can come back.
        make: makes plans; in this process unless given.
        delete: deletes data files; likewise.
        owner: who asks, for lease and journal.
        progress: told after every few thousand objects, and every few seconds.

    Raises:
        ConflictError: somebody else maintains the job, or `plan` no longer fits.
        ProtocolError: refused, with the evidence; see `plan_collection`.
        StorageError: objects could not be deleted; what refers to them is still there.
    """
    with told_again(progress) as told:
        if yes:
            return _carried_out(
                store, paths, asked, plan, aside, make, delete, pace or Pace(), owner, clock, told
            )
        found = plan or make(store, paths, asked, now_micros=clock(), progress=_planning(told))
    return GcOutcome(plan=found, done=False, deleted=found.objects, size_bytes=found.size_bytes)


def _carried_out(
    store: ObjectStore,
    paths: JobPaths,
    asked: GcRequest,
    plan: GcPlan | None,
    aside: bool,
    make: Make,
    delete: Delete,
    pace: Pace,
    owner: str,
    clock: Clock,
    progress: Callable[[GcProgress], None],
) -> GcOutcome:
    check_allowed(store, paths, asked)
    with lease(store, paths, owner, clock=clock) as held:
        now = _store_clock(held, paths, clock)
        opened = finish_open_runs(held, paths)
        fresh = make(held, paths, asked, now_micros=now, progress=_planning(progress))
        chosen = fresh if plan is None else _checked(held, plan, fresh)
        check_way(chosen, aside=aside)
        if not chosen.objects:
            delete_all(held, [paths.removal] if chosen.kind is PlanKind.DEAD_JOB else [])
            return GcOutcome(plan=chosen, done=False, deleted=0, size_bytes=0, open_entries=opened)
        moving = Aside.begin(held, chosen, owner, now) if aside else None
        name = None if moving is None else moving.name
        journal = Journal.of_plan(held, chosen, owner, now, name)
        if chosen.kind is PlanKind.DEAD_JOB:
            # Its epochs cannot be read any more once this has begun.
            held.create(paths.removal, encode_json(gc_plan_to_json(chosen)))
        run = _Run(held, chosen, asked, journal, moving, delete, pace, progress)
        run.carry_out()
        journal.end({"deleted": run.deleted, "size_bytes": run.size_bytes})
        if chosen.kind is PlanKind.DEAD_JOB:
            delete_all(held, [paths.removal])
        if chosen.kind is PlanKind.EXPIRE and chosen.keep_from is not None:
            left = frozenset(fresh.epochs).difference(chosen.epochs)
            forget_released(held, paths, chosen.keep_from, left)
            _note_min_epoch(held, paths, chosen.keep_from, chosen)
        remove_empty_directories(held, paths.root)
    return GcOutcome(
        plan=chosen,
        done=True,
        deleted=run.deleted,
        size_bytes=run.size_bytes,
        run=journal.name,
        quarantine=None if moving is None else moving.name,
        open_entries=opened,
    )


def _planning(progress: Callable[[GcProgress], None]) -> Progress:
    """Tell of what is listed and read as of what is deleted."""
    began = time.monotonic()

    def told(step: str, done: int, total: int | None) -> None:
        left = None if not total or not done else (time.monotonic() - began) / done * (total - done)
        progress(GcProgress(step=step, done=done, total=total, left_seconds=left))

    return told


def _store_clock(held: Leased, paths: JobPaths, clock: Clock) -> int:
    """The time by the clock of the store: it has just written the lease."""
    found = held.head(held.lease.path)
    return check_store_clock(paths, None if found is None else found.modified_micros, clock())


def _checked(held: ObjectStore, plan: GcPlan, fresh: GcPlan) -> GcPlan:
    check_same_job(plan, fresh)
    suspects = list(no_longer_planned(plan, fresh))
    infos = concurrently(held.head, suspects)
    check_gone(plan, [p for p, info in zip(suspects, infos, strict=True) if info is not None])
    return what_is_left(plan, fresh)


def _note_min_epoch(held: ObjectStore, paths: JobPaths, oldest: Epoch, plan: GcPlan) -> None:
    """Let the newest epoch of a job of ours say which is the oldest, as Arroyo's cleanup does."""
    if paths.layout is Layout.LEGACY and plan.proof.condition is None:
        ParquetBackend(held, paths).note_min_epoch(oldest)


@dataclass(slots=True)
class _Run:
    """One plan being carried out."""

    store: Leased
    plan: GcPlan
    asked: GcRequest
    journal: Journal
    aside: Aside | None
    delete: Delete
    pace: Pace
    progress: Callable[[GcProgress], None]
    deleted: int = 0
    size_bytes: int = 0
    _number: int = 0
    _done: int = 0
    _began: float = field(default_factory=time.monotonic)
    _last: float = 0.0

    def carry_out(self) -> None:
        plan = self.plan
        if plan.paths.layout is Layout.LEGACY:
            # The next run may write the same names: all of them, if it is to ignore the state.
            self.store.before_deleting = self._ask_again
        self._step("data", plan.data, self.delete)
        self.store.before_deleting = None
        self._step("records", plan.records, delete_here)
        self._step("metadata", plan.metadata, delete_here)

    def _step(self, name: str, step: Packed, delete: Delete) -> None:
        if not step:
            return
        for wave in _waves(step, 1 if name == "metadata" else self.pace.in_flight):
            self._recheck()
            self._wave(wave, delete, in_order=name == "metadata")
            self._done += sum(map(len, wave))
            self._report(name)
        left = self._read_back(step)
        if left:
            self._wave([left], delete, in_order=name == "metadata")
            left = self._read_back(Packed(left))
        self.deleted += len(step) - len(left)
        self.size_bytes += step.size_bytes - sum(one.size_bytes or 0 for one in left)
        if left:
            raise StorageError(
                f"{len(left)} objects are still there although the store said they were deleted",
                path=left[0].path,
                url=self.store.url,
                next_step="run it again: what refers to them is still there",
            )

    def _recheck(self) -> None:
        """Ask once more, just before acting, what must not have changed."""
        facts = self._ask_again()
        if facts is not None and facts.condition.at_rest:
            self._check_head()

    def _ask_again(self) -> JobFacts | None:
        """What somebody says the job is doing, where the plan rests on that.

        Raises:
            ProtocolError: it is doing something else now.
        """
        plan = self.plan
        if plan.proof.condition is None:
            return None
        answer = self.asked.answer(plan.paths)
        facts = None if answer is None else answer.facts
        said = None if facts is None else f"{facts.condition.value} ({facts.source})"
        run_id = None if facts is None else facts.run_id
        if (said, run_id) != (plan.proof.condition, plan.proof.run_id):
            raise refuse(
                f"the job was {plan.proof.condition} and is {said} now",
                plan.paths,
                run=run_id,
                next_step="let it go on, then make a new plan; run it again for the rest",
            )
        return facts

    def _check_head(self) -> None:
        """A job at rest publishes nothing, whatever anybody says."""
        plan = self.plan
        newest = newest_root(self.store, plan.paths)
        if newest is None or newest.ref != plan.proof.head:
            raise refuse(
                f"the job is said to be at rest, and its newest epoch is another one now: "
                f"{None if newest is None else newest.epoch}",
                plan.paths,
                path=plan.proof.head,
                next_step="find out who runs it; make a new plan then",
            )

    # ---- a wave of batches -----------------------------------------------------------------------

    def _wave(self, wave: list[list[Stored]], delete: Delete, *, in_order: bool) -> None:
        numbered = [(self._next_number(), batch) for batch in wave]
        concurrently(lambda one: self.journal.write(one[0], one[1], {}), numbered)
        if self.aside is not None:
            moving = self.aside
            concurrently(lambda one: moving.copy(one[0], one[1]), numbered)
        outcomes: dict[StatePath, str] = {}
        paths = [[one.path for one in batch] for batch in wave]
        for batches in [[p] for p in self._pieces(wave)] if in_order else [paths]:
            outcomes |= self._deleted(batches, delete)
            if _kept(outcomes):
                break
        concurrently(lambda one: self.journal.write(one[0], one[1], outcomes), numbered)
        failed = _kept(outcomes)
        if failed:
            path, said = next(iter(failed.items()))
            raise StorageError(
                f"{len(failed)} objects could not be deleted; the first is {said}",
                path=path,
                url=self.store.url,
                retryable=not lasts(said),
                next_step="run it again: what refers to them is still there",
            )

    def _pieces(self, wave: list[list[Stored]]) -> Iterator[list[StatePath]]:
        """An interruption must never remove a newer manifest before an older one.

        Metadata of the operators of one epoch of the legacy layout may go in any order.
        """
        together: list[StatePath] = []
        for one in (one for batch in wave for one in batch):
            together.append(one.path)
            if object_name(self.plan.paths, one.path).kind is not ObjectKind.OPERATOR:
                *operators, last = together
                if operators:
                    yield operators
                yield [last]
                together = []
        if together:
            yield together

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    def _deleted(
        self, waiting: Sequence[Sequence[StatePath]], delete: Delete
    ) -> dict[StatePath, str]:
        """Delete batches; what fails and may pass is tried again, key by key.

        Returns:
            For each path `deleted`, `moved`, or `there: ` and why.
        """
        word = "deleted" if self.aside is None else "moved"
        found: dict[StatePath, str] = {}
        for attempt in range(1, self.pace.tries + 1):
            outcomes = self._asked_of_store(waiting, delete)
            for outcome in outcomes:
                found |= dict.fromkeys(outcome.deleted, word)
                found |= {path: f"there: {said}" for path, said in outcome.failed.items()}
            failed = [
                path
                for outcome in outcomes
                for path, said in outcome.failed.items()
                if not lasts(said)
            ]
            if not failed or attempt == self.pace.tries:
                break
            self.pace.sleep(min(10.0, 0.1 * 2**attempt))
            waiting = [failed[at : at + BATCH] for at in range(0, len(failed), BATCH)]
        return found

    def _asked_of_store(
        self, batches: Sequence[Sequence[StatePath]], delete: Delete
    ) -> list[DeleteOutcome]:
        if self.pace.batches_per_second:
            self.pace.sleep(len(batches) / self.pace.batches_per_second)
        try:
            return delete(self.store, batches)
        except StorageError as error:
            # Nobody knows what was done: every key counts as failed, and is tried again.
            reason = f"{error.message}"
            if not error.retryable and not lasts(reason):
                reason = f"the store refused the request: {reason}"
            return [DeleteOutcome(failed=dict.fromkeys(batch, reason)) for batch in batches]

    # ---- reading back ----------------------------------------------------------------------------

    def _read_back(self, step: Packed) -> list[Stored]:
        """Which objects of a step are still there, by the store's own word."""
        if len(step) <= HEADS:
            objects = list(step)
            infos = concurrently(self.store.head, [one.path for one in objects])
            found = zip(objects, infos, strict=True)
            return [one for one, info in found if info is not None and info.etag == one.etag]
        return self._still_listed(PathsDigest(_same(one.path, one.etag) for one in step))

    def _still_listed(self, wanted: PathsDigest) -> list[Stored]:
        left, listed = [], 0
        for info in self.store.list(self.plan.paths.root):
            listed += 1
            if info.addressable and _same(info.path, info.etag) in wanted:
                left.append(Stored(info.path, info.size_bytes, info.modified_micros, info.etag))
        if not listed:
            # The lease and the journal are there: such an answer says nothing of the others.
            raise StorageError(
                "the store lists nothing below the job, and the lease on it is there",
                path=self.plan.paths.root,
                url=self.store.url,
                next_step="run it again: what refers to what was deleted is still there",
            )
        return left

    def _report(self, name: str) -> None:
        now = time.monotonic()
        total = self.plan.objects
        if now - self._last < 1.0 and self._done < total:
            return
        self._last = now
        took = now - self._began
        left = None if not self._done else took / self._done * (total - self._done)
        self.progress(GcProgress(step=name, done=self._done, total=total, left_seconds=left))


def _same(path: StatePath, etag: str | None) -> str:
    """What tells an object from one that was written under its name since."""
    return f"{path}\0{etag or ''}"


def _waves(step: Packed, in_flight: int) -> Iterator[list[list[Stored]]]:
    """Batches, as many as may be in flight at a time."""
    wave: list[list[Stored]] = []
    for batch in step.batches():
        wave.append(batch)
        if len(wave) == in_flight:
            yield wave
            wave = []
    if wave:
        yield wave


def _kept(outcomes: dict[StatePath, str]) -> dict[StatePath, str]:
    return {path: said for path, said in outcomes.items() if said.startswith("there")}
