"""Explain why gc keeps or may delete objects: one with all its referrers, or many by reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from arroyo_dagster.errors import InputError, NotFoundError, ProtocolError
from arroyo_dagster.state.model.clock import wall_clock
from arroyo_dagster.state.model.garbage import Roots
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.objects import ObjectKind, Packed, StoredObject, object_name
from arroyo_dagster.state.operations.gc.inventory import read_inventory
from arroyo_dagster.state.operations.gc.plan import GcRequest
from arroyo_dagster.state.planning.gc.orphans import Reason, reason_of, standing_of
from arroyo_dagster.state.planning.gc.reachability import referenced_by
from arroyo_dagster.state.storage.names import decode_path
from arroyo_dagster.state.storage.store import ObjectInfo, ObjectStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """The explanation of one object.

    Attributes:
        by: what refers to it, newest first: epochs, attempts, compactions, quarantines.
        reason: why it is kept or may be deleted.
        undecided: why it is unknown whether it may be deleted; None if it is known.
    """

    path: StatePath
    kind: ObjectKind
    size_bytes: int | None
    modified_micros: int | None
    by: tuple[str, ...]
    reason: Reason
    undecided: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasons:
    """Why the objects below a directory are kept or may be deleted: number and bytes by reason."""

    counts: dict[Reason, tuple[int, int]]
    undecided: str | None = None

    @property
    def reclaimable_bytes(self) -> int:
        return sum(size for reason, (_, size) in self.counts.items() if reason.goes)


@dataclass(frozen=True, slots=True)
class _Judge:
    """Determines the reason of each object of one job."""

    roots: Roots
    report: Callable[[StoredObject], Reason]
    undecided: str | None


def explain_object(store: ObjectStore, paths: JobPaths, name: str, asked: GcRequest) -> Explained:
    """Explain one object of a job.

    Args:
        name: its path, as metadata or the store spells it.

    Raises:
        NotFoundError: there is no such object.
        ProtocolError, FormatError: the references cannot be determined; see `plan_gc`.
    """
    path, info = _found(store, name)
    _, judge = _judged(store, paths, asked)
    file = StoredObject(path, info.size_bytes, info.modified_micros, info.etag)
    reason = judge.report(file)
    return Explained(
        path=path,
        kind=object_name(paths, path).kind,
        size_bytes=info.size_bytes,
        modified_micros=info.modified_micros,
        by=tuple(_referring(judge.roots, path)),
        reason=reason,
        undecided=judge.undecided if reason is Reason.UNDECIDED else None,
    )


def _found(store: ObjectStore, name: str) -> tuple[StatePath, ObjectInfo]:
    for path in dict.fromkeys((StatePath(name), decode_path(name))):
        info = None if path is None else store.head(path)
        if path is not None and info is not None:
            return path, info
    raise NotFoundError(
        "there is no such object",
        path=name,
        url=store.url,
        next_step="check the path; a directory ends in a slash",
    )


def explain_directory(
    store: ObjectStore, paths: JobPaths, prefix: str, asked: GcRequest
) -> Reasons:
    """Summarise the objects below a directory of a job by why they are kept or may be deleted.

    Args:
        prefix: whole segments; the job's root for all objects.

    Raises:
        ProtocolError, FormatError: as `explain_object`.
    """
    shelves, judge = _judged(store, paths, asked)
    below = f"{prefix.rstrip('/')}/"
    counts: dict[Reason, tuple[int, int]] = {}
    for shelf in shelves:
        for file in shelf:
            if f"{file.path}/".startswith(below):
                reason = judge.report(file)
                objects, size = counts.get(reason, (0, 0))
                counts[reason] = (objects + 1, size + (file.size_bytes or 0))
    order = list(Reason)
    return Reasons(
        counts=dict(sorted(counts.items(), key=lambda item: order.index(item[0]))),
        undecided=judge.undecided if Reason.UNDECIDED in counts else None,
    )


def _judged(store: ObjectStore, paths: JobPaths, asked: GcRequest) -> tuple[list[Packed], _Judge]:
    inventory, roots = read_inventory(store, paths)
    shelves = [inventory.metadata, inventory.files, inventory.maintenance, inventory.foreign]
    answer = None if roots.managed else asked.answer(paths)
    try:
        standing = standing_of(
            roots,
            inventory.metadata,
            now_micros=wall_clock(),
            grace_micros=asked.grace_micros,
            answer=answer,
        )
    except ProtocolError as error:
        return shelves, _Judge(roots, _by_references(roots), error.message)

    def report(one: StoredObject) -> Reason:
        return reason_of(standing, one, object_name(paths, one.path))

    return shelves, _Judge(roots, report, None)


def _by_references(roots: Roots) -> Callable[[StoredObject], Reason]:
    """Return the reasons that can be determined for a job of unknown status."""
    referenced = referenced_by(roots, (*roots.epochs, *roots.attempts))
    by_kind = {
        ObjectKind.FOREIGN: Reason.FOREIGN,
        ObjectKind.MAINTENANCE: Reason.MAINTENANCE,
        ObjectKind.DATA: Reason.UNDECIDED,
        ObjectKind.SUBTASK: Reason.UNDECIDED,
        ObjectKind.STAGED: Reason.UNDECIDED,
    }

    def report(one: StoredObject) -> Reason:
        kind = object_name(roots.paths, one.path).kind
        listed = kind is ObjectKind.DATA and one.path in referenced
        return Reason.REFERENCED if listed else by_kind.get(kind, Reason.METADATA)

    return report


def _referring(roots: Roots, path: StatePath) -> Iterator[str]:
    for root in roots.epochs:
        if path in set(root.files.paths):
            yield f"epoch {root.epoch}"
    for root in roots.attempts:
        if path in set(root.files.paths):
            yield f"{root.state.value} attempt at epoch {root.epoch} ({root.ref})"
    for record, touched in roots.compactions.items():
        if path in set(touched.paths):
            yield f"compaction {record}"
    for aside in roots.quarantined:
        if path in set(aside.needs.paths):
            yield f"quarantine {aside.name}"


def job_of_path(jobs: list[JobPaths], path: str) -> JobPaths:
    """Return the job that contains a path, or has it as its root.

    Raises:
        InputError: no job contains it.
    """
    name = path.rstrip("/")
    for paths in jobs:
        if f"{name}/".startswith(f"{paths.root}/"):
            return paths
    raise InputError(
        "this path does not belong to a job",
        path=path,
        jobs=", ".join(str(paths.root) for paths in jobs[:20]),
        next_step="give a path below an existing job",
    )
