"""When the state of a job can be compacted: at any time, at rest, in a window, or not at all."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from arroyo_dagster.errors import ArroyoStateError
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.job_facts import JobAnswer, JobCondition


class Availability(enum.Enum):
    """When maintenance of a job is possible, as things are now."""

    ANY_TIME = "any time"
    AT_REST = "at rest"
    IN_A_WINDOW = "in a window"
    ONLY_INSPECTED = "only inspected"


@dataclass(frozen=True, slots=True)
class JobMaintenance:
    """When a job can be maintained, and why."""

    availability: Availability
    reason: str


def maintenance_of(
    newest: Checkpoint | None, problem: ArroyoStateError | None, answer: JobAnswer
) -> JobMaintenance:
    """Return when a job can be compacted. It is a forecast: each operation checks fresh facts.

    Args:
        newest: the newest epoch; None if there is none or it cannot be read.
        problem: why it cannot be read or restored.
        answer: what the status sources report of the job.
    """
    if problem is not None:
        return JobMaintenance(Availability.ONLY_INSPECTED, problem.message)
    if newest is None:
        return JobMaintenance(Availability.ONLY_INSPECTED, "it has no epoch yet")
    if newest.progress is not None:
        return JobMaintenance(
            Availability.ANY_TIME, "managed job: `compact run` works while it runs and at rest"
        )
    from arroyo_dagster.state.planning.compaction.rewrite import RUNS, why_not_now

    reason = why_not_now(answer, newest)
    if reason is None:
        status = answer.facts.condition.value
        return JobMaintenance(
            Availability.AT_REST, f"Arroyo job, {status}: `compact run` rewrites it"
        )
    if reason == RUNS:
        return JobMaintenance(
            Availability.IN_A_WINDOW,
            "Arroyo job, running: `compact window` stops it, rewrites it and starts it",
        )
    step = ""
    if answer.facts.condition is JobCondition.UNKNOWN:
        step = f"; pass --arroyo-api, --arroyo-db or --assume {newest.job}=stopped"
    return JobMaintenance(Availability.ONLY_INSPECTED, f"Arroyo job: {reason}{step}")
