"""`expire`: delete the oldest epochs. Without --yes nothing changes."""

from __future__ import annotations

import click

from arroyo_dagster.cli.common import main, open_to_read, open_url, store_options
from arroyo_dagster.cli.rendering import format_bytes, print_json
from arroyo_dagster.state.codec.gc import gc_plan_to_json
from arroyo_dagster.state.operations.catalog.jobs import find_job
from arroyo_dagster.state.operations.gc.expire import expire_job


@main.command()
@click.argument("job")
@click.option("--keep", type=click.IntRange(2), required=True, help="How many epochs to keep.")
@click.option("--yes", is_flag=True, help="Delete. Without it, print the plan only.")
@store_options
def expire(job: str, keep: int, yes: bool, url: str | None, as_json: bool) -> None:
    """Delete the oldest epochs of a managed job, and the files that only they list.

    Dry run unless --yes is given.
    """
    store = open_url(url) if yes else open_to_read(url)
    paths = find_job(store, job)
    outcome = expire_job(store, paths, keep_epochs=keep, yes=yes)
    if as_json:
        print_json(
            {
                "plan": gc_plan_to_json(outcome.plan),
                "done": outcome.done,
                "kept_epochs": outcome.kept_epochs,
                "files": outcome.files,
                "size_bytes": outcome.size_bytes,
            }
        )
        return
    went = (
        "deleted" if outcome.done else "would be deleted; nothing was deleted, add --yes to execute"
    )
    click.echo(
        f"{paths.root}: {len(outcome.plan.epochs)} epochs, {outcome.files} files, "
        f"{format_bytes(outcome.size_bytes)} {went}; {outcome.kept_epochs} epochs stay"
        if outcome.plan.epochs
        else f"{paths.root}: nothing to expire, {outcome.kept_epochs} epochs stay"
    )
