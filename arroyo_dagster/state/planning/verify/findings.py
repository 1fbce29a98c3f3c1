"""What is noticed, as values: findings, and the verdicts they add up to.

Every check is one pure function from facts that somebody else has gathered to findings. A verdict
with no error passes; each finding says what to do.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

RESTORE_OBJECT = "restore the object, or restore an epoch that does not list it"
KEEP_AND_REPORT = "keep the object and report it; restore an epoch that does not list it"
ANOTHER_EPOCH = "choose another epoch; `arroyo-state epochs` lists them"


class Severity(enum.Enum):
    """What a finding means for a run that depends on what was checked."""

    ERROR = "error"
    """The job must not continue."""

    WARNING = "warning"
    """The job may continue; a person should check the finding."""

    NOTE = "note"
    """The job may continue; the finding was not checked, or costs time only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing noticed.

    Attributes:
        code: what kind of thing, the same in every release (`file-missing`…).
        object: the path or the job concerned.
        evidence: what was found, and what was expected where that says more.
        next_step: what the reader should do now.
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
    """The answer of one check.

    Attributes:
        findings: in the order of what was looked at, of every severity.
        inspected: how many files, or jobs, were looked at: a pass over nothing is no proof.
    """

    findings: tuple[Finding, ...] = ()
    inspected: int = 0

    @property
    def passed(self) -> bool:
        """Whether nothing found is an error."""
        return not self.errors

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that must stop whoever depends on this."""
        return tuple(one for one in self.findings if one.severity is Severity.ERROR)


def merged(verdicts: Iterable[Verdict]) -> Verdict:
    """One verdict over several objects: it passes if each does."""
    all_of_them = list(verdicts)
    return Verdict(
        findings=tuple(finding for verdict in all_of_them for finding in verdict.findings),
        inspected=sum(verdict.inspected for verdict in all_of_them),
    )


def unreadable(at: str, problem: str) -> Verdict:
    """The verdict on what cannot even be read."""
    return Verdict(
        findings=(error("metadata-unreadable", at, problem, ANOTHER_EPOCH),), inspected=1
    )


def error(code: str, at: str, evidence: str, next_step: str) -> Finding:
    """A finding that must stop whoever depends on what was checked."""
    return Finding(
        severity=Severity.ERROR, code=code, object=at, evidence=evidence, next_step=next_step
    )


def warning(code: str, at: str, evidence: str, next_step: str) -> Finding:
    """A finding that somebody should look at."""
    return Finding(
        severity=Severity.WARNING, code=code, object=at, evidence=evidence, next_step=next_step
    )


def note(code: str, at: str, evidence: str, next_step: str) -> Finding:
    """A finding that says what was not looked at, or what costs time only."""
    return Finding(
        severity=Severity.NOTE, code=code, object=at, evidence=evidence, next_step=next_step
    )


def either(is_error: bool, code: str, at: str, evidence: str, next_step: str) -> Finding:
    """An error, or else a warning."""
    return (error if is_error else warning)(code, at, evidence, next_step)
