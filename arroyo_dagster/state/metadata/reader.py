"""BackendReader: reads the metadata tree of one job, in either layout. Writes nothing.

Source: crates/arroyo-state/src/lib.rs, `BackingStore`; crates/arroyo-state/src/parquet.rs;
crates/arroyo-state-protocol/src/store.rs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from arroyo_dagster.errors import (
    FormatError,
    InputError,
    NotFoundError,
    ProtocolError,
)
from arroyo_dagster.state.codec import records
from arroyo_dagster.state.metadata.epoch_finder import EpochFinder
from arroyo_dagster.state.metadata.objects import missing_epoch
from arroyo_dagster.state.model.checkpoints import (
    RECORD_VERSION,
    Checkpoint,
    CheckpointState,
    CommitNote,
    EpochRecord,
    LegacyCheckpoint,
    LostObject,
    Manifest,
    OperatorCheckpoint,
)
from arroyo_dagster.state.model.ids import (
    Epoch,
    OperatorId,
    StatePath,
    TableName,
    WorkerGeneration,
)
from arroyo_dagster.state.model.layout import (
    JobPaths,
    Layout,
)
from arroyo_dagster.state.model.tables import ExpiringTimeKeyFiles
from arroyo_dagster.state.planning.restore import recovery
from arroyo_dagster.state.planning.restore.lost_metadata import cut_checkpoint
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore

if TYPE_CHECKING:
    import pyarrow as pa

    from arroyo_dagster.state.model.compaction import CompactionRecord
    from arroyo_dagster.state.model.garbage import JobPins

_T = TypeVar("_T")


class BackendReader(EpochFinder):
    """Reads the metadata tree of one job.

    Args:
        store: contains the job's objects.
        paths: of the job; they determine the layout.
    """

    # ---- epochs ----------------------------------------------------------------------------------

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

    def _parent_ref(self, checkpoint: Checkpoint) -> StatePath | None:
        ref = checkpoint.parent_ref
        if ref is not None:
            recovery.expect_manifest_path(self.paths, ref)
        return ref

    def load_checkpoint_metadata(self, epoch: Epoch) -> Checkpoint:
        """Read one epoch. Errors as `load`."""
        from arroyo_dagster.state.codec import metadata  # loads protobuf

        if self.paths.layout is Layout.LEGACY:
            return self._load_legacy(epoch)
        record = self.objects.epoch_record(epoch)
        manifest = self.objects.read(record.checkpoint_ref, metadata.decode_manifest)
        return self._checkpoint(record.checkpoint_ref, manifest, record)

    def load_remains(self, epoch: Epoch) -> tuple[Checkpoint, tuple[StatePath, ...]]:
        """Read what is left of an epoch, and return which objects of its metadata do not exist.

        The marker of a commit is included, although the newest epoch may merely not have it yet.

        Raises:
            NotFoundError: the object that makes the epoch exist is missing.
            FormatError: an object of the epoch does not decode.
        """
        if self.paths.layout is Layout.PROTOCOL:
            checkpoint, missing = self.load_checkpoint_metadata(epoch), []
        else:
            head, operators = self._legacy_objects(epoch, whole=False)
            missing = [path for path, operator in operators.items() if operator is None]
            checkpoint = self._as_legacy(head, operators.values())
        if checkpoint.state is CheckpointState.COMMITTING:
            missing.append(self._marker_of(checkpoint))
        return checkpoint, tuple(missing)

    def _marker_of(self, checkpoint: Checkpoint) -> StatePath:
        if self.paths.layout is Layout.LEGACY:
            return self.paths.commit_note(checkpoint.epoch)
        return recovery.marker_path(checkpoint.ref)

    def load_chain(self, oldest: Checkpoint) -> Iterator[Checkpoint]:
        """Follow the parents of the oldest epoch that has a record, newest first.

        A cleanup deletes records before manifests: so the chain leads to all that it left.

        Raises:
            ProtocolError: the chain leads out of the job, or to an epoch that is not older.
        """
        from arroyo_dagster.state.codec import metadata  # loads protobuf

        while (ref := self._parent_ref(oldest)) is not None:
            manifest = self.objects.optional(ref, metadata.decode_manifest)
            if manifest is None:
                return
            if manifest.epoch >= oldest.epoch:
                raise ProtocolError(
                    f"the parent of epoch {oldest.epoch} belongs to epoch {manifest.epoch}",
                    job=self.paths.job,
                    path=ref,
                    next_step="check it with `arroyo-state epochs`; nothing was deleted",
                )
            oldest = as_checkpoint(manifest, ref, CheckpointState.PARTIALLY_COLLECTED)
            yield oldest

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

    def _load_legacy(self, epoch: Epoch) -> Checkpoint:
        head, operators = self._legacy_objects(epoch, whole=True)
        return self._as_legacy(head, operators.values())

    def _legacy_objects(
        self, epoch: Epoch, *, whole: bool
    ) -> tuple[LegacyCheckpoint, dict[StatePath, OperatorCheckpoint | None]]:
        """Return the epoch's head object, and those of its operators by path; None = missing."""
        from arroyo_dagster.state.codec import metadata  # loads protobuf

        path = self.paths.legacy_metadata(epoch)
        head = self.objects.read(path, metadata.decode_legacy_checkpoint, missing_epoch(epoch))
        names = [self.paths.operator_metadata(name, epoch) for name in head.operators]
        read = self.objects.read if whole else self.objects.optional
        operators = concurrently(lambda name: read(name, metadata.decode_operator), names)
        return head, dict(zip(names, operators, strict=True))

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
            None if the operator, or the epoch, does not exist.

        Raises:
            FormatError: it exists, but is broken.
        """
        from arroyo_dagster.state.codec import metadata  # loads protobuf

        if self.paths.layout is Layout.LEGACY:
            return self.objects.optional(
                self.paths.operator_metadata(operator, epoch), metadata.decode_operator
            )
        try:
            return self.load_checkpoint_metadata(epoch).operator(operator)
        except NotFoundError:
            return None

    # ---- can it be restored ----------------------------------------------------------------------

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
            NotFoundError: the job was never started.
            ProtocolError: objects contradict each other, so that nothing would be restored.
        """
        self._protocol_only()
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

    def _committed_note(self, head: LegacyCheckpoint) -> bool:
        note = self.objects.optional(self.paths.commit_note(head.epoch), records.decode_commit_note)
        return note == CommitNote(
            job=head.job, epoch=head.epoch, finish_time_micros=head.finish_time_micros
        )

    def job_pins(self) -> JobPins:
        """Read what is kept besides the newest epochs: pins and quarantines.

        Raises:
            FormatError: the pins do not decode; then nothing may be deleted.
        """
        return self.objects.job_pins()

    # ---- plumbing --------------------------------------------------------------------------------

    def _protocol_only(self) -> None:
        if self.paths.layout is not Layout.PROTOCOL:
            raise InputError(
                "worker generations exist in the protocol layout only", job=self.paths.job
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


def legacy_head(checkpoint: Checkpoint) -> LegacyCheckpoint:
    """Return the checkpoint's own metadata of an epoch of the legacy layout."""
    return LegacyCheckpoint(
        job=checkpoint.job,
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


# ---- whether a restore could open the data files that an epoch lists -----------------------------


def cut_objects(
    store: ObjectStore, paths: JobPaths, checkpoint: Checkpoint
) -> Iterator[LostObject]:
    """List an epoch's directory, and yield the metadata that does not name all that lies there."""
    directory = paths.checkpoint(checkpoint.epoch, checkpoint.worker_generation)
    listed = (*store.list_dir(paths.changes).objects, *store.list(directory))
    names = [info.path for info in listed if info.addressable]
    yield from cut_checkpoint(paths, checkpoint, names)


def check_whole(store: ObjectStore, paths: JobPaths, checkpoint: Checkpoint) -> None:
    """Check that the metadata of an epoch names all that lies in its directory; lists it.

    Raises:
        FormatError: an object was cut, for example by an interrupted copy.
    """
    cut = next(cut_objects(store, paths, checkpoint), None)
    if cut is not None:
        raise FormatError(
            f"epoch {checkpoint.epoch} cannot be restored: its metadata is damaged: {cut.reason}",
            job=paths.job,
            epoch=checkpoint.epoch,
            path=cut.path,
            next_step=restore_or_roll_back(paths, checkpoint, "object"),
        )


def check_files(store: ObjectStore, paths: JobPaths, checkpoint: Checkpoint) -> None:
    """Prove that every data file of an epoch is there and gives rows of its table.

    Raises:
        FormatError: a listed file is missing or broken; names the first, and how many.
    """
    listed = [
        (operator, name, path)
        for operator in checkpoint.operators
        for name, files in operator.tables.items()
        for path in dict.fromkeys(files.paths)
    ]
    problems = [p for p in concurrently(lambda at: file_error(store, *at), listed) if p]
    if problems:
        facts: dict[str, Any] = {"job": paths.job, "epoch": checkpoint.epoch} | problems[0].facts
        raise FormatError(
            f"epoch {checkpoint.epoch} cannot be restored: {len(problems)} of {len(listed)} data "
            f"files are missing or broken; the first: {problems[0].message}",
            next_step=restore_or_roll_back(paths, checkpoint, "file"),
            **facts,
        ) from problems[0]


def file_error(
    store: ObjectStore, operator: OperatorCheckpoint, name: TableName, path: StatePath
) -> NotFoundError | FormatError | None:
    """Say why a file does not give rows of its table; None = it does."""
    from arroyo_dagster.state.codec.parquet import read_facts

    try:
        with store.open_input(path) as file:
            facts = read_facts(file, path)
        problem = _misfit(operator, name, path, facts.schema)
    except NotFoundError:
        return NotFoundError("a data file is missing", operator=operator.operator, path=path)
    except FormatError as error:
        return error
    if problem is None:
        return None
    return FormatError(
        f"a data file does not belong to its table: {problem}",
        operator=operator.operator,
        table=name,
        path=path,
    )


def _misfit(
    operator: OperatorCheckpoint, name: TableName, path: StatePath, found: pa.Schema
) -> str | None:
    """Return why a file cannot be read as rows of its table; None = it can."""
    from arroyo_dagster.state.planning.verify.checks import reading_of
    from arroyo_dagster.state.tables.forms import columns_of, stored_form, table_forms

    config, files = operator.configs.get(name), operator.tables[name]
    if config is None or config.kind is not files.kind:
        return f"table {name} has no configuration of its kind"
    entries = files.files if isinstance(files, ExpiringTimeKeyFiles) else ()
    listed = next((entry for entry in entries if entry.path == path), None)
    columns, stored = columns_of(found), stored_form(found)
    return reading_of(config, table_forms(config), columns, stored, listed).problem


def restore_or_roll_back(paths: JobPaths, checkpoint: Checkpoint, what: str) -> str:
    """Return the next step for an epoch with a missing or broken object."""
    if checkpoint.progress is None:
        return f"restore another epoch, or restore the {what}"
    command = f"arroyo-state rollback {paths.root}"
    return f"restore the {what}, or go back to an older epoch: `{command}` lists them"
