"""Format numbers, times and small tables as Dagster metadata."""

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import dagster as dg

from arroyo_dagster.state.model.units import format_bytes, format_micros, plural

DATA_VERSION = "dagster/data_version"
"""The tag of an event that holds the observed version of an asset."""

TABLE_ROWS = 50
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
    records = [dg.TableRecord(_plain(row)) for row in rows][:TABLE_ROWS]
    return dg.MetadataValue.table(records) if records else None


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
    return plural(count, noun, ",")


def size(count: int | None) -> str | None:
    """Return a size in a fitting unit, and in bytes: `1.2 GB (1,234,567,890 bytes)`."""
    if count is None or count < 1000:
        return None if count is None else counted(count, "byte")
    return f"{format_bytes(count)} ({count:,} bytes)"


def duration(micros: float | None) -> str | None:
    """Return a duration in a fitting unit."""
    if micros is None:
        return None
    return f"{micros:.0f} µs" if 0 < micros < 1000 else format_micros(micros)


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
