"""CheckpointTree: one job's metadata, read. Nothing above it knows how a layout arranges objects.

`LegacyTree` and `ProtocolTree` are its two forms; `backend` has those that also write.

Source: crates/arroyo-state/src/lib.rs, `BackingStore`; crates/arroyo-state/src/parquet.rs;
crates/arroyo-state-protocol/src/store.rs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from arroyo_dagster.errors import FormatError, InputError, NotFoundError, ProtocolError
from arroyo_dagster.state.codec import records
from arroyo_dagster.state.metadata.objects import MetadataReader, missing_epoch
from arroyo_dagster.state.metadata.restorable import check_files, check_whole
from arroyo_dagster.state.model.changes import JobHead
from arroyo_dagster.state.model.checkpoints import (
    RECORD_VERSION,
    Checkpoint,
    CheckpointState,
    CommitNote,
    EpochRecord,
    LegacyCheckpoint,
    Manifest,
    OperatorCheckpoint,
)
from arroyo_dagster.state.model.ids import Epoch, JobId, OperatorId, StatePath, WorkerGeneration
from arroyo_dagster.state.model.layout import (
    JobPaths,
    Layout,
    parse_checkpoint_dir,
    parse_epoch_record,
    parse_manifest_path,
)
from arroyo_dagster.state.model.numbers import parse_number
from arroyo_dagster.state.planning.restore import recovery
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore

if TYPE_CHECKING:
    from arroyo_dagster.state.metadata.backing_store import NextEpoch
    from arroyo_dagster.state.model.compaction import CompactionRecord
    from arroyo_dagster.state.model.garbage import JobPins

PROBE_COUNT = 8
"""How many numbers after and before an epoch are probed if a listing has a gap."""


class CheckpointTree:
    """One job's metadata. `CheckpointTree(store, paths)` returns the form of the job's layout.

    Args:
        store: contains the job's objects.
        paths: of the job; they determine the layout.
    """

    def __new__(cls, store: ObjectStore, paths: JobPaths, **options: Any) -> Self:
        return object.__new__(cls._form(paths.layout))

    def __getnewargs__(self) -> tuple[ObjectStore, JobPaths]:
        return self.store, self.paths  # a copy, here or in another process, is of the same form

    @classmethod
    def _form(cls, layout: Layout) -> type[Self]:
        """Return the class for a layout; a form returns itself."""
        return LegacyTree if layout is Layout.LEGACY else ProtocolTree  # type: ignore[return-value]

    def __init__(self, store: ObjectStore, paths: JobPaths) -> None:
        self.store = store
        self.paths = paths
        self.objects = MetadataReader(store, paths)

    # ---- which epochs there are ------------------------------------------------------------------

    def epochs(self) -> list[Epoch]:
        """Return the epochs that a listing shows to exist, ascending."""
        raise NotImplementedError

    def exists(self, epoch: Epoch) -> bool:
        """Whether the epoch exists: read by its name, which does not depend on a listing."""
        return self.store.head(self.paths.head(epoch)) is not None

    def every_epoch(self, named: Collection[Epoch] = ()) -> list[Epoch]:
        """Return the epochs as `epochs`, and those that an incomplete listing misses: it probes a
        few numbers after the newest epoch, and before each epoch without a predecessor.

        Args:
            named: epochs known from elsewhere; included if they exist.
        """
        epochs = {*self.epochs()}
        epochs.update(self._existing([epoch for epoch in named if epoch not in epochs]))
        asked: set[Epoch] = set()
        while beside := _beside(epochs) - asked:
            epochs.update(self._existing(sorted(beside)))
            asked |= beside
        return sorted(epochs)

    def _existing(self, epochs: Sequence[Epoch]) -> list[Epoch]:
        present = concurrently(self.exists, epochs)
        return [epoch for epoch, exists in zip(epochs, present, strict=True) if exists]

    def newest_number(self) -> Epoch:
        """Return the highest number of an epoch, or of a manifest that owns none; 0 if there is
        none.

        The objects need not decode. Objects of the newest run that a listing misses are found by
        name.
        """
        return max(self.every_epoch(), default=Epoch(0))

    def directories(self) -> list[tuple[WorkerGeneration | None, Epoch]]:
        """Return the checkpoint directories, each with its worker generation; None = it has none.

        A directory does not make an epoch exist.
        """
        raise NotImplementedError

    def checkpoint_dirs(self, generation: WorkerGeneration | None = None) -> list[Epoch]:
        """Return the numbers of the checkpoint directories, ascending; one level is listed."""
        below = self.store.list_dir(self.paths.checkpoints(generation)).prefixes
        numbers = (parse_checkpoint_dir(path.name) for path in below)
        return sorted(epoch for epoch in numbers if epoch is not None)

    def generation_dirs(self) -> list[WorkerGeneration]:
        """Return the numbers of the directories of worker generations, in the listing's order."""
        below = self.store.list_dir(self.paths.generations).prefixes
        numbers = (parse_number(path.name) for path in below)
        return [WorkerGeneration(number) for number in numbers if number is not None]

    def published_last(
        self, generations: Collection[WorkerGeneration] | None = None
    ) -> Iterator[StatePath]:
        """Yield the manifests that the newest worker generations name as published last.

        Args:
            generations: those that a listing shows; None = list them.
        """
        return iter(())

    def fence(self) -> WorkerGeneration | None:
        """Return the worker generation that may write; None without a fence.

        Raises:
            FormatError: the fence does not decode.
        """
        return None

    def job_head(self) -> JobHead:
        """Return how far the job is.

        Raises:
            NotFoundError: it has no epoch, or no fence where its layout has one.
        """
        epochs = self.epochs()
        if not epochs:
            raise NotFoundError(
                "the job has no epoch, so it is unknown whether it has gone on since the rebuild",
                job=self.paths.root,
                next_step="restore the metadata of its newest epoch from a copy; nothing was "
                "changed",
            )
        return JobHead(epoch=epochs[-1])

    # ---- one epoch -------------------------------------------------------------------------------

    def load(self, epoch: Epoch | None = None) -> Checkpoint:
        """Read one epoch with all its operators; None = the newest visible epoch.

        Raises:
            NotFoundError: no such epoch, or none at all; or an object of the epoch is missing.
            FormatError: an object of the epoch does not decode.
        """
        if epoch is not None:
            return self.load_checkpoint_metadata(epoch)
        epochs = self.epochs()
        if not epochs:
            raise NotFoundError(
                "the job has no checkpoint",
                job=self.paths.job,
                url=self.store.url,
                next_step="wait for its first epoch, or list jobs with `arroyo-state jobs`",
            )
        return self.load_checkpoint_metadata(epochs[-1])

    def load_checkpoint_metadata(self, epoch: Epoch) -> Checkpoint:
        """Read one epoch. Errors as `load`."""
        raise NotImplementedError

    def load_remains(self, epoch: Epoch) -> tuple[Checkpoint, tuple[StatePath, ...]]:
        """Read what is left of an epoch, and return which objects of its metadata do not exist.

        The marker of a commit is included, although the newest epoch may merely not have it yet.

        Raises:
            NotFoundError: the object that makes the epoch exist is missing.
            FormatError: an object of the epoch does not decode.
        """
        checkpoint, missing = self._remains(epoch)
        if checkpoint.state is CheckpointState.COMMITTING:
            missing = (*missing, self.marker(checkpoint))
        return checkpoint, missing

    def marker(self, checkpoint: Checkpoint) -> StatePath:
        """Return the object that says that an epoch's commit is finished."""
        raise NotImplementedError

    def _remains(self, epoch: Epoch) -> tuple[Checkpoint, tuple[StatePath, ...]]:
        return self.load_checkpoint_metadata(epoch), ()

    def load_chain(self, oldest: Checkpoint) -> Iterator[Checkpoint]:
        """Follow the parents of the oldest epoch that has a record, newest first.

        A cleanup deletes records before manifests: so the chain leads to all that it left.

        Raises:
            ProtocolError: the chain leads out of the job, or to an epoch that is not older.
        """
        return iter(())

    def check_older(self, ref: StatePath, parent: Epoch, epoch: Epoch) -> None:
        """Raise ProtocolError unless the parent of an epoch, by its manifest `ref`, is older."""
        if parent >= epoch:
            raise ProtocolError(
                f"the parent of epoch {epoch} belongs to epoch {parent}",
                job=self.paths.job,
                path=ref,
                next_step="check it with `arroyo-state epochs`; nothing was deleted",
            )

    def load_operator_metadata(
        self, operator: OperatorId, epoch: Epoch
    ) -> OperatorCheckpoint | None:
        """Read one operator at one epoch.

        Returns:
            None if the operator, or the epoch, does not exist.

        Raises:
            FormatError: it exists, but is broken.
        """
        raise NotImplementedError

    def prepare_checkpoint_load(self, epoch: Epoch) -> Checkpoint:
        """Prove that the epoch can be restored before any task starts.

        Its metadata must name every operator and table that has files in the epoch's directory.
        Every data file that it lists must exist, have a footer that decodes, and have columns that
        can be read as rows of its table.

        Raises:
            NotFoundError: the epoch does not exist.
            FormatError: metadata was cut; or a listed file is missing or broken: names the first,
                and how many.
        """
        checkpoint = self.load_checkpoint_metadata(epoch)
        check_whole(self.store, self.paths, checkpoint)
        check_files(self.store, self.paths, checkpoint)
        return checkpoint

    # ---- what waits, and what stays --------------------------------------------------------------

    def compaction_records(self) -> dict[StatePath, CompactionRecord | None]:
        """Return the compactions that the job's writer has not adopted yet, oldest first.

        Returns:
            By path; None for a record that does not decode, or names another job's files. Such a
            record is neither adopted nor deleted.
        """
        listed = sorted(info.path for info in self.store.list_dir(self.paths.compactions).objects)
        return dict(zip(listed, concurrently(self._compaction_record, listed), strict=True))

    def _compaction_record(self, path: StatePath) -> CompactionRecord | None:
        from arroyo_dagster.state.codec.maintenance_records import decode_compaction_record

        try:
            record = self.objects.optional(path, decode_compaction_record)
        except FormatError:
            return None
        if record is None or (record.pipeline, record.job) != (self.paths.pipeline, self.paths.job):
            return None
        touched = [p for merge in record.merged for p in (*merge.input_paths, *merge.output_paths)]
        managed = all(map(self.paths.contains, touched))
        return record if managed else None

    def next_restore(self) -> recovery.Resolved:
        """Return what the next start of Arroyo would restore in the protocol layout. Writes
        nothing.

        Raises:
            InputError: legacy layout, where Arroyo's database decides that.
            NotFoundError: the job was never started.
            ProtocolError: objects contradict each other, so that nothing would be restored.
        """
        raise self._no_generations()

    def job_pins(self) -> JobPins:
        """Read what is kept besides the newest epochs: pins and quarantines.

        Raises:
            FormatError: the pins do not decode; then nothing may be deleted.
        """
        return self.objects.job_pins()

    def _no_generations(self) -> InputError:
        return InputError(
            "worker generations exist in the protocol layout only", job=self.paths.job
        )


class LegacyTree(CheckpointTree):
    """The legacy layout: an epoch exists once the checkpoint's own object does."""

    @classmethod
    def _form(cls, layout: Layout) -> type[Self]:
        return cls

    def epochs(self) -> list[Epoch]:
        """Return the epochs with checkpoint metadata, ascending; a directory alone is none."""
        return self._existing(self.checkpoint_dirs())

    def directories(self) -> list[tuple[WorkerGeneration | None, Epoch]]:
        """Return the checkpoint directories, which all runs share."""
        return [(None, epoch) for epoch in self.checkpoint_dirs()]

    def unlisted_behind(self, newest: Epoch, listed: Collection[Epoch] = ()) -> list[Epoch]:
        """Return existing epochs that a listing misses, among the few numbers after the newest one
        it shows: an incomplete listing ends too early.

        Args:
            newest: the newest listed epoch; 0 if none is listed.
            listed: numbers that need not be probed.
        """
        behind = [Epoch(n) for n in range(newest + 1, newest + 1 + PROBE_COUNT) if n not in listed]
        return self._existing(behind)

    def marker(self, checkpoint: Checkpoint) -> StatePath:
        """Return the note of this package, as Arroyo keeps it in its database."""
        return self.paths.commit_note(checkpoint.epoch)

    def load_checkpoint_metadata(self, epoch: Epoch) -> Checkpoint:
        """Read one epoch. Errors as `load`."""
        head, operators = self._parts(epoch, whole=True)
        return self._assembled(head, operators.values())

    def _remains(self, epoch: Epoch) -> tuple[Checkpoint, tuple[StatePath, ...]]:
        head, operators = self._parts(epoch, whole=False)
        missing = tuple(path for path, operator in operators.items() if operator is None)
        return self._assembled(head, operators.values()), missing

    def _parts(
        self, epoch: Epoch, *, whole: bool
    ) -> tuple[LegacyCheckpoint, dict[StatePath, OperatorCheckpoint | None]]:
        """Return the epoch's head object, and those of its operators by path; None = missing."""
        from arroyo_dagster.state.codec import metadata  # loads protobuf

        path = self.paths.head(epoch)
        head = self.objects.read(path, metadata.decode_legacy_checkpoint, missing_epoch(epoch))
        names = [self.paths.operator_metadata(name, epoch) for name in head.operators]
        read = self.objects.read if whole else self.objects.optional
        operators = concurrently(lambda name: read(name, metadata.decode_operator), names)
        return head, dict(zip(names, operators, strict=True))

    def _assembled(
        self, head: LegacyCheckpoint, parts: Iterable[OperatorCheckpoint | None]
    ) -> Checkpoint:
        operators = [operator for operator in parts if operator is not None]
        committed = head.progress is not None and self._committed_note(head)
        state = recovery.legacy_state(head, operators, committed)
        return legacy_checkpoint(head, operators, self.paths.head(head.epoch), state)

    def _committed_note(self, head: LegacyCheckpoint) -> bool:
        note = self.objects.optional(self.paths.commit_note(head.epoch), records.decode_commit_note)
        return note == CommitNote(
            job=head.job, epoch=head.epoch, finish_time_micros=head.finish_time_micros
        )

    def load_operator_metadata(
        self, operator: OperatorId, epoch: Epoch
    ) -> OperatorCheckpoint | None:
        """Read one operator at one epoch, by one request."""
        from arroyo_dagster.state.codec import metadata  # loads protobuf

        path = self.paths.operator_metadata(operator, epoch)
        return self.objects.optional(path, metadata.decode_operator)


def legacy_head(job: JobId, checkpoint: Checkpoint | NextEpoch) -> LegacyCheckpoint:
    """Return the checkpoint's own metadata of an epoch of the legacy layout."""
    return LegacyCheckpoint(
        job=job,
        epoch=checkpoint.epoch,
        min_epoch=checkpoint.min_epoch,
        start_time_micros=checkpoint.start_time_micros,
        finish_time_micros=checkpoint.finish_time_micros,
        operators=tuple(state.operator for state in checkpoint.operators),
        progress=checkpoint.progress,
    )


def legacy_checkpoint(
    head: LegacyCheckpoint,
    operators: Sequence[OperatorCheckpoint],
    ref: StatePath,
    state: CheckpointState,
) -> Checkpoint:
    """Convert the objects of an epoch of the legacy layout to a checkpoint."""
    return Checkpoint(
        pipeline=None,
        job=head.job,
        worker_generation=None,
        epoch=head.epoch,
        min_epoch=head.min_epoch,
        start_time_micros=head.start_time_micros,
        finish_time_micros=head.finish_time_micros,
        state=state,
        operators=tuple(operators),
        ref=ref,
        progress=head.progress,
    )


class ProtocolTree(CheckpointTree):
    """The protocol layout: an epoch exists once a record names the checkpoint that owns it."""

    @classmethod
    def _form(cls, layout: Layout) -> type[Self]:
        return cls

    def epochs(self) -> list[Epoch]:
        """Return the epochs with a record, ascending; one level is listed."""
        listed = self.store.list_dir(self.paths.epochs).objects
        numbers = (parse_epoch_record(info.path.name) for info in listed)
        return sorted(epoch for epoch in numbers if epoch is not None)

    def directories(self) -> list[tuple[WorkerGeneration | None, Epoch]]:
        """Return the checkpoint directories of all worker generations that are listed."""
        generations = self.generation_dirs()
        listed = concurrently(self.checkpoint_dirs, generations)
        return [
            (generation, epoch)
            for generation, epochs in zip(generations, listed, strict=True)
            for epoch in epochs
        ]

    def newest_number(self) -> Epoch:
        """Return the highest number of an epoch, or of a manifest that owns none."""
        newest = super().newest_number()
        numbers = self.generation_dirs()
        listed = concurrently(self.checkpoint_dirs, numbers)
        refs = {
            self.paths.manifest(generation, epoch)
            for generation, epochs in zip(numbers, listed, strict=True)
            for epoch in epochs
            if epoch > newest
        }
        refs.update(self.published_last(numbers))
        parsed = {ref: parse_manifest_path(ref) for ref in sorted(refs)}
        managed = {r: path.epoch for r, path in parsed.items() if path and path.paths == self.paths}
        heads = zip(managed.values(), concurrently(self.store.head, list(managed)), strict=True)
        return max((newest, *(epoch for epoch, info in heads if info is not None)))

    def published_last(
        self, generations: Collection[WorkerGeneration] | None = None
    ) -> Iterator[StatePath]:
        """Yield the manifests that the newest worker generations name as published last."""
        numbers = self.generation_dirs() if generations is None else generations
        listed = max(numbers, default=WorkerGeneration(0))
        for number in range(max(0, listed - PROBE_COUNT), listed + PROBE_COUNT):
            path = self.paths.generation_manifest(WorkerGeneration(number))
            try:
                manifest = self.objects.optional(path, records.decode_generation_manifest)
            except FormatError:
                continue
            if manifest is not None and manifest.latest_ref is not None:
                yield manifest.latest_ref

    def fence(self) -> WorkerGeneration | None:
        """Return the worker generation in the fence; None without a fence."""
        path = self.paths.current_generation
        data = self.objects.bytes_of(path)
        return (
            None
            if data is None
            else records.decode_current_generation(data, path).worker_generation
        )

    def job_head(self) -> JobHead:
        """Return how far the job is: its newest epoch, and the fence."""
        newest, path = super().job_head(), self.paths.current_generation
        fence = records.decode_current_generation(self.store.read(path), path)
        return replace(newest, worker_generation=fence.worker_generation)

    def marker(self, checkpoint: Checkpoint) -> StatePath:
        """Return the marker beside the manifest."""
        return recovery.marker_path(checkpoint.ref)

    def load_checkpoint_metadata(self, epoch: Epoch) -> Checkpoint:
        """Read one epoch. Errors as `load`."""
        from arroyo_dagster.state.codec import metadata  # loads protobuf

        record = self.objects.epoch_record(epoch)
        manifest = self.objects.read(record.checkpoint_ref, metadata.decode_manifest)
        return self._checkpoint(record.checkpoint_ref, manifest, record)

    def _checkpoint(self, ref: StatePath, manifest: Manifest, record: EpochRecord) -> Checkpoint:
        marker = None
        if manifest.needs_commit:
            marker = self.objects.optional(
                recovery.marker_path(ref), records.decode_committed_marker
            )
        standing = recovery.checkpoint_state(ref, manifest, record, marker)
        versions = (part.version for part in (record, marker) if part is not None)
        strange = next((number for number in versions if number != RECORD_VERSION), RECORD_VERSION)
        return replace(as_checkpoint(manifest, ref, standing.state), record_version=strange)

    def load_chain(self, oldest: Checkpoint) -> Iterator[Checkpoint]:
        """Follow the parents of the oldest epoch that has a record, newest first."""
        from arroyo_dagster.state.codec import metadata  # loads protobuf

        while (ref := oldest.parent_ref) is not None:
            recovery.expect_manifest_path(self.paths, ref)
            manifest = self.objects.optional(ref, metadata.decode_manifest)
            if manifest is None:
                return
            self.check_older(ref, manifest.epoch, oldest.epoch)
            oldest = as_checkpoint(manifest, ref, CheckpointState.PARTIALLY_COLLECTED)
            yield oldest

    def load_operator_metadata(
        self, operator: OperatorId, epoch: Epoch
    ) -> OperatorCheckpoint | None:
        """Read one operator at one epoch, from the manifest."""
        try:
            return self.load_checkpoint_metadata(epoch).operator(operator)
        except NotFoundError:
            return None

    def next_restore(self) -> recovery.Resolved:
        """Return what the next start of Arroyo would restore. Writes nothing."""
        fence = self.objects.read(self.paths.current_generation, records.decode_current_generation)
        starting = WorkerGeneration(fence.worker_generation + 1)
        # A start raises the fence before it resolves the epoch, so that it may claim.
        raised = replace(fence, worker_generation=starting)
        return recovery.resolve_with(
            self.objects.fact,
            self.paths,
            starting,
            {self.paths.current_generation: raised},
            as_arroyo=True,
        )


def as_checkpoint(manifest: Manifest, ref: StatePath, state: CheckpointState) -> Checkpoint:
    """Convert a manifest of the protocol layout to a checkpoint."""
    return Checkpoint(
        pipeline=manifest.pipeline,
        job=manifest.job,
        worker_generation=manifest.worker_generation,
        epoch=manifest.epoch,
        min_epoch=manifest.min_epoch,
        start_time_micros=manifest.start_time_micros,
        finish_time_micros=manifest.finish_time_micros,
        state=state,
        operators=manifest.operators,
        ref=ref,
        parent_ref=manifest.parent_ref,
        progress=manifest.progress,
    )


def _beside(epochs: Collection[Epoch]) -> set[Epoch]:
    """Return the missing numbers at which an unlisted epoch may exist."""
    first = (epoch for epoch in epochs if epoch - 1 not in epochs)
    numbers = {n for epoch in first for n in range(max(0, epoch - PROBE_COUNT), epoch)}
    newest = max(epochs, default=0)
    numbers.update(range(newest + 1, newest + 1 + PROBE_COUNT))
    return {Epoch(number) for number in numbers if number not in epochs}
