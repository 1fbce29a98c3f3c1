"""Collect the garbage of one job with Spark's workers: they list, copy and delete objects.

Plan, checks, journal and read-back are as in process. Small steps also run in process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from arroyo_dagster.spark.items import SparkItems
from arroyo_dagster.spark.thresholds import SparkThresholds
from arroyo_dagster.state.metadata.lease import Leased
from arroyo_dagster.state.model.aliases import PathsDigest, second_names
from arroyo_dagster.state.model.clock import wall_clock
from arroyo_dagster.state.model.garbage import GcPlan, Moved, PlanKind, Roots, UndeletePlan
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.job_facts import JobAnswer
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.objects import NOTHING, Packed
from arroyo_dagster.state.model.progress import OnProgress, Progress, no_progress
from arroyo_dagster.state.operations.engines import ItemRunner
from arroyo_dagster.state.operations.gc.execute import GcOptions, GcOutcome, run_gc
from arroyo_dagster.state.operations.gc.inventory import (
    Inventory,
    directories_of,
    list_beside,
    list_job,
    matching,
    read_listed,
    with_remains,
)
from arroyo_dagster.state.operations.gc.plan import GcRequest, needed_answer, plan_gc, retention_now
from arroyo_dagster.state.operations.gc.root_reader import NO_EPOCH
from arroyo_dagster.state.operations.gc.roots import newest_root
from arroyo_dagster.state.operations.gc.steps import Delete, delete_here
from arroyo_dagster.state.operations.gc.undelete import UndeleteOptions, run_undelete
from arroyo_dagster.state.operations.progress import timed
from arroyo_dagster.state.planning.engines import EngineChoice, StepEngine, WorkAmount
from arroyo_dagster.state.planning.gc.expiry import plan_expiry
from arroyo_dagster.state.planning.gc.orphans import (
    ClassifiedObjects,
    OrphanRules,
    judge_below,
    plan_orphans,
    standing_of,
)
from arroyo_dagster.state.planning.gc.reachability import refuse
from arroyo_dagster.state.planning.gc.recheck import measured
from arroyo_dagster.state.storage.store import DeleteOutcome, ObjectStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BATCHES_AT_ONCE = 200
_CHECKED_HERE = "the job's status is checked before each request, by a source only this host has"


def run_gc_on_spark(
    session: Callable[[], SparkSession],
    store: ObjectStore,
    paths: JobPaths,
    request: GcRequest,
    options: GcOptions | None = None,
    *,
    plan: GcPlan | None = None,
    thresholds: SparkThresholds | None = None,
) -> GcOutcome:
    """Run gc as `operations.gc.execute.run_gc`, with its large steps on Spark's workers.

    They plan (unless `options.make_plan` is given), copy to quarantine, and delete.

    Args:
        session: returns the session; called only for a step that reaches a threshold.
        store: the store of the job; workers must be able to open it too.
        paths: the paths of the job.
        request, options, plan: as in `run_gc`; `options.delete`, `options.items` and the number of
            batches in flight are replaced.
        thresholds: from which amount of work a step runs on Spark; None = the defaults.

    Returns:
        The outcome; `engines` says where each step ran.
    """
    resolved = options or GcOptions()
    items = SparkItems(session, store, thresholds or SparkThresholds())
    make_plan = resolved.make_plan
    outcome = run_gc(
        store,
        paths,
        request,
        replace(
            resolved,
            make_plan=plan_with(items) if make_plan is plan_gc else make_plan,
            delete=deleting_on_spark(items),
            items=items,
            pace=replace(resolved.pace, in_flight=BATCHES_AT_ONCE),
            on_done=lambda done: resolved.on_done(replace(done, engines=tuple(items.choices))),
        ),
        plan=plan,
    )
    return replace(outcome, engines=tuple(items.choices))


def deleting_on_spark(items: SparkItems) -> Delete:
    """Return a function that deletes batches of objects on Spark.

    It deletes in this process if the objects are few; or if the job's status must be checked before
    each request, and other machines may get other answers.
    """

    def delete(held: ObjectStore, batches: Sequence[Sequence[StatePath]]) -> list[DeleteOutcome]:
        sizes = [len(batch) for batch in batches]
        only_here = _CHECKED_HERE if isinstance(held, Leased) and held.deletes_here else None
        choice = items.choose("delete", WorkAmount(objects=sum(sizes)), only_here=only_here)
        if choice.engine is StepEngine.IN_PROCESS:
            return delete_here(held, batches)
        return items.run(choice, partial(delete_batch, held), list(batches), sizes)

    return delete


def delete_batch(store: ObjectStore, batch: Sequence[StatePath]) -> DeleteOutcome:
    """Delete one batch. Runs in a worker."""
    return store.delete_many(batch)


def run_undelete_on_spark(
    session: Callable[[], SparkSession],
    store: ObjectStore,
    paths: JobPaths,
    name: str,
    options: UndeleteOptions | None = None,
    *,
    plan: UndeletePlan | None = None,
    thresholds: SparkThresholds | None = None,
) -> list[Moved]:
    """Restore quarantined objects as `operations.gc.undelete.run_undelete`.

    Workers compare and copy data files if they are many or large. Metadata, which makes epochs
    visible, is restored by this process, one object after the other.

    Args:
        session, store, paths, thresholds: as in `run_gc_on_spark`.
        name, options, plan: as in `run_undelete`; `options.items` is replaced.
    """
    items = SparkItems(session, store, thresholds or SparkThresholds())
    resolved = replace(options or UndeleteOptions(), items=items)
    return run_undelete(store, paths, name, resolved, plan=plan)


# ---- make gc plans of one job with workers, which list and classify one directory each -----------
# The driver reads the metadata that refers to data files. Of the data files it only gets those that
# the plan contains. Workers apply the same rules as in process, so the plans are equal.

P = TypeVar("P")
R = TypeVar("R")
ListBelow = Callable[..., Inventory]
"""Lists one directory of the job, which a keyword names. Runs in a worker."""


def plan_with(items: SparkItems) -> Callable[..., GcPlan]:
    """Return a function that plans as `plan_gc`, on Spark if the job has many objects.

    Dead jobs are planned in this process. To find out how many objects there are, it lists up to
    as many as the threshold.
    """

    def plan(
        store: ObjectStore,
        paths: JobPaths,
        request: GcRequest,
        *,
        now_micros: int | None = None,
        on_progress: OnProgress = no_progress,
    ) -> GcPlan:
        choice = _choice(items, store, paths, request)
        make = partial(plan_gc, items=items)
        if choice.engine is not StepEngine.IN_PROCESS:
            make = partial(plan_on, items, choice)
        return make(store, paths, request, now_micros=now_micros, on_progress=on_progress)

    return plan


def _choice(
    items: SparkItems, store: ObjectStore, paths: JobPaths, request: GcRequest
) -> EngineChoice:
    step = f"plan {request.kind.value}"
    if request.kind is PlanKind.DEAD_JOB:
        return items.choose(step, WorkAmount(), only_here="a dead job is planned as a whole")
    if request.listing is not None:
        return items.choose(step, WorkAmount(), only_here="the job's objects are not listed")
    listed = islice(store.list(paths.root), max(1, items.thresholds.objects))
    return items.choose(step, WorkAmount(objects=sum(1 for _ in listed)))


def plan_on(
    items: ItemRunner,
    choice: EngineChoice,
    store: ObjectStore,
    paths: JobPaths,
    request: GcRequest,
    *,
    now_micros: int | None = None,
    on_progress: OnProgress = no_progress,
) -> GcPlan:
    """Plan a gc of orphans or an expiry as `plan_gc`, one directory at a time.

    Directories are listed twice: first for metadata and, after that was read, for the files of the
    plan. Objects that are written in between are too young to be deleted.

    Args:
        items: runs the directories.
        choice: its choice for this plan.
        store: the store of the job; workers must be able to open it too.
        paths: the paths of the job.
        request: the request of the gc; not of a dead job.
        now_micros: the current time, in epoch microseconds; None = the clock.
        on_progress: called with the numbers of listed objects and read roots.

    Raises:
        ProtocolError, FormatError, NotFoundError, ConflictError, InputError: as in `plan_gc`.
    """
    now = wall_clock() if now_micros is None else now_micros
    on_progress = timed(on_progress)
    before = request.answer(paths)
    newest = newest_root(store, paths)
    if newest is None:
        raise refuse(NO_EPOCH, paths)
    directories = directories_of(store, paths)
    list_below = partial(list_job, store, paths, newest.epoch)
    beside = list_beside(store, paths, newest.epoch, directories)
    ones = [1] * len(directories)
    parts = items.run(choice, partial(_inventory, list_below), directories, ones)
    inventory = _joined([beside, *parts])
    if not inventory.listed:
        raise refuse("the listing is empty, but an epoch exists", paths, path=newest.ref)
    on_progress(Progress(step="listed objects", done=inventory.listed))
    if second_names(inventory.foreign.paths, paths.root):
        # Whether a foreign name is a second name depends on every object of the job.
        return plan_gc(store, paths, request, now_micros=now, on_progress=on_progress)
    roots = read_listed(store, inventory, on_progress)
    answer = needed_answer(request, roots, before)

    def run(function: Callable[[P], R], places: Sequence[P]) -> list[R]:
        return items.run(choice, function, places, [1] * len(places))

    facts = _Facts(store, list_below, inventory, roots, answer, now)
    if request.kind is PlanKind.ORPHANS:
        return with_remains(store, _orphans(run, facts, request, directories))
    return _expiry(run, facts, request, directories)


@dataclass(frozen=True, slots=True)
class _Facts:
    store: ObjectStore
    list_below: ListBelow
    inventory: Inventory
    roots: Roots
    answer: JobAnswer | None
    now_micros: int


def _orphans(
    run: Callable[..., list[ClassifiedObjects]],
    facts: _Facts,
    request: GcRequest,
    directories: Sequence[StatePath],
) -> GcPlan:
    inventory = facts.inventory
    standing = standing_of(
        facts.roots,
        inventory.metadata,
        now_micros=facts.now_micros,
        grace_micros=request.grace_micros,
        answer=facts.answer,
        in_parts=True,
    )
    return plan_orphans(
        standing,
        run(partial(_judged, facts.list_below, standing), directories),
        inventory.metadata,
        inventory.foreign,
        listed=inventory.listed,
        answer=facts.answer,
        purge_after_micros=request.purge_after_micros,
    )


def _expiry(
    run: Callable[..., list[Packed]],
    facts: _Facts,
    request: GcRequest,
    directories: Sequence[StatePath],
) -> GcPlan:
    inventory = facts.inventory
    plan = plan_expiry(
        facts.roots,
        retention_now(facts.store, request, facts.roots),
        now_micros=facts.now_micros,
        answer=facts.answer,
        listed_from=inventory.newest,
    )
    named = [*plan.data.paths, *plan.records.paths, *plan.metadata.paths]
    # The paths in each directory that contains any, in the order of the directories.
    candidates, below = set(directories), dict[StatePath, list[StatePath]]()
    for path in named:
        parent = path.parent
        while parent is not None and parent not in candidates:
            parent = parent.parent
        if parent is not None:
            below.setdefault(parent, []).append(path)
    by_directory = {
        directory: tuple(below[directory]) for directory in directories if directory in below
    }
    packed = run(partial(_measured, facts.list_below), list(by_directory.items()))
    files = Packed.joined(packed)
    return measured(plan, files, inventory.metadata, inventory.maintenance, inventory.foreign)


def _inventory(list_below: ListBelow, directory: StatePath) -> Inventory:
    """Return the inventory of one directory, with the number of its files instead of the files."""
    inventory = list_below(below=directory)
    return replace(inventory, files=NOTHING, beside=len(inventory.files))


def _joined(parts: list[Inventory]) -> Inventory:
    return replace(
        parts[0],
        metadata=Packed.joined(part.metadata for part in parts),
        maintenance=Packed.joined(part.maintenance for part in parts),
        foreign=Packed.joined(part.foreign for part in parts),
        samples=tuple(path for part in parts for path in part.samples),
        beside=sum(part.beside for part in parts),
    )


def _judged(
    list_below: ListBelow, standing: OrphanRules, directory: StatePath
) -> ClassifiedObjects:
    return judge_below(standing, f"{directory}/", list_below(below=directory).files)


def _measured(list_below: ListBelow, wanted: tuple[StatePath, tuple[StatePath, ...]]) -> Packed:
    """Return the files of a directory that are wanted, as listed."""
    directory, paths = wanted
    return Packed(matching(list_below(below=directory).files, PathsDigest(paths)))
