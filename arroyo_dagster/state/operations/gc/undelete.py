"""Undelete: restore quarantined objects byte for byte, in an order that makes no epoch visible
before everything that it needs exists.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from arroyo_dagster.errors import ConflictError, FormatError, NotFoundError
from arroyo_dagster.state.codec.journal import RunHeader
from arroyo_dagster.state.codec.metadata import decode_legacy_checkpoint
from arroyo_dagster.state.codec.records import decode_epoch_record
from arroyo_dagster.state.codec.references import manifest_references, operator_references
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.metadata.lease import (
    IN_FLIGHT_GRACE_SECONDS,
    LeasedOperation,
    LeaseOptions,
    lease,
)
from arroyo_dagster.state.model.garbage import (
    JobPins,
    Moved,
    Pin,
    Quarantined,
    References,
    UndeletePlan,
)
from arroyo_dagster.state.model.ids import Epoch, StatePath
from arroyo_dagster.state.model.layout import GENERATION_MANIFEST, JobPaths, Layout
from arroyo_dagster.state.model.objects import ObjectKind, Packed, StoredObject, object_name
from arroyo_dagster.state.model.progress import OnProgress, no_progress
from arroyo_dagster.state.operations.engines import HERE, ItemRunner
from arroyo_dagster.state.operations.gc.copies import COPY_BYTES, digest_stored, in_turn
from arroyo_dagster.state.operations.gc.journal import Journal, finish_open_runs
from arroyo_dagster.state.operations.gc.pins import may_be_going, put_pins, read_pins, release
from arroyo_dagster.state.operations.gc.quarantine import all_moved, end_quarantine
from arroyo_dagster.state.operations.gc.root_reader import Reader
from arroyo_dagster.state.operations.progress import counter
from arroyo_dagster.state.planning.engines import WorkAmount
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.failures import delete_all
from arroyo_dagster.state.storage.store import ObjectStore

R = TypeVar("R")
_Decode = Callable[[bytes, str], References]


def plan_undelete(store: ObjectStore, paths: JobPaths, name: str) -> UndeletePlan:
    """Plan what `run_undelete` would restore: all that a quarantine holds. Writes nothing: this is
    the dry run.

    Raises:
        NotFoundError: there is no such quarantine.
        ConflictError: what it holds cannot come back completely.
    """
    # Of two copies of an object the newer counts.
    quarantine = _known(store, paths, name)
    copies = {file.path: file for file in all_moved(store, paths, quarantine)}
    moved = sorted(copies.values(), key=lambda file: _order(paths, file))
    _check_copies(store, paths, quarantine, moved)
    needs = _Needs(store, paths, copies)
    lacking = concurrently(needs.of_epoch, [file.path for file in moved if _epoch_of(paths, file)])
    for head, missing in (*lacking, needs.of_start()):
        if missing is not None:
            raise ConflictError(
                f"the quarantine cannot be restored: {head} needs an object that is neither in "
                "place nor in this quarantine; nothing was restored",
                path=missing,
                job=paths.root,
                quarantine=name,
                next_step="its objects and their copies are in `arroyo-state sql 'SELECT * FROM "
                "quarantine'`; copy those that you need",
            )
    return UndeletePlan(quarantine=name, objects=tuple(moved))


def _check_copies(
    store: ObjectStore, paths: JobPaths, quarantine: Quarantined, moved: Sequence[Moved]
) -> None:
    """Refuse a quarantine of which an interrupted purge has deleted copies, or everything."""
    name = quarantine.name
    if quarantine.ended and not moved:
        raise ConflictError(
            "the quarantine holds no object: it was purged, or nothing was moved to it",
            job=paths.root,
            quarantine=name,
            next_step=f"remove it: `arroyo-state gc purge {paths.root} --yes`",
        )
    listed = {info.path for info in store.list(paths.quarantine / name)}
    hidden = [file.copy for file in moved if file.copy not in listed]
    for path, info in zip(hidden, concurrently(store.head, hidden), strict=True):
        if info is None:
            raise ConflictError(
                "a purge of this quarantine has begun; nothing was restored",
                path=path,
                job=paths.root,
                quarantine=name,
                next_step=f"finish it: `arroyo-state gc purge {paths.root} --yes`",
            )


@dataclass(frozen=True, slots=True)
class _Needs:
    """What a restore needs besides the copies of a quarantine, and what of it does not exist."""

    store: ObjectStore
    paths: JobPaths
    copies: Mapping[StatePath, Moved]

    def of_epoch(self, head: StatePath) -> tuple[StatePath, StatePath | None]:
        """Return the object that makes an epoch visible, and an object that the epoch lacks."""
        try:
            lists = self._lists(head)
            files = [
                file for path, decode in lists for file in decode(self._read(path), path).files
            ]
        except NotFoundError as error:
            return head, StatePath(str(error.facts["path"]))
        except FormatError:
            return head, None  # its state before it was quarantined
        elsewhere = [file for file in dict.fromkeys(files) if file not in self.copies]
        infos = concurrently(self.store.head, elsewhere)
        return head, next((p for p, i in zip(elsewhere, infos, strict=True) if i is None), None)

    def of_start(self) -> tuple[StatePath, StatePath | None]:
        """Return the directory of generations, and itself if no manifest leads to the epochs."""
        below = self.paths.generations
        kinds = {object_name(self.paths, path).kind for path in self.copies}
        if ObjectKind.RECORD not in kinds or ObjectKind.GENERATION in kinds:
            return below, None
        manifests = [path / GENERATION_MANIFEST for path in self.store.list_dir(below).prefixes]
        infos = concurrently(self.store.head, manifests)
        return below, None if any(infos) else below

    def _lists(self, head: StatePath) -> list[tuple[StatePath, _Decode]]:
        """Return the objects that list an epoch's files, each with its decoder."""
        data = self._read(head)
        if self.paths.layout is Layout.PROTOCOL:
            return [(decode_epoch_record(data, head).checkpoint_ref, manifest_references)]
        legacy = decode_legacy_checkpoint(data, head)
        names = (self.paths.operator_metadata(name, legacy.epoch) for name in legacy.operators)
        return [(name, operator_references) for name in names]

    def _read(self, path: StatePath) -> bytes:
        moved = self.copies.get(path)
        try:
            return self.store.read(path if moved is None else moved.copy)
        except NotFoundError as error:
            raise NotFoundError("it does not exist", path=path) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class UndeleteOptions(LeasedOperation):
    """Options of an undelete.

    Attributes:
        on_progress: called after each restored object, by any thread, by one at a time.
        items: compares and copies the objects; in this process, or on Spark.
    """

    owner: str = "arroyo-state gc undelete"
    on_progress: OnProgress = no_progress
    items: ItemRunner = HERE


def run_undelete(
    store: ObjectStore,
    paths: JobPaths,
    name: str,
    options: UndeleteOptions | None = None,
    *,
    plan: UndeletePlan | None = None,
) -> list[Moved]:
    """Restore quarantined objects byte for byte, and pin the restored epochs.

    Metadata comes last. The epochs are pinned before their objects are restored. If an epoch is
    outside the retention of a managed job, an expiry may still be deleting it: then this call waits
    ten seconds in between, until requests sent before have arrived.

    The copies stay until they are purged. If it is interrupted, a second call restores the rest.

    Args:
        name: of the quarantine.
        plan: restore at most the objects of this plan, made earlier by `plan_undelete`; None = all
            that can be restored now.

    Returns:
        The restored objects, determined again after the epochs were pinned.

    Raises:
        NotFoundError: there is no such quarantine.
        ConflictError: what it holds cannot come back completely, another object exists at an
            object's path, or `plan` no longer fits; nothing was restored.
        FormatError: a copy has changed, or a restored epoch cannot be loaded because something else
            that it needs was deleted just now, as Arroyo's own cleanup may do.
    """
    run_options = options or UndeleteOptions()
    owner, clock = run_options.owner, run_options.clock
    quarantine = _known(store, paths, name)
    # The `sleep` of an undelete tells people of deletes in flight.
    asked = replace(LeaseOptions.of(run_options, deletes=True), sleep=LeaseOptions().sleep)
    with lease(store, paths, owner, asked) as held:
        finish_open_runs(held, paths)
        fresh = plan_undelete(held, paths, name)
        if plan is not None:
            _check_plan(paths, plan, fresh)
        moved = _pinned_plan(held, paths, name, fresh, run_options).objects
        exists = _run_copies(run_options.items, "compare with quarantine", held, _lies_there, moved)
        journal = Journal.begin(held, paths, _header(name, owner, clock(), moved))
        missing = [file for file, is_there in zip(moved, exists, strict=True) if not is_there]
        count = counter(run_options.on_progress, "restored objects", len(missing))
        for group in _groups(paths, missing):
            _run_copies(run_options.items, "copy from quarantine", held, _restore_copy, group)
            count(len(group))
        objects = [StoredObject(file.path, file.size_bytes) for file in moved]
        delete_all(held, [paths.removal])  # cancels an unfinished gc of the dead job
        for number, batch in enumerate(Packed(objects).batches(), start=1):
            journal.write([(number, batch)], dict.fromkeys((file.path for file in batch), "back"))
        journal.end({"back": len(moved)})
        end_quarantine(held, paths, quarantine, owner)
    for epoch in sorted(_epochs_of(paths, moved)):
        ParquetBackend(store, paths).prepare_checkpoint_load(epoch)
    return list(moved)


def _header(name: str, owner: str, now_micros: int, moved: Sequence[Moved]) -> RunHeader:
    return RunHeader(
        kind="undelete",
        plan=name,
        owner=owner,
        begun_at_micros=now_micros,
        objects=len(moved),
        size_bytes=sum(file.size_bytes for file in moved),
        quarantine=name,
    )


def _run_copies(
    items: ItemRunner,
    step: str,
    held: ObjectStore,
    function: Callable[[ObjectStore, Moved], R],
    objects: Sequence[Moved],
) -> list[R]:
    """Call a function for each object, where there are many on workers."""
    amount = WorkAmount(files=len(objects), size_bytes=sum(file.size_bytes for file in objects))
    weights = [file.size_bytes + COPY_BYTES for file in objects]
    run = functools.partial(function, held)
    return items.run(items.choose(step, amount), run, objects, weights)


def _check_plan(paths: JobPaths, plan: UndeletePlan, fresh: UndeletePlan) -> None:
    """Refuse a plan if more objects would be restored now than it names."""
    planned = set(plan.objects)
    more = [file.path for file in fresh.objects if file not in planned]
    if more:
        raise ConflictError(
            f"the plan no longer fits: {len(more)} other objects would come back now",
            job=paths.root,
            path=more[0],
            next_step="make a new plan; nothing was brought back",
        )


def _pinned_plan(
    held: ObjectStore, paths: JobPaths, name: str, plan: UndeletePlan, options: UndeleteOptions
) -> UndeletePlan:
    """Plan again while the epochs of the plan are pinned.

    Until a writer has read the pins, it may delete objects that an epoch needs and that are in
    place. So the plan is made again after pinning; if it is refused, the epochs are unpinned.
    """
    epochs = sorted(_epochs_of(paths, plan.objects))
    if not epochs:
        return plan
    before = read_pins(held, paths).pinned
    pinning = functools.partial(_pin, epochs=epochs, owner=options.owner, now=options.clock())
    put_pins(held, paths, pinning)
    if may_be_going(held, paths, epochs[0]):
        options.sleep(IN_FLIGHT_GRACE_SECONDS)
    try:
        return plan_undelete(held, paths, name)
    except ConflictError:
        put_pins(held, paths, functools.partial(release, epochs=set(epochs) - before))
        raise


def _epochs_of(paths: JobPaths, moved: Iterable[Moved]) -> set[Epoch]:
    """Return the epochs that objects make visible."""
    return {epoch for file in moved if (epoch := _epoch_of(paths, file)) is not None}


def _known(store: ObjectStore, paths: JobPaths, name: str) -> Quarantined:
    """Return a quarantine of the job."""
    _, quarantines = Reader(store, paths).pins_in_full()
    quarantine = next((candidate for candidate in quarantines if candidate.name == name), None)
    if quarantine is None:
        raise NotFoundError(
            "there is no such quarantine",
            job=paths.root,
            name=name,
            known=", ".join(candidate.name for candidate in quarantines) or "none",
            next_step="choose an existing quarantine, or list deletions with `arroyo-state sql "
            "@journal`",
        )
    return quarantine


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
    """Sort key: data, then what lists it, newest epoch first; what makes an epoch visible last."""
    name = object_name(paths, one.path)
    return (_LATER.get(name.kind, 0), -int(name.epoch or 0), one.path)


def _groups(paths: JobPaths, moved: Iterable[Moved]) -> Iterator[list[Moved]]:
    """Yield objects that may be restored concurrently, in `_order`; metadata one by one."""
    together: list[Moved] = []
    for file in moved:
        if _order(paths, file)[0]:
            if together:
                yield together
                together = []
            yield [file]
        else:
            together.append(file)
    if together:
        yield together


def _epoch_of(paths: JobPaths, one: Moved) -> Epoch | None:
    """Return the epoch that an object makes visible; None for all others."""
    name = object_name(paths, one.path)
    return name.epoch if name.kind in (ObjectKind.RECORD, ObjectKind.CHECKPOINT) else None


def _pin(kept: JobPins, *, epochs: Sequence[Epoch], owner: str, now: int) -> JobPins:
    more = (
        Pin(epoch=epoch, owner=owner, pinned_at_micros=now, reason="brought back")
        for epoch in epochs
        if epoch not in kept.pinned
    )
    still = (pin for pin in kept.pins if not pin.released or pin.epoch not in epochs)
    return replace(kept, pins=tuple(sorted((*still, *more), key=lambda pin: pin.epoch)))


def _lies_there(store: ObjectStore, one: Moved) -> bool:
    """Whether an object is restored already."""
    try:
        with in_turn(one.size_bytes):
            digest, _ = digest_stored(store, one.path)
    except NotFoundError:
        return False
    if digest == one.digest:
        return True
    raise ConflictError(
        "another object exists at the path of this one; nothing was restored",
        path=one.path,
        next_step="compare both: the copy is still in the quarantine",
        copy=one.copy,
    )


def _restore_copy(store: ObjectStore, one: Moved) -> None:
    with in_turn(one.size_bytes):
        digest, _ = digest_stored(store, one.copy)
        if digest != one.digest:
            raise FormatError(
                "the copy in quarantine does not match the object that was moved there",
                path=one.copy,
                original=one.path,
                next_step="keep it and report it; objects restored before it stay",
            )
        store.copy(one.copy, one.path, create=True)
        digest, _ = digest_stored(store, one.path)
    if digest != one.digest:
        raise ConflictError(
            "another object was written at the path of this one",
            path=one.path,
            next_step="compare both: the copy is still in the quarantine",
        )
