"""`run` and `stop`: start and stop managed pipelines."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping

import click

from arroyo_dagster.cli.common import (
    if_interrupted,
    leased,
    main,
    open_to_read,
    open_url,
    store_options,
)
from arroyo_dagster.cli.rendering import clock, print_json, print_table, seconds, show_progress
from arroyo_dagster.cli.settings import FiniteRange, WholeNumber, settings_options
from arroyo_dagster.cli.spark import print_choice, spark_options
from arroyo_dagster.engine.in_process import run_pipeline as run_in_process
from arroyo_dagster.engine.loading import load_pipeline
from arroyo_dagster.engine.pipeline import Pipeline
from arroyo_dagster.engine.pipeline_run import OnEpoch, RunOutcome
from arroyo_dagster.engine.stop_requests import request_stop
from arroyo_dagster.errors import InputError, StorageError
from arroyo_dagster.spark.settings import SparkSettings
from arroyo_dagster.state.codec.derived import plain_values
from arroyo_dagster.state.metadata.tree import CheckpointTree
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.clock import wall_clock
from arroyo_dagster.state.model.ids import Epoch
from arroyo_dagster.state.model.layout import JobPaths, Layout
from arroyo_dagster.state.model.leases import EXPIRED_SECONDS, LeaseSettings
from arroyo_dagster.state.model.rollback import RollbackOutcome, RollbackPlan
from arroyo_dagster.state.model.units import format_bytes, plural
from arroyo_dagster.state.operations.catalog.jobs import find_job, summarise_job
from arroyo_dagster.state.operations.restore.rollback import (
    plan_rollback,
    restorable_epochs,
    rollback_done,
    run_rollback,
)
from arroyo_dagster.state.planning.restore.reads import is_at_rest
from arroyo_dagster.state.planning.restore.rollback import ranges, rollback_command
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore


@main.command()
@click.argument("pipeline", metavar="MODULE:PIPELINE")
@click.option(
    "--epochs", type=WholeNumber(1), help="Stop with a checkpoint after this many epochs."
)
@click.option("--follow", is_flag=True, help="Wait for new records when the sources have none.")
@click.option(
    "--interval",
    type=FiniteRange(0),
    default=0.0,
    metavar="SECONDS",
    help="The minimum time between two epochs.",
)
@click.option(
    "--from-epoch",
    type=WholeNumber(0),
    metavar="N",
    help="Go back to epoch N first, as `rollback` does, unless this was done before.",
)
@click.option(
    "--allow-dropped",
    multiple=True,
    metavar="NAME",
    help="Leave the state of an operator that the pipeline no longer has, or of a table "
    "(OPERATOR/TABLE), behind in the older epochs. Repeatable.",
)
@spark_options("Run on Spark instead of in this process.", always=True)
@store_options
def run(
    pipeline: str,
    epochs: int | None,
    follow: bool,
    interval: float,
    from_epoch: int | None,
    allow_dropped: tuple[str, ...],
    spark: SparkSettings | None,
    url: str | None,
    as_json: bool,
) -> None:
    """Run a pipeline from its newest checkpoint.

    MODULE:PIPELINE names a Pipeline, or a function without arguments that returns one;
    path/to/file.py:PIPELINE works too. Stop it with `arroyo-state stop JOB`, or kill it: the next
    run continues from its newest epoch.

    \b
    Example:
      arroyo-state run pipelines.py:ORDERS --url s3://bucket/arroyo --epochs 10
    """
    store = open_url(url)
    if_interrupted("the next run continues from the newest epoch")
    loaded = load_pipeline(pipeline)
    if from_epoch is not None:
        loaded.check()
        go_back(store, loaded.paths, from_epoch, _line_printer(as_json))
    with _progress(store, loaded, as_json=as_json) as on_epoch:
        if spark is not None:
            from arroyo_dagster.spark.engine import pipeline as on_spark

            options = on_spark.SparkOptions(
                spark=spark,
                on_spark=print_choice,
                max_epochs=epochs,
                interval_seconds=interval,
                follow=follow,
                allow_dropped=allow_dropped,
            )
            outcome = on_spark.run_pipeline(loaded, store, options, on_epoch=on_epoch)
        else:
            outcome = run_in_process(
                loaded,
                store,
                max_epochs=epochs,
                follow=follow,
                interval_seconds=interval,
                allow_dropped=allow_dropped,
                on_epoch=on_epoch,
            )
    _print_outcome(loaded, outcome, as_json=as_json)


@contextlib.contextmanager
def _progress(store: ObjectStore, pipeline: Pipeline, *, as_json: bool) -> Iterator[OnEpoch]:
    """Print a line per epoch, and on a terminal the current activity below it."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=as_json, highlight=False, markup=False)
    write = console.print if console.is_terminal else _line_printer(as_json)

    def on_epoch(checkpoint: Checkpoint) -> None:
        write(_epoch_line(store, pipeline, checkpoint))

    with contextlib.ExitStack() as stack:
        if console.is_terminal:
            stack.enter_context(console.status(Text(f"running {pipeline.paths.root}")))
        yield on_epoch


def _line_printer(to_stderr: bool) -> Callable[[str], None]:
    def write(line: str) -> None:
        click.echo(line, err=to_stderr)
        (sys.stderr if to_stderr else sys.stdout).flush()

    return write


def _epoch_line(store: ObjectStore, pipeline: Pipeline, checkpoint: Checkpoint) -> str:
    # What the epoch itself wrote lies in its own directory; the rest it carries forward.
    own = pipeline.paths.checkpoint(checkpoint.epoch, checkpoint.worker_generation)
    paths = [path for path in dict.fromkeys(checkpoint.paths) if path.startswith(f"{own}/")]
    sizes = [info.size_bytes for info in concurrently(store.head, paths) if info is not None]
    return (
        f"epoch {checkpoint.epoch}: {plural(len(paths), 'file')}, {format_bytes(sum(sizes))}, "
        f"{seconds(checkpoint):.2f} s"
    )


def _print_outcome(pipeline: Pipeline, outcome: RunOutcome, *, as_json: bool) -> None:
    newest = None if outcome.newest is None else outcome.newest.epoch
    if as_json:
        print_json(
            {
                "job": pipeline.paths.job,
                "pipeline": pipeline.paths.pipeline,
                "epochs": outcome.epochs,
                "newest_epoch": newest,
                "exhausted": outcome.exhausted,
                "retention_failures": outcome.retention_failures,
                "overdue_epochs": outcome.overdue_epochs,
            }
        )
        return
    wrote = f"wrote {outcome.epochs} epoch{'' if outcome.epochs == 1 else 's'}"
    why = "the sources have ended" if outcome.exhausted else "the next run continues from there"
    click.echo(f"{pipeline.paths.root}: {wrote}, the newest is {newest or 'none'}; {why}")
    if outcome.overdue_epochs:
        click.echo(
            f"{pipeline.paths.root}: {outcome.overdue_epochs} expired epochs could not be "
            "deleted; the next run tries again",
            err=True,
        )


@main.command()
@click.argument("job")
@store_options
def stop(job: str, url: str | None, as_json: bool) -> None:
    """Ask a running managed job to stop with a checkpoint.

    \b
    Example:
      arroyo-state stop orders/main --url s3://bucket/arroyo
    """
    store = open_url(url)
    paths = find_job(store, job)
    newest = summarise_job(store, paths)
    if isinstance(newest.problem, StorageError):
        raise newest.problem
    is_empty_legacy = newest.newest is None and paths.layout is Layout.LEGACY
    if is_empty_legacy or (newest.newest and newest.newest.progress is None):
        raise InputError(
            "this is an Arroyo job, which cannot be stopped through its state",
            job=paths.root,
            next_step="stop it with a checkpoint in Arroyo's UI or through its REST API",
        )
    started = CheckpointTree(store, paths).fence()
    number: int | None = started
    # In the legacy layout a run leaves no trace before its first epoch: ask, it does no harm.
    at_rest = (
        paths.layout is Layout.PROTOCOL
        and newest.newest is not None
        and is_at_rest(newest.newest, started)
    )
    if not at_rest:
        number = request_stop(store, paths, wall_clock())
    if as_json:
        print_json(
            {
                "job": paths.job,
                "pipeline": paths.pipeline,
                "at_rest": at_rest,
                "generation": number,
                "newest_epoch": newest.newest_epoch,
            }
        )
    elif at_rest:
        click.echo(f"{paths.root} is at rest: it stopped with epoch {newest.newest_epoch}.")
    else:
        click.echo(
            f"{paths.root}: asked worker generation {number} to stop. It writes one last epoch, "
            "then ends; `arroyo-state epochs` lists it. If no run is alive, nothing happens, "
            "and the next run is not affected."
        )


# ---- `rollback`: take a managed job back to an older epoch. Without --yes nothing changes --------

FILES_PRINTED = 10

_OWNER = "arroyo-state rollback"


@main.command()
@click.argument("job")
@click.argument("epoch", type=WholeNumber(0), required=False)
@click.option("--yes", is_flag=True, help="Roll back. Without it, print the plan only.")
@settings_options(LeaseSettings)
@store_options
def rollback(
    job: str,
    epoch: int | None,
    yes: bool,
    lease_wait_seconds: float,
    url: str | None,
    as_json: bool,
) -> None:
    """Take a managed job back to an older epoch. Dry run unless --yes is given.

    The content of EPOCH becomes the newest epoch, and the sources go back to its offsets. Later
    epochs stay until they expire, but no run continues from them. Without EPOCH, list the epochs
    that can be chosen. Stop the job first: the rollback fences a run that is still alive.

    \b
    Example:
      arroyo-state rollback orders/main 41 --url s3://bucket/arroyo
    """
    store = open_url(url) if yes else open_to_read(url)
    paths = find_job(store, job)
    if epoch is None:
        if yes:
            raise click.UsageError("--yes needs EPOCH")
        epochs = restorable_epochs(store, paths)
        if as_json:
            print_json({"job": paths.job, "pipeline": paths.pipeline, "restorable_epochs": epochs})
        else:
            click.echo(f"{paths.root} can go back to epochs: {ranges(epochs)}")
        return
    if not yes:
        with show_progress(as_json=as_json, name=paths.root) as on_progress:
            plan = plan_rollback(store, paths, epoch, on_progress)
        if as_json:
            print_json({"plan": plain_values(plan), "done": False, "epoch": None})
            return
        _print_plan(plan)
        click.echo(f"Nothing was changed. To execute: {rollback_command(paths, plan.epoch)} --yes")
        return
    outcome = _planned_and_run(store, paths, epoch, lease_wait_seconds)
    if as_json:
        print_json({"plan": plain_values(outcome.plan), "done": True, "epoch": outcome.epoch})
        return
    _print_plan(outcome.plan)
    click.echo(done_line(outcome))


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
