"""The asset `audit`: every job's newest epoch restored as a test, and its other epochs compared."""

from collections.abc import Mapping, Sequence
from typing import Any

import dagster as dg

from arroyo_dagster.errors import ArroyoStateError
from arroyo_dagster.orchestration import rendering as shown
from arroyo_dagster.orchestration.catalog.fleet_checks import fleet_check_result, judged_check_spec
from arroyo_dagster.orchestration.failures import as_failure, fail
from arroyo_dagster.orchestration.resources import ArroyoStateStore
from arroyo_dagster.orchestration.translator import AUDIT, EPOCH_CATALOG, Naming, specified_assets
from arroyo_dagster.state.model.clock import wall_clock
from arroyo_dagster.state.model.progress import progress_logger
from arroyo_dagster.state.model.verify import AuditSettings
from arroyo_dagster.state.planning.rules import AUDIT_RULES, fleet_verdict, judge_audit
from arroyo_dagster.state.planning.verify.fleet import CheckedJob

_RULES = {rule.name: rule for rule in AUDIT_RULES}


def build_audit(naming: Naming, settings: AuditSettings) -> dg.AssetsDefinition:
    """Build the asset of the audits of all jobs with their checks, made by one step.

    A run audits the jobs that wait longest, within its budget. The checks show the last audit of
    every job.
    """
    asset = naming.key(AUDIT)

    @specified_assets(
        name=naming.name("arroyo_audit_jobs"),
        specs=[naming.spec(AUDIT, deps=[EPOCH_CATALOG], partitioned=False)],
        check_specs=[judged_check_spec(rule, naming, AUDIT, settings) for rule in AUDIT_RULES],
        can_subset=True,
    )
    @naming.bind
    def arroyo_audit_jobs(  # type: ignore[no-untyped-def]
        context: dg.AssetExecutionContext,
        arroyo_store: ArroyoStateStore,
    ):
        from arroyo_dagster.state.operations.verify.audit import (
            AuditOptions,
            audit_jobs,
            last_audits,
        )

        def log(one: CheckedJob) -> None:
            errors = len(one.verdict.errors)
            context.log.info(f"{one.job} epoch {one.epoch}: {errors} errors")

        problem: ArroyoStateError | None = None
        with as_failure():
            listing, catalogue = arroyo_store.listing(), arroyo_store.catalogue()
            jobs = listing.jobs
            names = [paths.root for paths in jobs]
            if context.selected_asset_keys:
                run = audit_jobs(
                    arroyo_store.reading(),
                    catalogue,
                    jobs,
                    settings,
                    AuditOptions(
                        earlier=arroyo_store.earlier(),
                        on_job=log,
                        on_progress=progress_logger(context.log.info),
                    ),
                )
                failed = [*run.failed.values(), *listing.unreadable.values()]
                problem = next(iter(failed), None)
            audited = last_audits(catalogue, jobs)
        if context.selected_asset_keys:
            counts = {"audited": len(run.done), "left": len(run.left), "failed": len(failed)}
            metadata = _metadata(counts, names, audited)
            yield dg.MaterializeResult(asset_key=asset, metadata=metadata)
        now_micros, recent = wall_clock(), settings.recent_micros
        judged = [judge_audit(job, audited.get(job), now_micros, recent) for job in names]
        for key in sorted(context.selected_asset_check_keys, key=lambda one: one.name):
            verdict = fleet_verdict([_RULES[key.name]], judged)
            yield fleet_check_result(verdict, key.name, asset, when="audited at")
        if problem is not None:
            fail(problem)

    return arroyo_audit_jobs


def _metadata(
    counts: Mapping[str, int], jobs: Sequence[str], audited: Mapping[str, CheckedJob]
) -> dict[str, Any]:
    known = [audited[job] for job in jobs if job in audited]
    oldest = min((one.at_micros for one in known), default=None)
    worst = sorted(known, key=lambda one: (-len(one.verdict.errors), one.at_micros))
    return shown.known(
        {
            "arroyo/jobs_with_errors": sum(not one.verdict.passed for one in known),
            "arroyo/jobs_failed": counts["failed"] or None,
            "arroyo/jobs_never_audited": len(jobs) - len(known),
            "arroyo/oldest_audit": shown.timestamp(oldest),
            "arroyo/jobs_audited": counts["audited"],
            "arroyo/jobs_left": counts["left"],
            "jobs": shown.table(map(_line, worst)),
        }
    )


def _line(one: CheckedJob) -> dict[str, Any]:
    return {
        "job": one.job,
        "errors": len(one.verdict.errors),
        "findings": len(one.verdict.findings),
        "objects": shown.number(one.verdict.inspected),
        "level": one.level,
        "audited at": shown.time_of_day(one.at_micros),
    }
