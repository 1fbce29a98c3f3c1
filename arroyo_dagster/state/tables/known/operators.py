"""State of Arroyo's operators between source and sink: windows, joins, aggregates, watermarks.

Source: crates/arroyo-worker/src/arrow/, the file named in the comment beside each table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from arroyo_dagster.state.model.types import U64, SystemTimeNanos, enum_of


@dataclass(frozen=True, slots=True)
class ExpressionWatermarkState:
    """The watermark of a subtask, and the event time at which it last emitted one."""

    last_watermark_emitted_at: SystemTimeNanos
    max_watermark: SystemTimeNanos


@dataclass(frozen=True, slots=True)
class EventTimeReached:
    """A watermark: event time has reached this time."""

    at: SystemTimeNanos


@dataclass(frozen=True, slots=True)
class Idle:
    """The input is idle, so downstream operators need not wait for it."""


Watermark = Annotated[EventTimeReached | Idle, enum_of("Watermark", EventTimeReached, Idle)]


@dataclass(frozen=True, slots=True)
class AsyncUdfState:
    """Calls in progress and results not yet emitted, each with its number; rows are in arrow row
    format.

    `watermarks` are those that wait for calls, each with the number of the call it follows.
    """

    inputs: list[tuple[U64, bytes]]
    outputs: list[tuple[U64, bytes]]
    watermarks: list[tuple[U64, Watermark]]
