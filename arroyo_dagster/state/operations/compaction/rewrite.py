"""Rewrite the state of a stopped Arroyo job: plan, execute the parts here or elsewhere, verify,
publish in place; the rewrite can be undone.

The order of the steps makes it safe:

1. New files get names that no epoch lists.
2. The rows that a restore would load from them are compared with those of the old files.
3. The epoch as it would be published is verified.
4. The original metadata is recorded.
5. Only then metadata objects are overwritten, each by one put, each leaving an epoch that can be
   restored.

Nothing is deleted: a process that loaded the old lists finds every file. The lease, the condition
of the job and its run are checked again before every put and after the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from arroyo_dagster.errors import ConflictError, ProtocolError
from arroyo_dagster.state.metadata.lease import Leased, LeasedOperation, LeaseOptions, lease
from arroyo_dagster.state.model.changes import ChangeKind
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.compaction import CompactionSettings, LeftOut
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.progress import OnProgress, no_progress
from arroyo_dagster.state.model.rewrite import (
    QuietSettings,
    RewriteOutcome,
    RewritePlan,
    RewriteShard,
    TableRewrite,
)
from arroyo_dagster.state.model.tables import ExpiringTimeKeyConfig, TimeFile
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
from arroyo_dagster.state.operations.compaction.execute import check_same
from arroyo_dagster.state.operations.compaction.plan import forecast_rewrites
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
    wait_until_quiet,
)
from arroyo_dagster.state.operations.compaction.rewrite_publish import (
    change_record,
    encoded_objects,
    publish_change,
)
from arroyo_dagster.state.operations.progress import counter
from arroyo_dagster.state.planning.compaction.plan import forecast
from arroyo_dagster.state.planning.compaction.rewrite import (
    TableFacts,
    TableKey,
    plan_table_rewrites,
    rewritten,
)
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.merge.rewrite import RewriteTask, rewrite_shard

RunRewrites = Callable[[ObjectStore, Sequence[RewriteTask]], Iterable[RewriteShard | LeftOut]]


def rewrite_here(
    store: ObjectStore, tasks: Sequence[RewriteTask]
) -> Iterable[RewriteShard | LeftOut]:
    """Execute the parts in this process, one after the other."""
    return (rewrite_shard(store, task) for task in tasks)


# ---- planning ------------------------------------------------------------------------------------


def plan_rewrite(
    store: ObjectStore,
    paths: JobPaths,
    directory: JobDirectory,
    settings: CompactionSettings | None = None,
    *,
    sampled: bool = False,
    on_progress: OnProgress = no_progress,
) -> RewritePlan:
    """Plan the rewrite of the epoch that an Arroyo job would restore. Writes nothing: this is the
    dry run.

    A running job, or a job of unknown status, is planned as well: the plan is then a forecast, and
    its `why_not` says why it cannot be executed now.

    Args:
        directory: the source of the job's status.
        sampled: rewrite some of the files in memory to forecast the number of bytes afterwards.
        on_progress: called with how many files were looked at and rewritten for the forecast.

    Raises:
        InputError: the job is a managed job.
        NotFoundError: the job has no checkpoint.
        FormatError: a file that the checkpoint lists is missing.
    """
    snapshot, settings = take_snapshot(store, paths, directory), settings or CompactionSettings()
    facts = table_facts(store, snapshot, on_progress)
    plan = _plan(snapshot, facts, settings)
    if not sampled:
        return plan
    return _sampled(store, paths, snapshot, facts, plan, settings, on_progress)


def _sampled(
    store: ObjectStore,
    paths: JobPaths,
    snapshot: JobSnapshot,
    facts: TableFacts,
    plan: RewritePlan,
    settings: CompactionSettings,
    on_progress: OnProgress = no_progress,
) -> RewritePlan:
    tasks = _tasks(paths, snapshot, plan)
    part_bytes: dict[TableKey, list[int]] = {}
    count = counter(on_progress, "rewrites forecast", len(tasks))
    for task, size_bytes in zip(tasks, forecast_rewrites(store, tasks), strict=True):
        count()
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
        plan_table_rewrites(snapshot.checkpoint, facts, settings, part_bytes),
        condition=snapshot.answer.facts.condition,
        run_id=snapshot.answer.facts.run_id,
        why_not=snapshot.why_not,
    )


# ---- execution -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriteOptions(LeasedOperation, QuietSettings):
    """Options of a rewrite.

    Attributes:
        quiet_since: an earlier listing of the job. If nothing has changed since, the time since
            then counts, so that one wait serves all jobs that were listed together.
        verify_level: the level at which the epoch as it would be published is verified before.
        sampled: forecast the number of bytes afterwards, as `plan_rewrite` does; a given plan keeps
            its forecast.
        run: executes the parts, in this process or on Spark.
        cancelled: whether to give up; called between the parts and before each change of metadata.
        on_shard: called with every finished part, before it is verified, and the number left.
        on_published: called with the outcome, before an interrupt can arrive.
    """

    owner: str = "arroyo-state compact"
    quiet_since: ListedJob | None = None
    verify_level: int = 1
    sampled: bool = False
    run: RunRewrites = rewrite_here
    cancelled: Callable[[], bool] = lambda: False
    on_shard: Callable[[RewriteShard | LeftOut, int], None] = lambda part, left: None
    on_published: Callable[[RewriteOutcome], None] = lambda outcome: None


def run_rewrite(
    store: ObjectStore,
    paths: JobPaths,
    directory: JobDirectory,
    settings: CompactionSettings | None = None,
    options: RewriteOptions | None = None,
    *,
    plan: RewritePlan | None = None,
) -> RewriteOutcome:
    """Rewrite the files that a stopped Arroyo job restores: fewer files, the same rows, in place.

    It deletes nothing and records the original metadata (`run_undo`). If it is interrupted at any
    point, the job is restorable, and a second run completes the rewrite. After a complete run,
    another one finds nothing to do.

    Args:
        directory: the source of the job's status; asked again before each change.
        settings: the settings of the plan.
        plan: execute this plan, made earlier by `plan_rewrite` with the same settings; None = plan
            under the lease.

    Raises:
        InputError: the job is not at rest, no source reports its status, or it is a managed job.
        LeaseHeldError: another process maintains the job.
        ConflictError: the job changed or was started meanwhile; the rewrite was cancelled; or
            `plan` no longer fits.
        ProtocolError: the written files would not restore the rows of their inputs, or the epoch
            would not pass verification; nothing was published.
        NotFoundError, FormatError: the epoch, or a file of it, is missing or broken.
    """
    settings, run_options = settings or CompactionSettings(), options or RewriteOptions()
    snapshot = take_snapshot(store, paths, directory)
    fresh = _fresh(_plan(snapshot, table_facts(store, snapshot), settings), plan)
    if not fresh.tables:
        return RewriteOutcome.of_plan(fresh)
    check_may(paths, snapshot)
    with lease(store, paths, run_options.owner, LeaseOptions.of(run_options)) as held:
        # The previous holder of the lease may have rewritten some of it.
        snapshot = take_snapshot(held, paths, directory)
        check_may(paths, snapshot)
        facts = table_facts(held, snapshot)
        fresh = _fresh(_plan(snapshot, facts, settings), plan)
        if not fresh.tables:
            return RewriteOutcome.of_plan(fresh)
        if run_options.sampled and plan is None:
            fresh = _sampled(held, paths, snapshot, facts, fresh, settings)
        check_restorable(held, paths, fresh.epoch, 0)
        began = _quiet_from(paths, snapshot, run_options.quiet_since, run_options.clock())
        parts, left_out = _carried_out(held, paths, snapshot, fresh, run_options)
        work = Unchanged(paths, directory, snapshot, facts.sizes, run_options.cancelled)
        wait_until_quiet(snapshot, began, run_options)
        return _published(held, work, fresh, parts, left_out, run_options)


def _fresh(fresh: RewritePlan, given: RewritePlan | None) -> RewritePlan:
    """Return the plan made from fresh facts; it must equal the given one, if any."""
    if given is not None and (given.epoch, given.tables) != (fresh.epoch, fresh.tables):
        raise ConflictError(
            f"the plan no longer fits: it was made for epoch {given.epoch}, and other files",
            job=JobPaths(fresh.job, fresh.pipeline).root,
            epoch=fresh.epoch,
            next_step="make a new plan; nothing was written",
        )
    return fresh if given is None else replace(fresh, after=given.after)


def _carried_out(
    store: ObjectStore,
    paths: JobPaths,
    snapshot: JobSnapshot,
    plan: RewritePlan,
    options: RewriteOptions,
) -> tuple[list[RewriteShard], list[LeftOut]]:
    tasks = _tasks(paths, snapshot, plan)
    parts: list[RewriteShard] = []
    left_out: list[LeftOut] = []
    for part in options.run(store, tasks):
        (parts if isinstance(part, RewriteShard) else left_out).append(part)  # type: ignore[arg-type]
        options.on_shard(part, len(tasks) - len(parts) - len(left_out))
        if isinstance(part, RewriteShard):
            check_same(paths, plan.epoch, part)
        check_not_cancelled(paths, options.cancelled)
    if len(parts) + len(left_out) != len(tasks):
        raise ProtocolError(
            f"{len(parts) + len(left_out)} of {len(tasks)} parts returned a result",
            job=paths.root,
            next_step="run it again; nothing was published",
        )
    return parts, left_out


def _tasks(paths: JobPaths, snapshot: JobSnapshot, plan: RewritePlan) -> list[RewriteTask]:
    return [
        _task(paths, snapshot.checkpoint, table, index)
        for table in plan.tables
        for index in range(len(table.parts))
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
    """Return the time since when listings show no change of the job, in microseconds."""
    if since is None or changed_objects(paths, since.objects, snapshot.listing):
        return now_micros
    return since.at_micros


# ---- publication ---------------------------------------------------------------------------------


def _published(
    held: Leased,
    work: Unchanged,
    plan: RewritePlan,
    parts: Sequence[RewriteShard],
    left_out: Sequence[LeftOut],
    options: RewriteOptions,
) -> RewriteOutcome:
    files, taken = _new_files(plan, parts, left_out)
    after = rewritten(work.snapshot.checkpoint, files)
    objects = encoded_objects(work.snapshot, after)
    left = (*plan.left_out, *_left_out_once(left_out))
    outcome = RewriteOutcome(plan=plan, parts=tuple(taken), left_out=left, after=plan.before)
    if not objects:
        return outcome
    gone = {path for part in outcome.parts for path in part.merged.input_paths}
    done = replace(_with_result(outcome, work, after), published=True)
    change = change_record(
        held,
        work.snapshot.checkpoint,
        {path: work.snapshot.objects[path] for path in objects},
        objects,
        kind=ChangeKind.COMPACTION,
        operation=None,
        digest=None,
        created_at_micros=options.clock(),
        inputs=tuple(sorted(gone)),
    )

    def published(path: StatePath) -> None:
        options.on_published(replace(done, record=path))

    path = publish_change(held, work, change, objects, options.verify_level, published)
    return replace(done, record=path)


def _new_files(
    plan: RewritePlan, parts: Sequence[RewriteShard], left_out: Sequence[LeftOut]
) -> tuple[dict[TableKey, tuple[TableRewrite, list[TimeFile]]], list[RewriteShard]]:
    """Return the tables that get new files. If one table of an aggregate is left out, both are."""
    stuck = {left.operator for left in left_out if _of_aggregate(plan, left)}
    stuck_tables = {(left.operator, left.table) for left in left_out}
    files: dict[TableKey, tuple[TableRewrite, list[TimeFile]]] = {}
    taken: list[RewriteShard] = []
    for table in plan.tables:
        key = (table.operator, table.table)
        mine = [p for p in parts if (p.merged.operator, p.merged.table) == key]
        outputs = [file for part in mine for file in _outputs(part)]
        # A table without a remaining row would vanish from the epoch; Arroyo itself drops it later.
        if key in stuck_tables or (table.operator in stuck and table.rule.aggregate) or not outputs:
            continue
        files[key] = (table, outputs)
        taken += mine
    return files, taken


def _of_aggregate(plan: RewritePlan, one: LeftOut) -> bool:
    return any(
        (table.operator, table.table) == (one.operator, one.table) and table.rule.aggregate
        for table in plan.tables
    )


def _left_out_once(left_out: Sequence[LeftOut]) -> list[LeftOut]:
    """Keep only the first reason of each table."""
    return list({(left.operator, left.table): left for left in reversed(left_out)}.values())


def _outputs(part: RewriteShard) -> tuple[TimeFile, ...]:
    return tuple(file for file in part.merged.outputs if isinstance(file, TimeFile))


def _with_result(found: RewriteOutcome, work: Unchanged, after: Checkpoint) -> RewriteOutcome:
    new = {file.path: part for part in found.parts for file in _outputs(part)}
    sizes = {**work.sizes, **{path: part.size_bytes_out for path, part in new.items()}}
    listed = set(after.paths)
    return replace(
        found,
        unlisted=tuple(
            source.file.path
            for table in found.plan.tables
            for source in table.inputs
            if source.file.path not in listed and source.file.epoch == found.plan.epoch
        ),
        after=forecast(after, sizes, found.plan.parallelism),
    )
