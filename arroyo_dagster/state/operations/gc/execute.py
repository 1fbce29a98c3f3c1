"""Execution of gc plans: under the lease of the job, and checked against fresh facts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from arroyo_dagster.state.codec.derived import encode_json
from arroyo_dagster.state.codec.gc import gc_plan_to_json
from arroyo_dagster.state.codec.journal import RunHeader
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.metadata.interrupts import uninterrupted
from arroyo_dagster.state.metadata.lease import Leased, LeasedOperation, LeaseOptions, lease
from arroyo_dagster.state.model.clock import Clock
from arroyo_dagster.state.model.garbage import DeletionSettings, GcPlan, PlanKind
from arroyo_dagster.state.model.ids import Epoch, StatePath
from arroyo_dagster.state.model.layout import JobPaths, parse_checkpoint_dir, parse_epoch_record
from arroyo_dagster.state.model.progress import OnProgress, no_progress
from arroyo_dagster.state.operations.engines import HERE, ItemRunner
from arroyo_dagster.state.operations.gc.inventory import sweep
from arroyo_dagster.state.operations.gc.journal import Journal, finish_open_runs
from arroyo_dagster.state.operations.gc.pins import forget_released, note_expired
from arroyo_dagster.state.operations.gc.plan import GcRequest, check_allowed, plan_gc
from arroyo_dagster.state.operations.gc.quarantine import QuarantineWriter, purge_quarantine
from arroyo_dagster.state.operations.gc.root_reader import Reader
from arroyo_dagster.state.operations.gc.steps import Delete, GcRun, Pace, delete_here
from arroyo_dagster.state.operations.progress import heartbeat, timed
from arroyo_dagster.state.operations.slowdown import CheckpointWatch
from arroyo_dagster.state.planning.engines import EngineChoice
from arroyo_dagster.state.planning.gc.dead_jobs import check_way
from arroyo_dagster.state.planning.gc.recheck import (
    check_gone,
    check_same_job,
    no_longer_planned,
    what_is_left,
)
from arroyo_dagster.state.planning.gc.safety_checks import check_store_clock
from arroyo_dagster.state.planning.slowdown import Slowdown
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.failures import delete_all
from arroyo_dagster.state.storage.local_disk import remove_empty_directories
from arroyo_dagster.state.storage.store import DeleteOutcome, ObjectStore

_LONGEST_PAUSE_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GcOutcome:
    """The outcome of a gc run or a dry run.

    Attributes:
        done: False for a dry run, and if there was nothing to delete.
        deleted, size_bytes: the objects that existed before and no longer exist, as read back from
            the store; in a dry run the objects that would be deleted.
        run: the name of the run in the journal; None if there was nothing to do.
        quarantine: where objects were moved; None if they were deleted.
        purged: the quarantines that were deleted first.
        open_entries: journal entries of interrupted runs, completed by this one.
        remains: how many remains of interrupted writes were deleted; in a dry run, would be.
        engines: which engine ran each step, if there was a choice.
    """

    plan: GcPlan
    done: bool
    deleted: int
    size_bytes: int
    run: str | None = None
    quarantine: str | None = None
    purged: tuple[str, ...] = ()
    open_entries: int = 0
    remains: int = 0
    engines: tuple[EngineChoice, ...] = ()

    @classmethod
    def of_plan(cls, plan: GcPlan) -> GcOutcome:
        """Return the outcome of a dry run: what executing the plan would do."""
        return cls(
            plan=plan,
            done=False,
            deleted=plan.objects,
            size_bytes=plan.size_bytes,
            remains=len(plan.remains),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GcOptions(LeasedOperation, DeletionSettings):
    """How a plan is executed.

    Attributes:
        pace: the size and rate of deletes.
        approved: whether a person has approved the given plan. What executes it elsewhere, from a
            plan of its own, then refuses any other.
        on_progress: called after every few thousand objects, and at least every few seconds.
        on_done: called with the outcome as soon as everything is deleted and read back, before an
            interrupt can come in between.
        make_plan: makes the fresh plan; `plan_gc` in this process, or on Spark.
        delete: deletes batches of objects; in this process, or on Spark.
        items: copies objects to quarantine; in this process, or on Spark.
    """

    pace: Pace = field(default_factory=Pace)
    owner: str = "arroyo-state gc"
    approved: bool = False
    on_progress: OnProgress = no_progress
    on_done: Callable[[GcOutcome], None] = lambda outcome: None
    make_plan: Callable[..., GcPlan] = plan_gc
    delete: Delete = delete_here
    items: ItemRunner = HERE


def run_gc(
    store: ObjectStore,
    paths: JobPaths,
    request: GcRequest,
    options: GcOptions | None = None,
    *,
    plan: GcPlan | None = None,
) -> GcOutcome:
    """Delete or quarantine the objects of one plan: under the job's lease, journalled, read back.

    Args:
        request: from which the plan is made, or made again to check `plan` against fresh facts.
        plan: execute this plan, made earlier by `plan_gc`; None = plan under the lease.

    Raises:
        LeaseHeldError: another process maintains the job.
        ConflictError: `plan` no longer fits.
        ProtocolError: refused, with the evidence; see `plan_gc`.
        StorageError: objects could not be deleted; what refers to them still exists.
    """
    run_options = options or GcOptions()
    with heartbeat(run_options.on_progress) as on_progress:
        return _run(store, paths, request, plan, replace(run_options, on_progress=on_progress))


def _run(
    store: ObjectStore,
    paths: JobPaths,
    request: GcRequest,
    plan: GcPlan | None,
    options: GcOptions,
) -> GcOutcome:
    pace, clock, owner = options.pace, options.clock, options.owner
    check_allowed(store, paths, request)
    lease_options = replace(LeaseOptions.of(options, deletes=True), sleep=pace.sleep)
    with lease(store, paths, owner, lease_options) as held:
        now = _store_clock(held, paths, clock)
        opened = finish_open_runs(held, paths)
        fresh = options.make_plan(
            held, paths, request, now_micros=now, on_progress=options.on_progress
        )
        current = fresh if plan is None else _checked(held, plan, fresh)
        check_way(current, quarantine=options.quarantine)
        for quarantined in Reader(held, paths).pins_in_full()[1] if current.purges else ():
            if quarantined.name in current.purges:
                purge_quarantine(held, paths, quarantined, owner, now, options.on_progress)
        remains = sweep(held, current, fresh)
        outcome = GcOutcome(
            plan=current,
            done=remains > 0,
            deleted=0,
            size_bytes=0,
            purged=current.purges,
            open_entries=opened,
            remains=remains,
        )
        if current.objects:
            outcome = _carry_out(held, request, options, outcome, now)
        if current.kind is PlanKind.DEAD_JOB:
            delete_all(held, [paths.removal])
        if not current.objects:
            return outcome
        if current.kind is PlanKind.EXPIRE and current.keep_from is not None:
            left = frozenset(fresh.epochs).difference(current.epochs)
            forget_released(held, paths, current.keep_from, left)
            if current.proof.condition is None:  # a managed job
                ParquetBackend(held, paths).note_min_epoch(current.keep_from)
        remove_empty_directories(held, paths.root)
    return outcome


def _carry_out(
    held: Leased, request: GcRequest, options: GcOptions, begun: GcOutcome, now: int
) -> GcOutcome:
    """Delete what a plan names, or move it to quarantine; the journal has it first.

    Args:
        begun: the outcome before the first object goes.
        now: microseconds, by the store's clock.
    """
    plan, owner, sleep = begun.plan, options.owner, options.pace.sleep
    paths, moving = plan.paths, None
    if options.quarantine:
        moving = QuarantineWriter.begin(held, plan, owner, now, sleep, options.items)
    name = None if moving is None else moving.name
    header = RunHeader.of_plan(plan, owner, now, name)
    journal = Journal.begin(held, paths, header, keep_micros=options.journal_micros)
    if plan.kind is PlanKind.DEAD_JOB:
        # Its epochs cannot be read any more once this has begun.
        held.create(paths.removal, encode_json(gc_plan_to_json(plan)))
    if plan.keep_from is not None:
        # First: what is missing after an interruption must not look lost.
        note_expired(held, paths, plan.keep_from)
    on_progress, delete = timed(options.on_progress), _giving_way(held, plan, options)
    run = GcRun(held, plan, request, journal, moving, delete, options.pace, on_progress)
    run.carry_out()
    outcome = replace(
        begun,
        done=True,
        deleted=run.deleted,
        size_bytes=run.size_bytes,
        run=journal.name,
        quarantine=name,
    )
    with uninterrupted():
        if moving is not None:
            moving.end()
        options.on_done(outcome)
        journal.end({"deleted": run.deleted, "size_bytes": run.size_bytes})
    return outcome


def _giving_way(held: Leased, plan: GcPlan, options: GcOptions) -> Delete:
    """Return the function that deletes, which waits where the job's checkpoints became slower.

    After each request it then waits as long as the request took, times the slowdown.
    """
    most = options.max_checkpoint_slowdown
    watch = CheckpointWatch(held, plan.paths, _newest(plan.proof.head), most)
    slowdowns: list[Slowdown] = []

    def delete(store: ObjectStore, batches: Sequence[Sequence[StatePath]]) -> list[DeleteOutcome]:
        begun = time.monotonic()
        outcomes = options.delete(store, batches)
        slower = watch.slowdown()
        if slower is not None:
            if not slowdowns:
                options.on_lease(f"deletes more slowly, since {slower}")
                slowdowns.append(slower)
            took = time.monotonic() - begun
            options.pace.sleep(min(_LONGEST_PAUSE_SECONDS, took * slower.ratio))
        return outcomes

    return delete


def _newest(head: StatePath | None) -> Epoch | None:
    """Return the epoch of the object that makes the newest epoch exist."""
    if head is None or head.parent is None:
        return None
    record = parse_epoch_record(head.name)
    return parse_checkpoint_dir(head.parent.name) if record is None else record


def _store_clock(held: Leased, paths: JobPaths, clock: Clock) -> int:
    """Return the time by the store's clock, from the lease that was just written."""
    info = held.head(held.lease.path)
    return check_store_clock(paths, None if info is None else info.modified_micros, clock())


def _checked(held: ObjectStore, plan: GcPlan, fresh: GcPlan) -> GcPlan:
    check_same_job(plan, fresh)
    suspects = list(no_longer_planned(plan, fresh))
    infos = concurrently(held.head, suspects)
    check_gone(plan, [p for p, info in zip(suspects, infos, strict=True) if info is not None])
    return what_is_left(plan, fresh)
