"""Stopped Arroyo jobs in the asset `compacted_state`: rewrite them in place, or show why not."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import dagster as dg

from arroyo_dagster.errors import ArroyoStateError
from arroyo_dagster.orchestration.catalog.checks import check_result
from arroyo_dagster.orchestration.compaction.rendering import plan_metadata, rewrite_metadata
from arroyo_dagster.orchestration.directory import ArroyoDirectory
from arroyo_dagster.orchestration.failures import failure_of
from arroyo_dagster.orchestration.resources import ArroyoStateStore
from arroyo_dagster.orchestration.runners import MaintenanceRunner
from arroyo_dagster.state.model.compaction import CompactionSettings, LeftOut
from arroyo_dagster.state.model.job_facts import JobCondition
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.rewrite import RewriteOutcome, RewriteShard
from arroyo_dagster.state.planning.verify.checks import effective, row_parity

if TYPE_CHECKING:
    from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory


def is_arroyo_job(store: ArroyoStateStore, paths: JobPaths) -> bool:
    """Return whether a job is an Arroyo job."""
    from arroyo_dagster.state.operations.compaction.rewrite_preconditions import (
        is_arroyo_job as of_arroyo,
    )

    return of_arroyo(store.reading(), paths)


@dataclass(frozen=True, kw_only=True)
class RewriteStep:
    """How the step of an asset rewrites jobs; times as of `RewriteOptions`."""

    store: ArroyoStateStore
    directory: ArroyoDirectory
    runner: MaintenanceRunner
    settings: CompactionSettings
    quiet_seconds: float
    lease_wait_seconds: float
    dry_run: bool


def rewritten_events(
    context: dg.AssetExecutionContext,
    paths: JobPaths,
    key: dg.AssetKey,
    step: RewriteStep,
    checks: tuple[str, str],
) -> Iterator[Any]:
    """Rewrite a stopped Arroyo job, and yield its events.

    Args:
        checks: the names of the checks of row parity, and of the comparison with the forecast.

    Raises:
        ArroyoStateError: as `run_rewrite`.
        dagster.Failure: the job runs, or nobody says what it does; with the forecast.
    """
    from arroyo_dagster.state.metadata.interrupts import interruptible_sleep
    from arroyo_dagster.state.operations.compaction.rewrite import (
        RewriteOptions,
        plan_rewrite,
        run_rewrite,
    )

    parts: list[RewriteShard] = []
    published: list[RewriteOutcome] = []

    def on_shard(found: RewriteShard | LeftOut, left: int) -> None:
        if isinstance(found, RewriteShard):
            parts.append(found)
            merged = found.merged
            context.log.info(
                f"rewrote {len(merged.input_paths)} files of {merged.operator}.{merged.table}, "
                f"{left} parts left"
            )
        else:
            context.log.warning(f"{found.operator}.{found.table} is skipped: {found.reason}")

    begun = time.monotonic()
    page = step.store.arroyo_page(paths, managed=False)
    links = {} if page is None else {"Arroyo": page}

    def materialized(outcome: RewriteOutcome) -> "dg.MaterializeResult[Any]":
        metadata = {**rewrite_metadata(outcome, time.monotonic() - begun), **links}
        version = dg.DataVersion(version_of(outcome))
        return dg.MaterializeResult(asset_key=key, metadata=metadata, data_version=version)

    asked = step.directory.directory(step.store)
    try:
        plan = plan_rewrite(step.store.reading(), paths, asked, step.settings, sampled=True)
        if step.dry_run or plan.why_not is not None:
            outcome = RewriteOutcome.of_plan(plan)
        else:
            options = RewriteOptions(
                run=step.runner.rewrites(),
                owner=f"dagster run {context.run.run_id}",
                sleep=interruptible_sleep,
                lease_wait_seconds=step.lease_wait_seconds,
                on_lease=context.log.info,
                quiet_seconds=step.quiet_seconds,
                on_shard=on_shard,
                on_published=published.append,
            )
            store = step.store.writable()
            outcome = run_rewrite(store, paths, asked, step.settings, options, plan=plan)
    except ArroyoStateError:
        if not row_parity(parts).passed:
            yield check_result(row_parity(parts), checks[0], key)
        raise
    except Exception:
        raise
    except BaseException:  # an interrupt
        yield from map(materialized, published)
        raise
    context.log.info(format_rewrite(outcome, dry_run=step.dry_run))
    if outcome.plan.tables and outcome.plan.why_not is not None and not step.dry_run:
        raise _not_now(paths, asked, outcome, links)
    if outcome.published:
        yield materialized(outcome)
    if outcome.parts:
        verdict = row_parity(outcome.parts)
        yield check_result(verdict, checks[0], key, metadata=plan_metadata(outcome.plan))
        verdict = effective(outcome.plan, outcome.after if outcome.published else None)
        warn, kept = dg.AssetCheckSeverity.WARN, not verdict.findings
        yield check_result(verdict, checks[1], key, severity=warn, passed=kept)
    else:  # nothing was made: what would be is seen on the asset all the same
        metadata = {**plan_metadata(outcome.plan), **links}
        yield dg.AssetObservation(key, partition=str(paths.root), metadata=metadata)


def _not_now(
    paths: JobPaths, asked: "JobDirectory", outcome: RewriteOutcome, links: Mapping[str, Any]
) -> dg.Failure:
    """Why nothing was done of what there was to do, and what would let it be done.

    Raises:
        ArroyoStateError: somebody who was asked about the job could not answer.
    """
    plan = outcome.plan
    if plan.condition is JobCondition.UNKNOWN:
        asked.find(paths, checkpoints=False)  # raises what keeps a source from answering
    if plan.condition is JobCondition.UNKNOWN and not asked.sources:
        step = (
            "set `arroyo_api_url` or `arroyo_database` of the component (or of ArroyoStateStore) "
            "as a source of the job's status"
        )
    elif plan.condition is JobCondition.UNKNOWN:
        step = (
            "check that `arroyo_api_url` and `arroyo_database` name the cluster that runs this "
            "job, or set `assume` of the resource arroyo_directory"
        )
    elif plan.condition is JobCondition.RUNNING:
        step = (
            "stop the job with a checkpoint, or add it to the component's `window`, which stops "
            "it and starts it again"
        )
    else:
        step = "wait until the job is at rest, then run this again"
    error = ArroyoStateError(
        f"nothing was rewritten, {plan.why_not}; {plan.before.files} files would become "
        f"{plan.after.files}",
        job=paths.root,
        epoch=plan.epoch,
        condition=plan.condition.value,
        next_step=step,
    )
    return failure_of(error, {**plan_metadata(plan), **links})


def version_of(outcome: RewriteOutcome) -> str:
    """Return the data version of rewritten state: an epoch may be rewritten more than once."""
    record = outcome.record
    return f"e{outcome.plan.epoch}" if record is None else record.name.removesuffix(".json")


def format_rewrite(outcome: RewriteOutcome, *, dry_run: bool = False) -> str:
    """Format the outcome as one sentence for the log."""
    plan = outcome.plan
    if not plan.tables:
        reasons = sorted({one.reason for one in outcome.left_out})
        return f"nothing to rewrite at epoch {plan.epoch}: {'; '.join(reasons) or 'no tables'}"
    lost = sum(one.lost_rows for one in plan.repairs)
    forecast = (
        f"{plan.before.files} files would become {plan.after.files}"
        f"{f', up to {lost} rows repaired that Arroyo would lose' if lost else ''}"
    )
    if outcome.published:
        return (
            f"rewritten in place: {plan.before.files} files became {outcome.after.files}, "
            f"{outcome.repaired} rows repaired; epoch {plan.epoch} lists them"
        )
    if plan.why_not is not None:
        return f"forecast only, {plan.why_not}: {forecast}"
    return f"dry run: {forecast}" if dry_run else f"nothing could be rewritten: {forecast}"
