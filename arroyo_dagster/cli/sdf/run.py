"""`sdf run`: run the services of a dataflow, in this process or on Spark."""

from __future__ import annotations

import contextlib
import io
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from arroyo_dagster.cli.common import (
    EXIT_SKIPPED,
    open_url,
    print_error,
    private_option,
    store_options,
)
from arroyo_dagster.cli.rendering import print_json
from arroyo_dagster.cli.sdf.files import (
    allow_functions,
    binding_flags,
    check_bound,
    check_functions,
    error_options,
    function_options,
    keep_epochs_option,
    loading_options,
    parallelism_option,
)
from arroyo_dagster.cli.sdf.group import sdf
from arroyo_dagster.cli.sdf.inspect import (
    narrowing_options,
    print_answer,
    print_namespaces,
    sql_mode,
)
from arroyo_dagster.cli.settings import FiniteRange, WholeNumber
from arroyo_dagster.cli.spark import print_choice, spark_options
from arroyo_dagster.dataflow.definition.definition import Dataflow
from arroyo_dagster.dataflow.definition.loading import load_dataflow
from arroyo_dagster.dataflow.in_process import (
    DataflowOptions,
    DataflowOutcome,
    run_dataflow,
)
from arroyo_dagster.dataflow.revisions.migrate import migrate as migrate_services
from arroyo_dagster.dataflow.runtime.service import DEAD_LETTER, SKIP, RunOptions, build_dataflow
from arroyo_dagster.dataflow.topics.bindings import BindingsText
from arroyo_dagster.dataflow.topics.pipe import ByteStream
from arroyo_dagster.dataflow.topics.wiring import Letters, Wired, wire
from arroyo_dagster.dataflow.views.namespaces import CliError, Namespaces
from arroyo_dagster.dataflow.views.rendering import borderless, table_text
from arroyo_dagster.dataflow.views.view import Views
from arroyo_dagster.engine.pipeline import Pipeline
from arroyo_dagster.errors import ArroyoStateError, FormatError, InputError
from arroyo_dagster.spark.settings import SparkSettings
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.planning.privacy import PrivateColumns
from arroyo_dagster.state.storage.store import ObjectStore

if TYPE_CHECKING:
    from arroyo_dagster.spark.engine.dataflow.topics import SparkTopics

_ENDLESS_INTERVAL = 1.0


@sdf.command()
@click.argument("file", type=click.Path())
@click.option(
    "--source",
    "sources",
    multiple=True,
    metavar="TOPIC=KIND:PATH",
    help="Where a topic's records come from.",
)
@click.option(
    "--sink", "sinks", multiple=True, metavar="TOPIC=KIND:PATH", help="Where a topic's records go."
)
@click.option(
    "--bindings", metavar="FILE", help="Read sources, sinks, functions and env from this YAML file."
)
@function_options
@click.option(
    "--epochs", type=WholeNumber(1), help="Stop with a checkpoint after this many epochs."
)
@click.option("--until-idle", is_flag=True, help="Stop when the sources have nothing new.")
@click.option(
    "--interval",
    type=FiniteRange(0),
    metavar="SECONDS",
    help="The minimum time between two epochs. Default: 1 if a source has no end, else 0.",
)
@keep_epochs_option
@error_options(SKIP)
@click.option("--flush-open", is_flag=True, help="Close open windows when every source has ended.")
@click.option(
    "--prompt",
    "prompting",
    is_flag=True,
    help="Read commands from the standard input while the dataflow runs: show state, select, sql, "
    "help, exit. The end of the input stops the run.",
)
@private_option
@click.option(
    "--migrate",
    is_flag=True,
    help="Carry stored states over to a changed definition: other columns and types, renamed "
    "(`was`), no longer declared.",
)
@parallelism_option
@spark_options("Run on Spark instead of in this process.", always=True)
@click.option(
    "--spark-checkpoint",
    help="With --spark: the directory in which Spark logs the offsets of its own sources.",
)
@loading_options
@store_options
def run(
    file: str,
    sources: Sequence[str],
    sinks: Sequence[str],
    bindings: str | None,
    functions: Sequence[str],
    env: Sequence[str],
    epochs: int | None,
    until_idle: bool,
    interval: float | None,
    keep_epochs: int,
    on_error: str,
    max_errors: int | None,
    flush_open: bool,
    prompting: bool,
    private: PrivateColumns,
    migrate: bool,
    parallelism: int,
    spark: SparkSettings | None,
    spark_checkpoint: str | None,
    reading: Mapping[str, bool],
    url: str | None,
    as_json: bool,
) -> None:
    """Run the services of a dataflow, in process or on Spark, each from its newest checkpoint.

    \b
    TOPIC=KIND:PATH is one of
      words=jsonl:FILE      a file or a directory of JSON lines; also csv, parquet
      words=jsonl:DIR/?follow=true     and what comes later; also rows_per_epoch=N
      ticks=rate:10?limit=100          numbers, ten a second
      words=stdin           lines of the standard input, kept in the store before they are used
      counts=jsonl:FILE     for sinks; a directory where PATH ends with /; also csv, parquet, stdout
      words=spark:kafka?subscribe=words&kafka.bootstrap.servers=HOST:9092
                            with --spark: any source or sink of Spark, by format and options;
                            `schema` gives the columns where the format wants them
    Topics that services write and read need no binding.

    It ends when every source has ended, on --until-idle when nothing is new, after --epochs, and on
    Ctrl-C or SIGTERM with a last checkpoint. Kill it at any moment: the next run goes on exactly
    once.

    Exit codes: 0 every record was processed; 4 the run ended, and records or flushes failed (the
    summary counts them); 1 the run failed, and nothing of its last epoch was published.

    \b
    Example:
      arroyo-state sdf run dataflow.yaml --source words=jsonl:words/ --until-idle
    """
    bound = binding_flags(sources, sinks, functions, env, bindings)
    if prompting and (spark is not None or _is_piped(bound)):
        raise click.UsageError(
            "--prompt: not with --spark, nor with a topic that stdin is bound to"
        )
    dataflow, packages = load_dataflow(file, **reading)
    dataflow = check_functions(file, dataflow, packages)
    check_bound(dataflow, packages, bound.functions)
    for warning in dataflow.warnings:
        if warning.number != "E26":  # a function that is not bound is an error here
            click.echo(f"warning {warning.number} {warning.place}{warning.message}", err=True)
    allow_functions(file)
    store = open_url(url)
    stdin = open_stdin() if _is_piped(bound) else None
    outside = spark_topics(store, spark, spark_checkpoint)
    wired = wire(
        dataflow,
        bound,
        store,
        packages=packages,
        stdin=stdin,
        outside=outside,
        letters=Letters(written=on_error == DEAD_LETTER),
    )
    for topic in wired.unbound:
        click.echo(
            f"topic {topic} has no sink; to print its records: --sink {topic}=stdout", err=True
        )
    if migrate:
        migrate_states(dataflow, store)
    pipelines = build_dataflow(
        dataflow,
        store,
        bindings=wired.bindings,
        options=RunOptions(
            parallelism=parallelism,
            keep_epochs=keep_epochs,
            on_error=on_error,
            max_errors=max_errors,
            migrate=migrate,
            flush_open=flush_open,
        ),
    )
    pace = _interval(interval, bound)
    failed_before = failed_counts(store, dataflow)
    with stopping() as stopped, contextlib.ExitStack() as stack:
        for pipe in wired.pipes.values():
            stack.callback(pipe.close)
        stop = stopped
        if prompting:
            prompt = StatePrompt(store, dataflow, private, as_json=as_json)
            stop = stack.enter_context(prompt.answering(stopped))
        options = DataflowOptions(
            max_rounds=epochs,
            until_idle=until_idle,
            interval_seconds=pace,
            stop=stop,
            on_epoch=print_epoch,
        )
        follow = _is_endless(bound) and not until_idle
        outcome = run_pipelines(pipelines, store, wired, options, spark, outside, follow=follow)
    finish_run(dataflow, store, outcome, failed_before, on_error, as_json=as_json)


def migrate_states(dataflow: Dataflow, store: ObjectStore) -> None:
    """Carry stored states over to the definition, and print what was done to stderr."""
    for plan, epoch in migrate_services(dataflow, store):
        job = f"{dataflow.pipeline}/{plan.service}"
        for text in plan.texts():
            click.echo(f"{job}: {text}", err=True)
        click.echo(
            f"{job}: migrated in epoch {epoch}; epoch {plan.stored.head.epoch}, before the "
            "change, stays pinned",
            err=True,
        )


def spark_topics(
    store: ObjectStore, spark: SparkSettings | None, location: str | None
) -> SparkTopics | None:
    """Return the topics of a run on Spark; None = it runs in this process."""
    if spark is None:
        if location:
            raise click.UsageError("--spark-checkpoint: only with --spark")
        return None
    from arroyo_dagster.spark.engine.dataflow.topics import SparkTopics

    return SparkTopics(store, location)


def run_pipelines(
    pipelines: Sequence[Pipeline],
    store: ObjectStore,
    wired: Wired,
    options: DataflowOptions,
    spark: SparkSettings | None,
    topics: SparkTopics | None,
    *,
    follow: bool = False,
) -> DataflowOutcome:
    """Run pipelines in this process, or on Spark, where `follow` says whether to wait for more."""
    if spark is None or topics is None:
        return run_dataflow(pipelines, store, options, between=wired.between)
    from arroyo_dagster.spark.engine.dataflow.pipelines import run_pipelines as run_on_spark
    from arroyo_dagster.spark.engine.pipeline import SparkOptions

    return run_on_spark(
        pipelines,
        store,
        SparkOptions(
            follow=follow,
            spark=spark,
            on_spark=print_choice,
            interval_seconds=options.interval_seconds,
            max_epochs=options.max_rounds,
        ),
        topics=topics,
        between=wired.between,
        stop=options.stop,
        on_epoch=options.on_epoch,
    )


def _is_piped(given: BindingsText) -> bool:
    return any(source.kind == "stdin" for source in given.sources.values())


def _interval(seconds: float | None, given: BindingsText) -> float:
    if seconds is not None:
        return seconds
    rates = (source.kind == "rate" for source in given.sources.values())
    return _ENDLESS_INTERVAL if _is_endless(given) or any(rates) else 0.0


def _is_endless(given: BindingsText) -> bool:
    """Return whether a source never ends by itself."""
    return any(
        source.options.get("follow")
        or source.kind in ("stdin", "spark")
        or (source.kind == "rate" and "limit" not in source.options)
        for source in given.sources.values()
    )


@contextlib.contextmanager
def stopping() -> Iterator[Callable[[], bool]]:
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


def print_epoch(pipeline: Pipeline, checkpoint: Checkpoint) -> None:
    """Print an epoch to stderr, as records may go to stdout."""
    click.echo(f"{pipeline.job}: epoch {checkpoint.epoch}", err=True)


def _metrics(store: ObjectStore, dataflow: Dataflow) -> list[tuple[str, dict[str, Any]]]:
    return [
        (ns.name.removesuffix("/metrics"), dict(zip(ns.names, row.values, strict=True)))
        for ns in Namespaces(store, dataflow).metrics()
        for row in ns.rows
    ]


def failed_counts(store: ObjectStore, dataflow: Dataflow) -> dict[str, int]:
    """Return how often each step has failed since the job began, by `service/step`."""
    try:
        return {name: values["failed"] for name, values in _metrics(store, dataflow)}
    except FormatError:
        return {}  # the start reports what is wrong with the newest epoch


def finish_run(
    dataflow: Dataflow,
    store: ObjectStore,
    outcome: DataflowOutcome,
    failed_before: Mapping[str, int],
    on_error: str,
    *,
    as_json: bool,
) -> None:
    """Print the outcome of the run to stderr, as records may go to stdout; print JSON to stdout.

    Exit with `EXIT_SKIPPED` if records failed in the run.
    """
    counted = _metrics(store, dataflow)
    failed = {
        name: values["failed"] - failed_before.get(name, 0)
        for name, values in counted
        if values["failed"] > failed_before.get(name, 0)
    }
    _print_outcome(dataflow, outcome, counted, failed, on_error, as_json=as_json)
    if failed:
        click.get_current_context().exit(EXIT_SKIPPED)


def _print_outcome(
    dataflow: Dataflow,
    outcome: DataflowOutcome,
    counted: Sequence[tuple[str, Mapping[str, Any]]],
    failed: Mapping[str, int],
    on_error: str,
    *,
    as_json: bool,
) -> None:
    if as_json:
        print_json(
            {
                "dataflow": dataflow.name,
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
            if on_error == DEAD_LETTER
            else "they were skipped; to keep such records: --on-error dead-letter"
        )
        click.echo(f"failed in this run: {listed}; {where}", err=True)
    why = "every source has ended" if outcome.ended else "the next run continues from there"
    counts = [f"{service} {count}" for service, count in outcome.epochs.items()]
    click.echo(f"{dataflow.name}: epochs written: {', '.join(counts) or 'none'}; {why}", err=True)


# ---- the prompt of `sdf run --prompt`: read states while the dataflow runs in this process -------

_COMMANDS = {
    "show state": "list the namespaces; --filter REGEX narrows the list",
    "show state NAMESPACE": "list its rows; --key KEY or --filter REGEX narrows them",
    "select …": "query the arrow-row states; so do `with …` and `show tables`",
    "sql": "enter SQL mode: one query per line; .exit leaves it",
    "help": "list the commands",
    "exit": "stop the run with a last checkpoint",
}
_POLL_SECONDS = 0.05


def open_stdin() -> ByteStream:
    """Return the standard input, unbuffered: a thread that waits for it blocks no exit.

    Raises:
        InputError: it is closed.
    """
    try:
        return io.FileIO(0, closefd=False)
    except OSError as error:
        raise InputError(
            f"the standard input cannot be read ({error.strerror})",
            next_step="leave out --prompt, or the source `stdin`",
        ) from error


class StatePrompt:
    """Answers commands from the standard input, one per line, in a thread of its own.

    Every answer is of the newest epochs that the services have published.

    Args:
        store: the object store of the states.
        dataflow: the definition.
        private: the columns that are masked.
        as_json: whether answers are JSON, and no prompt is printed.
    """

    def __init__(
        self, store: ObjectStore, dataflow: Dataflow, private: PrivateColumns, *, as_json: bool
    ) -> None:
        self._store, self._dataflow, self._private = store, dataflow, private
        self._as_json = as_json
        self._stream = open_stdin()
        self._prompting = sys.stdin.isatty() and not as_json
        self._read = b""
        self._left = threading.Event()

    @contextmanager
    def answering(self, stopped: Callable[[], bool]) -> Iterator[Callable[[], bool]]:
        """Answer within the block, and after it until the prompt is left or the run is stopped.

        Args:
            stopped: whether a signal stopped the run.

        Returns:
            Whether the run should stop, since the prompt was left or a signal stopped it.
        """
        context = click.get_current_context()

        def answer() -> None:
            try:
                # Whoever reads the answers may leave: this leaves the prompt.
                with context.scope(cleanup=False), suppress(BrokenPipeError):
                    self._answer_all()
            finally:
                self._left.set()

        threading.Thread(target=answer, name="prompt", daemon=True).start()
        yield lambda: self._left.is_set() or stopped()
        if self._prompting and not (self._left.is_set() or stopped()):
            click.echo("every source has ended; `exit` leaves the prompt", err=True)
        while not (self._left.wait(_POLL_SECONDS) or stopped()):
            pass

    def _answer_all(self) -> None:
        while True:
            if self._prompting:
                click.echo(">> ", nl=False)
            line = self._read_line()
            if not line or line.strip() == "exit":
                return
            try:
                self._answer(line.strip())
            except ArroyoStateError as error:
                print_error(error)
            except click.ClickException as error:
                click.echo(f"{error.format_message()}; `help` lists the commands", err=True)

    def _answer(self, line: str) -> None:
        words = line.split()
        first = words[0].lower() if words else ""
        if first == "help":
            click.echo(table_text(["command", "description"], list(_COMMANDS.items())))
        elif words[:2] == ["show", "state"]:
            _show_state.main(
                _arguments(line)[2:],
                "show state",
                standalone_mode=False,
                obj=(Namespaces(self._store, self._dataflow, private=self._private), self._as_json),
            )
        elif words == ["sql"]:
            sql_mode(
                self._views(),
                self._read_line,
                prompting=self._prompting,
                as_json=self._as_json,
            )
        elif first in ("select", "with") or words[:2] == ["show", "tables"]:
            print_answer(self._views(), line, self._as_json)
        elif words:
            raise _unknown(line)

    def _views(self) -> Views:
        return Views(self._store, self._dataflow, private=self._private)

    def _read_line(self) -> str:
        """Return the next line with its end; empty = the input has ended."""
        while b"\n" not in self._read:
            block = self._stream.read(1 << 16)
            if not block:
                break
            self._read += block
        line, end, self._read = self._read.partition(b"\n")
        return (line + end).decode(errors="replace")


@click.command("show state", add_help_option=False)
@narrowing_options
@click.pass_obj
def _show_state(
    obj: tuple[Namespaces, bool], namespace: str | None, key: str | None, pattern: str | None
) -> None:
    spaces, as_json = obj
    print_namespaces(spaces, namespace, key, pattern, as_json=as_json)


def _arguments(line: str) -> Sequence[str]:
    try:
        return shlex.split(line)
    except ValueError as error:
        raise CliError(
            f"the command cannot be read: {error}", number="E47", next_step="close the quotes"
        ) from error


def _unknown(line: str) -> CliError:
    return CliError(
        f"there is no command `{line}`",
        number="E47",
        nearest="show state, sql, help, exit",
        next_step="`help` lists the commands",
    )
