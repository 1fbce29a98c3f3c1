"""The state of a stopped job of Arroyo's, rewritten: planned, carried out here or by whoever is
given the parts, verified, published in place, and put back.

The order is what makes it safe. New files get names that nobody lists; what a restore would load
of them is compared; the epoch as it would be is verified; what the metadata was is put on record;
only then metadata objects are overwritten, each by one put, each leaving an epoch that can be
restored. Nothing is deleted: whoever loaded the old lists finds every file. The lease, the
condition of the job and its run are asked again before every put and after the last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from arroyo_dagster.errors import (
    ProtocolError,
)
from arroyo_dagster.state.metadata.lease import lease
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.clock import Clock, wall_clock
from arroyo_dagster.state.model.compaction import CompactionSettings, LeftOut
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.rewrite import (
    RewriteOutcome,
    RewritePlan,
    RewriteShard,
    TableRewrite,
)
from arroyo_dagster.state.model.tables import (
    ExpiringTimeKeyConfig,
)
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
from arroyo_dagster.state.operations.compaction.execute import check_same
from arroyo_dagster.state.operations.compaction.forecasts import forecast_rewrites
from arroyo_dagster.state.operations.compaction.rewrite_preconditions import (
    JobSnapshot,
    ListedJob,
    Unchanged,
    changed_objects,
    check_may,
    check_not_cancelled,
    check_restorable,
    table_facts,
    take_snapshot,
)
from arroyo_dagster.state.operations.compaction.rewrite_publish import publish
from arroyo_dagster.state.planning.compaction.rewrite import TableFacts, TableKey, plan_rewrite
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.merge.rewrite import RewriteTask, run_rewrite

RunRewrites = Callable[[ObjectStore, Sequence[RewriteTask]], Iterable[RewriteShard | LeftOut]]
QUIET_SECONDS = 60.0
_LONG_AGO = 10
"""A job that stopped so many quiet times ago is quiet, if its objects are the same in the end."""


def rewrite_here(
    store: ObjectStore, tasks: Sequence[RewriteTask]
) -> Iterable[RewriteShard | LeftOut]:
    """Carry out the parts in this process, one after the other."""
    return (run_rewrite(store, task) for task in tasks)


# ---- planning ------------------------------------------------------------------------------------


def plan_rewrite_of(
    store: ObjectStore,
    paths: JobPaths,
    directory: JobDirectory,
    settings: CompactionSettings | None = None,
    *,
    sampled: bool = False,
) -> RewritePlan:
    """Plan the rewrite of what a job of Arroyo's would restore. Writes nothing: the dry run.

    A job that runs, or of which nobody says what it does, is planned all the same: a forecast,
    whose `why_not` says why nothing may be done now.

    Args:
        directory: who says what the job is doing.
        sampled: rewrite some of the files in memory, to forecast how many bytes are left.

    Raises:
        InputError: a job of ours.
        NotFoundError: the job has no checkpoint.
        FormatError: a file that it lists is missing.
    """
    snapshot, settings = take_snapshot(store, paths, directory), settings or CompactionSettings()
    facts = table_facts(store, snapshot)
    plan = _plan(snapshot, facts, settings)
    return _sampled(store, paths, snapshot, facts, plan, settings) if sampled else plan


def _sampled(
    store: ObjectStore,
    paths: JobPaths,
    snapshot: JobSnapshot,
    facts: TableFacts,
    plan: RewritePlan,
    settings: CompactionSettings,
) -> RewritePlan:
    tasks = _tasks(paths, snapshot, plan)
    part_bytes: dict[TableKey, list[int]] = {}
    for task, size_bytes in zip(tasks, forecast_rewrites(store, tasks), strict=True):
        key = task.table.operator, task.table.table
        part_bytes.setdefault(key, []).append(size_bytes)
    return _plan(snapshot, facts, settings, part_bytes)


def _plan(
    snapshot: JobSnapshot,
    facts: TableFacts,
    settings: CompactionSettings,
    part_bytes: Mapping[TableKey, Sequence[int]] | None = None,
) -> RewritePlan:
    return replace(
        plan_rewrite(snapshot.checkpoint, facts, settings, part_bytes),
        condition=snapshot.answer.facts.condition,
        run_id=snapshot.answer.facts.run_id,
        why_not=snapshot.why_not,
    )


# ---- carrying out --------------------------------------------------------------------------------


def rewrite_job(
    store: ObjectStore,
    paths: JobPaths,
    directory: JobDirectory,
    settings: CompactionSettings | None = None,
    *,
    run: RunRewrites = rewrite_here,
    owner: str = "arroyo-state compact",
    quiet_seconds: float = QUIET_SECONDS,
    quiet_since: ListedJob | None = None,
    verify_level: int = 1,
    dry_run: bool = False,
    or_forecast: bool = False,
    sampled: bool = False,
    lease_wait_seconds: float = 0.0,
    clock: Clock = wall_clock,
    sleep: Callable[[float], None] = time.sleep,
    cancelled: Callable[[], bool] = lambda: False,
    on_shard: Callable[[RewriteShard | LeftOut, int], None] = lambda part, left: None,
    on_published: Callable[[RewriteOutcome], None] = lambda outcome: None,
) -> RewriteOutcome:
    """Rewrite what a stopped job of Arroyo's restores: fewer files, the same rows, in place.

    Nothing is deleted, and what the metadata was is kept on record (`undo_rewrite`). Stopped
    anywhere, the job is restorable; run again, it goes on. A second run finds nothing to do.

    Args:
        directory: who says what the job is doing; asked again before each change.
        run: carries the parts out; in this process unless given.
        owner: who asks, for the lease.
        quiet_seconds: how long nothing of the job may change before its metadata is written: the
            controller's cleanup goes on for a while after a stop.
        quiet_since: an earlier listing of the job. If nothing has changed since, the time that has
            passed counts, so that one wait serves all jobs that were listed together.
        verify_level: how closely the epoch as it would be is verified before it is published.
        dry_run: plan, and change nothing.
        or_forecast: where nothing may be rewritten now, give the plan in place of an error.
        sampled: as of `plan_rewrite_of`.
        cancelled: whether to give up; asked between the parts and before each change of metadata.
        on_part: called with every part that is done, before it is judged, and how many are left.
        on_published: called with what was published, before an interrupt can come in between.

    Raises:
        InputError: the job is not at rest, or nobody says so; or it is one of ours.
        ConflictError: somebody else maintains the job; it changed or was started meanwhile; or
            it was cancelled.
        ProtocolError: what was written would not restore as what was read, or the epoch would not
            pass; nothing was published.
        NotFoundError, FormatError: the epoch, or a file of it, is missing or broken.
    """
    settings = settings or CompactionSettings()
    snapshot = take_snapshot(store, paths, directory)
    facts = table_facts(store, snapshot)
    plan = _plan(snapshot, facts, settings)
    if dry_run or not plan.tables or (or_forecast and plan.why_not is not None):
        return _nothing(
            _sampled(store, paths, snapshot, facts, plan, settings) if sampled else plan
        )
    check_may(paths, snapshot)
    with lease(
        store, paths, owner, wait_seconds=lease_wait_seconds, clock=clock, sleep=sleep
    ) as held:
        # Whoever held the lease before may have done some of it.
        snapshot = take_snapshot(held, paths, directory)
        check_may(paths, snapshot)
        facts = table_facts(held, snapshot)
        plan = _plan(snapshot, facts, settings)
        if not plan.tables:
            return _nothing(plan)
        if sampled:
            plan = _sampled(held, paths, snapshot, facts, plan, settings)
        check_restorable(held, paths, plan.epoch, 0)
        began = _quiet_from(paths, snapshot, quiet_since, clock())
        parts, left_out = _carried_out(held, paths, snapshot, plan, run, cancelled, on_shard)
        work = Unchanged(paths, directory, snapshot, facts.sizes, cancelled)
        quiet = _quiet_left(snapshot, quiet_seconds, began, clock())
        if quiet > 0:
            sleep(quiet)
        return publish(held, work, plan, parts, left_out, verify_level, clock(), on_published)


def _nothing(plan: RewritePlan) -> RewriteOutcome:
    return RewriteOutcome(plan=plan, left_out=plan.left_out, after=plan.before)


def _carried_out(
    store: ObjectStore,
    paths: JobPaths,
    snapshot: JobSnapshot,
    plan: RewritePlan,
    run: RunRewrites,
    cancelled: Callable[[], bool],
    on_shard: Callable[[RewriteShard | LeftOut, int], None],
) -> tuple[list[RewriteShard], list[LeftOut]]:
    tasks = _tasks(paths, snapshot, plan)
    parts: list[RewriteShard] = []
    left_out: list[LeftOut] = []
    for found in run(store, tasks):
        (parts if isinstance(found, RewriteShard) else left_out).append(found)  # type: ignore[arg-type]
        on_shard(found, len(tasks) - len(parts) - len(left_out))
        if isinstance(found, RewriteShard):
            check_same(paths, plan.epoch, found)
        check_not_cancelled(paths, cancelled)
    if len(parts) + len(left_out) != len(tasks):
        raise ProtocolError(
            f"{len(parts) + len(left_out)} of {len(tasks)} parts returned a result",
            job=paths.root,
            next_step="run it again; nothing was published",
        )
    return parts, left_out


def _tasks(paths: JobPaths, snapshot: JobSnapshot, plan: RewritePlan) -> list[RewriteTask]:
    return [
        _task(paths, snapshot.checkpoint, table, at)
        for table in plan.tables
        for at in range(len(table.parts))
    ]


def _task(paths: JobPaths, checkpoint: Checkpoint, table: TableRewrite, at: int) -> RewriteTask:
    operator = checkpoint.operator(table.operator)
    assert operator is not None
    config = operator.configs[table.table].config
    assert isinstance(config, ExpiringTimeKeyConfig)
    return RewriteTask(
        paths=paths,
        epoch=checkpoint.epoch,
        worker_generation=checkpoint.worker_generation,
        config=config,
        table=table,
        keys=table.parts[at],
    )


def _quiet_from(
    paths: JobPaths, snapshot: JobSnapshot, since: ListedJob | None, now_micros: int
) -> int:
    """Since when nothing of the job has changed, as far as listings show."""
    if since is None or changed_objects(paths, since.objects, snapshot.listing):
        return now_micros
    return since.at_micros


def _quiet_left(snapshot: JobSnapshot, quiet_seconds: float, began: int, now: int) -> float:
    """How many seconds must still pass before the objects of the job count as quiet."""
    finished = snapshot.answer.facts.finish_time_micros
    if finished is not None and now - finished >= _LONG_AGO * quiet_seconds * 1e6:
        return 0.0
    return quiet_seconds - (now - began) / 1e6
