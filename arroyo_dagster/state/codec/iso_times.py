"""Points in time and durations as text. Imports neither pyarrow nor numpy."""

from __future__ import annotations

import datetime as dt
import re

from arroyo_dagster.errors import InputError

UNIX_EPOCH = dt.datetime(1970, 1, 1)
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_DIGITS = {"s": 0, "ms": 3, "us": 6, "ns": 9}
_MOMENT = re.compile(r"(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?")


def nanos_of(value: dt.datetime | dt.timedelta | int) -> int:
    """Return a point in time, as nanoseconds since 1970 in UTC, or a duration, in nanoseconds."""
    if isinstance(value, dt.datetime):
        value = value.astimezone(dt.UTC).replace(tzinfo=None) - UNIX_EPOCH
    if isinstance(value, dt.timedelta):
        return value // dt.timedelta(microseconds=1) * 1000
    return value


def iso_micros(micros: int | None) -> str | None:
    """Format a point in time in UTC, `2013-01-01T10:00:00.000000Z`; None stays None."""
    return None if micros is None else format_moment(micros, "us", "Z")


def format_moment(count: int, unit: str, zone: str) -> str:
    """Format a point in time with all digits of its unit; outside years 1 to 9999 its count."""
    seconds, part = divmod(count, _PER_SECOND[unit])
    try:
        moment = UNIX_EPOCH + dt.timedelta(seconds=seconds)
    except OverflowError:
        return f"{count}{unit} since 1970"
    return f"{moment.isoformat()}{_fraction(part, unit)}{zone}"


def parse_moment_nanos(text: str) -> int:
    """Return a point in time, ISO 8601 with up to nine digits of a second, in nanoseconds.

    Without an offset it is in UTC.

    Raises:
        InputError: it is none, or nanoseconds cannot hold it: they end in 1677 and 2262.
    """
    match = _MOMENT.fullmatch(text)
    try:
        if match is None:
            raise ValueError(text)
        moment = dt.datetime.fromisoformat(f"{match[1]}{(match[3] or 'Z').replace('Z', '+00:00')}")
    except ValueError:
        raise InputError(
            f"not a time: {text!r:.60}", expected="ISO 8601, for example 2026-11-24T10:00:00Z"
        ) from None
    seconds = (moment - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)) // dt.timedelta(seconds=1)
    nanos = seconds * _PER_SECOND["ns"] + int((match[2] or "").ljust(9, "0"))
    if not -(2**63) <= nanos < 2**63:
        raise InputError(
            f"out of bounds: {text!r:.60}",
            expected="a time that nanoseconds since 1970 can hold, from 1677-09-22 to 2262-04-11",
        )
    return nanos


def _fraction(part: int, unit: str) -> str:
    return f".{part:0{_DIGITS[unit]}}" if _DIGITS[unit] else ""


def format_span(count: int, unit: str) -> str:
    """Format a duration in seconds, `-1.500s`."""
    seconds, part = divmod(abs(count), _PER_SECOND[unit])
    return f"{'-' if count < 0 else ''}{seconds}{_fraction(part, unit)}s"
