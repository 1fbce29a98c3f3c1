"""Plan orphans from a stored listing of the store instead of listing every object.

A stored listing is old, and may be wrong. Therefore it only proposes data files to delete: metadata
is listed and read now wherever it may be newer, and each proposed object is checked by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from arroyo_dagster.errors import InputError, ProtocolError
from arroyo_dagster.state.model.aliases import PathsDigest
from arroyo_dagster.state.model.garbage import DAY_MICROS, SKEW_MICROS, GcPlan, Roots
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.layout import JobPaths, Layout
from arroyo_dagster.state.model.objects import ObjectKind, Packed, StoredObject, object_name
from arroyo_dagster.state.model.progress import OnProgress, no_progress
from arroyo_dagster.state.operations.engines import HERE, ItemRunner
from arroyo_dagster.state.operations.gc.inventory import (
    Inventory,
    directories_of,
    list_beside,
    list_job,
    sort_objects,
)
from arroyo_dagster.state.operations.gc.root_reader import NO_EPOCH
from arroyo_dagster.state.operations.gc.roots import newest_root
from arroyo_dagster.state.planning.engines import WorkAmount
from arroyo_dagster.state.planning.gc.orphans import Reason
from arroyo_dagster.state.planning.gc.reachability import refuse
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.names import StoredName, listed_path
from arroyo_dagster.state.storage.store import ObjectInfo, ObjectStore

SETTLED_MICROS = DAY_MICROS
"""What is this much older than a listing must be in it. Objects that were written or deleted
shortly before it was made may be missing in it, or still be there (S3 Inventory, "Consistency").
"""

_PROBES = 64
_NEXT = "make a new listing, or plan without one; nothing was deleted"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreListing:
    """What a listing of a store says about the objects of one job.

    Attributes:
        source: where it was read, for people.
        made_at_micros: when the oldest of its files was written.
        stored: the objects, under their stored names, in the order of a listing. Objects whose
            rows contradict each other, or have no size or time, are left out.
        rows: the number of its rows, of this job and others.
    """

    source: str
    paths: JobPaths
    made_at_micros: int
    stored: Packed
    rows: int

    def objects(self) -> Iterator[ObjectInfo]:
        """Yield the objects as a listing of the store would."""
        for file in self.stored:
            path = listed_path(file.path)
            yield ObjectInfo(
                path=path,
                size_bytes=file.size_bytes or 0,
                modified_micros=file.modified_micros,
                etag=file.etag,
                addressable=not isinstance(path, StoredName),
            )


def check_age(given: StoreListing, paths: JobPaths, now_micros: int, grace_micros: int) -> None:
    """Refuse a listing of another job, from the future, or older than the grace period.

    Raises:
        InputError: it is one of these; the message says what was expected.
    """
    if given.paths != paths:
        raise InputError(
            f"the listing was read for job {given.paths.root}: expected {paths.root}",
            job=paths.root,
        )
    age = now_micros - given.made_at_micros
    if age < -SKEW_MICROS:
        raise InputError(
            f"the listing was made {-age // 1_000_000} s from now: expected a time in the past",
            path=given.source,
            next_step="check the clocks of the store and of what made it; nothing was deleted",
        )
    if age > grace_micros:
        raise InputError(
            f"the listing is {age / DAY_MICROS:.1f} days old: expected at most the grace period, "
            f"{grace_micros / DAY_MICROS:.1f} days",
            path=given.source,
            next_step=f"{_NEXT}. Or keep objects longer: --older-than {age // DAY_MICROS + 1}d",
        )


def list_with(
    store: ObjectStore,
    paths: JobPaths,
    given: StoreListing,
    on_progress: OnProgress = no_progress,
) -> tuple[Inventory, tuple[int, int]]:
    """List a job with the help of a stored listing.

    Directories of epochs that were complete a day before the listing was made are taken from it.
    All others are listed: those are few, unless many attempts at epochs failed.

    Returns:
        The objects as listing them now would find them, of data files only those of the listing;
        and the number and bytes of the data files that were listed now and are not in it.

    Raises:
        ProtocolError: as `read_inventory`.
    """
    newest = newest_root(store, paths)
    if newest is None:
        raise refuse(NO_EPOCH, paths)
    directories = directories_of(store, paths)
    known = frozenset(directories)
    by_listing = sort_objects(
        paths,
        newest.epoch,
        (info for info in given.objects() if _directory(info.path, known) is not None),
        on_progress,
    )
    recent = {_directory(ref, known) for ref in (newest.ref, newest.parent_ref) if ref is not None}
    before = given.made_at_micros - SETTLED_MICROS
    settled = frozenset(_complete(paths, by_listing.metadata, before, known)) - recent
    now = concurrently(
        lambda directory: list_job(store, paths, newest.epoch, below=directory),
        [directory for directory in directories if directory not in settled],
    )
    beside = list_beside(store, paths, newest.epoch, directories)

    def in_settled(objects: Iterable[StoredObject]) -> Packed:
        return Packed(file for file in objects if _directory(file.path, known) in settled)

    fresh = [beside, *now]
    of_listing = PathsDigest(by_listing.files.paths)
    newer = [file for part in fresh for file in part.files if file.path not in of_listing]
    inventory = replace(
        by_listing,
        metadata=Packed.joined(
            [in_settled(by_listing.metadata), *(part.metadata for part in fresh)]
        ),
        maintenance=Packed.joined([part.maintenance for part in fresh]),
        foreign=Packed.joined([in_settled(by_listing.foreign), *(part.foreign for part in fresh)]),
        samples=tuple(path for part in (by_listing, *fresh) for path in part.samples),
        beside=len(newer),
    )
    return inventory, (len(newer), sum(file.size_bytes or 0 for file in newer))


def _directory(path: StatePath, known: frozenset[StatePath]) -> StatePath | None:
    """Return which of the directories contains an object; None if none does."""
    parent = path.rpartition("/")[0]  # as text: not every name in a listing is a path
    while parent and parent not in known:
        parent = parent.rpartition("/")[0]
    return StatePath(parent) if parent else None


def _complete(
    paths: JobPaths, metadata: Iterable[StoredObject], before: int, known: frozenset[StatePath]
) -> Iterator[StatePath]:
    """Yield the directories whose epoch was complete before a time: its last object was there."""
    last = ObjectKind.CHECKPOINT if paths.layout is Layout.LEGACY else ObjectKind.MANIFEST
    for file in metadata:
        written = file.modified_micros
        if written is not None and written < before and object_name(paths, file.path).kind is last:
            directory = _directory(file.path, known)
            if directory is not None:
                yield directory


def check_complete(store: ObjectStore, given: StoreListing, roots: Roots, files: Packed) -> None:
    """Refuse a listing that lacks objects which existed a day before it was made.

    Raises:
        ProtocolError: a file that an epoch lists is missing in it, and is older.
    """
    before, listed = given.made_at_micros - SETTLED_MICROS, PathsDigest(files.paths)
    missing: list[StatePath] = []
    for epoch in roots.epochs:
        if epoch.written_at_micros is not None and epoch.written_at_micros < before:
            own = epoch.files.paths
            missing += [
                path
                for path in own
                if path not in listed and object_name(roots.paths, path).kind is ObjectKind.DATA
            ]
        if len(missing) >= _PROBES:
            break
    infos = concurrently(store.head, missing[:_PROBES])
    old = [info for info in infos if info is not None and (info.modified_micros or 0) < before]
    if old:
        raise ProtocolError(
            f"the listing is incomplete: {len(old)} or more files are missing that were written "
            "more than a day before it was made and that epochs list",
            job=roots.paths.root,
            path=old[0].path,
            listing=given.source,
            next_step=_NEXT,
        )


def with_newer(plan: GcPlan, newer: tuple[int, int]) -> GcPlan:
    """Return the plan with the objects that stay because they are not in the listing."""
    if not newer[0]:
        return plan
    return replace(plan, stays={**plan.stays, Reason.NEWER.name.lower(): newer})


def rechecked(
    store: ObjectStore, plan: GcPlan, given: StoreListing, items: ItemRunner = HERE
) -> GcPlan:
    """Return the plan with only those objects that are now what the listing says, each as the
    store describes it now.

    Objects that have changed stay; those that are gone are left out.
    """
    steps = (plan.data, plan.records, plan.metadata)
    total = sum(map(len, steps))
    choice = items.choose("check objects of the listing", WorkAmount(files=total))
    kept: list[Packed] = []
    changed = changed_bytes = 0
    for step in steps:
        batches = list(step.batches())
        check = partial(_check_batch, store)
        results = items.run(choice, check, batches, [len(batch) for batch in batches])
        kept.append(Packed.joined(same for same, _, _ in results))
        changed += sum(count for _, count, _ in results)
        changed_bytes += sum(size for _, _, size in results)
    data, records, metadata = kept
    stays = dict(plan.stays)
    if changed:
        stays[Reason.CHANGED.name.lower()] = (changed, changed_bytes)
    rule = {**plan.rule, "listing": given.source, "listing_micros": given.made_at_micros}
    return replace(plan, data=data, records=records, metadata=metadata, stays=stays, rule=rule)


def _check_batch(store: ObjectStore, batch: Sequence[StoredObject]) -> tuple[Packed, int, int]:
    """Return the unchanged objects, and the number and bytes of those that have changed."""
    infos = concurrently(store.head, [file.path for file in batch])
    existing = [(file, info) for file, info in zip(batch, infos, strict=True) if info is not None]
    same = [info for file, info in existing if _same(file, info)]
    changed = [info for file, info in existing if not _same(file, info)]
    packed = Packed(
        StoredObject(info.path, info.size_bytes, info.modified_micros, info.etag) for info in same
    )
    return packed, len(changed), sum(info.size_bytes for info in changed)


def _same(one: StoredObject, info: ObjectInfo) -> bool:
    """Whether an object is the one that the listing describes; times have whole seconds."""
    etags = [plain_etag(etag) for etag in (one.etag, info.etag) if etag is not None]
    if one.modified_micros is None or info.modified_micros is None or len(set(etags)) > 1:
        return False
    seconds = one.modified_micros // 1_000_000, info.modified_micros // 1_000_000
    return one.size_bytes == info.size_bytes and seconds[0] == seconds[1]


def plain_etag(etag: str) -> str:
    """Return an etag without quotes and weakness, as listings have it."""
    return etag.removeprefix("W/").strip('"').lower()
