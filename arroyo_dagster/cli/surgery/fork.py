"""`fork`: give a stopped Arroyo job the state of another one. Without --yes nothing changes."""

from __future__ import annotations

from typing import Any

from arroyo_dagster.cli.common import main
from arroyo_dagster.cli.surgery.commands import (
    edit_options,
    opened,
    options_of,
    show_outcome,
    show_plan,
)
from arroyo_dagster.cli.surgery.sources import open_source, source_options
from arroyo_dagster.state.operations.surgery.fork import plan_fork, run_fork


@main.command()
@source_options
@edit_options
def fork(source: str, job: str, epoch: int | None, from_url: str | None, **given: Any) -> None:
    """Give a stopped Arroyo job the state of another job of the same SQL.

    SOURCE is only read, and may run. JOB keeps the state of its sinks. Create JOB, let it take a
    checkpoint, and stop it with a checkpoint first.

    \b
    Example:
      arroyo-state fork job_a job_b --assume job_b=stopped
    """
    store, paths, directory = opened(job, given)
    taken = open_source(store, source, epoch, from_url)
    if not given["yes"]:
        show_plan(plan_fork(taken, store, paths, directory), as_json=given["as_json"])
        return
    outcome = run_fork(taken, store, paths, directory, options_of(paths, given))
    show_outcome(outcome, as_json=given["as_json"])
