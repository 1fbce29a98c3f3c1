"""Verdicts as check results, and the last results of checks as the instance knows them."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dagster as dg

from arroyo_dagster.orchestration.rendering import known, table
from arroyo_dagster.state.planning.verify.findings import Finding, Severity, Verdict

FINDINGS, TABLE = "arroyo/findings", "Findings"
"""Metadata: how many findings, and their table; pages sort by name, capital letters first."""

_HISTORY = 5
"""So many executions are read where the newest is planned, but was not evaluated (yet)."""


def check_result(
    verdict: Verdict,
    name: str,
    asset: dg.AssetKey,
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
    errors_first = sorted(verdict.findings, key=lambda item: item.severity is not Severity.ERROR)
    return dg.AssetCheckResult(
        check_name=name,
        asset_key=asset,
        passed=verdict.passed and not nothing_seen if passed is None else passed,
        severity=severity,
        description=format_verdict(verdict) if description is None else description,
        metadata=known(
            {
                "arroyo/looked_at": verdict.inspected,
                FINDINGS: len(verdict.findings),
                TABLE: table(map(_row, errors_first)),
                **(metadata or {}),
            }
        ),
    )


def format_verdict(verdict: Verdict) -> str:
    """Return a verdict in one line: its first error, or else its first finding."""
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


# ---- what the instance knows ---------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LastResult:
    """The last result of a check.

    Attributes:
        at: when, in seconds since 1970.
        runless: whether it was reported outside of the events of a run.
        metadata: the values, without their types.
    """

    passed: bool
    at: float
    runless: bool
    severity: dg.AssetCheckSeverity
    description: str
    metadata: Mapping[str, Any]

    @property
    def is_error(self) -> bool:
        """Whether it failed with an error."""
        return not self.passed and self.severity is dg.AssetCheckSeverity.ERROR


def last_results(
    instance: dg.DagsterInstance, keys: Sequence[dg.AssetCheckKey]
) -> dict[dg.AssetCheckKey, LastResult]:
    """Return the last result of each check that was ever evaluated, by one query for all."""
    storage = instance.event_log_storage
    newest = storage.get_latest_asset_check_execution_by_key(keys) if keys else {}
    results = {}
    for key, record in newest.items():
        records = [record]
        if _as_result(record) is None:
            records = [*storage.get_asset_check_execution_history(key, limit=_HISTORY)]
        result = next(filter(None, map(_as_result, records)), None)
        if result is not None:
            results[key] = result
    return results


def _as_result(record: Any) -> LastResult | None:
    evaluation = record.evaluation
    if not isinstance(evaluation, dg.AssetCheckEvaluation):
        return None
    return LastResult(
        passed=evaluation.passed,
        at=record.event.timestamp,
        runless=not record.run_id,
        severity=evaluation.severity,
        description=evaluation.description or "",
        metadata={name: entry.value for name, entry in evaluation.metadata.items()},
    )


def report(
    instance: dg.DagsterInstance,
    result: dg.AssetCheckResult,
    run_id: str | None = None,
    target: Any = None,
) -> None:
    """Record a result outside of the events of a run.

    Dagster takes it for one of the asset's newest materialization, which the sensor reports outside
    of runs as well: so a check stays red, or green, when a new epoch arrives. It also costs a tenth
    of an event of a run.

    Args:
        run_id: of the run that found it, for a link.
        target: the materialization, if a run has made it.
    """
    assert result.asset_key is not None
    assert result.check_name is not None
    link = {} if run_id is None else {"Run": dg.MetadataValue.dagster_run(run_id)}
    instance.report_runless_asset_event(
        dg.AssetCheckEvaluation(
            asset_key=result.asset_key,
            check_name=result.check_name,
            passed=result.passed,
            severity=result.severity,
            description=result.description,
            metadata={**result.metadata, **link},
            target_materialization_data=target,
        )
    )


def yield_and_report(
    context: Any, results: Iterable[dg.AssetCheckResult]
) -> Iterator[dg.AssetCheckResult]:
    """Yield the results of a step, which its run must have, and `report` each, so that it stays."""
    storage = context.instance.event_log_storage
    for result in results:
        yield result
        assert result.asset_key is not None
        assert result.check_name is not None
        key = dg.AssetCheckKey(result.asset_key, result.check_name)
        record = storage.get_latest_asset_check_execution_by_key([key]).get(key)
        target = getattr(record and record.evaluation, "target_materialization_data", None)
        report(context.instance, result, context.run.run_id, target)


def is_reportable(
    last: LastResult | None, result: dg.AssetCheckResult, report_every: float
) -> bool:
    """Return whether a result is to be recorded: it differs from the last, or that is old.

    Args:
        report_every: in seconds.
    """
    if last is None or not last.runless or last.passed != result.passed:
        return True
    same = last.metadata.get(FINDINGS) == result.metadata[FINDINGS].value
    if last.is_error:  # warnings count minutes and files, which change all the time
        same &= last.description == result.description
    return not same or last.severity != result.severity or time.time() - last.at >= report_every
