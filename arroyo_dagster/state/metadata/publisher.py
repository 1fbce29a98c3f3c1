"""Make the next epoch of a managed job visible: the one place where an epoch is written whole.

What changes the metadata of an epoch that exists is in `operations.compaction.rewrite_publish`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from arroyo_dagster.errors import ConflictError
from arroyo_dagster.state.codec.derived import encode
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.metadata.lease import Leased, LeaseOptions, lease
from arroyo_dagster.state.metadata.reader import as_checkpoint, legacy_checkpoint
from arroyo_dagster.state.model.checkpoints import (
    Checkpoint,
    CheckpointState,
    CommitNote,
    LegacyCheckpoint,
    Manifest,
    OperatorCheckpoint,
    RunProgress,
)
from arroyo_dagster.state.model.clock import Clock
from arroyo_dagster.state.model.ids import Epoch, StatePath
from arroyo_dagster.state.model.layout import JobPaths, Layout
from arroyo_dagster.state.planning.restore.checkpoint import carry_operator
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


@dataclass(frozen=True, slots=True, kw_only=True)
class NextEpoch:
    """What the next epoch of a managed job is written with.

    Attributes:
        parent_ref: the epoch before; None for the first, and of no use in the legacy layout.
        needs_commit: whether a commit of the epoch follows.
    """

    epoch: Epoch
    min_epoch: Epoch
    parent_ref: StatePath | None
    operators: tuple[OperatorCheckpoint, ...]
    progress: RunProgress
    start_time_micros: int
    finish_time_micros: int
    needs_commit: bool


def publish_epoch(backend: ParquetBackend, new: NextEpoch) -> Checkpoint:
    """Write the metadata of the next epoch: from now on it exists.

    In the legacy layout every operator's object is written before the checkpoint's, which makes the
    epoch exist.

    Args:
        backend: it has started a worker generation; in the legacy layout it holds the lease of the
            job's writer.

    Raises:
        ConflictError: another run owns the epoch, or a newer run was started.
        ProtocolError: the parent is not ready.
    """
    state = CheckpointState.COMMITTING if new.needs_commit else CheckpointState.READY
    paths, generation = backend.paths, backend.generation
    if paths.pipeline is None or generation is None:
        if backend.exists(new.epoch):
            raise ConflictError(
                f"epoch {new.epoch} already exists: another run wrote it",
                job=paths.job,
                next_step="start the job again: it continues from that epoch; nothing was written",
            )
        for operator in new.operators:
            backend.write_operator_checkpoint_metadata(operator)
        head = LegacyCheckpoint(
            job=paths.job,
            epoch=new.epoch,
            min_epoch=new.min_epoch,
            start_time_micros=new.start_time_micros,
            finish_time_micros=new.finish_time_micros,
            operators=tuple(operator.operator for operator in new.operators),
            progress=new.progress,
        )
        path = backend.write_checkpoint_metadata(head)
        return legacy_checkpoint(head, new.operators, path, state)
    manifest = Manifest(
        pipeline=paths.pipeline,
        job=paths.job,
        worker_generation=generation,
        epoch=new.epoch,
        min_epoch=new.min_epoch,
        start_time_micros=new.start_time_micros,
        finish_time_micros=new.finish_time_micros,
        needs_commit=new.needs_commit,
        operators=new.operators,
        parent_ref=new.parent_ref,
        progress=new.progress,
    )
    return as_checkpoint(manifest, backend.publish(manifest).ref, state)


def publish_carried(
    backend: ParquetBackend,
    parent: Checkpoint,
    operators: Sequence[OperatorCheckpoint],
    *,
    epoch: Epoch,
    progress: RunProgress,
    min_epoch: Epoch,
    now_micros: int,
) -> Checkpoint:
    """Publish an epoch without new rows: of a compaction at rest, a rollback or a revision.

    Args:
        parent: the epoch before it in the lineage; its commit is finished.
        operators: with the tables that the epoch lists; their commit data is dropped, because it is
            committed already.
        now_micros: when the new epoch is finished.

    Raises:
        ConflictError, ProtocolError: as `publish_epoch`.
    """
    carried = tuple(carry_operator(operator, epoch) for operator in operators)
    if backend.paths.layout is Layout.LEGACY:
        backend.check_fence()
        if any(operator.needs_commit for operator in carried):
            # Nothing to commit: noted before the epoch exists, so that no start commits again.
            note = CommitNote(job=parent.job, epoch=epoch, finish_time_micros=now_micros)
            backend.store.put(backend.paths.commit_note(epoch), encode(note))
    new = NextEpoch(
        epoch=epoch,
        min_epoch=min_epoch,
        parent_ref=parent.ref,
        operators=carried,
        progress=progress,
        start_time_micros=now_micros,
        finish_time_micros=now_micros,
        needs_commit=False,
    )
    return publish_epoch(backend, new)
