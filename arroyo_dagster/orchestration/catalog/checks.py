"""Asset checks. Each shows the verdict of one pure function of `planning/verify/checks.py`."""

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import dagster as dg

from arroyo_dagster.errors import ArroyoStateError
from arroyo_dagster.orchestration.rendering import known, table
from arroyo_dagster.orchestration.translator import Naming
from arroyo_dagster.state.model.clock import wall_clock
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.planning.verify.findings import Finding, Verdict, error
from arroyo_dagster.state.planning.verify.fleet import CheckedJob

if TYPE_CHECKING:
    from arroyo_dagster.orchestration.resources import ArroyoStateStore
    from arroyo_dagster.state.model.checkpoints import Checkpoint
    from arroyo_dagster.state.storage.store import ObjectStore

FILES_EXIST = "files_exist"
RESTORABLE = "restorable"
EVERY_JOB_FILES_EXIST = "every_job_files_exist"
EVERY_JOB_RESTORABLE = "every_job_restorable"
EVERY_JOB_RECENT = "every_job_recent"
EVERY_JOB_CHECKS = {EVERY_JOB_FILES_EXIST: FILES_EXIST, EVERY_JOB_RESTORABLE: RESTORABLE}
"""The checks over all jobs that show the last verdicts of a check of one job."""
RECENT = timedelta(minutes=15)

_DESCRIPTIONS = {
    FILES_EXIST: "Every data file that the newest epoch lists exists and is not empty.",
    RESTORABLE: (
        "A restore of the newest epoch finds every file it opens, with the expected content."
    ),
}


def epoch_check_specs(naming: Naming, table: str) -> list[dg.AssetCheckSpec]:
    """Return the two blocking checks of the newest epoch, on one asset."""
    return [
        naming.check_spec(name, table, description, blocking=True)
        for name, description in _DESCRIPTIONS.items()
    ]


def kept_verdict(name: str, resource: "ArroyoStateStore", paths: JobPaths) -> Verdict:
    """Return the verdict of one check on the newest epoch of a job, and store it in the catalogue
    for the checks over all jobs.

    Raises:
        NotFoundError: the root does not exist.
        StorageError: a store failed.
        ConflictError: epochs expire faster than they can be read.
    """
    from arroyo_dagster.state.operations.catalog.verdicts import write_verdict

    found = job_verdict(name, resource.reading(), paths)
    write_verdict(resource.catalogue(), name, paths, found)
    return found.verdict


def job_verdict(name: str, store: "ObjectStore", paths: JobPaths) -> CheckedJob:
    """Return the verdict of one check on the newest epoch of a job. Errors as `kept_verdict`."""
    from arroyo_dagster.state.operations.catalog import footers as health

    check: Callable[[ObjectStore, Checkpoint], Verdict] = {
        FILES_EXIST: health.check_files_exist,
        RESTORABLE: health.check_restorable,
    }[name]
    at_micros = wall_clock()
    epoch, verdict = health.newest_verdict(store, paths, check)
    return CheckedJob(job=paths.root, at_micros=at_micros, epoch=epoch, verdict=verdict)


def not_checked(paths: JobPaths, problem: ArroyoStateError) -> Verdict:
    """Return the verdict on a job that could not be read."""
    step = problem.next_step or "run it again"
    return Verdict(findings=(error("not-checked", paths.root, problem.message, step),))


def no_job(url: str) -> Verdict:
    """Return the verdict if there is no job."""
    evidence = "there is no job below the checkpoint URL; at least one was expected"
    step = "check the checkpoint URL, or wait for the first checkpoint of a job"
    return Verdict(findings=(error("no-job", url, evidence, step),))


def check_result(
    verdict: Verdict,
    name: str,
    asset: dg.AssetKey | None = None,
    *,
    severity: dg.AssetCheckSeverity | None = None,
    passed: bool | None = None,
    description: str | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> dg.AssetCheckResult:
    """Return a verdict as a check result: the first finding as text, up to 50 in a table.

    A check that found errors before it could read anything does not pass.

    Args:
        severity: by default WARN if no finding is an error, else ERROR.
        passed: replaces `verdict.passed`.
        description: replaces the first finding.
        metadata: additional metadata.
    """
    nothing_seen = bool(verdict.findings) and not verdict.inspected
    if severity is None:
        only_warnings = bool(verdict.findings) and not verdict.errors
        severity = dg.AssetCheckSeverity.WARN if only_warnings else dg.AssetCheckSeverity.ERROR
    return dg.AssetCheckResult(
        check_name=name,
        asset_key=asset,
        passed=verdict.passed and not nothing_seen if passed is None else passed,
        severity=severity,
        description=_format_verdict(verdict) if description is None else description,
        metadata=known(
            {
                "arroyo/looked_at": verdict.inspected,
                "arroyo/findings": len(verdict.findings),
                "arroyo/found": table(map(_row, verdict.findings)),
                **(metadata or {}),
            }
        ),
    )


def _format_verdict(verdict: Verdict) -> str:
    if not verdict.findings and not verdict.inspected:
        return "nothing to check: no file is listed"
    if not verdict.findings:
        return f"{verdict.inspected} checked, no findings"
    first = (verdict.errors or verdict.findings)[0]
    more = f" (and {len(verdict.findings) - 1} more)" if len(verdict.findings) > 1 else ""
    return f"{first}{more}"


def _row(finding: Finding) -> dict[str, str]:
    return {
        "object": finding.object,
        "what": finding.code,
        "evidence": finding.evidence,
        "next step": finding.next_step,
        "severity": finding.severity.value,
    }
