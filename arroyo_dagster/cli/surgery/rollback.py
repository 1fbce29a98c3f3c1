"""`rollback`: take a job back to an older epoch. Without --yes nothing changes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import click

from arroyo_dagster.cli.common import leased, main
from arroyo_dagster.cli.rendering import clock, print_json, print_table, show_progress
from arroyo_dagster.cli.settings import WholeNumber
from arroyo_dagster.cli.surgery.options import edit_options, opened
from arroyo_dagster.errors import InputError
from arroyo_dagster.state.codec.derived import plain_values
from arroyo_dagster.state.model.ids import Epoch
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.leases import EXPIRED_SECONDS
from arroyo_dagster.state.model.rollback import RollbackOutcome, RollbackPlan
from arroyo_dagster.state.model.units import plural
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
from arroyo_dagster.state.operations.restore.rollback import (
    plan_rollback,
    restorable_epoch,
    restorable_epochs,
    rollback_done,
    run_rollback,
)
from arroyo_dagster.state.planning.restore.rollback import ranges, rollback_command
from arroyo_dagster.state.storage.store import ObjectStore

FILES_PRINTED = 10

_OWNER = "arroyo-state rollback"


@main.command()
@click.argument("job")
@click.argument("epoch", type=WholeNumber(0), required=False)
@edit_options
def rollback(job: str, epoch: int | None, **given: Any) -> None:
    """Take a job back to an older epoch. Dry run unless --yes is given.

    Without EPOCH, list the epochs that can be chosen. Later epochs stay until they expire.

    Of a managed job, the content of EPOCH becomes the newest epoch, and the sources go back to its
    offsets. Stop the job first: the rollback fences a run that is still alive.

    Of a stopped Arroyo job, the newest epoch gets the tables, positions and watermarks of EPOCH, in
    place; sinks that commit in two phases keep theirs. `undo` undoes it until the job is started.

    \b
    Examples:
      arroyo-state rollback orders/main 41 --url s3://bucket/arroyo
      arroyo-state rollback job_x 41 --assume job_x=stopped
    """
    yes, as_json = given["yes"], given["as_json"]
    store, paths, directory = opened(job, given)
    if epoch is None:
        if yes:
            raise click.UsageError("--yes needs EPOCH")
        epochs = restorable_epochs(store, paths)
        if as_json:
            print_json({"job": paths.job, "pipeline": paths.pipeline, "restorable_epochs": epochs})
        else:
            click.echo(f"{paths.root} can go back to epochs: {ranges(epochs)}")
        return
    if restorable_epoch(store, paths, epoch).progress is None:
        _rollback_in_place(store, paths, directory, epoch, given)
        return
    if given["approve"] is not None:
        raise InputError(
            "the rollback of a managed job has no digest to approve",
            job=paths.root,
            next_step="call it without --approve: it is refused if an epoch was published since",
        )
    if not yes:
        with show_progress(as_json=as_json, name=paths.root) as on_progress:
            plan = plan_rollback(store, paths, epoch, on_progress)
        if as_json:
            print_json({"plan": plain_values(plan), "done": False, "epoch": None})
            return
        _print_plan(plan)
        click.echo(f"Nothing was changed. To execute: {rollback_command(paths, plan.epoch)} --yes")
        return
    outcome = _planned_and_run(store, paths, epoch, given["lease_wait_seconds"])
    if as_json:
        print_json({"plan": plain_values(outcome.plan), "done": True, "epoch": outcome.epoch})
        return
    _print_plan(outcome.plan)
    click.echo(done_line(outcome))


def _rollback_in_place(
    store: ObjectStore, paths: JobPaths, directory: JobDirectory, epoch: int, given: dict[str, Any]
) -> None:
    """Plan or execute the rollback of an Arroyo job."""
    from arroyo_dagster.cli.surgery.commands import carry_out
    from arroyo_dagster.state.operations.surgery.rollback import plan_job_rollback, run_job_rollback
    from arroyo_dagster.state.operations.surgery.window import PlannableEdit

    planned = PlannableEdit(
        paths,
        plan=lambda target, status: plan_job_rollback(target, paths, status, epoch),
        run=lambda target, status, options: run_job_rollback(target, paths, status, epoch, options),
    )
    carry_out(planned, store, directory, {**given, "in_window": False})


def go_back(store: ObjectStore, paths: JobPaths, epoch: int, write: Callable[[str], None]) -> None:
    """Roll back for `run --from-epoch`, unless it was done before: a supervisor may start runs
    again.

    Args:
        write: prints a line.
    """
    done = rollback_done(store, paths, epoch)
    if done is not None:
        write(
            f"{paths.root}: epoch {done} already restored epoch {epoch}; the run continues from "
            f"the newest epoch. To go back once more: {rollback_command(paths, Epoch(epoch))} "
            "--yes"
        )
        return
    outcome = _planned_and_run(store, paths, epoch, EXPIRED_SECONDS)
    for line in summary_lines(outcome.plan):
        write(line)
    write(done_line(outcome))


def _planned_and_run(
    store: ObjectStore, paths: JobPaths, epoch: int, wait_seconds: float
) -> RollbackOutcome:
    """Roll back under the lease. Who held it may have published an epoch: the plan is made then."""
    plan_rollback(store, paths, epoch)  # an epoch that cannot be chosen needs no lease
    with leased(store, paths, _OWNER, wait_seconds) as held:
        return run_rollback(held, plan_rollback(held, paths, epoch))


def done_line(outcome: RollbackOutcome) -> str:
    plan = outcome.plan
    return (
        f"{plan.paths.root}: epoch {outcome.epoch} now holds the content of epoch {plan.epoch}; "
        "the next run continues from it"
    )


def _print_plan(plan: RollbackPlan) -> None:
    columns = ["epoch", "state", "finished", "rows written", "problem"]
    cells = [
        [entry.epoch, entry.state, clock(entry.finished_micros), entry.rows, entry.problem]
        for entry in plan.given_up
    ]
    first, *rest = summary_lines(plan)
    click.echo(first)
    if cells:
        print_table(columns, cells)
    for line in rest:
        click.echo(line)


def summary_lines(plan: RollbackPlan) -> Iterator[str]:
    """Yield what a rollback does, what it gives up, and its warnings."""
    numbers = ranges([entry.epoch for entry in plan.given_up])
    yield (
        f"{plan.paths.root}: goes back to epoch {plan.epoch}; epoch {plan.publishes} will hold "
        f"its content. Given up: epochs {numbers}"
    )
    if plan.rows is not None:
        yield f"rows written by these epochs: {plan.rows}"
    yield from _offset_lines(plan.offsets_now, plan.offsets_then)
    for sink in plan.committed:
        yield (
            f"output stays visible, and its rows are written again: sink {sink.operator}, epoch "
        ) + (f"{sink.epoch}" if sink.files is None else f"{sink.epoch}: {_names(sink.files)}")
    for warning in plan.warnings:
        yield f"warning: {warning}"


def _offset_lines(now: Mapping[str, object] | None, then: Mapping[str, object]) -> Iterator[str]:
    for name, offset in then.items():
        before = "unknown" if now is None else json.dumps(now.get(name), sort_keys=True)
        after = json.dumps(offset, sort_keys=True)
        yield f"source {name} goes back from {before} to {after}"


def _names(files: tuple[str, ...]) -> str:
    more = len(files) - FILES_PRINTED
    names = ", ".join(files[:FILES_PRINTED]) or "no files"
    return f"{plural(len(files), 'file')}: {names}" + (f" and {more} more" if more > 0 else "")
