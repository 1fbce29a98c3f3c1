"""Inventory: every object below a job, listed once and sorted by the kind that its name shows.

The listing comes first and the references are read afterwards: an epoch published in between adds
references, never removes any.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter

from arroyo_dagster.errors import FormatError, StorageError
from arroyo_dagster.state.codec.maintenance_records import (
    decode_change_record,
    decode_compaction_record,
)
from arroyo_dagster.state.codec.records import decode_generation_manifest
from arroyo_dagster.state.codec.references import manifest_references, operator_references
from arroyo_dagster.state.metadata.lease import Leased
from arroyo_dagster.state.model.aliases import PathsDigest
from arroyo_dagster.state.model.changes import ChangeKind, is_change_of
from arroyo_dagster.state.model.checkpoints import CheckpointState, GenerationManifest, LostObject
from arroyo_dagster.state.model.garbage import (
    EpochRoot,
    GcPlan,
    PlanKind,
    References,
    Roots,
    WriteRemains,
)
from arroyo_dagster.state.model.ids import Epoch, StatePath
from arroyo_dagster.state.model.layout import (
    MAINTENANCE_NAMES,
    JobPaths,
    OperatorObject,
    is_data_file,
    parse_manifest_path,
    parse_operator_object,
)
from arroyo_dagster.state.model.numbers import parse_number
from arroyo_dagster.state.model.objects import ObjectKind, Packed, StoredObject, object_name
from arroyo_dagster.state.model.progress import OnProgress, Progress, no_progress
from arroyo_dagster.state.operations.gc.root_reader import NO_EPOCH, Reader
from arroyo_dagster.state.operations.gc.roots import (
    newest_root,
    read_roots_once,
    settled,
    with_store_times,
)
from arroyo_dagster.state.operations.gc.roots_protocol import attempt, known_roots
from arroyo_dagster.state.planning.gc.epoch_roots import epoch_root, unreadable_root
from arroyo_dagster.state.planning.gc.reachability import (
    check_listed,
    epoch_directories,
    kept_beside,
    nested_root,
    refuse,
    written_with,
)
from arroyo_dagster.state.planning.restore.lost_metadata import NamedTables, cut_metadata
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectInfo, ObjectStore
from arroyo_dagster.state.storage.write_remains import delete_write_remains, list_write_remains


def directories_of(store: ObjectStore, paths: JobPaths) -> list[StatePath]:
    """Return directories that contain all objects below the job except those directly in the upper
    levels: one for each attempt at an epoch, and one for each other directory.
    """
    inner = {paths.root, paths.generations, paths.checkpoints()}
    directories: list[StatePath] = []
    waiting = [paths.root]
    while waiting:
        levels = concurrently(store.list_dir, waiting)
        below = [path for level in levels for path in level.prefixes]
        waiting = [p for p in below if p in inner or _is_generation(paths, p)]
        directories += [path for path in below if path not in waiting]
    return sorted(directories, key=lambda path: f"{path}/")  # as a listing of all of them


def list_beside(
    store: ObjectStore, paths: JobPaths, newest: Epoch, directories: Iterable[StatePath]
) -> Inventory:
    """List the objects outside of these directories, level by level; none can be an orphan."""
    levels = {paths.root, paths.generations, paths.checkpoints()}
    for path in directories:
        while (parent := path.parent) is not None and parent not in levels:
            levels.add(parent)
            path = parent
    below = sorted(level for level in levels if f"{level}/".startswith(f"{paths.root}/"))
    listed = (info for level in below for info in store.list_dir(level).objects)
    return sort_objects(paths, newest, listed)


def _is_generation(paths: JobPaths, path: StatePath) -> bool:
    rest = path.removeprefix(f"{paths.generations}/")
    number, _, more = rest.partition("/")
    return rest != path and parse_number(number) is not None and more in ("", "checkpoints")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """The objects below a job, as listed.

    Attributes:
        files: data files, subtask metadata and staged sink files: the possible orphans.
        metadata: objects that describe epochs and generations.
        maintenance: objects of maintenance operations.
        foreign: names that neither Arroyo nor this package would create.
        samples: the newest data file of each table in each directory of an operator.
        newest: the newest epoch when the listing began.
        beside: how many files were listed elsewhere, and are not in `files`.
    """

    paths: JobPaths
    files: Packed
    metadata: Packed
    maintenance: Packed
    foreign: Packed
    samples: tuple[StoredObject, ...] = ()
    newest: Epoch
    beside: int = 0

    @property
    def listed(self) -> int:
        shelves = (self.files, self.metadata, self.maintenance, self.foreign)
        return sum(map(len, shelves)) + self.beside


def read_inventory(
    store: ObjectStore, paths: JobPaths, on_progress: OnProgress = no_progress
) -> tuple[Inventory, Roots]:
    """List everything below a job, then read everything that refers to data files.

    Args:
        on_progress: called at intervals with what was listed and read.

    Raises:
        ProtocolError: the objects are inconsistent: an empty or incomplete listing, another job's
            objects within this one, objects of a newer release.
        FormatError, NotFoundError, ConflictError: as `read_roots`.
    """
    newest = newest_root(store, paths)
    if newest is None:
        raise refuse(NO_EPOCH, paths)
    inventory = list_job(store, paths, newest.epoch, on_progress)
    if not inventory.listed:
        raise refuse("the listing is empty, but an epoch exists", paths, path=newest.ref)
    return inventory, read_listed(store, inventory, on_progress)


def read_listed(
    store: ObjectStore, found: Inventory, on_progress: OnProgress = no_progress
) -> Roots:
    """Read everything that refers to data files: the objects that lead to epochs, and those listed.

    Raises:
        ProtocolError, FormatError, NotFoundError, ConflictError: as `read_inventory`.
    """
    # Before the epochs: a record is deleted once an epoch that lists the merged files is published.
    touched = _compactions(store, found.paths, found)

    def read() -> Roots | None:
        roots = read_roots_once(store, found.paths, on_progress)
        return None if roots is None else _with_attempts(store, roots, found)

    # An epoch that is published between the two reads looks inconsistent the first time.
    roots = settled(found.paths, read)
    touched |= _changes(store, roots, found)
    cut = (*_cut(roots, found), *_lost_latest(store, roots, found))
    roots = replace(roots, compactions=touched, cut=cut)
    _check_complete(store, roots, found)
    return with_store_times(store, roots, found.metadata)


def list_job(
    store: ObjectStore,
    paths: JobPaths,
    newest: Epoch,
    on_progress: OnProgress = no_progress,
    below: StatePath | None = None,
) -> Inventory:
    """List everything below a job, or below one directory of it. Errors as in `sort_objects`."""
    return sort_objects(paths, newest, store.list(below or paths.root), on_progress)


def sort_objects(
    paths: JobPaths,
    newest: Epoch,
    listed: Iterable[ObjectInfo],
    on_progress: OnProgress = no_progress,
) -> Inventory:
    """Sort listed objects by the kind that their names show.

    Args:
        listed: in the order of a listing: versions of one object are neighbours.

    Raises:
        ProtocolError: the job contains a symbolic link, or objects of another job or a newer
            release.
    """
    sorted_out: dict[str, list[Packed]] = {}
    waiting: dict[str, list[StoredObject]] = {
        "files": [],
        "metadata": [],
        "maintenance": [],
        "foreign": [],
    }
    samples: dict[OperatorObject, StoredObject] = {}
    for count, info in enumerate(_newest_of_each(listed), start=1):
        if info.is_link:
            raise refuse(
                "the job contains a symbolic link, so an object may have two names",
                paths,
                path=info.path,
                next_step="replace it by the directory itself (or a bind mount); nothing was "
                "deleted",
            )
        where = _shelf(paths, info.path, info.addressable)
        address = parse_operator_object(paths, info.path) if where == "files" else None
        if address is not None:
            before = samples.get(address)
            if before is None or (before.modified_micros or 0) < (info.modified_micros or 0):
                samples[address] = StoredObject(info.path, None, info.modified_micros)
        shelf = waiting[where]
        shelf.append(StoredObject(info.path, info.size_bytes, info.modified_micros, info.etag))
        if len(shelf) == 1000:
            sorted_out.setdefault(where, []).append(Packed(shelf))
            shelf.clear()
        if count % 1000 == 1:  # the first too: what is silent cannot be repeated
            on_progress(Progress(step="listed objects", done=count))

    def shelf_of(name: str) -> Packed:
        return Packed.joined([*sorted_out.get(name, ()), Packed(waiting[name])])

    return Inventory(
        paths=paths,
        newest=newest,
        files=shelf_of("files"),
        metadata=shelf_of("metadata"),
        maintenance=shelf_of("maintenance"),
        foreign=shelf_of("foreign"),
        samples=tuple(samples.values()),
    )


def _newest_of_each(listed: Iterable[ObjectInfo]) -> Iterator[ObjectInfo]:
    """Keep the newest object of each name: a listing that includes versions shows a name twice."""
    for _, infos in groupby(listed, attrgetter("path")):
        yield max(infos, key=lambda info: info.modified_micros or 0)


def _shelf(paths: JobPaths, path: StatePath, addressable: bool) -> str:
    if not addressable:
        return "foreign"
    kind = object_name(paths, path).kind
    if kind is ObjectKind.FOREIGN:
        if nested_root(paths, path):
            raise refuse(
                "the job contains objects of another job: two deployments overlap",
                paths,
                path=path,
                next_step="use a separate URL for each deployment; nothing was deleted",
            )
        return "foreign"
    if kind in (ObjectKind.MAINTENANCE, ObjectKind.STAGED):
        name = path.removeprefix(f"{paths.maintenance}/").partition("/")[0]
        if name not in MAINTENANCE_NAMES:
            raise refuse(
                f"the job contains data of a newer release: {name}",
                paths,
                path=path,
                next_step="use a release of arroyo-dagster that knows it; nothing was deleted",
            )
    if kind is ObjectKind.MAINTENANCE:
        return "maintenance"
    orphans = (ObjectKind.DATA, ObjectKind.SUBTASK, ObjectKind.STAGED)
    return "files" if kind in orphans else "metadata"


def _with_attempts(store: ObjectStore, roots: Roots, found: Inventory) -> Roots:
    """Add what only the listing shows: manifests and operator metadata that own no epoch."""
    read_paths = PathsDigest(root.path for root in roots.read)
    paths = roots.paths
    numbers = {epoch.epoch for epoch in roots.epochs}
    more = [
        stored.path
        for stored in found.metadata
        if (name := object_name(paths, stored.path)).kind.lists_files
        and stored.path not in read_paths
        # An operator that an existing epoch does not name was cut off: see `_cut`.
        and not (name.kind is ObjectKind.OPERATOR and name.epoch in numbers)
    ]
    reader = Reader(store, paths)
    attempts = concurrently(
        lambda path: _attempt_or_damaged(reader, path, found.newest, roots), more
    )
    existing = [root for root in attempts if root is not None]
    damaged = [root for root in existing if root.unreadable is not None]
    epochs = sorted((*roots.epochs, *damaged), key=lambda root: -root.epoch)
    return replace(
        roots,
        epochs=tuple(epochs) if damaged else roots.epochs,
        attempts=(*roots.attempts, *(root for root in existing if root.unreadable is None)),
    )


def _attempt_or_damaged(
    reader: Reader, path: StatePath, newest: Epoch, roots: Roots
) -> EpochRoot | None:
    """Read as `_attempt`; an undecodable one of a rolled-back epoch counts as damaged."""
    try:
        return _attempt(reader, path, newest)
    except FormatError as error:
        number = object_name(reader.paths, path).epoch
        if number is None or not roots.behind_rollback(number):
            raise
        references = _references(reader, path)
        if references is not None:
            # Its epoch record does not decode.
            return epoch_root(
                reader.paths, path, references, CheckpointState.UNCLAIMED, reader.taken((path,))
            )
        return unreadable_root(
            number,
            error.message,
            (path,),
            roots=known_roots(reader, (path,)),
            finish_time_micros=roots.head.finish_time_micros,
        )


def _references(reader: Reader, path: StatePath) -> References | None:
    manifest = object_name(reader.paths, path).kind is ObjectKind.MANIFEST
    try:
        return reader.optional(path, manifest_references if manifest else operator_references)
    except FormatError:
        return None


def _attempt(reader: Reader, path: StatePath, newest: Epoch) -> EpochRoot | None:
    """Read an attempt at an epoch; None if it was deleted after it was listed."""
    kind = object_name(reader.paths, path).kind
    if kind is ObjectKind.MANIFEST:
        return attempt(reader, path)
    if kind is not ObjectKind.OPERATOR:
        return None  # an epoch of the legacy layout that was deleted meanwhile
    refs = reader.optional(path, operator_references)
    if refs is None:
        return None
    whole = reader.paths.legacy_metadata(refs.epoch)
    if refs.epoch < newest and reader.store.head(whole) is not None:
        check_listed(reader.paths, [whole])
    return epoch_root(reader.paths, path, refs, CheckpointState.UNCLAIMED, reader.taken((path,)))


def _compactions(store: ObjectStore, paths: JobPaths, found: Inventory) -> dict[StatePath, Packed]:
    """Return the files of compactions that the job has not adopted. Refuse undecodable records."""
    listed = [file.path for file in found.maintenance if file.path.parent == paths.compactions]
    reader = Reader(store, paths)
    # An incomplete listing hides none: records are named before they are written.
    named = [paths.compactions / name for name in reader.job_pins().compactions]
    record_paths = list(dict.fromkeys((*listed, *named)))
    read = concurrently(lambda p: reader.optional(p, decode_compaction_record), record_paths)
    touched: dict[StatePath, Packed] = {}
    for path, record in zip(record_paths, read, strict=True):
        if record is None:
            continue  # adopted or dropped meanwhile: an epoch lists the merged files, or none does
        if (record.pipeline, record.job) != (paths.pipeline, paths.job):
            raise FormatError(
                "the compaction record belongs to another job", path=path, job=record.job
            )
        files = (p for merge in record.merged for p in (*merge.input_paths, *merge.output_paths))
        touched[path] = Packed.of_paths(files)
    return touched


def _changes(store: ObjectStore, roots: Roots, found: Inventory) -> dict[StatePath, Packed]:
    """Return the files that undoing a change of the newest epoch needs, or that metadata lost
    before a rebuild may have listed, until the job goes on.

    Once a rebuild is undone, the original metadata may be restored from a copy of the job. An
    undecodable record is refused; one of an earlier head of the job is no longer applicable.
    """
    directory = roots.paths.changes
    listed = [file.path for file in found.maintenance if file.path.parent == directory]
    # An incomplete listing hides none: what can be undone is also known by name.
    named = [directory / name for name in roots.job_pins.changes]
    record_paths = list(dict.fromkeys((*listed, *named)))
    reader = Reader(store, roots.paths)
    read = concurrently(lambda p: reader.optional(p, decode_change_record), record_paths)
    return {
        path: Packed.of_paths(record.inputs)
        for path, record in zip(record_paths, read, strict=True)
        if record is not None and record.head.epoch >= roots.head.epoch
    }


def _cut(roots: Roots, found: Inventory) -> Iterator[LostObject]:
    """Yield the metadata of existing epochs that does not name all that was listed beside it."""
    paths = roots.paths
    names: dict[str, list[StoredObject]] = {}
    metadata = (file for file in found.metadata if file.path.endswith("/metadata"))
    for stored in (*found.samples, *metadata):
        address = parse_operator_object(paths, stored.path)
        if address is not None:
            names.setdefault(address.checkpoint, []).append(stored)
    head = names.get(str(paths.checkpoint(roots.head.epoch, roots.head.worker_generation)), ())
    timed = any(written_with(roots.head, stored) for stored in head)  # unlike those of a copy
    edits = [f for f in found.maintenance if is_change_of(paths, f.path, ChangeKind.EDIT)]
    written = {file.path: file.modified_micros for file in found.metadata}
    for epoch, number, shared in epoch_directories(roots):
        listed = names.get(str(paths.checkpoint(number, epoch.worker_generation)), ())
        missing = {name for name, _ in epoch.operators} - {name for name, _ in epoch.tables}
        shared = shared and timed and epoch.finish_time_micros > 0
        own = [
            file.path
            for file in (*edits, *listed)
            if not (shared and is_data_file(file.path))
            or written_with(epoch, file, written.get(epoch.ref))
        ]
        named = NamedTables(
            epoch=epoch.epoch,
            worker_generation=epoch.worker_generation,
            tables=dict(epoch.tables) | dict.fromkeys(missing, ()),
            unchecked=missing.union(epoch.dropped),
            directory=number,
            managed=epoch.managed,
        )
        yield from cut_metadata(paths, named, own)


def _lost_latest(store: ObjectStore, roots: Roots, found: Inventory) -> Iterator[LostObject]:
    """Yield the checkpoints that earlier generations published last, where these are missing.

    A cleanup leaves such references behind, but then no older epoch exists that it has not kept.
    """
    paths, kept = roots.paths, kept_beside(roots)
    reader = Reader(store, paths)
    hints = [
        file.path
        for file in found.metadata
        if object_name(paths, file.path).kind is ObjectKind.GENERATION
    ]
    read = concurrently(lambda p: reader.read_or_error(p, decode_generation_manifest), hints)
    refs = [manifest.latest_ref for manifest in read if isinstance(manifest, GenerationManifest)]
    existing = {epoch.ref for epoch in (*roots.epochs, *roots.attempts)}
    oldest = min((epoch.epoch for epoch in roots.current if epoch.epoch not in kept), default=None)
    lost: list[LostObject] = []
    for ref in refs:
        address = None if ref is None or ref in existing else parse_manifest_path(ref)
        if ref is None or address is None:
            continue
        again = any(epoch.epoch == address.epoch for epoch in roots.current)
        if not again and (oldest is None or address.epoch <= oldest):
            continue  # it has expired
        if roots.behind_rollback(address.epoch):
            continue  # it has expired before the epochs that the rollback restored
        if ref != roots.lost:
            reason = "its worker generation published it last, and it is missing"
            lost.append(LostObject(address.epoch, ref, reason))
    infos = concurrently(store.head, [checkpoint.path for checkpoint in lost])
    yield from (checkpoint for checkpoint, info in zip(lost, infos, strict=True) if info is None)


def _check_complete(store: ObjectStore, roots: Roots, found: Inventory) -> None:
    listed = PathsDigest(file.path for file in found.metadata)
    named = (root for epoch in roots.epochs if epoch.epoch <= found.newest for root in epoch.roots)
    unlisted = [root.path for root in named if root.path not in listed]
    if unlisted:
        foreign = PathsDigest(file.path for file in found.foreign)
        unlisted = [path for path in unlisted if path not in foreign]
    infos = concurrently(store.head, unlisted)
    # Objects that no longer exist were deleted by another process after they were read.
    check_listed(
        roots.paths,
        [path for path, info in zip(unlisted, infos, strict=True) if info is not None],
    )


def matching(found: Iterable[StoredObject], wanted: PathsDigest) -> Iterator[StoredObject]:
    """Return the objects whose paths are wanted."""
    return (file for file in found if file.path in wanted)


# ---- what killed writes have left on local disk, in no listing -----------------------------------

OLD_MICROS = 24 * 3_600_000_000
"""No write takes so long; one that stood still meanwhile fails, and says so to its caller."""


def write_remains(store: ObjectStore, paths: JobPaths) -> tuple[WriteRemains, ...]:
    """Return what interrupted writes have left below a job, ordered by name; only on local disk.

    Raises:
        StorageError: a directory cannot be listed.
    """
    return tuple(
        WriteRemains(name=str(info.path), size_bytes=info.size_bytes, modified_micros=micros)
        for info in list_write_remains(store, paths.root)
        if (micros := info.modified_micros) is not None
    )


def with_remains(store: ObjectStore, plan: GcPlan) -> GcPlan:
    """Return a plan with the old remains below its job; an expiry takes none."""
    if plan.kind is PlanKind.EXPIRE:
        return plan
    before = plan.made_at_micros - OLD_MICROS
    remains = write_remains(store, plan.paths)
    return replace(plan, remains=tuple(file for file in remains if file.modified_micros < before))


def sweep(held: Leased, plan: GcPlan, fresh: GcPlan) -> int:
    """Delete the remains that a plan and a fresh one have in common, and return their number.

    Raises:
        ConflictError: the lease is lost.
        StorageError: a file cannot be deleted; the others were.
    """
    names = [file.name for file in fresh.remains if file in plan.remains]
    if not names:
        return 0
    held.check()
    failed = delete_write_remains(held, names)
    if failed:
        name, reason = next(iter(failed.items()))
        raise StorageError(
            f"{len(failed)} of {len(names)} remains of interrupted writes were not deleted: "
            f"{reason}",
            retryable=False,
            path=name,
            url=held.url,
        )
    return len(names)
