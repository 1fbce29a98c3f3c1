"""ParquetBackend: loads, publishes and cleans up the metadata tree of one job, in either layout.

Source: crates/arroyo-state/src/lib.rs, `BackingStore`; crates/arroyo-state/src/parquet.rs;
crates/arroyo-state-protocol/src/{store,workflow}.rs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Self

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
from arroyo_dagster.state.codec.references import manifest_references, operator_references
from arroyo_dagster.state.metadata.backing_store import NextEpoch, Published, Started
from arroyo_dagster.state.metadata.expiry import ExpiringTree
from arroyo_dagster.state.metadata.lease import Leased, LeaseOptions, lease
from arroyo_dagster.state.metadata.objects import missing_epoch
from arroyo_dagster.state.metadata.tree import (
    LegacyTree,
    as_checkpoint,
    legacy_checkpoint,
    legacy_head,
)
from arroyo_dagster.state.metadata.worker_generation import GenerationWriter, create_once
from arroyo_dagster.state.model.checkpoints import (
    Checkpoint,
    CheckpointState,
    CommitNote,
    CommittedMarker,
    LegacyCheckpoint,
    Manifest,
    OperatorCheckpoint,
    RunProgress,
)
from arroyo_dagster.state.model.clock import Clock, wall_clock
from arroyo_dagster.state.model.compaction import CompactionRecord
from arroyo_dagster.state.model.garbage import EpochRoot
from arroyo_dagster.state.model.ids import Epoch, OperatorId, StatePath, WorkerGeneration
from arroyo_dagster.state.model.layout import JobPaths, Layout
from arroyo_dagster.state.planning.gc.epoch_roots import (
    check_inside_job,
    damaged_legacy_root,
    epoch_root,
    legacy_root,
    rolled_back_root,
    unreadable_objects,
    unreadable_root,
)
from arroyo_dagster.state.planning.restore import recovery
from arroyo_dagster.state.planning.restore.checkpoint import carry_operator, incomplete
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore


class ParquetBackend(ExpiringTree):
    """The metadata tree of one job. `ParquetBackend(store, paths)` returns the form of the job's
    layout.

    Args:
        store: contains the job's objects.
        paths: of the job; they determine the layout.
        generation: the worker generation to write as; None to read, or in the legacy layout.
        clock: microseconds since the Unix epoch.
    """

    @classmethod
    def _form(cls, layout: Layout) -> type[Self]:
        return LegacyBackend if layout is Layout.LEGACY else ProtocolBackend  # type: ignore[return-value]

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
        self.generation = generation

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
        raise NotImplementedError

    def start_from(self, base_ref: StatePath) -> None:
        """Start the next worker generation from a checkpoint that a user chose.

        Every older run is fenced. No record refers to this generation before it publishes: if it
        ends before that, the next start restores what it would have restored without it.

        Raises:
            ConflictError: a newer generation was started meanwhile.
            InputError: legacy layout.
        """
        raise self._no_generations()

    def check_fence(self) -> None:
        """Check that this worker generation is still the newest, and raise the fence to it if it is
        lower.

        Raises:
            ConflictError: a newer generation was started; in the legacy layout: the lease is lost.
                Nothing was deleted.
        """
        raise NotImplementedError

    @contextlib.contextmanager
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
            InputError: the checkpoint is of the other layout.
        """
        raise NotImplementedError

    def publish(self, manifest: Manifest) -> Published:
        """Publish an epoch: manifest, hint, epoch record, in this order.

        Raises:
            ConflictError: another checkpoint owns the epoch, another manifest exists at its path,
                or a newer generation was started. Nothing was deleted.
            ProtocolError: the parent is not ready.
            InputError: legacy layout.

        Source: crates/arroyo-state-protocol/src/workflow.rs, publication.
        """
        raise self._no_generations()

    def publish_next(self, new: NextEpoch) -> Checkpoint:
        """Write the metadata of the next epoch: from now on it exists.

        In the legacy layout every operator's object is written before the checkpoint's, which makes
        the epoch exist. A worker generation was started; in the legacy layout the store holds the
        lease of the job's writer.

        Raises:
            ConflictError: another run owns the epoch, or a newer run was started.
            ProtocolError: the parent is not ready.
        """
        raise NotImplementedError

    def publish_carried(
        self,
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
            operators: with the tables that the epoch lists; their commit data is dropped, because
                it is committed already.
            now_micros: when the new epoch is finished.

        Raises:
            ConflictError, ProtocolError: as `publish_next`.
        """
        new = NextEpoch(
            epoch=epoch,
            min_epoch=min_epoch,
            parent_ref=parent.ref,
            operators=tuple(carry_operator(operator, epoch) for operator in operators),
            progress=progress,
            start_time_micros=now_micros,
            finish_time_micros=now_micros,
            needs_commit=False,
        )
        self._note_carried(new)
        return self.publish_next(new)

    def _note_carried(self, new: NextEpoch) -> None:
        """Write what says that an epoch without new rows has nothing to commit."""

    def mark_committed(self, checkpoint: Checkpoint) -> None:
        """Write the commit marker: both phases of the epoch's commit are done.

        In the legacy layout, where Arroyo keeps that in its database, a note of this package
        replaces the marker.
        """
        raise NotImplementedError

    def write_compaction_record(self, record: CompactionRecord, path: StatePath) -> None:
        """Write a compaction record, which the job's writer adopts at its next checkpoint.

        Args:
            path: of `JobPaths.compaction_record`.

        Raises:
            InputError: legacy layout.
        """
        raise self._no_generations()


class LegacyBackend(LegacyTree, ParquetBackend):
    """Writes a job of the legacy layout."""

    def start(self) -> Started:
        """Continue from the newest epoch. Writes nothing."""
        self.check_fence()
        epochs = self.every_epoch()
        restored = self.load_checkpoint_metadata(epochs[-1]) if epochs else None
        committing = restored is not None and restored.state is CheckpointState.COMMITTING
        return Started(None, restored, committing)

    def check_fence(self) -> None:
        """Check that the store still holds the lease of the job's only writer."""
        store = self.store
        if not isinstance(store, Leased) or store.lease.path.parent != self.paths.writers:
            raise InputError(
                "worker generations exist in the protocol layout only; in the legacy layout a "
                "writer needs the lease on the job",
                job=self.paths.job,
                next_step="open the backend on `lease(store, paths, owner, "
                "LeaseOptions(directory=paths.writers))`, or use the protocol layout",
            )
        store.check()

    def write_checkpoint_metadata(self, checkpoint: Manifest | LegacyCheckpoint) -> StatePath:
        """Write the checkpoint's own object, after the metadata of its operators."""
        if not isinstance(checkpoint, LegacyCheckpoint):
            raise self._no_generations()
        self._check_complete(checkpoint)
        path = self.paths.head(checkpoint.epoch)
        data = metadata.encode_legacy_checkpoint(checkpoint)
        if not self.store.create(path, data):
            stored = self.objects.read(path, metadata.decode_legacy_checkpoint)
            if replace(stored, min_epoch=checkpoint.min_epoch) != checkpoint:
                raise ConflictError(
                    f"epoch {checkpoint.epoch} belongs to another checkpoint",
                    job=self.paths.job,
                    path=path,
                    next_step="start the job again: it continues from the existing epoch",
                )
            if stored != checkpoint:
                self.store.put(path, data)
        self._written = checkpoint.epoch
        return path

    def _check_complete(self, checkpoint: LegacyCheckpoint) -> None:
        names = checkpoint.operators

        def load(name: OperatorId) -> OperatorCheckpoint | ArroyoStateError | None:
            try:
                return self.load_operator_metadata(name, checkpoint.epoch)
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
                    job=self.paths.job,
                    epoch=checkpoint.epoch,
                    operator=name,
                    next_step="write the merged metadata of every operator first",
                )

    def publish_next(self, new: NextEpoch) -> Checkpoint:
        """Write every operator's object, then the checkpoint's."""
        if self.exists(new.epoch):
            raise ConflictError(
                f"epoch {new.epoch} already exists: another run wrote it",
                job=self.paths.job,
                next_step="start the job again: it continues from that epoch; nothing was written",
            )
        for operator in new.operators:
            self.write_operator_checkpoint_metadata(operator)
        head = legacy_head(self.paths.job, new)
        return legacy_checkpoint(
            head, new.operators, self.write_checkpoint_metadata(head), new.state
        )

    def _note_carried(self, new: NextEpoch) -> None:
        """Note before the epoch exists that it is committed, so that no start commits again."""
        self.check_fence()
        if any(operator.needs_commit for operator in new.operators):
            self._put_note(new)

    def mark_committed(self, checkpoint: Checkpoint) -> None:
        """Write a note of this package, as Arroyo keeps that in its database."""
        self._put_note(checkpoint)

    def _put_note(self, epoch: Checkpoint | NextEpoch) -> None:
        note = CommitNote(
            job=self.paths.job, epoch=epoch.epoch, finish_time_micros=epoch.finish_time_micros
        )
        self.store.put(self.paths.commit_note(epoch.epoch), encode(note))

    # ---- cleaning up -----------------------------------------------------------------------------

    def root(self, epoch: Epoch) -> EpochRoot:
        """Read which data files the operators of an epoch refer to."""
        head = self.objects.read(
            self.paths.head(epoch), metadata.decode_legacy_checkpoint, missing_epoch(epoch)
        )
        names = [self.paths.operator_metadata(name, epoch) for name in head.operators]
        read = concurrently(lambda name: self.objects.optional(name, operator_references), names)
        return legacy_root(self.paths, head, dict(zip(head.operators, read, strict=True)))

    def rolled_back_root(self, root: EpochRoot, head: EpochRoot) -> EpochRoot:
        """Mark an abandoned epoch; as unreadable if metadata of an operator is missing."""
        return rolled_back_root(self.paths, root, head)

    def unreadable_root(self, epoch: Epoch, reason: str, head: EpochRoot) -> EpochRoot:
        """Name the objects by the operators of the newest epoch."""
        return damaged_legacy_root(self.paths, epoch, reason, head)

    def note_min_epoch(self, min_epoch: Epoch) -> None:
        """Raise `min_epoch` in the newest epoch, as Arroyo's cleanup does."""
        newest = self.paths.head(self.every_epoch()[-1])
        head = self.objects.read(newest, metadata.decode_legacy_checkpoint)
        if head.min_epoch < min_epoch:
            changed = replace(head, min_epoch=min_epoch)
            self.store.put(newest, metadata.encode_legacy_checkpoint(changed))


class ProtocolBackend(GenerationWriter, ParquetBackend):
    """Writes a job of the protocol layout as one of its worker generations."""

    # ---- starting --------------------------------------------------------------------------------

    def start(self) -> Started:
        """Take the next worker generation, raise the fence, and choose what it continues from."""
        generation = self._take()
        self.check_fence()
        resolved = self._resolve()
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
        self._put_manifest(replace(self._own_manifest, base_ref=resolved.ref))
        state = CheckpointState.COMMITTING if resolved.replay_commit else CheckpointState.READY
        restored = as_checkpoint(resolved.manifest, resolved.ref, state)
        return Started(generation, restored, resolved.replay_commit)

    def start_from(self, base_ref: StatePath) -> None:
        """Start the next worker generation from a checkpoint that a user chose."""
        self._take(base_ref)
        self.check_fence()

    # ---- writing ---------------------------------------------------------------------------------

    def write_checkpoint_metadata(self, checkpoint: Manifest | LegacyCheckpoint) -> StatePath:
        """Publish a manifest."""
        if isinstance(checkpoint, LegacyCheckpoint):
            raise InputError("a legacy checkpoint for a job of the protocol layout")
        return self.publish(checkpoint).ref

    def publish_next(self, new: NextEpoch) -> Checkpoint:
        """Publish the next epoch by its manifest."""
        manifest = Manifest(
            pipeline=self._pipeline,
            job=self.paths.job,
            worker_generation=self._taken,
            epoch=new.epoch,
            min_epoch=new.min_epoch,
            start_time_micros=new.start_time_micros,
            finish_time_micros=new.finish_time_micros,
            needs_commit=new.needs_commit,
            operators=new.operators,
            parent_ref=new.parent_ref,
            progress=new.progress,
        )
        return as_checkpoint(manifest, self.publish(manifest).ref, new.state)

    def publish(self, manifest: Manifest) -> Published:
        """Publish an epoch: manifest, hint, epoch record, in this order."""
        ref = self.paths.manifest(manifest.worker_generation, manifest.epoch)
        self._check_manifest(manifest)
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
        self._put_manifest(replace(self._own_manifest, latest_ref=ref))
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

    def _check_manifest(self, manifest: Manifest) -> None:
        """Refuse the manifest of an epoch that this generation may not publish.

        Raises:
            InputError: it is of another job or generation, or none was taken.
        """
        expected = (self._pipeline, self.paths.job, self._taken)
        if (manifest.pipeline, manifest.job, manifest.worker_generation) != expected:
            raise InputError(
                "the manifest is of another job or worker generation", job=manifest.job
            )
        _ = self._own_manifest

    def mark_committed(self, checkpoint: Checkpoint) -> None:
        """Write the commit marker beside the manifest."""
        assert checkpoint.worker_generation is not None
        ref = checkpoint.ref
        marker = CommittedMarker(
            pipeline=self._pipeline,
            job=checkpoint.job,
            epoch=checkpoint.epoch,
            checkpoint_worker_generation=checkpoint.worker_generation,
            writer_worker_generation=self._taken,
            checkpoint_ref=ref,
        )
        path = self.marker(checkpoint)
        if self.store.create(path, encode(marker)):
            return
        stored = self.objects.read(path, records.decode_committed_marker)
        writer = marker.writer_worker_generation
        if replace(stored, writer_worker_generation=writer, unknown=b"") != marker:
            raise ProtocolError("the commit marker belongs to another checkpoint", path=path)

    def write_compaction_record(self, record: CompactionRecord, path: StatePath) -> None:
        """Write a compaction record, which the job's writer adopts at its next checkpoint."""
        self.store.put(path, encode(record))

    # ---- cleaning up -----------------------------------------------------------------------------

    def root(self, epoch: Epoch) -> EpochRoot:
        """Read which data files the manifest of an epoch refers to."""
        ref = self.objects.epoch_record(epoch).checkpoint_ref
        manifest = self.objects.read(ref, manifest_references)
        check_inside_job(self.paths, epoch, manifest)
        return epoch_root(self.paths, ref, manifest, CheckpointState.READY)

    def unreadable_root(self, epoch: Epoch, reason: str, head: EpochRoot) -> EpochRoot:
        """Name the objects by the record of the epoch, if that can be read."""
        ref = None
        with contextlib.suppress(NotFoundError, FormatError, ProtocolError):
            ref = self.objects.epoch_record(epoch).checkpoint_ref
        by_name = unreadable_objects(self.paths, epoch, ref)
        finished = head.finish_time_micros
        return unreadable_root(epoch, reason, by_name, finish_time_micros=finished)


StateBackend = ParquetBackend
"""The backend in which the runtime keeps its state, under the name that Arroyo uses. Source:
crates/arroyo-state/src/lib.rs, `StateBackend`.
"""


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
