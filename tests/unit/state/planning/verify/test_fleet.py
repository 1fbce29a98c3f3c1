"""What is said of jobs that stand still or failed, and of a root without jobs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from arroyo_dagster.state.planning.verify.findings import Finding, Severity
from arroyo_dagster.state.planning.verify.fleet import JobAge, every_job_recent
from tests.formats import JobCondition

SECOND = 1_000_000
OLD = JobAge(job="old", epoch=4, finished_micros=10 * SECOND)


def recent(job: JobAge) -> Finding | None:
    verdict = every_job_recent([job], now_micros=100 * SECOND, limit_micros=10 * SECOND)
    return next(iter(verdict.findings), None)


@pytest.mark.parametrize(
    ("condition", "found"),
    [
        (JobCondition.STOPPED, None),
        (JobCondition.FINISHED, None),
        (JobCondition.GONE, None),
        (JobCondition.FAILED, "job-failed"),
        (JobCondition.RUNNING, "job-stands-still"),
        (JobCondition.CHANGING, "job-stands-still"),
        (JobCondition.UNKNOWN, "job-stands-still"),
    ],
)
def test_what_arroyo_says_of_an_old_job_decides(condition: JobCondition, found: str | None) -> None:
    finding = recent(replace(OLD, condition=condition, source="arroyo"))
    assert (finding.code if finding else None) == found


def test_a_job_that_arroyo_calls_running_is_not_at_rest_because_its_state_says_so() -> None:
    stopped = replace(OLD, at_rest=True)
    assert recent(stopped) is None
    assert recent(replace(stopped, condition=JobCondition.RUNNING, source="api")) is not None


def test_a_broken_job_is_told_though_it_is_stopped() -> None:
    finding = recent(replace(OLD, condition=JobCondition.STOPPED, problem="does not decode"))
    assert finding is not None
    assert finding.severity is Severity.ERROR
