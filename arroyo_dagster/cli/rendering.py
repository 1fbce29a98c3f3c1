"""Print one JSON document, or tables for people."""

from __future__ import annotations

import json
from collections.abc import Sequence

import click

from arroyo_dagster.cli.common import print_error
from arroyo_dagster.errors import ArroyoStateError
from arroyo_dagster.state.codec.plain import iso_micros
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.progress import Progress, ProgressUnit

_PIPED_WIDTH = 10_000


def print_json(document: object) -> None:
    click.echo(json.dumps(document, ensure_ascii=False, indent=2, allow_nan=False))


def print_table(columns: Sequence[str], lines: Sequence[Sequence[object]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _PIPED_WIDTH  # nothing is cut where a program reads along
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False)
    for at, name in enumerate(columns):
        numbers = all(isinstance(line[at], int | None) for line in lines)
        table.add_column(name, justify="right" if numbers else "left", overflow="fold")
    for line in lines:
        table.add_row(*(Text("-" if cell is None else str(cell)) for cell in line))
    console.print(table)


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


def age(micros: int) -> str:
    import pendulum

    try:
        return pendulum.from_timestamp(micros / 1e6).diff_for_humans()
    except (ValueError, OverflowError):
        return str(clock(micros))


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
