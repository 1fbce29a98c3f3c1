"""Checks: each shows the verdict of one pure function of `planning/health.py`."""

import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import dagster as dg

from arroyo_dagster.orchestration.failures import as_failure
from arroyo_dagster.orchestration.resources import ArroyoStateStore
from arroyo_dagster.orchestration.shown import known, table
from arroyo_dagster.orchestration.translator import CHECKPOINT, Naming
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.planning.health import Finding, Verdict, every_job_recent, merged

if TYPE_CHECKING:
    from arroyo_dagster.state.model.checkpoints import Checkpoint
    from arroyo_dagster.state.storage.store import ObjectStore

FILES_EXIST = "files_exist"
RESTORABLE = "restorable"
EVERY_JOB_RECENT = "every_job_recent"
RECENT = timedelta(minutes=15)

_DESCRIPTIONS = {
    FILES_EXIST: "Every data file that the newest epoch lists is there, and is not empty.",
    RESTORABLE: "A restore of the newest epoch would find every file it opens, as it expects it.",
}


def epoch_check_specs(asset: dg.AssetKey) -> list[dg.AssetCheckSpec]:
    """The two blocking checks of the newest epoch, on one asset."""
    return [
        dg.AssetCheckSpec(name, asset=asset, blocking=True, description=description)
        for name, description in _DESCRIPTIONS.items()
    ]


def epoch_verdict(name: str, store: "ObjectStore", jobs: Iterable[JobPaths]) -> Verdict:
    """The verdict of one of these checks over the newest epochs of some jobs.

    Raises:
        StorageError: the store failed.
        ConflictError: epochs expire faster than they can be looked at.
    """
    from arroyo_dagster.state.local import health

    check: Callable[[ObjectStore, Checkpoint], Verdict] = {
        FILES_EXIST: health.check_files_exist,
        RESTORABLE: health.check_restorable,
    }[name]
    return merged(health.check_newest(store, paths, check) for paths in jobs)


def check_result(
    verdict: Verdict,
    name: str,
    asset: dg.AssetKey | None = None,
    *,
    severity: dg.AssetCheckSeverity = dg.AssetCheckSeverity.ERROR,
    passed: bool | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> dg.AssetCheckResult:
    """A verdict as Dagster shows it: the first finding in words, up to 50 as a table.

    Args:
        passed: what to say instead of `verdict.passed`.
        metadata: what else to show.
    """
    return dg.AssetCheckResult(
        check_name=name,
        asset_key=asset,
        passed=verdict.passed if passed is None else passed,
        severity=severity,
        description=_words(verdict),
        metadata=known(
            {
                "arroyo/looked_at": verdict.looked_at,
                "arroyo/findings": len(verdict.findings),
                "arroyo/found": table(map(_row, verdict.findings)),
                **(metadata or {}),
            }
        ),
    )


def _words(verdict: Verdict) -> str:
    if not verdict.findings:
        return f"{verdict.looked_at} looked at, nothing found"
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


def build_fleet_checks(naming: Naming, *, recent: timedelta = RECENT) -> dg.AssetChecksDefinition:
    """The check over all jobs: whether each wrote an epoch lately, or is at rest."""
    spec = dg.AssetCheckSpec(
        EVERY_JOB_RECENT,
        asset=naming.key(CHECKPOINT),
        description=f"Every job that is not at rest wrote an epoch in the last {recent}.",
    )

    @dg.multi_asset_check(name="arroyo_fleet_checks", specs=[spec], can_subset=True)
    def arroyo_fleet_checks(arroyo_store: ArroyoStateStore):  # type: ignore[no-untyped-def]
        from arroyo_dagster.state.local.health import survey

        with as_failure():
            ages = survey(arroyo_store.reading(), arroyo_store.jobs())
        verdict = every_job_recent(
            ages,
            now_micros=time.time_ns() // 1000,
            limit_micros=int(recent.total_seconds() * 1_000_000),
        )
        yield check_result(
            verdict,
            EVERY_JOB_RECENT,
            spec.asset_key,
            severity=dg.AssetCheckSeverity.WARN,
            passed=not verdict.findings,
        )

    return arroyo_fleet_checks
