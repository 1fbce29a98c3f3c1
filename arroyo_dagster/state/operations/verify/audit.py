"""Audit a job: verify its newest epoch, and compare its other epochs with one listing. This module
writes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from arroyo_dagster.errors import ArroyoStateError, FormatError, NotFoundError
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.clock import wall_clock
from arroyo_dagster.state.model.ids import Epoch
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.progress import OnProgress, Progress, no_progress
from arroyo_dagster.state.model.verify import AuditSettings
from arroyo_dagster.state.operations.catalog.epochs import read_epochs
from arroyo_dagster.state.operations.verify.hot_keys import hot_keys
from arroyo_dagster.state.operations.verify.job import JobVerdict, verify_job
from arroyo_dagster.state.planning.verify.audit import AuditFacts, ListedObject, audit_findings
from arroyo_dagster.state.planning.verify.findings import Finding, Severity, Verdict, error
from arroyo_dagster.state.planning.verify.fleet import CheckedJob
from arroyo_dagster.state.storage.store import ObjectStore

MAX_EPOCHS = 1_000
"""How many of the newest epochs of a job are compared."""

_FINDINGS_PER_CODE = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRun:
    """What one audit of many jobs did.

    Attributes:
        done: the audited jobs.
        left: the jobs that the budget did not reach.
        failed: the jobs that a store failed for, with the error.
    """

    done: tuple[CheckedJob, ...] = ()
    left: tuple[JobPaths, ...] = ()
    failed: Mapping[JobPaths, ArroyoStateError]


def audit_jobs(
    store: ObjectStore,
    jobs: Sequence[JobPaths],
    settings: AuditSettings,
    *,
    clock: Callable[[], float] = time.monotonic,
    on_progress: OnProgress = no_progress,
) -> AuditRun:
    """Audit jobs within the budget, in their order.

    A job that cannot be audited does not stop the others.

    Args:
        clock: in seconds.
        on_progress: called after each file that was read, with the job in the step.
    """
    ends = clock() + settings.budget_micros / 1e6
    done: list[CheckedJob] = []
    failed: dict[JobPaths, ArroyoStateError] = {}
    for place, paths in enumerate(jobs):
        if place and clock() >= ends:
            return AuditRun(done=tuple(done), left=tuple(jobs[place:]), failed=failed)
        try:
            done.append(audit_job(store, paths, settings, on_progress))
        except ArroyoStateError as problem:
            failed[paths] = problem
    return AuditRun(done=tuple(done), failed=failed)


def audit_job(
    store: ObjectStore,
    paths: JobPaths,
    settings: AuditSettings,
    on_progress: OnProgress = no_progress,
) -> CheckedJob:
    """Audit one job, and return the findings, at most 5 of each code.

    Raises:
        ConflictError: epochs expire faster than they can be read.
        StorageError: a store failed.
    """

    def report(progress: Progress) -> None:
        on_progress(replace(progress, step=f"{paths.root}: {progress.step}"))

    silent = on_progress is no_progress
    reports = no_progress if silent else report
    epoch, inspected, findings = _verified(store, paths, settings, reports)
    facts = _facts(store, paths, reports)
    findings += list(audit_findings(facts, settings))
    return CheckedJob(
        job=paths.root,
        at_micros=facts.now_micros,
        epoch=epoch,
        level=settings.level,
        verdict=Verdict(findings=tuple(_some_of_each_code(findings)), inspected=inspected),
    )


def _verified(
    store: ObjectStore, paths: JobPaths, settings: AuditSettings, on_progress: OnProgress
) -> tuple[Epoch | None, int, list[Finding]]:
    """Return the newest epoch, how many objects were inspected, and what was found."""
    if not ParquetBackend(store, paths).epochs():
        return None, 0, []
    try:
        job_verdict = verify_job(store, paths, level=settings.level, on_progress=on_progress)
        findings = list(job_verdict.verdict.findings)
        if settings.level:
            findings += _hot_keys(store, paths, job_verdict, settings)
    except (FormatError, NotFoundError) as problem:
        step = "verify the job: `arroyo-state verify` says what is damaged, and where to go back to"
        return None, 1, [error("epoch-not-verified", paths.root, problem.message, step)]
    return job_verdict.epoch, job_verdict.verdict.inspected, findings


def _hot_keys(
    store: ObjectStore, paths: JobPaths, found: JobVerdict, settings: AuditSettings
) -> list[Finding]:
    try:
        return list(hot_keys(store, paths, found.epoch, settings))
    except (FormatError, NotFoundError):
        if found.passed:
            raise
        return []  # the verification says which file does not decode


def _facts(store: ObjectStore, paths: JobPaths, on_progress: OnProgress) -> AuditFacts:
    """Read the epochs first: what is written between the two is in the listing only."""
    backend = ParquetBackend(store, paths)
    numbers = backend.epochs()
    read = read_epochs(store, paths, numbers[-MAX_EPOCHS:], on_progress)
    listing = {
        info.path: ListedObject(info.size_bytes, info.modified_micros)
        for info in store.list(paths.root)
        if info.addressable
    }
    try:
        pinned = backend.job_pins().pinned
    except FormatError:
        pinned = frozenset()  # `health` reports it
    return AuditFacts(
        paths=paths,
        epochs=[answer for answer in read.values() if isinstance(answer, Checkpoint)],
        problems={
            epoch: str(one) for epoch, one in read.items() if not isinstance(one, Checkpoint)
        },
        complete=len(numbers) <= MAX_EPOCHS,
        listing=listing,
        pinned=pinned,
        now_micros=wall_clock(),
    )


def _some_of_each_code(findings: Iterable[Finding]) -> Iterator[Finding]:
    counts: dict[tuple[str, Severity], int] = {}
    for finding in findings:
        kind = (finding.code, finding.severity)
        counts[kind] = counts.get(kind, 0) + 1
        if counts[kind] <= _FINDINGS_PER_CODE:
            yield finding
