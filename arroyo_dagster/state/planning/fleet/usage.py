"""What lies below a prefix, as one listing shows it: bytes, objects, last write, writes per day."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from arroyo_dagster.state.model.catalog import EpochRow
from arroyo_dagster.state.model.ids import OUR_DIRECTORY, JobId, PipelineId, StatePath
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.objects import ObjectKind, object_name
from arroyo_dagster.state.planning.restore.reads import Level

DAY_MICROS = 86_400_000_000
OBJECTS_BESIDE_DATA = 3
"""Manifest, epoch record and marker of an epoch; of a job with many operators a little more."""

_EPOCHS_COMPARED = 50
_STOPPED_AFTER_INTERVALS = 10
_STOPPED_AFTER_MICROS = DAY_MICROS // 24


@dataclass(slots=True)
class EpochWrites:
    """What the names of objects show of one epoch: their number, and the time of the last one."""

    objects: int = 0
    last_micros: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixUsage:
    """The objects below a job, or below a directory that is no job.

    Attributes:
        job: the job; None for a directory that is no job.
        last_write_micros: the time of the newest object; None if there is none, or the store
            reports no times.
        epochs: by number, what was written for each epoch.
        foreign: the number of names that neither Arroyo nor this package creates.
        maintenance: the number of objects that only this package keeps, for example the journal of
            a removed job.
        complete: whether the listing was completed; else all numbers are lower bounds.
    """

    path: StatePath
    job: JobPaths | None = None
    objects: int = 0
    size_bytes: int = 0
    last_write_micros: int | None = None
    epochs: Mapping[int, EpochWrites] = field(default_factory=dict)
    foreign: int = 0
    maintenance: int = 0
    complete: bool = True


def prefixes_without_job(known: Mapping[str, Level], jobs: Iterable[JobPaths]) -> list[StatePath]:
    """Return the directories that hold no job and lie in no job, from the levels of `jobs_in`.

    A directory is returned as a whole if no directory in it is a job.
    """
    roots = {str(paths.root) for paths in jobs}
    pipelines = {root.partition("/")[0] for root in roots if "/" in root}
    found: list[StatePath] = []
    for first in known[""].directories - {OUR_DIRECTORY}:
        if first in pipelines:
            below = known[first].directories - {OUR_DIRECTORY}
            found += [StatePath(f"{first}/{one}") for one in below if f"{first}/{one}" not in roots]
        elif first not in roots:
            found.append(StatePath(first))
    return sorted(found)


def kind_of(path: str, job: JobPaths | None) -> tuple[ObjectKind, int | None]:
    """Return the kind and the epoch of an object by its name.

    Args:
        job: the job that it lies in; None = any job of either layout that its path fits.
    """
    if job is not None:
        name = object_name(job, path)
        return name.kind, name.epoch
    segments = path.split("/", 2)
    owners = [JobPaths(JobId(segments[0]))]
    if len(segments) > 2:
        owners.insert(0, JobPaths(JobId(segments[1]), PipelineId(segments[0])))
    names = [object_name(owner, path) for owner in owners]
    fitting = [name for name in names if name.kind is not ObjectKind.FOREIGN]
    name = (fitting or names)[0]
    return name.kind, name.epoch


def catalogued_usage(job: JobPaths, rows: Sequence[EpochRow]) -> PrefixUsage:
    """Return the usage of a job as the catalogue knows it: the data files of all present epochs.

    Objects that are no data files are not counted, nor files that no present epoch lists.

    Args:
        rows: the job's catalogued epochs, ascending.
    """
    present = [row for row in rows if row.present and row.problem is None]
    files = [row.new_files if at else row.files for at, row in enumerate(present)]
    sizes = [row.new_size_bytes if at else row.size_bytes for at, row in enumerate(present)]
    recorded = [row.recorded_micros or row.finished_micros for row in present]
    return PrefixUsage(
        path=job.root,
        job=job,
        objects=sum(one or 0 for one in files),
        size_bytes=sum(one or 0 for one in sizes),
        last_write_micros=max((one for one in recorded if one is not None), default=None),
        epochs={
            row.epoch: EpochWrites((row.new_files or 0) + OBJECTS_BESIDE_DATA, at)
            for row, at in zip(present, recorded, strict=True)
            if at is not None
        },
        complete=None not in (*files, *sizes),
    )


def writes_a_day(epochs: Mapping[int, EpochWrites], now_micros: int) -> float:
    """Return how many objects a job writes per day: those of an epoch by the usual interval.

    0 for a job that wrote no epoch for 10 usual intervals, and at least an hour. Objects of epochs
    that are expired, and of requests that left none, are not known.
    """
    newest = sorted(epochs)[-_EPOCHS_COMPARED:]
    times = [(number, epochs[number].last_micros) for number in newest]
    intervals = [
        (later[1] - one[1]) / (later[0] - one[0])
        for one, later in pairwise(times)
        if later[1] > one[1]
    ]
    if not intervals:
        return 0.0
    interval = median(intervals)
    age = now_micros - max(time for _, time in times)
    if age > max(_STOPPED_AFTER_INTERVALS * interval, _STOPPED_AFTER_MICROS):
        return 0.0
    return DAY_MICROS / interval * median(_counts(epochs, newest))


def _counts(epochs: Mapping[int, EpochWrites], newest: Sequence[int]) -> list[int]:
    """Return the objects of each epoch but the newest, which may be incomplete."""
    return [epochs[number].objects for number in newest[:-1]]
