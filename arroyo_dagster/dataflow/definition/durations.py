"""Durations in SDF's syntax: `10s`, `1h 30m`.

Source: sdf-states.md 2.7.
"""

from __future__ import annotations

import re

UNITS_NANOS = {
    unit: nanos
    for units, nanos in (
        ("nsec ns", 1),
        ("usec us", 1_000),
        ("msec ms", 1_000_000),
        ("seconds second sec s", 1_000_000_000),
        ("minutes minute min m", 60 * 1_000_000_000),
        ("hours hour hr h", 3_600 * 1_000_000_000),
        ("days day d", 86_400 * 1_000_000_000),
        ("weeks week w", 604_800 * 1_000_000_000),
        ("months month M", 2_630_016 * 1_000_000_000),
        ("years year y", 31_557_600 * 1_000_000_000),
    )
    for unit in units.split()
}
"""Nanoseconds of each unit; the case of `m` and `M` matters."""

_UNIT = "|".join(sorted(UNITS_NANOS, key=len, reverse=True))
# Each blank can match in one place only, so that the expression does not backtrack.
DURATION_PATTERN = rf"^ *(?:[0-9]+ *(?:{_UNIT})(?![A-Za-z]) *)+$|^ *0 *$"
_DURATION = re.compile(DURATION_PATTERN.replace("$", r"\Z"))
_SPAN = re.compile(rf"([0-9]+) *({_UNIT})(?![A-Za-z])")

ACCEPTED = "whole numbers with a unit (ns us ms s m h d w M y, or their long forms), as `1h 30m`"

MAX_DURATION_MS = 2**63 - 1


def parse_duration_ms(text: str) -> int | None:
    """Return a duration in whole milliseconds, rounded down.

    None if the text is not a duration, is longer than 200 characters or exceeds an i64.
    """
    if len(text) > 200 or not _DURATION.match(text):
        return None
    nanos = sum(int(count) * UNITS_NANOS[unit] for count, unit in _SPAN.findall(text))
    return nanos // 1_000_000 if nanos // 1_000_000 <= MAX_DURATION_MS else None


_FORMATTED = (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1))


def format_duration(milliseconds: int) -> str:
    """Return the canonical text, which `parse_duration_ms` reads back."""
    parts: list[str] = []
    for unit, size in _FORMATTED:
        count, milliseconds = divmod(milliseconds, size)
        if count:
            parts.append(f"{count}{unit}")
    return " ".join(parts) or "0ms"
