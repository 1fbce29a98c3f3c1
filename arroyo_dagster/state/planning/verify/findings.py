"""Findings and verdicts, the results of checks.

Every check is a pure function from facts that its caller has read to findings. A verdict passes if
it has no error; each finding has a next step.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

RESTORE_OBJECT = "restore the object (backup, `gc undelete JOB`) or an epoch that does not list it"
KEEP_AND_REPORT = "keep the object and report it; restore an epoch that does not list it"
ANOTHER_EPOCH = "choose another epoch; `arroyo-state epochs` lists them"


class Severity(enum.Enum):
    """The consequence of a finding for a job that depends on the checked object."""

    ERROR = "error"
    """The job must not continue."""

    WARNING = "warning"
    """The job may continue; a person should check the finding."""

    NOTE = "note"
    """The job may continue; the finding was not checked, or costs time only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One result of a check.

    Attributes:
        code: the kind of finding, the same in every release (`file-missing`…).
        object: the path or the job concerned.
        evidence: what was found, and what was expected if that adds information.
        next_step: what the user should do now.
    """

    severity: Severity
    code: str
    object: str
    evidence: str
    next_step: str

    def __str__(self) -> str:
        return f"{self.object}: {self.evidence} ({self.code}). Next: {self.next_step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of one check.

    Attributes:
        findings: of every severity, in the order of the checked objects.
        inspected: the number of files or jobs checked; with 0 a pass proves nothing.
    """

    findings: tuple[Finding, ...] = ()
    inspected: int = 0

    @property
    def passed(self) -> bool:
        """Whether no finding is an error."""
        return not self.errors

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings for which the job must not continue."""
        return tuple(finding for finding in self.findings if finding.severity is Severity.ERROR)


def merged(verdicts: Iterable[Verdict]) -> Verdict:
    """Combine verdicts over several objects into one, which passes if each of them does."""
    all_of_them = list(verdicts)
    return Verdict(
        findings=tuple(finding for verdict in all_of_them for finding in verdict.findings),
        inspected=sum(verdict.inspected for verdict in all_of_them),
    )


def unreadable(at: str, problem: str) -> Verdict:
    """Return the verdict on an object that cannot be read."""
    return Verdict(
        findings=(error("metadata-unreadable", at, problem, ANOTHER_EPOCH),), inspected=1
    )


def error(code: str, at: str, evidence: str, next_step: str) -> Finding:
    """Return a finding for which the job must not continue."""
    return Finding(
        severity=Severity.ERROR, code=code, object=at, evidence=evidence, next_step=next_step
    )


def warning(code: str, at: str, evidence: str, next_step: str) -> Finding:
    """Return a finding that a person should check."""
    return Finding(
        severity=Severity.WARNING, code=code, object=at, evidence=evidence, next_step=next_step
    )


def note(code: str, at: str, evidence: str, next_step: str) -> Finding:
    """Return a finding about something that was not checked or only costs time."""
    return Finding(
        severity=Severity.NOTE, code=code, object=at, evidence=evidence, next_step=next_step
    )


def either(is_error: bool, code: str, at: str, evidence: str, next_step: str) -> Finding:
    """Return an error if `is_error`, otherwise a warning."""
    return (error if is_error else warning)(code, at, evidence, next_step)
