"""Format numbers, times, small tables and curves as Dagster metadata."""

import base64
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import dagster as dg

from arroyo_dagster.state.model.progress import OnProgress, Progress

DATA_VERSION = "dagster/data_version"
"""The tag of an event that holds the observed version of an asset."""

TABLE_ROWS = 50
_LOG_SECONDS = 10.0
_WIDTH, _HEIGHT = 240, 40
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


def seconds(micros: int | None) -> float | None:
    """Return a duration in seconds."""
    return None if micros is None else micros / 1e6


def table(rows: Iterable[Mapping[str, Any]]) -> Any:
    """Return a table of at most 50 rows, since the UI prints all rows; None for no rows."""
    shown = [dg.TableRecord(_plain(row)) for row in rows][:TABLE_ROWS]
    return dg.MetadataValue.table(shown) if shown else None


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    # A column's type is taken from its first value, which must not be None.
    return {name: "-" if value is None else value for name, value in row.items()}


def sparkline(values: Sequence[float | None]) -> Any:
    """Return a curve of values in their order; None for fewer than two known values."""
    found = [value for value in values if value is not None]
    if len(found) < 2:
        return None
    low, high = min(found), max(found)
    points = " ".join(
        f"{at * _WIDTH / (len(found) - 1):.0f},"
        f"{_HEIGHT - 2 - (value - low) / ((high - low) or 1) * (_HEIGHT - 4):.0f}"
        for at, value in enumerate(found)
    )
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}">'
        f'<polyline fill="none" stroke="#4F43DD" stroke-width="1.5" points="{points}"/></svg>'
    )
    data = base64.b64encode(svg.encode()).decode()
    return dg.MetadataValue.md(f"![{low:g} to {high:g}](data:image/svg+xml;base64,{data})")


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


def progress_logger(
    log: Callable[[str], object], clock: Callable[[], float] = time.monotonic
) -> OnProgress:
    """Return a callback that logs progress every ten seconds, and at the end."""
    logged: Progress | None = None
    logged_at = clock()

    def log_progress(progress: Progress) -> None:
        nonlocal logged, logged_at
        early = clock() - logged_at < _LOG_SECONDS and progress.share != 1
        if early or progress == logged:  # a heartbeat repeats what was reported
            return
        logged, logged_at = progress, clock()
        share = "" if progress.share is None else f"{progress.share:.0%}, "
        of = "" if progress.total is None else f" of {progress.total}"
        left = "" if progress.seconds_left is None else f", {progress.seconds_left:.0f} s left"
        log(f"{progress.step}: {share}{progress.done}{of} {progress.unit}{left}")

    return log_progress


def relative_error(forecast: int, outcome: int) -> float | None:
    """Return by how much an outcome exceeds its forecast: 0.1 = a tenth more; None for a forecast
    of 0.
    """
    return round(outcome / forecast - 1, 3) if forecast else None
