"""ParquetBackend: loads, publishes and cleans up the metadata tree of one job, in either layout.

Source: crates/arroyo-state/src/lib.rs, `BackingStore`; crates/arroyo-state/src/parquet.rs;
crates/arroyo-state-protocol/src/{store,workflow}.rs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar, runtime_checkable

from arroyo_dagster.errors import (
    ArroyoStateError,
    ConflictError,
    FormatError,
    InputError,
    NotFoundError,
    ProtocolError,
)
from arroyo_dagster.state.codec import metadata, records
from arroyo_dagster.state.codec.derived import encode
from arroyo_dagster.state.metadata.expiry import JobExpiry
from arroyo_dagster.state.metadata.reader import BackendReader, as_checkpoint
from arroyo_dagster.state.metadata.worker_generation import GenerationWriter, create_once
from arroyo_dagster.state.model.checkpoints import (
    Checkpoint,
    CheckpointState,
    CommitNote,
    CommittedMarker,
    LegacyCheckpoint,
    Manifest,
    OperatorCheckpoint,
)
from arroyo_dagster.state.model.clock import Clock, wall_clock
from arroyo_dagster.state.model.compaction import CompactionRecord
from arroyo_dagster.state.model.garbage import ExpirePlan
from arroyo_dagster.state.model.ids import (
    Epoch,
    OperatorId,
    StatePath,
    WorkerGeneration,
)
from arroyo_dagster.state.model.layout import (
    JobPaths,
    Layout,
)
from arroyo_dagster.state.planning.restore import recovery
from arroyo_dagster.state.planning.restore.checkpoint import incomplete
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore

_T = TypeVar("_T")


@runtime_checkable
class BackingStore(Protocol):
    """The interface of a checkpoint store. Synchronous; one instance per job.

    Source: crates/arroyo-state/src/lib.rs, `BackingStore`.
    """

    def name(self) -> str:
        """Return the name of this kind of backend in Arroyo's metadata."""

    def prepare_checkpoint_load(self, epoch: Epoch) -> Checkpoint:
        """Prove that everything the epoch refers to exists and decodes, then return the epoch."""

    def load_checkpoint_metadata(self, epoch: Epoch) -> Checkpoint:
        """Read the metadata of one epoch."""

    def load_operator_metadata(
        self, operator: OperatorId, epoch: Epoch
    ) -> OperatorCheckpoint | None:
        """Read one operator at one epoch; None if it does not exist."""

    def write_operator_checkpoint_metadata(
        self, operator: OperatorCheckpoint, subtask_index: int | None = None
    ) -> StatePath:
        """Write an operator's metadata: merged, or of one subtask."""

    def write_checkpoint_metadata(self, checkpoint: Manifest | LegacyCheckpoint) -> StatePath:
        """Write the record that makes the epoch visible."""

    def cleanup_checkpoint(self, min_epoch: Epoch) -> ExpirePlan:
        """Delete the epochs below `min_epoch` and the files that only they list."""


@dataclass(frozen=True, slots=True)
class Started:
    """A started run, and the checkpoint from which it continues.

    Attributes:
        worker_generation: None in the legacy layout, which has none.
    """

    worker_generation: WorkerGeneration | None
    restored: Checkpoint | None
    replay_commit: bool


@dataclass(frozen=True, slots=True)
class Published:
    """A checkpoint that is visible and owns its epoch."""

    ref: StatePath
    manifest: Manifest


class ParquetBackend(BackendReader):
    """The metadata tree of one job.

    Args:
        store: contains the job's objects.
        paths: of the job; they determine the layout.
        generation: the worker generation to write as; None to read, or in the legacy layout.
        clock: microseconds since the Unix epoch.
    """

    def __init__(
        self,
        store: ObjectStore,
        paths: JobPaths,
        *,
        generation: WorkerGeneration | None = None,
        clock: Clock = wall_clock,
    ) -> None:
        super().__init__(store, paths)
        self.clock = clock
        self._own = GenerationWriter(self, generation, clock)
        self._written: Epoch | None = None

    @property
    def generation(self) -> WorkerGeneration | None:
        """The worker generation that this backend writes as; None to read, and in the legacy
        layout.
        """
        return self._own.number

    @generation.setter
    def generation(self, number: WorkerGeneration | None) -> None:
        self._own.number = number

    def name(self) -> str:
        """Return `parquet`, as in Arroyo's metadata."""
        return "parquet"

    # ---- starting --------------------------------------------------------------------------------

    def start(self) -> Started:
        """Start the next worker generation and choose the checkpoint from which it continues.

        The number is claimed by creating its generation manifest; a process that loses takes the
        next number. The fence is raised before the checkpoint is chosen: an epoch that an older
        writer has just published is found, and a later attempt of that writer is refused.

        In the legacy layout nothing is written, because it has no generations. The caller must be
        the only writer, and `store` its lease as such. The run continues from the newest epoch.

        Raises:
            ConflictError: a newer generation was started meanwhile.
            ProtocolError: the job cannot be continued; nothing but its generation and the fence was
                written.
            InputError: legacy layout, and no lease is held.
        """
        if self.paths.layout is Layout.LEGACY:
            return self._start_legacy()
        generation = self._own.take()
        self.check_fence()
        resolved = self._own.resolve()
        if isinstance(resolved, recovery.CannotStart):
            self.check_fence()
            raise ProtocolError(
                f"the job cannot be continued: {resolved.reason}",
                job=self.paths.job,
                path=resolved.ref,
                next_step="check it with `arroyo-state epochs`; nothing was deleted",
            )
        self.check_fence()
        if isinstance(resolved, recovery.StartEmpty):
            return Started(generation, None, False)
        self._own.continue_from(resolved.ref)
        state = CheckpointState.COMMITTING if resolved.replay_commit else CheckpointState.READY
        restored = as_checkpoint(resolved.manifest, resolved.ref, state)
        return Started(generation, restored, resolved.replay_commit)

    def start_from(self, base_ref: StatePath) -> None:
        """Start the next worker generation from a checkpoint that a user chose.

        Every older run is fenced. No record refers to this generation before it publishes: if it
        ends before that, the next start restores what it would have restored without it.

        Raises:
            ConflictError: a newer generation was started meanwhile.
        """
        self._protocol_only()
        self._own.take(base_ref)
        self.check_fence()

    def _start_legacy(self) -> Started:
        self._own.sole_writer().check()
        epochs = self.every_epoch()
        restored = self._load_legacy(epochs[-1]) if epochs else None
        committing = restored is not None and restored.state is CheckpointState.COMMITTING
        return Started(None, restored, committing)

    def check_fence(self) -> None:
        """Check that this worker generation is still the newest, and raise the fence to it if it is
        lower.

        Raises:
            ConflictError: a newer generation was started; in the legacy layout: the lease is lost.
                Nothing was deleted.
        """
        self._own.check_fence()

    @contextmanager
    def unless_fenced(self) -> Iterator[None]:
        """Re-raise an error as ConflictError if a newer run has fenced this one.

        The newer run may have expired objects that this one was about to read.
        """
        try:
            yield
        except (NotFoundError, FormatError, ProtocolError):
            self.check_fence()
            raise

    # ---- writing ---------------------------------------------------------------------------------

    def write_operator_checkpoint_metadata(
        self, operator: OperatorCheckpoint, subtask_index: int | None = None
    ) -> StatePath:
        """Write an operator's metadata, and read it back.

        Args:
            subtask_index: write the subtask's metadata, which marks it as done, beside the
                operators' directories; None writes the merged metadata of the operator.

        Raises:
            ProtocolError: it reads back different.
        """
        if subtask_index is None:
            path = self.paths.operator_metadata(operator.operator, operator.epoch, self.generation)
        else:
            path = self.paths.subtask_metadata(
                operator.operator, subtask_index, operator.epoch, self.generation
            )
        data = metadata.encode_operator(operator)
        self.store.put(path, data)
        if metadata.decode_operator(self.store.read(path), path) != operator:
            raise ProtocolError("metadata that was written reads back different", path=path)
        return path

    def write_checkpoint_metadata(self, checkpoint: Manifest | LegacyCheckpoint) -> StatePath:
        """Make the epoch visible by writing its last object.

        In the legacy layout every operator's metadata must exist before. An existing epoch may be
        written again only with another `min_epoch`, as Arroyo does. A real Arroyo restores the
        epoch that its own database names: it needs all these objects and no others.

        Raises:
            ConflictError: another checkpoint owns the epoch, or a newer generation was started.
            ProtocolError: legacy layout, and an operator's metadata is missing or of another epoch.
        """
        if not isinstance(checkpoint, LegacyCheckpoint):
            return self.publish(checkpoint).ref
        if self.paths.layout is not Layout.LEGACY:
            raise InputError("a legacy checkpoint for a job of the protocol layout")
        path = write_legacy_checkpoint(self, checkpoint)
        self._written = checkpoint.epoch
        return path

    def publish(self, manifest: Manifest) -> Published:
        """Publish an epoch: manifest, hint, epoch record, in this order.

        Raises:
            ConflictError: another checkpoint owns the epoch, another manifest exists at its path,
                or a newer generation was started. Nothing was deleted.
            ProtocolError: the parent is not ready.

        Source: crates/arroyo-state-protocol/src/workflow.rs, publication.
        """
        self._protocol_only()
        ref = self.paths.manifest(manifest.worker_generation, manifest.epoch)
        self._own.check_manifest(manifest)
        self.check_fence()
        create_once(self.store, ref, metadata.encode_manifest(manifest))
        ready = self.objects.answer(
            lambda facts: recovery.parent_ready(self.paths, manifest, facts)
        )
        if not ready:
            self.check_fence()
            raise ProtocolError(
                "the parent of the new checkpoint is not ready",
                job=self.paths.job,
                epoch=manifest.epoch,
                parent=manifest.parent_ref,
                next_step="start the job again: it finishes the parent's commit first",
            )
        self._own.publish(ref)
        record = recovery.claim_of(ref, manifest, self.clock())
        path = self.paths.epoch_record(manifest.epoch)
        if not self.store.create(path, encode(record)):
            owner = self.objects.read(path, records.decode_epoch_record)
            if owner.checkpoint_ref != ref:
                raise ConflictError(
                    f"epoch {manifest.epoch} belongs to another checkpoint",
                    job=self.paths.job,
                    owner=owner.checkpoint_ref,
                    managed=ref,
                    # An older run published just before it was fenced: a new start continues from
                    # its epoch. A newer owner continues by itself.
                    retryable=owner.worker_generation < manifest.worker_generation,
                    next_step="start it again: it continues from the existing epoch"
                    if owner.worker_generation < manifest.worker_generation
                    else "let the other run continue; this run stops and deletes nothing",
                )
        # A run that was fenced meanwhile may have created an epoch that had already existed and
        # expired. It must not commit; if the epoch is valid, a newer run finds it and finishes its
        # commit.
        self.check_fence()
        self._written = manifest.epoch
        return Published(ref, manifest)

    def mark_committed(self, checkpoint: Checkpoint) -> None:
        """Write the commit marker: both phases of the epoch's commit are done.

        In the legacy layout, where Arroyo keeps that in its database, a note of this package
        replaces the marker.
        """
        if self.paths.layout is Layout.LEGACY:
            note = CommitNote(
                job=checkpoint.job,
                epoch=checkpoint.epoch,
                finish_time_micros=checkpoint.finish_time_micros,
            )
            path = self.paths.commit_note(checkpoint.epoch)
            self.store.put(path, encode(note))
            return
        assert checkpoint.worker_generation is not None
        ref = checkpoint.ref
        marker = CommittedMarker(
            pipeline=self._own.pipeline,
            job=checkpoint.job,
            epoch=checkpoint.epoch,
            checkpoint_worker_generation=checkpoint.worker_generation,
            writer_worker_generation=self._own.taken,
            checkpoint_ref=ref,
        )
        path = recovery.marker_path(ref)
        if self.store.create(path, encode(marker)):
            return
        stored = self.objects.read(path, records.decode_committed_marker)
        writer = marker.writer_worker_generation
        if replace(stored, writer_worker_generation=writer, unknown=b"") != marker:
            raise ProtocolError("the commit marker belongs to another checkpoint", path=path)

    def write_compaction_record(self, record: CompactionRecord, path: StatePath) -> None:
        """Write a compaction record, which the job's writer adopts at its next checkpoint.

        Args:
            path: of `JobPaths.compaction_record`.
        """
        self._protocol_only()
        self.store.put(path, encode(record))

    # ---- cleaning up -----------------------------------------------------------------------------

    def cleanup_checkpoint(self, min_epoch: Epoch) -> ExpirePlan:
        """Delete the epochs below `min_epoch`: data, then records, then metadata, oldest first.

        Executes the expire plan of `planning.gc.expiry`, without logic of its own. The plan may
        keep more than `min_epoch` requires, for example after a rollback. If it is interrupted
        halfway, the next call finishes it. Epochs that are pinned or quarantined meanwhile are
        kept. While a pinned epoch does not exist, as during an undelete, nothing is deleted.

        Raises:
            ProtocolError: `min_epoch` is newer than the newest checkpoint, or a kept epoch is
                incomplete or cannot be read; nothing was deleted.
            NotFoundError, FormatError: an object of an epoch that was not rolled back is missing or
                broken; nothing was deleted.
            StorageError: objects could not be deleted; what refers to them still exists.
        """
        return JobExpiry(self, self.clock, self._written).run(min_epoch)

    def expire_plan(self, min_epoch: Epoch) -> ExpirePlan:
        """Plan the deletion of the epochs below `min_epoch`. Errors as `cleanup_checkpoint`."""
        return JobExpiry(self, self.clock, self._written).plan(min_epoch)


StateBackend = ParquetBackend
"""The backend in which the runtime keeps its state, under the name that Arroyo uses. Source:
crates/arroyo-state/src/lib.rs, `StateBackend`.
"""


# ---- the object that makes an epoch of the legacy layout visible, written ------------------------


def write_legacy_checkpoint(reader: BackendReader, checkpoint: LegacyCheckpoint) -> StatePath:
    """Make an epoch of the legacy layout visible, after the metadata of its operators.

    An epoch that exists may be written again with another `min_epoch` only, as Arroyo does.

    Raises:
        ConflictError: another checkpoint owns the epoch.
        ProtocolError: an operator's metadata is missing or of another epoch.
    """
    _check_complete(reader, checkpoint)
    path = reader.paths.legacy_metadata(checkpoint.epoch)
    if not reader.store.create(path, metadata.encode_legacy_checkpoint(checkpoint)):
        stored = reader.objects.read(path, metadata.decode_legacy_checkpoint)
        if replace(stored, min_epoch=checkpoint.min_epoch) != checkpoint:
            raise ConflictError(
                f"epoch {checkpoint.epoch} belongs to another checkpoint",
                job=reader.paths.job,
                path=path,
                next_step="start the job again: it continues from the existing epoch",
            )
        if stored != checkpoint:
            reader.store.put(path, metadata.encode_legacy_checkpoint(checkpoint))
    return path


def _check_complete(reader: BackendReader, checkpoint: LegacyCheckpoint) -> None:
    names = checkpoint.operators

    def load(name: OperatorId) -> OperatorCheckpoint | ArroyoStateError | None:
        try:
            return reader.load_operator_metadata(name, checkpoint.epoch)
        except (FormatError, ProtocolError) as error:
            return error

    for name, operator in zip(names, concurrently(load, names), strict=True):
        if isinstance(operator, ArroyoStateError):
            problem: str | None = operator.message
        else:
            problem = incomplete(checkpoint, name, operator)
        if problem is not None:
            raise ProtocolError(
                f"the epoch would not be restorable: {problem}",
                job=reader.paths.job,
                epoch=checkpoint.epoch,
                operator=name,
                next_step="write the merged metadata of every operator first",
            )
