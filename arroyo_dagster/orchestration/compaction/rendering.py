"""Format compactions for people: what changed, what was forecast, and what was left out."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from arroyo_dagster.orchestration import rendering as shown
from arroyo_dagster.state.model.compaction import Forecast, LeftOut, MergeOutcome
from arroyo_dagster.state.model.rewrite import RewriteOutcome, RewritePlan
from arroyo_dagster.state.model.units import format_bytes

if TYPE_CHECKING:
    from arroyo_dagster.state.operations.compaction.publish import CompactionOutcome


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
