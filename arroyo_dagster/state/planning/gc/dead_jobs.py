"""Which objects of a dead job are deleted: all of them except foreign ones and our own records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.aliases import PathsDigest
from arroyo_dagster.state.model.garbage import (
    EpochRoot,
    GcPlan,
    JobPins,
    PlanKind,
    Quarantined,
    Roots,
)
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.job_facts import JobAnswer
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.objects import ObjectKind, Packed, StoredObject, object_name
from arroyo_dagster.state.planning.gc.orphans import FOREIGN_LISTED
from arroyo_dagster.state.planning.gc.reachability import prove, refuse
from arroyo_dagster.state.planning.gc.safety_checks import checked_grace

_LAST = (ObjectKind.GENERATION, ObjectKind.FENCE)
_RECORDS = (ObjectKind.SUBTASK, ObjectKind.MARKER, ObjectKind.RECORD, ObjectKind.STAGED)


UNREADABLE = "unreadable"
"""The key in a plan's `rule` under which the reason is stored why the metadata is unreadable."""


def check_way(plan: GcPlan, *, quarantine: bool) -> None:
    """Check that a job with unreadable metadata is moved to quarantine, not deleted.

    Raises:
        InputError: the plan is of such a job, and `quarantine` is False.
    """
    if UNREADABLE in plan.rule and not quarantine:
        raise InputError(
            "the metadata of the job cannot be read, so it can be moved to quarantine but not "
            "deleted",
            job=plan.paths.root,
            evidence=plan.rule[UNREADABLE],
            next_step="run it with --quarantine; `gc purge` deletes it a week later",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadJob:
    """What is known of a job that will never run again.

    Attributes:
        roots: what refers to its files.
        files, metadata, foreign: the objects below the job, as listed, in order of name.
        listed: the number of objects that were listed below the job.
        why: the evidence that the job is dead; see `safety_checks.why_dead`.
        answer: what the directory of jobs says of the job; None if it was not asked.
        needed_by_others: files below the job that other jobs list, each with the job that lists it.
        unreadable: why its metadata cannot be read; then `roots` has no epochs, and the objects may
            only be moved to quarantine. None if it can be read.
    """

    roots: Roots
    files: Packed
    metadata: Packed
    foreign: Packed
    listed: int
    why: str
    answer: JobAnswer | None = None
    needed_by_others: Sequence[tuple[JobPaths, StatePath]] = ()
    unreadable: str | None = None


def plan_dead_job(dead: DeadJob, *, now_micros: int, grace_micros: int) -> GcPlan:
    """Plan to remove a dead job: data, then records, then metadata, the fence last.

    Args:
        now_micros: the time, by the clock of the store.
        grace_micros: no object of the job may be younger than this.

    Raises:
        InputError: a grace period below the floor, or negative.
        ProtocolError: an object or epoch is too young, an epoch is pinned, or another job needs a
            file of this job.
    """
    roots, files, metadata = dead.roots, dead.files, dead.metadata
    checked_grace(grace_micros)
    _check_unneeded(roots, dead.needed_by_others)
    _check_quiet(roots, (*_newest(files), *_newest(metadata)), now_micros - grace_micros)
    referenced = _kept_for(roots.quarantined)
    names = [entry.path for entry in dead.foreign]
    stays = Counter({"foreign": len(names), "ours": dead.listed - len(files) - len(metadata)})
    stays["ours"] -= len(names)
    kept = [entry for entry in files if entry.path in referenced]
    stays["quarantined"] = len(kept)
    objects = [entry for entry in (*metadata, *files) if entry.path not in referenced]
    kinds = {entry.path: object_name(roots.paths, entry.path).kind for entry in objects}
    rule = {
        "why": dead.why,
        "grace_micros": grace_micros,
        "ours": dead.unreadable is not None or roots.managed,
        **({} if dead.unreadable is None else {UNREADABLE: dead.unreadable}),
    }
    return GcPlan(
        kind=PlanKind.DEAD_JOB,
        pipeline=roots.paths.pipeline,
        job=roots.paths.job,
        made_at_micros=now_micros,
        rule=rule,
        proof=prove(roots, referenced, dead.answer, dead.listed),
        epochs=tuple(root.epoch for root in reversed(roots.epochs)),
        data=Packed(entry for entry in objects if kinds[entry.path] is ObjectKind.DATA),
        records=Packed(entry for entry in objects if kinds[entry.path] in _RECORDS),
        metadata=Packed(_oldest_first(roots, objects)),
        stays={reason: (count, 0) for reason, count in sorted(stays.items()) if count},
        foreign=tuple(names[:FOREIGN_LISTED]),
    )


def what_is_left_of(
    begun: GcPlan,
    files: Packed,
    metadata: Packed,
    foreign: Iterable[StoredObject],
    *,
    job_pins: JobPins,
    quarantined: Iterable[Quarantined],
    now_micros: int,
) -> GcPlan:
    """Plan the rest of an interrupted removal, whose epochs can no longer be read.

    Args:
        begun: the plan of the interrupted removal.
        files, metadata, foreign: the objects below the job, as listed now.
        job_pins, quarantined: the pins and quarantines of the job, read now.

    Raises:
        ProtocolError: an object was written, or an epoch pinned, since the removal began.
    """
    _check_unpinned(begun.paths, job_pins)
    kept = _kept_for(quarantined)
    planned = PathsDigest(
        f"{entry.path}\0{entry.etag or ''}"
        for step in (begun.data, begun.records, begun.metadata)
        for entry in step
    )
    for entry in (*metadata, *files):
        if f"{entry.path}\0{entry.etag or ''}" not in planned and entry.path not in kept:
            raise refuse(
                "an object was written after the deletion of the job began",
                begun.paths,
                path=entry.path,
                next_step="find out what wrote it; nothing more was deleted",
            )
    present = PathsDigest(entry.path for entry in (*metadata, *files))
    data, records, left = (
        Packed(entry for entry in step if entry.path in present)
        for step in (begun.data, begun.records, begun.metadata)
    )
    return replace(
        begun,
        made_at_micros=now_micros,
        data=data,
        records=records,
        metadata=left,
        foreign=tuple(entry.path for entry in foreign)[:FOREIGN_LISTED],
    )


def _newest(objects: Packed) -> Iterator[StoredObject]:
    """Yield the object that was written last; an object without a time counts as the newest."""
    newest = max(objects, key=lambda entry: entry.modified_micros or 2**63, default=None)
    return iter(() if newest is None else (newest,))


def _check_quiet(roots: Roots, newest: Iterable[StoredObject], old_micros: int) -> None:
    # The younger of two clocks decides: a copied object is younger than its writer's time says, and
    # where the writer's time is younger, the store's clock may have been wrong.
    finished = max((root.finish_time_micros for root in roots.epochs), default=0)
    if finished > old_micros:
        raise refuse(
            "by the writer's clock, an epoch of the job was finished within the grace period, or "
            "in the future",
            roots.paths,
            path=roots.head.ref,
            finished_micros=finished,
            next_step="wait, or check again whether the job is really dead; nothing was deleted",
        )
    for entry in newest:
        if not entry.modified_micros or entry.modified_micros > old_micros:
            raise refuse(
                "an object of the job was written within the grace period, or at an unknown time",
                roots.paths,
                path=entry.path,
                modified_micros=entry.modified_micros,
                next_step="wait, or check again whether the job is really dead; nothing was "
                "deleted",
            )


def _check_unneeded(roots: Roots, needed: Iterable[tuple[JobPaths, StatePath]]) -> None:
    for other, path in needed:
        raise refuse(
            f"the job {other.root} lists a file of this job: two deployments may overlap",
            roots.paths,
            path=path,
        )
    _check_unpinned(roots.paths, roots.job_pins)


def _check_unpinned(paths: JobPaths, job_pins: JobPins) -> None:
    if job_pins.pinned:
        raise refuse(
            f"epoch {min(job_pins.pinned)} is pinned",
            paths,
            next_step="unpin it first with `arroyo-state unpin`; nothing was deleted",
        )


def _kept_for(quarantined: Iterable[Quarantined]) -> PathsDigest:
    """Return the files that epochs in quarantine need to be restored completely."""
    return PathsDigest(path for quarantine in quarantined for path in quarantine.needs.texts)


def _oldest_first(roots: Roots, known: Iterable[StoredObject]) -> Iterator[StoredObject]:
    """Sort metadata by age, each epoch's manifest after its operators, and the fence last."""
    parts = {ObjectKind.OPERATOR: 0, ObjectKind.MANIFEST: 1, ObjectKind.CHECKPOINT: 1}

    def order(one: StoredObject) -> tuple[bool, bool, int, int, str]:
        name = object_name(roots.paths, one.path)
        last = name.kind in _LAST
        number = int(name.worker_generation or 0) if last else int(name.epoch or 0)
        return (last, name.kind is ObjectKind.FENCE, number, parts.get(name.kind, 0), one.path)

    kept = (*_RECORDS, ObjectKind.DATA)
    objects = [entry for entry in known if object_name(roots.paths, entry.path).kind not in kept]
    return iter(sorted(objects, key=order))


def files_below(paths: JobPaths, epochs: Iterable[EpochRoot]) -> Iterator[StatePath]:
    """Yield the files below a job that these epochs, of any job, list."""
    root = f"{paths.root}/"
    return (path for epoch in epochs for path in epoch.files.paths if path.startswith(root))
