"""The asset `health`: how the state of all jobs develops; a check for each rule without a level."""

from collections.abc import Iterator, Sequence
from typing import Any

import dagster as dg

from arroyo_dagster.orchestration import rendering as shown
from arroyo_dagster.orchestration.catalog.fleet_checks import fleet_check_result, judged_check_spec
from arroyo_dagster.orchestration.directory import ArroyoDirectory
from arroyo_dagster.orchestration.failures import as_failure
from arroyo_dagster.orchestration.resources import ArroyoStateStore
from arroyo_dagster.orchestration.translator import EPOCH_CATALOG, HEALTH, Naming, specified_assets
from arroyo_dagster.state.model.health import HealthLimits
from arroyo_dagster.state.model.progress import progress_logger
from arroyo_dagster.state.model.units import format_bytes
from arroyo_dagster.state.planning.rules import HEALTH_RULES, JobHealth, fleet_verdict

_RULES = {rule.name: rule for rule in HEALTH_RULES}


def build_health(naming: Naming, limits: HealthLimits) -> dg.AssetsDefinition:
    """Build the asset with the health checks of all jobs, made by one step.

    It is not partitioned, so that Dagster plots its numbers over time. Each run brings the
    catalogue of the jobs up to date first.
    """
    asset = naming.key(HEALTH)

    @specified_assets(
        name=naming.name("arroyo_health_checks"),
        specs=[naming.spec(HEALTH, deps=[EPOCH_CATALOG], partitioned=False)],
        check_specs=[judged_check_spec(rule, naming, HEALTH, limits) for rule in HEALTH_RULES],
        can_subset=True,
    )
    @naming.bind
    def arroyo_health_checks(  # type: ignore[no-untyped-def]
        context: dg.AssetExecutionContext,
        arroyo_store: ArroyoStateStore,
        arroyo_directory: ArroyoDirectory,
    ):
        from arroyo_dagster.state.operations.catalog.health import HealthOptions, check_health

        with as_failure():
            listing = arroyo_store.listing()
            jobs = check_health(
                arroyo_store.reading(),
                arroyo_store.catalogue(),
                listing.jobs,
                arroyo_directory.directory(arroyo_store),
                limits,
                HealthOptions(
                    earlier=arroyo_store.earlier(),
                    on_progress=progress_logger(context.log.info),
                    unreadable=listing.unreadable,
                ),
            )
        if context.selected_asset_keys:
            yield dg.MaterializeResult(asset_key=asset, metadata=_metadata(jobs))
        for key in sorted(context.selected_asset_check_keys, key=lambda one: one.name):
            verdict = fleet_verdict([_RULES[key.name]], jobs)
            yield fleet_check_result(verdict, key.name, asset)

    return arroyo_health_checks


def _metadata(jobs: Sequence[JobHealth]) -> dict[str, Any]:
    failed = [(one, list(_failed(one))) for one in jobs]
    worst = sorted(failed, key=lambda job: (-len(job[1]), job[0].job))
    stored_bytes = sum(one.stored_bytes for one in jobs)
    return shown.known(
        {
            "arroyo/jobs_with_findings": sum(bool(checks) for _, checks in failed),
            "arroyo/findings": sum(len(checks) for _, checks in failed),
            "stored": format_bytes(stored_bytes),
            "arroyo/jobs": len(jobs),
            "jobs": shown.table(_line(job, checks) for job, checks in worst),
            "arroyo/stored_bytes": stored_bytes,
        }
    )


def _failed(job: JobHealth) -> Iterator[str]:
    for name, verdict in job.verdicts.items():
        if verdict is not None and verdict.findings:
            yield name


def _line(job: JobHealth, failed: Sequence[str]) -> dict[str, Any]:
    return {
        "job": job.job,
        "findings": ", ".join(failed) or "none",
        "epoch": job.epoch,
        "stored": format_bytes(job.stored_bytes),
    }
