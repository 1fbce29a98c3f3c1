"""Format numbers, times, small tables and curves as Dagster metadata."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any
from urllib.parse import quote

import dagster as dg

from arroyo_dagster.state.model.units import format_bytes, format_micros

DATA_VERSION = "dagster/data_version"
"""The tag of an event that holds the observed version of an asset."""

TABLE_ROWS = 50
_LEFT, _TOP, _WIDTH, _HEIGHT = 72, 10, 260, 40
"""The area of a curve, in pixels; what is at the left of it is left at its right, too."""
_POINTS = 50
_UNQUOTED = "'=/:,;-"
_FIGURE = re.compile(r"[\d.,]+( [µa-zA-Z]+)?( → [\d.,]+( [a-zA-Z]+)?)?")
_LAST_MICROS = 253_402_300_799_000_000  # the year 9999: beyond it no calendar goes


def known(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out values that are None: an unknown value is not shown."""
    return {name: value for name, value in metadata.items() if value is not None}


def timestamp(micros: int | None) -> Any:
    """Return a time; text if the calendar does not reach that far, None for None."""
    if micros is None:
        return None
    if not 0 <= micros <= _LAST_MICROS:
        return f"{micros} µs since 1970"
    return dg.MetadataValue.timestamp(micros / 1e6)


def time_of_day(micros: int | None) -> str | None:
    """Return a time as text, to the second, in UTC, for tables, whose cells hold no times."""
    if micros is None or not 0 <= micros <= _LAST_MICROS:
        return None
    return datetime.fromtimestamp(micros // 1_000_000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def table(rows: Iterable[Mapping[str, Any]]) -> Any:
    """Return a table of at most 50 rows, since the UI prints all rows; None for no rows."""
    shown = [dg.TableRecord(_plain(row)) for row in rows][:TABLE_ROWS]
    return dg.MetadataValue.table(shown) if shown else None


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    # A column's type is taken from its first value, which must not be None.
    return {name: "-" if value is None else _unbroken(value) for name, value in row.items()}


def _unbroken(value: Any) -> Any:
    """Return a figure that keeps its unit in the same line; anything else as it is."""
    whole = isinstance(value, str) and _FIGURE.fullmatch(value)
    return value.replace(" ", "\N{NO-BREAK SPACE}") if whole else value


def number(count: float | None) -> str | None:
    """Return a number with separators."""
    return None if count is None else f"{count:,}"


def counted(count: int, noun: str) -> str:
    """Return a number with what it counts: `1 file`, `1,234 files`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def size(count: int | None) -> str | None:
    """Return a size in a fitting unit, and in bytes: `1.2 GB (1,234,567,890 bytes)`."""
    if count is None or count < 1000:
        return None if count is None else counted(count, "byte")
    return f"{format_bytes(count)} ({count:,} bytes)"


def content(size_bytes: int | None, files: int | None, rows: int | None) -> str | None:
    """Return what an epoch lists; what is unknown is left out, None if all is."""
    listed = [
        counted(one, noun) for one, noun in ((files, "file"), (rows, "row")) if one is not None
    ]
    return " in ".join(filter(None, [size(size_bytes), ", ".join(listed)])) or None


def duration(micros: float | None) -> str | None:
    """Return a duration in a fitting unit."""
    if micros is None:
        return None
    return f"{micros:.0f} µs" if 0 < micros < 1000 else format_micros(micros)


def sparkline(
    values: Sequence[float | None], form: Callable[[float], str] = "{:,.0f}".format
) -> Any:
    """Return a curve of values in their order, with its scale and the last value; None for fewer
    than two known values.

    Args:
        form: formats a value.
    """
    found = [value for value in values if value is not None]
    if len(found) < 2:
        return None
    low, high, last = min(found), max(found), found[-1]
    heights = [
        round(_TOP + _HEIGHT * (1 - (value - low) / ((high - low) or 1)))
        for value in _thinned(found, (low + high) / 2)
    ]
    step = _WIDTH // max(len(heights) - 1, 1)
    right, bottom, end = _LEFT + step * (len(heights) - 1), _TOP + _HEIGHT, heights[-1]
    turns = ",".join(f"{step},{b - a}" for a, b in pairwise(heights))
    svg = (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{right + _LEFT}' height='{bottom + _TOP}' "
        "font-family='arial' font-size='11' fill='gray'><g text-anchor='end'>"
        f"<text x='{_LEFT - 6}' y='{_TOP + 4}'>{form(high)}</text>"
        f"<text x='{_LEFT - 6}' y='{bottom + 4}'>{form(low)}</text></g>"
        f"<path d='M{_LEFT},{_TOP}H{right}M{_LEFT},{bottom}H{right}' stroke='silver'/>"
        f"<path d='M{_LEFT},{heights[0]}l{turns}' fill='none' stroke='blue'/>"
        f"<text x='{right + 6}' y='{end + 4}' fill='blue'>{form(last)}</text></svg>"
    )
    text = f"{form(last)} at last, {form(low)} to {form(high)}"
    # Dagster shows longer Markdown only after a click; base64 would be longer.
    return dg.MetadataValue.md(f"![{text}](data:image/svg+xml,{quote(svg, safe=_UNQUOTED)})")


def _thinned(values: Sequence[float], middle: float) -> list[float]:
    """Return at most 50 values: of each group the farthest from the middle, and the last value."""
    size = -(-len(values) // _POINTS)
    groups = [values[at : at + size] for at in range(0, len(values) - 1, size)]
    return [*(max(one, key=lambda value: abs(value - middle)) for one in groups), values[-1]]


def column_schema(columns: Iterable[tuple[str, str, bool]], descriptions: Mapping[str, str]) -> Any:
    """Return the columns of a table: name, type, whether it is nullable."""
    return dg.TableSchema(
        columns=[
            dg.TableColumn(
                name,
                kind,
                description=descriptions.get(name),
                constraints=dg.TableColumnConstraints(nullable=nullable),
            )
            for name, kind, nullable in columns
        ]
    )


def with_commands(text: str, commands: Iterable[str]) -> str:
    """Return a description in Markdown, with commands of `arroyo-state` for a shell."""
    lines = "\n".join(f"arroyo-state {command} --url URL" for command in commands)
    return f"{text}\n\n```sh\n{lines}\n```" if lines else text


def relative_error(forecast: int, outcome: int) -> float | None:
    """Return by how much an outcome exceeds its forecast: 0.1 = a tenth more; None for a forecast
    of 0.
    """
    return round(outcome / forecast - 1, 3) if forecast else None
