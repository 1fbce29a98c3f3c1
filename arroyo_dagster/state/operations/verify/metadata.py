"""Read the metadata around one epoch of a job, even if some of it is missing or broken.

Each object is read once; an object that does not decode is a fact, not an error.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from arroyo_dagster.errors import ArroyoStateError, FormatError, StorageError
from arroyo_dagster.state.codec import metadata, records
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.metadata.objects import MetadataReader, decode_by_name
from arroyo_dagster.state.metadata.restorable import cut_objects
from arroyo_dagster.state.metadata.tree import CheckpointTree, as_checkpoint, legacy_checkpoint
from arroyo_dagster.state.model.checkpoints import (
    Checkpoint,
    CheckpointState,
    CommitNote,
    CommittedMarker,
    CurrentGeneration,
    EpochRecord,
    LegacyCheckpoint,
    Manifest,
    OperatorCheckpoint,
)
from arroyo_dagster.state.model.ids import Epoch, OperatorId, StatePath, WorkerGeneration
from arroyo_dagster.state.model.layout import JobPaths, Layout
from arroyo_dagster.state.planning.restore import recovery
from arroyo_dagster.state.planning.restore.partially_collected import (
    LEGACY_EPOCHS_BEFORE_NEWEST,
    behind_pinned,
    rolled_back,
)
from arroyo_dagster.state.planning.verify.findings import KEEP_AND_REPORT, Finding, error
from arroyo_dagster.state.planning.verify.protocol import (
    NextStart,
    ProtocolFacts,
    head_of,
    protocol_findings,
)
from arroyo_dagster.state.planning.verify.records import (
    LegacyFacts,
    MetadataObject,
    Unreadable,
    legacy_findings,
    unreadable_finding,
)
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore

_Decode = Callable[[bytes, str], MetadataObject]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobMetadata:
    """The metadata around one epoch, with the findings about it.

    Attributes:
        root: the object that makes the epoch exist.
        checkpoint: the epoch; None if its objects do not determine its content.
        history: consecutive visible epochs that could be read, oldest first, the verified one last.
        findings: about metadata objects.
        objects: how many were read.
    """

    root: StatePath
    epoch: Epoch
    checkpoint: Checkpoint | None
    history: tuple[Checkpoint, ...]
    findings: tuple[Finding, ...]
    objects: int


def read_job_metadata(
    store: ObjectStore, paths: JobPaths, epochs: Sequence[Epoch], epoch: Epoch, history: int
) -> JobMetadata:
    """Read and check the metadata of an epoch and of up to `history` visible epochs before it.

    Args:
        epochs: the visible epochs, ascending; `epoch` is one of them.

    Raises:
        StorageError: the store failed.
    """
    inspected = tuple(number for number in epochs if number <= epoch)[-history - 1 :]
    if any(later - earlier > 1 for earlier, later in itertools.pairwise(inspected)):
        inspected = _without_pinned(store, paths, inspected)
    reader = _Reader(store, paths)
    if paths.layout is Layout.LEGACY:
        reader.read_all(map(paths.legacy_metadata, inspected), metadata.decode_legacy_checkpoint)
    else:
        records_of = [paths.epoch_record(number) for number in inspected]
        reader.read_all(records_of, records.decode_epoch_record)
        _read_manifests(reader, records_of)
    rollbacks = _rollbacks(reader, inspected)
    abandoned = rolled_back(inspected[-1], inspected, rollbacks)
    lineage = tuple(number for number in inspected if number not in abandoned)
    rollbacks = {number: to for number, to in rollbacks.items() if number not in abandoned}
    judge = _legacy if paths.layout is Layout.LEGACY else _protocol
    return judge(reader, lineage, newest=epochs[-1], rollbacks=rollbacks)


def _rollbacks(reader: _Reader, epochs: Iterable[Epoch]) -> dict[Epoch, Epoch]:
    """Return the epochs that a rollback published, with the epochs they restored."""
    rollbacks: dict[Epoch, Epoch] = {}
    for epoch in epochs:
        head = _head(reader, epoch)
        if head is not None and head.progress is not None and head.epoch == epoch:
            restored = head.progress.rolled_back_to
            rollbacks.update({} if restored is None else {epoch: restored})
    return rollbacks


def _head(reader: _Reader, epoch: Epoch) -> Manifest | LegacyCheckpoint | None:
    """Return the manifest of an epoch, or its legacy checkpoint; None if it is unreadable."""
    if reader.paths.layout is Layout.LEGACY:
        legacy: LegacyCheckpoint | None = reader.get(
            reader.paths.legacy_metadata(epoch), LegacyCheckpoint
        )
        return legacy
    record = reader.get(reader.paths.epoch_record(epoch), EpochRecord)
    manifest: Manifest | None = record and reader.get(record.checkpoint_ref, Manifest)
    return manifest


def _without_pinned(
    store: ObjectStore, paths: JobPaths, epochs: tuple[Epoch, ...]
) -> tuple[Epoch, ...]:
    """Return the epochs after the last gap that follows a pinned epoch."""
    try:
        pinned = ParquetBackend(store, paths).job_pins().ever_pinned
    except FormatError:
        return epochs  # an unexplained gap is reported
    return behind_pinned(epochs, pinned)


class _UnreadableFact(Exception):
    """It is unknown what a start would restore."""


class _Reader(MetadataReader):
    """Reads objects, each once, and keeps them."""

    def __init__(self, store: ObjectStore, paths: JobPaths) -> None:
        super().__init__(store, paths)
        self.objects: dict[StatePath, MetadataObject | Unreadable | None] = {}

    def _check_identity(self, path: StatePath, value: object) -> None:
        """Keep an object of another epoch or job: a finding reports it."""

    def read_all(self, paths: Iterable[StatePath], decode: _Decode) -> None:
        """Read objects that were not read before, concurrently."""
        unread = [path for path in dict.fromkeys(paths) if path not in self.objects]
        results = concurrently(lambda path: self.read_or_error(path, decode), unread)
        self.objects.update(
            (path, Unreadable(read.message) if isinstance(read, ArroyoStateError) else read)
            for path, read in zip(unread, results, strict=True)
        )

    def fact(self, path: StatePath) -> recovery.MetadataRecord | None:
        """Read a record that determines what a start restores; None if it does not exist.

        Raises:
            _UnreadableFact: it does not decode.
        """
        self.read_all([path], decode_by_name)
        record = self.objects[path]
        if isinstance(record, Unreadable | LegacyCheckpoint | OperatorCheckpoint):
            raise _UnreadableFact
        return record

    def get(self, path: StatePath, kind: type[Any]) -> Any:
        """Return an object that was read; None if it is missing, broken or of another kind."""
        record = self.objects.get(path)
        return record if isinstance(record, kind) else None


# ---- protocol ------------------------------------------------------------------------------------


def _protocol(
    reader: _Reader, inspected: tuple[Epoch, ...], newest: Epoch, rollbacks: Mapping[Epoch, Epoch]
) -> JobMetadata:
    paths, epoch = reader.paths, inspected[-1]
    generations = _read_generations(reader)
    facts = ProtocolFacts(
        paths=paths,
        epoch=epoch,
        newest=epoch == newest,
        epochs=inspected,
        objects=reader.objects,
        managed=False,
        rollbacks=rollbacks,
        generations=generations,
    )
    head = head_of(facts)
    if head is not None and head[1].parent_ref is not None:
        _read_parent(reader, head[1].parent_ref)
    managed = head is not None and head[1].progress is not None
    facts = replace(facts, managed=managed)
    if facts.newest:
        facts = replace(facts, next_start=_next_start(reader, facts))
    states = [_protocol_checkpoint(facts, number) for number in inspected]
    return _judged(reader, facts, paths.epoch_record(epoch), states, protocol_findings(facts))


def _read_generations(reader: _Reader) -> tuple[WorkerGeneration, ...]:
    paths = reader.paths
    numbers = sorted(CheckpointTree(reader.store, paths).generation_dirs())
    reader.read_all([paths.current_generation], records.decode_current_generation)
    manifests = (paths.generation_manifest(number) for number in numbers)
    reader.read_all(manifests, records.decode_generation_manifest)
    return tuple(numbers)


def _read_manifests(reader: _Reader, records_of: Iterable[StatePath]) -> None:
    """Read the manifests that the records name, and the markers of those that need a commit."""
    heads = [reader.get(path, EpochRecord) for path in records_of]
    refs = [
        head.checkpoint_ref for head in heads if head and reader.paths.contains(head.checkpoint_ref)
    ]
    reader.read_all(refs, metadata.decode_manifest)
    manifests = [(ref, reader.get(ref, Manifest)) for ref in refs]
    markers = [recovery.marker_path(ref) for ref, one in manifests if one and one.needs_commit]
    reader.read_all(markers, records.decode_committed_marker)


def _read_parent(reader: _Reader, ref: StatePath) -> None:
    try:
        recovery.expect_manifest_path(reader.paths, ref)
    except ArroyoStateError:
        return
    reader.read_all([ref], metadata.decode_manifest)
    parent = reader.get(ref, Manifest)
    if parent is not None:
        path = reader.paths.epoch_record(parent.epoch)
        reader.read_all([path], records.decode_epoch_record)
        _read_manifests(reader, [path])


def _next_start(reader: _Reader, facts: ProtocolFacts) -> NextStart | str | None:
    """Resolve what the next start would restore, and read the objects that this needs."""
    fence = facts.get(reader.paths.current_generation, CurrentGeneration)
    if fence is None:
        return None
    starting = WorkerGeneration(max(fence.worker_generation, *facts.generations, 0) + 1)
    # A start raises the fence before it resolves the epoch, so that it may claim.
    raised = replace(fence, worker_generation=starting)
    try:
        return recovery.resolve_with(
            reader.fact,
            reader.paths,
            starting,
            {reader.paths.current_generation: raised},
            as_arroyo=not facts.managed,
        )
    except _UnreadableFact:
        return None
    except StorageError:
        raise
    except ArroyoStateError as error:
        return error.message


def _protocol_checkpoint(facts: ProtocolFacts, epoch: Epoch) -> Checkpoint | None:
    head = head_of(replace(facts, epoch=epoch))
    if head is None or head[1].epoch != epoch:
        return None
    ref, manifest = head
    done = not manifest.needs_commit or facts.get(recovery.marker_path(ref), CommittedMarker)
    state = CheckpointState.READY if done else CheckpointState.COMMITTING
    return as_checkpoint(manifest, ref, state)


def _cut_findings(reader: _Reader, checkpoint: Checkpoint | None) -> Iterator[Finding]:
    """Find metadata that does not name all that lies in the epoch's directory."""
    if checkpoint is None:
        return  # other findings say why
    for cut in cut_objects(reader.store, reader.paths, checkpoint):
        if cut.operator is not None:
            yield error("operator-vanished", cut.path, cut.reason, KEEP_AND_REPORT)
        else:
            yield unreadable_finding(cut.path, Unreadable(cut.reason), critical=True)


def _judged(
    reader: _Reader,
    facts: ProtocolFacts | LegacyFacts,
    root: StatePath,
    states: Sequence[Checkpoint | None],
    findings: Sequence[Finding],
) -> JobMetadata:
    cut = list(_cut_findings(reader, states[-1]))
    # What a cut list lacks is not known, so the files of other epochs are not compared with it.
    checkpoint = None if cut else states[-1]
    return JobMetadata(
        root=root,
        epoch=facts.epoch,
        checkpoint=checkpoint,
        history=tuple(state for state in states if state is not None) if checkpoint else (),
        findings=(*findings, *cut),
        objects=sum(record is not None for record in facts.objects.values()),
    )


# ---- legacy --------------------------------------------------------------------------------------


def _legacy(
    reader: _Reader, inspected: tuple[Epoch, ...], newest: Epoch, rollbacks: Mapping[Epoch, Epoch]
) -> JobMetadata:
    paths, epoch = reader.paths, inspected[-1]
    reader.read_all([paths.legacy_metadata(newest)], metadata.decode_legacy_checkpoint)
    head = reader.get(paths.legacy_metadata(epoch), LegacyCheckpoint)
    last = reader.get(paths.legacy_metadata(newest), LegacyCheckpoint)
    min_epoch = Epoch(0) if last is None else last.min_epoch
    _read_operators(reader, inspected, head, min_epoch)
    states = [_legacy_checkpoint(reader, number) for number in inspected]
    facts = LegacyFacts(
        paths=paths,
        epoch=epoch,
        newest=epoch == newest,
        epochs=inspected,
        objects=reader.objects,
        managed=head is not None and head.progress is not None,
        rollbacks=rollbacks,
        min_epoch=min_epoch,
        unfinished=_unfinished(reader, newest) if epoch == newest else (),
        committed=_committed(states[-1]),
    )
    return _judged(reader, facts, paths.legacy_metadata(epoch), states, legacy_findings(facts))


def _read_operators(
    reader: _Reader,
    inspected: Iterable[Epoch],
    head: LegacyCheckpoint | None,
    min_epoch: Epoch,
) -> None:
    """Read the operators of every inspected epoch, and those that Arroyo's cleanup will read."""
    names = () if head is None else head.operators
    by_epoch = {number: _operators_of(reader, number) or names for number in inspected}
    if head is not None:
        oldest = max(head.epoch - LEGACY_EPOCHS_BEFORE_NEWEST, min_epoch, 1)
        for number in range(oldest, head.epoch):
            epoch = Epoch(number)
            path = reader.paths.legacy_metadata(epoch)
            reader.read_all([path], metadata.decode_legacy_checkpoint)
            by_epoch[epoch] = (*by_epoch.get(epoch, ()), *names)
    paths = [
        reader.paths.operator_metadata(name, epoch)
        for epoch, operators in by_epoch.items()
        for name in operators
    ]
    reader.read_all(paths, metadata.decode_operator)


def _operators_of(reader: _Reader, epoch: Epoch) -> tuple[OperatorId, ...]:
    head = reader.get(reader.paths.legacy_metadata(epoch), LegacyCheckpoint)
    return () if head is None else head.operators


def _legacy_checkpoint(reader: _Reader, epoch: Epoch) -> Checkpoint | None:
    """Return the readable content of an epoch; None if one of its operators cannot be read."""
    path = reader.paths.legacy_metadata(epoch)
    head: LegacyCheckpoint | None = reader.get(path, LegacyCheckpoint)
    if head is None or head.epoch != epoch:
        return None
    paths = (reader.paths.operator_metadata(name, epoch) for name in head.operators)
    operators = [reader.get(path, OperatorCheckpoint) for path in paths]
    if None in operators:
        return None
    committed = head.progress is not None and _noted(reader, head)
    return legacy_checkpoint(
        head, operators, path, recovery.legacy_state(head, operators, committed)
    )


def _noted(reader: _Reader, head: LegacyCheckpoint) -> bool:
    expected = CommitNote(
        job=head.job, epoch=head.epoch, finish_time_micros=head.finish_time_micros
    )
    path = reader.paths.commit_note(head.epoch)
    return reader.read_or_error(path, records.decode_commit_note) == expected


def _committed(checkpoint: Checkpoint | None) -> bool | None:
    if checkpoint is None or checkpoint.progress is None or not checkpoint.needs_commit:
        return None
    return checkpoint.state is CheckpointState.READY


def _unfinished(reader: _Reader, newest: Epoch) -> tuple[Epoch, ...]:
    """Return directories later than every visible epoch in which an operator was finished."""
    numbers = ParquetBackend(reader.store, reader.paths).checkpoint_dirs()
    names = _operators_of(reader, newest)
    unfinished = []
    for epoch in (number for number in numbers if number > newest):
        heads = concurrently(
            reader.store.head, [reader.paths.operator_metadata(name, epoch) for name in names]
        )
        if any(heads):
            unfinished.append(epoch)
    return tuple(unfinished)
