"""`compact plan` and `run`: merge small files. Without --yes nothing changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import click

from arroyo_dagster.cli.common import open_to_read, open_url, print_lease_event, store_options
from arroyo_dagster.cli.compaction.group import compact
from arroyo_dagster.cli.compaction.rewrite import (
    arroyo_options,
    count_shards,
    print_left_out,
    print_rewrite,
    print_skipped,
    rewrite_json,
    runner,
)
from arroyo_dagster.cli.directory import directory_options
from arroyo_dagster.cli.rendering import (
    print_json,
    print_no_jobs,
    print_table,
    print_text,
    report,
    show_progress,
    sleep_until_quiet,
)
from arroyo_dagster.cli.settings import NamedSetting, named_settings, settings_options
from arroyo_dagster.cli.spark import session_of, spark_options
from arroyo_dagster.cli.tables import TableCell
from arroyo_dagster.errors import ArroyoStateError
from arroyo_dagster.spark.settings import SparkSettings
from arroyo_dagster.state.codec.derived import plain_values
from arroyo_dagster.state.model.clock import wall_clock
from arroyo_dagster.state.model.compaction import (
    AdoptionSettings,
    CompactionPlan,
    CompactionSettings,
    Forecast,
)
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.leases import LeaseSettings
from arroyo_dagster.state.model.progress import OnProgress, ProgressUnit
from arroyo_dagster.state.model.rewrite import RewriteOutcome, RewritePlan
from arroyo_dagster.state.model.settings import setting_fields, settings_from
from arroyo_dagster.state.model.units import format_bytes, plural
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
from arroyo_dagster.state.operations.catalog.jobs import find_job, jobs_or_all
from arroyo_dagster.state.operations.compaction.job import CompactionOptions, run_compaction
from arroyo_dagster.state.operations.compaction.plan import plan_compaction
from arroyo_dagster.state.operations.compaction.publish import CompactionOutcome
from arroyo_dagster.state.operations.compaction.rewrite import (
    RewriteOptions,
    plan_rewrite,
    run_rewrite,
)
from arroyo_dagster.state.operations.compaction.rewrite_preconditions import (
    ListedJob,
    is_arroyo_job,
    list_objects,
)
from arroyo_dagster.state.operations.progress import counter
from arroyo_dagster.state.planning.compaction.plan import most_outputs
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore

_F = TypeVar("_F", bound=Callable[..., Any])


_RARE = {
    *("target_bytes", "min_files", "level_files", "window_micros"),
    *("deduplicate", "order", "min_gain_files"),
}
"""Settings that `--set` changes; the others have options of their own."""

_USUAL = {field.name for field in setting_fields(CompactionSettings)} - _RARE


def _settings_options(command: _F) -> _F:
    kind = NamedSetting(CompactionSettings, without=_USUAL)
    rare = named_settings(kind, "a setting", "order=smallest", option="set")
    return store_options(settings_options(CompactionSettings, without=_RARE)(rare(command)))


def _settings(given: dict[str, Any]) -> CompactionSettings:
    return settings_from(CompactionSettings, {**given, **dict(given["sets"])})


# ---- plan ----------------------------------------------------------------------------------------


@compact.command()
@click.argument("jobs", nargs=-1)
@directory_options
@_settings_options
def plan(jobs: Sequence[str], url: str | None, as_json: bool, **given: Any) -> None:
    """Print the planned merges of a job, and the reason for everything that is skipped.

    Without JOBS, or of several: one line each, with what a restore reads now and after a
    compaction. Up to 8 MiB of each job are merged in memory to estimate the resulting bytes.

    \b
    Example:
      arroyo-state compact plan orders/main --url s3://bucket/arroyo
    """
    store = open_to_read(url)
    if len(jobs) != 1:
        _print_forecasts(store, jobs, _settings(given), as_json=as_json)
        return
    paths = find_job(store, jobs[0])
    if is_arroyo_job(store, paths):
        with show_progress(as_json=as_json, name=paths.root) as on_progress:
            planned = _plan_rewrite(store, paths, given, on_progress)
        print_rewrite(planned, yes=False, as_json=as_json, in_full=True)
        return
    with show_progress(as_json=as_json) as on_progress:
        plan = plan_compaction(store, paths, _settings(given), on_progress=on_progress)
    if as_json:
        print_json(plain_values(plan))
        return
    _print_merges(plan)
    print_skipped(
        (
            (f"{left.operator} {left.table}" if left.operator else _name(plan))
            + (f" ({len(left.files)} files)" if len(left.files) > 1 else ""),
            left.reason,
        )
        for left in plan.left_out
    )
    print_text(f"{_name(plan)}: {_format_forecast(plan)}")


def _print_forecasts(
    store: ObjectStore, jobs: Sequence[str], settings: CompactionSettings, *, as_json: bool
) -> None:
    """Print what restores read now and after a compaction: a line for each job, or for all."""
    paths, unreadable = jobs_or_all(store, jobs)
    plans: list[CompactionPlan | RewritePlan] = []
    problems = list(unreadable.values())
    with show_progress(as_json=as_json) as on_progress:
        count = counter(on_progress, "planned jobs", len(paths), ProgressUnit.JOBS)
        for job in paths:
            try:
                if is_arroyo_job(store, job):
                    plans.append(plan_rewrite(store, job, JobDirectory(), settings, sampled=True))
                else:
                    plans.append(plan_compaction(store, job, settings, sampled=True))
            except ArroyoStateError as error:
                problems.append(error)
            count()
    plans.sort(key=lambda planned: planned.files_after - planned.files_before)
    if as_json:
        print_json([_forecast_json(planned) for planned in plans])
    elif not paths and not unreadable:
        print_no_jobs(store)
    else:
        opened = TableCell("files opened per subtask", ("files opened per subtask", "opened"))
        columns = ("job", "epoch", "files", "→", "bytes", "→ ", opened, "→  ")
        narrow = (opened.text, "epoch", opened.text, "→  ", "bytes", "→ ")
        print_table(columns, [_forecast_line(planned) for planned in plans], narrow=narrow)
    report(problems)


def _forecast_json(found: CompactionPlan | RewritePlan) -> dict[str, Any]:
    document = plain_values(found)
    return {"job": _name(found), **{key: document[key] for key in ("epoch", "before", "after")}}


def _forecast_line(found: CompactionPlan | RewritePlan) -> tuple[object, ...]:
    before, after = found.before, found.after
    return (
        _name(found),
        found.epoch,
        before.files,
        after.files,
        format_bytes(before.size_bytes),
        format_bytes(after.size_bytes),
        max(before.opens, default=0),
        max(after.opens, default=0),
    )


def _name(found: CompactionPlan | RewritePlan) -> str:
    return JobPaths(found.job, found.pipeline).root


def _opens(found: Forecast) -> str:
    return f"{max(found.opens, default=0)}"


def _format_forecast(found: CompactionPlan) -> str:
    if not found.merges:
        return f"nothing to merge at epoch {found.epoch}"
    return (
        f"{plural(found.files_before, 'file')} would become at most {found.files_after}; at a "
        f"restore a subtask would open {_opens(found.after)} instead of "
        f"{plural(int(_opens(found.before)), 'file')}"
    )


def _print_merges(found: CompactionPlan) -> None:
    lines = [
        (one.operator, one.table, len(one.paths), format_bytes(one.size_bytes), most_outputs(one))
        for one in found.merges
    ]
    if lines:
        columns = ("operator", "table", "files", "bytes", "at most")
        print_table(columns, lines, narrow=("at most", "bytes"))


# ---- run -----------------------------------------------------------------------------------------


@compact.command()
@click.argument("jobs", nargs=-1, required=True)
@click.option("--yes", is_flag=True, help="Execute the plan. Without it, print the plan only.")
@spark_options("Merge on Spark if the plan is large enough.")
@settings_options(AdoptionSettings)
@settings_options(LeaseSettings)
@arroyo_options
@_settings_options
def run(
    jobs: Sequence[str],
    yes: bool,
    spark: SparkSettings | None,
    wait_seconds: float,
    lease_wait_seconds: float,
    url: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Merge files, verify that a restore loads the same rows, and publish the result.

    Dry run unless --yes is given. An Arroyo job is rewritten in place; it must be stopped, which
    --arroyo-api, --arroyo-db or --assume JOB=stopped confirms. If one of several jobs fails, the
    others continue. A job that another process maintains is skipped after --lease-wait; the exit
    code is 4 if nothing else went wrong.

    \b
    Example:
      arroyo-state compact run orders/main --url s3://bucket/arroyo --yes
    """
    store = open_url(url) if yes else open_to_read(url)
    settings = _settings(given)
    outcomes: list[CompactionOutcome | RewriteOutcome] = []
    problems: list[ArroyoStateError] = []
    job_paths = [find_job(store, job) for job in jobs]
    listed = _listed_together(store, job_paths) if yes and len(job_paths) > 1 else {}
    for paths in job_paths:
        try:
            with show_progress(as_json=as_json, name=paths.root) as on_progress:
                leased: dict[str, Any] = {"lease_wait_seconds": lease_wait_seconds}
                leased["on_lease"] = print_lease_event(paths)
                if is_arroyo_job(store, paths) and yes:
                    count = count_shards(on_progress)
                    since = listed.get(paths)
                    waiting = RewriteOptions(quiet_since=since, on_shard=count, **leased)
                    outcomes.append(_rewrite(store, paths, given, waiting, spark=spark))
                elif is_arroyo_job(store, paths):
                    outcomes.append(_plan_rewrite(store, paths, given, on_progress))
                elif yes:
                    options = CompactionOptions(
                        wait_seconds=wait_seconds, on_progress=on_progress, **leased
                    )
                    outcomes.append(_compact(store, paths, settings, options, spark=spark))
                else:
                    plan = plan_compaction(store, paths, settings, on_progress=on_progress)
                    outcomes.append(CompactionOutcome.of_plan(plan))
        except ArroyoStateError as error:
            problems.append(error)
            continue
        if not as_json:
            _print_outcome(outcomes[-1], yes=yes)
    if as_json:
        documents = [_outcome_json(outcome) for outcome in outcomes]
        print_json(documents[0] if len(jobs) == 1 and documents else documents)
    report(problems)


def _listed_together(store: ObjectStore, jobs: Sequence[JobPaths]) -> dict[JobPaths, ListedJob]:
    """List Arroyo jobs first, so that one quiet period serves all of them."""
    answers = concurrently(lambda paths: is_arroyo_job(store, paths), jobs)
    arroyos = [paths for paths, is_arroyo in zip(jobs, answers, strict=True) if is_arroyo]
    # The time is taken behind each listing: nothing counts as quiet before it was listed.
    return {
        paths: ListedJob(objects=list_objects(store, paths), at_micros=wall_clock())
        for paths in arroyos
    }


def _plan_rewrite(
    store: ObjectStore, paths: JobPaths, given: dict[str, Any], on_progress: OnProgress
) -> RewriteOutcome:
    plan = plan_rewrite(store, paths, given["directory"], _settings(given), on_progress=on_progress)
    return RewriteOutcome.of_plan(plan)


def _rewrite(
    store: ObjectStore,
    paths: JobPaths,
    given: dict[str, Any],
    options: RewriteOptions,
    *,
    spark: SparkSettings | None,
) -> RewriteOutcome:
    rewrite_options = replace(
        options,
        run=runner(spark),
        quiet_seconds=given["quiet_seconds"],
        sleep=sleep_until_quiet(paths),
    )
    return run_rewrite(store, paths, given["directory"], _settings(given), rewrite_options)


def _compact(
    store: ObjectStore,
    paths: JobPaths,
    settings: CompactionSettings,
    options: CompactionOptions,
    *,
    spark: SparkSettings | None,
) -> CompactionOutcome:
    if spark is None:
        return run_compaction(store, paths, settings, options)
    from arroyo_dagster.spark.compaction import run_compaction_on_spark

    return run_compaction_on_spark(
        session_of(spark), store, paths, settings, options, thresholds=spark.thresholds
    )


def _outcome_json(outcome: CompactionOutcome | RewriteOutcome) -> dict[str, Any]:
    if isinstance(outcome, RewriteOutcome):
        return rewrite_json(outcome)
    return {
        "plan": plain_values(outcome.plan),
        "done": outcome.changed,
        "files_after": outcome.files_after,
        "size_bytes_after": outcome.size_bytes_after,
        "published": outcome.published,
        "epoch": outcome.epoch,
        "engines": plain_values(outcome.engines),
    }


def _print_outcome(outcome: CompactionOutcome | RewriteOutcome, *, yes: bool) -> None:
    if isinstance(outcome, RewriteOutcome):
        print_rewrite(outcome, yes=yes, as_json=False)
        return
    plan = outcome.plan
    if not yes or not outcome.changed:
        _print_merges(plan)
        print_left_out(_name(plan), plan.left_out)
    for choice in outcome.engines:
        click.echo(f"{_name(plan)}: {choice}")
    print_text(f"{_name(plan)}: {_format_outcome(outcome, yes=yes)}")


def _format_outcome(outcome: CompactionOutcome, *, yes: bool) -> str:
    plan = outcome.plan
    if not plan.merges and not outcome.changed:
        return f"nothing to merge at epoch {plan.epoch}"
    if not yes:
        return f"{_format_forecast(plan)}; nothing was changed, add --yes to execute"
    sizes = (
        f"{format_bytes(plan.size_bytes_before)} became {format_bytes(outcome.size_bytes_after)}"
    )
    files = f"{plural(plan.files_before, 'file')} became {outcome.files_after}, {sizes}"
    if outcome.epoch is not None:
        return f"{files}; epoch {outcome.epoch} lists them"
    return f"{files}; the job adopts them at its next checkpoint"
