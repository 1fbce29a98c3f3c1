"""The verdicts on one pipeline: can its newest epoch be restored, and how does its state grow?"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import dagster as dg

from arroyo_dagster.errors import ArroyoStateError, NotFoundError
from arroyo_dagster.orchestration import rendering as shown
from arroyo_dagster.orchestration.check_results import (
    FINDINGS,
    TABLE,
    LastResult,
    check_result,
    format_verdict,
)
from arroyo_dagster.orchestration.pipelines.model import ListedPipeline
from arroyo_dagster.orchestration.serving import Turn
from arroyo_dagster.orchestration.translator import CHECKPOINT, HEALTHY, RESTORABLE, Names
from arroyo_dagster.state.model.clock import wall_clock
from arroyo_dagster.state.model.health import EpochFigures, HealthLimits, TableFigures
from arroyo_dagster.state.model.verify import MAX_LEVEL
from arroyo_dagster.state.planning.rules import HEALTH_RULES, KINDS
from arroyo_dagster.state.planning.verify.findings import Finding, Verdict, error, warning

LISTING, FILES, LEVEL, AUDITED, ALERTED = (
    f"arroyo/{name}" for name in ("listing", "files", "level", "audited_at", "alerted_at")
)
"""Metadata of a verdict: what lay in the store, how closely it was verified, when at level 4, and
when a run failed because of these errors."""


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """When pipelines are verified, and how closely.

    Attributes:
        audit_after: seconds after which a pipeline is verified at level 4 although nothing changed.
        report_every: seconds after which an unchanged verdict is recorded again.
        limits: when a finding about the development of the state is one.
    """

    audit_after: float = 86_400.0
    report_every: float = 3_600.0
    limits: HealthLimits = field(default_factory=HealthLimits)


def verify_pipeline(
    names: Names,
    turn: Turn,
    last: LastResult | None,
    options: VerifyOptions,
    instance: dg.DagsterInstance,
    *,
    level: int = 1,
    wanted: Sequence[str] = (RESTORABLE, HEALTHY),
) -> tuple[Sequence[dg.AssetCheckResult], str | None]:
    """Verify the newest epoch of a pipeline, and judge how its state develops.

    Args:
        last: the last result of `restorable`.
        level: how closely `restorable` looks, as of `verify_job`.
        wanted: the checks to evaluate.

    Returns:
        The results, and why the run fails; None where nothing is wrong, or a run failed because of
        the same errors within `audit_after`.

    Raises:
        StorageError: the store failed.
        ConflictError: epochs expire faster than they can be read.
    """
    alarm, results = None, []
    if RESTORABLE in wanted:
        verdict, metadata = _restorable(turn, last, level)
        key = names.key(CHECKPOINT, turn.pipeline)
        if verdict.errors:
            alerted = _alerted(verdict, last, options)
            alarm = None if alerted else format_verdict(verdict)
            metadata = {**metadata, ALERTED: shown.timestamp(int((alerted or time.time()) * 1e6))}
        results.append(check_result(verdict, RESTORABLE, key, metadata=metadata))
    if HEALTHY in wanted:
        results.append(_healthy(names, turn, options, instance))
    return results, alarm


def _alerted(verdict: Verdict, last: LastResult | None, options: VerifyOptions) -> float | None:
    """When a run failed lately because of as many errors or more; None if none did."""
    if last is None or not last.is_error:
        return None
    if int(last.metadata.get(FINDINGS) or 0) < len(verdict.findings):
        return None
    alerted = float(last.metadata.get(ALERTED) or 0.0)
    return alerted if 0 <= time.time() - alerted < options.audit_after else None


def audited_at(last: LastResult | None) -> float:
    """Return when a pipeline was verified at level 4, in seconds since 1970; 0 = never."""
    return 0.0 if last is None else float(last.metadata.get(AUDITED) or 0.0)


# ---- restorable ----------------------------------------------------------------------------------


def _restorable(
    turn: Turn, last: LastResult | None, level: int
) -> tuple[Verdict, Mapping[str, Any]]:
    from arroyo_dagster.state.operations.verify.fingerprint import (
        epoch_fingerprint,
        list_objects,
        listing_digest,
    )
    from arroyo_dagster.state.operations.verify.job import verify_job

    store, paths = turn.tools.store.reading(), turn.pipeline.paths
    objects = list_objects(store, paths)
    metadata: dict[str, Any] = {LISTING: listing_digest(objects), LEVEL: level}
    audited = time.time() if level == MAX_LEVEL else audited_at(last)
    metadata[AUDITED] = shown.timestamp(int(audited * 1e6)) if audited else None
    unknown = {AUDITED: None}  # what is repaired after an error is compared to nothing, and audited
    try:
        job = verify_job(store, paths, level=level)
    except NotFoundError as problem:
        verdict = Verdict(findings=(_missing(turn.pipeline, problem, bool(objects)),))
        return verdict, metadata | unknown
    findings = list(job.verdict.findings)
    before = None if last is None else _fingerprint(last.metadata.get(FILES))
    files = epoch_fingerprint(store, paths, job.epoch, objects)
    if before is not None and job.passed:  # an error says more
        now_there = files
        if before.epoch != job.epoch:
            now_there = epoch_fingerprint(store, paths, before.epoch, objects)
        changed = [] if now_there is None else before.changed(now_there)
        findings += [_changed(turn.pipeline, before.epoch, name) for name in changed]
    metadata["arroyo/epoch"] = int(job.epoch)
    if not job.passed:
        metadata |= unknown
    elif files is not None:
        metadata[FILES] = json.dumps([files.epoch, files.operators])
    return Verdict(findings=tuple(findings), inspected=job.verdict.inspected), metadata


def _fingerprint(text: Any) -> Any:
    from arroyo_dagster.state.operations.verify.fingerprint import EpochFingerprint

    if not isinstance(text, str):
        return None
    epoch, operators = json.loads(text)
    return EpochFingerprint(epoch, {name: tuple(values) for name, values in operators.items()})


def _changed(pipeline: ListedPipeline, epoch: int, operator: str) -> Finding:
    return error(
        "file-changed",
        pipeline.root,
        f"a file that operator {operator} lists at epoch {epoch} is missing, or has another size "
        "or etag than when it was verified last; nobody writes a listed file twice",
        f"`arroyo-state verify {pipeline.root} --level 4` reads every row; restore the object from "
        "a copy if it reports an error",
    )


def _missing(pipeline: ListedPipeline, problem: ArroyoStateError, remains: bool) -> Finding:
    if remains:
        return warning(
            "no-epoch",
            pipeline.root,
            problem.message,
            problem.next_step or "wait for its first checkpoint, or check its logs",
        )
    return error(
        "job-missing",
        pipeline.root,
        "there is no such job below the checkpoint URL",
        "restore its objects; if it was deleted on purpose, name it under `gone:`",
    )


# ---- healthy -------------------------------------------------------------------------------------


def _healthy(
    names: Names, turn: Turn, options: VerifyOptions, instance: dg.DagsterInstance
) -> dg.AssetCheckResult:
    from arroyo_dagster.state.operations.catalog.health import job_health

    pipeline, tools = turn.pipeline, turn.tools
    key, directory = names.key(CHECKPOINT, pipeline), tools.directory.directory(tools.store)
    health = job_health(
        tools.store.reading(),
        pipeline.paths,
        directory.look_up([pipeline.paths])[0] if directory.sources else None,
        options.limits,
        history=reported_epochs(instance, key),
        now_micros=wall_clock(),
    )
    findings = [f for verdict in health.verdicts.values() for f in verdict.findings]
    rows = list(_kinds(health.verdicts))
    return check_result(
        Verdict(findings=tuple(findings), inspected=1),
        HEALTHY,
        key,
        severity=dg.AssetCheckSeverity.WARN,
        passed=not findings,
        metadata={
            TABLE: shown.table(rows),
            "Not judged": shown.table(
                {"rule": rule, "because": why} for rule, why in health.not_judged.items()
            ),
        },
    )


def _kinds(verdicts: Mapping[str, Verdict]) -> Iterator[dict[str, Any]]:
    """Yield a row for each kind of finding: what it means, its first finding and the next step."""
    kinds: dict[str, list[Finding]] = {}
    for rule in HEALTH_RULES:
        verdict = verdicts.get(rule.name)
        if verdict is not None and verdict.findings:
            kinds.setdefault(rule.kind, []).extend(verdict.findings)
    for kind in KINDS:
        if kind in kinds:
            first = kinds[kind][0]
            yield {
                "what": kind,
                "evidence": first.evidence,
                "findings": len(kinds[kind]),
                "next step": first.next_step,
            }


# ---- the epochs that the sensor reported: figures of what the store no longer has ----------------

REPORTED = 200
"""So many of the newest materializations are read."""

FIGURES = {
    "epoch": "arroyo/epoch",
    "worker_generation": "arroyo/generation",
    "finished_micros": "arroyo/finished_micros",
    "started_micros": "arroyo/started_micros",
    "watermark_micros": "arroyo/watermark_micros",
    "files": "arroyo/files",
    "size_bytes": "arroyo/bytes",
    "rows": "arroyo/rows",
    "new_files": "arroyo/new_files",
    "new_size_bytes": "arroyo/new_bytes",
}
"""The fields of an epoch's figures, and their metadata in the events of the sensor."""

TABLES = "arroyo/tables"
"""Metadata: operator, table, files, bytes and rows of each table, as JSON."""


def tables_metadata(figures: EpochFigures) -> str:
    """Return the figures of the tables of an epoch as metadata."""
    return json.dumps(
        [[t.operator, t.table, t.files, t.size_bytes, t.rows] for t in figures.tables],
        separators=(",", ":"),
    )


def reported_epochs(instance: dg.DagsterInstance, key: dg.AssetKey) -> Sequence[EpochFigures]:
    """Return the figures of the epochs that were reported last, oldest first."""
    records = instance.fetch_materializations(key, limit=REPORTED).records
    figures = []
    for record in reversed(records):
        event = record.asset_materialization
        if event is None or FIGURES["epoch"] not in event.metadata:
            continue
        values: dict[str, Any] = {
            field: event.metadata[name].value
            for field, name in FIGURES.items()
            if name in event.metadata
        }
        tables = event.metadata.get(TABLES)
        rows = json.loads(str(tables.value)) if tables is not None else ()
        figures.append(EpochFigures(**values, tables=tuple(_table(*row) for row in rows)))
    return figures


def _table(
    operator: str, table: str, files: int, size_bytes: int, rows: int | None
) -> TableFigures:
    return TableFigures(
        operator=operator, table=table, files=files, size_bytes=size_bytes, rows=rows
    )
