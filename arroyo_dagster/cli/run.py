"""`run` and `stop`: start and stop managed pipelines."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

import click

from arroyo_dagster.cli.common import if_interrupted, main, open_url, store_options
from arroyo_dagster.cli.rendering import print_json, seconds
from arroyo_dagster.cli.settings import FiniteRange, WholeNumber
from arroyo_dagster.cli.spark import print_choice, spark_options
from arroyo_dagster.engine.in_process import run_pipeline as run_in_process
from arroyo_dagster.engine.loading import load_pipeline
from arroyo_dagster.engine.pipeline import Pipeline
from arroyo_dagster.engine.pipeline_run import OnEpoch, RunOutcome
from arroyo_dagster.engine.stop_requests import request_stop
from arroyo_dagster.errors import InputError, StorageError
from arroyo_dagster.spark.settings import SparkSettings
from arroyo_dagster.state.metadata.tree import CheckpointTree
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.clock import wall_clock
from arroyo_dagster.state.model.layout import Layout
from arroyo_dagster.state.model.units import format_bytes, plural
from arroyo_dagster.state.operations.catalog.jobs import find_job, summarise_job
from arroyo_dagster.state.planning.restore.reads import is_at_rest
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
        from arroyo_dagster.cli.surgery.rollback import go_back

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
