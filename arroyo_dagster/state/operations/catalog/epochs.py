"""Read the metadata of several epochs of a job, and their numbers. This module writes nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from arroyo_dagster.errors import ArroyoStateError, StorageError
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.model.checkpoints import Checkpoint, CheckpointState
from arroyo_dagster.state.model.health import EpochFigures
from arroyo_dagster.state.model.ids import Epoch, StatePath
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.progress import OnProgress, ProgressUnit, no_progress
from arroyo_dagster.state.operations.catalog.footers import Footers
from arroyo_dagster.state.operations.catalog.metadata_only import metadata_only_epochs
from arroyo_dagster.state.operations.progress import counter
from arroyo_dagster.state.planning.health_checks.facts import epoch_figures
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectInfo, ObjectStore


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReadings:
    """What was read of a job already, and who hears of what is read now.

    Attributes:
        footers: a cache; share one with what reads the same files, for example a verification.
        objects: every object of the job; None = not listed yet.
        on_progress: called after each epoch and each footer that is read.
    """

    footers: Footers = field(default_factory=Footers)
    objects: Mapping[StatePath, ObjectInfo] | None = None
    on_progress: OnProgress = no_progress


def read_epochs(
    store: ObjectStore,
    paths: JobPaths,
    epochs: Collection[Epoch],
    on_progress: OnProgress = no_progress,
) -> dict[Epoch, Checkpoint | ArroyoStateError]:
    """Return the metadata of epochs, ascending, or why one cannot be read.

    Epochs that expired meanwhile are left out. Those of which only the metadata is left list no
    files.

    Raises:
        StorageError: the store failed.
    """
    count = counter(on_progress, "read epochs", len(epochs), ProgressUnit.EPOCHS)

    def load(epoch: Epoch) -> Checkpoint | ArroyoStateError | None:
        answer = _load(store, paths, epoch)
        count()
        return answer

    numbers = sorted(epochs)
    answers = zip(numbers, concurrently(load, numbers), strict=True)
    read = {epoch: answer for epoch, answer in answers if answer is not None}
    metadata_only = metadata_only_epochs(store, paths, numbers) if len(numbers) > 1 else {}
    return {
        epoch: _without_files(answer)
        if epoch in metadata_only and isinstance(answer, Checkpoint)
        else answer
        for epoch, answer in read.items()
    }


def _load(
    store: ObjectStore, paths: JobPaths, epoch: Epoch
) -> Checkpoint | ArroyoStateError | None:
    """Read one epoch; None if it expired meanwhile."""
    try:
        return ParquetBackend(store, paths).load_checkpoint_metadata(epoch)
    except StorageError:
        raise
    except ArroyoStateError as error:
        return None if store.head(paths.head(epoch)) is None else error


def _without_files(checkpoint: Checkpoint) -> Checkpoint:
    operators = tuple(replace(operator, tables={}) for operator in checkpoint.operators)
    return replace(checkpoint, state=CheckpointState.METADATA_ONLY, operators=operators)


def read_figures(
    store: ObjectStore, paths: JobPaths, epochs: Collection[int], readings: JobReadings
) -> list[EpochFigures]:
    """Return the numbers of epochs, ascending; those that cannot be read are left out.

    What is new in an epoch is known if the epoch before it is one of them, or if it is the first.

    Raises:
        StorageError: the store failed.
    """
    read = read_epochs(store, paths, [Epoch(number) for number in epochs], readings.on_progress)
    return figures_of(store, read.values(), readings)


def figures_of(
    store: ObjectStore,
    read: Collection[Checkpoint | ArroyoStateError],
    readings: JobReadings,
    known: Collection[int] = (),
) -> list[EpochFigures]:
    """Return the numbers of epochs that `read_epochs` has read; as `read_figures`.

    Args:
        known: epochs whose numbers are not asked for; no footer of theirs is read.
    """
    checkpoints = [
        answer
        for answer in read
        if isinstance(answer, Checkpoint) and answer.state is not CheckpointState.METADATA_ONLY
    ]
    new = [checkpoint for checkpoint in checkpoints if checkpoint.epoch not in known]
    listed = {path for checkpoint in new for path in checkpoint.paths}
    footers = readings.footers.read(store, listed, on_progress=readings.on_progress)
    before = {checkpoint.epoch + 1: frozenset(checkpoint.paths) for checkpoint in checkpoints}
    return [epoch_figures(checkpoint, before.get(checkpoint.epoch), footers) for checkpoint in new]
