"""Publish a change: overwrite the metadata of one epoch of an Arroyo job in place."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from arroyo_dagster.errors import ArroyoStateError, ConflictError, FormatError, ProtocolError
from arroyo_dagster.state.codec import metadata
from arroyo_dagster.state.codec.derived import encode
from arroyo_dagster.state.metadata.interrupts import uninterrupted
from arroyo_dagster.state.metadata.lease import Leased
from arroyo_dagster.state.model.changes import ChangeKind, ChangeRecord, JobHead
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.operations.compaction.rewrite_preconditions import (
    JobSnapshot,
    Unchanged,
    check_not_cancelled,
    check_quiet,
    check_restorable,
    overwrite,
)
from arroyo_dagster.state.operations.gc.pins import forget_changes, keep_change
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.failures import delete_all
from arroyo_dagster.state.storage.wrappers import Extended


def change_record(
    held: Leased,
    checkpoint: Checkpoint,
    before: Mapping[StatePath, bytes | None],
    after: Mapping[StatePath, bytes],
    **fields: Any,
) -> ChangeRecord:
    """Return the record of a change of one epoch's metadata in place, under the lease.

    Args:
        before: the bytes of each metadata object that changes; None = it is missing.
        after: the bytes that they get, in the order in which they are written.
        fields: others of the record. Without a head, the epoch is the newest one of the job.
    """
    newest = JobHead(epoch=checkpoint.epoch, worker_generation=checkpoint.worker_generation)
    return ChangeRecord(
        pipeline=checkpoint.pipeline,
        job=checkpoint.job,
        epoch=checkpoint.epoch,
        worker_generation=checkpoint.worker_generation,
        finish_time_micros=checkpoint.finish_time_micros,
        token=held.lease.token,
        objects={path: (_sha256(before[path]), _hex(data)) for path, data in after.items()},
        before=before,
        **{"head": newest, **fields},
    )


def _sha256(data: bytes | None) -> str | None:
    return None if data is None else _hex(data)


def _hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def publish_change(
    held: Leased,
    work: Unchanged,
    change: ChangeRecord,
    after: Mapping[StatePath, bytes],
    verify_level: int,
    on_published: Callable[[StatePath], None] = lambda path: None,
) -> StatePath:
    """Write metadata of one epoch, and return the record that undoes it.

    In this order: nothing of the job has changed for a while; the record of the change exists; the
    epoch as it would be passes verification; the record is pinned; each object is written by one
    put, with the job's condition checked before and after. A rebuild is continued by the next call
    where it is interrupted; another change is undone.

    Args:
        after: the bytes that the objects get, in the order in which they are written.
        verify_level: of the epoch as it would be published.
        on_published: called with the record, before an interrupt can arrive.

    Raises:
        ConflictError: the job changed or was started meanwhile.
        ProtocolError: the epoch as it would be does not pass verification; nothing was published.
    """
    paths, checkpoint = work.paths, work.snapshot.checkpoint
    check_quiet(held, paths, work.snapshot)
    path = paths.changes / change.name
    held.put(path, encode(change))
    try:
        check_restorable(Extended(held, after), paths, checkpoint.epoch, verify_level)
    except ProtocolError:
        delete_all(held, [path])
        raise
    in_place = change.kind is not ChangeKind.REBUILD
    if in_place:
        keep_change(held, paths, path.name)
    with uninterrupted():
        _write_all(held, work, change.before, after, put_back=in_place)
        on_published(path)
    if in_place:  # changes of earlier epochs cannot be undone any more
        mine = f"{checkpoint.epoch:07}-"
        forget_changes(held, paths, lambda name: not name.startswith(mine))
    return path


def _write_all(
    held: Leased,
    work: Unchanged,
    before: Mapping[StatePath, bytes | None],
    after: Mapping[StatePath, bytes],
    *,
    put_back: bool,
) -> None:
    """Write metadata, and put it back if the job was started meanwhile.

    A run that loaded the old lists keeps their files in its next epochs. Arroyo's cleanup compares
    the epochs before the rewritten one with the lists that are stored there: with the new ones
    stored, it would delete those files. The old lists are safe for every run, because no file was
    deleted.
    """
    view = Extended(held, after)  # our own objects are no change of the job
    try:
        for path, data in after.items():
            check_not_cancelled(work.paths, work.cancelled)
            work.check(view)
            old = before[path]
            if old is not None:
                overwrite(held, work.paths, path, old, data)
            elif not held.create(path, data) and held.read(path) != data:
                raise work.changed("another process wrote the missing metadata")
        work.check(view)
    except ArroyoStateError as error:
        try:
            reason = work.why_changed(view) if put_back else None
        except ArroyoStateError:
            raise error from None
        if reason is None:
            raise
        raise _put_back(held, work, after, reason) from error


def _put_back(
    held: Leased, work: Unchanged, objects: Mapping[StatePath, bytes], reason: str
) -> ConflictError:
    """Store the original metadata again, and return the error to end with."""
    before = work.snapshot.objects
    try:
        _check_files_left(held, work)
        for path in reversed(list(objects)):
            if held.read(path) == objects[path]:
                overwrite(held, work.paths, path, objects[path], before[path])
    except ArroyoStateError as error:
        return ConflictError(
            f"the job changed while it was rewritten: {reason}; its metadata could not be put "
            f"back: {error.message}",
            job=work.paths.root,
            path=error.facts.get("path"),
            next_step="verify the job's newest epoch until epoch "
            f"{work.snapshot.checkpoint.epoch} has expired: Arroyo's cleanup may delete files that "
            "a run with the old lists still uses; keep a copy of the job until then",
        )
    return work.changed(reason)


def _check_files_left(held: Leased, work: Unchanged) -> None:
    """Check that every file of the original lists exists."""
    paths = work.snapshot.checkpoint.paths
    gone = [
        path for path, info in zip(paths, concurrently(held.head, paths), strict=True) if not info
    ]
    if gone:
        raise FormatError(f"{len(gone)} files of its original lists are missing", path=gone[0])


def encoded_objects(snapshot: JobSnapshot, after: Checkpoint) -> dict[StatePath, bytes]:
    """Return the metadata objects to overwrite, with their new bytes."""
    if after == snapshot.checkpoint:
        return {}
    ref = snapshot.checkpoint.ref
    if snapshot.checkpoint.worker_generation is not None:
        manifest = metadata.decode_manifest(snapshot.objects[ref], ref)
        new = replace(manifest, operators=after.operators)
        data = metadata.encode_manifest(new)
        _check_reads(metadata.decode_manifest(data, ref) == new, ref)
        return {ref: data}
    objects = {}
    before = zip(snapshot.objects, snapshot.checkpoint.operators, after.operators, strict=True)
    for path, old, changed in before:
        if old != changed:
            objects[path] = metadata.encode_operator(changed)
            _check_reads(metadata.decode_operator(objects[path], path) == changed, path)
    return objects


def _check_reads(same: bool, path: StatePath) -> None:
    if not same:
        raise ProtocolError("metadata would read back different from what was intended", path=path)
