"""ParquetBackend: loads and publishes the metadata tree of one job, in either layout.

Source: crates/arroyo-state/src/lib.rs, `BackingStore`; crates/arroyo-state/src/parquet.rs;
crates/arroyo-state-protocol/src/{store,workflow}.rs.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar, runtime_checkable

import pyarrow as pa

from arroyo_dagster.errors import (
    ConflictError,
    FormatError,
    InputError,
    NotFoundError,
    ProtocolError,
    StorageError,
)
from arroyo_dagster.state.codec import collecting, metadata, records
from arroyo_dagster.state.codec.parquet import read_facts
from arroyo_dagster.state.lease import Leased
from arroyo_dagster.state.model.checkpoints import (
    RECORD_VERSION,
    Checkpoint,
    CheckpointState,
    CommitNote,
    CommittedMarker,
    CurrentGeneration,
    EpochRecord,
    GenerationManifest,
    LegacyCheckpoint,
    Manifest,
    OperatorCheckpoint,
)
from arroyo_dagster.state.model.collecting import Retained
from arroyo_dagster.state.model.compaction import CompactionRecord
from arroyo_dagster.state.model.gc import ExpirePlan
from arroyo_dagster.state.model.ids import (
    Epoch,
    OperatorId,
    PipelineId,
    StatePath,
    TableName,
    WorkerGeneration,
)
from arroyo_dagster.state.model.layout import (
    CURRENT_GENERATION,
    JobPaths,
    Layout,
    parse_checkpoint_dir,
    parse_epoch_record,
)
from arroyo_dagster.state.model.tables import ExpiringTimeKeyFiles
from arroyo_dagster.state.planning import recovery
from arroyo_dagster.state.planning.checkpoint import incomplete
from arroyo_dagster.state.planning.gc import oldest_kept, plan_expire
from arroyo_dagster.state.planning.health import reading_of
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.forms import columns_of, stored_form, table_forms

_T = TypeVar("_T")
DELETE_BATCH = 1000


@runtime_checkable
class BackingStore(Protocol):
    """Where checkpoints are kept. Synchronous; one job each.

    Source: crates/arroyo-state/src/lib.rs, `BackingStore`.
    """

    def name(self) -> str:
        """The name Arroyo's metadata gives this kind of backend."""

    def prepare_checkpoint_load(self, epoch: Epoch) -> Checkpoint:
        """Prove that everything the epoch refers to is present and decodes, then give it."""

    def load_checkpoint_metadata(self, epoch: Epoch) -> Checkpoint:
        """Read the metadata of one epoch."""

    def load_operator_metadata(
        self, operator: OperatorId, epoch: Epoch
    ) -> OperatorCheckpoint | None:
        """Read one operator at one epoch; None when it is absent."""

    def write_operator_checkpoint_metadata(
        self, operator: OperatorCheckpoint, subtask_index: int | None = None
    ) -> StatePath:
        """Write an operator's metadata: merged, or of one subtask."""

    def write_checkpoint_metadata(self, checkpoint: Manifest | LegacyCheckpoint) -> StatePath:
        """Write the record that makes the epoch visible."""

    def cleanup_checkpoint(self, min_epoch: Epoch) -> ExpirePlan:
        """Remove the epochs below `min_epoch` and what only they list."""


@dataclass(frozen=True, slots=True)
class Started:
    """A run that has been started, and what it continues from.

    Attributes:
        worker_generation: None in the legacy layout, which has none.
    """

    worker_generation: WorkerGeneration | None
    restored: Checkpoint | None
    replay_commit: bool


@dataclass(frozen=True, slots=True)
class Published:
    """The checkpoint is visible and owns its epoch."""

    ref: StatePath
    manifest: Manifest


class ParquetBackend:
    """The metadata tree of one job.

    Args:
        store: where it lies.
        paths: which job; decides the layout.
        generation: the worker generation to write as; None to read, or in the legacy layout.
        clock: microseconds since the Unix epoch.
    """

    def __init__(
        self,
        store: ObjectStore,
        paths: JobPaths,
        *,
        generation: WorkerGeneration | None = None,
        clock: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> None:
        self.store = store
        self.paths = paths
        self.generation = generation
        self.clock = clock
        self._own_manifest: GenerationManifest | None = None

    def name(self) -> str:
        """`parquet`, as Arroyo's metadata says."""
        return "parquet"

    # ---- reading ---------------------------------------------------------------------------------

    def epochs(self) -> list[Epoch]:
        """The epochs that have a record (protocol) or checkpoint metadata (legacy), ascending."""
        if self.paths.layout is Layout.PROTOCOL:
            listed = self.store.list_dir(self.paths.epochs).objects
            found = (parse_epoch_record(info.path.name) for info in listed)
            return sorted(epoch for epoch in found if epoch is not None)
        numbers = self.checkpoint_dirs()
        heads = concurrently(lambda e: self.store.head(self.paths.legacy_metadata(e)), numbers)
        return [epoch for epoch, info in zip(numbers, heads, strict=True) if info is not None]

    def checkpoint_dirs(self, generation: WorkerGeneration | None = None) -> list[Epoch]:
        """The numbers of the checkpoint directories there are, ascending; one level is listed."""
        below = self.store.list_dir(self.paths.checkpoints(generation)).prefixes
        found = (parse_checkpoint_dir(path.name) for path in below)
        return sorted(epoch for epoch in found if epoch is not None)

    def load(self, epoch: Epoch | None = None) -> Checkpoint:
        """Read one epoch with all its operators; the newest canonical one when None.

        Raises:
            NotFoundError: no such epoch, or none at all.
            FormatError: an object of it does not decode.
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

    def load_history(self, whole_from: Epoch | None = None) -> list[Checkpoint]:
        """Read every epoch there is, newest first, those that a cleanup left half done included.

        Args:
            whole_from: of this epoch and those after it no object may be missing; None = of none.

        Raises:
            NotFoundError: one is.
            FormatError: an object does not decode.
        """
        epochs = sorted(self.epochs(), reverse=True)
        if self.paths.layout is Layout.LEGACY:
            whole = max(epochs, default=0) + 1 if whole_from is None else whole_from
            return concurrently(
                lambda epoch: self._load_legacy(epoch, whole=epoch >= whole), epochs
            )
        history = concurrently(self.load_checkpoint_metadata, epochs)
        return [*history, *self.load_chain(history[-1])] if history else []

    def _parent_ref(self, checkpoint: Checkpoint) -> StatePath | None:
        ref = checkpoint.parent_ref
        if ref is not None:
            recovery.expect_manifest_path(self.paths, ref)
        return ref

    def load_checkpoint_metadata(self, epoch: Epoch) -> Checkpoint:
        """Read one epoch. Errors as `load`."""
        if self.paths.layout is Layout.LEGACY:
            return self._load_legacy(epoch)
        record = self._record(epoch)
        manifest = self._read(record.checkpoint_ref, metadata.decode_manifest)
        return self._checkpoint(record.checkpoint_ref, manifest, record)

    def load_remains(self, epoch: Epoch) -> tuple[Checkpoint, tuple[StatePath, ...]]:
        """Read what is left of an epoch, and which objects of its metadata are not there.

        The marker of a commit counts, although the newest epoch may only not have one yet.

        Raises:
            NotFoundError: the object that makes it exist is gone.
            FormatError: an object of it does not decode.
        """
        if self.paths.layout is Layout.PROTOCOL:
            found, gone = self.load_checkpoint_metadata(epoch), []
        else:
            head, operators = self._legacy_parts(epoch, whole=False)
            gone = [path for path, operator in operators.items() if operator is None]
            found = self._as_legacy(head, operators.values())
        if found.state is CheckpointState.COMMITTING:
            gone.append(self._marker_of(found))
        return found, tuple(gone)

    def _marker_of(self, checkpoint: Checkpoint) -> StatePath:
        if self.paths.layout is Layout.LEGACY:
            return self.paths.commit_note(checkpoint.epoch)
        return recovery.marker_path(checkpoint.ref)

    def load_chain(self, oldest: Checkpoint) -> Iterator[Checkpoint]:
        """Follow the parents of the oldest epoch that has a record, newest first.

        Records go before manifests: what an interrupted cleanup left hangs on it.

        Raises:
            ProtocolError: the chain leads out of the job, or not back in time.
        """
        while (ref := self._parent_ref(oldest)) is not None:
            manifest = self._optional(ref, metadata.decode_manifest)
            if manifest is None:
                return
            if manifest.epoch >= oldest.epoch:
                raise ProtocolError(
                    f"the parent of epoch {oldest.epoch} says that it is epoch {manifest.epoch}",
                    job=self.paths.job,
                    path=ref,
                    next_step="look at it with `arroyo-state epochs`; nothing was deleted",
                )
            oldest = as_checkpoint(manifest, ref, CheckpointState.PARTIALLY_COLLECTED)
            yield oldest

    def _record(self, epoch: Epoch) -> EpochRecord:
        path = self.paths.epoch_record(epoch)
        record = self._read(path, records.decode_epoch_record, self._missing_epoch(epoch))
        recovery.expect_manifest_path(self.paths, record.checkpoint_ref)
        return record

    def _missing_epoch(self, epoch: Epoch) -> str:
        return f"epoch {epoch} does not exist"

    def _checkpoint(self, ref: StatePath, manifest: Manifest, record: EpochRecord) -> Checkpoint:
        marker = None
        if manifest.needs_commit:
            marker = self._optional(recovery.marker_path(ref), records.decode_committed_marker)
        standing = recovery.checkpoint_state(ref, manifest, record, marker)
        versions = (one.version for one in (record, marker) if one is not None)
        strange = next((one for one in versions if one != RECORD_VERSION), RECORD_VERSION)
        return replace(as_checkpoint(manifest, ref, standing.state), record_version=strange)

    def _load_legacy(self, epoch: Epoch, *, whole: bool = True) -> Checkpoint:
        head, operators = self._legacy_parts(epoch, whole=whole)
        return self._as_legacy(head, operators.values())

    def _legacy_parts(
        self, epoch: Epoch, *, whole: bool
    ) -> tuple[LegacyCheckpoint, dict[StatePath, OperatorCheckpoint | None]]:
        """The object that makes the epoch exist, and its operators' by path, None = gone."""
        path = self.paths.legacy_metadata(epoch)
        head = self._read(path, metadata.decode_legacy_checkpoint, self._missing_epoch(epoch))
        names = [self.paths.operator_metadata(name, epoch) for name in head.operators]
        read = self._read if whole else self._optional
        found = concurrently(lambda name: read(name, metadata.decode_operator), names)
        return head, dict(zip(names, found, strict=True))

    def _as_legacy(
        self, head: LegacyCheckpoint, parts: Iterable[OperatorCheckpoint | None]
    ) -> Checkpoint:
        operators = [operator for operator in parts if operator is not None]
        committed = head.progress is not None and self._committed_note(head)
        state = recovery.legacy_state(head, operators, committed)
        return legacy_checkpoint(head, operators, self.paths.legacy_metadata(head.epoch), state)

    def load_operator_metadata(
        self, operator: OperatorId, epoch: Epoch
    ) -> OperatorCheckpoint | None:
        """Read one operator at one epoch.

        Returns:
            None when the operator, or the epoch, is absent.

        Raises:
            FormatError: it is there, and broken.
        """
        if self.paths.layout is Layout.LEGACY:
            return self._optional(
                self.paths.operator_metadata(operator, epoch), metadata.decode_operator
            )
        try:
            return self.load_checkpoint_metadata(epoch).operator(operator)
        except NotFoundError:
            return None

    def prepare_checkpoint_load(self, epoch: Epoch) -> Checkpoint:
        """Prove that the epoch can be restored before any task starts.

        Every data file it lists is there, has a footer that decodes, and columns that give rows of
        its table.

        Raises:
            NotFoundError: the epoch does not exist.
            FormatError: a listed file is missing or broken; names the first, and how many.
        """
        checkpoint = self.load_checkpoint_metadata(epoch)
        listed = [
            (operator, name, path)
            for operator in checkpoint.operators
            for name, files in operator.tables.items()
            for path in dict.fromkeys(files.paths)
        ]
        problems = [p for p in concurrently(lambda at: self._problem(*at), listed) if p]
        if problems:
            facts: dict[str, Any] = {"job": self.paths.job, "epoch": epoch} | problems[0].facts
            raise FormatError(
                f"epoch {epoch} cannot be restored: {len(problems)} of {len(listed)} data files "
                f"are missing or broken; the first: {problems[0].message}",
                next_step="restore an older epoch, or bring the file back",
                **facts,
            ) from problems[0]
        return checkpoint

    def _problem(
        self, operator: OperatorCheckpoint, name: TableName, path: StatePath
    ) -> NotFoundError | FormatError | None:
        try:
            with self.store.open_input(path) as file:
                facts = read_facts(file, path)
            problem = _misfit(operator, name, path, facts.schema)
        except NotFoundError:
            return NotFoundError("a data file is missing", operator=operator.operator, path=path)
        except FormatError as error:
            return error
        if problem is None:
            return None
        return FormatError(
            f"a data file is not one of its table: {problem}",
            operator=operator.operator,
            table=name,
            path=path,
        )

    # ---- compactions that wait -------------------------------------------------------------------

    def compaction_records(self) -> dict[StatePath, CompactionRecord | None]:
        """The compactions that wait for the job's writer, oldest first.

        Returns:
            By path; None for one that does not decode, or speaks of another job's files. Nobody
            takes it over, and nobody deletes it.
        """
        listed = sorted(info.path for info in self.store.list_dir(self.paths.compactions).objects)
        return dict(zip(listed, concurrently(self._compaction_record, listed), strict=True))

    def _compaction_record(self, path: StatePath) -> CompactionRecord | None:
        try:
            record = self._optional(path, records.decode_compaction_record)
        except FormatError:
            return None
        if record is None or (record.pipeline, record.job) != (self.paths.pipeline, self.paths.job):
            return None
        touched = [p for one in record.merged for p in (*one.input_paths, *one.output_paths)]
        ours = all(path.startswith(f"{self.paths.root}/") for path in touched)
        return record if ours else None

    def write_compaction_record(self, record: CompactionRecord) -> StatePath:
        """Leave a compaction for the job's writer, who takes it over at its next checkpoint."""
        self._protocol_only()
        name = f"{record.epoch:07}-{uuid.uuid4().hex[:16]}.json"
        path = self.paths.compactions / name
        self.store.put(path, records.encode_compaction_record(record))
        return path

    # ---- starting --------------------------------------------------------------------------------

    def start(self) -> Started:
        """Start the next worker generation and choose what it continues from.

        The number is won by creating its generation manifest; whoever loses takes the next. The
        fence is raised before anything is chosen, so that an older writer which publishes
        afterwards is found, and one that tries later is refused.

        In the legacy layout nothing is written: it has no generations, so the caller must be the
        only writer, and `store` the lease it holds as such. It continues from the newest epoch.

        Raises:
            ConflictError: a newer generation was started meanwhile.
            ProtocolError: what is there cannot be continued; nothing was written but the fence.
            InputError: legacy layout, and no lease is held.
        """
        if self.paths.layout is Layout.LEGACY:
            return self._start_legacy()
        manifest = self._take_generation()
        generation = manifest.worker_generation
        self.generation = generation
        self._own_manifest = manifest
        self.check_fence()
        found = self._resolve(generation)
        if isinstance(found, recovery.CannotStart):
            self.check_fence()
            raise ProtocolError(
                f"the job cannot be continued: {found.reason}",
                job=self.paths.job,
                path=found.ref,
                next_step="look at it with `arroyo-state epochs`; nothing was deleted",
            )
        self.check_fence()
        if isinstance(found, recovery.StartEmpty):
            return Started(generation, None, False)
        self._own_manifest = replace(manifest, base_ref=found.ref)
        self._put_own_manifest()
        state = CheckpointState.COMMITTING if found.replay_commit else CheckpointState.READY
        restored = as_checkpoint(found.manifest, found.ref, state)
        return Started(generation, restored, found.replay_commit)

    def _start_legacy(self) -> Started:
        self._sole_writer().check()
        epochs = self.epochs()
        restored = self._load_legacy(epochs[-1]) if epochs else None
        committing = restored is not None and restored.state is CheckpointState.COMMITTING
        return Started(None, restored, committing)

    def _sole_writer(self) -> Leased:
        store = self.store
        if not isinstance(store, Leased) or store.lease.path.parent != self.paths.writers:
            raise InputError(
                "worker generations exist in the protocol layout only; in the legacy layout a "
                "writer needs the lease on the job",
                job=self.paths.job,
                next_step="open the backend on `lease(store, paths, owner, "
                "directory=paths.writers)`, or use the protocol layout",
            )
        return store

    def _take_generation(self) -> GenerationManifest:
        fence = self._fact(self.paths.current_generation)
        number = fence.worker_generation + 1 if isinstance(fence, CurrentGeneration) else 1
        while True:
            manifest = GenerationManifest(
                pipeline=self._pipeline,
                job=self.paths.job,
                worker_generation=WorkerGeneration(number),
                base_ref=None,
                latest_ref=None,
                updated_at_micros=self.clock(),
            )
            path = self.paths.generation_manifest(manifest.worker_generation)
            if self.store.create(path, records.encode_generation_manifest(manifest)):
                return manifest
            number += 1

    def check_fence(self) -> None:
        """Make sure that this worker generation is still the newest; mend a fence written late.

        Raises:
            ConflictError: a newer one was started; in the legacy layout: the lease is lost. Nothing
                was deleted.
        """
        if self.paths.layout is Layout.LEGACY:
            self._sole_writer().check()
            return
        generation = self._writer
        verdict = self._asked(lambda facts: recovery.fence_verdict(self.paths, generation, facts))
        if isinstance(verdict, recovery.Fenced):
            raise ConflictError(
                f"worker generation {generation} is fenced: generation {verdict.newer} was "
                "started after it",
                job=self.paths.job,
                url=self.store.url,
                next_step="let the newer run go on, and stop this one; nothing was lost or deleted",
            )
        if isinstance(verdict, recovery.RaiseFence):
            fence = CurrentGeneration(
                pipeline=self._pipeline,
                job=self.paths.job,
                worker_generation=generation,
                generation_manifest_ref=self.paths.generation_manifest(generation),
                updated_at_micros=self.clock(),
            )
            self.store.put(self.paths.current_generation, records.encode_current_generation(fence))

    @contextmanager
    def unless_fenced(self) -> Iterator[None]:
        """Let an error be a ConflictError where a newer run is the reason of it.

        That one may have let expire what this one was about to read.
        """
        try:
            yield
        except (NotFoundError, FormatError, ProtocolError):
            self.check_fence()
            raise

    def _resolve(
        self, generation: WorkerGeneration
    ) -> recovery.Restore | recovery.StartEmpty | recovery.CannotStart:
        now = self.clock()
        facts: dict[StatePath, recovery.Record | None] = {}
        while True:
            found = recovery.resolve(self.paths, generation, facts, now_micros=now)
            if isinstance(found, recovery.Need):
                facts[found.path] = self._fact(found.path)
                continue
            if not isinstance(found, recovery.Claim):
                return found
            self._create_once(found.record_path, records.encode_epoch_record(found.record))
            del facts[found.record_path]

    def next_restore(
        self,
    ) -> recovery.Restore | recovery.Claim | recovery.StartEmpty | recovery.CannotStart:
        """Say what the next start of Arroyo's would restore in the protocol layout. Writes nothing.

        Raises:
            NotFoundError: the job was never started.
            ProtocolError: objects contradict each other, so that nothing would be restored.
        """
        self._protocol_only()
        fence = self._read(self.paths.current_generation, records.decode_current_generation)
        starting = WorkerGeneration(fence.worker_generation + 1)
        # A start raises the fence before it looks, so that it may claim.
        raised = replace(fence, worker_generation=starting)
        facts: dict[StatePath, recovery.Record | None] = {self.paths.current_generation: raised}
        while True:
            found = recovery.resolve(self.paths, starting, facts, now_micros=0, as_arroyo=True)
            if not isinstance(found, recovery.Need):
                return found
            facts[found.path] = self._fact(found.path)

    def _asked(
        self,
        question: Callable[[recovery.Facts], _T | recovery.Need],
    ) -> _T:
        """Ask a pure rule, reading what it says it needs, until it answers."""
        facts: dict[StatePath, recovery.Record | None] = {}
        while True:
            answer = question(facts)
            if not isinstance(answer, recovery.Need):
                return answer
            facts[answer.path] = self._fact(answer.path)

    def _fact(self, path: StatePath) -> recovery.Record | None:
        record = self._optional(path, decode_by_name)
        # Only writers ask for facts; readers take what a later release wrote, and report it.
        recovery.check_versions(path, record)
        return record

    # ---- writing ---------------------------------------------------------------------------------

    def write_operator_checkpoint_metadata(
        self, operator: OperatorCheckpoint, subtask_index: int | None = None
    ) -> StatePath:
        """Write an operator's metadata, and read it back.

        Args:
            subtask_index: write the durable "this subtask is done" beside the operators' folders;
                None writes the merged metadata of the operator.

        Raises:
            ProtocolError: what is read back is not what was written.
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
            raise ProtocolError("metadata reads back different from what was written", path=path)
        return path

    def write_checkpoint_metadata(self, checkpoint: Manifest | LegacyCheckpoint) -> StatePath:
        """Make the epoch visible: the last object written of it.

        In the legacy layout every operator's metadata must be there before; an epoch that exists
        may be written again with another `min_epoch` only, as Arroyo does. A real Arroyo restores
        the epoch its own database names: it needs all these objects, and does not look for more.

        Raises:
            ConflictError: somebody else owns the epoch, or a newer generation was started.
            ProtocolError: legacy layout, and an operator's metadata is missing or of another epoch.
        """
        if not isinstance(checkpoint, LegacyCheckpoint):
            return self.publish(checkpoint).ref
        if self.paths.layout is not Layout.LEGACY:
            raise InputError("a legacy checkpoint for a job of the protocol layout")
        self._check_complete(checkpoint)
        path = self.paths.legacy_metadata(checkpoint.epoch)
        if not self.store.create(path, metadata.encode_legacy_checkpoint(checkpoint)):
            self._rewrite_min_epoch(path, checkpoint)
        return path

    def _check_complete(self, checkpoint: LegacyCheckpoint) -> None:
        names = checkpoint.operators
        found = concurrently(
            lambda name: self.load_operator_metadata(name, checkpoint.epoch), names
        )
        for name, operator in zip(names, found, strict=True):
            problem = incomplete(checkpoint, name, operator)
            if problem is not None:
                raise ProtocolError(
                    f"the epoch would not be restorable: {problem}",
                    job=self.paths.job,
                    epoch=checkpoint.epoch,
                    operator=name,
                    next_step="write the merged metadata of every operator first",
                )

    def _rewrite_min_epoch(self, path: StatePath, checkpoint: LegacyCheckpoint) -> None:
        there = self._read(path, metadata.decode_legacy_checkpoint)
        if replace(there, min_epoch=checkpoint.min_epoch) != checkpoint:
            raise ConflictError(
                f"epoch {checkpoint.epoch} belongs to another checkpoint",
                job=self.paths.job,
                path=path,
                next_step="start the job again: it goes on from the epoch that exists",
            )
        if there != checkpoint:
            self.store.put(path, metadata.encode_legacy_checkpoint(checkpoint))

    def publish(self, manifest: Manifest) -> Published:
        """Publish an epoch: manifest, hint, epoch record, in this order.

        Raises:
            ConflictError: another checkpoint owns the epoch, another manifest lies at its path, or
                a newer generation was started. Nothing was deleted.
            ProtocolError: the parent is not ready.

        Source: crates/arroyo-state-protocol/src/workflow.rs, publication.
        """
        self._protocol_only()
        ref = self.paths.manifest(manifest.worker_generation, manifest.epoch)
        self._check_ours(manifest)
        self.check_fence()
        self._create_once(ref, metadata.encode_manifest(manifest))
        ready = self._asked(lambda facts: recovery.parent_ready(self.paths, manifest, facts))
        if not ready:
            self.check_fence()
            raise ProtocolError(
                "the parent of the new checkpoint is not ready",
                job=self.paths.job,
                epoch=manifest.epoch,
                parent=manifest.parent_ref,
                next_step="start the job again: it finishes the parent's commit first",
            )
        assert self._own_manifest is not None
        self._own_manifest = replace(self._own_manifest, latest_ref=ref)
        self._put_own_manifest()
        record = recovery.claim_of(ref, manifest, self.clock())
        path = self.paths.epoch_record(manifest.epoch)
        if not self.store.create(path, records.encode_epoch_record(record)):
            owner = self._read(path, records.decode_epoch_record)
            if owner.checkpoint_ref != ref:
                raise ConflictError(
                    f"epoch {manifest.epoch} belongs to another checkpoint",
                    job=self.paths.job,
                    owner=owner.checkpoint_ref,
                    ours=ref,
                    # An older run published just before it was fenced: starting anew goes on
                    # from its epoch. A newer owner goes on by itself.
                    retryable=owner.worker_generation < manifest.worker_generation,
                    next_step="start it again: it goes on from the epoch that exists"
                    if owner.worker_generation < manifest.worker_generation
                    else "let the other run go on; this one stops and deletes nothing",
                )
        # Whoever was fenced meanwhile may have made an epoch that has come and gone already. It
        # must not commit; a newer run finds the epoch, if it is one, and finishes it.
        self.check_fence()
        return Published(ref, manifest)

    def _check_ours(self, manifest: Manifest) -> None:
        expected = (self._pipeline, self.paths.job, self._writer)
        if (manifest.pipeline, manifest.job, manifest.worker_generation) != expected:
            raise InputError(
                "the manifest is of another job or worker generation", job=manifest.job
            )
        if self._own_manifest is None:
            raise InputError("publish needs a started worker generation", next_step="call start()")

    def mark_committed(self, checkpoint: Checkpoint) -> None:
        """Write the commit marker: both phases of the epoch's commit are done.

        Arroyo keeps that in its database in the legacy layout; a note of ours stands for it there.
        """
        if self.paths.layout is Layout.LEGACY:
            note = CommitNote(
                job=checkpoint.job,
                epoch=checkpoint.epoch,
                finish_time_micros=checkpoint.finish_time_micros,
            )
            path = self.paths.commit_note(checkpoint.epoch)
            self.store.put(path, records.encode_commit_note(note))
            return
        assert checkpoint.worker_generation is not None
        ref = checkpoint.ref
        marker = CommittedMarker(
            pipeline=self._pipeline,
            job=checkpoint.job,
            epoch=checkpoint.epoch,
            checkpoint_worker_generation=checkpoint.worker_generation,
            writer_worker_generation=self._writer,
            checkpoint_ref=ref,
        )
        path = recovery.marker_path(ref)
        if self.store.create(path, records.encode_committed_marker(marker)):
            return
        found = self._read(path, records.decode_committed_marker)
        writer = marker.writer_worker_generation
        if replace(found, writer_worker_generation=writer, unknown=b"") != marker:
            raise ProtocolError("the commit marker belongs to another checkpoint", path=path)

    def _committed_note(self, head: LegacyCheckpoint) -> bool:
        note = self._optional(self.paths.commit_note(head.epoch), records.decode_commit_note)
        return note == CommitNote(
            job=head.job, epoch=head.epoch, finish_time_micros=head.finish_time_micros
        )

    def _create_once(self, path: StatePath, data: bytes) -> None:
        """Create an object; one with the very same bytes is ours (an answer got lost)."""
        if self.store.create(path, data):
            return
        if path.name.endswith(".record"):
            return  # a lost claim is not an error: whoever won is read next
        if self.store.read(path) != data:
            raise ConflictError(
                "another object lies where this epoch's manifest belongs",
                path=path,
                next_step="start the job again: the next worker generation has a directory of its "
                "own; nothing was deleted",
            )

    def _put_own_manifest(self) -> None:
        assert self._own_manifest is not None
        self.store.put(
            self.paths.generation_manifest(self._own_manifest.worker_generation),
            records.encode_generation_manifest(self._own_manifest),
        )

    # ---- cleaning up -----------------------------------------------------------------------------

    def cleanup_checkpoint(self, min_epoch: Epoch) -> ExpirePlan:
        """Remove the epochs below `min_epoch`: data, then records, then manifests, oldest first.

        Carries out the expire plan of `planning.gc`, without logic of its own. Stopped half way,
        the next call finishes it.

        Raises:
            ProtocolError: `min_epoch` is newer than the newest checkpoint.
            StorageError: objects could not be deleted; what refers to them is still there.
        """
        plan, known = self._planned_expiry(min_epoch)
        while any(plan.steps) and self.retained() != known:
            # Somebody has pinned an epoch, or moved one aside, while this was thought about.
            plan, known = self._planned_expiry(min_epoch)
        self.carry_out(plan)
        return plan

    def expire_plan(self, min_epoch: Epoch) -> ExpirePlan:
        """Plan what goes with the epochs below `min_epoch`, from every epoch's metadata.

        Raises:
            ProtocolError: `min_epoch` is newer than the newest checkpoint.
            NotFoundError, FormatError: an object of an epoch that stays is missing or broken.
        """
        return self._planned_expiry(min_epoch)[0]

    def _planned_expiry(self, min_epoch: Epoch) -> tuple[ExpirePlan, Retained]:
        """The plan, and what it knows to stay besides the newest epochs."""
        history = self._whole_history(min_epoch)
        retained = self.retained()
        if self.paths.layout is Layout.LEGACY:
            # A pinned epoch stays as well: what it lists must be known in full.
            pinned = retained.pinned
            history = [self._load_legacy(c.epoch) if c.epoch in pinned else c for c in history]
        plan = plan_expire(
            self.paths,
            history,
            min_epoch,
            pinned=retained.pinned,
            needed=self._needed_aside(retained),
        )
        return plan, retained

    def _whole_history(self, min_epoch: Epoch) -> list[Checkpoint]:
        """What a kept epoch lists must be known in full before anything may go."""
        epochs = sorted(self.epochs(), reverse=True)
        while epochs:
            try:
                return self.load_history(oldest_kept(epochs, min_epoch, self.paths.layout))
            except NotFoundError:
                before, epochs = epochs, sorted(self.epochs(), reverse=True)
                if epochs == before:
                    raise  # else somebody else has let some expire while they were read
        return []

    def retained(self) -> Retained:
        """What stays besides the newest epochs: pins, and what lies in quarantine.

        Raises:
            FormatError: it does not decode; nothing may be deleted then.
        """
        return self._optional(self.paths.retained, collecting.decode_retained) or Retained()

    def _needed_aside(self, retained: Retained) -> frozenset[StatePath]:
        """What epochs in quarantine list and was not moved there with them."""
        needed: set[StatePath] = set()
        for name in retained.quarantines:
            path = self.paths.quarantine / name / "index.json"
            aside = self._read(path, partial(collecting.decode_quarantined, name=name))
            needed.update(aside.needs.paths)
        return frozenset(needed)

    def carry_out(self, plan: ExpirePlan) -> None:
        """Delete what a plan says, each step complete before the next.

        Raises:
            StorageError: objects could not be deleted; what refers to them is still there.
        """
        for step in plan.steps:
            delete_all(self.store, step)
        if self.paths.layout is Layout.LEGACY and plan.epochs:
            self.note_min_epoch(plan.keep_from)

    def note_min_epoch(self, min_epoch: Epoch) -> None:
        """Let the newest epoch say which is the oldest that is left, as Arroyo's cleanup does."""
        newest = self.paths.legacy_metadata(self.epochs()[-1])
        head = self._read(newest, metadata.decode_legacy_checkpoint)
        if head.min_epoch < min_epoch:
            changed = replace(head, min_epoch=min_epoch)
            self.store.put(newest, metadata.encode_legacy_checkpoint(changed))

    # ---- plumbing --------------------------------------------------------------------------------

    @property
    def _pipeline(self) -> PipelineId:
        assert self.paths.pipeline is not None
        return self.paths.pipeline

    @property
    def _writer(self) -> WorkerGeneration:
        if self.generation is None:
            raise InputError("writing needs a worker generation", next_step="call start()")
        return self.generation

    def _protocol_only(self) -> None:
        if self.paths.layout is not Layout.PROTOCOL:
            raise InputError(
                "worker generations exist in the protocol layout only", job=self.paths.job
            )

    def _read(
        self, path: StatePath, decode: Callable[[bytes, str], _T], missing: str | None = None
    ) -> _T:
        try:
            data = self.store.read(path)
        except NotFoundError as error:
            raise NotFoundError(
                missing or "an object that the job's metadata refers to is missing",
                job=self.paths.job,
                path=path,
                url=self.store.url,
                next_step="list what there is with `arroyo-state epochs`",
            ) from error
        return decode(data, path)

    def _optional(self, path: StatePath, decode: Callable[[bytes, str], _T]) -> _T | None:
        try:
            data = self.store.read(path)
        except NotFoundError:
            return None
        return decode(data, path)


def delete_all(store: ObjectStore, paths: Sequence[StatePath]) -> None:
    """Delete objects in bulk; those that are gone already count as deleted.

    Raises:
        StorageError: some could not be deleted.
    """
    for start in range(0, len(paths), DELETE_BATCH):
        outcome = store.delete_many(paths[start : start + DELETE_BATCH])
        if outcome.failed:
            path, reason = next(iter(outcome.failed.items()))
            raise StorageError(
                f"{len(outcome.failed)} objects could not be deleted; the first: {reason}",
                path=path,
                url=store.url,
                next_step="run it again: what refers to them is still there",
            )


def decode_by_name(data: bytes, path: str) -> recovery.Record:
    """Decode a record of the protocol layout by what its name says it is."""
    name = path.rpartition("/")[2]
    if name == "checkpoint-manifest.pb":
        return metadata.decode_manifest(data, path)
    if name == "committed.json":
        return records.decode_committed_marker(data, path)
    if name == "generation-manifest.json":
        return records.decode_generation_manifest(data, path)
    if name == CURRENT_GENERATION:
        return records.decode_current_generation(data, path)
    return records.decode_epoch_record(data, path)


def _misfit(
    operator: OperatorCheckpoint, name: TableName, path: StatePath, found: pa.Schema
) -> str | None:
    """Why a file does not give rows of its table; None = it does."""
    config, files = operator.configs.get(name), operator.tables[name]
    if config is None or config.kind is not files.kind:
        return f"table {name} has no configuration of its kind"
    entries = files.files if isinstance(files, ExpiringTimeKeyFiles) else ()
    listed = next((entry for entry in entries if entry.path == path), None)
    columns, stored = columns_of(found), stored_form(found)
    return reading_of(config, table_forms(config), columns, stored, listed).problem


def as_checkpoint(manifest: Manifest, ref: StatePath, state: CheckpointState) -> Checkpoint:
    """A manifest of the protocol layout as a checkpoint."""
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


def legacy_checkpoint(
    head: LegacyCheckpoint,
    operators: Sequence[OperatorCheckpoint],
    ref: StatePath,
    state: CheckpointState,
) -> Checkpoint:
    """The objects of an epoch of the legacy layout as a checkpoint."""
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


StateBackend = ParquetBackend
"""The backend that the runtime keeps its state in, by the name that Arroyo gives its own.

Source: crates/arroyo-state/src/lib.rs, `StateBackend`.
"""
