"""State of Arroyo's operators between source and sink: windows, joins, aggregates, watermarks.

Source: crates/arroyo-worker/src/arrow/, the file named in the comment beside each table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from arroyo_dagster.state.model.tables import TableKind
from arroyo_dagster.state.model.types import U32, U64, SystemTimeNanos, USize, enum_of
from arroyo_dagster.state.tables.known.tables import KnownTable

__all__ = [
    "OPERATORS",
    "AsyncUdfState",
    "EventTimeReached",
    "ExpressionWatermarkState",
    "Idle",
    "Watermark",
]


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


_GLOBAL = (
    # watermark_generator.rs
    KnownTable(
        owner="watermark generator",
        holds="the watermark, by subtask",
        table="s",
        description="expression watermark state",
        key=U32,
        value=ExpressionWatermarkState,
    ),
    # async_udf.rs
    KnownTable(
        owner="async UDF",
        holds="calls begun and not yet sent on, by subtask",
        table="a",
        description="AsyncMapOperator state",
        key=USize,
        value=AsyncUdfState,
    ),
    # session_aggregating_window.rs
    KnownTable(
        owner="session window",
        holds="the start of the earliest open session, by subtask; null = none is open",
        table="e",
        description="earliest start time of all active batches.",
        key=U32,
        value=SystemTimeNanos | None,
    ),
)

_INCREMENTS = "what came in since the last checkpoint, by group and window start, not yet emitted"
_INPUT = "input rows not yet emitted"
_SIDE = "input rows of one side that may still be matched"
_STATES = "a group's aggregates at a flush; the largest _generation of a group counts"
_COUNTS = (
    "how often a group has a tuple of arguments; the largest _generation of a tuple counts, and "
    "a count of 0 = gone"
)
_ROWS = (
    # tumbling_aggregating_window.rs
    ("tumbling or instant window", "t", "tumbling_intermediate", _INCREMENTS, ""),
    # sliding_aggregating_window.rs
    ("sliding window", "t", "Sliding_intermediate", _INCREMENTS, ""),
    # session_aggregating_window.rs
    ("session window", "s", "session", _INPUT, ""),
    # window_fn.rs
    ("window function", "input", "window function input", _INPUT, ""),
    # instant_join.rs, join_with_expiration.rs
    ("join", "left", "left join data", _SIDE, ""),
    ("join", "right", "right join data", _SIDE, ""),
    # incremental_aggregator.rs
    ("updating aggregate", "a", "accumulator_state", _STATES, "v0.14 and newer"),
    ("updating aggregate", "b", "batch_state", _COUNTS, "v0.14 and newer"),
)


def _row_tables() -> Iterator[KnownTable]:
    for owner, table, description, holds, releases in _ROWS:
        yield KnownTable(
            owner=owner,
            holds=holds,
            table=table,
            description=description,
            kind=TableKind.EXPIRING_TIME_KEY,
            releases=releases,
        )


OPERATORS = (*_GLOBAL, *_row_tables())
"""The tables of operators, one entry each; tables of rows need no types."""
