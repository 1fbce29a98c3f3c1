"""What is said of all jobs at once: who vanished, stands still, failed, or was never checked."""

from __future__ import annotations

from dataclasses import replace

import pytest

from arroyo_dagster.state.model.job_facts import JobCondition
from arroyo_dagster.state.planning.verify.findings import Severity, Verdict, error, warning
from arroyo_dagster.state.planning.verify.fleet import (
    CheckedJob,
    FleetVerdict,
    GoneJob,
    JobAge,
    every_job_checked,
    fleet_recent,
    root_finding,
)

SECOND = 1_000_000
OLD = JobAge(job="old", epoch=4, finished_micros=10 * SECOND)


def recent(*jobs: JobAge, gone: tuple[GoneJob, ...] = ()) -> FleetVerdict:
    return fleet_recent(
        jobs,
        gone,
        root=None,
        now_micros=100 * SECOND,
        limit_micros=10 * SECOND,
    )


@pytest.mark.parametrize(
    ("condition", "label", "found"),
    [
        (JobCondition.STOPPED, "stopped", None),
        (JobCondition.FINISHED, "finished", None),
        (JobCondition.GONE, "gone", None),
        (JobCondition.FAILED, "failed in Arroyo", "job-failed"),
        (JobCondition.RUNNING, "stands still", "job-stands-still"),
        (JobCondition.CHANGING, "stands still", "job-stands-still"),
        (JobCondition.UNKNOWN, "stands still", "job-stands-still"),
    ],
)
def test_what_arroyo_says_of_an_old_job_decides(
    condition: JobCondition, label: str, found: str | None
) -> None:
    (line,) = recent(replace(OLD, condition=condition, source="arroyo")).lines
    assert line.label == label
    assert (line.finding.code if line.finding else None) == found


def test_a_job_that_arroyo_calls_running_is_not_at_rest_because_its_state_says_so() -> None:
    stopped = replace(OLD, at_rest=True)
    assert not recent(stopped).offenders
    assert recent(replace(stopped, condition=JobCondition.RUNNING, source="api")).offenders


def test_a_broken_job_is_told_though_it_is_stopped() -> None:
    broken = replace(OLD, condition=JobCondition.STOPPED, problem="does not decode")
    (line,) = recent(broken).lines
    assert line.finding is not None
    assert line.finding.severity is Severity.ERROR


def test_offenders_come_first_and_the_first_three_in_words() -> None:
    checked = {
        name: CheckedJob(job=name, at_micros=1, epoch=2, verdict=verdict)
        for name, verdict in {
            "a": Verdict(inspected=3),
            "b": Verdict(findings=(warning("w", "b", "slow", "look"),), inspected=1),
            **{
                f"z{at}": Verdict(findings=(error("e", f"z{at}/f", "lost", "bring"),), inspected=1)
                for at in range(4)
            },
        }.items()
    }
    found = every_job_checked(["a", "b", *sorted(checked)[2:]], checked, (), root=None)
    assert [line.job for line in found.lines] == ["z0", "z1", "z2", "z3", "b", "a"]
    assert str(found) == (
        "5 of 6 jobs: z0: z0/f: lost (e). Next: bring\n\nz1: z1/f: lost (e). Next: bring\n\n"
        "z2: z2/f: lost (e). Next: bring\n\n2 more: z3, b"
    )
    assert [line.label for line in found.lines[3:]] == ["failed", "warning", "passed"]


@pytest.mark.parametrize(
    ("problem", "jobs", "known", "code"),
    [
        (None, 1, 0, None),
        (None, 0, 0, "no-job"),
        (None, 0, 3, "no-job"),
        ("the root does not exist", 0, 3, "root-missing"),
    ],
)
def test_a_root_without_a_job_is_no_pass(
    problem: str | None, jobs: int, known: int, code: str | None
) -> None:
    finding = root_finding("s3://b/x", known, problem, jobs)
    assert (finding.code if finding else None) == code
    if finding is not None:
        assert ("3 jobs existed" in finding.evidence) is bool(known)
        verdict = every_job_checked([], {}, (), root=finding).verdict
        assert not verdict.passed
