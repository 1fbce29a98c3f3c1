"""`sdf run`: run the services of a dataflow, in this process or on Spark."""

from __future__ import annotations

import io
import shlex
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import click

from arroyo_dagster.cli.common import open_url, print_error, private_option, store_options
from arroyo_dagster.cli.sdf.files import (
    allow_functions,
    binding_options,
    check_bound,
    check_functions,
    error_options,
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
from arroyo_dagster.cli.sdf.running import AnswerBeside, ServiceRun
from arroyo_dagster.cli.settings import FiniteRange, WholeNumber
from arroyo_dagster.cli.spark import spark_options
from arroyo_dagster.dataflow.definition.definition import Dataflow, Package
from arroyo_dagster.dataflow.definition.loading import load_dataflow
from arroyo_dagster.dataflow.in_process import DataflowOptions
from arroyo_dagster.dataflow.revisions.migrate import migrate as migrate_services
from arroyo_dagster.dataflow.runtime.service import DEAD_LETTER, SKIP, RunOptions, build_dataflow
from arroyo_dagster.dataflow.topics.bindings import BindingsText
from arroyo_dagster.dataflow.topics.pipe import ByteStream
from arroyo_dagster.dataflow.topics.wiring import Letters
from arroyo_dagster.dataflow.views.namespaces import CliError, Namespaces
from arroyo_dagster.dataflow.views.rendering import table_text
from arroyo_dagster.dataflow.views.view import Views
from arroyo_dagster.errors import ArroyoStateError, InputError
from arroyo_dagster.spark.settings import SparkSettings
from arroyo_dagster.state.planning.privacy import PrivateColumns
from arroyo_dagster.state.storage.store import ObjectStore

if TYPE_CHECKING:
    pass

_ENDLESS_INTERVAL = 1.0


@sdf.command()
@click.argument("file", type=click.Path())
@binding_options("source", "sink")
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
    bound: BindingsText,
    epochs: int | None,
    until_idle: bool,
    interval: float | None,
    prompting: bool,
    private: PrivateColumns,
    spark: SparkSettings | None,
    spark_checkpoint: str | None,
    reading: Mapping[str, bool],
    url: str | None,
    as_json: bool,
    **running: Any,
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
    if prompting and (spark is not None or _is_piped(bound)):
        raise click.UsageError(
            "--prompt: not with --spark, nor with a topic that stdin is bound to"
        )
    dataflow, packages = _load(file, reading, bound)
    allow_functions(file)
    store = open_url(url)
    options = RunOptions(**running)
    services = ServiceRun(
        (dataflow, packages),
        bound,
        store,
        letters=Letters(written=options.on_error == DEAD_LETTER),
        spark=spark,
        spark_checkpoint=spark_checkpoint,
        stdin=open_stdin() if _is_piped(bound) else None,
    )
    _print_unbound(services.wired.unbound)
    if options.migrate:
        _migrate(dataflow, store)
    pipelines = build_dataflow(dataflow, store, bindings=services.wired.bindings, options=options)
    pace = DataflowOptions(
        max_rounds=epochs, until_idle=until_idle, interval_seconds=_interval(interval, bound)
    )
    answering: AnswerBeside = nullcontext
    if prompting:
        answering = StatePrompt(store, dataflow, private, as_json=as_json).answering
    follow = _is_endless(bound) and not until_idle
    services.carry_out(pipelines, pace, as_json=as_json, follow=follow, answering=answering)


def _load(
    file: str, reading: Mapping[str, bool], bound: BindingsText
) -> tuple[Dataflow, Mapping[str, Package]]:
    """Load a definition of which every function can run, and print its warnings."""
    dataflow, packages = load_dataflow(file, **reading)
    dataflow = check_functions(file, dataflow, packages)
    check_bound(dataflow, packages, bound.functions)
    for warning in dataflow.warnings:
        if warning.number != "E26":  # a function that is not bound is an error here
            click.echo(f"warning {warning.number} {warning.place}{warning.message}", err=True)
    return dataflow, packages


def _print_unbound(topics: Sequence[str]) -> None:
    for topic in topics:
        click.echo(
            f"topic {topic} has no sink; to print its records: --sink {topic}=stdout", err=True
        )


def _migrate(dataflow: Dataflow, store: ObjectStore) -> None:
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
