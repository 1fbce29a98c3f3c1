"""The epochs of a job, each summarised with its state. This module writes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from arroyo_dagster.errors import ArroyoStateError, FormatError, StorageError
from arroyo_dagster.state.codec import records
from arroyo_dagster.state.metadata.restorable import restore_or_roll_back
from arroyo_dagster.state.metadata.tree import CheckpointTree, as_checkpoint
from arroyo_dagster.state.model.checkpoints import RECORD_VERSION, Checkpoint, CheckpointState
from arroyo_dagster.state.model.ids import Epoch, StatePath, WorkerGeneration
from arroyo_dagster.state.model.layout import JobPaths, Layout
from arroyo_dagster.state.model.progress import OnProgress, ProgressUnit, no_progress
from arroyo_dagster.state.operations.catalog.metadata_only import metadata_only_epochs, stored_sizes
from arroyo_dagster.state.operations.progress import counter
from arroyo_dagster.state.planning.restore import recovery
from arroyo_dagster.state.planning.restore.partially_collected import (
    Remains,
    lies_at_the_bucket_root,
    partially_collected,
    rolled_back,
)
from arroyo_dagster.state.planning.restore.reads import Attempt, unfinished_attempts
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore, read_optional

_T = TypeVar("_T")


def version_error(checkpoint: Checkpoint) -> FormatError | None:
    """Return the error for records of another version; None if they have this release's version."""
    if checkpoint.record_version == RECORD_VERSION:
        return None
    return FormatError(
        f"a record of the epoch is of version {checkpoint.record_version}: it was read as "
        f"version {RECORD_VERSION}, and this release does not continue its job",
        job=checkpoint.job,
        epoch=checkpoint.epoch,
        path=checkpoint.ref,
        next_step="use a release of arroyo-dagster that knows this version",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochSummary:
    """One epoch, or one unfinished attempt at it.

    Attributes:
        state: None if its objects cannot be read.
        checkpoint: None if it is invisible or cannot be read.
        files, size_bytes: the data files it lists, which a restore reads.
        new_files, new_size_bytes: those that the visible epoch before it does not list; None where
            that epoch is unknown.
        missing: how many of the objects it lists do not exist.
        problem: why it cannot be read or restored; None for an epoch that expired in part.
    """

    epoch: Epoch
    worker_generation: WorkerGeneration | None
    state: CheckpointState | None
    checkpoint: Checkpoint | None = None
    files: int = 0
    size_bytes: int = 0
    new_files: int | None = None
    new_size_bytes: int | None = None
    missing: int = 0
    problem: ArroyoStateError | None = None


def list_epochs(
    store: ObjectStore,
    paths: JobPaths,
    limit: int | None = None,
    on_progress: OnProgress = no_progress,
) -> list[EpochSummary]:
    """Summarise the epochs of a job, oldest first, each with its state.

    Invisible, unclaimed and orphaned attempts are included, unless they are older than every epoch
    returned: expired epochs leave objects that look the same. An epoch that an expiry has removed
    in part is partially collected.

    Args:
        limit: return only this many of the newest visible epochs; None = all.
        on_progress: called after each visible epoch, by any thread, by one at a time.
    """
    epochs = CheckpointTree(store, paths).epochs()
    returned = epochs if limit is None else epochs[max(0, len(epochs) - limit) :]
    # One more than returned, to determine the new files of the oldest returned epoch.
    numbers = epochs[max(0, len(epochs) - len(returned) - 1) :]
    count = counter(on_progress, "read epochs", len(numbers), ProgressUnit.EPOCHS)

    def load(epoch: Epoch) -> LoadedEpoch:
        entry = load_epoch(store, paths, epoch)
        count()
        return entry

    entries = concurrently(load, numbers)
    loaded = [entry for entry in entries if not entry.vanished]
    rest = _unfinished(store, paths, [entry for entry in loaded if entry.epoch in returned])
    if len(returned) == len(epochs):
        rest += _without_record(store, paths, loaded)
    checkpoints = [entry.checkpoint for entry in (*loaded, *rest) if entry.checkpoint is not None]
    sizes = stored_sizes(store, {path for checkpoint in checkpoints for path in checkpoint.paths})
    by_number: dict[Epoch | None, LoadedEpoch] = {entry.epoch: entry for entry in loaded}
    before: dict[Epoch, LoadedEpoch] = {
        later.epoch: earlier for earlier, later in itertools.pairwise(loaded)
    }
    abandoned = _rolled_back(loaded)
    before |= {
        entry.epoch: by_number[to]
        for entry in loaded
        if entry.checkpoint and (to := entry.checkpoint.rolled_back_to) in by_number
    }
    lineage = [entry for entry in loaded if entry.epoch not in abandoned]
    states = dict.fromkeys(_collected(lineage, sizes), CheckpointState.PARTIALLY_COLLECTED)
    incomplete = {
        one.epoch for one in loaded if one.checkpoint and set(one.checkpoint.paths) - sizes.keys()
    }
    if incomplete:
        metadata_only = metadata_only_epochs(store, paths, incomplete)
        states |= dict.fromkeys(metadata_only, CheckpointState.METADATA_ONLY)
    states |= dict.fromkeys(abandoned, CheckpointState.ROLLED_BACK)
    summaries = [
        _summary(paths, entry, sizes, before.get(entry.epoch), states)
        for entry in (*loaded, *rest)
        if entry.epoch in returned or entry in rest
    ]
    return sorted(summaries, key=lambda summary: (summary.epoch, summary.worker_generation or 0))


@dataclass(frozen=True, slots=True)
class LoadedEpoch:
    """The result of reading the metadata of one epoch.

    Attributes:
        vanished: whether it has expired between a listing and the read.
        lost: objects that it names and that do not exist.
    """

    epoch: Epoch
    state: CheckpointState | None = None
    checkpoint: Checkpoint | None = None
    problem: ArroyoStateError | None = None
    vanished: bool = False
    generation: WorkerGeneration | None = None
    lost: tuple[StatePath, ...] = ()

    @property
    def lost_operators(self) -> tuple[StatePath, ...]:
        """Missing metadata objects of operators, in the legacy layout."""
        return tuple(path for path in self.lost if path.name == "metadata")


def load_epoch(store: ObjectStore, paths: JobPaths, epoch: Epoch) -> LoadedEpoch:
    """Read the metadata of one epoch; what is wrong with it is its `problem`."""
    try:
        checkpoint, lost = CheckpointTree(store, paths).load_remains(epoch)
    except StorageError as error:
        return LoadedEpoch(epoch, problem=error)
    except ArroyoStateError as error:
        # An epoch that expired between listing and reading is not a problem of the job.
        return LoadedEpoch(epoch, problem=error, vanished=store.head(paths.head(epoch)) is None)
    generation = checkpoint.worker_generation
    return LoadedEpoch(epoch, checkpoint.state, checkpoint, generation=generation, lost=lost)


def _without_record(
    store: ObjectStore, paths: JobPaths, loaded: Sequence[LoadedEpoch]
) -> list[LoadedEpoch]:
    """Return epochs whose record an expiry has removed, but not yet their manifest."""
    if paths.layout is Layout.LEGACY or not loaded or loaded[0].checkpoint is None:
        return []
    try:
        chain = list(CheckpointTree(store, paths).load_chain(loaded[0].checkpoint))
    except ArroyoStateError as error:
        oldest = Epoch(max(0, loaded[0].epoch - 1))
        return [LoadedEpoch(oldest, problem=error)]
    return [
        LoadedEpoch(one.epoch, one.state, one, generation=one.worker_generation) for one in chain
    ]


def _rolled_back(loaded: Sequence[LoadedEpoch]) -> frozenset[Epoch]:
    """Return the epochs that rollbacks have abandoned."""
    if not loaded:
        return frozenset()
    restored = {
        entry.epoch: to
        for entry in loaded
        if entry.checkpoint and (to := entry.checkpoint.rolled_back_to) is not None
    }
    return rolled_back(loaded[-1].epoch, (entry.epoch for entry in loaded), restored)


def _collected(loaded: Sequence[LoadedEpoch], sizes: Mapping[StatePath, int]) -> frozenset[Epoch]:
    """Return the epochs that an expiry has removed in part."""
    readable = [(entry.checkpoint, entry.lost) for entry in loaded if entry.checkpoint is not None]
    if not readable:
        return frozenset()
    newest = readable[-1][0]
    remains = [
        Remains(
            epoch=checkpoint.epoch,
            listed=frozenset(checkpoint.paths),
            lost=frozenset((*(p for p in checkpoint.paths if p not in sizes), *lost)),
        )
        for checkpoint, lost in readable
    ]
    return partially_collected(remains, newest)


def _unfinished(
    store: ObjectStore, paths: JobPaths, owners: Sequence[LoadedEpoch]
) -> list[LoadedEpoch]:
    unreadable = {owner.epoch for owner in owners if owner.checkpoint is None}
    owning = [Attempt(one.epoch, one.generation) for one in owners if one.checkpoint is not None]
    directories = CheckpointTree(store, paths).directories()
    if paths.layout is Layout.LEGACY:
        # An older directory without metadata holds only files that newer epochs list.
        newest = max((owner.epoch for owner in owners), default=Epoch(0))
        epochs = [epoch for _, epoch in directories if epoch > newest]
        return [LoadedEpoch(epoch, CheckpointState.INVISIBLE) for epoch in epochs]
    attempts = [
        Attempt(epoch, generation) for generation, epoch in directories if epoch not in unreadable
    ]
    return concurrently(
        lambda attempt: _attempted(store, paths, attempt), unfinished_attempts(attempts, owning)
    )


def _attempted(store: ObjectStore, paths: JobPaths, attempt: Attempt) -> LoadedEpoch:
    from arroyo_dagster.state.codec import metadata  # loads protobuf

    assert attempt.worker_generation is not None
    ref = paths.manifest(attempt.worker_generation, attempt.epoch)
    try:
        manifest = _optional(store, ref, metadata.decode_manifest)
        path = paths.epoch_record(attempt.epoch)
        record = _optional(store, path, records.decode_epoch_record)
        state = recovery.checkpoint_state(ref, manifest, record, None).state
    except ArroyoStateError as error:
        return LoadedEpoch(attempt.epoch, problem=error, generation=attempt.worker_generation)
    checkpoint = None if manifest is None else as_checkpoint(manifest, ref, state)
    return LoadedEpoch(attempt.epoch, state, checkpoint, generation=attempt.worker_generation)


def _optional(store: ObjectStore, path: StatePath, decode: Callable[[bytes, str], _T]) -> _T | None:
    data = read_optional(store, path)
    return None if data is None else decode(data, path)


def _summary(
    paths: JobPaths,
    loaded: LoadedEpoch,
    sizes: Mapping[StatePath, int],
    before: LoadedEpoch | None,
    states: Mapping[Epoch, CheckpointState],
) -> EpochSummary:
    checkpoint = loaded.checkpoint
    listed = dict.fromkeys(checkpoint.paths) if checkpoint else {}
    missing = [path for path in listed if path not in sizes]
    state, problem = loaded.state, loaded.problem
    special = states.get(loaded.epoch)
    owns = loaded.state is None or loaded.state.canonical
    if owns and (loaded.state is not None or special is CheckpointState.ROLLED_BACK):
        state = special or state
    expired = (CheckpointState.PARTIALLY_COLLECTED, CheckpointState.METADATA_ONLY)
    if state not in expired and checkpoint is not None:
        problem = problem or damage_of(paths, checkpoint, missing, loaded.lost_operators)
        problem = problem or version_error(checkpoint)
    new: list[StatePath] | None = None
    if checkpoint is not None and loaded.state is not None and loaded.state.canonical:
        earlier = before.checkpoint if before is not None else None
        if earlier is not None or checkpoint.epoch == 1:
            earlier_paths = set(earlier.paths) if earlier is not None else set()
            new = [path for path in listed if path not in earlier_paths]
    return EpochSummary(
        epoch=loaded.epoch,
        worker_generation=loaded.generation,
        state=state,
        checkpoint=checkpoint,
        files=len(listed),
        size_bytes=sum(sizes.get(path, 0) for path in listed),
        new_files=None if new is None else len(new),
        new_size_bytes=None if new is None else sum(sizes.get(path, 0) for path in new),
        missing=len(missing) + len(loaded.lost_operators),
        problem=problem,
    )


def damage_of(
    paths: JobPaths,
    checkpoint: Checkpoint,
    missing: Sequence[StatePath],
    lost: Sequence[StatePath],
) -> ArroyoStateError | None:
    """Return what is wrong with an epoch: lost metadata of operators, or missing data files."""
    facts: dict[str, Any] = {"job": paths.root, "epoch": checkpoint.epoch}
    if lost:
        return FormatError(
            f"the metadata of {len(lost)} operators is missing",
            path=lost[0],
            next_step=restore_or_roll_back(paths, checkpoint, "object"),
            **facts,
        )
    if missing:
        step = restore_or_roll_back(paths, checkpoint, "file")
        if lies_at_the_bucket_root(checkpoint, missing):
            step = (
                "all files of expiring tables are missing and no others: Arroyo before v0.12 "
                "wrote them without the prefix of the URL; check the root of the bucket"
            )
        listed = len(dict.fromkeys(checkpoint.paths))
        return FormatError(
            f"{len(missing)} of {listed} data files are missing",
            path=missing[0],
            next_step=step,
            **facts,
        )
    return None
