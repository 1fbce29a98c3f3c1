"""Sizes and durations as people read them."""

from __future__ import annotations

from typing import overload

DURATIONS = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))


@overload
def format_bytes(count: int) -> str: ...
@overload
def format_bytes(count: int | None) -> str | None: ...
def format_bytes(count: int | None) -> str | None:
    """Format a number of bytes in decimal units: `1.5 MB`; None for None."""
    if count is None:
        return None
    size, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            break
        size /= 1000
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


def format_micros(micros: float) -> str:
    """Format a duration in its largest unit with at most one decimal: `1.5 h`, `90 ms`."""
    seconds = micros / 1e6
    for unit, length in DURATIONS:
        if seconds >= length:
            return f"{seconds / length:.1f}".removesuffix(".0") + f" {unit}"
    return f"{seconds * 1000:.0f} ms"


def plural(count: int, noun: str, form: str = "") -> str:
    """Format a number of things: `1 file`, `2 files`; the number in a `form` of `format`."""
    return f"{count:{form}} {noun}{'' if count == 1 else 's'}"
