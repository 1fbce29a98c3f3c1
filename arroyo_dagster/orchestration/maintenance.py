"""Files compacted, as an asset; and when that is done and garbage collected, see `gc.py`."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from arroyo_dagster.errors import ArroyoStateError
from arroyo_dagster.orchestration import shown
from arroyo_dagster.orchestration.checks import (
    RESTORABLE,
    check_result,
    epoch_verdict,
)
from arroyo_dagster.orchestration.failures import as_failure, failure_of
from arroyo_dagster.orchestration.gc import (
    DeadJobsConfig,
    GcConfig,
    OrphansConfig,
    dead_jobs_backlog,
    orphans_backlog,
)
from arroyo_dagster.orchestration.partitions import job_of
from arroyo_dagster.orchestration.resources import ArroyoStateStore
from arroyo_dagster.orchestration.runners import MaintenanceRunner
from arroyo_dagster.orchestration.schedules import build_due_schedule
from arroyo_dagster.orchestration.translator import (
    COMPACTED_STATE,
    OPERATOR_METADATA,
    Naming,
)
from arroyo_dagster.state.model.compaction import (
    MEBIBYTE,
    CompactionPolicy,
    CompactionSettings,
    MergeOutcome,
)
from arroyo_dagster.state.planning.health import row_parity

if TYPE_CHECKING:
    from arroyo_dagster.state.local.compaction import CompactionOutcome

ROW_PARITY = "row_parity"
COMPACTION_CRON = "17 * * * *"
GC_CRON = "43 3 * * *"
ORPHANS_CRON = "13 4 * * 0"
DEAD_JOBS_CRON = "33 4 * * 0"
MIN_BACKLOG = 64
_CONCURRENT_JOBS = 16


class CompactionConfig(dg.Config):
    """How a job is compacted."""

    policy: str = Field(
        default=CompactionPolicy.BIN_PACK.value,
        description="bin-pack: small neighbours only; full: all files of every table.",
    )
    target_file_mb: int = Field(
        default=128, ge=1, description="A bin-pack merge takes files of so many MiB together."
    )
    min_files: int = Field(
        default=4, ge=2, description="It takes at least so many files that were never merged."
    )
    wait_seconds: float = Field(
        default=10.0,
        ge=0,
        description="How long to wait for a running job to take over what was merged.",
    )
    dry_run: bool = Field(default=False, description="Plan, and change nothing.")

    def settings(self) -> CompactionSettings:
        """The same for the state package.

        Raises:
            dagster.Failure: there is no such policy.
        """
        known = [policy.value for policy in CompactionPolicy]
        if self.policy not in known:
            raise dg.Failure(
                f"there is no policy {self.policy!r}. Next: choose one of {', '.join(known)}",
                allow_retries=False,
            )
        return CompactionSettings(
            policy=CompactionPolicy(self.policy),
            target_bytes=self.target_file_mb * MEBIBYTE,
            min_files=self.min_files,
        )


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


# ---- compaction ----------------------------------------------------------------------------------


def build_compacted_state(naming: Naming) -> dg.AssetsDefinition:
    """The asset of a job's merged files, with the two blocking checks of a compaction."""
    key = naming.key(COMPACTED_STATE)

    @dg.multi_asset(
        name="arroyo_compacted_state",
        specs=[
            naming.spec(COMPACTED_STATE, deps=[OPERATOR_METADATA]).replace_attributes(
                skippable=True  # what found nothing to do has made nothing
            )
        ],
        check_specs=[
            dg.AssetCheckSpec(
                ROW_PARITY,
                asset=key,
                blocking=True,
                description="A restore loads of the merged files what it loaded of the others.",
            ),
            dg.AssetCheckSpec(
                RESTORABLE,
                asset=key,
                blocking=True,
                description="The newest epoch, as it is after the compaction, can be restored.",
            ),
        ],
        pool="arroyo_compaction",
        retry_policy=_retries(),
    )
    def arroyo_compacted_state(  # type: ignore[no-untyped-def]
        context: dg.AssetExecutionContext,
        config: CompactionConfig,
        arroyo_store: ArroyoStateStore,
        arroyo_runner: MaintenanceRunner,
    ):
        paths = job_of(context.partition_key)
        merges: list[MergeOutcome] = []

        def on_merge(outcome: MergeOutcome, left: int) -> None:
            merges.append(outcome)
            table = f"{outcome.merged.operator}.{outcome.merged.table}"
            context.log.info(f"merged {len(outcome.merged.input_paths)} of {table}, {left} left")

        begun = time.monotonic()
        try:
            outcome = arroyo_runner.compact(
                arroyo_store.writable(),
                paths,
                config.settings(),
                owner=f"dagster run {context.run.run_id}",
                wait_seconds=config.wait_seconds,
                dry_run=config.dry_run,
                on_merge=on_merge,
            )
        except ArroyoStateError as error:
            if not row_parity(merges).passed:
                yield check_result(row_parity(merges), ROW_PARITY, key)
            raise failure_of(error) from error
        context.log.info(_in_words(outcome, dry_run=config.dry_run))
        if outcome.changed:
            metadata = _compaction_shown(outcome, time.monotonic() - begun)
            version = dg.DataVersion(_version_of(outcome))
            yield dg.MaterializeResult(asset_key=key, metadata=metadata, data_version=version)
        yield check_result(row_parity(outcome.merges), ROW_PARITY, key)
        with as_failure():
            verdict = epoch_verdict(RESTORABLE, arroyo_store.reading(), [paths])
        yield check_result(verdict, RESTORABLE, key)

    return arroyo_compacted_state


def _retries() -> dg.RetryPolicy:
    return dg.RetryPolicy(
        max_retries=2, delay=10, backoff=dg.Backoff.EXPONENTIAL, jitter=dg.Jitter.PLUS_MINUS
    )


def _version_of(outcome: "CompactionOutcome") -> str:
    return outcome.record.name if outcome.record else f"e{outcome.epoch}"


def _in_words(outcome: "CompactionOutcome", *, dry_run: bool) -> str:
    plan = outcome.plan
    if dry_run:
        return (
            f"dry run: {len(plan.merges)} merges would leave {plan.files_after} of "
            f"{plan.files_before} files"
        )
    if not outcome.changed:
        reasons = sorted({one.reason for one in plan.left_out})
        return f"nothing to do at epoch {plan.epoch}: {'; '.join(reasons) or 'no tables'}"
    if outcome.published == "record" and outcome.epoch is None:
        return "merged; the job takes it over at its next checkpoint"
    return f"merged; epoch {outcome.epoch} lists {outcome.files_after} files"


def _compaction_shown(outcome: "CompactionOutcome", seconds: float) -> dict[str, Any]:
    plan = outcome.plan
    return shown.known(
        {
            "arroyo/planned_at_epoch": plan.epoch,
            "arroyo/taken_over_at_epoch": outcome.epoch,
            "arroyo/published_as": outcome.published,
            "arroyo/merges": len(outcome.merges),
            "arroyo/files_before": plan.files_before,
            "arroyo/files_after": outcome.files_after,
            "arroyo/files_forecast": plan.files_after,
            "arroyo/bytes_before": plan.size_bytes_before,
            "arroyo/bytes_after": outcome.size_bytes_after,
            "arroyo/rows_in": sum(merge.rows_in for merge in outcome.merges),
            "arroyo/rows_out": sum(merge.rows_out for merge in outcome.merges),
            "arroyo/seconds": round(seconds, 3),
            "dropped rows": shown.table(_dropped(outcome)),
            "merges": shown.table(map(_merge_line, outcome.merges)),
            "left out": shown.table(
                {"operator": one.operator, "table": one.table, "why": one.reason}
                for one in plan.left_out
            ),
        }
    )


def _dropped(outcome: "CompactionOutcome") -> Iterator[Mapping[str, Any]]:
    total: dict[str, int] = {}
    for merge in outcome.merges:
        for reason, count in merge.dropped.items():
            total[reason] = total.get(reason, 0) + count
    return ({"why": reason, "rows": count} for reason, count in sorted(total.items()))


def _merge_line(merge: MergeOutcome) -> Mapping[str, Any]:
    return {
        "operator": merge.merged.operator,
        "table": merge.merged.table,
        "files in": len(merge.merged.input_paths),
        "files out": len(merge.merged.output_paths),
        "bytes in": merge.size_bytes_in,
        "bytes out": merge.size_bytes_out,
        "rows in": merge.rows_in,
        "rows out": merge.rows_out,
    }


# ---- when ----------------------------------------------------------------------------------------


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
            backlog=lambda store: _over_jobs(store, _compaction_backlog),
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


def _compaction_backlog(store: Any, paths: Any) -> int:
    from arroyo_dagster.state.local.compaction import compaction_backlog

    return compaction_backlog(store, paths)


def _expiry_backlog(keep_epochs: int) -> Callable[[Any, Any], int]:
    def backlog(store: Any, paths: Any) -> int:
        from arroyo_dagster.state.local.gc import expiry_backlog

        return expiry_backlog(store, paths, keep_epochs)

    return backlog
