"""`compacted_state` of each pipeline: merge its files, prove the merge, and show what changed.

A managed job takes merged files over at its next checkpoint. A stopped Arroyo job is rewritten in
place; one that runs, or of which nobody says what it does, waits.
"""

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from arroyo_dagster.orchestration import rendering as shown
from arroyo_dagster.orchestration.check_results import format_verdict
from arroyo_dagster.orchestration.pipelines.model import ListedPipeline
from arroyo_dagster.orchestration.serving import (
    BoundsConfig,
    PipelineStep,
    Turn,
    WaitingError,
    build_pipeline_assets,
)
from arroyo_dagster.orchestration.settings import configured, setting_field, settings_config
from arroyo_dagster.orchestration.translator import CHECKPOINT, COMPACTED_STATE, Names
from arroyo_dagster.state.model.compaction import (
    AdoptionSettings,
    CompactionSettings,
    Forecast,
    LeftOut,
    MergeOutcome,
)
from arroyo_dagster.state.model.job_facts import JobCondition
from arroyo_dagster.state.model.leases import LeaseSettings
from arroyo_dagster.state.model.progress import progress_logger
from arroyo_dagster.state.model.rewrite import (
    QuietSettings,
    RewriteOutcome,
    RewritePlan,
    RewriteShard,
)
from arroyo_dagster.state.model.units import format_bytes
from arroyo_dagster.state.planning.verify.checks import effective, row_parity

if TYPE_CHECKING:
    from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
    from arroyo_dagster.state.operations.compaction.publish import CompactionOutcome


class CompactionConfig(settings_config(CompactionSettings), BoundsConfig):  # type: ignore[misc]
    """How to compact pipelines, and how many."""

    wait_seconds: float = setting_field(AdoptionSettings, "wait_seconds", default=0.0)
    quiet_seconds: float = setting_field(QuietSettings, "quiet_seconds")
    lease_wait_seconds: float = setting_field(LeaseSettings, "lease_wait_seconds")
    dry_run: bool = Field(default=False, description="Plan only; change nothing.")

    def settings(self) -> CompactionSettings:
        """Return the same settings for the state package.

        Raises:
            dagster.Failure: there is no such policy or order.
        """
        settings: CompactionSettings = configured(CompactionSettings, self)
        return settings


def build_compacted_state(
    names: Names, pipelines: Sequence[ListedPipeline]
) -> list[dg.AssetsDefinition]:
    """Build the asset of each pipeline's merged files, made by one step."""

    def work(turn: Turn, key: dg.AssetKey, config: CompactionConfig, context: Any) -> Iterator[Any]:
        steps = _rewrite if _is_arroyo_job(turn) else _compact
        return steps(turn, key, config)

    upstream = {pipeline: [names.key(CHECKPOINT, pipeline)] for pipeline in pipelines}
    step = PipelineStep(
        table=COMPACTED_STATE, config=CompactionConfig, work=work, pool="arroyo_compaction"
    )
    return build_pipeline_assets(names, step, upstream)


def _is_arroyo_job(turn: Turn) -> bool:
    from arroyo_dagster.state.operations.compaction.rewrite_preconditions import is_arroyo_job

    return is_arroyo_job(turn.tools.store.reading(), turn.pipeline.paths)


def _checked_parity(merges: Sequence[MergeOutcome]) -> None:
    """Check that merged files yield exactly the rows of the files that they replace.

    Raises:
        dagster.Failure: a merge is not proven.
    """
    verdict = row_parity(merges)
    if not verdict.passed:
        raise dg.Failure(
            f"a merge is not proven, and was not published: {format_verdict(verdict)}",
            allow_retries=False,
        )


def published_events(
    publish: Callable[[], Any], published: Sequence[Any], event: Callable[[Any], Any]
) -> Generator[Any, Any, Any]:
    """Yield the events of what was published where an interrupt follows.

    Returns:
        What `publish` returns.
    """
    try:
        outcome = publish()
    except Exception:
        raise
    except BaseException:  # an interrupt
        yield from map(event, published)
        raise
    return outcome


# ---- managed jobs --------------------------------------------------------------------------------


def _compact(turn: Turn, key: dg.AssetKey, config: CompactionConfig) -> Iterator[Any]:
    """Compact one managed job; nothing to do makes nothing.

    Raises:
        ArroyoStateError: see `state.operations.compaction.job.run_compaction`.
    """
    from arroyo_dagster.state.operations.compaction.job import CompactionOptions
    from arroyo_dagster.state.operations.compaction.plan import plan_compaction
    from arroyo_dagster.state.operations.compaction.publish import CompactionOutcome

    merges: list[MergeOutcome] = []
    published: list[CompactionOutcome] = []
    begun, store, paths = time.monotonic(), turn.tools.store, turn.pipeline.paths

    def on_merge(outcome: MergeOutcome, left: int) -> None:
        merges.append(outcome)
        table = f"{outcome.merged.operator}.{outcome.merged.table}"
        turn.log.info(
            f"merged {len(outcome.merged.input_paths)} files of {table}, {left} merges left"
        )

    def event(outcome: "CompactionOutcome") -> "dg.MaterializeResult[Any]":
        version = outcome.record.name if outcome.record else f"e{outcome.epoch}"
        warnings = effective(outcome.plan, outcome.after).findings if outcome.merges else ()
        for finding in warnings:
            turn.log.warning(str(finding))
        return dg.MaterializeResult(
            asset_key=key,
            metadata=compaction_metadata(outcome, time.monotonic() - begun),
            data_version=dg.DataVersion(version),
        )

    if config.dry_run:
        plan = plan_compaction(store.reading(), paths, config.settings(), sampled=True)
        turn.log.info(format_compaction(CompactionOutcome.of_plan(plan), dry_run=True))
        return
    options = CompactionOptions(
        owner=turn.owner,
        lease_wait_seconds=turn.lease_wait_seconds(config.lease_wait_seconds),
        on_lease=turn.log.info,
        wait_seconds=config.wait_seconds,
        sampled=True,
        on_merge=on_merge,
        on_progress=progress_logger(turn.log.info),
        on_published=published.append,
    )
    outcome = yield from published_events(
        lambda: turn.tools.runner.run_compaction(
            store.writable(), paths, config.settings(), options
        ),
        published,
        event,
    )
    turn.log.info(format_compaction(outcome))
    if outcome.changed:
        yield event(outcome)
    _checked_parity(outcome.merges)


# ---- Arroyo jobs ---------------------------------------------------------------------------------


def _rewrite(turn: Turn, key: dg.AssetKey, config: CompactionConfig) -> Iterator[Any]:
    """Rewrite a stopped Arroyo job in place.

    Raises:
        ArroyoStateError: as `run_rewrite`.
        WaitingError: the job runs, or nobody says what it does; with the forecast.
    """
    from arroyo_dagster.state.metadata.interrupts import interruptible_sleep
    from arroyo_dagster.state.operations.compaction.rewrite import (
        RewriteOptions,
        plan_rewrite,
        run_rewrite,
    )

    parts: list[RewriteShard] = []
    published: list[RewriteOutcome] = []
    begun, tools, paths = time.monotonic(), turn.tools, turn.pipeline.paths
    page = tools.store.arroyo_page(paths, managed=False)
    links = {} if page is None else {"Arroyo": page}

    def on_shard(part: RewriteShard | LeftOut, left: int) -> None:
        if isinstance(part, RewriteShard):
            parts.append(part)
            table = f"{part.merged.operator}.{part.merged.table}"
            turn.log.info(
                f"rewrote {len(part.merged.input_paths)} files of {table}, {left} parts left"
            )
        else:
            turn.log.warning(f"{part.operator}.{part.table} is skipped: {part.reason}")

    def event(outcome: RewriteOutcome) -> "dg.MaterializeResult[Any]":
        return dg.MaterializeResult(
            asset_key=key,
            metadata={**rewrite_metadata(outcome, time.monotonic() - begun), **links},
            data_version=dg.DataVersion(rewrite_version(outcome)),
        )

    directory = tools.directory.directory(tools.store)
    plan = plan_rewrite(tools.store.reading(), paths, directory, config.settings(), sampled=True)
    if config.dry_run or plan.why_not is not None or not plan.tables:
        outcome = RewriteOutcome.of_plan(plan)
        turn.log.info(format_rewrite(outcome, dry_run=config.dry_run))
        if plan.tables and plan.why_not is not None and not config.dry_run:
            raise WaitingError(_not_now(directory, outcome, turn.pipeline))
        # Nothing was made: what would be is seen on the asset all the same.
        yield dg.AssetObservation(key, metadata={**plan_metadata(plan), **links})
        return
    options = RewriteOptions(
        run=tools.runner.rewrites(),
        owner=turn.owner,
        sleep=interruptible_sleep,
        lease_wait_seconds=turn.lease_wait_seconds(config.lease_wait_seconds),
        on_lease=turn.log.info,
        quiet_seconds=config.quiet_seconds,
        on_shard=on_shard,
        on_published=published.append,
    )
    outcome = yield from published_events(
        lambda: run_rewrite(
            tools.store.writable(), paths, directory, config.settings(), options, plan=plan
        ),
        published,
        event,
    )
    turn.log.info(format_rewrite(outcome))
    if outcome.published:
        yield event(outcome)
        for finding in effective(outcome.plan, outcome.after).findings:
            turn.log.warning(str(finding))
    _checked_parity(outcome.parts)


def rewrite_version(outcome: RewriteOutcome) -> str:
    """Return the data version of rewritten state: an epoch may be rewritten more than once."""
    record = outcome.record
    return f"e{outcome.plan.epoch}" if record is None else record.name.removesuffix(".json")


_NEXT_STEPS: Mapping[JobCondition, str] = {
    JobCondition.UNKNOWN: "check that `arroyo_api_url` and `arroyo_database` name the cluster that "
    "runs this job, or set `assume`",
    JobCondition.RUNNING: "stop the job with a checkpoint, or add it to the component's `window`, "
    "which stops it and starts it again",
}


def _not_now(asked: "JobDirectory", outcome: RewriteOutcome, pipeline: ListedPipeline) -> str:
    """Return why nothing was done of what there was to do, and what would let it be done.

    Raises:
        ArroyoStateError: somebody who was asked about the job could not answer.
    """
    plan = outcome.plan
    if plan.condition is JobCondition.UNKNOWN:
        asked.find(pipeline.paths, checkpoints=False)  # raises what keeps a source from answering
    step = _NEXT_STEPS.get(plan.condition, "wait until the job is at rest")
    if plan.condition is JobCondition.UNKNOWN and not asked.sources:
        step = "set `arroyo_api_url` or `arroyo_database` as a source of the job's status"
    return (
        f"{plan.why_not}; {plan.before.files} files would become {plan.after.files}. Next: {step}"
    )


# ---- format compactions for people: what changed, what was forecast, and what was left out -------


def compaction_metadata(outcome: "CompactionOutcome", seconds: float) -> dict[str, Any]:
    """Return what a compaction changed, and what was forecast."""
    plan = outcome.plan
    after = outcome.after or Forecast(
        files=outcome.files_after, size_bytes=outcome.size_bytes_after
    )
    return shown.known(
        {
            **_changes(plan.before, after, outcome.merges),
            "forecast": _format_forecast(plan.after, after),
            "duration": shown.duration(seconds * 1e6),
            "engine": "; ".join(map(str, outcome.engines)) or None,
            "arroyo/planned_at_epoch": plan.epoch,
            "arroyo/taken_over_at_epoch": outcome.epoch,
            "arroyo/published_as": outcome.published,
            **_tables(outcome.merges, plan.left_out),
        }
    )


def plan_metadata(plan: RewritePlan) -> dict[str, Any]:
    """Return what a rewrite would do, and why the rest is left out."""
    return shown.known(
        {
            "why not": plan.why_not,
            **_changes(plan.before, plan.after, ()),
            "arroyo/epoch": plan.epoch,
            "arroyo/condition": plan.condition.value,
            "rows that Arroyo would lose": shown.number(
                sum(repair.lost_rows for repair in plan.repairs) or None
            ),
            "tables": shown.table(
                {
                    "operator": table.operator,
                    "table": table.table,
                    "files": shown.number(len(table.inputs)),
                    "at most": shown.number(len(table.parts)),
                    "keeps": table.rule.value,
                    "repairs up to": shown.number(table.lost_rows),
                }
                for table in plan.tables
            ),
            **_tables((), plan.left_out),
        }
    )


def rewrite_metadata(outcome: RewriteOutcome, seconds: float) -> dict[str, Any]:
    """Return what a rewrite did."""
    plan, after = outcome.plan, outcome.after
    return shown.known(
        {
            **_changes(plan.before, after, outcome.parts),
            "forecast": _format_forecast(plan.after, after),
            "duration": shown.duration(seconds * 1e6),
            "arroyo/epoch": plan.epoch,
            "arroyo/published_as": "in place",
            "arroyo/run_id": plan.run_id,
            "repaired rows": shown.number(outcome.repaired),
            "unlisted files": shown.number(len(outcome.unlisted)),
            "arroyo/undo_record": outcome.record,
            **_tables(outcome.parts, outcome.left_out),
        }
    )


def _changes(
    before: Forecast, after: Forecast, merges: Iterable[MergeOutcome]
) -> dict[str, str | None]:
    rows = [(merge.rows_in, merge.rows_out) for merge in merges]
    return {
        "files": f"{before.files:,} → {after.files:,}",
        "size": f"{format_bytes(before.size_bytes)} → {shown.size(after.size_bytes)}",
        "rows": f"{sum(a for a, _ in rows):,} → {sum(b for _, b in rows):,}" if rows else None,
        "files opened by a subtask": f"{max(before.opens):,} → {max(after.opens):,}"
        if before.opens and after.opens
        else None,
    }


def _format_forecast(forecast: Forecast, after: Forecast) -> str:
    opened = f", {max(forecast.opens):,} opened by a subtask" if forecast.opens else ""
    error = shown.relative_error(forecast.size_bytes, after.size_bytes)
    exact = "" if error is None else f"; the outcome differs by {error:+.1%} in size"
    size = format_bytes(forecast.size_bytes)
    return f"{shown.counted(forecast.files, 'file')}, {size}{opened}{exact}"


def _tables(merges: Iterable[MergeOutcome], left_out: Iterable[LeftOut]) -> dict[str, Any]:
    done = tuple(merges)
    return {
        "dropped rows": shown.table(_dropped(done)),
        "merges": shown.table(map(_merge_line, done)),
        "left out": shown.table(
            {"operator": one.operator, "table": one.table, "why": one.reason} for one in left_out
        ),
    }


def _dropped(merges: Iterable[MergeOutcome]) -> Iterator[Mapping[str, Any]]:
    total: dict[str, int] = {}
    for merge in merges:
        for reason, count in merge.dropped.items():
            total[reason] = total.get(reason, 0) + count
    return ({"why": reason, "rows": f"{count:,}"} for reason, count in sorted(total.items()))


def _merge_line(merge: MergeOutcome) -> Mapping[str, Any]:
    return {
        "table": f"{merge.merged.operator}.{merge.merged.table}",
        "files": f"{len(merge.merged.input_paths):,} → {len(merge.merged.output_paths):,}",
        "size": f"{format_bytes(merge.size_bytes_in)} → {format_bytes(merge.size_bytes_out)}",
        "rows": f"{merge.rows_in:,} → {merge.rows_out:,}",
    }


# ---- lines for the log ---------------------------------------------------------------------------


def format_compaction(outcome: "CompactionOutcome", *, dry_run: bool = False) -> str:
    """Format the outcome of a compaction as one sentence for the log."""
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
        return f"nothing to do at epoch {plan.epoch}: {_reasons(plan.left_out)}"
    if outcome.published == "record" and outcome.epoch is None:
        return "merged; the job adopts the files at its next checkpoint"
    return f"merged; epoch {outcome.epoch} lists {outcome.files_after} files"


def format_rewrite(outcome: RewriteOutcome, *, dry_run: bool = False) -> str:
    """Format the outcome of a rewrite as one sentence for the log."""
    plan = outcome.plan
    if not plan.tables:
        return f"nothing to rewrite at epoch {plan.epoch}: {_reasons(outcome.left_out)}"
    lost = sum(repair.lost_rows for repair in plan.repairs)
    repaired = f", up to {lost} rows repaired that Arroyo would lose" if lost else ""
    forecast = f"{plan.before.files} files would become {plan.after.files}{repaired}"
    if outcome.published:
        return (
            f"rewritten in place: {plan.before.files} files became {outcome.after.files}, "
            f"{outcome.repaired} rows repaired; epoch {plan.epoch} lists them"
        )
    if plan.why_not is not None:
        return f"forecast only, {plan.why_not}: {forecast}"
    return f"dry run: {forecast}" if dry_run else f"nothing could be rewritten: {forecast}"


def _reasons(left_out: Iterable[LeftOut]) -> str:
    return "; ".join(sorted({entry.reason for entry in left_out})) or "no tables"
