"""BackendReader: reads the metadata tree of one job, in either layout. Writes nothing.

Source: crates/arroyo-state/src/lib.rs, `BackingStore`; crates/arroyo-state/src/parquet.rs;
crates/arroyo-state-protocol/src/store.rs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from arroyo_dagster.errors import (
    FormatError,
    InputError,
    NotFoundError,
    ProtocolError,
)
from arroyo_dagster.state.codec import metadata, records
from arroyo_dagster.state.metadata.objects import MetadataReader, missing_epoch
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
from arroyo_dagster.state.model.compaction import CompactionRecord
from arroyo_dagster.state.model.garbage import JobPins
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
    parse_checkpoint_dir,
    parse_epoch_record,
    parse_manifest_path,
)
from arroyo_dagster.state.model.numbers import parse_number
from arroyo_dagster.state.model.tables import ExpiringTimeKeyFiles
from arroyo_dagster.state.planning.restore import recovery
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore

if TYPE_CHECKING:
    import pyarrow as pa

_T = TypeVar("_T")


PROBE_COUNT = 8
"""How many numbers after and before an epoch are probed if a listing has a gap."""


class BackendReader:
    """Reads the metadata tree of one job.

    Args:
        store: contains the job's objects.
        paths: of the job; they determine the layout.
    """

    def __init__(self, store: ObjectStore, paths: JobPaths) -> None:
        self.store = store
        self.paths = paths
        self.objects = MetadataReader(store, paths)

    # ---- epochs ----------------------------------------------------------------------------------

    def epochs(self) -> list[Epoch]:
        """Return the epochs with a record (protocol) or checkpoint metadata (legacy), ascending."""
        if self.paths.layout is Layout.PROTOCOL:
            listed = self.store.list_dir(self.paths.epochs).objects
            found = (parse_epoch_record(info.path.name) for info in listed)
            return sorted(epoch for epoch in found if epoch is not None)
        return self._existing(self.checkpoint_dirs())

    def exists(self, epoch: Epoch) -> bool:
        """Whether the epoch exists: read by its name, which does not depend on a listing."""
        legacy = self.paths.layout is Layout.LEGACY
        root = self.paths.legacy_metadata if legacy else self.paths.epoch_record
        return self.store.head(root(epoch)) is not None

    def every_epoch(self, named: Collection[Epoch] = ()) -> list[Epoch]:
        """Return the epochs as `epochs`, and those that an incomplete listing misses: it probes a
        few numbers after the newest epoch, and before each epoch without a predecessor.

        Args:
            named: epochs known from elsewhere; included if they exist.
        """
        found = {*self.epochs()}
        found.update(self._existing([epoch for epoch in named if epoch not in found]))
        asked: set[Epoch] = set()
        while wanted := _beside(found) - asked:
            found.update(self._existing(sorted(wanted)))
            asked |= wanted
        return sorted(found)

    def _existing(self, epochs: Sequence[Epoch]) -> list[Epoch]:
        there = concurrently(self.exists, epochs)
        return [epoch for epoch, exists in zip(epochs, there, strict=True) if exists]

    def checkpoint_dirs(self, generation: WorkerGeneration | None = None) -> list[Epoch]:
        """Return the numbers of the checkpoint directories, ascending; one level is listed."""
        below = self.store.list_dir(self.paths.checkpoints(generation)).prefixes
        found = (parse_checkpoint_dir(path.name) for path in below)
        return sorted(epoch for epoch in found if epoch is not None)

    def unlisted_behind(self, newest: Epoch, listed: Collection[Epoch] = ()) -> list[Epoch]:
        """Return existing epochs of the legacy layout that a listing misses, among the few numbers
        after the newest one it shows: an incomplete listing ends too early.

        Args:
            newest: the newest listed epoch; 0 if none is listed.
            listed: numbers that need not be probed.
        """
        behind = [Epoch(n) for n in range(newest + 1, newest + 1 + PROBE_COUNT) if n not in listed]
        return self._existing(behind)

    def newest_number(self) -> Epoch:
        """Return the highest number of an epoch, or of a manifest that owns none; 0 if there is
        none.

        The objects need not decode. Objects of the newest run that a listing misses are found by
        name.
        """
        newest = max(self.every_epoch(), default=Epoch(0))
        if self.paths.layout is Layout.LEGACY:
            return newest
        below = self.store.list_dir(self.paths.generations).prefixes
        parsed = (parse_number(path.name) for path in below)
        numbers = [WorkerGeneration(n) for n in parsed if n is not None]
        listed = concurrently(self.checkpoint_dirs, numbers)
        refs = {
            self.paths.manifest(generation, epoch)
            for generation, epochs in zip(numbers, listed, strict=True)
            for epoch in epochs
            if epoch > newest
        }
        refs.update(self._hinted(max(numbers, default=WorkerGeneration(0))))
        found = {ref: parse_manifest_path(ref) for ref in sorted(refs)}
        managed = {r: one.epoch for r, one in found.items() if one and one.paths == self.paths}
        there = zip(managed.values(), concurrently(self.store.head, list(managed)), strict=True)
        return max((newest, *(epoch for epoch, info in there if info is not None)))

    def _hinted(self, listed: WorkerGeneration) -> Iterator[StatePath]:
        """Yield the manifests that the newest worker generations name as published last."""
        for number in range(max(0, listed - PROBE_COUNT), listed + PROBE_COUNT):
            path = self.paths.generation_manifest(WorkerGeneration(number))
            try:
                found = self.objects.optional(path, records.decode_generation_manifest)
            except FormatError:
                continue
            if found is not None and found.latest_ref is not None:
                yield found.latest_ref

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

    def load_history(self, epochs: Iterable[Epoch] | None = None) -> list[Checkpoint]:
        """Read epochs, newest first, including those that an interrupted cleanup has deleted in
        part.

        Args:
            epochs: the epochs to read; None = every listed one.

        Raises:
            FormatError: an object does not decode.
        """
        numbers = sorted(self.epochs() if epochs is None else epochs, reverse=True)
        if self.paths.layout is Layout.LEGACY:
            return concurrently(lambda epoch: self._load_legacy(epoch, whole=False), numbers)
        history = concurrently(self.load_checkpoint_metadata, numbers)
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
            found, gone = self.load_checkpoint_metadata(epoch), []
        else:
            head, operators = self._legacy_objects(epoch, whole=False)
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

        A cleanup deletes records before manifests: so the chain leads to all that it left.

        Raises:
            ProtocolError: the chain leads out of the job, or to an epoch that is not older.
        """
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
        versions = (one.version for one in (record, marker) if one is not None)
        strange = next((one for one in versions if one != RECORD_VERSION), RECORD_VERSION)
        return replace(as_checkpoint(manifest, ref, standing.state), record_version=strange)

    def _load_legacy(self, epoch: Epoch, *, whole: bool = True) -> Checkpoint:
        head, operators = self._legacy_objects(epoch, whole=whole)
        return self._as_legacy(head, operators.values())

    def _legacy_objects(
        self, epoch: Epoch, *, whole: bool
    ) -> tuple[LegacyCheckpoint, dict[StatePath, OperatorCheckpoint | None]]:
        """Return the epoch's head object, and those of its operators by path; None = missing."""
        path = self.paths.legacy_metadata(epoch)
        head = self.objects.read(path, metadata.decode_legacy_checkpoint, missing_epoch(epoch))
        names = [self.paths.operator_metadata(name, epoch) for name in head.operators]
        read = self.objects.read if whole else self.objects.optional
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
            None if the operator, or the epoch, does not exist.

        Raises:
            FormatError: it exists, but is broken.
        """
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

        Every data file that it lists must exist, have a footer that decodes, and have columns that
        can be read as rows of its table.

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
        problems = [p for p in concurrently(lambda at: self._file_error(*at), listed) if p]
        if problems:
            facts: dict[str, Any] = {"job": self.paths.job, "epoch": epoch} | problems[0].facts
            raise FormatError(
                f"epoch {epoch} cannot be restored: {len(problems)} of {len(listed)} data files "
                f"are missing or broken; the first: {problems[0].message}",
                next_step=restore_or_roll_back(self.paths, checkpoint, "file"),
                **facts,
            ) from problems[0]
        return checkpoint

    def _file_error(
        self, operator: OperatorCheckpoint, name: TableName, path: StatePath
    ) -> NotFoundError | FormatError | None:
        from arroyo_dagster.state.codec.parquet import read_facts

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
            f"a data file does not belong to its table: {problem}",
            operator=operator.operator,
            table=name,
            path=path,
        )

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
        try:
            record = self.objects.optional(path, records.decode_compaction_record)
        except FormatError:
            return None
        if record is None or (record.pipeline, record.job) != (self.paths.pipeline, self.paths.job):
            return None
        touched = [p for one in record.merged for p in (*one.input_paths, *one.output_paths)]
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


def _beside(epochs: Collection[Epoch]) -> set[Epoch]:
    """Return the missing numbers at which an unlisted epoch may exist."""
    first = (epoch for epoch in epochs if epoch - 1 not in epochs)
    found = {n for epoch in first for n in range(max(0, epoch - PROBE_COUNT), epoch)}
    newest = max(epochs, default=0)
    found.update(range(newest + 1, newest + 1 + PROBE_COUNT))
    return {Epoch(number) for number in found if number not in epochs}


def restore_or_roll_back(paths: JobPaths, checkpoint: Checkpoint, what: str) -> str:
    """Return the next step for an epoch with a missing or broken object."""
    if checkpoint.progress is None:
        return f"restore another epoch, or restore the {what}"
    command = f"arroyo-state rollback {paths.root}"
    return f"restore the {what}, or go back to an older epoch: `{command}` lists them"


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
