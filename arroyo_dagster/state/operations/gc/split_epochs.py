"""Find the quarantines to restore together: those that share the objects of an epoch or of a start.

A quarantine run that is interrupted leaves epochs of which only some objects are moved; the next
run moves the others into a quarantine of its own. Restoring only one of them would yield a job that
cannot be started, or one that starts from an older epoch than before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from arroyo_dagster.errors import FormatError, NotFoundError
from arroyo_dagster.state.codec.metadata import decode_legacy_checkpoint
from arroyo_dagster.state.codec.records import (
    decode_current_generation,
    decode_epoch_record,
    decode_generation_manifest,
)
from arroyo_dagster.state.codec.references import manifest_references, operator_references
from arroyo_dagster.state.model.garbage import Moved, Quarantined, References
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.layout import JobPaths, Layout
from arroyo_dagster.state.model.objects import ObjectKind, object_name
from arroyo_dagster.state.operations.gc.quarantine import all_moved
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore

Copies = Mapping[StatePath, Moved]
"""The objects in a quarantine, by their original path."""


def linked_quarantines(
    store: ObjectStore, paths: JobPaths, known: Sequence[Quarantined], name: str
) -> dict[str, list[Moved]]:
    """Return the objects in a quarantine, and in those that share an epoch or a start with it.

    Args:
        known: every quarantine of the job; the index of each is read.
        name: one of them.

    Returns:
        The objects of each, by name, oldest first.
    """
    moved = {one.name: all_moved(store, paths, one) for one in known if one.name == name}
    others = [one for one in known if one.name != name]
    if not others:
        return moved
    moved |= {one.name: all_moved(store, paths, one) for one in others}
    copies = {one: {each.path: each for each in found} for one, found in sorted(moved.items())}
    pairs = [pair for one in copies for pair in _linked(store, paths, copies, one)]
    together = {name}
    while more := {one for pair in pairs if together & pair for one in pair} - together:
        together |= more
    return {one: moved[one] for one in sorted(together)}


def _linked(
    store: ObjectStore, paths: JobPaths, copies: Mapping[str, Copies], name: str
) -> Iterator[frozenset[str]]:
    """Yield this quarantine with each that holds an object it needs and that is not in place."""
    needs = _Needs(store, paths, copies, name)
    found = concurrently(needs.of_epoch, sorted(needs.heads()))
    missing = sorted({*needs.of_start()}.union(*found))
    there = concurrently(store.head, missing)
    for path, info in zip(missing, there, strict=True):
        if info is None:
            yield frozenset({name, needs.holder(path)})


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochNeeds:
    """The objects that a complete epoch needs, as far as its metadata can be read.

    Attributes:
        metadata: the object that makes it exist, then the objects that list its files.
        missing: those of them that exist nowhere.
        files: the data files it lists.
        markers: the marker of its commit, unless it needs none; the newest epoch may lack it.
        unreadable: whether an object that lists files does not decode.
    """

    metadata: tuple[StatePath, ...] = ()
    missing: tuple[StatePath, ...] = ()
    files: tuple[StatePath, ...] = ()
    markers: tuple[StatePath, ...] = ()
    unreadable: bool = False


def needs_of_epoch(
    paths: JobPaths, head: StatePath, read: Callable[[StatePath], bytes | None]
) -> EpochNeeds:
    """Follow the references of an epoch.

    Args:
        head: its epoch record, or its checkpoint metadata in the legacy layout.
        read: reads an object in any place; None if it exists nowhere.

    Raises:
        FormatError: the object that makes it exist does not decode.
    """
    data = read(head)
    if data is None:
        return EpochNeeds(metadata=(head,), missing=(head,))
    lists: tuple[StatePath, ...]
    if paths.layout is Layout.PROTOCOL:
        lists, decode = (decode_epoch_record(data, head).checkpoint_ref,), manifest_references
    else:
        legacy = decode_legacy_checkpoint(data, head)
        lists = tuple(paths.operator_metadata(name, legacy.epoch) for name in legacy.operators)
        decode = operator_references
    found = {path: read(path) for path in lists}
    known: list[References] = []
    unreadable = False
    for path, data in found.items():
        try:
            known += [] if data is None else [decode(data, path)]
        except FormatError:
            unreadable = True
    return EpochNeeds(
        metadata=(head, *lists),
        missing=tuple(path for path, data in found.items() if data is None),
        files=tuple(dict.fromkeys(file for one in known for file in one.files)),
        markers=tuple(
            paths.committed(one.worker_generation, one.epoch)
            for one in known
            if one.needs_commit and one.worker_generation is not None
        ),
        unreadable=unreadable,
    )


@dataclass(frozen=True, slots=True)
class _Needs:
    """The objects that the epochs in one quarantine need, in any place."""

    store: ObjectStore
    paths: JobPaths
    copies: Mapping[str, Copies]
    name: str

    def heads(self) -> set[StatePath]:
        """Return the objects that make the epochs visible whose metadata this quarantine holds."""
        return {head for path in self.copies[self.name] for head in self._heads_of(path)}

    def _heads_of(self, path: StatePath) -> Iterator[StatePath]:
        name = object_name(self.paths, path)
        if name.kind in (ObjectKind.RECORD, ObjectKind.CHECKPOINT):
            yield path
        elif name.epoch is not None and name.kind is ObjectKind.OPERATOR:
            yield self.paths.legacy_metadata(name.epoch)
        elif name.epoch is not None and name.kind is ObjectKind.MANIFEST:
            yield self.paths.epoch_record(name.epoch)

    def held_by_another(self, path: StatePath) -> bool:
        """Whether another quarantine has a copy of it, but this one has none."""
        own = path in self.copies[self.name]
        return not own and any(path in held for held in self.copies.values())

    def holder(self, path: StatePath) -> str:
        """Return the newest quarantine that has a copy of it."""
        return max(one for one, held in self.copies.items() if path in held)

    def of_epoch(self, head: StatePath) -> list[StatePath]:
        """Return what an epoch's restore reads and only others hold; none if it does not decode."""
        try:
            return [path for path in self._of_epoch(head) if self.held_by_another(path)]
        except FormatError:
            return []  # its state before it was quarantined

    def _of_epoch(self, head: StatePath) -> Iterator[StatePath]:
        needs = needs_of_epoch(self.paths, head, self._read)
        own = self.copies[self.name]
        layout = self.paths.layout
        if layout is Layout.PROTOCOL and not any(path in own for path in needs.metadata):
            return  # the record belongs to another manifest of that epoch
        if needs.unreadable:
            return  # its state before it was quarantined
        yield from (*needs.metadata, *needs.files, *needs.markers)

    def of_start(self) -> list[StatePath]:
        """Return what a start reads first and only others hold: a generation, its checkpoint."""
        own = self.copies[self.name]
        named = [(path, object_name(self.paths, path)) for path in own]
        generations = sorted(
            (name.worker_generation, path)
            for path, name in named
            if name.kind is ObjectKind.GENERATION and name.worker_generation is not None
        )
        try:
            first = (*self._of_fence(own), *self._chosen(path for _, path in reversed(generations)))
            return [path for path in first if self.held_by_another(path)]
        except FormatError:
            return []

    def _of_fence(self, own: Copies) -> Iterator[StatePath]:
        fence = self.paths.current_generation
        data = self._read(fence) if fence in own else None
        if data is not None:
            current = decode_current_generation(data, fence)
            yield self.paths.generation_manifest(current.worker_generation)

    def _chosen(self, newest_first: Iterable[StatePath]) -> Iterator[StatePath]:
        """Yield the first checkpoint that a generation names and that exists in any place."""
        for path in newest_first:
            data = self._read(path)
            if data is None:
                continue
            generation = decode_generation_manifest(data, path)
            for ref in (generation.latest_ref, generation.base_ref):
                if ref is not None and self._lies_anywhere(ref):
                    yield ref
                    return

    def _lies_anywhere(self, path: StatePath) -> bool:
        held = any(path in held for held in self.copies.values())
        return held or self.store.head(path) is not None

    def _read(self, path: StatePath) -> bytes | None:
        """Read an object: its copy here, the object in place, or the newest copy elsewhere."""
        newest_first = sorted(self.copies, reverse=True)
        elsewhere = [self.copies[one] for one in newest_first if one != self.name]
        own = self.copies[self.name]
        places = [own[path].copy if path in own else path]
        places += [held[path].copy for held in elsewhere if path in held]
        for place in places:
            try:
                return self.store.read(place)
            except NotFoundError:
                continue
        return None
