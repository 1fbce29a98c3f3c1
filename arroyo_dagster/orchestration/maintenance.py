"""Schedules that compact jobs and run gc, according to the backlog in the store."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import dagster as dg

from arroyo_dagster.errors import ArroyoStateError
from arroyo_dagster.orchestration.batch_requests import (
    BUDGET_MINUTES,
    MOST_JOBS,
    PARALLEL_JOBS,
    BatchConfig,
    BatchKind,
    BatchRequests,
)
from arroyo_dagster.orchestration.batches import asset_events
from arroyo_dagster.orchestration.catalog.assets import CatalogConfig, new_epochs
from arroyo_dagster.orchestration.compaction.assets import CompactionConfig
from arroyo_dagster.orchestration.gc.assets import (
    DeadJobsConfig,
    GcConfig,
    OrphansConfig,
    dead_jobs_backlog,
    orphans_backlog,
)
from arroyo_dagster.orchestration.resources import ArroyoStateStore
from arroyo_dagster.orchestration.schedules import maintenance_tags
from arroyo_dagster.orchestration.translator import Naming
from arroyo_dagster.state.model.settings import Setting

COMPACTION_CRON = "17 * * * *"
GC_CRON = "43 3 * * *"
ORPHANS_CRON = "13 4 * * 0"
DEAD_JOBS_CRON = "33 4 * * 0"
MIN_BACKLOG = 64


@dataclass(frozen=True, kw_only=True)
class MaintenanceOptions:
    """How the schedules compact jobs and run gc.

    Attributes:
        compaction, gc, orphans, dead_jobs: the configuration of these runs; they delete only if
            their own configuration enables it.
    """

    min_backlog: Annotated[
        int, Setting(help="Compact a job once this many of its files have never been merged.")
    ] = MIN_BACKLOG
    most_jobs: Annotated[
        int,
        Setting(
            minimum=1,
            help="The maximum number of jobs per run of a schedule, those with the largest "
            "backlog first.",
        ),
    ] = MOST_JOBS
    budget_minutes: Annotated[
        float,
        Setting(
            fractions=True,
            above=0,
            help="A run of a schedule starts no further job after this many minutes.",
        ),
    ] = BUDGET_MINUTES
    parallel_jobs: Annotated[
        int,
        Setting(
            minimum=1,
            help="A run of a schedule serves this many jobs at the same time, in one process and "
            "one Spark session.",
        ),
    ] = PARALLEL_JOBS
    compaction: CompactionConfig | None = None
    gc: GcConfig | None = None
    orphans: OrphansConfig | None = None
    dead_jobs: DeadJobsConfig | None = None


def build_maintenance_job(
    name: str, naming: Naming, *assets: dg.AssetsDefinition, description: str
) -> Any:
    """Build a job of these assets: a run per job of the fleet, with Spark work in the run's
    process.
    """
    config = dg.PartitionedConfig(
        naming.jobs,
        run_config_for_partition_key_fn=lambda key: {},
        tags_for_partition_key_fn=lambda key: {"arroyo/job_id": key},
    )
    return dg.define_asset_job(
        naming.name(name),
        description=description,
        selection=dg.AssetSelection.assets(*assets),
        config=config,
        executor_def=dg.in_process_executor,
        run_tags=maintenance_tags(naming.deployment),
    )


class CompactionBatch(BatchConfig):
    """A batch of compactions."""

    settings: CompactionConfig = CompactionConfig()


class GcBatch(BatchConfig):
    """A batch of expiries."""

    settings: GcConfig = GcConfig()


class OrphansBatch(BatchConfig):
    """A batch of gc runs for orphans."""

    settings: OrphansConfig = OrphansConfig()


class DeadJobsBatch(BatchConfig):
    """A batch of gc runs for dead jobs."""

    settings: DeadJobsConfig = DeadJobsConfig()


class RefreshBatch(BatchConfig):
    """A batch of catalogue refreshes."""

    settings: CatalogConfig = CatalogConfig()


@dataclass(frozen=True, kw_only=True)
class MaintenanceAssets:
    """The assets that batches materialize."""

    catalogue: dg.AssetsDefinition
    compacted: dg.AssetsDefinition
    expiry_assets: dg.AssetsDefinition
    orphans: dg.AssetsDefinition
    dead_jobs: dg.AssetsDefinition
    journal: dg.AssetsDefinition


def build_batches(
    naming: Naming, options: MaintenanceOptions, assets: MaintenanceAssets
) -> dict[str, BatchRequests]:
    """Return the kinds of maintenance that run in batches, by the name of the schedule."""
    gc = options.gc or GcConfig()
    # Nobody waits in a batch: a running job takes over what was merged at its next checkpoint.
    compaction = (options.compaction or CompactionConfig()).model_copy(update={"wait_seconds": 0.0})
    kinds: list[tuple[str, BatchKind, dg.Config]] = [
        (
            "refresh",
            BatchKind(
                name=naming.name("arroyo_refresh_fleet"),
                description="Catalogue new epochs of the jobs with the most new epochs.",
                config=RefreshBatch,
                events=asset_events(assets.catalogue),
                backlog=new_epochs,
                single=naming.name("arroyo_refresh"),
                changes=False,
            ),
            CatalogConfig(),
        ),
        (
            "compaction",
            BatchKind(
                name=naming.name("arroyo_compaction_fleet"),
                description="Compact the jobs with the most unmerged files.",
                config=CompactionBatch,
                events=asset_events(assets.compacted),
                backlog=compaction_backlogs,
                min_backlog=options.min_backlog,
                single=naming.name("arroyo_compaction"),
                pool=naming.name("arroyo_compaction"),
            ),
            compaction,
        ),
        (
            "gc",
            BatchKind(
                name=naming.name("arroyo_gc_fleet"),
                description="Expire old epochs of the jobs with the most expired epochs.",
                config=GcBatch,
                events=asset_events(assets.expiry_assets, assets.journal),
                backlog=lambda store: _over_jobs(store, _expiry_backlog(gc.keep_epochs or 2)),
                single=naming.name("arroyo_gc"),
                pool=naming.name("arroyo_gc"),
            ),
            gc,
        ),
        (
            "orphans",
            BatchKind(
                name=naming.name("arroyo_collect_orphans_fleet"),
                description="Delete orphans of every job that allows it.",
                config=OrphansBatch,
                events=asset_events(assets.orphans, assets.journal),
                backlog=orphans_backlog,
                single=naming.name("arroyo_collect_orphans"),
                pool=naming.name("arroyo_gc"),
            ),
            options.orphans or OrphansConfig(),
        ),
        (
            "dead_jobs",
            BatchKind(
                name=naming.name("arroyo_remove_dead_jobs_fleet"),
                description="Delete jobs that Arroyo's API or database proves to be gone.",
                config=DeadJobsBatch,
                events=asset_events(assets.dead_jobs, assets.journal),
                backlog=dead_jobs_backlog,
                single=naming.name("arroyo_remove_dead_jobs"),
                pool=naming.name("arroyo_gc"),
            ),
            options.dead_jobs or DeadJobsConfig(),
        ),
    ]
    return {
        name: BatchRequests(
            naming=naming,
            kind=kind,
            settings=settings,
            most_jobs=options.most_jobs,
            budget_minutes=options.budget_minutes,
            parallel_jobs=options.parallel_jobs,
        )
        for name, kind, settings in kinds
    }


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
    """Return how many files of each job were never merged, by its root."""
    from arroyo_dagster.state.operations.compaction.plan import compaction_backlog

    return _over_jobs(store, compaction_backlog)


def _expiry_backlog(keep_epochs: int) -> Callable[[Any, Any], int]:
    def backlog(store: Any, paths: Any) -> int:
        from arroyo_dagster.state.operations.gc.expire import expiry_backlog

        return expiry_backlog(store, paths, keep_epochs)

    return backlog
