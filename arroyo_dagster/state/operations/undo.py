"""Undo the last change of an Arroyo job in place: a compaction, an edit or a rebuild.

Objects get the bytes from before, and those that a rebuild has created are deleted. Only until the
job is started, the newest change first. An edit of a managed job is undone by another epoch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

from arroyo_dagster.errors import ConflictError, FormatError, InputError, NotFoundError
from arroyo_dagster.state.codec.maintenance_records import decode_change_record
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.metadata.lease import LeasedOperation, LeaseOptions, lease
from arroyo_dagster.state.metadata.tree import CheckpointTree
from arroyo_dagster.state.model.changes import ChangeKind, ChangeRecord, JobHead
from arroyo_dagster.state.model.ids import Epoch, StatePath
from arroyo_dagster.state.model.job_facts import JobAnswer, JobFacts
from arroyo_dagster.state.model.layout import JobPaths, Layout, parse_manifest_path
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
from arroyo_dagster.state.operations.compaction.rewrite_preconditions import (
    JobSnapshot,
    Unchanged,
    check_may_undo,
    guards_of,
    overwrite,
    take_snapshot,
)
from arroyo_dagster.state.operations.gc.pins import read_pins, unpin_changes
from arroyo_dagster.state.operations.verify.edits import read_edits
from arroyo_dagster.state.planning.compaction.rewrite import why_not_now
from arroyo_dagster.state.planning.restore.lost_metadata import check_own
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.failures import delete_all
from arroyo_dagster.state.storage.store import ObjectStore, read_optional
from arroyo_dagster.state.storage.wrappers import Extended


@dataclass(frozen=True, slots=True, kw_only=True)
class UndoPlan:
    """The metadata objects that undoing the last change of a job in place would restore.

    Attributes:
        record: of the change; None if there is nothing to undo.
        epoch: the one that was changed.
        objects: the metadata objects that would get their bytes from before.
        deleted: the metadata objects that would be deleted: the change has created them.
        operation: the edit that would be undone, or `rebuild`; None = a compaction.
    """

    record: StatePath | None = None
    epoch: Epoch | None = None
    objects: tuple[StatePath, ...] = ()
    deleted: tuple[StatePath, ...] = ()
    operation: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UndoOutcome(UndoPlan):
    """The metadata objects that were restored, or would be; further attributes as of the plan.

    Attributes:
        done: False for a dry run, and if there was nothing to undo.
    """

    done: bool = False

    @classmethod
    def of_plan(cls, plan: UndoPlan, *, done: bool = False) -> UndoOutcome:
        """Return the outcome of a plan; of a dry run unless it is done."""
        values = {field.name: getattr(plan, field.name) for field in fields(UndoPlan)}
        return cls(**values, done=done)


@dataclass(frozen=True, slots=True, kw_only=True)
class UndoOptions(LeasedOperation):
    """Options of an undo."""

    owner: str = "arroyo-state undo"


def plan_undo(store: ObjectStore, paths: JobPaths, directory: JobDirectory) -> UndoPlan:
    """Plan to undo the last change of a stopped Arroyo job in place. Writes nothing: this is the
    dry run.

    Args:
        directory: the source of the job's status.

    Raises:
        InputError, ConflictError, FormatError, ProtocolError: as `run_undo`.
    """
    undoing = _what_changed(store, paths, directory)
    return UndoPlan() if undoing is None else undoing.plan


def run_undo(
    store: ObjectStore,
    paths: JobPaths,
    directory: JobDirectory,
    options: UndoOptions | None = None,
    *,
    plan: UndoPlan | None = None,
) -> UndoOutcome:
    """Restore a stopped Arroyo job's metadata as it was before its last change in place.

    All files that the metadata lists exist: no change deletes one. If it is interrupted at any
    point, the job is restorable, or as damaged as before a rebuild, and a second run completes the
    undo.

    Args:
        directory: the source of the job's status; asked again before each change.
        plan: restore exactly the objects of this plan by `plan_undo`; None = all changed objects.

    Raises:
        InputError: the job is not at rest, or no source reports its status; of a created epoch also
            if no source names the checkpoints.
        LeaseHeldError: another process maintains the job.
        ConflictError: the job was started since, another process changed the metadata, or `plan` no
            longer fits.
        FormatError: a file that the original metadata lists is missing, or the record is broken.
        ProtocolError: the record belongs to another job, of which this one is a copy.
    """
    run_options = options or UndoOptions()
    fresh = _fresh(paths, plan_undo(store, paths, directory), plan)
    if fresh.record is None:
        return UndoOutcome()
    with lease(store, paths, run_options.owner, LeaseOptions.of(run_options)) as held:
        undoing = _what_changed(held, paths, directory)
        fresh = _fresh(paths, UndoPlan() if undoing is None else undoing.plan, plan)
        if undoing is None:
            return UndoOutcome()
        work = Unchanged(paths, directory, undoing.snapshot)
        view = Extended(held, undoing.record.written)  # also what an earlier undo has deleted
        for target, (current, before) in undoing.changed.items():
            work.check(view)
            if before is None:
                delete_all(held, [target])
            else:
                overwrite(held, paths, target, current, before)
        reason = work.why_changed(view)
        if reason is not None:  # the record stays: gc keeps the files that the run may have loaded
            raise ConflictError(
                f"the job changed after its metadata was put back: {reason}",
                job=paths.root,
                epoch=undoing.snapshot.checkpoint.epoch,
                next_step="let it run, and verify its next epoch; no file was deleted, and after a "
                "compaction both lists hold the same rows",
            )
        unpin_changes(held, paths, lambda name: name == undoing.record.name)
        delete_all(held, [paths.changes / undoing.record.name])
        return UndoOutcome.of_plan(fresh, done=True)


def has_unfinished_edit(store: ObjectStore, paths: JobPaths) -> bool:
    """Whether an edit of the newest epoch was published in part: `run_undo` undoes it.

    Costs one LIST and one GET for a job that was never changed in place.

    Raises:
        NotFoundError, FormatError: the job was edited, and its newest epoch is missing or broken.
    """
    if not store.list_dir(paths.changes).objects and not read_pins(store, paths).changes:
        return False
    return bool(read_edits(store, paths, [ParquetBackend(store, paths).load()]).unfinished)


def changed_since(store: ObjectStore, paths: JobPaths, since_micros: int) -> ChangeRecord | None:
    """Return the newest change in place that was made since a time and not undone; None = none.

    Raises:
        FormatError, StorageError: its record is broken, or the store failed.
    """
    newest = _newest_record(store, paths)
    return None if newest is None or newest[1].created_at_micros < since_micros else newest[1]


def _fresh(paths: JobPaths, fresh: UndoPlan, given: UndoPlan | None) -> UndoPlan:
    """Return the plan made from fresh facts; it must equal the given one, if any."""
    if given is not None and given != fresh:
        raise ConflictError(
            "the plan no longer fits: other objects would be put back now",
            job=paths.root,
            next_step="make a new plan; nothing was put back",
        )
    return fresh


@dataclass(frozen=True, slots=True)
class _Undoing:
    """The job, the plan, the record, and the objects to restore: by path, the content now and
    before.
    """

    snapshot: JobSnapshot
    plan: UndoPlan
    record: ChangeRecord
    changed: Mapping[StatePath, tuple[bytes, bytes | None]]


def _what_changed(store: ObjectStore, paths: JobPaths, directory: JobDirectory) -> _Undoing | None:
    newest = _newest_record(store, paths)
    if newest is None:
        return None
    path, record = newest
    rebuilt = record.kind is ChangeKind.REBUILD
    snapshot = (
        _rebuilt_snapshot(store, paths, directory, record)
        if rebuilt
        else take_snapshot(store, paths, directory)
    )
    check_may_undo(paths, snapshot, record.operation, record.epoch)
    (_check_rebuilt if rebuilt else _check_in_place)(store, paths, snapshot, record)
    # What leads to an object is written after it, and goes before it.
    changed = dict(reversed(list(_changed_objects(store, paths, record))))
    plan = UndoPlan(
        record=path,
        epoch=record.epoch,
        objects=tuple(path for path, (_, before) in changed.items() if before is not None),
        deleted=tuple(path for path, (_, before) in changed.items() if before is None),
        operation=record.operation,
    )
    return _Undoing(snapshot, plan, record, changed)


def _newest_record(store: ObjectStore, paths: JobPaths) -> tuple[StatePath, ChangeRecord] | None:
    """Return the newest change that can be undone. Names hold the number of the lease, which grows;
    an incomplete listing hides none of those that the pins name.
    """
    names = {info.path.name for info in store.list_dir(paths.changes).objects}
    names.update(read_pins(store, paths).changes)
    for name in sorted(names, key=lambda name: name.partition("-")[2], reverse=True):
        path = paths.changes / name
        try:
            record = decode_change_record(store.read(path), path)
        except NotFoundError as error:
            raise NotFoundError(
                "the record of the last change is lost, so that it cannot be undone",
                job=paths.root,
                path=path,
                next_step="restore the record from a copy of the job; nothing was changed",
            ) from error
        if record.before:
            return path, record
    return None


def _changed_objects(
    store: ObjectStore, paths: JobPaths, record: ChangeRecord
) -> Iterator[tuple[StatePath, tuple[bytes, bytes | None]]]:
    """Yield the objects that still hold what the change wrote: it, and the content before."""
    for path, before in record.before.items():
        current = read_optional(store, path)
        if current == before:
            continue
        if current is None or hashlib.sha256(current).hexdigest() != record.objects[path][1]:
            done = "rewrite" if record.operation is None else record.operation
            raise ConflictError(
                f"another process changed the metadata of the job after the {done}",
                job=paths.root,
                path=path,
                next_step="keep the current metadata; nothing was restored",
            )
        yield path, (current, before)


# ---- of a compaction or an edit ------------------------------------------------------------------


def _check_in_place(
    store: ObjectStore, paths: JobPaths, snapshot: JobSnapshot, record: ChangeRecord
) -> None:
    check_own(
        paths,
        "the record of the rewrite",
        record.before,
        next_step="undo it in the original job, of which this one is a copy; nothing was restored",
    )
    now = (snapshot.checkpoint.epoch, snapshot.checkpoint.worker_generation)
    # A run that was started since and failed before its first checkpoint is not visible here.
    if now != (record.epoch, record.worker_generation):
        raise ConflictError(
            f"epoch {record.epoch} was rewritten, but the job would now restore epoch {now[0]}",
            job=paths.root,
            next_step="nothing can be undone: the job has continued from the rewritten state",
        )
    heads = concurrently(store.head, record.inputs)
    gone = [path for path, info in zip(record.inputs, heads, strict=True) if info is None]
    if gone:
        raise FormatError(
            f"{len(gone)} of {len(heads)} files of the original lists are missing",
            job=paths.root,
            path=gone[0],
            next_step="keep the rewritten state: it holds the same rows"
            if record.operation is None
            else "keep the edited state; it is complete",
        )


# ---- of a rebuild --------------------------------------------------------------------------------


def _rebuilt_snapshot(
    store: ObjectStore, paths: JobPaths, directory: JobDirectory, record: ChangeRecord
) -> JobSnapshot:
    answer = directory.look_up([paths], checkpoints=True)[0]
    view = Extended(store, record.written)
    checkpoint = ParquetBackend(view, paths).load(record.epoch)
    why_not = why_not_now(answer, checkpoint)
    return JobSnapshot(answer, checkpoint, {}, guards_of(view, paths, checkpoint), {}, why_not)


def _check_rebuilt(
    store: ObjectStore, paths: JobPaths, snapshot: JobSnapshot, record: ChangeRecord
) -> None:
    _check_catalogue(paths, record, snapshot.answer)
    if _continued(Extended(store, record.written), paths, record, snapshot.answer.facts):
        raise ConflictError(
            f"the {record.operation} of epoch {record.epoch} cannot be undone: the job has "
            "continued from it",
            job=paths.root,
            path=paths.changes / record.name,
            next_step="nothing was changed; the record beside the job has what was there before",
        )


def _check_catalogue(paths: JobPaths, record: ChangeRecord, answer: JobAnswer) -> None:
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


def _continued(view: ObjectStore, paths: JobPaths, record: ChangeRecord, facts: JobFacts) -> bool:
    """Return whether the job has gone on from what was written.

    A worker generation that was started from a created epoch, and has written none, goes back to
    where the job was: the next start skips references to what does not exist.

    Raises:
        InputError: the job was started since, and no source says that this run has ended.
    """
    head = CheckpointTree(view, paths).job_head()
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
