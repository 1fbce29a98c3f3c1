"""Objects moved aside instead of deleted: they come back byte for byte, or go after a while.

A quarantine is a directory of copies, each named in a part of its index with where it came from.
As long as it is there, what its epochs list and was not moved with them stays, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from arroyo_dagster.errors import ConflictError, FormatError, InputError, NotFoundError
from arroyo_dagster.state.backend import ParquetBackend, delete_all
from arroyo_dagster.state.codec.collecting import (
    encode_moved,
    encode_quarantined,
    known_fields,
    moved_from_json,
)
from arroyo_dagster.state.codec.metadata import decode_legacy_checkpoint
from arroyo_dagster.state.codec.records import decode_epoch_record
from arroyo_dagster.state.codec.references import manifest_references, operator_references
from arroyo_dagster.state.lease import lease
from arroyo_dagster.state.local.gc_plans import Clock, wall_clock
from arroyo_dagster.state.local.journal import Journal
from arroyo_dagster.state.local.retained import put_retained
from arroyo_dagster.state.local.roots_read import Reader
from arroyo_dagster.state.model.collecting import (
    GRACE_FLOOR_MICROS,
    PURGE_MICROS,
    GcPlan,
    Moved,
    PathsDigest,
    Pin,
    Quarantined,
    References,
    Retained,
    digest_of,
)
from arroyo_dagster.state.model.ids import Epoch, StatePath
from arroyo_dagster.state.model.layout import JobPaths, Layout
from arroyo_dagster.state.model.objects import NOTHING, ObjectKind, Packed, Stored, object_name
from arroyo_dagster.state.planning.dead_jobs import UNREADABLE
from arroyo_dagster.state.planning.permission import check_store_clock
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore

INDEX = "index.json"


@dataclass(frozen=True, slots=True)
class Aside:
    """Moves the objects of one run aside."""

    store: ObjectStore
    paths: JobPaths
    name: str

    @classmethod
    def begin(cls, held: ObjectStore, plan: GcPlan, owner: str, now_micros: int) -> Aside:
        """Begin a quarantine: from here on what it needs stays.

        Args:
            held: the store, under the lease.
        """
        name = f"{now_micros:017}-{plan.digest[:12]}"
        steps = (plan.data, plan.records, plan.metadata)
        found = Quarantined(
            name=name,
            needs=_needs(held, plan),
            moved_at_micros=now_micros,
            # What is still there at the end of a step is moved once more.
            parts=sum(step.batch_count + 1 for step in steps),
        )
        path = plan.paths.quarantine / name / INDEX
        held.put(path, encode_quarantined(found, owner))
        put_retained(
            held,
            plan.paths,
            lambda kept: replace(kept, quarantines=(*kept.quarantines, name)),
        )
        return cls(held, plan.paths, name)

    def copy(self, number: int, batch: list[Stored]) -> None:
        """Copy a batch aside, read it back, and write down where it came from."""
        directory = self.paths.quarantine / self.name
        moved = concurrently(
            lambda at: self._copied(batch[at], directory / f"{number:06}-{at:04}"),
            range(len(batch)),
        )
        self.store.put(directory / _part(number), encode_moved(moved))

    def _copied(self, one: Stored, target: StatePath) -> Moved:
        data = self.store.read(one.path)
        self.store.put(target, data)
        if self.store.read(target) != data:
            raise FormatError(
                "a copy reads back different from what was written; nothing was deleted of it",
                path=target,
                next_step="look at the store, then run it again",
            )
        return Moved(path=one.path, copy=target, size_bytes=len(data), digest=digest_of(data))


def _needs(held: ObjectStore, plan: GcPlan) -> Packed:
    """What the metadata in a plan lists that is not moved with it."""
    if UNREADABLE in plan.rule:
        return NOTHING  # all there is goes together
    moved = PathsDigest(plan.data.paths)
    reader = Reader(held, plan.paths)

    def listed(path: StatePath) -> tuple[StatePath, ...]:
        kind = object_name(plan.paths, path).kind
        if kind is ObjectKind.MANIFEST:
            return reader.required(path, manifest_references).files
        if kind is ObjectKind.OPERATOR:
            return reader.required(path, operator_references).files
        return ()

    found = concurrently(listed, plan.metadata.paths)
    needed = {path for files in found for path in files if path not in moved}
    return Packed.of_paths(sorted(needed))


# ---- what is there -------------------------------------------------------------------------------


def list_quarantines(store: ObjectStore, paths: JobPaths) -> list[tuple[Quarantined, list[Moved]]]:
    """What lies in quarantine of a job, oldest first.

    Raises:
        ProtocolError, FormatError: an index is missing or does not decode.
    """
    _, found = Reader(store, paths).retained()
    return [(one, _all_moved(store, paths, one)) for one in found]


def _part(number: int) -> str:
    return f"part-{number:06}.json"


def _all_moved(store: ObjectStore, paths: JobPaths, one: Quarantined) -> list[Moved]:
    """The objects in one quarantine."""
    return [moved for part in _parts(store, paths, one).values() for moved in part]


def _parts(store: ObjectStore, paths: JobPaths, one: Quarantined) -> dict[StatePath, list[Moved]]:
    """The parts of the index of one quarantine, all of them, whatever a listing shows."""
    directory = paths.quarantine / one.name
    listed = {info.path for info in store.list_dir(directory).objects}
    named = {directory / _part(number) for number in range(1, one.parts + 1)}
    known = sorted(path for path in listed | named if path.name.startswith("part-"))
    found = concurrently(lambda path: _moved_in(store, path), known)
    return {path: part for path, part in zip(known, found, strict=True) if part is not None}


def _moved_in(store: ObjectStore, path: StatePath) -> list[Moved] | None:
    try:
        data = store.read(path)
    except NotFoundError:
        return None  # the move was stopped before it, or had nothing left to do
    with known_fields(data, path) as fields:
        return list(moved_from_json(fields))


# ---- back ----------------------------------------------------------------------------------------


def undelete(
    store: ObjectStore,
    paths: JobPaths,
    name: str,
    *,
    yes: bool = False,
    owner: str = "arroyo-state gc undelete",
    clock: Clock = wall_clock,
) -> list[Moved]:
    """Bring back what was moved aside, byte for byte; epochs that come back are pinned.

    The copies stay until they are purged. An epoch of which something is neither there nor in the
    quarantine does not come back: another collection had taken it before, or takes it meanwhile.

    Args:
        name: of the quarantine.
        yes: do it; without it the answer says what would come back.

    Raises:
        NotFoundError: there is no such quarantine.
        ConflictError: something else lies where an object was; nothing was brought back.
        FormatError: a copy is not what it was, or an epoch is back and cannot be restored: what
            it needs besides went just now, which Arroyo's own cleanup does.
    """
    aside = _quarantined(store, paths, name)
    found = sorted(_all_moved(store, paths, aside), key=lambda one: _order(paths, one))
    if not yes:
        return _that_are_whole(store, paths, found)
    with lease(store, paths, owner, clock=clock) as held:
        moved = _that_are_whole(held, paths, found)
        there = concurrently(lambda one: _lies_there(held, one), moved)
        now = clock()
        size = sum(one.size_bytes for one in moved)
        journal = Journal(
            held,
            paths,
            kind="undelete",
            plan=name,
            owner=owner,
            now_micros=now,
            objects=len(moved),
            size_bytes=size,
            quarantine=name,
        )
        pins = sorted({epoch for one in moved if (epoch := _epoch_of(paths, one)) is not None})
        put_retained(held, paths, lambda kept: _pinned(kept, pins, owner, now))
        missing = [one for one, is_there in zip(moved, there, strict=True) if not is_there]
        for group in _groups(paths, missing):
            concurrently(lambda one: _bring_back(held, one), group)
        objects = [Stored(one.path, one.size_bytes) for one in moved]
        delete_all(held, [paths.removal])  # one that has begun is given up
        journal.write(1, objects, dict.fromkeys((one.path for one in moved), "back"))
        journal.end({"back": len(moved)})
    for epoch in pins:
        ParquetBackend(store, paths).prepare_checkpoint_load(epoch)
    return moved


_OF_AN_EPOCH = frozenset(
    {
        *(ObjectKind.OPERATOR, ObjectKind.MANIFEST, ObjectKind.CHECKPOINT),
        *(ObjectKind.MARKER, ObjectKind.RECORD),
    }
)


def _that_are_whole(store: ObjectStore, paths: JobPaths, moved: list[Moved]) -> list[Moved]:
    """What may come back: nothing that would make an epoch visible which cannot be restored."""
    copies = {one.path: one.copy for one in moved}
    heads = [one for one in moved if _epoch_of(paths, one) is not None]
    whole = concurrently(lambda one: _may_come_back(store, paths, one, copies), heads)
    broken = {_epoch_of(paths, one) for one, fine in zip(heads, whole, strict=True) if not fine}
    names = {one.path: object_name(paths, one.path) for one in moved}
    return [
        one
        for one in moved
        if names[one.path].kind not in _OF_AN_EPOCH or names[one.path].epoch not in broken
    ]


def _may_come_back(
    store: ObjectStore, paths: JobPaths, head: Moved, copies: Mapping[StatePath, StatePath]
) -> bool:
    try:
        return _is_whole(store, paths, head, copies)
    except FormatError:
        return True  # as it was before it was moved aside


def _is_whole(
    store: ObjectStore, paths: JobPaths, head: Moved, copies: Mapping[StatePath, StatePath]
) -> bool:
    """Whether all that an epoch needs is there or among the copies."""

    def read(path: StatePath) -> bytes | None:
        try:
            return store.read(copies.get(path, path))
        except NotFoundError:
            return None

    lists: list[tuple[StatePath, Callable[[bytes, str], References]]]
    data = read(head.path)
    if data is None:
        return False
    if paths.layout is Layout.PROTOCOL:
        lists = [(decode_epoch_record(data, head.path).checkpoint_ref, manifest_references)]
    else:
        legacy = decode_legacy_checkpoint(data, head.path)
        own = (paths.operator_metadata(name, legacy.epoch) for name in legacy.operators)
        lists = [(path, operator_references) for path in own]
    for path, decode in lists:
        found = read(path)
        if found is None:
            return False
        elsewhere = [file for file in decode(found, path).files if file not in copies]
        if None in concurrently(store.head, elsewhere):
            return False
    return True


def _quarantined(store: ObjectStore, paths: JobPaths, name: str) -> Quarantined:
    _, known = Reader(store, paths).retained()
    found = next((one for one in known if one.name == name), None)
    if found is None:
        raise NotFoundError(
            "there is no such quarantine",
            job=paths.root,
            name=name,
            known=", ".join(one.name for one in known) or "none",
            next_step="choose one of those there are, or look at `arroyo-state gc journal`",
        )
    return found


_LATER = {
    ObjectKind.OPERATOR: 1,
    ObjectKind.MANIFEST: 2,
    ObjectKind.CHECKPOINT: 2,
    ObjectKind.MARKER: 3,
    ObjectKind.RECORD: 4,
    ObjectKind.GENERATION: 5,
    ObjectKind.FENCE: 6,
}


def _order(paths: JobPaths, one: Moved) -> tuple[int, int, str]:
    """Data first, then what lists it, newest first; what makes an epoch visible last."""
    name = object_name(paths, one.path)
    return (_LATER.get(name.kind, 0), -int(name.epoch or 0), one.path)


def _groups(paths: JobPaths, moved: Iterable[Moved]) -> Iterator[list[Moved]]:
    """What may come back at once, in the order of `_order`: metadata comes one by one."""
    together: list[Moved] = []
    for one in moved:
        if _order(paths, one)[0]:
            if together:
                yield together
                together = []
            yield [one]
        else:
            together.append(one)
    if together:
        yield together


def _epoch_of(paths: JobPaths, one: Moved) -> Epoch | None:
    """The epoch that an object makes visible; None for all others."""
    name = object_name(paths, one.path)
    return name.epoch if name.kind in (ObjectKind.RECORD, ObjectKind.CHECKPOINT) else None


def _pinned(kept: Retained, epochs: Sequence[Epoch], owner: str, now_micros: int) -> Retained:
    more = (
        Pin(epoch=epoch, owner=owner, pinned_at_micros=now_micros, reason="brought back")
        for epoch in epochs
        if epoch not in kept.pinned
    )
    still = (pin for pin in kept.pins if not pin.released or pin.epoch not in epochs)
    return replace(kept, pins=tuple(sorted((*still, *more), key=lambda pin: pin.epoch)))


def _lies_there(store: ObjectStore, one: Moved) -> bool:
    """Whether an object is back already."""
    try:
        data = store.read(one.path)
    except NotFoundError:
        return False
    if digest_of(data) == one.digest:
        return True
    raise ConflictError(
        "something else lies where this object was; nothing was brought back",
        path=one.path,
        next_step="look at both: the copy is still in the quarantine",
        copy=one.copy,
    )


def _bring_back(store: ObjectStore, one: Moved) -> None:
    data = store.read(one.copy)
    if digest_of(data) != one.digest:
        raise FormatError(
            "the copy in quarantine is not what was moved there",
            path=one.copy,
            original=one.path,
            next_step="keep it and report it; what came back before it stays",
        )
    if not store.create(one.path, data) and store.read(one.path) != data:
        raise ConflictError(
            "something else was written where this object was",
            path=one.path,
            next_step="look at both: the copy is still in the quarantine",
        )


# ---- for good ------------------------------------------------------------------------------------


def purge(
    store: ObjectStore,
    paths: JobPaths,
    *,
    older_than_micros: int = PURGE_MICROS,
    yes: bool = False,
    owner: str = "arroyo-state gc purge",
    clock: Clock = wall_clock,
) -> list[Quarantined]:
    """Delete what has been in quarantine for long enough.

    Args:
        older_than_micros: how long, by the clock of the store; at least an hour.
        yes: do it; without it the answer says what would go.

    Raises:
        InputError: less than an hour.
        ConflictError, StorageError, ProtocolError: as `collect`.
    """
    if older_than_micros < GRACE_FLOOR_MICROS:
        raise InputError(
            "what was moved aside less than an hour ago is not purged",
            seconds=older_than_micros // 1_000_000,
            next_step="give an hour or more; 7 days is the default",
        )
    if not yes:
        return _old(store, paths, clock() - older_than_micros)
    with lease(store, paths, owner, clock=clock) as held:
        written = held.head(held.lease.path)
        now = check_store_clock(
            paths, None if written is None else written.modified_micros, clock()
        )
        going = _old(held, paths, now - older_than_micros)
        for one in going:
            _purge_one(held, paths, one, owner, now)
    return going


def _old(store: ObjectStore, paths: JobPaths, before_micros: int) -> list[Quarantined]:
    _, found = Reader(store, paths).retained()
    return [one for one in found if one.moved_at_micros <= before_micros]


def _purge_one(
    held: ObjectStore, paths: JobPaths, one: Quarantined, owner: str, now_micros: int
) -> None:
    """Copies first, then the index: it is readable for as long as it is registered."""
    directory = paths.quarantine / one.name
    listed = [info for info in held.list(directory) if info.path.name != INDEX]
    going = {i.path: Stored(i.path, i.size_bytes, i.modified_micros, i.etag) for i in listed}
    for part, moved in _parts(held, paths, one).items():
        going.setdefault(part, Stored(part, None))
        for copy in moved:
            going.setdefault(copy.copy, Stored(copy.copy, copy.size_bytes))
    # Parts, whose names sort behind those of the copies, go last: they name what no listing shows.
    objects = [going[path] for path in sorted(going)]
    journal = Journal(
        held,
        paths,
        kind="purge",
        plan=one.name,
        owner=owner,
        now_micros=now_micros,
        objects=len(objects),
        size_bytes=sum(stored.size_bytes or 0 for stored in objects),
        quarantine=one.name,
    )
    for number, batch in enumerate(Packed(objects).batches(), start=1):
        journal.write(number, batch, {})
        delete_all(held, [stored.path for stored in batch])
        journal.write(number, batch, dict.fromkeys((b.path for b in batch), "deleted"))
    put_retained(
        held,
        paths,
        lambda kept: replace(
            kept, quarantines=tuple(name for name in kept.quarantines if name != one.name)
        ),
    )
    delete_all(held, [directory / INDEX])
    journal.end({"deleted": len(objects)})
