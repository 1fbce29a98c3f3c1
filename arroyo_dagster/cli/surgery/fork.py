"""`fork`: give a stopped Arroyo job the state of another one. Without --yes nothing changes."""

from __future__ import annotations

from typing import Any

from arroyo_dagster.cli.common import main
from arroyo_dagster.cli.surgery.commands import carry_out, edit_options, opened
from arroyo_dagster.cli.surgery.sources import open_source, source_options
from arroyo_dagster.cli.surgery.window import check_window, window_options
from arroyo_dagster.state.operations.surgery.fork import plan_fork, run_fork
from arroyo_dagster.state.operations.surgery.window import PlannableEdit


@main.command()
@source_options
@window_options
@edit_options
def fork(source: str, job: str, epoch: int | None, from_url: str | None, **given: Any) -> None:
    """Give a stopped Arroyo job the state of another job of the same SQL.

    SOURCE is only read, and may run. JOB keeps the state of its sinks. Create JOB, let it take a
    checkpoint, and stop it with a checkpoint first.

    \b
    Example:
      arroyo-state fork job_a job_b --assume job_b=stopped
    """
    check_window(given)
    store, paths, directory = opened(job, given)
    taken = open_source(store, source, epoch, from_url)
    planned = PlannableEdit(
        paths,
        plan=lambda at, status: plan_fork(taken, at, paths, status),
        run=lambda at, status, options: run_fork(taken, at, paths, status, options),
    )
    carry_out(planned, store, directory, given)
