"""Render states as text: the tables of `show state`, and frames as SQL mode prints them.

Source: sdf-states.md 4.4.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import polars as pl

from arroyo_dagster.dataflow.definition.types import ScalarType
from arroyo_dagster.dataflow.definition.windows import GLOBAL_WINDOW, Window

EVERYWHERE = "*"
"""The text of the global window."""


def borderless(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Render a table without borders: lines begin with a space, columns are two spaces apart."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        " "
        + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def cell_text(value: Any, scalar: ScalarType) -> str:
    """Render a value of a state: floats in their shortest form without `.0`, f32 as f32."""
    if scalar.is_float:
        return float_text(value, bits=32 if scalar is ScalarType.F32 else 64)
    if scalar is ScalarType.BOOL:
        return "true" if value else "false"
    if scalar is ScalarType.TIMESTAMP:
        return millis_text(value)
    return str(value)


def float_text(value: float, *, bits: int) -> str:
    """Return the shortest text that is parsed to the same value, without a trailing `.0`.

    Above 24 characters, return scientific notation.
    """
    number = np.float32(value) if bits == 32 else np.float64(value)
    text = np.format_float_positional(number, unique=True, trim="-")
    longest = 24  # the maximum number of characters in positional notation
    return text if len(text) <= longest else str(number)


def millis_text(millis: int | datetime.datetime) -> str:
    """Render a time as RFC 3339 in UTC, with milliseconds unless they are 0."""
    if isinstance(millis, datetime.datetime):
        millis = round(millis.timestamp() * 1000)
    try:
        moment = datetime.datetime.fromtimestamp(millis // 1000, datetime.UTC)
    except (ValueError, OverflowError, OSError):
        return str(millis)  # outside of datetime's range
    fraction = f".{millis % 1000:03}" if millis % 1000 else ""
    return f"{moment:%Y-%m-%dT%H:%M:%S}{fraction}Z"


def watermark_text(millis: int) -> str:
    """Render a watermark as RFC 3339, always with milliseconds."""
    text = millis_text(millis)
    return text if "." in text or not text.endswith("Z") else f"{text[:-1]}.000Z"


def window_text(window: Window) -> str:
    """Render a window as `start:end`, the global window as `*`."""
    if window == GLOBAL_WINDOW:
        return EVERYWHERE
    return f"{millis_text(window.start_ms)}:{millis_text(window.end_ms)}"


def frame_text(frame: pl.DataFrame) -> str:
    """Render a frame as Polars prints it: all columns, at most ten rows (the middle is omitted)."""
    plain = [
        pl.col(name).dt.replace_time_zone(None)
        for name, kind in frame.schema.items()
        if isinstance(kind, pl.Datetime) and kind.time_zone is not None
    ]
    with pl.Config(
        tbl_formatting="UTF8_FULL_CONDENSED",
        tbl_rows=10,
        tbl_cols=-1,
        tbl_width_chars=-1,
        fmt_str_lengths=100,
    ):
        return str(frame.with_columns(plain))


def table_text(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Render texts in the same format as query results."""
    return frame_text(pl.DataFrame(rows, schema=list(header), orient="row"))
