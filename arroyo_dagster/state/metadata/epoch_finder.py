"""Which epochs a job has: those that a listing shows, and those that it does not."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from arroyo_dagster.errors import FormatError
from arroyo_dagster.state.codec import records
from arroyo_dagster.state.metadata.objects import MetadataReader
from arroyo_dagster.state.model.ids import Epoch, StatePath, WorkerGeneration
from arroyo_dagster.state.model.layout import (
    JobPaths,
    Layout,
    parse_checkpoint_dir,
    parse_epoch_record,
    parse_manifest_path,
)
from arroyo_dagster.state.model.numbers import parse_number
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore

PROBE_COUNT = 8
"""How many numbers after and before an epoch are probed if a listing has a gap."""


class EpochFinder:
    """Finds the epochs of one job, in either layout.

    Args:
        store: where the job lies.
        paths: which job; decides the layout.
    """

    def __init__(self, store: ObjectStore, paths: JobPaths) -> None:
        self.store = store
        self.paths = paths
        self.objects = MetadataReader(store, paths)

    def epochs(self) -> list[Epoch]:
        """Return the epochs with a record (protocol) or checkpoint metadata (legacy), ascending."""
        if self.paths.layout is Layout.PROTOCOL:
            listed = self.store.list_dir(self.paths.epochs).objects
            numbers = (parse_epoch_record(info.path.name) for info in listed)
            return sorted(epoch for epoch in numbers if epoch is not None)
        return self._existing(self.checkpoint_dirs())

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
        """Yield the manifests that the newest worker generations name as published last.

        Args:
            generations: those that a listing shows; None = list them.
        """
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


def _beside(epochs: Collection[Epoch]) -> set[Epoch]:
    """Return the missing numbers at which an unlisted epoch may exist."""
    first = (epoch for epoch in epochs if epoch - 1 not in epochs)
    numbers = {n for epoch in first for n in range(max(0, epoch - PROBE_COUNT), epoch)}
    newest = max(epochs, default=0)
    numbers.update(range(newest + 1, newest + 1 + PROBE_COUNT))
    return {Epoch(number) for number in numbers if number not in epochs}
