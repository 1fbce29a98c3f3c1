"""Changes of one job since a position: its newly ready epochs. This module writes nothing.

Two small requests determine whether a known job may have a newer epoch. Data files are never
listed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from arroyo_dagster.errors import ArroyoStateError, NotFoundError, StorageError
from arroyo_dagster.state.codec import records
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.metadata.tree import CheckpointTree
from arroyo_dagster.state.model.checkpoints import Checkpoint, CheckpointState
from arroyo_dagster.state.model.ids import Epoch, WorkerGeneration
from arroyo_dagster.state.model.layout import (
    JobPaths,
    Layout,
    parse_checkpoint_dir,
    parse_epoch_record,
    parse_manifest_path,
)
from arroyo_dagster.state.operations.catalog.jobs import list_level
from arroyo_dagster.state.planning.restore.reads import Level
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore

NEWEST_EPOCHS = 10
_NO_EPOCH = Epoch(0)
# Names of records have seven digits or more: they sort by number only among names of equal length.
_FAR_AHEAD = 1_000_000
_STEPS = 16


@dataclass(frozen=True, slots=True)
class JobPosition:
    """The position up to which a job's epochs were polled.

    Attributes:
        worker_generation: the newest that was started; None in the legacy layout.
        epoch: the newest epoch that was reported or found unreadable; 0 = none yet.
    """

    worker_generation: WorkerGeneration | None
    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class JobChanges:
    """The changes of one job.

    Attributes:
        positions: the position reached now; None if the job could not be read and had no position.
        checkpoints: newly ready epochs, oldest first.
        before: the epoch before those read now; None if it is gone or unreadable, if `checkpoints`
            is empty, or if the job is new.
        passed_over: how many older new epochs are not reported one by one.
        problems: why the job, or an epoch of it, cannot be read.
        appeared: whether the job is new.
    """

    paths: JobPaths
    positions: JobPosition | None
    checkpoints: tuple[Checkpoint, ...] = ()
    before: Checkpoint | None = None
    passed_over: int = 0
    problems: tuple[ArroyoStateError, ...] = ()
    appeared: bool = False


# ---- one job -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gone:
    """The job has no objects left."""


def poll_job(
    store: ObjectStore,
    paths: JobPaths,
    position: JobPosition | None,
    *,
    level: Level | None = None,
    newest: int = NEWEST_EPOCHS,
    reserve: Callable[[int], bool] = lambda _: True,
) -> JobChanges | Gone | None:
    """Return the changes of one job since its position; an error is one of its `problems`.

    A known job without a new epoch costs two small requests, and no listing.

    Args:
        level: the listing of its `checkpoints` in the legacy layout; None = not listed.
        newest: read at most this many new epochs.
        reserve: whether so many new epochs may be read; called before any of them is read.

    Returns:
        None if `reserve` refused: nothing was read of the new epochs.
    """
    try:
        if paths.layout is Layout.LEGACY:
            new = _new_legacy(store, paths, position, level)
        else:
            new = _new_protocol(store, paths, position)
        if isinstance(new, Gone):
            return new
        if not reserve(min(len(new.epochs), 1 if new.first else newest)):
            return None
        return _new_epochs(store, paths, new, newest)
    except ArroyoStateError as error:
        # The position stays unchanged, so the next poll reads the job again.
        return JobChanges(paths=paths, positions=position, problems=(error,))


@dataclass(frozen=True, slots=True)
class _New:
    """The numbers of epochs to read, ascending, and the job's position before.

    Attributes:
        first: whether the job is new: only its newest epoch is reported.
    """

    epochs: tuple[Epoch, ...]
    positions: JobPosition
    first: bool = False


def _new_legacy(
    store: ObjectStore, paths: JobPaths, position: JobPosition | None, level: Level | None
) -> _New | Gone:
    reached = _NO_EPOCH if position is None else position.epoch
    if level is None:
        if position is not None and reached and _is_newest(store, paths, reached):
            return _New((), position)
        level = list_level(store, str(paths.checkpoints()))
    parsed = map(parse_checkpoint_dir, level.directories)
    numbers = sorted(number for number in parsed if number is not None)
    if position is not None and (not numbers or numbers[-1] < reached):
        # A listing may lag behind; only a read shows that the known epoch is gone.
        if reached and store.head(paths.legacy_metadata(reached)) is not None:
            return _New((), position)
        position = None  # a new job uses this name
    if not numbers:
        return Gone()
    first = position is None
    position = position or JobPosition(None, _NO_EPOCH)
    return _New(tuple(number for number in numbers if number > position.epoch), position, first)


def _is_newest(store: ObjectStore, paths: JobPaths, epoch: Epoch) -> bool:
    """Whether an epoch of the legacy layout exists and the next one does not.

    Expiry keeps the newest epochs: once the known epoch has expired, there are newer ones.
    """
    following = paths.legacy_metadata(Epoch(epoch + 1))
    return store.head(following) is None and store.head(paths.legacy_metadata(epoch)) is not None


def _new_protocol(store: ObjectStore, paths: JobPaths, position: JobPosition | None) -> _New | Gone:
    # Nothing is published by a generation that the fence does not name: this read finds each start.
    fence = CheckpointTree(store, paths).fence()
    if fence is None:
        return Gone()
    if position is not None and position.worker_generation is not None:
        generation = max(fence, position.worker_generation)
        epochs = _epochs_after(store, paths, position, generation)
        if epochs is not None:
            return _New(epochs, JobPosition(generation, position.epoch))
    return _New(_listed_after(store, paths, _NO_EPOCH), JobPosition(fence, _NO_EPOCH), first=True)


def _epochs_after(
    store: ObjectStore, paths: JobPaths, position: JobPosition, generation: WorkerGeneration
) -> tuple[Epoch, ...] | None:
    """Return the epochs after the known one; None if a new job uses this name.

    The newest worker generation's manifest refers to its newest epoch, and is written before each
    record: if that is the known epoch, nothing else is read. Otherwise the records of the next
    numbers show the new epochs. Epochs are listed only if these records have expired already.
    """
    started = generation != position.worker_generation
    path = paths.generation_manifest(generation)
    try:
        manifest = records.decode_generation_manifest(store.read(path), path)
    except NotFoundError:
        # A started worker generation has no manifest until its job is scheduled.
        return _listed_after(store, paths, position.epoch) if started else None
    hint = parse_manifest_path(manifest.latest_ref or manifest.base_ref or "")
    newest = hint.epoch if manifest.latest_ref and hint is not None else None
    if newest == position.epoch:
        return ()
    following = _consecutive_after(store, paths, position.epoch, newest)
    if following and len(following) < _STEPS:
        return following
    if hint is None:
        return _listed_after(store, paths, position.epoch) if started or following else ()
    if hint.epoch < position.epoch and store.head(paths.epoch_record(position.epoch)) is None:
        return None
    # The reference is written before its record, so the epoch before it counts as well.
    near = [Epoch(hint.epoch - back) for back in (0, 1) if hint.epoch - back > position.epoch]
    if any(store.head(paths.epoch_record(epoch)) is not None for epoch in near):
        return _listed_after(store, paths, position.epoch)
    return following


def _consecutive_after(
    store: ObjectStore, paths: JobPaths, epoch: Epoch, newest: Epoch | None
) -> tuple[Epoch, ...]:
    """Return the numbers right after `epoch` that have a record, up to a gap; without a listing.

    Args:
        newest: no record after this one exists; None = not known.
    """
    epochs: list[Epoch] = []
    while len(epochs) < _STEPS and epoch + len(epochs) != newest:
        following = Epoch(epoch + len(epochs) + 1)
        if store.head(paths.epoch_record(following)) is None:
            break
        epochs.append(following)
    return tuple(epochs)


def _listed_after(store: ObjectStore, paths: JobPaths, epoch: Epoch) -> tuple[Epoch, ...]:
    """Return the epochs after `epoch` that have a record, with one listing that starts there."""
    same_length = len(f"{epoch:07}") == len(f"{epoch + _FAR_AHEAD:07}")
    after = paths.epoch_record(epoch) if epoch and same_length else None
    listed = store.list(paths.epochs, start_after=after)
    numbers = (parse_epoch_record(info.path.name) for info in listed)
    return tuple(sorted(number for number in numbers if number is not None and number > epoch))


# ---- its epochs ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Vanished:
    """The epoch expired between listing and reading, or does not exist yet."""


def _new_epochs(store: ObjectStore, paths: JobPaths, new: _New, newest: int) -> JobChanges:
    if new.first:
        # Report only the newest ready epoch, and newer ones that are unreadable.
        unreadable: dict[Epoch, ArroyoStateError] = {}
        reported: Checkpoint | None = None
        for number in reversed(new.epochs):
            answer = _read_epoch(store, paths, number)
            if isinstance(answer, Checkpoint) and answer.state is CheckpointState.READY:
                reported = answer
                break
            if isinstance(answer, ArroyoStateError):
                unreadable[number] = answer
            if len(unreadable) == NEWEST_EPOCHS:
                break
        ready = None if reported is None else reported.epoch
        reached = max(filter(None, [ready, *unreadable]), default=_NO_EPOCH)
        return JobChanges(
            paths=paths,
            positions=replace(new.positions, epoch=reached),
            checkpoints=() if reported is None else (reported,),
            problems=tuple(unreadable.values()),
            appeared=True,
        )
    read = new.epochs[-newest:]
    answers = concurrently(lambda epoch: _read_epoch(store, paths, epoch), read)
    checkpoints: list[Checkpoint] = []
    problems: list[ArroyoStateError] = []
    passed_over = len(new.epochs) - len(read)
    reached = new.epochs[passed_over - 1] if passed_over else new.positions.epoch
    later = [answer for answer in answers if isinstance(answer, Checkpoint)]
    for epoch, answer in zip(read, answers, strict=True):
        if isinstance(answer, Checkpoint) and answer.state is not CheckpointState.READY:
            if any(_went_behind(checkpoint, epoch) for checkpoint in later):
                continue  # its commit is never finished
            break  # committing: no later epoch can be ready; the next poll reads it again
        if isinstance(answer, _Vanished):
            continue
        reached = epoch
        if isinstance(answer, Checkpoint):
            checkpoints.append(answer)
        else:
            problems.append(answer)
    before = new.epochs[passed_over - 1] if passed_over else new.positions.epoch
    return JobChanges(
        paths=paths,
        positions=replace(new.positions, epoch=reached),
        checkpoints=tuple(checkpoints),
        before=_before(store, paths, before) if checkpoints else None,
        passed_over=passed_over if checkpoints else 0,
        problems=tuple(problems),
    )


def _went_behind(checkpoint: Checkpoint, epoch: Epoch) -> bool:
    """Whether a rollback published `checkpoint` and abandoned `epoch`."""
    restored = checkpoint.rolled_back_to
    return restored is not None and restored < epoch < checkpoint.epoch


def _before(store: ObjectStore, paths: JobPaths, epoch: Epoch) -> Checkpoint | None:
    if epoch <= _NO_EPOCH:
        return None
    answer = _read_epoch(store, paths, epoch)
    return answer if isinstance(answer, Checkpoint) else None


def _read_epoch(
    store: ObjectStore, paths: JobPaths, epoch: Epoch
) -> Checkpoint | ArroyoStateError | _Vanished:
    root = paths.head(epoch)
    # A directory of the legacy layout does not make an epoch: its metadata is written last.
    if paths.layout is Layout.LEGACY and store.head(root) is None:
        return _Vanished()
    try:
        return ParquetBackend(store, paths).load_checkpoint_metadata(epoch)
    except StorageError:
        raise
    except ArroyoStateError as error:
        return _Vanished() if store.head(root) is None else error
