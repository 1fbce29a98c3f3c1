"""`compact window`: stop a running Arroyo job, rewrite its state and start it again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click

from arroyo_dagster.cli.common import if_interrupted, open_to_read, open_url, store_options
from arroyo_dagster.cli.compaction.group import compact
from arroyo_dagster.cli.compaction.rewrite import format_rewrite, print_plan, rewrite_json, runner
from arroyo_dagster.cli.compaction.window_rendering import (
    exit_after,
    print_step,
    print_window,
    window_json,
)
from arroyo_dagster.cli.directory import API_VARIABLE, token_of_environment
from arroyo_dagster.cli.rendering import clock, print_json
from arroyo_dagster.cli.settings import (
    NamedSetting,
    named_settings,
    setting_option,
    settings_options,
)
from arroyo_dagster.cli.spark import spark_options
from arroyo_dagster.errors import FormatError, InputError
from arroyo_dagster.orchestration.compaction.daily_window import DailyWindow, micros_of
from arroyo_dagster.spark.settings import SparkSettings
from arroyo_dagster.state.codec.derived import plain_values
from arroyo_dagster.state.model.compaction import CompactionPolicy, CompactionSettings
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.leases import LeaseSettings
from arroyo_dagster.state.model.maintenance_window import (
    WindowEnd,
    WindowLimits,
    WindowRecord,
    WindowSteps,
)
from arroyo_dagster.state.model.settings import settings_from
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
from arroyo_dagster.state.operations.catalog.jobs import find_job
from arroyo_dagster.state.operations.compaction.maintenance_window import (
    RewriteWindow,
    WindowOptions,
    run_window,
)
from arroyo_dagster.state.operations.compaction.window_recovery import (
    not_done,
    read_window_record,
    recover_window,
)
from arroyo_dagster.state.storage.arroyo.api import ArroyoControl
from arroyo_dagster.state.storage.store import ObjectStore


@compact.command()
@click.argument("job")
@click.option(
    "--between",
    metavar="HH:MM-HH:MM",
    help="The daily maintenance window. The job runs again before the window closes.",
)
@click.option(
    "--time-zone",
    default="UTC",
    show_default=True,
    help="Time zone of --between, for example Europe/Berlin.",
)
@click.option("--now", is_flag=True, help="Start now. Replaces --between.")
@click.option(
    "--arroyo-api",
    "api",
    metavar="URL",
    envvar=API_VARIABLE,
    required=True,
    help="Arroyo's REST API, http://HOST:5115, used to stop and start the job. Default: "
    f"{API_VARIABLE}.",
)
@setting_option(CompactionSettings, "policy", alone=True, default=CompactionPolicy.FULL.value)
@named_settings(NamedSetting(WindowLimits), "how long a step may take", "stop_seconds=600")
@setting_option(WindowSteps, "verify_level")
@settings_options(LeaseSettings)
@click.option("--yes", is_flag=True, help="Execute the plan. Without it, print the plan only.")
@spark_options("Write the new files on Spark.")
@store_options
def window(
    job: str,
    between: str | None,
    time_zone: str,
    now: bool,
    api: str,
    policy: str,
    lease_wait_seconds: float,
    yes: bool,
    spark: SparkSettings | None,
    url: str | None,
    as_json: bool,
    limits: tuple[tuple[str, float], ...],
    verify_level: int,
) -> None:
    """Stop a running Arroyo job with a checkpoint, rewrite its state, start it again.

    If a step fails, the job is started again, and the steps that were done are printed. If this
    process dies in between, the next call reports that the job is down and starts it, at any time
    of day. A job that another process maintains is not stopped, but skipped after --lease-wait,
    with exit code 4.

    \b
    Example:
      arroyo-state compact window job_x --url s3://bucket/arroyo --now --arroyo-api http://localhost:5115
    """
    if (between is None) == (not now):
        raise click.UsageError("give a time: --between HH:MM-HH:MM, or --now")
    daily = None if between is None else DailyWindow.parse(between, time_zone)
    store = open_url(url) if yes else open_to_read(url)
    if yes:
        if_interrupted("the job may be down; the same command starts it again")
    paths = find_job(store, job)
    control = ArroyoControl(api, token=token_of_environment())
    options = WindowOptions(
        settings=CompactionSettings(policy=CompactionPolicy(policy)),
        limits=settings_from(WindowLimits, dict(limits)),
        closes_at_micros=None,
        verify_level=verify_level,
        lease_wait_seconds=lease_wait_seconds,
        run=runner(spark if yes else None),
        on_step=print_step if not as_json else lambda step: None,
    )
    outcome = _carried_out(store, paths, control, options, daily, yes=yes)
    _print_outcome(paths, outcome, as_json=as_json)
    exit_after(outcome)


def _carried_out(
    store: ObjectStore,
    paths: JobPaths,
    control: ArroyoControl,
    options: WindowOptions,
    daily: DailyWindow | None,
    *,
    yes: bool,
) -> RewriteWindow:
    left = read_window_record(store, paths)
    if left is not None:
        _report_unfinished(paths, control, left)
        if yes:
            outcome = recover_window(store, paths, control, options)
            if outcome is not None:
                return not_done(paths, outcome)
        else:
            click.echo(
                f"{paths.root}: the job may be down; the same call with --yes starts it again",
                err=True,
            )
    if not yes:
        return run_window(store, paths, control, options, dry_run=True)
    return run_window(store, paths, control, _until_it_closes(options, paths, daily))


def _report_unfinished(
    paths: JobPaths, control: ArroyoControl, left: WindowRecord | FormatError
) -> None:
    """Report first that a window left the job stopped."""
    opened = "an earlier window"
    if isinstance(left, WindowRecord):
        opened = f"the window that {left.owner} opened at {clock(left.opened_at_micros)}"
    click.echo(f"{paths.root}: {opened} has not ended; the job may be down", err=True)
    facts = JobDirectory([control]).find(paths, checkpoints=False).facts
    click.echo(f"{paths.root}: Arroyo reports status {facts.state}", err=True)


def _until_it_closes(
    options: WindowOptions, paths: JobPaths, daily: DailyWindow | None
) -> WindowOptions:
    if daily is None:
        return options
    closes = daily.closes_at()
    if closes is None:
        raise InputError(
            "the window is not open now",
            job=paths.root,
            opens_next=daily.opens_next().to_iso8601_string(),
            next_step="call it again when the window opens, or with --now",
        )
    return replace(options, closes_at_micros=micros_of(closes))


def _print_outcome(paths: JobPaths, outcome: RewriteWindow, *, as_json: bool) -> None:
    if as_json:
        print_json(_as_json(outcome))
        return
    if outcome.end is WindowEnd.DRY_RUN:
        _print_dry_run(paths, outcome)
        return
    done = None
    if outcome.change is not None:
        started = outcome.end is not WindowEnd.AT_REST
        done = format_rewrite(outcome.change, yes=True, started=started)
    print_window(paths, outcome, done)


def _print_dry_run(paths: JobPaths, outcome: RewriteWindow) -> None:
    plan = outcome.plan
    assert plan is not None
    print_plan(plan, plan.left_out)
    if not plan.tables:
        click.echo(
            f"{paths.root}: nothing to rewrite at epoch {plan.epoch}; the job would not be stopped"
        )
        return
    click.echo(
        f"{paths.root}: {plan.before.files} files would become at most {plan.after.files}; the "
        "job was not touched; --yes stops it, rewrites its state and starts it again"
    )


def _as_json(outcome: RewriteWindow) -> dict[str, Any]:
    rewrite = outcome.change
    if rewrite is None and outcome.end is WindowEnd.DRY_RUN and outcome.plan is not None:
        return {"end": outcome.end.value, "plan": plain_values(outcome.plan)}
    return {
        **window_json(outcome),
        "rewrite": None if rewrite is None else rewrite_json(rewrite),
    }
