"""Which prefixes are abandoned: no job uses them. What is not proved is not abandoned. No I/O."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from arroyo_dagster.errors import ProtocolError
from arroyo_dagster.state.model.ids import OUR_DIRECTORY, JobId, PipelineId, StatePath
from arroyo_dagster.state.model.job_facts import JobAnswer
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.objects import ObjectKind, object_name
from arroyo_dagster.state.planning.restore.reads import Level

REMAINS = "the remains of a job: no start would find a checkpoint in it"
CHECK_FIRST = "no command deletes it: check what it is, then delete it with the store's own tools"


@dataclass(frozen=True, slots=True, kw_only=True)
class AbandonedPrefix:
    """A prefix that no job uses.

    Attributes:
        why: what proves it.
        next_step: how to reclaim it.
        last_write_micros: the time of the newest object; None if the store reports none.
    """

    path: StatePath
    why: str
    next_step: str
    objects: int
    size_bytes: int
    last_write_micros: int | None


def why_abandoned(
    paths: JobPaths, answer: JobAnswer, others: Sequence[JobAnswer], *, managed: bool
) -> str | None:
    """Return the proof that a job is dead, which is that of its gc; None if nothing proves it.

    Arguments as of `why_dead`.
    """
    from arroyo_dagster.state.planning.gc.safety_checks import why_dead

    try:
        return why_dead(paths, answer, others, managed=managed)
    except ProtocolError:
        return None


def removal_command(paths: JobPaths, *, readable: bool) -> str:
    """Return the command that plans the deletion of a dead job."""
    command = f"arroyo-state gc plan dead-job {shlex.quote(paths.root)}"
    sources = "with the same sources of status"
    if readable:
        return f"{command}, {sources}"
    return f"{command} --unreadable, {sources}; `gc run` then requires --quarantine"


def prefixes_without_job(known: Mapping[str, Level], jobs: Iterable[JobPaths]) -> list[StatePath]:
    """Return the directories that hold no job and lie in no job, from the levels of `jobs_in`.

    A directory is returned as a whole if no directory in it is a job.
    """
    roots = {str(paths.root) for paths in jobs}
    pipelines = {root.partition("/")[0] for root in roots if "/" in root}
    left: list[StatePath] = []
    for first in known[""].directories - {OUR_DIRECTORY}:
        if first in pipelines:
            below = known[first].directories - {OUR_DIRECTORY}
            left += [StatePath(f"{first}/{one}") for one in below if f"{first}/{one}" not in roots]
        elif first not in roots:
            left.append(StatePath(first))
    return sorted(left)


def kind_of_remains(path: str) -> ObjectKind:
    """Return the kind of an object by its name, in any job of either layout that its path fits."""
    segments = path.split("/", 2)
    owners = [JobPaths(JobId(segments[0]))]
    if len(segments) > 2:
        owners.insert(0, JobPaths(JobId(segments[1]), PipelineId(segments[0])))
    kinds = [object_name(owner, path).kind for owner in owners]
    return next((kind for kind in kinds if kind is not ObjectKind.FOREIGN), ObjectKind.FOREIGN)
