"""Findings about the jobs of a deployment: which stand still, vanished, failed or were never
checked.

Pure functions from facts to one verdict over all jobs, with a line for each of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from arroyo_dagster.state.model.job_facts import JobCondition
from arroyo_dagster.state.planning.verify.findings import Finding, Severity, Verdict, error, warning

NOT_JUDGED = "not judged"
"""The label of a job whose facts do not suffice for a verdict."""

PASSED = "passed"
"""The label of a job without a finding."""

_OFFENDERS_NAMED = 3
_PARAGRAPH = "\n\n"
_RESTING = {
    JobCondition.STOPPED: "stopped",
    JobCondition.FINISHED: "finished",
    JobCondition.GONE: "gone",
}
CHECK_ROOT = "check the checkpoint URL, the store and its credentials"


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
class GoneJob:
    """A job that existed and no longer exists.

    Attributes:
        epoch: its last known epoch; None if none is known.
    """

    job: str
    epoch: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedJob:
    """The last verdict of one check on one job.

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
    """

    job: str
    label: str
    epoch: int | None = None
    at_micros: int | None = None
    findings: tuple[Finding, ...] = ()

    @property
    def finding(self) -> Finding | None:
        """The most severe finding; None = none."""
        return next(iter(self.findings), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetVerdict:
    """The result of one check over all jobs.

    Attributes:
        lines: one per job; those with an error first, then those with a warning.
        trouble: the finding about the root itself, if any.
    """

    lines: tuple[JobLine, ...] = ()
    trouble: Finding | None = None

    @property
    def offenders(self) -> tuple[JobLine, ...]:
        """The jobs with a finding."""
        return tuple(line for line in self.lines if line.finding is not None)

    @property
    def not_judged(self) -> int:
        """How many jobs the check could not judge."""
        return sum(line.label == NOT_JUDGED for line in self.lines)

    @property
    def passed(self) -> int:
        """How many jobs were judged, without a finding."""
        return len(self.lines) - len(self.offenders) - self.not_judged

    @property
    def verdict(self) -> Verdict:
        """The verdict with all findings; `inspected` is the number of jobs."""
        found = [self.trouble, *(line.finding for line in self.lines)]
        findings = tuple(one for one in found if one is not None)
        return Verdict(findings=findings, inspected=len(self.lines))

    def __str__(self) -> str:
        jobs = f"{len(self.lines)} job{'' if len(self.lines) == 1 else 's'}"
        if self.trouble is not None:
            return str(self.trouble)
        if not self.offenders:
            return (
                f"{jobs}: {self.passed} passed, {self.not_judged} not judged"
                if self.not_judged
                else f"{jobs}, all passed"
            )
        told = [
            f"{line.job}: {_beside(line.job, line.finding)}"
            for line in self.offenders[:_OFFENDERS_NAMED]
            if line.finding is not None
        ]
        rest = [line.job for line in self.offenders[_OFFENDERS_NAMED:]]
        if rest:
            shown = ", ".join(rest[:10]) + (", …" if len(rest) > 10 else "")
            told.append(f"{len(rest)} more: {shown}")
        return f"{len(self.offenders)} of {jobs}: {_PARAGRAPH.join(told)}"


def _beside(job: str, finding: Finding) -> str:
    """Format a finding, without its object if that is the job."""
    if finding.object != job:
        return str(finding)
    return f"{finding.evidence} ({finding.code}). Next: {finding.next_step}"


# ---- the checks ----------------------------------------------------------------------------------


def every_job_checked(
    jobs: Sequence[str],
    checked: Mapping[str, CheckedJob],
    gone: Sequence[GoneJob],
    *,
    root: Finding | None,
    forget: str = "arroyo_forget_job",
    refresh: str = "arroyo_refresh",
) -> FleetVerdict:
    """Combine the last verdicts of one check on every job.

    Args:
        jobs: the existing jobs.
        checked: the last verdict of each job that was ever checked.
        gone: the jobs that existed, no longer exist, and have not been acknowledged.
        root: the finding about the root, from `root_finding`.
        forget: the Dagster job that acknowledges a vanished job.
        refresh: the Dagster job that checks one job.
    """
    lines = [_checked_line(job, checked.get(job), refresh) for job in jobs]
    return _fleet(lines, gone, root, forget)


def _checked_line(job: str, checked: CheckedJob | None, refresh: str) -> JobLine:
    if checked is None:
        step = f"run the job {refresh} for its partition {job}"
        finding = warning("never-checked", job, "was never checked", step)
        return JobLine(job=job, label="never checked", findings=(finding,))
    return job_line(job, checked.verdict, epoch=checked.epoch, at_micros=checked.at_micros)


def job_line(job: str, verdict: Verdict, *, epoch: int | None, at_micros: int | None) -> JobLine:
    """Return the line of a job with a verdict."""
    findings = tuple(sorted(verdict.findings, key=lambda one: one.severity is not Severity.ERROR))
    label = PASSED if not findings else "failed" if verdict.errors else "warning"
    return JobLine(job=job, label=label, epoch=epoch, at_micros=at_micros, findings=findings)


def fleet_recent(
    jobs: Sequence[JobAge],
    gone: Sequence[GoneJob],
    *,
    root: Finding | None,
    forget: str = "arroyo_forget_job",
    now_micros: int,
    limit_micros: int,
) -> FleetVerdict:
    """Find the jobs that stand still, failed or vanished; arguments as in `every_job_checked`."""
    lines = [_recent_line(job, now_micros, limit_micros) for job in jobs]
    return _fleet(lines, gone, root, forget)


def _recent_line(job: JobAge, now_micros: int, limit_micros: int) -> JobLine:
    label, finding = _recency(job, job.age_micros(now_micros), limit_micros)
    return JobLine(
        job=job.job,
        label=label,
        epoch=job.epoch,
        at_micros=job.finished_micros,
        findings=() if finding is None else (finding,),
    )


def every_job_recent(jobs: Sequence[JobAge], *, now_micros: int, limit_micros: int) -> Verdict:
    """Find the jobs that stand still: no new epoch for longer than the limit, and not at rest.

    The state of an Arroyo job does not show whether it was stopped on purpose, so these findings
    are warnings. A newest epoch that cannot be read is an error.
    """
    found = [_recency(job, job.age_micros(now_micros), limit_micros)[1] for job in jobs]
    return Verdict(findings=tuple(one for one in found if one is not None), inspected=len(jobs))


def _recency(job: JobAge, age_micros: int | None, limit_micros: int) -> tuple[str, Finding | None]:
    if job.problem is not None:
        step = "check it with `arroyo-state epochs`"
        return "unreadable", error("newest-epoch-unreadable", job.job, job.problem, step)
    if job.condition is JobCondition.FAILED:
        step = "check its logs, and start it again"
        why = (
            f"{job.source or 'Arroyo'} reports that it failed: "
            f"{job.failure or 'no reason is given'}"
        )
        return "failed in Arroyo", warning("job-failed", job.job, why, step)
    if job.resting is not None:
        return job.resting, None
    if age_micros is None:
        step = "wait for its first checkpoint, or check its logs"
        return "no epoch", warning("no-epoch", job.job, "has no epoch yet", step)
    if age_micros <= limit_micros:
        return "recent", None
    evidence = (
        f"epoch {job.epoch} is {age_micros // 1000000} s old; expected at most "
        f"{limit_micros // 1000000} s"
    )
    known = job.condition is not JobCondition.UNKNOWN
    if known:
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
    return "stands still", warning("job-stands-still", job.job, evidence, step)


# ---- shared by all checks ------------------------------------------------------------------------


def root_finding(url: str, known: int, problem: str | None, jobs: int) -> Finding | None:
    """Return the finding about the root, if it cannot be listed or contains no job.

    Args:
        known: the number of jobs that are known to have existed.
        problem: why the root cannot be listed; None if it can.
        jobs: the number of existing jobs.
    """
    if problem is None and jobs:
        return None
    before = f"; {known} jobs existed before" if known else ""
    if problem is not None:
        return error("root-missing", url, f"{problem}{before}", CHECK_ROOT)
    step = f"{CHECK_ROOT}, or wait for the first checkpoint of a job"
    evidence = f"there is no job below the checkpoint URL; expected at least one{before}"
    return error("no-job", url, evidence, CHECK_ROOT if known else step)


def _fleet(
    lines: Sequence[JobLine], gone: Sequence[GoneJob], root: Finding | None, forget: str
) -> FleetVerdict:
    every = [*lines, *(_gone_line(one, forget) for one in gone)]
    return FleetVerdict(lines=tuple(sorted(every, key=by_urgency)), trouble=root)


def _gone_line(gone: GoneJob, forget: str) -> JobLine:
    last = "no epoch of it is known" if gone.epoch is None else f"its last epoch was {gone.epoch}"
    finding = error(
        "job-vanished",
        gone.job,
        f"it vanished; {last}",
        f"restore its objects; if it was deleted on purpose, run the job {forget} for {gone.job}",
    )
    return JobLine(job=gone.job, label="vanished", epoch=gone.epoch, findings=(finding,))


def by_urgency(line: JobLine) -> tuple[int, str]:
    """Sort lines: errors first, then warnings, then by job."""
    order = {Severity.ERROR: 0, Severity.WARNING: 1, Severity.NOTE: 2}
    return (3 if line.finding is None else order[line.finding.severity]), line.job
