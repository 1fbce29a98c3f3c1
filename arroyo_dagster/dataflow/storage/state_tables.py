"""The tables of a service's states: their configurations, and conversion of their rows.

A state is an expiring generational table. Its key is `_key`, its event time is `_updated_at` on the
engine's clock, and its columns are those of the arrow-row, or `value` of a primitive. In windows,
its key is `_window_start`, `_window_end` and `_key`, and its event time is the last instant of the
window, so that rows of closed windows expire.

A primitive state in windows is a global keyed table of pairs, keyed by the window and the text of
the key. So is one that a job began before 0.1.0, keyed by that text: it stays so, without a TTL.

`<state>.flushed` has the content of the window that closed last: keyed by the text of the key for a
primitive state, in the same form for an arrow-row state.

Source: sdf-states.md 6.3, 7; the project's design, section 9. Differs: see the decision
`sdf-state-tables.md` for the event time in windows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.dataflow.definition.definition import StateDef, ValueKind
from arroyo_dagster.dataflow.definition.types import Column
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
"""A retention that no watermark exceeds: rows never expire."""

_MOST_NANOS = 2**63 - 1
_NANOS_PER_MS = 1_000_000
Values = TypeVar("Values", pa.Array, pa.ChunkedArray)
_RESERVED = {TIMESTAMP_COLUMN, GENERATION, "_key_hash", "_operation"}


@dataclass(frozen=True, slots=True)
class WindowKey:
    """The key of a primitive state in a window."""

    window_start: I64
    window_end: I64
    key: str


# ---- configurations ------------------------------------------------------------------------------


def state_columns(state: StateDef) -> tuple[Column, ...]:
    """Return the value columns of a state's table: those of a row, or `value` of a primitive."""
    if state.value_kind is ValueKind.ROW:
        return state.columns
    assert state.scalar_type is not None
    return (Column(name=VALUE, type=state.scalar_type, attribute=VALUE),)


def state_config(state: StateDef, *, as_pairs: bool = False) -> TableConfig:
    """Return the configuration of the table that the builder writes for a state.

    Args:
        state: the definition of the state.
        as_pairs: whether to keep a primitive state as pairs, as jobs before 0.1.0 stored it.

    Raises:
        InputError: the name of the state cannot be used in paths, or that of a column is reserved.
    """
    checked_name(state.name, "state")
    windowed = state.window is not None
    is_row = state.value_kind is ValueKind.ROW
    if not is_row and (windowed or as_pairs):
        return _scalar_config(state, state.name, WindowKey if windowed else str)
    ttl = state.ttl_ms
    retention = NEVER_MICROS if ttl is None or windowed else ttl * 1000
    if state.window is not None:
        retention = state.window.grace_ms * 1000
    return timestamp_table_config(
        state.name,
        f"SDF {'arrow-row' if is_row else 'primitive'} state"
        + (", live rows of open windows" if windowed else ""),
        retention_micros=retention,
        schema=row_schema(state),
        keys=[WINDOW_START, WINDOW_END, KEY] if windowed else [KEY],
        routing_keys=[KEY],
        generational=True,
    )


def flushed_config(state: StateDef) -> TableConfig:
    """Return the configuration of the table with the content of a state's last closed window."""
    name = f"{checked_name(state.name, 'state')}{FLUSHED}"
    if state.value_kind is not ValueKind.ROW:
        return _scalar_config(state, name, str)
    return timestamp_table_config(
        name,
        "SDF arrow-row state, the window that closed last",
        retention_micros=0,
        schema=row_schema(state),
        keys=[WINDOW_START, WINDOW_END, KEY],
        routing_keys=[],  # one subtask has all rows
        generational=True,
    )


def _scalar_config(state: StateDef, name: str, key: Any) -> TableConfig:
    assert state.scalar_type is not None
    value = bincode_type(state.scalar_type)
    return global_table_config(name, "SDF primitive state", key=key, value=value)


def row_schema(state: StateDef) -> pa.Schema:
    """Return the columns of a state's table with a row per key, without the row generation.

    Value columns are nullable, since a column that was added later is null in older rows; a null is
    read as the default of the type. Written rows have no nulls.
    """
    taken = [column.name for column in state_columns(state) if column.name in _RESERVED]
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
    values = [pa.field(column.name, arrow_type(column.type)) for column in state_columns(state)]
    updated = [pa.field(UPDATED_AT, pa.timestamp("ms", "UTC"), nullable=False)]
    time = pa.field(TIMESTAMP_COLUMN, TIMESTAMP_TYPE, nullable=False)
    return pa.schema([*key, *values, *(updated if state.window is not None else ()), time])


# ---- rows to and from entries --------------------------------------------------------------------


def last_instant_nanos(window: Window) -> int:
    """Return the event time of a window's rows: its last nanosecond, within a table's range."""
    return min(max(window.end_ms * _NANOS_PER_MS - 1, 0), _MOST_NANOS)


def watermark_micros(watermark_ms: int | None) -> int | None:
    """Return a watermark in microseconds, within the range of a table; None = none yet."""
    if watermark_ms is None:
        return None
    return min(max(watermark_ms * 1000, 0), _MOST_NANOS // 1000)


def entries_of(state: StateDef, rows: pa.Table) -> dict[Window, dict[str, tuple[Any, ...]]]:
    """Convert rows of a state's table to entries by window and key: values, then update time (ms).

    With a TTL, in order of update time.
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
    """Yield each row of a state's table as an entry: its values, then its update time (ms)."""
    columns = [
        python_values(fill_defaults(rows.column(one.name), one)) for one in state_columns(state)
    ]
    return zip(*columns, updated_at_ms(state, rows).to_pylist(), strict=True)


def updated_at_ms(state: StateDef, rows: pa.Table) -> pa.ChunkedArray:
    """Return the update time of each row in epoch milliseconds, as int64."""
    if state.window is not None:
        return rows.column(UPDATED_AT).cast(pa.int64())
    nanos = rows.column(TIMESTAMP_COLUMN).cast(pa.int64())
    return pc.divide(nanos, _NANOS_PER_MS)


def fill_defaults(values: Values, column: Column) -> Values:
    """Return the values of a column with the default of its type for nulls."""
    if not values.null_count:
        return values
    return pc.fill_null(values, pa.scalar(column.type.default, values.type))


def python_values(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    """Return the values of a column as entries have them."""
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.int64())
    values: list[Any] = column.to_pylist()
    return values


def rows_of(
    state: StateDef,
    entries: Mapping[Window, Mapping[str, tuple[Any, ...]]],
    generation: int,
) -> Iterator[pa.Table]:
    """Convert entries by window and key to rows of the state's table, one table per window."""
    for window, by_key in entries.items():
        if not by_key:
            continue
        *columns, updated = zip(*by_key.values(), strict=True)
        rows = column_rows(
            state,
            window,
            pa.array(list(by_key), pa.string()),
            [
                pa.array(column, arrow_type(one.type))
                for one, column in zip(state_columns(state), columns, strict=True)
            ],
            pa.array(updated, pa.int64()),
            generation,
        )
        assert rows is not None
        yield rows


def column_rows(
    state: StateDef,
    window: Window,
    keys: pa.Array,
    columns: Sequence[pa.Array],
    updated_ms: pa.Array,
    generation: int,
) -> pa.Table | None:
    """Convert columns to rows of the state's table; None = there are none.

    Args:
        state: the definition of the state.
        window: of all rows.
        keys: the text of each key.
        columns: of the values, in the order of the definition.
        updated_ms: the update time of each row, int64.
        generation: of all rows.
    """
    if not len(keys):
        return None
    schema = row_schema(state).append(pa.field(GENERATION, pa.uint64(), nullable=False))
    count = len(keys)
    values = dict(zip((one.name for one in state_columns(state)), columns, strict=True))
    values[KEY] = keys
    values[GENERATION] = pa.repeat(pa.scalar(generation, pa.uint64()), count)
    if state.window is None:
        values[TIMESTAMP_COLUMN] = pc.multiply(updated_ms, _NANOS_PER_MS).cast(TIMESTAMP_TYPE)
    else:
        values[WINDOW_START] = pa.repeat(pa.scalar(window.start_ms, pa.int64()), count)
        values[WINDOW_END] = pa.repeat(pa.scalar(window.end_ms, pa.int64()), count)
        values[UPDATED_AT] = updated_ms.cast(pa.timestamp("ms", "UTC"))
        instant = pa.scalar(last_instant_nanos(window), TIMESTAMP_TYPE)
        values[TIMESTAMP_COLUMN] = pa.repeat(instant, count)
    return pa.Table.from_arrays([values[field.name] for field in schema], schema=schema)
