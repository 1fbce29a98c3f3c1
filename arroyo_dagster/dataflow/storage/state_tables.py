"""The tables in which the states of a service are kept: their configurations, and what is in them.

A primitive state is a global keyed table, by the key's text; in windows by window and key. An
arrow-row is an expiring generational table, by `_key`, its event time `_updated_at` on the engine's
clock; in windows by `_window_start`, `_window_end` and `_key`, its event time the last instant of
the window, so that rows of closed windows expire.

`<state>.flushed` holds the window that closed last, in the same form.

Source: sdf-states.md 6.3, 7; the project's design, section 9. Differs: see the decision
`sdf-state-tables.md` for what event time means in windows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.dataflow.definition.definition import StateDef, ValueKind
from arroyo_dagster.dataflow.definition.windows import GLOBAL_WINDOW, Window
from arroyo_dagster.dataflow.storage.columns import KEY, UPDATED_AT, WINDOW_END, WINDOW_START
from arroyo_dagster.dataflow.storage.values import arrow_type, bincode_type
from arroyo_dagster.errors import InputError
from arroyo_dagster.state.codec.schema import TIMESTAMP_TYPE
from arroyo_dagster.state.model.ids import checked_name
from arroyo_dagster.state.model.tables import TIMESTAMP_COLUMN, TableConfig
from arroyo_dagster.state.model.types import I64
from arroyo_dagster.state.tables.expiring_time_key import timestamp_table_config
from arroyo_dagster.state.tables.global_keyed import global_table_config

GENERATION = "_generation"
FLUSHED = ".flushed"
VALUE = "value"
NEVER_MICROS = 1 << 60
"""A retention that no watermark outlives."""

_MOST_NANOS = 2**63 - 1
_NANOS_PER_MS = 1_000_000
_RESERVED = {TIMESTAMP_COLUMN, GENERATION, "_key_hash", "_operation"}


@dataclass(frozen=True, slots=True)
class WindowKey:
    """The key of a primitive state in a window."""

    window_start: I64
    window_end: I64
    key: str


# ---- configurations ------------------------------------------------------------------------------


def state_config(state: StateDef) -> TableConfig:
    """The table of a state that its builder writes.

    Raises:
        InputError: its name, or a column's, cannot be kept.
    """
    checked_name(state.name, "state")
    windowed = state.window is not None
    if state.value_kind is not ValueKind.ROW:
        return _scalar_config(state, state.name, WindowKey if windowed else str)
    ttl = state.ttl_ms
    retention = NEVER_MICROS if ttl is None or windowed else ttl * 1000
    if state.window is not None:
        retention = state.window.grace_ms * 1000
    return timestamp_table_config(
        state.name,
        "SDF arrow-row state" + (", live rows of open windows" if windowed else ""),
        retention_micros=retention,
        schema=row_schema(state),
        keys=[WINDOW_START, WINDOW_END, KEY] if windowed else [KEY],
        routing_keys=[KEY],
        generational=True,
    )


def flushed_config(state: StateDef) -> TableConfig:
    """The table of what a windowed state held when its last window closed."""
    name = f"{checked_name(state.name, 'state')}{FLUSHED}"
    if state.value_kind is not ValueKind.ROW:
        return _scalar_config(state, name, str)
    return timestamp_table_config(
        name,
        "SDF arrow-row state, the window that closed last",
        retention_micros=0,
        schema=row_schema(state),
        keys=[WINDOW_START, WINDOW_END, KEY],
        routing_keys=[],  # one subtask holds all of it
        generational=True,
    )


def _scalar_config(state: StateDef, name: str, key: Any) -> TableConfig:
    assert state.scalar_type is not None
    value = bincode_type(state.scalar_type)
    return global_table_config(name, "SDF primitive state", key=key, value=value)


def row_schema(state: StateDef) -> pa.Schema:
    """The columns of a row's table, without the row generation.

    Value columns are nullable, so that a column added later may be null in older rows; those read
    as the type's default. What is written never holds a null.
    """
    taken = [column.name for column in state.columns if column.name in _RESERVED]
    if taken:
        raise InputError(
            f"column `{taken[0]}` of state `{state.name}` has a reserved name",
            number="E20",
            path=state.path,
            next_step=f"rename it; {', '.join(sorted(_RESERVED))} cannot be columns",
        )
    key = [pa.field(KEY, pa.string(), nullable=False)]
    if state.window is not None:
        bounds = (WINDOW_START, WINDOW_END)
        key = [*(pa.field(name, pa.int64(), nullable=False) for name in bounds), *key]
    values = [pa.field(column.name, arrow_type(column.type)) for column in state.columns]
    updated = [pa.field(UPDATED_AT, pa.timestamp("ms", "UTC"), nullable=False)]
    time = pa.field(TIMESTAMP_COLUMN, TIMESTAMP_TYPE, nullable=False)
    return pa.schema([*key, *values, *(updated if state.window is not None else ()), time])


# ---- rows to and from entries --------------------------------------------------------------------


def last_instant_nanos(window: Window) -> int:
    """The event time of a window's rows: its last nanosecond, within what a table can hold."""
    return min(max(window.end_ms * _NANOS_PER_MS - 1, 0), _MOST_NANOS)


def watermark_micros(watermark_ms: int | None) -> int | None:
    """A watermark as a table's, within what it can hold; None = none yet."""
    if watermark_ms is None:
        return None
    return min(max(watermark_ms * 1000, 0), _MOST_NANOS // 1000)


def entries_of(state: StateDef, rows: pa.Table) -> dict[Window, dict[str, tuple[Any, ...]]]:
    """Rows of a state's table as entries by window and key: their values, then `_updated_at`.

    The rows updated first come first.
    """
    if state.ttl_ms is not None:
        rows = rows.take(pc.sort_indices(updated_at_ms(state, rows)))
    entries = entry_values(state, rows)
    keys = rows.column(KEY).to_pylist()
    if state.window is None:
        return {GLOBAL_WINDOW: dict(zip(keys, entries, strict=True))}
    found: dict[Window, dict[str, tuple[Any, ...]]] = {}
    starts, ends = (rows.column(name).to_pylist() for name in (WINDOW_START, WINDOW_END))
    for start, end, key, entry in zip(starts, ends, keys, entries, strict=True):
        found.setdefault(Window(start, end), {})[key] = entry
    return found


def entry_values(state: StateDef, rows: pa.Table) -> Iterator[tuple[Any, ...]]:
    """Each row of a state's table as an entry: its values, then when it was updated."""
    columns = [_python_values(rows.column(one.name), one.type.default) for one in state.columns]
    return zip(*columns, updated_at_ms(state, rows).to_pylist(), strict=True)


def updated_at_ms(state: StateDef, rows: pa.Table) -> pa.ChunkedArray:
    """When each row of a state's table was updated, as int64."""
    if state.window is not None:
        return rows.column(UPDATED_AT).cast(pa.int64())
    nanos = rows.column(TIMESTAMP_COLUMN).cast(pa.int64())
    return pc.divide(nanos, _NANOS_PER_MS)


def _python_values(column: pa.ChunkedArray, default: Any) -> list[Any]:
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.int64())
    if column.null_count:
        column = pc.fill_null(column, pa.scalar(default, column.type))
    values: list[Any] = column.to_pylist()
    return values


def rows_of(
    state: StateDef,
    entries: Mapping[Window, Mapping[str, tuple[Any, ...]]],
    generation: int,
) -> Iterator[pa.Table]:
    """Entries by key as rows of the state's table, a table for each window."""
    schema = row_schema(state).append(pa.field(GENERATION, pa.uint64(), nullable=False))
    for window, by_key in entries.items():
        count = len(by_key)
        if not count:
            continue
        *columns, updated = zip(*by_key.values(), strict=True)
        values: dict[str, Any] = {
            one.name: pa.array(column, arrow_type(one.type))
            for one, column in zip(state.columns, columns, strict=True)
        }
        values[KEY] = pa.array(list(by_key), pa.string())
        values[GENERATION] = pa.repeat(pa.scalar(generation, pa.uint64()), count)
        if state.window is None:
            nanos = pc.multiply(pa.array(updated, pa.int64()), _NANOS_PER_MS)
            values[TIMESTAMP_COLUMN] = nanos.cast(TIMESTAMP_TYPE)
        else:
            values[WINDOW_START] = pa.repeat(pa.scalar(window.start_ms, pa.int64()), count)
            values[WINDOW_END] = pa.repeat(pa.scalar(window.end_ms, pa.int64()), count)
            values[UPDATED_AT] = pa.array(updated, pa.timestamp("ms", "UTC"))
            instant = pa.scalar(last_instant_nanos(window), TIMESTAMP_TYPE)
            values[TIMESTAMP_COLUMN] = pa.repeat(instant, count)
        yield pa.Table.from_arrays([values[field.name] for field in schema], schema=schema)
