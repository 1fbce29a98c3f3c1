"""Merge a job's files, as an asset: plan, verify, and compare with the forecast."""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from arroyo_dagster.errors import ArroyoStateError
from arroyo_dagster.orchestration.catalog.checks import RESTORABLE, check_result, kept_verdict
from arroyo_dagster.orchestration.compaction.rendering import compaction_metadata
from arroyo_dagster.orchestration.compaction.rewrite import (
    RewriteStep,
    is_arroyo_job,
    rewritten_events,
)
from arroyo_dagster.orchestration.directory import ArroyoDirectory
from arroyo_dagster.orchestration.failures import as_failure, name_failed_checks, of_selected
from arroyo_dagster.orchestration.partitions import job_of
from arroyo_dagster.orchestration.resources import ArroyoStateStore
from arroyo_dagster.orchestration.runners import MaintenanceRunner
from arroyo_dagster.orchestration.settings import configured, setting_field, settings_config
from arroyo_dagster.orchestration.skips import end_skipped_steps, lease_wait_seconds, leases_skip
from arroyo_dagster.orchestration.translator import (
    COMPACTED_STATE,
    OPERATOR_METADATA,
    Naming,
    specified_assets,
)
from arroyo_dagster.state.model.compaction import (
    AdoptionSettings,
    CompactionSettings,
    MergeOutcome,
)
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.leases import LeaseSettings
from arroyo_dagster.state.model.progress import progress_logger
from arroyo_dagster.state.model.rewrite import QuietSettings
from arroyo_dagster.state.planning.verify.checks import effective, row_parity

if TYPE_CHECKING:
    from arroyo_dagster.state.operations.compaction.publish import CompactionOutcome

ROW_PARITY = "row_parity"
EFFECTIVE = "effective"


class CompactionConfig(settings_config(CompactionSettings)):  # type: ignore[misc]
    """How to compact a job."""

    wait_seconds: float = setting_field(AdoptionSettings, "wait_seconds", default=10.0)
    quiet_seconds: float = setting_field(QuietSettings, "quiet_seconds")
    lease_wait_seconds: float = setting_field(LeaseSettings, "lease_wait_seconds")
    dry_run: bool = Field(default=False, description="Plan only; change nothing.")

    def settings(self) -> CompactionSettings:
        """Return the same settings for the state package.

        Raises:
            dagster.Failure: there is no such policy or order.
        """
        return configured(CompactionSettings, self)


def build_compacted_state(naming: Naming) -> dg.AssetsDefinition:
    """Build the asset of a job's merged files, with the checks of a compaction."""
    key = naming.key(COMPACTED_STATE)

    @specified_assets(
        name=naming.name("arroyo_compacted_state"),
        specs=[
            naming.spec(COMPACTED_STATE, deps=[OPERATOR_METADATA]).replace_attributes(
                skippable=True  # what found nothing to do has made nothing
            )
        ],
        check_specs=[
            naming.check_spec(
                ROW_PARITY,
                COMPACTED_STATE,
                "The merged files yield exactly the rows of the files they replace.",
                blocking=True,
            ),
            naming.check_spec(
                RESTORABLE,
                COMPACTED_STATE,
                "The newest epoch can be restored after the compaction.",
                blocking=True,
            ),
            naming.check_spec(
                EFFECTIVE,
                COMPACTED_STATE,
                "A restore reads as few files as forecast, and fewer than before.",
            ),
        ],
        pool=naming.name("arroyo_compaction"),
        can_subset=True,  # so that a check of what was not done may be left out
    )
    @naming.bind
    @end_skipped_steps(key)
    @name_failed_checks
    def arroyo_compacted_state(  # type: ignore[no-untyped-def]
        context: dg.AssetExecutionContext,
        config: CompactionConfig,
        arroyo_store: ArroyoStateStore,
        arroyo_runner: MaintenanceRunner,
        arroyo_directory: ArroyoDirectory,
    ):
        with as_failure(), leases_skip():
            paths = job_of(context.partition_key)
            if key in context.selected_asset_keys:
                runner, checks = arroyo_runner, (ROW_PARITY, EFFECTIVE)
                events = (
                    rewritten_events(
                        context,
                        paths,
                        key,
                        RewriteStep(
                            store=arroyo_store,
                            directory=arroyo_directory,
                            runner=runner,
                            settings=config.settings(),
                            quiet_seconds=config.quiet_seconds,
                            lease_wait_seconds=lease_wait_seconds(context, config),
                            dry_run=config.dry_run,
                        ),
                        checks,
                    )
                    if is_arroyo_job(arroyo_store, paths)
                    else _compacted_events(paths, config, arroyo_store, runner, context, key)
                )
                yield from of_selected(context, events)
            if dg.AssetCheckKey(key, RESTORABLE) in context.selected_asset_check_keys:
                verdict = kept_verdict(RESTORABLE, arroyo_store, paths)
                yield check_result(verdict, RESTORABLE, key)

    return arroyo_compacted_state


def _compacted_events(
    paths: JobPaths,
    config: CompactionConfig,
    store: ArroyoStateStore,
    runner: MaintenanceRunner,
    context: dg.AssetExecutionContext,
    key: dg.AssetKey,
) -> Iterator[Any]:
    """Compact one job, and give what Dagster shows of it; nothing of what was not looked at."""
    merges: list[MergeOutcome] = []
    published: list[CompactionOutcome] = []
    begun = time.monotonic()

    def materialized(outcome: "CompactionOutcome") -> "dg.MaterializeResult[Any]":
        return dg.MaterializeResult(
            asset_key=key,
            metadata=compaction_metadata(outcome, time.monotonic() - begun),
            data_version=dg.DataVersion(version_of(outcome)),
        )

    try:
        outcome = compacted(
            paths, config, store, runner, context, merges=merges, published=published
        )
    except ArroyoStateError:
        if not row_parity(merges).passed:
            yield check_result(row_parity(merges), ROW_PARITY, key)
        raise
    except Exception:
        raise
    except BaseException:  # an interrupt
        yield from map(materialized, published)
        raise
    if outcome.changed:
        yield materialized(outcome)
    if outcome.merges:
        yield check_result(row_parity(outcome.merges), ROW_PARITY, key)
        verdict = effective(outcome.plan, outcome.after)
        warn, kept = dg.AssetCheckSeverity.WARN, not verdict.findings
        yield check_result(verdict, EFFECTIVE, key, severity=warn, passed=kept)


def compacted(
    paths: JobPaths,
    config: CompactionConfig,
    store: ArroyoStateStore,
    runner: MaintenanceRunner,
    context: Any,
    *,
    merges: list[MergeOutcome],
    published: "list[CompactionOutcome]",
) -> "CompactionOutcome":
    """Compact one job, and report it in the log of the run.

    Args:
        merges: receives every completed merge, also if it is not published.
        published: receives what was published, also if an interrupt follows.

    Raises:
        ArroyoStateError: see `state.operations.compaction.job.run_compaction`.
    """
    from arroyo_dagster.state.operations.compaction.job import CompactionOptions
    from arroyo_dagster.state.operations.compaction.plan import plan_compaction
    from arroyo_dagster.state.operations.compaction.publish import CompactionOutcome

    def on_merge(outcome: MergeOutcome, left: int) -> None:
        merges.append(outcome)
        table = f"{outcome.merged.operator}.{outcome.merged.table}"
        context.log.info(
            f"merged {len(outcome.merged.input_paths)} files of {table}, {left} merges left"
        )

    if config.dry_run:
        plan = plan_compaction(store.reading(), paths, config.settings(), sampled=True)
        outcome = CompactionOutcome.of_plan(plan)
    else:
        options = CompactionOptions(
            owner=f"dagster run {context.run.run_id}",
            lease_wait_seconds=lease_wait_seconds(context, config),
            on_lease=context.log.info,
            wait_seconds=config.wait_seconds,
            sampled=True,
            on_merge=on_merge,
            on_progress=progress_logger(context.log.info),
            on_published=published.append,
        )
        outcome = runner.run_compaction(store.writable(), paths, config.settings(), options)
    context.log.info(_format_outcome(outcome, dry_run=config.dry_run))
    return outcome


def version_of(outcome: "CompactionOutcome") -> str:
    """Return the data version of merged files: the record, or the epoch, that lists them."""
    return outcome.record.name if outcome.record else f"e{outcome.epoch}"


def _format_outcome(outcome: "CompactionOutcome", *, dry_run: bool) -> str:
    plan = outcome.plan
    if dry_run:
        return (
            f"dry run: {len(plan.merges)} merges would leave {plan.files_after} of "
            f"{plan.files_before} files"
        )
    if not outcome.changed and outcome.waiting:
        return (
            f"nothing more to do at epoch {plan.epoch}: {len(outcome.waiting)} compactions wait "
            f"until the job adopts them at its next checkpoint; the first is {outcome.waiting[0]}"
        )
    if not outcome.changed:
        reasons = sorted({one.reason for one in plan.left_out})
        return f"nothing to do at epoch {plan.epoch}: {'; '.join(reasons) or 'no tables'}"
    if outcome.published == "record" and outcome.epoch is None:
        return "merged; the job adopts the files at its next checkpoint"
    return f"merged; epoch {outcome.epoch} lists {outcome.files_after} files"
