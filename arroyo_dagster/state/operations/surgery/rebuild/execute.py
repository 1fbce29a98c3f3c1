"""Write lost or damaged metadata of an epoch anew, from its data files and an older epoch.

Only Arroyo jobs. What the files do not prove is a doubt of the plan; what cannot be known is
refused. Readable metadata is never overwritten, and nothing is written before the epoch as it would
be passes verification.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from arroyo_dagster.errors import ConflictError, InputError, NotFoundError
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.metadata.lease import Leased, LeaseOptions, lease
from arroyo_dagster.state.model.changes import ChangeKind
from arroyo_dagster.state.model.ids import (
    Epoch,
    JobId,
    PipelineId,
    StatePath,
    path_error,
)
from arroyo_dagster.state.model.layout import JobPaths, Layout
from arroyo_dagster.state.model.surgery.rebuild import RebuildOutcome, RebuildPlan
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
from arroyo_dagster.state.operations.catalog.jobs import find_job
from arroyo_dagster.state.operations.compaction.quiet import wait_until_quiet
from arroyo_dagster.state.operations.compaction.rewrite_preconditions import (
    JobSnapshot,
    Unchanged,
    check_may,
    check_restorable,
    guards_of,
    list_objects,
)
from arroyo_dagster.state.operations.compaction.rewrite_publish import (
    MetadataChange,
    publish_change,
)
from arroyo_dagster.state.operations.surgery.execute import EditOptions
from arroyo_dagster.state.operations.surgery.rebuild.legacy import LegacyRebuild
from arroyo_dagster.state.operations.surgery.rebuild.protocol import ProtocolRebuild
from arroyo_dagster.state.planning.compaction.rewrite import why_not_now
from arroyo_dagster.state.storage.store import ObjectStore

_VERIFY_LEVEL = 2


def plan_rebuild(
    store: ObjectStore, paths: JobPaths, directory: JobDirectory, epoch: int | None = None
) -> RebuildPlan:
    """Plan a rebuild, and verify the epoch as it would be. Writes nothing: this is the dry run.

    Args:
        directory: the source of the job's status.
        epoch: the epoch to rebuild; None = the newest one that is visible.

    Raises:
        InputError: a managed job, or nothing is missing or damaged.
        NotFoundError: the job has no such epoch.
        ProtocolError: the metadata cannot be known, or the epoch as it would be does not pass
            verification.
        FormatError: a data file of the epoch is broken.
    """
    return _prepare(store, paths, directory, epoch).plan


def run_rebuild(
    store: ObjectStore,
    paths: JobPaths,
    directory: JobDirectory,
    epoch: int | None = None,
    options: EditOptions | None = None,
) -> RebuildOutcome:
    """Rebuild the metadata of an epoch of a stopped Arroyo job.

    What leads to an object is written after it. An interrupted rebuild is continued by the next
    call. `run_undo` undoes it until the job is started.

    Raises:
        ConflictError: another plan was approved, or the job changed or was started meanwhile.
        LeaseHeldError: another process maintains the job.
        InputError, NotFoundError, ProtocolError, FormatError: as `plan_rebuild`; or the job is not
            at rest.
    """
    run_options = options or EditOptions()
    prepared = _prepare(store, paths, directory, epoch)
    check_may(paths, prepared.snapshot)
    _check_approved(prepared.plan, run_options.approved)
    with lease(store, paths, "arroyo-state rebuild", LeaseOptions.of(run_options)) as held:
        began = run_options.clock()
        # The previous holder of the lease may have changed the job.
        again = _prepare(held, paths, directory, prepared.plan.epoch)
        check_may(paths, again.snapshot)
        _check_approved(again.plan, prepared.plan.digest)
        wait_until_quiet(again.snapshot, began, run_options)
        work = Unchanged(paths, directory, again.snapshot)
        record = _write(held, work, again, run_options)
    return RebuildOutcome(plan=again.plan, record=record)


def _check_approved(plan: RebuildPlan, approved: str | None) -> None:
    if approved is not None and approved != plan.digest:
        raise ConflictError(
            f"plan {approved} was approved, but the current plan is {plan.digest}",
            job=plan.paths.root,
            epoch=plan.epoch,
            next_step="review the new plan and approve it; nothing was changed",
        )


def _write(
    held: Leased, work: Unchanged, prepared: _PreparedRebuild, options: EditOptions
) -> StatePath:
    plan = prepared.plan
    change = MetadataChange(
        kind=ChangeKind.REBUILD,
        operation="rebuild",
        digest=plan.digest,
        before=plan.before,
        after=plan.after,
        inputs=plan.unlisted,
        doubts=plan.doubts,
        head=plan.head,
        verify_level=_VERIFY_LEVEL,
        now_micros=options.clock(),
    )
    return publish_change(held, work, change)


# ---- planning ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _PreparedRebuild:
    plan: RebuildPlan
    snapshot: JobSnapshot


def _prepare(
    store: ObjectStore, paths: JobPaths, directory: JobDirectory, epoch: int | None
) -> _PreparedRebuild:
    # List first: objects written meanwhile then count as changed.
    listing = list_objects(store, paths)
    answer = directory.look_up([paths], checkpoints=True)[0]
    lost = LegacyRebuild if paths.layout is Layout.LEGACY else ProtocolRebuild
    rebuilt = lost(store, paths, _chosen(store, paths, epoch), listing).rebuilt(answer.facts)
    why_not = why_not_now(answer, rebuilt.checkpoint)
    plan = RebuildPlan(
        job=paths.job,
        pipeline=paths.pipeline,
        epoch=rebuilt.checkpoint.epoch,
        source=rebuilt.source,
        condition=answer.facts.condition,
        why_not=why_not,
        before=rebuilt.before,
        after=rebuilt.after,
        tables=rebuilt.tables,
        doubts=rebuilt.doubts,
        unlisted=rebuilt.unlisted,
        head=rebuilt.head,
    )
    view = rebuilt.over(store)
    check_restorable(view, paths, plan.epoch, _VERIFY_LEVEL)
    guards = guards_of(view, paths, rebuilt.checkpoint)
    snapshot = JobSnapshot(answer, rebuilt.checkpoint, {}, guards, listing, why_not)
    return _PreparedRebuild(plan, snapshot)


def _chosen(store: ObjectStore, paths: JobPaths, epoch: int | None) -> Epoch:
    backend = ParquetBackend(store, paths)
    epochs = backend.epochs()
    if epoch is None and epochs:
        return epochs[-1]
    if epoch is not None:
        epochs = _epochs_with_objects(backend)
    if epoch is None or epoch not in epochs:
        raise NotFoundError(
            "the job has no checkpoint" if epoch is None else "the job has no such epoch",
            job=paths.root,
            epoch=epoch,
            next_step="`arroyo-state epochs` lists those that exist; name one: `rebuild JOB EPOCH`",
        )
    return Epoch(epoch)


def _epochs_with_objects(backend: ParquetBackend) -> list[Epoch]:
    """Return the epochs that have a record, or a directory of any worker generation."""
    if backend.paths.layout is Layout.LEGACY:
        return backend.checkpoint_dirs()
    directories = map(backend.checkpoint_dirs, backend.generation_dirs())
    return sorted({*backend.epochs(), *itertools.chain.from_iterable(directories)})


def find_damaged_job(store: ObjectStore, name: str) -> JobPaths:
    """Find a job as `find_job`, or by its full path `pipeline/job` if its fence is lost.

    Raises:
        NotFoundError, InputError: as `find_job`.
    """
    try:
        return find_job(store, name)
    except (NotFoundError, InputError):
        pipeline, _, job = name.rpartition("/")
        if not pipeline or path_error(name) is not None:
            raise
        paths = JobPaths(JobId(job), PipelineId(pipeline))
        if store.list_dir(paths.generations).prefixes and store.list_dir(paths.epochs).objects:
            return paths
        raise
