"""A plan made and carried out: under the lease, and checked against fresh facts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from arroyo_dagster.errors import FormatError, StorageError
from arroyo_dagster.state.codec.gc import gc_plan_to_json
from arroyo_dagster.state.codec.records import encode_json
from arroyo_dagster.state.metadata.backend import ParquetBackend, delete_all
from arroyo_dagster.state.metadata.interrupts import uninterrupted
from arroyo_dagster.state.metadata.lease import Leased, lease, wall_clock
from arroyo_dagster.state.model.garbage import GcPlan, PlanKind
from arroyo_dagster.state.model.ids import Epoch
from arroyo_dagster.state.model.layout import JobPaths, Layout
from arroyo_dagster.state.operations.gc.journal import Journal
from arroyo_dagster.state.operations.gc.journal_archive import archive_runs
from arroyo_dagster.state.operations.gc.journal_chain import finish_open_runs
from arroyo_dagster.state.operations.gc.pins import forget_released
from arroyo_dagster.state.operations.gc.plan import Clock, GcRequest, check_allowed, plan_collection
from arroyo_dagster.state.operations.gc.quarantine import Aside
from arroyo_dagster.state.operations.gc.root_reader import Progress
from arroyo_dagster.state.operations.gc.steps import Delete, GcProgress, Pace, Run, delete_here
from arroyo_dagster.state.operations.gc.telling import told_again, unheard
from arroyo_dagster.state.planning.gc.dead_jobs import check_way
from arroyo_dagster.state.planning.gc.recheck import (
    check_gone,
    check_same_job,
    no_longer_planned,
    what_is_left,
)
from arroyo_dagster.state.planning.gc.safety_checks import check_store_clock
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.local_disk import remove_empty_directories
from arroyo_dagster.state.storage.store import ObjectStore

Make = Callable[..., GcPlan]
"""Makes a plan, as `plan_collection` does."""


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
    lease_wait_seconds: float = 0.0,
    clock: Clock = wall_clock,
    progress: Callable[[GcProgress], None] = unheard,
    on_done: Callable[[GcOutcome], None] = unheard,
) -> GcOutcome:
    """Collect what one plan of a job takes; without `yes` say what would go.

    Args:
        plan: carry out this one, made earlier, if everything in it may still go.
        aside: move objects to the job's quarantine instead, from where they can come back.
        make: makes plans; in this process unless given.
        delete: deletes data files; likewise.
        owner: who asks, for lease and journal.
        lease_wait_seconds: how long to wait for whoever maintains the job now.
        progress: told after every few thousand objects, and every few seconds.
        on_done: called with the outcome as soon as everything is deleted and read back, before an
            interrupt can come in between.

    Raises:
        ConflictError: somebody else maintains the job, or `plan` no longer fits.
        ProtocolError: refused, with the evidence; see `plan_collection`.
        StorageError: objects could not be deleted; what refers to them is still there.
    """
    with told_again(progress) as told:
        if yes:
            return _carried_out(
                store,
                paths,
                asked,
                plan,
                aside,
                make,
                delete,
                pace or Pace(),
                owner,
                lease_wait_seconds,
                clock,
                told,
                on_done,
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
    lease_wait_seconds: float,
    clock: Clock,
    progress: Callable[[GcProgress], None],
    on_done: Callable[[GcOutcome], None],
) -> GcOutcome:
    check_allowed(store, paths, asked)
    with lease(
        store, paths, owner, wait_seconds=lease_wait_seconds, clock=clock, sleep=pace.sleep
    ) as held:
        now = _store_clock(held, paths, clock)
        journals = held.list_dir(paths.journal)
        opened = finish_open_runs(held, paths, journals.prefixes)
        # Nothing depends on it: what cannot be archived now stays as it is.
        with contextlib.suppress(StorageError, FormatError):
            archive_runs(held, paths, journals)
        fresh = make(held, paths, asked, now_micros=now, progress=_planning(progress))
        chosen = fresh if plan is None else _checked(held, plan, fresh)
        check_way(chosen, aside=aside)
        if not chosen.objects:
            delete_all(held, [paths.removal] if chosen.kind is PlanKind.DEAD_JOB else [])
            return GcOutcome(plan=chosen, done=False, deleted=0, size_bytes=0, open_entries=opened)
        moving = Aside.begin(held, chosen, owner, now, pace.sleep) if aside else None
        name = None if moving is None else moving.name
        journal = Journal.of_plan(held, chosen, owner, now, name)
        if chosen.kind is PlanKind.DEAD_JOB:
            # Its epochs cannot be read any more once this has begun.
            held.create(paths.removal, encode_json(gc_plan_to_json(chosen)))
        run = Run(held, chosen, asked, journal, moving, delete, pace, progress)
        run.carry_out()
        outcome = GcOutcome(
            plan=chosen,
            done=True,
            deleted=run.deleted,
            size_bytes=run.size_bytes,
            run=journal.name,
            quarantine=name,
            open_entries=opened,
        )
        with uninterrupted():
            on_done(outcome)
            journal.end({"deleted": run.deleted, "size_bytes": run.size_bytes})
        if chosen.kind is PlanKind.DEAD_JOB:
            delete_all(held, [paths.removal])
        if chosen.kind is PlanKind.EXPIRE and chosen.keep_from is not None:
            left = frozenset(fresh.epochs).difference(chosen.epochs)
            forget_released(held, paths, chosen.keep_from, left)
            _note_min_epoch(held, paths, chosen.keep_from, chosen)
        remove_empty_directories(held, paths.root)
    return outcome


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
