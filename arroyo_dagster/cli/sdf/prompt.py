"""The prompt of `sdf run --prompt`: read states while the dataflow runs in this process."""

from __future__ import annotations

import io
import shlex
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import click

from arroyo_dagster.cli.common import print_error
from arroyo_dagster.cli.sdf.inspect import (
    narrowing_options,
    print_answer,
    print_namespaces,
    sql_mode,
)
from arroyo_dagster.dataflow.definition.definition import Dataflow
from arroyo_dagster.dataflow.topics.pipe import ByteStream
from arroyo_dagster.dataflow.views.namespaces import CliError, Namespaces
from arroyo_dagster.dataflow.views.rendering import table_text
from arroyo_dagster.dataflow.views.view import Views
from arroyo_dagster.errors import ArroyoStateError, InputError
from arroyo_dagster.state.planning.privacy import PrivateColumns
from arroyo_dagster.state.storage.store import ObjectStore

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
