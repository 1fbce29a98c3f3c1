"""The prompt of `sql`: lines until a semicolon, history, completion of names, dot commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import click

from arroyo_dagster.cli.common import print_error
from arroyo_dagster.cli.query.output import FORMATS, print_answer
from arroyo_dagster.errors import ArroyoStateError
from arroyo_dagster.state.operations.query.sql import SqlCatalog

_WORDS = (
    *("select", "from", "where", "group by", "order by", "limit", "join", "on", "with", "as"),
    *("count(*)", "sum(", "min(", "max(", "avg(", "show tables", "describe", "explain"),
)
_COMMANDS = (".tables", ".schema", ".format", ".help", ".quit")
_HELP = """\
.tables         list the tables
.schema NAME    print the columns of a table
.format FORMAT  table, jsonl or csv
.quit           end; so does Ctrl-D
Everything else is SQL and ends in a semicolon."""
_MOST_LINES = 1000


@dataclass
class Prompt:
    """Reads queries from a terminal until its end.

    Attributes:
        form: how rows are printed.
        read_line: reads a line with a prompt; EOFError ends.
    """

    catalog: SqlCatalog
    form: str = "table"
    read_line: Callable[[str], str] = input
    _names: list[str] | None = field(default=None, init=False)

    def run(self) -> None:
        """Answer queries until the end of the input."""
        click.echo('SQL over state; ".help" lists commands, ".quit" ends.')
        with _history(self._complete):
            while True:
                try:
                    text = self._read()
                except EOFError:
                    click.echo()
                    return
                except KeyboardInterrupt:
                    click.echo()
                    continue
                if text in (".quit", ".exit"):
                    return
                try:
                    self.answer(text)
                except ArroyoStateError as error:
                    print_error(error)
                except KeyboardInterrupt:
                    click.echo("interrupted")

    def _read(self) -> str:
        lines = [self.read_line("arroyo> ")]
        if lines[0].strip().startswith(".") or not lines[0].strip():
            return lines[0].strip()
        while not lines[-1].rstrip().endswith(";"):
            lines.append(self.read_line("   ...> "))
        return "\n".join(lines).strip()

    def answer(self, text: str) -> None:
        """Print the answer of a query, or of a dot command.

        Raises:
            ArroyoStateError: as of `SqlCatalog.collect`.
        """
        command, _, rest = text.partition(" ")
        if not text:
            return
        if command == ".tables":
            print_answer(self.catalog.list_tables(), "table")
        elif command == ".schema":
            print_answer(self.catalog.describe(rest.strip().rstrip(";")), "table")
        elif command == ".format" and rest.strip() in FORMATS[:-1]:
            self.form = rest.strip()
        elif command.startswith("."):
            click.echo(_HELP)
        else:
            print_answer(self.catalog.collect(text), self.form)

    def _complete(self, text: str, number: int) -> str | None:
        """Return a completion for readline: words of SQL, names of tables, dot commands."""
        if self._names is None:
            self._names = []
            with suppress(ArroyoStateError):
                self._names = self.catalog.list_tables().get_column("name").to_list()
        words = _COMMANDS if text.startswith(".") else (*_WORDS, *self._names)
        matches = [word for word in words if word.lower().startswith(text.lower())]
        return matches[number] if number < len(matches) else None


@contextmanager
def _history(complete: Callable[[str, int], str | None]) -> Iterator[None]:
    """Keep the lines of earlier prompts, and complete words with the tab key."""
    try:
        import readline
    except ImportError:  # Python was built without it
        yield
        return
    path = Path(click.get_app_dir("arroyo_dagster")) / "sql-history"
    with suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(_MOST_LINES)
    readline.set_completer(complete)
    readline.set_completer_delims(" \t\n,()")
    readline.parse_and_bind("tab: complete")
    try:
        yield
    finally:
        readline.set_completer(None)
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(path)
            path.chmod(0o600)
