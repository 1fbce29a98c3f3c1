"""Which prefixes are abandoned: no job uses them. What cannot be proved is not judged."""

from __future__ import annotations

import enum
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from arroyo_dagster.errors import ArroyoStateError, ProtocolError
from arroyo_dagster.state.model.job_facts import JobAnswer, JobCondition
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.units import format_micros
from arroyo_dagster.state.planning.fleet.usage import PrefixUsage
from arroyo_dagster.state.planning.gc.safety_checks import why_dead

_NOT_READABLE = "that it cannot be read does not mean that it is abandoned"
_CHECK_FIRST = "no command deletes it: check what it is, then delete it with the store's own tools"


class Usage(enum.Enum):
    """Whether something uses a prefix."""

    ABANDONED = "abandoned"
    IN_USE = "in use"
    NOT_JUDGED = "not judged"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixVerdict:
    """Whether something uses a prefix, and why.

    Attributes:
        size_bytes, objects: what can be reclaimed if it is abandoned; else what lies below it.
            None = it was not listed.
        last_write_micros: the time of the newest of these objects; None if it is unknown.
        complete: whether all of it was listed; else the numbers are lower bounds.
        next_step: how to reclaim it, or what would allow a verdict; None if nothing is to be done.
        problem: the error of the store that prevented a verdict.
    """

    path: str
    usage: Usage
    why: str
    size_bytes: int | None = None
    objects: int | None = None
    last_write_micros: int | None = None
    complete: bool = True
    next_step: str | None = None
    problem: ArroyoStateError | None = None


def judge_job(
    usage: PrefixUsage,
    answer: JobAnswer,
    others: Sequence[JobAnswer],
    *,
    managed: bool,
    problem: ArroyoStateError | None,
) -> PrefixVerdict:
    """Judge a job. The proof that it is abandoned is that of the gc of dead jobs.

    Args:
        answer: the status of the job; `others` that of the other jobs below the URL.
        managed: whether it is a managed job, which no Arroyo server knows.
        problem: why its metadata cannot be read; None if it can.
    """
    assert usage.job is not None
    condition = answer.facts.condition
    if condition not in (JobCondition.UNKNOWN, JobCondition.GONE):
        why = f"{answer.facts.source} reports that it is {condition.value}"
        return _verdict(usage, Usage.IN_USE, why)
    try:
        why = why_dead(usage.job, answer, others, managed=managed)
    except ProtocolError as error:
        reason = error.message.removeprefix("gc refused: ")
        if problem is not None:
            reason = f"it cannot be read ({problem.message}); {_NOT_READABLE}"
        step = (error.next_step or "").removesuffix("; nothing was deleted") or None
        step = step and step.replace("JOB=", f"{usage.path}=")
        return _verdict(usage, Usage.NOT_JUDGED, reason, step)
    return _verdict(usage, Usage.ABANDONED, why, removal_command(usage.job, readable=not problem))


def removal_command(paths: JobPaths, *, readable: bool) -> str:
    """Return the command that plans the deletion of a dead job."""
    command = f"arroyo-state gc plan dead-job {shlex.quote(paths.root)}"
    if readable:
        return f"{command}, with the same sources of status"
    return (
        f"{command} --unreadable, with the same sources of status; `gc run` then requires "
        "--quarantine"
    )


def judge_prefix(usage: PrefixUsage, *, now_micros: int, grace_micros: int) -> PrefixVerdict:
    """Judge a directory that is no job, by the names and times of its objects.

    Args:
        grace_micros: what was written within this time may belong to a job that starts now.
    """
    if not usage.complete:
        return _verdict(usage, Usage.NOT_JUDGED, "the listing was not completed in the budget")
    if usage.foreign:
        why = f"not a job: {usage.foreign} names in it are neither Arroyo's nor this package's"
        return _verdict(usage, Usage.NOT_JUDGED, why, _CHECK_FIRST)
    if usage.maintenance == usage.objects:
        why = "the records of a removed job, for example its journal"
        return _verdict(usage, Usage.IN_USE, why)
    if (usage.last_write_micros or now_micros) > now_micros - grace_micros:
        why = (
            f"written within the grace period of {format_micros(grace_micros)}, or at no known time"
        )
        return _verdict(usage, Usage.NOT_JUDGED, why)
    why = "the remains of a job: no start would find a checkpoint in it"
    return _verdict(usage, Usage.ABANDONED, why, _CHECK_FIRST)


def _verdict(
    usage: PrefixUsage, verdict: Usage, why: str, next_step: str | None = None
) -> PrefixVerdict:
    return PrefixVerdict(
        path=usage.path,
        usage=verdict,
        why=why,
        size_bytes=usage.size_bytes,
        objects=usage.objects,
        last_write_micros=usage.last_write_micros,
        complete=usage.complete,
        next_step=next_step,
    )


_ORDER = (Usage.ABANDONED, Usage.NOT_JUDGED, Usage.IN_USE)


def largest_first(verdicts: Sequence[PrefixVerdict]) -> list[PrefixVerdict]:
    """Sort by verdict: abandoned, not judged, in use; then by size, the largest first."""
    return sorted(
        verdicts, key=lambda one: (_ORDER.index(one.usage), -(one.size_bytes or 0), one.path)
    )
