"""`expire`: delete the oldest epochs. Without --yes nothing changes."""

from __future__ import annotations

import click

from arroyo_dagster.cli.common import main, open_to_read, open_url, store_options
from arroyo_dagster.cli.rendering import print_json, print_lease_event, show_progress
from arroyo_dagster.cli.settings import setting_option, settings_options
from arroyo_dagster.state.codec.gc import gc_plan_to_json
from arroyo_dagster.state.model.garbage import Retention
from arroyo_dagster.state.model.leases import LeaseSettings
from arroyo_dagster.state.model.units import format_bytes
from arroyo_dagster.state.operations.catalog.jobs import find_job
from arroyo_dagster.state.operations.gc.execute import GcOptions, GcOutcome, run_gc
from arroyo_dagster.state.operations.gc.expire import to_keep
from arroyo_dagster.state.operations.gc.plan import plan_gc


@main.command()
@click.argument("job")
@setting_option(Retention, "keep_epochs", required=True)
@click.option("--yes", is_flag=True, help="Delete. Without it, print the plan only.")
@settings_options(LeaseSettings)
@store_options
def expire(
    job: str,
    keep_epochs: int,
    yes: bool,
    lease_wait_seconds: float,
    url: str | None,
    as_json: bool,
) -> None:
    """Delete the oldest epochs of a managed job, and the files that only they list.

    Dry run unless --yes is given.

    \b
    Example:
      arroyo-state expire orders/main --keep 10 --url s3://bucket/arroyo
    """
    store = open_url(url) if yes else open_to_read(url)
    paths = find_job(store, job)
    request = to_keep(keep_epochs)
    with show_progress(as_json=as_json) as on_progress:
        if yes:
            options = GcOptions(
                lease_wait_seconds=lease_wait_seconds,
                on_lease=print_lease_event(paths),
                on_progress=on_progress,
            )
            outcome = run_gc(store, paths, request, options)
        else:
            plan = plan_gc(store, paths, request, on_progress=on_progress)
            outcome = GcOutcome.of_plan(plan)
    plan = outcome.plan
    kept_epochs = plan.proof.epochs - len(plan.epochs)
    if as_json:
        print_json(
            {
                "plan": gc_plan_to_json(plan),
                "done": outcome.done,
                "kept_epochs": kept_epochs,
                "files": len(plan.data),
                "size_bytes": plan.data.size_bytes,
            }
        )
        return
    went = (
        "deleted" if outcome.done else "would be deleted; nothing was deleted, add --yes to execute"
    )
    click.echo(
        f"{paths.root}: {len(plan.epochs)} epochs, {len(plan.data)} files, "
        f"{format_bytes(plan.data.size_bytes)} {went}; {kept_epochs} epochs stay"
        if plan.epochs
        else f"{paths.root}: nothing to expire, {kept_epochs} epochs stay"
    )
