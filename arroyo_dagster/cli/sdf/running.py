"""How `sdf run` and `sdf replay` run services and print the outcome. No options of commands."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from arroyo_dagster.cli.common import EXIT_SKIPPED
from arroyo_dagster.cli.rendering import print_json
from arroyo_dagster.cli.spark import print_choice
from arroyo_dagster.dataflow.definition.definition import Dataflow, Package
from arroyo_dagster.dataflow.in_process import DataflowOptions, DataflowOutcome, run_dataflow
from arroyo_dagster.dataflow.topics.bindings import BindingsText
from arroyo_dagster.dataflow.topics.pipe import ByteStream
from arroyo_dagster.dataflow.topics.wiring import Letters, wire
from arroyo_dagster.dataflow.views.namespaces import Namespaces
from arroyo_dagster.dataflow.views.rendering import borderless
from arroyo_dagster.engine.pipeline import Pipeline
from arroyo_dagster.errors import FormatError
from arroyo_dagster.spark.settings import SparkSettings
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.storage.store import ObjectStore

if TYPE_CHECKING:
    from arroyo_dagster.spark.engine.dataflow.topics import SparkTopics

AnswerBeside = Callable[[Callable[[], bool]], contextlib.AbstractContextManager[Callable[[], bool]]]
"""Answers questions while services run. It gets, and gives, whether the run should stop."""


class ServiceRun:
    """The services of a dataflow with opened topics, in this process or on Spark.

    Args:
        loaded: the definition, and the packages that it imports.
        bound: the bindings.
        store: the object store of the states.
        letters: what becomes of records whose function fails.
        spark: the settings of Spark; None = the services run in this process.
        spark_checkpoint: where Spark logs the offsets of its own sources.
        stdin: the standard input, if a topic is bound to it.

    Raises:
        InputError, NotFoundError: as of `wire`.
    """

    def __init__(
        self,
        loaded: tuple[Dataflow, Mapping[str, Package]],
        bound: BindingsText,
        store: ObjectStore,
        *,
        letters: Letters,
        spark: SparkSettings | None,
        spark_checkpoint: str | None = None,
        stdin: ByteStream | None = None,
    ) -> None:
        self._dataflow, packages = loaded
        self._store, self._letters, self._spark = store, letters, spark
        self._topics = _spark_topics(store, spark, spark_checkpoint)
        self.wired = wire(
            self._dataflow,
            bound,
            store,
            packages=packages,
            stdin=stdin,
            outside=self._topics,
            letters=letters,
        )

    def carry_out(
        self,
        pipelines: Sequence[Pipeline],
        options: DataflowOptions,
        *,
        as_json: bool,
        follow: bool = False,
        answering: AnswerBeside = contextlib.nullcontext,
    ) -> None:
        """Run pipelines until they end or a signal stops them, and print the outcome.

        Exit with `EXIT_SKIPPED` if records failed in the run.

        Args:
            pipelines: what `build_dataflow` or `build_replay` returned; none = nothing to run.
            options: `stop` and `on_epoch` are set here.
            as_json: whether the outcome is one JSON document on stdout.
            follow: on Spark, whether to wait for more.
            answering: answers questions meanwhile.
        """
        failed_before = self._failed_counts()
        outcome = DataflowOutcome(rounds=0, epochs={}, ended=True)
        with _stopping() as stopped, contextlib.ExitStack() as stack:
            for pipe in self.wired.pipes.values():
                stack.callback(pipe.close)
            stop = stack.enter_context(answering(stopped))
            if pipelines:
                options = replace(options, stop=stop, on_epoch=_print_epoch)
                outcome = self._run(pipelines, options, follow=follow)
        counted = self._metrics()
        failed = {
            name: values["failed"] - failed_before.get(name, 0)
            for name, values in counted
            if values["failed"] > failed_before.get(name, 0)
        }
        self._print_outcome(outcome, counted, failed, as_json=as_json)
        if failed:
            click.get_current_context().exit(EXIT_SKIPPED)

    def _run(
        self, pipelines: Sequence[Pipeline], options: DataflowOptions, *, follow: bool
    ) -> DataflowOutcome:
        between = self.wired.between
        if self._spark is None or self._topics is None:
            return run_dataflow(pipelines, self._store, options, between=between)
        from arroyo_dagster.spark.engine.dataflow.pipelines import run_pipelines
        from arroyo_dagster.spark.engine.pipeline import SparkOptions

        return run_pipelines(
            pipelines,
            self._store,
            SparkOptions(
                follow=follow,
                spark=self._spark,
                on_spark=print_choice,
                interval_seconds=options.interval_seconds,
                max_epochs=options.max_rounds,
            ),
            topics=self._topics,
            between=between,
            stop=options.stop,
            on_epoch=options.on_epoch,
        )

    def _metrics(self) -> list[tuple[str, dict[str, Any]]]:
        return [
            (ns.name.removesuffix("/metrics"), dict(zip(ns.names, row.values, strict=True)))
            for ns in Namespaces(self._store, self._dataflow).metrics()
            for row in ns.rows
        ]

    def _failed_counts(self) -> dict[str, int]:
        """Return how often each step has failed since the job began, by `service/step`."""
        try:
            return {name: values["failed"] for name, values in self._metrics()}
        except FormatError:
            return {}  # the start reports what is wrong with the newest epoch

    def _print_outcome(
        self,
        outcome: DataflowOutcome,
        counted: Sequence[tuple[str, Mapping[str, Any]]],
        failed: Mapping[str, int],
        *,
        as_json: bool,
    ) -> None:
        if as_json:
            print_json(
                {
                    "dataflow": self._dataflow.name,
                    "rounds": outcome.rounds,
                    "epochs": outcome.epochs,
                    "ended": outcome.ended,
                    "failed": dict(failed),
                    "metrics": dict(counted),
                }
            )
            return
        columns = ("succeeded", "failed", "dropped_late", "expired")
        lines = [[name, *(str(values.get(key, 0)) for key in columns)] for name, values in counted]
        click.echo(borderless(["Since the job began", *columns], lines), err=True)
        if failed:
            listed = ", ".join(f"{name} {count}" for name, count in failed.items())
            where = (
                "`sdf replay` processes them again"
                if self._letters.written
                else "they were skipped; to keep such records: --on-error dead-letter"
            )
            click.echo(f"failed in this run: {listed}; {where}", err=True)
        why = "every source has ended" if outcome.ended else "the next run continues from there"
        counts = [f"{service} {count}" for service, count in outcome.epochs.items()]
        click.echo(
            f"{self._dataflow.name}: epochs written: {', '.join(counts) or 'none'}; {why}", err=True
        )


def _spark_topics(
    store: ObjectStore, spark: SparkSettings | None, location: str | None
) -> SparkTopics | None:
    """Return the topics of a run on Spark; None = it runs in this process."""
    if spark is None:
        if location:
            raise click.UsageError("--spark-checkpoint: only with --spark")
        return None
    from arroyo_dagster.spark.engine.dataflow.topics import SparkTopics

    return SparkTopics(store, location)


@contextlib.contextmanager
def _stopping() -> Iterator[Callable[[], bool]]:
    """Stop on Ctrl-C or SIGTERM with a last checkpoint; a second signal kills the process."""
    signals: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        signals.append(number)
        for other in before:
            signal.signal(other, signal.SIG_DFL)
        click.echo("stopping with a last checkpoint", err=True)

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield lambda: bool(signals)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _print_epoch(pipeline: Pipeline, checkpoint: Checkpoint) -> None:
    """Print an epoch to stderr, as records may go to stdout."""
    click.echo(f"{pipeline.job}: epoch {checkpoint.epoch}", err=True)
