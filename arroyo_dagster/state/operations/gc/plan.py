"""Make the gc plans of one job from its objects and the directory of jobs. Reads only."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from arroyo_dagster.errors import FormatError, InputError, NotFoundError, ProtocolError
from arroyo_dagster.state.codec.gc import decode_gc_plan
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.metadata.tree import CheckpointTree
from arroyo_dagster.state.model.checkpoints import Checkpoint, CheckpointState
from arroyo_dagster.state.model.clock import wall_clock
from arroyo_dagster.state.model.garbage import GcPlan, GraceSettings, PlanKind, Retention, Roots
from arroyo_dagster.state.model.ids import Epoch
from arroyo_dagster.state.model.job_facts import JobAnswer, JobCondition
from arroyo_dagster.state.model.layout import JobPaths, Layout
from arroyo_dagster.state.model.objects import Packed
from arroyo_dagster.state.model.progress import OnProgress, no_progress
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
from arroyo_dagster.state.operations.catalog.jobs import list_jobs
from arroyo_dagster.state.operations.engines import HERE, ItemRunner
from arroyo_dagster.state.operations.gc.inventory import (
    Inventory,
    list_job,
    read_inventory,
    read_listed,
    with_remains,
)
from arroyo_dagster.state.operations.gc.root_reader import Reader
from arroyo_dagster.state.operations.gc.roots import newest_root, read_roots, with_store_times
from arroyo_dagster.state.operations.gc.store_listing import (
    StoreListing,
    check_age,
    check_complete,
    list_with,
    rechecked,
    with_newer,
)
from arroyo_dagster.state.operations.progress import timed
from arroyo_dagster.state.operations.verify.job import verify_job
from arroyo_dagster.state.planning.gc.dead_jobs import (
    DeadJob,
    files_below,
    plan_dead_job,
    what_is_left_of,
)
from arroyo_dagster.state.planning.gc.expiry import plan_expiry, why_epochs_stay
from arroyo_dagster.state.planning.gc.orphans import judge, plan_orphans, standing_of
from arroyo_dagster.state.planning.gc.reachability import check_aliases, refuse
from arroyo_dagster.state.planning.gc.recheck import measured
from arroyo_dagster.state.planning.gc.safety_checks import (
    at_rest,
    check_still,
    checked_grace,
    checked_purge_age,
    why_dead,
)
from arroyo_dagster.state.planning.restore.reads import is_at_rest
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore, read_optional


@dataclass(frozen=True, slots=True, kw_only=True)
class GcRequest(GraceSettings):
    """What is asked of a collection: which plan, by which rule.

    Attributes:
        retention: of an expiry.
        grace_micros: of the other two kinds.
        purge_after_micros: of orphans: the age at which quarantines are purged first; None = none
            is purged.
        directory: who is asked what jobs are doing; nobody unless given.
        others: the other jobs below the URL, for a dead job; listed unless given.
        listing: of orphans: plan from it instead of listing every object.
        unreadable: of a dead job whose metadata nobody can read: take it by what a listing shows,
            on the user's word alone. It can only be moved aside.
    """

    kind: PlanKind
    retention: Retention | None = None
    directory: JobDirectory = field(default_factory=JobDirectory)
    others: Sequence[JobPaths] | None = None
    unreadable: bool = False
    listing: StoreListing | None = None
    purge_after_micros: int | None = None

    def __post_init__(self) -> None:
        if self.listing is not None and self.kind is not PlanKind.ORPHANS:
            raise InputError("a listing is an option of orphans only")
        if self.unreadable and self.kind is not PlanKind.DEAD_JOB:
            raise InputError(
                "the metadata of the job cannot be read; only for a dead job may this be ignored",
                next_step="repair it, or restore another epoch: see `arroyo-state verify`",
            )
        if (self.kind is PlanKind.EXPIRE) is not (self.retention is not None):
            raise InputError("keep and keep-for are options of an expiry only")
        checked_grace(self.grace_micros)
        if self.purge_after_micros is not None:
            checked_purge_age(self.purge_after_micros)

    def answer(self, paths: JobPaths) -> JobAnswer | None:
        """Return what is known of a job now; None if no source is configured."""
        if not self.directory.sources:
            return None
        return self.directory.look_up([paths], checkpoints=True)[0]


def check_allowed(store: ObjectStore, paths: JobPaths, asked: GcRequest) -> None:
    """Refuse a request whose refusal is already certain, before anything is written to the store.

    Raises:
        ProtocolError: the job's status is unknown, or it may not be changed now.
    """
    if asked.kind is PlanKind.DEAD_JOB:
        return
    head = newest_root(store, paths)
    if head is not None and not head.managed:
        # Its worker generation is checked later, with the other roots.
        at_rest(Roots(paths=paths, worker_generation=None, epochs=(head,)), asked.answer(paths))


def plan_gc(
    store: ObjectStore,
    paths: JobPaths,
    request: GcRequest,
    *,
    now_micros: int | None = None,
    on_progress: OnProgress = no_progress,
    with_sizes: bool = True,
    items: ItemRunner = HERE,
) -> GcPlan:
    """Make one plan of one job. Writes nothing: this is the dry run.

    Args:
        now_micros: the time, by the clock of the store if it is known; by this machine's unless
            given.
        on_progress: called now and then with what was listed and read.
        with_sizes: list the job for sizes, times and etags. Without, an expiry reads metadata only,
            lists nothing (by age: the epoch records), and cannot be carried out.
        items: checks the objects of a listing again; in this process, or on Spark.

    Raises:
        ProtocolError: what is there does not add up, or the job may not be touched now: refused,
            with the evidence.
        FormatError, NotFoundError: an object that is needed to know does not decode, or is missing.
        InputError, ConflictError, StorageError: as everywhere.
    """
    now = wall_clock() if now_micros is None else now_micros
    plan = _plan(store, paths, request, now, on_progress, with_sizes=with_sizes, items=items)
    return with_remains(store, plan)


def why_none_expires(store: ObjectStore, paths: JobPaths, request: GcRequest) -> str:
    """Return why a plan of this expiry names no epoch, as one sentence; errors as `plan_gc`."""
    assert request.retention is not None
    roots = with_store_times(store, read_roots(store, paths))
    return why_epochs_stay(roots, request.retention, now_micros=wall_clock())


def _plan(
    store: ObjectStore,
    paths: JobPaths,
    request: GcRequest,
    now: int,
    on_progress: OnProgress,
    *,
    with_sizes: bool,
    items: ItemRunner,
) -> GcPlan:
    on_progress = timed(on_progress)
    # A job that stops while it is looked at has published what the look has missed.
    before = None if request.kind is PlanKind.DEAD_JOB else request.answer(paths)
    if request.kind is PlanKind.EXPIRE and not with_sizes:
        assert request.retention is not None
        roots = read_roots(store, paths, on_progress)
        if request.retention.keep_micros is not None:
            roots = with_store_times(store, roots)
        answer = needed_answer(request, roots, before)
        retention = retention_now(store, request, roots)
        return plan_expiry(roots, retention, now_micros=now, answer=answer)
    removes = request.kind is PlanKind.DEAD_JOB and not request.unreadable
    begun = _begun_removal(store, paths) if removes else None
    if begun is not None:
        return _rest_of(store, request, begun, now)
    stored = request.listing
    if stored is not None:
        check_age(stored, paths, now, request.grace_micros)
        inventory, newer = list_with(store, paths, stored, on_progress)
        roots = read_listed(store, inventory, on_progress)
        check_complete(store, stored, roots, inventory.files)
        plan = _orphans(request, inventory, roots, now, needed_answer(request, roots, before))
        return rechecked(store, with_newer(plan, newer), stored, items)
    try:
        inventory, roots = read_inventory(store, paths, on_progress)
    except (FormatError, ProtocolError, NotFoundError) as error:
        if not request.unreadable:
            raise
        return _unreadable_job(store, paths, request, str(error), now)
    if request.kind is PlanKind.DEAD_JOB:
        return _dead_job(store, request, inventory, roots, now)
    answer = needed_answer(request, roots, before)
    if request.kind is PlanKind.ORPHANS:
        return _orphans(request, inventory, roots, now, answer)
    _check_aliases(inventory, roots)
    retention = retention_now(store, request, roots)
    plan = plan_expiry(
        roots, retention, now_micros=now, answer=answer, listed_from=inventory.newest
    )
    _check_no_removal(store, roots, plan, inventory.files)
    return measured(
        plan, inventory.files, inventory.metadata, inventory.maintenance, inventory.foreign
    )


def retention_now(store: ObjectStore, request: GcRequest, roots: Roots) -> Retention:
    """Return the retention of an expiry: two epochs in place of one, unless a managed job rests.

    A start of such a job in the protocol layout restores the newest epoch and reads only the
    metadata of its parent. In the legacy layout ten more stay in any case.

    Raises:
        ProtocolError: only the newest epoch would stay, and it does not pass verification.
    """
    retention = request.retention
    assert retention is not None
    if retention.keep_epochs != 1:
        return retention
    head, paths = roots.head, roots.paths
    ended = (
        roots.managed
        and paths.layout is Layout.PROTOCOL
        and head.state is CheckpointState.READY
        and roots.restorable in (None, head.epoch)
        and not any(root.epoch > head.epoch for root in roots.attempts)
    )
    newest = ParquetBackend(store, paths).load() if ended else None
    if newest is None or newest.ref != head.ref or not _at_rest(store, request, newest, paths):
        return replace(retention, keep_epochs=2)
    verdict = verify_job(store, paths, head.epoch, level=2, history=1).verdict
    if not verdict.passed:
        raise refuse(
            f"epoch {head.epoch} would be the only one left, and does not pass verification: "
            f"{verdict.errors[0]}",
            paths,
            next_step=f"see `arroyo-state verify {paths.root}`; nothing was deleted",
        )
    return retention


def _at_rest(store: ObjectStore, request: GcRequest, newest: Checkpoint, paths: JobPaths) -> bool:
    """Return whether the last run ended with the newest epoch, and no source contradicts that."""
    if not is_at_rest(newest, CheckpointTree(store, paths).fence()):
        return False
    condition = request.directory.look_up([paths])[0].facts.condition
    return condition is JobCondition.UNKNOWN or condition.at_rest


def needed_answer(asked: GcRequest, roots: Roots, before: JobAnswer | None) -> JobAnswer | None:
    """Return what is known of an Arroyo job; None for a managed job, which needs no source.

    Args:
        before: what was known before the job was read.

    Raises:
        ConflictError: the job's status has changed since.
    """
    if roots.managed:
        return None
    answer = asked.answer(roots.paths)
    check_still(roots.paths, before, answer)
    return answer


def _orphans(
    asked: GcRequest, inventory: Inventory, roots: Roots, now: int, answer: JobAnswer | None
) -> GcPlan:
    _check_aliases(inventory, roots)
    standing = standing_of(
        roots, inventory.metadata, now_micros=now, grace_micros=asked.grace_micros, answer=answer
    )
    return plan_orphans(
        standing,
        [judge(standing, inventory.files)],
        inventory.metadata,
        inventory.foreign,
        listed=inventory.listed,
        answer=answer,
        purge_after_micros=asked.purge_after_micros,
    )


def _check_aliases(inventory: Inventory, roots: Roots) -> None:
    check_aliases(roots, inventory.foreign, itertools.chain(inventory.metadata, inventory.files))


def _begun_removal(store: ObjectStore, paths: JobPaths) -> GcPlan | None:
    """Return the plan of a deletion that was begun and not finished; None if there is none."""
    data = read_optional(store, paths.removal)
    return None if data is None else decode_gc_plan(data, paths.removal)


def _check_no_removal(store: ObjectStore, roots: Roots, plan: GcPlan, files: Packed) -> None:
    """Refuse an expiry where an unfinished removal has deleted what a kept epoch lists.

    The older epochs, which would expire, may be the only whole ones.

    Raises:
        ProtocolError: it has.
    """
    if _begun_removal(store, roots.paths) is None:
        return
    existing, expired = frozenset(files.paths), frozenset(plan.epochs)
    for root in (root for root in roots.epochs if root.epoch not in expired):
        missing = next((path for path in root.files.paths if path not in existing), None)
        if missing is not None:
            raise refuse(
                f"a removal of the job was begun and not finished, and epoch {root.epoch}, which "
                "would stay, lists a file that does not exist",
                roots.paths,
                path=missing,
                removal=roots.paths.removal,
                next_step="finish it: `arroyo-state gc run dead-job`; or bring back what it moved "
                f"aside: `arroyo-state gc undelete {roots.paths.root}`; nothing was deleted",
            )


def _rest_of(store: ObjectStore, asked: GcRequest, begun: GcPlan, now: int) -> GcPlan:
    _dead(store, asked, begun.paths, managed=bool(begun.rule.get("ours")))
    job_pins, quarantined = Reader(store, begun.paths).pins_in_full()
    inventory = list_job(store, begun.paths, Epoch(0))
    return what_is_left_of(
        begun,
        inventory.files,
        inventory.metadata,
        inventory.foreign,
        job_pins=job_pins,
        quarantined=quarantined,
        now_micros=now,
    )


def _dead(
    store: ObjectStore, asked: GcRequest, paths: JobPaths, *, managed: bool
) -> tuple[str, JobAnswer, list[JobPaths]]:
    """Return why it is known that a job is dead, what is known of it, and the URL's other jobs that
    are not reported as gone themselves.
    """
    listed = _known_jobs(store) if asked.others is None else asked.others
    others = [other for other in listed if other != paths]
    answer, *answers = asked.directory.look_up([paths, *others])
    why = why_dead(paths, answer, answers, managed=managed)
    pairs = zip(others, answers, strict=True)
    alive = [other for other, reply in pairs if reply.facts.condition is not JobCondition.GONE]
    return why, answer, alive


def _known_jobs(store: ObjectStore) -> Sequence[JobPaths]:
    """Return the jobs of the URL; none if only the remains of one job are left."""
    try:
        return list_jobs(store)
    except InputError:
        return []


def _unreadable_job(
    store: ObjectStore, paths: JobPaths, asked: GcRequest, evidence: str, now: int
) -> GcPlan:
    """Plan the deletion of a dead job's listed objects although its metadata cannot be read.

    Args:
        evidence: why it cannot be read.
    """
    job_pins, quarantined = Reader(store, paths).pins_in_full()
    inventory = list_job(store, paths, Epoch(0))
    if not inventory.listed:
        raise refuse("the listing is empty", paths)
    roots = Roots(
        paths=paths,
        worker_generation=None,
        epochs=(),
        job_pins=job_pins,
        quarantined=quarantined,
    )
    return _dead_job(store, asked, inventory, roots, now, evidence)


def _dead_job(
    store: ObjectStore,
    asked: GcRequest,
    inventory: Inventory,
    roots: Roots,
    now: int,
    unreadable: str | None = None,
) -> GcPlan:
    paths = roots.paths
    # It is unknown whether an unreadable job is managed: only the user's assumption counts.
    managed = unreadable is not None or roots.managed
    why, answer, others = _dead(store, asked, paths, managed=managed)
    heads = concurrently(lambda other: newest_root(store, other), others)
    needed = [
        (other, path)
        for other, head in zip(others, heads, strict=True)
        if head is not None
        for path in files_below(paths, [head])
    ]
    dead = DeadJob(
        roots=roots,
        files=inventory.files,
        metadata=inventory.metadata,
        foreign=inventory.foreign,
        listed=inventory.listed,
        why=why,
        answer=answer,
        needed_by_others=needed,
        unreadable=unreadable,
    )
    return plan_dead_job(dead, now_micros=now, grace_micros=asked.grace_micros)
