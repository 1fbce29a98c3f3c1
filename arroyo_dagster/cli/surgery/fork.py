"""`fork`: give a stopped Arroyo job the state of another one. Without --yes nothing changes."""

from __future__ import annotations

from typing import Any

import click

from arroyo_dagster.cli.common import main
from arroyo_dagster.cli.surgery.commands import carry_out
from arroyo_dagster.cli.surgery.options import edit_options, opened
from arroyo_dagster.cli.surgery.sources import open_source, source_options
from arroyo_dagster.cli.surgery.window import check_window, window_options
from arroyo_dagster.state.operations.catalog.jobs import find_job
from arroyo_dagster.state.operations.surgery.create import job_to_create
from arroyo_dagster.state.operations.surgery.fork import plan_fork, run_fork
from arroyo_dagster.state.operations.surgery.window import PlannableEdit


@main.command()
@source_options
@click.option(
    "--create",
    is_flag=True,
    help="JOB has never finished a checkpoint: create its first epoch. In the legacy layout this "
    "needs --arroyo-db or --arroyo-api.",
)
@window_options
@edit_options
def fork(source: str, job: str, from_url: str | None, create: bool, **given: Any) -> None:
    """Give a stopped Arroyo job the state of another job of the same SQL.

    SOURCE is JOB or JOB@EPOCH; it is only read, and may run. JOB keeps the state of its sinks.
    Create JOB, let it take a checkpoint, and stop it with a checkpoint first.

    \b
    Example:
      arroyo-state fork job_a job_b --assume job_b=stopped
    """
    check_window(given)
    if create and given["in_window"]:
        raise click.UsageError(
            "--create does not go with --window: the job has no epoch to stop at"
        )
    store, paths, directory = opened(job, given, job_to_create if create else find_job)
    taken = open_source(store, source, from_url)
    planned = PlannableEdit(
        paths,
        plan=lambda to, status: plan_fork(taken, to, paths, status, create=create),
        run=lambda to, status, options: run_fork(taken, to, paths, status, options, create=create),
    )
    carry_out(planned, store, directory, given)
