"""Findings about the jobs of a deployment: which stand still or failed.

Pure functions from facts to one verdict over all jobs, with a line for each of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from arroyo_dagster.state.model.job_facts import JobCondition
from arroyo_dagster.state.model.units import format_micros
from arroyo_dagster.state.planning.verify.findings import Finding, Severity, Verdict, error, warning

NOT_JUDGED = "not judged"
"""The label of a job whose facts do not suffice for a verdict."""

PASSED = "passed"
"""The label of a job without a finding."""

_RESTING = {
    JobCondition.STOPPED: "stopped",
    JobCondition.FINISHED: "finished",
    JobCondition.GONE: "gone",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAge:
    """The age and status of a job, from its newest epoch and the job directory.

    Attributes:
        job: the root of its paths.
        finished_micros: when its newest epoch was finished; None without an epoch.
        at_rest: whether it stopped with a checkpoint and was not started since.
        epochs, files: the number of its epochs, and of files that the newest lists.
        problem: why its newest epoch cannot be read; None if it can.
        condition: its status as Arroyo or the user reports it.
        source: which source reported the status, or why none did; None without a source.
        failure: why it failed, as Arroyo reports it.
    """

    job: str
    epoch: int | None = None
    epochs: int = 0
    files: int = 0
    finished_micros: int | None = None
    at_rest: bool = False
    problem: str | None = None
    condition: JobCondition = JobCondition.UNKNOWN
    source: str | None = None
    failure: str | None = None

    def age_micros(self, now_micros: int) -> int | None:
        """The time since its newest epoch; None without one."""
        return None if self.finished_micros is None else max(0, now_micros - self.finished_micros)

    @property
    def resting(self) -> str | None:
        """How the job was stopped on purpose; None if it was not, or that is unknown."""
        if self.condition in _RESTING:
            return _RESTING[self.condition]
        unknown = self.condition is JobCondition.UNKNOWN
        return "at rest" if self.at_rest and unknown else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedJob:
    """The verdict of one check on one job.

    Attributes:
        job: the root of its paths.
        epoch: the checked epoch; None if the job had none.
        at_micros: when the job was checked, in microseconds since 1970 in UTC.
        level: of a verification; None for other checks.
    """

    job: str
    at_micros: int
    epoch: int | None
    verdict: Verdict
    level: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLine:
    """The result of a check over all jobs for one of them.

    Attributes:
        label: its verdict in one to three words.
        epoch: the newest or the checked epoch.
        at_micros: when the job was checked, or when its newest epoch was finished.
        findings: errors first.
        not_judged: why rules did not judge the job, by their names.
    """

    job: str
    label: str
    epoch: int | None = None
    at_micros: int | None = None
    findings: tuple[Finding, ...] = ()
    not_judged: Mapping[str, str] = field(default_factory=dict)

    @property
    def finding(self) -> Finding | None:
        """The most severe finding; None = none."""
        return next(iter(self.findings), None)


def job_line(job: str, verdict: Verdict, *, epoch: int | None, at_micros: int | None) -> JobLine:
    """Return the line of a job with a verdict."""
    findings = tuple(sorted(verdict.findings, key=lambda one: one.severity is not Severity.ERROR))
    label = PASSED if not findings else "failed" if verdict.errors else "warning"
    return JobLine(job=job, label=label, epoch=epoch, at_micros=at_micros, findings=findings)


def every_job_recent(jobs: Sequence[JobAge], *, now_micros: int, limit_micros: int) -> Verdict:
    """Find the jobs that stand still: no new epoch for longer than the limit, and not at rest.

    The state of an Arroyo job does not show whether it was stopped on purpose, so these findings
    are warnings. A newest epoch that cannot be read is an error.
    """
    found = [_recency(job, job.age_micros(now_micros), limit_micros) for job in jobs]
    return Verdict(findings=tuple(one for one in found if one is not None), inspected=len(jobs))


def _recency(job: JobAge, age_micros: int | None, limit_micros: int) -> Finding | None:
    if job.problem is not None:
        step = "check it with `arroyo-state epochs`"
        return error("newest-epoch-unreadable", job.job, job.problem, step)
    if job.condition is JobCondition.FAILED:
        return failed_job(job)
    if job.resting is not None:
        return None
    if age_micros is None:
        step = "wait for its first checkpoint, or check its logs"
        return warning("no-epoch", job.job, "has no epoch yet", step)
    if age_micros <= limit_micros:
        return None
    age, limit = format_micros(age_micros), format_micros(limit_micros)
    evidence = f"epoch {job.epoch} is {age} old; expected at most {limit}"
    is_known = job.condition is not JobCondition.UNKNOWN
    if is_known:
        evidence += f"; {job.source or 'Arroyo'} reports that it is {job.condition.value}"
        step = "check its logs: it should write checkpoints"
    elif job.source is None:
        step = (
            "start it again if it should run; if it was stopped on purpose, set arroyo_api_url "
            "or arroyo_database as a source of its status"
        )
    else:
        evidence += f"; whether it was stopped is unknown ({job.source})"
        step = "start it again if it should run; nothing to do if it was stopped on purpose"
    return warning("job-stands-still", job.job, evidence, step)


def failed_job(job: JobAge) -> Finding:
    """Return the finding about a job that failed, as Arroyo reports."""
    why = f"{job.source or 'Arroyo'} reports that it failed: {job.failure or 'no reason is given'}"
    return warning("job-failed", job.job, why, "check its logs, and start it again")


def by_urgency(line: JobLine) -> tuple[int, str]:
    """Sort lines: errors first, then warnings, then by job."""
    order = {Severity.ERROR: 0, Severity.WARNING: 1, Severity.NOTE: 2}
    return (3 if line.finding is None else order[line.finding.severity]), line.job
