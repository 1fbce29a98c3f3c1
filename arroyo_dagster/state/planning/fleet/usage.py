"""What lies below a prefix, as one listing shows it: bytes, objects, last write."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from arroyo_dagster.state.model.ids import OUR_DIRECTORY, JobId, PipelineId, StatePath
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.objects import ObjectKind, object_name
from arroyo_dagster.state.planning.restore.reads import Level


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixUsage:
    """The objects below a job, or below a directory that is no job.

    Attributes:
        job: the job; None for a directory that is no job.
        last_write_micros: the time of the newest object; None if there is none, or the store
            reports no times.
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


def kind_of(path: str, job: JobPaths | None) -> ObjectKind:
    """Return the kind of an object by its name.

    Args:
        job: the job that it lies in; None = any job of either layout that its path fits.
    """
    if job is not None:
        return object_name(job, path).kind
    segments = path.split("/", 2)
    owners = [JobPaths(JobId(segments[0]))]
    if len(segments) > 2:
        owners.insert(0, JobPaths(JobId(segments[1]), PipelineId(segments[0])))
    kinds = [object_name(owner, path).kind for owner in owners]
    return next((kind for kind in kinds if kind is not ObjectKind.FOREIGN), ObjectKind.FOREIGN)
