"""Print one JSON document, or tables for people."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from arroyo_dagster.cli.common import print_error
from arroyo_dagster.errors import ArroyoStateError
from arroyo_dagster.state.codec.iso_times import iso_micros
from arroyo_dagster.state.model.clock import wall_clock
from arroyo_dagster.state.model.progress import Progress, ProgressUnit

if TYPE_CHECKING:
    from arroyo_dagster.state.model.checkpoints import Checkpoint


def print_json(document: object) -> None:
    click.echo(json.dumps(document, ensure_ascii=False, indent=2, allow_nan=False))


def print_table(columns: Sequence[str], lines: Sequence[Sequence[object]]) -> None:
    """Print a table as wide as the terminal; one line per row where a program reads along."""
    from arroyo_dagster.cli.tables import format_table, output_width

    for line in format_table(columns, lines, output_width()):
        click.echo(line)


def report(problems: Sequence[ArroyoStateError | None]) -> None:
    """Print what is wrong with some of the listed objects, and exit with code 1."""
    found = [problem for problem in problems if problem is not None]
    for problem in found:
        print_error(problem)
    if found:
        click.get_current_context().exit(1)


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


def format_bytes(count: int | None) -> str | None:
    if count is None:
        return None
    size, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            break
        size /= 1000
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


def format_progress(progress: Progress) -> str:
    """Format how far an operation is, for people."""
    format_count = format_bytes if progress.unit is ProgressUnit.BYTES else str
    share = "" if progress.share is None else f"{progress.share:.0%}, "
    of = "" if progress.total is None else f" of {format_count(progress.total)}"
    left = "" if progress.seconds_left is None else f", {progress.seconds_left:.0f} s left"
    return f"{progress.step}: {share}{format_count(progress.done)}{of}{left}"


def seconds(checkpoint: Checkpoint) -> float:
    return (checkpoint.finish_time_micros - checkpoint.start_time_micros) / 1e6
