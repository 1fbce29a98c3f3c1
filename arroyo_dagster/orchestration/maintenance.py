"""What keeps state small, as assets: files compacted, old epochs removed; and when."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from arroyo_dagster.errors import ArroyoStateError
from arroyo_dagster.orchestration.checks import (
    FILES_EXIST,
    check_result,
    epoch_verdict,
)
from arroyo_dagster.orchestration.compaction import (
    CompactionConfig,
    retries,
)
from arroyo_dagster.orchestration.failures import as_failure
from arroyo_dagster.orchestration.partitions import job_of
from arroyo_dagster.orchestration.resources import ArroyoStateStore
from arroyo_dagster.orchestration.runners import MaintenanceRunner
from arroyo_dagster.orchestration.schedules import build_due_schedule
from arroyo_dagster.orchestration.translator import (
    COMPACTED_STATE,
    RETAINED_EPOCHS,
    Naming,
)

if TYPE_CHECKING:
    from arroyo_dagster.state.local.gc import ExpireOutcome

COMPACTION_CRON = "17 * * * *"
GC_CRON = "43 3 * * *"
MIN_BACKLOG = 64
_CONCURRENT_JOBS = 16


class GcConfig(dg.Config):
    """Which epochs of a job stay."""

    keep_epochs: int = Field(default=10, ge=2, description="So many of the newest epochs stay.")
    dry_run: bool = Field(default=True, description="Show what would go; deleting is opt-in.")


@dataclass(frozen=True, kw_only=True)
class MaintenanceOptions:
    """How jobs are compacted, and their epochs expired, by the schedules.

    Attributes:
        min_backlog: a job is compacted once so many of its files were never merged.
        compaction, gc: the configuration of these runs; they delete only where `gc` says so.
    """

    min_backlog: int = MIN_BACKLOG
    compaction: CompactionConfig | None = None
    gc: GcConfig | None = None


# ---- expiry --------------------------------------------------------------------------------------


def build_retained_epochs(naming: Naming) -> dg.AssetsDefinition:
    """The asset of the epochs that stay, with a check that they are whole afterwards."""
    key = naming.key(RETAINED_EPOCHS)

    @dg.multi_asset(
        name="arroyo_retained_epochs",
        specs=[
            naming.spec(RETAINED_EPOCHS, deps=[COMPACTED_STATE]).replace_attributes(skippable=True)
        ],
        check_specs=[
            dg.AssetCheckSpec(
                FILES_EXIST,
                asset=key,
                blocking=True,
                description="Every file that the newest epoch lists is still there.",
            )
        ],
        pool="arroyo_gc",
        retry_policy=retries(),
    )
    def arroyo_retained_epochs(  # type: ignore[no-untyped-def]
        context: dg.AssetExecutionContext,
        config: GcConfig,
        arroyo_store: ArroyoStateStore,
        arroyo_runner: MaintenanceRunner,
    ):
        paths = job_of(context.partition_key)
        with as_failure():
            # Credentials that cannot delete are enough for a dry run.
            store = arroyo_store.reading() if config.dry_run else arroyo_store.writable()
            outcome = arroyo_runner.expire(
                store,
                paths,
                keep_epochs=config.keep_epochs,
                yes=not config.dry_run,
                owner=f"dagster run {context.run.run_id}",
            )
            verdict = epoch_verdict(FILES_EXIST, arroyo_store.reading(), [paths])
        would = "would go" if config.dry_run else "went"
        context.log.info(
            f"{len(outcome.plan.epochs)} epochs, {outcome.files} files, {outcome.size_bytes} "
            f"bytes {would}; {outcome.kept_epochs} epochs stay"
        )
        if outcome.done:
            yield dg.MaterializeResult(asset_key=key, metadata=_expiry_shown(outcome))
        yield check_result(verdict, FILES_EXIST, key, metadata=_expiry_planned(outcome))

    return arroyo_retained_epochs


def _expiry_shown(outcome: "ExpireOutcome") -> dict[str, Any]:
    return {
        "arroyo/kept_epochs": outcome.kept_epochs,
        "arroyo/oldest_epoch": outcome.plan.keep_from,
        "arroyo/removed_epochs": len(outcome.plan.epochs),
        "arroyo/removed_files": outcome.files,
        "arroyo/removed_bytes": outcome.size_bytes,
    }


def _expiry_planned(outcome: "ExpireOutcome") -> dict[str, Any]:
    done = "removed" if outcome.done else "to be removed"
    return {
        f"arroyo/epochs {done}": len(outcome.plan.epochs),
        f"arroyo/files {done}": outcome.files,
        f"arroyo/bytes {done}": outcome.size_bytes,
    }


# ---- when ----------------------------------------------------------------------------------------


def build_maintenance_job(name: str, naming: Naming, asset: dg.AssetsDefinition) -> Any:
    """A job of one asset, a run per job of the fleet, its Spark work in the process of the run."""
    config = dg.PartitionedConfig(
        naming.jobs,
        run_config_for_partition_key_fn=lambda key: {},
        tags_for_partition_key_fn=lambda key: {"arroyo/job_id": key},
    )
    return dg.define_asset_job(
        name,
        selection=dg.AssetSelection.assets(asset),
        config=config,
        executor_def=dg.in_process_executor,
        run_tags={"dagster/priority": "-1", dg.MAX_RUNTIME_SECONDS_TAG: "7200"},
    )


def build_maintenance_schedules(
    naming: Naming,
    compaction_job: Any,
    gc_job: Any,
    options: MaintenanceOptions,
    *,
    compaction_cron: str = COMPACTION_CRON,
    gc_cron: str = GC_CRON,
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
            backlog=lambda store: _over_jobs(store, _expiry_backlog(gc.keep_epochs)),
            run_config=dg.RunConfig({"arroyo_retained_epochs": gc}),
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
