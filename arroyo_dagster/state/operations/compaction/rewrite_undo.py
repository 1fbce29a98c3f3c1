"""A rewrite of Arroyo's metadata, put back."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from arroyo_dagster.errors import (
    ConflictError,
    FormatError,
    ProtocolError,
)
from arroyo_dagster.state.codec.maintenance_records import (
    decode_rewrite_record,
)
from arroyo_dagster.state.metadata.lease import lease
from arroyo_dagster.state.model.clock import Clock, wall_clock
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.rewrite import RewriteRecord
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
from arroyo_dagster.state.operations.compaction.rewrite_preconditions import (
    JobSnapshot,
    Unchanged,
    check_may,
    overwrite,
    take_snapshot,
)
from arroyo_dagster.state.operations.gc.pins import forget_rewrites, read_pins
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore


@dataclass(frozen=True, slots=True, kw_only=True)
class UndoOutcome:
    """What was put back.

    Attributes:
        record: what said how it was; None if there was nothing to put back.
        objects: the metadata objects that were put back, or would be.
        done: False for a dry run.
    """

    record: StatePath | None = None
    objects: tuple[StatePath, ...] = ()
    done: bool = False


def undo_rewrite(
    store: ObjectStore,
    paths: JobPaths,
    directory: JobDirectory,
    *,
    owner: str = "arroyo-state compact",
    dry_run: bool = False,
    lease_wait_seconds: float = 0.0,
    clock: Clock = wall_clock,
    sleep: Callable[[float], None] = time.sleep,
) -> UndoOutcome:
    """Put the metadata of a stopped job of Arroyo's back as it was before its last rewrite.

    The files it then lists are all there: a rewrite deletes none. Stopped anywhere, the job is
    restorable; run again, it goes on.

    Raises:
        InputError: the job is not at rest, or nobody says so.
        ConflictError: the job was started since, or somebody changed the metadata.
        FormatError: a file that the old metadata lists is gone, or the record is broken.
        ProtocolError: the record is of another job, from which this one was copied.
    """
    snapshot, path, changed = _what_changed(store, paths, directory)
    if dry_run or path is None:
        return UndoOutcome(record=path, objects=tuple(changed))
    with lease(
        store, paths, owner, wait_seconds=lease_wait_seconds, clock=clock, sleep=sleep
    ) as held:
        snapshot, path, changed = _what_changed(held, paths, directory)
        if path is None:
            return UndoOutcome()
        work = Unchanged(paths, directory, snapshot)
        for at, (found, before) in changed.items():
            work.check(held)
            overwrite(held, paths, at, found, before)
        work.check(held, published=True)
        forget_rewrites(held, paths, lambda name: name == path.name)
        return UndoOutcome(record=path, objects=tuple(changed), done=True)


def _what_changed(
    store: ObjectStore, paths: JobPaths, directory: JobDirectory
) -> tuple[JobSnapshot, StatePath | None, dict[StatePath, tuple[bytes, bytes]]]:
    """The job, the record that undoes its last rewrite, and what that would put back."""
    snapshot = take_snapshot(store, paths, directory)
    check_may(paths, snapshot)
    path = _newest_record(store, paths)
    if path is None:
        return snapshot, None, {}
    record = decode_rewrite_record(store.read(path), path)
    _check_undoable(store, paths, snapshot, record)
    return snapshot, path, _changed_since(store, paths, record)


def _newest_record(store: ObjectStore, paths: JobPaths) -> StatePath | None:
    names = {info.path.name for info in store.list_dir(paths.rewrites).objects}
    names.update(read_pins(store, paths).rewrites)
    return paths.rewrites / max(names) if names else None


def _check_undoable(
    store: ObjectStore, paths: JobPaths, snapshot: JobSnapshot, record: RewriteRecord
) -> None:
    others = [path for path in record.before if not paths.contains(path)]
    if others:
        # A job that was copied under another name brings the record of the original's objects.
        raise ProtocolError(
            "the rewrite belongs to another job: its record names objects outside of this one",
            job=paths.root,
            found=others[0],
            next_step="undo it in the original job, of which this one is a copy; nothing was "
            "restored",
        )
    now = (snapshot.checkpoint.epoch, snapshot.checkpoint.worker_generation)
    # A run that was started since, and failed before its first checkpoint, has left no trace.
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
            next_step="keep the rewritten state: it holds the same rows",
        )


def _changed_since(
    store: ObjectStore, paths: JobPaths, record: RewriteRecord
) -> dict[StatePath, tuple[bytes, bytes]]:
    """Objects that are as we wrote them: what they hold, and what they held before."""
    changed = {}
    for path, before in record.before.items():
        found = store.read(path)
        if found == before:
            continue
        if hashlib.sha256(found).hexdigest() != record.after.get(path):
            raise ConflictError(
                "another process changed the metadata of the job after the rewrite",
                job=paths.root,
                path=path,
                next_step="keep the current metadata; nothing was restored",
            )
        changed[path] = (found, before)
    return changed
