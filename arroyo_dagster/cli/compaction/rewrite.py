"""Print the rewrite of an Arroyo job's state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import click

from arroyo_dagster.cli.directory import directory_options
from arroyo_dagster.cli.rendering import print_json, print_table, print_text, terminal_width
from arroyo_dagster.cli.settings import settings_options
from arroyo_dagster.cli.spark import session_of
from arroyo_dagster.spark.settings import SparkSettings
from arroyo_dagster.state.codec.derived import plain_values
from arroyo_dagster.state.model.compaction import Forecast, LeftOut
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.progress import OnProgress, Progress, ProgressUnit
from arroyo_dagster.state.model.rewrite import (
    QuietSettings,
    RewriteOutcome,
    RewritePlan,
    RewriteShard,
)
from arroyo_dagster.state.model.units import format_bytes, plural
from arroyo_dagster.state.operations.compaction.rewrite import RunRewrites, rewrite_here
from arroyo_dagster.state.operations.progress import timed

_F = TypeVar("_F", bound=Callable[..., Any])


def arroyo_options(command: _F) -> _F:
    """Add the options for Arroyo jobs only: the sources of their status, and the quiet period."""
    quiet = settings_options(QuietSettings)
    return quiet(directory_options(command))


def print_rewrite(
    outcome: RewriteOutcome, *, yes: bool, as_json: bool, in_full: bool = False
) -> None:
    """Print what was rewritten, or would be.

    Args:
        in_full: print every table that is skipped, instead of one summary.
    """
    if as_json:
        print_json(rewrite_json(outcome))
        return
    plan = outcome.plan
    name = JobPaths(plan.job, plan.pipeline).root
    if in_full:
        print_plan(plan, outcome.left_out)
    else:
        print_tables(plan)
        print_left_out(name, outcome.left_out)
    print_text(f"{name}: {format_rewrite(outcome, yes=yes)}")


def print_left_out(job: str, left_out: Sequence[LeftOut]) -> None:
    """Print one line: how many tables are skipped, by reason."""
    if not left_out:
        return
    reasons = Counter(entry.reason for entry in left_out)
    counts = "; ".join(f"{count}: {reason}" for reason, count in reasons.most_common())
    print_text(
        f"{job}: {len(left_out)} skipped ({counts}); `arroyo-state compact plan {job}` lists them"
    )


def runner(spark: SparkSettings | None) -> RunRewrites:
    """Return what writes the new files."""
    if spark is None:
        return rewrite_here
    from arroyo_dagster.spark.rewrite import rewrites_on_spark

    return rewrites_on_spark(session_of(spark), spark.thresholds)


def count_shards(report: OnProgress) -> Callable[[RewriteShard | LeftOut, int], None]:
    """Return what counts the finished parts of a rewrite, for `RewriteOptions.on_shard`."""
    report_timed, done = timed(report), 0

    def count(_: RewriteShard | LeftOut, left: int) -> None:
        nonlocal done
        done += 1
        report_timed(
            Progress(
                step="rewritten shards", done=done, total=done + left, unit=ProgressUnit.SHARDS
            )
        )

    return count


def rewrite_json(outcome: RewriteOutcome) -> dict[str, Any]:
    """Return the JSON form of a rewrite; the plan alone if nothing was done."""
    return {
        "plan": plain_values(outcome.plan),
        "done": outcome.published,
        "published": "in place" if outcome.published else None,
        "epoch": outcome.plan.epoch,
        "after": _forecast_json(outcome.after),
        "repaired_rows": outcome.repaired,
        "dropped_rows": _dropped(outcome),
        "left_out": [
            {"operator": entry.operator, "table": entry.table, "reason": entry.reason}
            for entry in outcome.left_out
        ],
        "unlisted_files": list(outcome.unlisted),
        "undo_record": outcome.record,
    }


def _forecast_json(one: Forecast) -> dict[str, Any]:
    return {"files": one.files, "size_bytes": one.size_bytes, "opens": list(one.opens)}


def _dropped(outcome: RewriteOutcome) -> dict[str, int]:
    total: dict[str, int] = {}
    for part in outcome.parts:
        for reason, count in part.dropped.items():
            total[reason] = total.get(reason, 0) + count
    return total


def print_plan(plan: RewritePlan, left_out: Iterable[LeftOut]) -> None:
    """Print what is rewritten by which rule, and why the rest is skipped."""
    print_tables(plan)
    print_skipped(
        (f"{left.operator or plan.job} {left.table or ''}", left.reason) for left in left_out
    )


def print_skipped(reasons: Iterable[tuple[str, str]]) -> None:
    """Print what is skipped, and why; on a terminal as a table, each reason once below it."""
    skipped = [*reasons]
    if terminal_width() is None:
        for name, reason in skipped:
            click.echo(f"skipped: {name}: {reason}")
    elif skipped:
        print_table(("skipped", "why"), skipped, narrow=("why",), notes="why")


def print_tables(plan: RewritePlan) -> None:
    """Print what is rewritten by which rule."""
    lines = [
        (
            table.operator,
            table.table,
            len(table.inputs),
            format_bytes(table.size_bytes),
            len(table.parts),
            table.rule.value,
            f"up to {plural(table.lost_rows, 'row')}" if table.lost_rows else None,
        )
        for table in plan.tables
    ]
    if lines:
        columns = ("operator", "table", "files", "bytes", "at most", "keeps", "repairs")
        print_table(columns, lines, narrow=("at most", "keeps"), notes="repairs")


def format_rewrite(outcome: RewriteOutcome, *, yes: bool, started: bool = False) -> str:
    """Format what was done, or would be, as one sentence.

    Args:
        started: the job runs again, so that the rewrite can no longer be undone.
    """
    plan, after = outcome.plan, outcome.after
    if not plan.tables:
        return f"nothing to rewrite at epoch {plan.epoch}"
    lost = sum(repair.lost_rows for repair in plan.repairs)
    if not yes:
        repairs = f"; up to {lost} rows that Arroyo would lose are repaired" if lost else ""
        step = f"not now: {plan.why_not}" if plan.why_not else "add --yes to execute"
        return (
            f"{plural(plan.before.files, 'file')} would become {plan.after.files} at most, opens "
            f"{sum(plan.before.opens)} would become {sum(plan.after.opens)}{repairs}; "
            f"nothing was changed, {step}"
        )
    if not outcome.published:
        return f"nothing could be rewritten at epoch {plan.epoch}"
    repaired = f"; {outcome.repaired} rows that Arroyo would have lost were repaired"
    undo = "; `arroyo-state undo` undoes it until the job is started"
    return (
        f"{plural(plan.before.files, 'file')} became {after.files}, "
        f"{format_bytes(plan.before.size_bytes)} became {format_bytes(after.size_bytes)}; epoch "
        f"{plan.epoch} lists them{repaired if outcome.repaired else ''}{'' if started else undo}"
    )
