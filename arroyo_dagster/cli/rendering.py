"""Print one JSON document, or tables for people."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, overload

import click

from arroyo_dagster.cli.common import WIDE, exit_code, print_error, wants_colour
from arroyo_dagster.cli.tables import TableCell, colour, format_table, wrap
from arroyo_dagster.errors import ArroyoStateError
from arroyo_dagster.state.codec.iso_times import iso_micros
from arroyo_dagster.state.model.clock import wall_clock
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.progress import OnProgress, Progress, format_progress, no_progress
from arroyo_dagster.state.model.units import DURATIONS

if TYPE_CHECKING:
    from arroyo_dagster.state.model.checkpoints import Checkpoint
    from arroyo_dagster.state.storage.store import ObjectStore


def print_json(document: object) -> None:
    click.echo(json.dumps(document, ensure_ascii=False, indent=2, allow_nan=False))


def terminal_width() -> int | None:
    """Return the width of the terminal; None: a program reads, or `--wide` asks for as much."""
    context = click.get_current_context(silent=True)  # scripts print tables, too
    wide = context is not None and context.meta.get(WIDE)
    return None if wide or not sys.stdout.isatty() else shutil.get_terminal_size().columns


def print_table(
    columns: Sequence[object], lines: Sequence[Sequence[object]], **options: Any
) -> None:
    """Print a table that fits the terminal, or all of it; `options` as of `format_table`."""
    for line in format_table(columns, lines, terminal_width(), coloured=wants_colour(), **options):
        click.echo(line)


def print_text(text: str, state: str | None = None) -> None:
    """Print a sentence; a terminal breaks no word of it, and colours the `state` it begins with."""
    width = terminal_width()
    text = "\n".join(wrap(text, width))
    if state is not None and width is not None and wants_colour():
        text = colour(state) + text.removeprefix(state)
    click.echo(text)


def print_no_jobs(store: ObjectStore) -> None:
    """Print that the checkpoint URL holds no job, in place of an empty table."""
    click.echo(f"{store.url} holds no jobs.")


def report(problems: Sequence[ArroyoStateError | None]) -> None:
    """Print what is wrong with some of the listed objects, and exit with code 1; with code 4 if
    all were skipped because other processes maintain them.
    """
    errors = [problem for problem in problems if problem is not None]
    for problem in errors:
        print_error(problem)
    if errors:
        click.get_current_context().exit(exit_code(errors))


def format_state(state: str | None, problem: ArroyoStateError | None) -> str | None:
    if problem is None:
        return state
    return f"{state}, broken" if state else "unreadable"


def clock(micros: int | None) -> str | None:
    text = iso_micros(micros)
    return None if text is None else text.replace("T", " ").replace(".000000", "")


def age(micros: int) -> str:
    """Format how long ago a point in time was, in two units: `7 d 3 h ago`."""
    seconds = int((wall_clock() - micros) / 1e6)
    left, parts = abs(seconds), list[str]()
    for unit, length in DURATIONS:
        count, left = divmod(left, length)
        if count or parts or unit == "s":
            parts.append(f"{count} {unit}")
    text = " ".join(parts[:2])
    return f"{text} ago" if seconds >= 0 else f"in {text}"


@overload
def moment(micros: int, plain: Callable[[int], str | None] = ...) -> TableCell: ...
@overload
def moment(micros: int | None, plain: Callable[[int], str | None] = ...) -> TableCell | None: ...
def moment(micros: int | None, plain: Callable[[int], str | None] = clock) -> TableCell | None:
    """Return the cell of a point in time; on a terminal its age stands beside it.

    Args:
        plain: what a program reads; a narrow terminal shows that without fractions of a second.
    """
    if micros is None:
        return None
    text = str(clock(micros))
    short = f"{text.partition('.')[0]}Z" if "." in text else text
    narrow = short if plain is clock else plain(micros)
    return TableCell(plain(micros), (f"{short} ({age(micros)})", narrow or ""))


@contextmanager
def show_progress(*, as_json: bool, name: str | None = None) -> Iterator[OnProgress]:
    """Yield a callback that prints progress to stderr: a line that changes on a terminal, elsewhere
    a line every five seconds.

    Work of less than a second prints nothing. The last report is repeated while work is silent.

    Args:
        name: of what is worked on, for example a job; each line begins with it.
    """
    from arroyo_dagster.state.operations.progress import heartbeat

    if as_json:
        yield no_progress
        return
    terminal = sys.stderr.isatty()
    every_seconds = 1.0 if terminal else 5.0
    shown_at, shown = time.monotonic(), False

    def show(progress: Progress) -> None:
        nonlocal shown_at, shown
        if time.monotonic() - shown_at >= every_seconds:
            shown_at, shown = time.monotonic(), True
            text = format_progress(progress)
            text = text if name is None else f"{name}: {text}"
            click.echo(f"\r\x1b[K{text}" if terminal else text, nl=not terminal, err=True)

    with heartbeat(show) as on_progress:
        try:
            yield on_progress
        finally:
            if terminal and shown:
                click.echo("\r\x1b[K", nl=False, err=True)


def print_beside_progress(text: str) -> None:
    """Print a line to stderr in place of the progress, which goes on below it."""
    beginning = "\r\x1b[K" if sys.stderr.isatty() else ""
    click.echo(f"{beginning}{text}", err=True)


def sleep_beside(text: str) -> Callable[[float], None]:
    """Return a `sleep` that first prints why beside the progress; `{}` stands for the seconds."""

    def sleep(seconds: float) -> None:
        print_beside_progress(text.format(f"{seconds:.0f}"))
        time.sleep(seconds)

    return sleep


def sleep_until_quiet(paths: JobPaths) -> Callable[[float], None]:
    reason = "to make sure that Arroyo's cleanup has finished (--quiet)"
    return sleep_beside(f"{paths.root}: waiting {{}} s {reason}")


wait_for_deletions = sleep_beside(
    "the epoch is outside its job's retention: waiting {} seconds for deletions in flight"
)


def seconds(checkpoint: Checkpoint) -> float:
    return (checkpoint.finish_time_micros - checkpoint.start_time_micros) / 1e6
