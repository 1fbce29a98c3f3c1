"""Undo a rewrite: restore the original metadata of a stopped Arroyo job."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from arroyo_dagster.errors import ConflictError, FormatError
from arroyo_dagster.state.codec.maintenance_records import decode_rewrite_record
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.metadata.expiry import delete_all
from arroyo_dagster.state.metadata.lease import LeasedOperation, LeaseOptions, lease
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.rewrite import RewriteRecord
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
from arroyo_dagster.state.operations.compaction.rewrite_preconditions import (
    JobSnapshot,
    Unchanged,
    check_may_undo,
    overwrite,
    take_snapshot,
)
from arroyo_dagster.state.operations.gc.pins import forget_rewrites, read_pins
from arroyo_dagster.state.operations.verify.edits import read_edits
from arroyo_dagster.state.planning.restore.copied_jobs import check_own
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore


@dataclass(frozen=True, slots=True, kw_only=True)
class UndoPlan:
    """The metadata objects that undoing the last rewrite of a job would restore.

    Attributes:
        record: the record with their original content; None if there is nothing to restore.
        objects: the metadata objects that would be restored.
        operation: the edit that would be undone; None = a compaction.
    """

    record: StatePath | None = None
    objects: tuple[StatePath, ...] = ()
    operation: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UndoOutcome:
    """The metadata objects that were restored.

    Attributes:
        record: the record with their original content; None if there was nothing to restore.
        objects: the metadata objects that were restored, or would be.
        done: False for a dry run.
        operation: the edit that was undone, or would be; None = a compaction.
    """

    record: StatePath | None = None
    objects: tuple[StatePath, ...] = ()
    done: bool = False
    operation: str | None = None

    @classmethod
    def of_plan(cls, plan: UndoPlan) -> UndoOutcome:
        """Return the outcome of a dry run: nothing changed."""
        return cls(record=plan.record, objects=plan.objects, operation=plan.operation)


@dataclass(frozen=True, slots=True, kw_only=True)
class UndoOptions(LeasedOperation):
    """Options of an undo."""

    owner: str = "arroyo-state compact"


def plan_undo(store: ObjectStore, paths: JobPaths, directory: JobDirectory) -> UndoPlan:
    """Plan to restore a stopped Arroyo job's original metadata. Writes nothing: this is the dry
    run.

    Args:
        directory: the source of the job's status.

    Raises:
        InputError, ConflictError, FormatError, ProtocolError: as `run_undo`.
    """
    return _what_changed(store, paths, directory).plan


def run_undo(
    store: ObjectStore,
    paths: JobPaths,
    directory: JobDirectory,
    options: UndoOptions | None = None,
    *,
    plan: UndoPlan | None = None,
) -> UndoOutcome:
    """Restore a stopped Arroyo job's metadata as it was before its last rewrite.

    All files that this metadata lists exist: a rewrite deletes none. If it is interrupted at any
    point, the job is restorable, and a second run completes the undo.

    Args:
        directory: the source of the job's status; asked again before each change.
        plan: restore exactly the objects of this plan by `plan_undo`; None = all changed objects.

    Raises:
        InputError: the job is not at rest, or no source reports its status.
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
        fresh = _fresh(paths, undoing.plan, plan)
        path = fresh.record
        if path is None:
            return UndoOutcome()
        snapshot = undoing.snapshot
        work = Unchanged(paths, directory, snapshot)
        for target, (current, before) in undoing.changed.items():
            work.check(held)
            overwrite(held, paths, target, current, before)
        reason = work.why_changed(held)
        if reason is not None:  # the record stays: gc keeps the files that the run may have loaded
            raise ConflictError(
                f"the job changed after its metadata was put back: {reason}",
                job=paths.root,
                epoch=snapshot.checkpoint.epoch,
                next_step="let it run, and verify its next epoch; no file was deleted, and after a "
                "compaction both lists hold the same rows",
            )
        forget_rewrites(held, paths, lambda name: name == path.name)
        delete_all(held, [paths.edits / path.name])
        return replace(UndoOutcome.of_plan(fresh), done=True)


def has_unfinished_edit(store: ObjectStore, paths: JobPaths) -> bool:
    """Whether an edit of the newest epoch was published in part: `run_undo` undoes it.

    Costs one LIST and one GET for a job that was never rewritten.

    Raises:
        NotFoundError, FormatError: the job was edited, and its newest epoch is missing or broken.
    """
    if not store.list_dir(paths.edits).objects and not read_pins(store, paths).rewrites:
        return False
    return bool(read_edits(store, paths, [ParquetBackend(store, paths).load()]).unfinished)


def changed_since(store: ObjectStore, paths: JobPaths, since_micros: int) -> RewriteRecord | None:
    """Return the newest change in place that was made since a time and not undone; None = none.

    Raises:
        FormatError, StorageError: its record is broken, or the store failed.
    """
    path = _newest_record(store, paths)
    if path is None:
        return None
    record = decode_rewrite_record(store.read(path), path)
    return record if record.created_at_micros >= since_micros else None


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
    """The job, the record that undoes its last rewrite, and the objects to restore: by path, the
    content now and before.
    """

    snapshot: JobSnapshot
    plan: UndoPlan
    changed: dict[StatePath, tuple[bytes, bytes]]


def _what_changed(store: ObjectStore, paths: JobPaths, directory: JobDirectory) -> _Undoing:
    snapshot = take_snapshot(store, paths, directory)
    path = _newest_record(store, paths)
    if path is None:
        return _Undoing(snapshot, UndoPlan(), {})
    record = decode_rewrite_record(store.read(path), path)
    check_may_undo(paths, snapshot, record.operation, record.epoch)
    _check_undoable(store, paths, snapshot, record)
    changed = _changed_since(store, paths, record)
    plan = UndoPlan(record=path, objects=tuple(changed), operation=record.operation)
    return _Undoing(snapshot, plan, changed)


def _newest_record(store: ObjectStore, paths: JobPaths) -> StatePath | None:
    names = {info.path.name for info in store.list_dir(paths.rewrites).objects}
    names.update(read_pins(store, paths).rewrites)
    return paths.rewrites / max(names) if names else None


def _check_undoable(
    store: ObjectStore, paths: JobPaths, snapshot: JobSnapshot, record: RewriteRecord
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


def _changed_since(
    store: ObjectStore, paths: JobPaths, record: RewriteRecord
) -> dict[StatePath, tuple[bytes, bytes]]:
    """Return the objects that still hold the rewritten content: it, and the content before."""
    changed = {}
    for path, before in record.before.items():
        current = store.read(path)
        if current == before:
            continue
        if hashlib.sha256(current).hexdigest() != record.after.get(path):
            raise ConflictError(
                "another process changed the metadata of the job after the rewrite",
                job=paths.root,
                path=path,
                next_step="keep the current metadata; nothing was restored",
            )
        changed[path] = (current, before)
    return changed
