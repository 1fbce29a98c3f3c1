"""Quarantine: objects that are moved instead of deleted, and later restored byte for byte or
purged.

A quarantine is a directory of copies. Its index, in parts, names the original path of each copy. As
long as it exists, the files that its epochs list but that were not moved with them are kept, too.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from arroyo_dagster.errors import FormatError, NotFoundError
from arroyo_dagster.state.codec.gc import decode_moved, encode_moved, encode_quarantined
from arroyo_dagster.state.codec.journal import RunHeader
from arroyo_dagster.state.codec.references import manifest_references, operator_references
from arroyo_dagster.state.metadata.lease import IN_FLIGHT_GRACE_SECONDS, LeaseOptions, lease
from arroyo_dagster.state.model.aliases import PathsDigest
from arroyo_dagster.state.model.clock import Clock, wall_clock
from arroyo_dagster.state.model.garbage import PURGE_MICROS, GcPlan, JobPins, Moved, Quarantined
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.layout import QUARANTINE_INDEX, JobPaths, index_batch
from arroyo_dagster.state.model.objects import (
    NOTHING,
    ObjectKind,
    Packed,
    StoredObject,
    object_name,
)
from arroyo_dagster.state.model.progress import OnProgress, no_progress
from arroyo_dagster.state.operations.engines import HERE, ItemRunner
from arroyo_dagster.state.operations.gc.copies import COPY_BYTES, digest_stored, in_turn
from arroyo_dagster.state.operations.gc.journal import Journal, finish_open_runs
from arroyo_dagster.state.operations.gc.pins import may_be_going, put_pins
from arroyo_dagster.state.operations.gc.root_reader import Reader
from arroyo_dagster.state.operations.progress import counter
from arroyo_dagster.state.planning.engines import WorkAmount
from arroyo_dagster.state.planning.gc.dead_jobs import UNREADABLE
from arroyo_dagster.state.planning.gc.safety_checks import check_store_clock, checked_purge_age
from arroyo_dagster.state.planning.restore.lost_metadata import check_own
from arroyo_dagster.state.storage.concurrency import ahead, concurrently
from arroyo_dagster.state.storage.failures import delete_all
from arroyo_dagster.state.storage.store import ObjectStore, read_optional


@dataclass(frozen=True, slots=True)
class QuarantineWriter:
    """Moves the objects of one run to quarantine."""

    store: ObjectStore
    paths: JobPaths
    quarantine: Quarantined
    owner: str
    index_offset: int
    items: ItemRunner = HERE

    @classmethod
    def begin(
        cls,
        held: ObjectStore,
        plan: GcPlan,
        owner: str,
        now_micros: int,
        sleep: Callable[[float], None],
        items: ItemRunner = HERE,
    ) -> QuarantineWriter:
        """Begin a quarantine, or continue that of a run that was interrupted: what belongs
        together is undeleted together. From now on the objects that it needs are kept.

        Args:
            held: the store, under the lease.
            sleep: waits until deletes have arrived that the job itself sent before it could see the
                quarantine.
            items: copies the objects.
        """
        _, quarantines = Reader(held, plan.paths).pins_in_full()
        begun = next((quarantine for quarantine in quarantines if not quarantine.ended), None)
        if begun is None:
            name = f"{now_micros:017}-{plan.digest[:12]}"
            begun = Quarantined(name=name, needs=NOTHING, moved_at_micros=now_micros)
        steps = (plan.data, plan.records, plan.metadata)
        moved = [file.path for file in all_moved(held, plan.paths, begun)]
        current = replace(
            begun,
            needs=Packed.of_paths(sorted({*begun.needs.paths, *_needs(held, plan, moved)})),
            moved_at_micros=now_micros,
            # Objects that still exist at the end of a step are moved once more.
            parts=begun.parts + sum(step.batch_count + 1 for step in steps),
        )
        held.put(plan.paths.quarantine_index(current.name), encode_quarantined(current, owner))
        put_pins(held, plan.paths, functools.partial(_with_quarantine, name=current.name))
        if current.needs and may_be_going(held, plan.paths):
            sleep(IN_FLIGHT_GRACE_SECONDS)
        return cls(held, plan.paths, current, owner, begun.parts, items)

    @property
    def name(self) -> str:
        """The name of the quarantine."""
        return self.quarantine.name

    def end(self) -> None:
        """Record that everything was moved: the next run begins a quarantine of its own."""
        end_quarantine(self.store, self.paths, self.quarantine, self.owner)

    def copy(self, batches: Sequence[tuple[int, list[StoredObject]]]) -> list[StatePath]:
        """Copy numbered batches to quarantine, read them back, and record the original paths.

        Returns:
            The paths of objects that did not exist; nothing at these paths may be deleted.
        """
        directory = self.paths.quarantine / self.name
        targets = [
            (file, directory / f"{self.index_offset + number:06}-{index:04}")
            for number, batch in batches
            for index, file in enumerate(batch)
        ]
        sizes = [file.size_bytes or 0 for file, _ in targets]
        amount = WorkAmount(files=len(targets), size_bytes=sum(sizes))
        choice = self.items.choose("copy to quarantine", amount)
        weights = [size + COPY_BYTES for size in sizes]
        copy = functools.partial(copy_object, self.store)
        moved = self.items.run(choice, copy, targets, weights)
        copies = iter(moved)
        # The index is written here, once, after its copies: a worker that was given up and still
        # runs cannot replace it.
        parts = [(number, [next(copies) for _ in batch]) for number, batch in batches]
        concurrently(lambda part: self._put_index(directory, *part), parts)
        return [file.path for (file, _), copy in zip(targets, moved, strict=True) if copy is None]

    def _put_index(self, directory: StatePath, number: int, found: Sequence[Moved | None]) -> None:
        moved = [copy for copy in found if copy is not None]
        path = index_batch(self.paths, self.name, self.index_offset + number)
        self.store.put(path, encode_moved(moved))


def _with_quarantine(kept: JobPins, name: str) -> JobPins:
    return replace(kept, quarantines=tuple(dict.fromkeys((*kept.quarantines, name))))


def end_quarantine(held: ObjectStore, paths: JobPaths, quarantine: Quarantined, owner: str) -> None:
    """Record that no later run moves objects to a quarantine."""
    if not quarantine.ended:
        data = encode_quarantined(replace(quarantine, ended=True), owner)
        held.put(paths.quarantine_index(quarantine.name), data)


def copy_object(store: ObjectStore, wanted: tuple[StoredObject, StatePath]) -> Moved | None:
    """Copy one object to a new name that begins as given; None if there is no such object.

    Each call writes another name: of two attempts that overlap, none overwrites what the other has
    read back.

    Raises:
        FormatError: the copy reads back different.
    """
    file, prefix = wanted
    target = StatePath(f"{prefix}-{uuid.uuid4().hex[:12]}")
    with in_turn(file.size_bytes):
        try:
            digest, size_bytes = digest_stored(store, file.path)
            store.copy(file.path, target)
        except NotFoundError:
            return None
        if digest_stored(store, target) != (digest, size_bytes):
            raise FormatError(
                "a copy reads back different from what was written; its original was not deleted",
                path=target,
                next_step="check the store, then run it again",
            )
    return Moved(path=file.path, copy=target, size_bytes=size_bytes, digest=digest)


def _needs(held: ObjectStore, plan: GcPlan, moved_before: Iterable[StatePath]) -> set[StatePath]:
    """Return the files that the plan's metadata lists and that are not moved with it."""
    if UNREADABLE in plan.rule:
        return set()  # everything is moved together
    moved = PathsDigest((*plan.data.paths, *moved_before))
    reader = Reader(held, plan.paths)

    def listed(path: StatePath) -> tuple[StatePath, ...]:
        kind = object_name(plan.paths, path).kind
        if kind is ObjectKind.MANIFEST:
            return reader.read(path, manifest_references).files
        # An operator's metadata whose id contains a slash is recognised by its file name.
        if kind is ObjectKind.OPERATOR or (kind is ObjectKind.FOREIGN and path.name == "metadata"):
            return reader.read(path, operator_references).files
        return ()

    lists = concurrently(listed, plan.metadata.paths)
    return {path for files in lists for path in files if path not in moved}


# ---- existing quarantines ------------------------------------------------------------------------


def list_quarantines(store: ObjectStore, paths: JobPaths) -> list[tuple[Quarantined, list[Moved]]]:
    """Return the quarantines of a job with their objects, oldest first.

    Raises:
        ProtocolError, FormatError: an index is missing or does not decode.
    """
    _, quarantines = Reader(store, paths).pins_in_full()
    return [(quarantine, all_moved(store, paths, quarantine)) for quarantine in quarantines]


def all_moved(store: ObjectStore, paths: JobPaths, one: Quarantined) -> list[Moved]:
    """Return the objects in one quarantine."""
    return [moved for part in _index_parts(store, paths, one).values() for moved in part]


def _index_parts(
    store: ObjectStore, paths: JobPaths, one: Quarantined
) -> dict[StatePath, list[Moved]]:
    """Return all parts of a quarantine's index, even those that a listing misses."""
    directory = paths.quarantine / one.name
    listed = {info.path for info in store.list_dir(directory).objects}
    named = {index_batch(paths, one.name, number) for number in range(1, one.parts + 1)}
    parts = sorted(path for path in listed | named if path.name.startswith("part-"))
    contents = concurrently(lambda path: _moved_in(store, paths, path), parts)
    return {path: part for path, part in zip(parts, contents, strict=True) if part is not None}


def find_copy(
    store: ObjectStore, paths: JobPaths, one: Quarantined, path: StatePath
) -> Moved | None:
    """Return the copy of one object in a quarantine; None if there is none. Reads part by part."""
    names = [index_batch(paths, one.name, number) for number in range(1, one.parts + 1)]
    # A run that continues another may copy an object once more: the newest copy counts.
    for part in ahead(lambda name: _moved_in(store, paths, name), reversed(names)):
        copy = next((moved for moved in part or () if moved.path == path), None)
        if copy is not None:
            return copy
    return None


def _moved_in(store: ObjectStore, paths: JobPaths, path: StatePath) -> list[Moved] | None:
    data = read_optional(store, path)
    if data is None:
        return None  # the run was interrupted before this part, or had nothing left to move
    moved = decode_moved(data, path)
    for below, named in (
        (paths.root, [file.path for file in moved]),
        (paths.quarantine, [file.copy for file in moved]),
    ):
        check_own(
            paths,
            "the index of the quarantine",
            named,
            below=below,
            next_step="undelete or purge it in the original job, of which this one is a copy; "
            "nothing was changed",
            path=path,
        )
    return moved


# ---- purge ---------------------------------------------------------------------------------------


def purge(
    store: ObjectStore,
    paths: JobPaths,
    *,
    older_than_micros: int = PURGE_MICROS,
    yes: bool = False,
    owner: str = "arroyo-state gc purge",
    clock: Clock = wall_clock,
    on_progress: OnProgress = no_progress,
) -> list[Quarantined]:
    """Delete quarantines that are old enough.

    Args:
        older_than_micros: the minimum age, by the clock of the store; at least an hour.
        yes: delete them; otherwise only return those that would be deleted.
        on_progress: called after each batch of deleted objects.

    Raises:
        InputError: the age is less than an hour.
        ConflictError, StorageError, ProtocolError: as `run_gc`.
    """
    checked_purge_age(older_than_micros)
    if not yes:
        return _old(store, paths, clock() - older_than_micros)
    with lease(store, paths, owner, LeaseOptions(deletes=True, clock=clock)) as held:
        written = held.head(held.lease.path)
        now = check_store_clock(
            paths, None if written is None else written.modified_micros, clock()
        )
        finish_open_runs(held, paths)
        going = _old(held, paths, now - older_than_micros)
        for quarantine in going:
            purge_quarantine(held, paths, quarantine, owner, now, on_progress)
    return going


def _old(store: ObjectStore, paths: JobPaths, before_micros: int) -> list[Quarantined]:
    _, quarantines = Reader(store, paths).pins_in_full()
    return [quarantine for quarantine in quarantines if quarantine.moved_at_micros <= before_micros]


def purge_quarantine(
    held: ObjectStore,
    paths: JobPaths,
    one: Quarantined,
    owner: str,
    now_micros: int,
    on_progress: OnProgress = no_progress,
) -> str:
    """Delete a quarantine: the copies first, then the index, which stays readable as long as it is
    registered.

    Args:
        held: the store, under the lease.

    Returns:
        The run in the journal.
    """
    directory = paths.quarantine / one.name
    listed = [info for info in held.list(directory) if info.path.name != QUARANTINE_INDEX]
    going = {i.path: StoredObject(i.path, i.size_bytes, i.modified_micros, i.etag) for i in listed}
    for part, moved in _index_parts(held, paths, one).items():
        going.setdefault(part, StoredObject(part, None))
        for copy in moved:
            going.setdefault(copy.copy, StoredObject(copy.copy, copy.size_bytes))
    # Index parts, which sort behind the copies, come last: they name copies that a listing misses.
    objects = [going[path] for path in sorted(going)]
    journal = Journal.begin(
        held,
        paths,
        RunHeader(
            kind="purge",
            plan=one.name,
            owner=owner,
            begun_at_micros=now_micros,
            objects=len(objects),
            size_bytes=sum(stored.size_bytes or 0 for stored in objects),
            quarantine=one.name,
        ),
    )
    count = counter(on_progress, "purged objects", len(objects))
    for number, batch in enumerate(Packed(objects).batches(), start=1):
        journal.write([(number, batch)], {})
        delete_all(held, [stored.path for stored in batch])
        journal.write([(number, batch)], dict.fromkeys((b.path for b in batch), "deleted"))
        count(len(batch))
    put_pins(
        held,
        paths,
        lambda kept: replace(
            kept, quarantines=tuple(name for name in kept.quarantines if name != one.name)
        ),
    )
    delete_all(held, [directory / QUARANTINE_INDEX])
    journal.end({"deleted": len(objects)})
    return journal.name
