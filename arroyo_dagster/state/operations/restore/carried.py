"""Publish an epoch without new rows, in either layout: of a rollback, or of a revision."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from arroyo_dagster.state.codec.derived import encode
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.metadata.lease import Leased, LeaseOptions, lease
from arroyo_dagster.state.model.checkpoints import (
    Checkpoint,
    CommitNote,
    LegacyCheckpoint,
    OperatorCheckpoint,
    RunProgress,
)
from arroyo_dagster.state.model.clock import Clock
from arroyo_dagster.state.model.ids import Epoch, StatePath
from arroyo_dagster.state.model.layout import JobPaths, Layout
from arroyo_dagster.state.planning.restore.checkpoint import carried_manifest, carry_operator
from arroyo_dagster.state.storage.store import ObjectStore


@contextlib.contextmanager
def writer_lease(store: ObjectStore, paths: JobPaths, owner: str, clock: Clock) -> Iterator[Leased]:
    """Hold the lease of the job's maintenance, and in the legacy layout that of its writer.

    Raises:
        LeaseHeldError: another process maintains the job, or a run of it is alive.
    """
    with contextlib.ExitStack() as stack:
        leased = stack.enter_context(lease(store, paths, owner, LeaseOptions(clock=clock)))
        if paths.layout is Layout.LEGACY:
            leased = stack.enter_context(
                lease(leased, paths, owner, LeaseOptions(directory=paths.writers, clock=clock))
            )
        yield leased


def publish_carried(
    backend: ParquetBackend,
    parent: Checkpoint,
    operators: Sequence[OperatorCheckpoint],
    *,
    epoch: Epoch,
    progress: RunProgress,
    min_epoch: Epoch,
    now_micros: int,
) -> StatePath:
    """Publish an epoch with the tables of `operators`, and return the object that makes it exist.

    Args:
        backend: it has started a worker generation; in the legacy layout it holds the lease of the
            job's writer.
        parent: the epoch before it in the lineage; its commit is finished.
        now_micros: when the new epoch is finished.

    Raises:
        ConflictError, ProtocolError: as `ParquetBackend.publish`.
    """
    if backend.paths.layout is Layout.LEGACY:
        return _publish_legacy(backend, parent, operators, epoch, progress, min_epoch, now_micros)
    assert backend.generation is not None
    manifest = carried_manifest(
        parent,
        operators,
        worker_generation=backend.generation,
        epoch=epoch,
        progress=progress,
        now_micros=now_micros,
        min_epoch=min_epoch,
    )
    return backend.publish(manifest).ref


def _publish_legacy(
    backend: ParquetBackend,
    parent: Checkpoint,
    operators: Sequence[OperatorCheckpoint],
    epoch: Epoch,
    progress: RunProgress,
    min_epoch: Epoch,
    now: int,
) -> StatePath:
    """Write the operators' metadata, then the checkpoint's, which makes the epoch exist."""
    backend.check_fence()
    carried = tuple(carry_operator(operator, epoch) for operator in operators)
    if any(operator.needs_commit for operator in carried):
        # Nothing to commit: noted before the epoch exists, so that no start commits again.
        note = CommitNote(job=parent.job, epoch=epoch, finish_time_micros=now)
        backend.store.put(backend.paths.commit_note(epoch), encode(note))
    for operator in carried:
        backend.write_operator_checkpoint_metadata(operator)
    head = LegacyCheckpoint(
        job=parent.job,
        epoch=epoch,
        min_epoch=min_epoch,
        start_time_micros=now,
        finish_time_micros=now,
        operators=tuple(operator.operator for operator in carried),
        progress=progress,
    )
    return backend.write_checkpoint_metadata(head)
