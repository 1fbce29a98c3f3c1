"""Compaction of many jobs: a sensor that asks for runs as the backlog grows, and one run over all.

Both are opt-in: the schedule, a run per job, is the safe default.
"""

import re
import time
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from arroyo_dagster.orchestration import shown
from arroyo_dagster.orchestration.compaction import (
    CompactionConfig,
    compacted,
    compaction_shown,
    version_of,
)
from arroyo_dagster.orchestration.failures import as_failure
from arroyo_dagster.orchestration.maintenance import (
    MIN_BACKLOG,
    MaintenanceOptions,
    compaction_backlogs,
)
from arroyo_dagster.orchestration.partitions import job_of
from arroyo_dagster.orchestration.resources import ArroyoStateStore
from arroyo_dagster.orchestration.runners import MaintenanceRunner
from arroyo_dagster.orchestration.schedules import JOB_TAG
from arroyo_dagster.orchestration.sensors import sensor_status
from arroyo_dagster.orchestration.translator import COMPACTED_STATE, Naming

if TYPE_CHECKING:
    from arroyo_dagster.state.local.compaction import CompactionOutcome

_INTERVAL_SECONDS = 60
_MOST_RUNS = 10


def build_compaction_sensor(
    naming: Naming, job: Any, options: MaintenanceOptions, *, running: bool = False
) -> dg.SensorDefinition:
    """The sensor that asks for the compaction of jobs with enough files that were never merged.

    One run for an epoch, whatever becomes of it; the largest backlogs first.
    """

    @dg.sensor(
        name="arroyo_compaction_sensor",
        job=job,
        minimum_interval_seconds=_INTERVAL_SECONDS,
        default_status=sensor_status(running),
        description="Asks for the compaction of jobs with many small files.",
    )
    def arroyo_compaction_sensor(
        context: dg.SensorEvaluationContext, arroyo_store: ArroyoStateStore
    ) -> Any:
        with as_failure():
            found = compaction_backlogs(arroyo_store)
        partitions = set(context.instance.get_dynamic_partitions(str(naming.jobs.name)))
        due = {key: n for key, n in found.items() if n >= options.min_backlog and key in partitions}
        if not due:
            return dg.SkipReason(
                f"nothing due: {len(found)} jobs, none with {options.min_backlog} or more"
            )
        chosen = sorted(due, key=lambda key: (-due[key], key))[:_MOST_RUNS]
        config = options.compaction or CompactionConfig()
        return [
            dg.RunRequest(
                run_key=f"compact:{key}:{_newest(arroyo_store, key)}",
                partition_key=key,
                run_config=dg.RunConfig({"arroyo_compacted_state": config}),
                tags={JOB_TAG: key},
            )
            for key in chosen
        ]

    return arroyo_compaction_sensor


def _newest(store: ArroyoStateStore, key: str) -> str:
    from arroyo_dagster.orchestration.sensors import data_version
    from arroyo_dagster.state.backend import ParquetBackend

    backend = ParquetBackend(store.reading(), job_of(key))
    with as_failure():
        return data_version(backend.load_checkpoint_metadata(backend.epochs()[-1]))


# ---- one run over many jobs ----------------------------------------------------------------------


class FleetConfig(dg.Config):
    """Which jobs a run over many compacts."""

    min_backlog: int = Field(
        default=MIN_BACKLOG, ge=1, description="Jobs with so many files that were never merged."
    )
    most_jobs: int = Field(default=50, ge=1, description="No more than so many, the largest first.")


def build_fleet_compaction(naming: Naming) -> dg.JobDefinition:
    """One run that compacts every job with enough to do, each a step of its own.

    A step that fails holds up none of the others; re-executing the run from failure compacts the
    failed ones only.
    """
    key_of_asset = naming.key(COMPACTED_STATE)

    @dg.op(out=dg.DynamicOut(str))
    def arroyo_due_jobs(  # type: ignore[no-untyped-def]
        context: dg.OpExecutionContext, config: FleetConfig, arroyo_store: ArroyoStateStore
    ):
        with as_failure():
            found = compaction_backlogs(arroyo_store)
        due = {key: n for key, n in found.items() if n >= config.min_backlog}
        chosen = sorted(due, key=lambda key: (-due[key], key))[: config.most_jobs]
        context.log.info(f"{len(chosen)} of {len(found)} jobs are due")
        for at, key in enumerate(chosen):
            name = re.sub(r"[^A-Za-z0-9_]", "_", key)
            yield dg.DynamicOutput(key, mapping_key=f"{name}_{at}")

    @dg.op(pool="arroyo_compaction", out=dg.Out(dict))
    def arroyo_compact_job(  # type: ignore[no-untyped-def]
        context: dg.OpExecutionContext,
        config: CompactionConfig,
        key: str,
        arroyo_store: ArroyoStateStore,
        arroyo_runner: MaintenanceRunner,
    ):
        begun = time.monotonic()
        published: list[CompactionOutcome] = []

        def materialized(outcome: "CompactionOutcome") -> dg.AssetMaterialization:
            return dg.AssetMaterialization(
                asset_key=key_of_asset,
                partition=key,
                metadata=compaction_shown(outcome, time.monotonic() - begun),
                tags={"dagster/data_version": version_of(outcome)},
            )

        with as_failure():
            try:
                outcome = compacted(
                    job_of(key),
                    config,
                    arroyo_store,
                    arroyo_runner,
                    context,
                    merges=[],
                    published=published,
                )
            except Exception:
                raise
            except BaseException:  # an interrupt
                yield from map(materialized, published)
                raise
        if outcome.changed:
            yield materialized(outcome)
        yield dg.Output(
            {
                "job": key,
                "files before": outcome.plan.files_before,
                "files after": outcome.files_after,
                "published": outcome.published or "nothing",
            }
        )

    @dg.op
    def arroyo_compaction_report(
        context: dg.OpExecutionContext, found: list[dict[str, Any]]
    ) -> None:
        context.add_output_metadata(
            shown.known({"jobs": shown.table(found), "arroyo/jobs": len(found)})
        )

    @dg.job(
        name="arroyo_compaction_fleet",
        description="Compact every job with enough to do, in one run.",
        executor_def=dg.in_process_executor,
        tags={"dagster/priority": "-1", dg.MAX_RUNTIME_SECONDS_TAG: "7200"},
    )
    def arroyo_compaction_fleet() -> None:
        arroyo_compaction_report(arroyo_due_jobs().map(arroyo_compact_job).collect())

    return arroyo_compaction_fleet
