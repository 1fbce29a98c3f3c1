"""Print one JSON document, or tables for people."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from arroyo_dagster.cli.common import exit_code, print_error
from arroyo_dagster.errors import ArroyoStateError
from arroyo_dagster.state.codec.iso_times import iso_micros
from arroyo_dagster.state.model.clock import wall_clock
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.progress import (
    OnProgress,
    Progress,
    format_progress,
    no_progress,
)

if TYPE_CHECKING:
    from arroyo_dagster.state.model.checkpoints import Checkpoint
    from arroyo_dagster.state.planning.verify.findings import Finding
    from arroyo_dagster.state.storage.store import ObjectStore


def print_json(document: object) -> None:
    click.echo(json.dumps(document, ensure_ascii=False, indent=2, allow_nan=False))


def print_table(columns: Sequence[str], lines: Sequence[Sequence[object]]) -> None:
    """Print a table as wide as the terminal; one line per row where a program reads along."""
    from arroyo_dagster.cli.tables import format_table, output_width

    for line in format_table(columns, lines, output_width()):
        click.echo(line)


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


def print_lease_event(paths: JobPaths) -> Callable[[str], None]:
    """Return a callback that prints on stderr what happens to the lease on a job."""
    return lambda event: click.echo(f"{paths.root}: {event}", err=True)


def format_state(state: str | None, problem: ArroyoStateError | None) -> str | None:
    if problem is None:
        return state
    return f"{state}, broken" if state else "unreadable"


def clock(micros: int | None) -> str | None:
    text = iso_micros(micros)
    return None if text is None else text.replace("T", " ").replace(".000000", "")


_UNITS = {
    "year": 31_536_000,
    "month": 2_592_000,
    "week": 604_800,
    "day": 86_400,
    "hour": 3600,
    "minute": 60,
    "second": 1,
}


def age(micros: int) -> str:
    """Format how long ago a point in time was, in its largest unit: `2 hours ago`."""
    seconds = (wall_clock() - micros) / 1e6
    tense = "{} ago" if seconds >= 0 else "in {}"
    for name, length in _UNITS.items():
        count = int(abs(seconds) // length)
        if count:
            return tense.format(f"{count} {name}{'' if count == 1 else 's'}")
    return "just now"


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


def finding_json(one: Finding) -> dict[str, str]:
    return {
        "severity": one.severity.value,
        "code": one.code,
        "object": one.object,
        "evidence": one.evidence,
        "next_step": one.next_step,
    }


def seconds(checkpoint: Checkpoint) -> float:
    return (checkpoint.finish_time_micros - checkpoint.start_time_micros) / 1e6
