"""`undo`: restore the metadata from before the last edit, compaction or rebuild."""

from __future__ import annotations

import click

from arroyo_dagster.cli.common import main, open_to_read, open_url, print_lease_event, store_options
from arroyo_dagster.cli.directory import directory_options
from arroyo_dagster.cli.settings import settings_options
from arroyo_dagster.cli.surgery.rendering import show_managed_undo, show_undo
from arroyo_dagster.state.model.leases import LeaseSettings
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
from arroyo_dagster.state.operations.catalog.jobs import find_job
from arroyo_dagster.state.operations.surgery.execute import EditOptions
from arroyo_dagster.state.operations.surgery.managed.execute import (
    plan_managed_undo,
    run_managed_undo,
)
from arroyo_dagster.state.operations.surgery.managed.plan import is_managed
from arroyo_dagster.state.operations.undo import UndoOptions, UndoOutcome, plan_undo, run_undo


@main.command()
@click.argument("job")
@click.option(
    "--yes", is_flag=True, help="Restore the metadata. Without it, print the objects only."
)
@directory_options
@settings_options(LeaseSettings)
@store_options
def undo(
    job: str,
    yes: bool,
    directory: JobDirectory,
    lease_wait_seconds: float,
    url: str | None,
    as_json: bool,
) -> None:
    """Restore the state from before the last edit, in-place compaction or rebuild.

    Only possible until the job is started again. Each call undoes one of them, the newest first. An
    edit of a managed job is undone by an epoch with the content from before. Objects that a rebuild
    has written are damaged or missing again.

    \b
    Example:
      arroyo-state undo job_x --url s3://bucket/arroyo --assume job_x=stopped
    """
    store = open_url(url) if yes else open_to_read(url)
    paths = find_job(store, job)
    options = EditOptions(lease_wait_seconds=lease_wait_seconds, on_lease=print_lease_event(paths))
    if is_managed(store, paths):
        managed_undo = (
            run_managed_undo(store, paths, directory, options)
            if yes
            else plan_managed_undo(store, paths, directory)
        )
        show_managed_undo(paths, managed_undo, done=yes, as_json=as_json)
        return
    waiting = UndoOptions(lease_wait_seconds=lease_wait_seconds, on_lease=print_lease_event(paths))
    outcome = (
        run_undo(store, paths, directory, waiting)
        if yes
        else UndoOutcome.of_plan(plan_undo(store, paths, directory))
    )
    show_undo(paths, outcome, as_json=as_json)
