"""Undo a rebuild: restore the damaged objects, and delete those that were missing.

Whatever else created an epoch beside an Arroyo job is undone likewise. Only until the job is
started, and only after all later edits and compactions are undone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from arroyo_dagster.errors import ConflictError, InputError, NotFoundError
from arroyo_dagster.state.codec.maintenance_records import decode_rebuild_record
from arroyo_dagster.state.codec.records import decode_current_generation
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.metadata.expiry import delete_all
from arroyo_dagster.state.metadata.lease import LeaseOptions, lease
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.job_facts import JobAnswer, JobFacts
from arroyo_dagster.state.model.layout import JobPaths, Layout, parse_manifest_path
from arroyo_dagster.state.model.surgery.rebuild import JobHead, RebuildRecord, RebuildUndo
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
from arroyo_dagster.state.operations.compaction.rewrite_preconditions import (
    JobSnapshot,
    Unchanged,
    check_may_undo,
    guards_of,
    list_objects,
    overwrite,
)
from arroyo_dagster.state.operations.gc.pins import read_pins
from arroyo_dagster.state.operations.surgery.execute import EditOptions
from arroyo_dagster.state.planning.compaction.rewrite import why_not_now
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.storage.wrappers import Extended


def plan_rebuild_undo(
    store: ObjectStore, paths: JobPaths, directory: JobDirectory
) -> RebuildUndo | None:
    """Plan to undo the last rebuild of a stopped Arroyo job. Writes nothing: this is the dry run.

    Args:
        directory: the source of the job's status.

    Returns:
        None if the job was never rebuilt, or if an edit or compaction after it is undone first.

    Raises:
        InputError, ConflictError, FormatError: as `run_rebuild_undo`.
    """
    undoing = _prepare(store, paths, directory)
    return None if undoing is None else undoing.plan


def run_rebuild_undo(
    store: ObjectStore,
    paths: JobPaths,
    directory: JobDirectory,
    options: EditOptions | None = None,
) -> RebuildUndo | None:
    """Undo the last rebuild of a stopped Arroyo job: the epoch is then as damaged as it was.

    If it is interrupted, a second run completes it.

    Args:
        directory: the source of the job's status; asked again before each change.

    Returns:
        As `plan_rebuild_undo`.

    Raises:
        InputError: the job is not at rest, or no source reports its status; of a created epoch also
            if no source names the checkpoints.
        LeaseHeldError: another process maintains the job.
        ConflictError: the job was started since, or another process changed what was rebuilt.
        FormatError: the record is broken.
    """
    run_options = options or EditOptions(owner="arroyo-state undo")
    if _prepare(store, paths, directory) is None:
        return None
    with lease(store, paths, run_options.owner, LeaseOptions.of(run_options)) as held:
        undoing = _prepare(held, paths, directory)
        if undoing is None:
            return None
        record = undoing.record
        view = Extended(held, record.after)
        work = Unchanged(paths, directory, undoing.snapshot)
        # What leads to an object goes before it.
        for path in reversed(list(record.after)):
            work.check(view)
            before = record.before[path]
            if before is None and path in undoing.plan.deleted:
                delete_all(held, [path])
            elif before is not None and path in undoing.plan.restored:
                overwrite(held, paths, path, record.after[path], before)
        delete_all(held, [undoing.plan.record])
        return replace(undoing.plan, done=True)


@dataclass(frozen=True, slots=True)
class _RebuildUndoing:
    plan: RebuildUndo
    record: RebuildRecord
    snapshot: JobSnapshot


def _prepare(
    store: ObjectStore, paths: JobPaths, directory: JobDirectory
) -> _RebuildUndoing | None:
    path = _newest(store, paths)
    if path is None:
        return None
    record = decode_rebuild_record(store.read(path), path)
    listing = list_objects(store, paths)
    answer = directory.look_up([paths], checkpoints=True)[0]
    # With the rebuilt objects in place, whichever an interrupted undo has taken already.
    view = Extended(store, record.after)
    checkpoint = ParquetBackend(view, paths).load(record.epoch)
    why_not = why_not_now(answer, checkpoint)
    guards = guards_of(view, paths, checkpoint)
    snapshot = JobSnapshot(answer, checkpoint, {}, guards, listing, why_not)
    check_may_undo(paths, snapshot, record.operation, record.epoch)
    _check_catalogue(paths, record, answer)
    if _continued(view, paths, record, answer.facts):
        raise ConflictError(
            f"the {record.operation} of epoch {record.epoch} cannot be undone: the job has "
            "continued from it",
            job=paths.root,
            path=path,
            next_step="nothing was changed; the record beside the job has what was there before",
        )
    changed = list(_changed(store, paths, record))
    plan = RebuildUndo(
        record=path,
        operation=record.operation,
        epoch=record.epoch,
        restored=tuple(path for path in changed if record.before[path] is not None),
        deleted=tuple(path for path in changed if record.before[path] is None),
    )
    return _RebuildUndoing(plan, record, snapshot)


def _check_catalogue(paths: JobPaths, record: RebuildRecord, answer: JobAnswer) -> None:
    """Check that Arroyo does not restore an epoch of the legacy layout that this package created.

    Raises:
        InputError: no source says whether the epoch is ready.
        ConflictError: Arroyo would restore it.
    """
    if record.operation == "rebuild" or paths.layout is Layout.PROTOCOL:
        return  # the epoch existed before, and was as damaged; or the store alone decides
    facts = [reply.facts for reply in answer.answers if reply.facts is not None] or [answer.facts]
    if any(fact.newest_ready_epoch is not None for fact in facts):
        ready = max(fact.newest_ready_epoch or 0 for fact in facts)
        raise ConflictError(
            f"Arroyo's database names epoch {ready} as ready: a start without it would fail",
            job=paths.root,
            next_step="first: UPDATE checkpoints SET state = 'failed' WHERE job_id = "
            f"'{paths.job}' AND epoch = {record.epoch}",
        )
    listed = [fact.checkpoints for fact in facts if fact.checkpoints is not None]
    # The API has no state of an epoch: without a finish_time, which the row of a created epoch
    # does not have, it may be ready all the same.
    if not any(all(row.state is not None for row in rows) for rows in listed):
        why = "no source names the checkpoints of the job"
        if listed:
            why = "Arroyo's API has no state of the created epoch, and lists it without an end"
        raise InputError(
            f"{why}, so Arroyo may restore the created epoch",
            job=paths.root,
            epoch=record.epoch,
            next_step="pass --arroyo-db: the row in Arroyo's database has its state",
        )


def _continued(view: ObjectStore, paths: JobPaths, record: RebuildRecord, facts: JobFacts) -> bool:
    """Return whether the job has gone on from what was written.

    A worker generation that was started from a created epoch, and has written none, goes back to
    where the job was: the next start skips references to what does not exist.

    Raises:
        InputError: the job was started since, and no source says that this run has ended.
    """
    head = head_of(view, paths)
    if head == record.head:
        return False
    created = record.operation != "rebuild" and paths.layout is Layout.PROTOCOL
    if not created or head.epoch != record.head.epoch or _written_since(view, paths, record.head):
        return True
    if facts.run_id != head.worker_generation:
        raise InputError(
            f"the job was started since, as worker generation {head.worker_generation}, and no "
            "source says that this run has ended",
            job=paths.root,
            run=facts.run_id,
            next_step="pass --arroyo-db or --arroyo-api",
        )
    return False


def _written_since(view: ObjectStore, paths: JobPaths, head: JobHead) -> bool:
    """Return whether a later worker generation has a checkpoint, published or not."""
    for info in view.list(paths.generations):
        address = parse_manifest_path(info.path)
        if address is not None and address.worker_generation > (head.worker_generation or 0):
            return True
    return False


def head_of(store: ObjectStore, paths: JobPaths) -> JobHead:
    """Return how far a job with at least one epoch is."""
    epochs = ParquetBackend(store, paths).epochs()
    if not epochs:
        raise NotFoundError(
            "the job has no epoch, so it is unknown whether it has gone on since the rebuild",
            job=paths.root,
            next_step="restore the metadata of its newest epoch from a copy; nothing was changed",
        )
    newest = epochs[-1]
    if paths.layout is Layout.LEGACY:
        return JobHead(epoch=newest)
    path = paths.current_generation
    fence = decode_current_generation(store.read(path), path)
    return JobHead(epoch=newest, worker_generation=fence.worker_generation)


def _newest(store: ObjectStore, paths: JobPaths) -> StatePath | None:
    """Return the newest record of a rebuild, unless a rewrite or an edit came later.

    Names end with the number of the lease, which grows.
    """
    rebuilds = [info.path for info in store.list_dir(paths.rebuilds).objects]
    if not rebuilds:
        return None
    rewrites = [info.path for info in store.list_dir(paths.rewrites).objects]
    rewrites += [paths.rewrites / name for name in read_pins(store, paths).rewrites]
    newest = max(rebuilds, key=_token)
    return None if any(_token(path) > _token(newest) for path in rewrites) else newest


def _token(path: StatePath) -> str:
    return path.name.partition("-")[2]


def _changed(store: ObjectStore, paths: JobPaths, record: RebuildRecord) -> Iterator[StatePath]:
    """Yield the objects that still hold what the rebuild wrote."""
    for path, after in record.after.items():
        try:
            data = store.read(path)
        except NotFoundError:
            data = None
        if data == record.before[path]:
            continue
        if data != after:
            raise ConflictError(
                f"another process changed the metadata of the job after the {record.operation}",
                job=paths.root,
                path=path,
                next_step="keep the current metadata; nothing was changed",
            )
        yield path
