"""When jobs are compacted and collected: schedules that ask the store what there is to do."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import dagster as dg

from arroyo_dagster.errors import ArroyoStateError
from arroyo_dagster.orchestration.compaction import CompactionConfig
from arroyo_dagster.orchestration.gc import (
    DeadJobsConfig,
    GcConfig,
    OrphansConfig,
    dead_jobs_backlog,
    orphans_backlog,
)
from arroyo_dagster.orchestration.resources import ArroyoStateStore
from arroyo_dagster.orchestration.schedules import build_due_schedule
from arroyo_dagster.orchestration.translator import Naming

COMPACTION_CRON = "17 * * * *"
GC_CRON = "43 3 * * *"
ORPHANS_CRON = "13 4 * * 0"
DEAD_JOBS_CRON = "33 4 * * 0"
MIN_BACKLOG = 64


@dataclass(frozen=True, kw_only=True)
class MaintenanceOptions:
    """How jobs are compacted and collected by the schedules.

    Attributes:
        min_backlog: a job is compacted once so many of its files were never merged.
        compaction, gc, orphans, dead_jobs: the configuration of these runs; they delete only where
            theirs says so.
    """

    min_backlog: int = MIN_BACKLOG
    compaction: CompactionConfig | None = None
    gc: GcConfig | None = None
    orphans: OrphansConfig | None = None
    dead_jobs: DeadJobsConfig | None = None


def build_maintenance_job(name: str, naming: Naming, *assets: dg.AssetsDefinition) -> Any:
    """A job of these assets, a run per job of the fleet, its Spark work in the run's process."""
    config = dg.PartitionedConfig(
        naming.jobs,
        run_config_for_partition_key_fn=lambda key: {},
        tags_for_partition_key_fn=lambda key: {"arroyo/job_id": key},
    )
    return dg.define_asset_job(
        name,
        selection=dg.AssetSelection.assets(*assets),
        config=config,
        executor_def=dg.in_process_executor,
        run_tags={"dagster/priority": "-1", dg.MAX_RUNTIME_SECONDS_TAG: "7200"},
    )


def build_maintenance_schedules(
    naming: Naming,
    compaction_job: Any,
    gc_job: Any,
    orphans_job: Any,
    dead_jobs_job: Any,
    options: MaintenanceOptions,
    *,
    compaction_cron: str = COMPACTION_CRON,
    gc_cron: str = GC_CRON,
    orphans_cron: str = ORPHANS_CRON,
    dead_jobs_cron: str = DEAD_JOBS_CRON,
    timezone: str = "UTC",
    running: bool = False,
) -> list[dg.ScheduleDefinition]:
    """The schedules: each asks the store what there is to do, and runs where there is enough."""
    gc = options.gc or GcConfig()
    compaction = options.compaction or CompactionConfig()
    return [
        build_due_schedule(
            "arroyo_compaction_schedule",
            compaction_job,
            compaction_cron,
            naming=naming,
            backlog=compaction_backlogs,
            min_backlog=options.min_backlog,
            run_config=dg.RunConfig({"arroyo_compacted_state": compaction}),
            running=running,
            timezone=timezone,
        ),
        build_due_schedule(
            "arroyo_gc_schedule",
            gc_job,
            gc_cron,
            naming=naming,
            backlog=lambda store: _over_jobs(store, _expiry_backlog(gc.keep_epochs or 2)),
            run_config=dg.RunConfig({"arroyo_retained_epochs": gc}),
            running=running,
            timezone=timezone,
        ),
        build_due_schedule(
            "arroyo_orphans_schedule",
            orphans_job,
            orphans_cron,
            naming=naming,
            backlog=orphans_backlog,
            run_config=dg.RunConfig({"arroyo_orphans": options.orphans or OrphansConfig()}),
            running=running,
            timezone=timezone,
        ),
        build_due_schedule(
            "arroyo_dead_jobs_schedule",
            dead_jobs_job,
            dead_jobs_cron,
            naming=naming,
            backlog=dead_jobs_backlog,
            run_config=dg.RunConfig({"arroyo_dead_jobs": options.dead_jobs or DeadJobsConfig()}),
            running=running,
            timezone=timezone,
        ),
    ]


def _over_jobs(store: ArroyoStateStore, backlog: Callable[[Any, Any], int]) -> Mapping[str, int]:
    """The backlog of every job that can be read; the sensor and the checks tell of the others."""
    from arroyo_dagster.state.storage.concurrency import concurrently

    reading = store.reading()

    def of_job(paths: Any) -> int:
        try:
            return backlog(reading, paths)
        except ArroyoStateError:
            return 0

    jobs = store.jobs()
    return dict(zip((job.root for job in jobs), concurrently(of_job, jobs), strict=True))


def compaction_backlogs(store: ArroyoStateStore) -> Mapping[str, int]:
    """How many files of each job were never merged; by its root."""
    from arroyo_dagster.state.local.compaction import compaction_backlog

    return _over_jobs(store, compaction_backlog)


def _expiry_backlog(keep_epochs: int) -> Callable[[Any, Any], int]:
    def backlog(store: Any, paths: Any) -> int:
        from arroyo_dagster.state.local.gc import expiry_backlog

        return expiry_backlog(store, paths, keep_epochs)

    return backlog
