"""Owned states in the columnar form of update-state: the rows of a batch's keys, and their updates.

Source: an extension of this project; the decision `sdf-columnar.md`. Errors E41, E43, E44.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.dataflow.definition.definition import StateDef, ValueKind
from arroyo_dagster.dataflow.definition.types import Column, ScalarType
from arroyo_dagster.dataflow.definition.windows import GLOBAL_WINDOW
from arroyo_dagster.dataflow.errors import StateValueError, access_error, unknown_name
from arroyo_dagster.dataflow.runtime.columnar import call_divided, called, frame_result
from arroyo_dagster.dataflow.runtime.context import Accessor
from arroyo_dagster.dataflow.runtime.functions import Function
from arroyo_dagster.dataflow.runtime.handles import DELETED, Slot
from arroyo_dagster.dataflow.runtime.records import Records
from arroyo_dagster.dataflow.storage.columns import KEY
from arroyo_dagster.dataflow.storage.state_tables import (
    column_rows,
    fill_defaults,
    python_values,
    state_columns,
    updated_at_ms,
)
from arroyo_dagster.dataflow.storage.values import arrow_type
from arroyo_dagster.dataflow.views.sql import StateTable, Tables
from arroyo_dagster.engine.keyed.cells import Mask, Slots, grown
from arroyo_dagster.engine.keyed.rows import KeyedRows, Keys
from arroyo_dagster.errors import InputError


class BatchSlot(Protocol):
    """The rows of a state, as whole batches read and write them."""

    def values_of(self, keys: BatchKeys) -> Sequence[pa.Array]:
        """Return the values of keys by column; a key without a row has defaults."""

    def replace(self, keys: BatchKeys, values: Sequence[pa.Array] | None) -> Undo:
        """Write the rows of keys, by column; None = delete them."""


class ColumnSlot(Slot):
    """Of a state whose rows are columns in memory."""

    def __init__(self, state: StateDef) -> None:
        super().__init__(state)
        self.rows = ColumnRows(state)

    def values_of(self, keys: BatchKeys) -> Sequence[pa.Array]:
        return self.rows.values_of(keys, self.now_ms)

    def replace(self, keys: BatchKeys, values: Sequence[pa.Array] | None) -> Undo:
        return self.rows.replace(keys, values, self.now_ms)


class _EntrySlot:
    """Of a state whose rows are entries, one by one: those of windows, and of global tables."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._columns = state_columns(slot.state)
        self._defaults = tuple(column.type.default for column in self._columns)

    def values_of(self, keys: BatchKeys) -> Sequence[pa.Array]:
        entries = [self._entry(key) for key in keys.listed]
        # An entry has the update time behind its values; defaults have none.
        return [
            pa.array([entry[index] for entry in entries], arrow_type(column.type))
            for index, column in enumerate(self._columns)
        ]

    def _entry(self, key: str) -> tuple[Any, ...]:
        slot = self._slot
        written = slot.fresh.get(key)
        if written is not None:
            return self._defaults if written is DELETED else slot.entry(written)
        entry = slot.stored.get(key)
        if entry is None:
            return self._defaults
        ttl_ms = slot.state.ttl_ms
        return self._defaults if ttl_ms is not None and slot.now_ms - entry[-1] >= ttl_ms else entry

    def replace(self, keys: BatchKeys, values: Sequence[pa.Array] | None) -> Undo:
        listed, fresh = keys.listed, self._slot.fresh
        before = [*map(fresh.get, listed)]
        fresh.update(zip(listed, self._entries(values, len(listed)), strict=True))

        def undo() -> None:
            for key, written in zip(listed, before, strict=True):
                if written is None:
                    fresh.pop(key, None)
                else:
                    fresh[key] = written

        return undo

    def _entries(self, values: Sequence[pa.Array] | None, count: int) -> Sequence[Any]:
        if values is None:
            return [DELETED] * count
        columns = [python_values(column) for column in values]
        if self._slot.state.value_kind is not ValueKind.ROW:
            return columns[0]
        return [*zip(*columns, [self._slot.now_ms] * count, strict=True)]


class BatchState:
    """What the accessor of an owned state returns in a columnar update-state.

    Writes take effect at once, and are rolled back if the function fails.
    """

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._columns = state_columns(slot.state)
        self._rows: BatchSlot = slot if isinstance(slot, ColumnSlot) else _EntrySlot(slot)
        self._keys = BatchKeys(pl.Series(KEY, [], pl.String))
        self._undo: list[Undo] = []
        self._is_open = False

    # ---- for the operator ------------------------------------------------------------------------

    def begin(self, keys: BatchKeys) -> None:
        """Begin a call for some keys, in the order of their first records."""
        self._keys, self._undo = keys, []
        self._is_open = True

    def end(self, *, failed: bool) -> None:
        """End the call; roll its writes back if it failed."""
        self._is_open = False
        for undo in reversed(self._undo) if failed else ():
            undo()
        self._undo = []

    def access(self) -> BatchState:
        """Return this object, as the accessor in user code does."""
        self._check_open()
        return self

    def table(self) -> StateTable:
        """Return the rows as a table for SQL."""
        state = self._slot.state
        return StateTable(state.table, self.rows(), tuple(state.aliases))

    # ---- for user code ---------------------------------------------------------------------------

    def rows(self) -> pl.DataFrame:
        """Return a row for each distinct key of the batch, in the order of their first records.

        The columns are `_key` (the text of the key) and those of the state, `value` of a primitive
        one. A key without a row has defaults.
        """
        self._check_open()
        values = self._rows.values_of(self._keys)
        names = [column.name for column in self._columns]
        frame = pl.from_arrow(pa.Table.from_arrays(values, names=names))
        assert isinstance(frame, pl.DataFrame)
        return frame.insert_column(0, self._keys.series)

    def update(self, rows: pl.DataFrame | pa.Table) -> None:
        """Write rows back, and create those that do not exist.

        Args:
            rows: `_key` and every column of the state, in any order; each key once, and only keys
                of the batch.

        Raises:
            StateValueError: a value does not fit its column (E41). Nothing is written.
            StateAccessError: a column is missing or unknown (E44), a key is not in the batch, or
                the call is over (E43).
        """
        self._check_open()
        frame = rows if isinstance(rows, pl.DataFrame) else pl.from_arrow(rows)
        assert isinstance(frame, pl.DataFrame)
        names = [KEY, *(column.name for column in self._columns)]
        for name in {*names} ^ {*frame.columns}:
            columns = names if name in frame.columns else frame.columns
            raise unknown_name("column", name, columns, state=self._slot.state.name)
        keys = self._checked_keys(frame[KEY])
        table = self._arrow(frame)
        values = [self._values(column, table.column(column.name)) for column in self._columns]
        self._undo.append(self._rows.replace(keys, values))

    def _arrow(self, rows: pl.DataFrame) -> pa.Table:
        # Polars adds a u64 and a signed number to 128 bits, which Arrow has no type for.
        for column in self._columns:
            if rows.schema.get(column.name) in (pl.Int128, pl.UInt128):
                kind = pl.UInt64 if column.type is ScalarType.U64 else pl.Int64
                try:
                    rows = rows.with_columns(pl.col(column.name).cast(kind, strict=True))
                except pl.exceptions.PolarsError as error:
                    raise self._unfit(column, error) from error
        return rows.to_arrow()

    def delete(self, keys: Sequence[str] | pl.Series) -> None:
        """Remove the rows of some keys of the batch; a later access starts from defaults.

        Raises:
            StateAccessError: a key is not in the batch, or the call is over (E43).
        """
        self._check_open()
        series = keys if isinstance(keys, pl.Series) else pl.Series(KEY, list(keys), pl.String)
        self._undo.append(self._rows.replace(self._checked_keys(series), None))

    def _checked_keys(self, given: pl.Series) -> BatchKeys:
        expected = self._keys.series
        if given.equals(expected):
            return self._keys
        if given.n_unique() < len(given):
            raise access_error("E43", "a key has two rows", state=self._slot.state.name)
        others = given.filter(~given.is_in(expected.implode()))
        if len(others):
            raise access_error(
                "E43",
                f"key {others[0]!r} is not in the batch; update-state changes the keys of its "
                "records only",
                state=self._slot.state.name,
            )
        return BatchKeys(given)

    def _values(self, column: Column, given: pa.ChunkedArray) -> pa.Array:
        try:
            return _converted(column.type, given)
        except (pa.ArrowException, ValueError, OverflowError) as error:
            raise self._unfit(column, error) from error

    def _unfit(self, column: Column, error: Exception) -> StateValueError:
        return StateValueError(
            f"column `{column.name}` is no {column.type.value}: {error}",
            number="E41",
            state=self._slot.state.name,
            column=column.name,
        )

    def _check_open(self) -> None:
        if not self._is_open:
            raise self._slot.outside()


def _converted(scalar: ScalarType, given: pa.ChunkedArray) -> pa.Array:
    """Return values in the column's type. ValueError, ArrowException: one does not fit."""
    if given.null_count:
        raise ValueError("there is a null")
    kind, target = given.type, arrow_type(scalar)
    if scalar is ScalarType.TIMESTAMP:
        fits = pa.types.is_timestamp(kind) or pa.types.is_integer(kind)
        given = given.cast(pa.int64()) if pa.types.is_integer(kind) else given
    elif scalar.is_integer:
        fits = pa.types.is_integer(kind)
    elif pa.types.is_floating(target):
        fits = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    elif scalar is ScalarType.BOOL:
        fits = pa.types.is_boolean(kind)
    else:
        fits = pa.types.is_string(kind) or pa.types.is_large_string(kind) or kind == "string_view"
    if not fits:
        raise ValueError(f"it has values of type {kind}")
    is_float = pa.types.is_floating(target)
    values = given.cast(target, safe=not is_float)
    if is_float and not pc.all(pc.is_finite(values)).as_py():
        raise ValueError("a number is not finite, or too large")
    return values.combine_chunks()


class ColumnUpdate:
    """Applies an update-state of whole batches to the owned states of one subtask.

    Args:
        slots: of the states, by name.
        others: returns the tables that a query sees besides, by the words in it.
    """

    def __init__(
        self, slots: Mapping[str, Slot], others: Callable[[Collection[str]], Tables]
    ) -> None:
        self._states = {name: BatchState(slot) for name, slot in slots.items()}
        self._others = others

    @property
    def accessors(self) -> dict[str, Accessor]:
        """The accessors of the states in user code."""
        return {name: state.access for name, state in self._states.items()}

    def tables_in(self, words: Collection[str]) -> Tables:
        """Return the tables of a query: of owned states, the rows of the batch's keys."""
        tables = self._others(words)
        for state in self._states.values():
            tables = tables.with_table(state.table())
        return tables

    def apply(
        self, update: Function, records: Records, fail: Callable[[int, Exception], None]
    ) -> None:
        """Call the function with records that have the keys of rows; more often if it fails.

        Args:
            update: the function.
            records: the records, of one window if there are windows.
            fail: is given the index of each record on which the function fails.
        """
        texts = records.origin.batch.column(KEY)
        if len(records) < len(texts):
            texts = texts.take(pa.array(records.rows, pa.int64()))
        keys = pl.Series(KEY, texts)

        def call(start: int, stop: int) -> None:
            self.call(update, records.columns(start, stop), keys.slice(start, stop - start))

        call_divided(len(records), call, fail)

    def call(self, update: Function, frame: pl.DataFrame, keys: pl.Series) -> None:
        """Call the function once; if it fails, nothing is written.

        Args:
            update: the function.
            frame: the records.
            keys: the text of each record's key, named `_key`.

        Raises:
            Exception: any exception of the function.
        """
        frame = frame.drop(KEY, strict=False).insert_column(0, keys)
        distinct = BatchKeys(keys.unique(maintain_order=True))
        for state in self._states.values():
            state.begin(distinct)
        done = False
        try:
            result = called(update, frame)
            if result is not None:
                self._only().update(frame_result(update, result))
            done = True
        finally:
            for state in self._states.values():
                state.end(failed=not done)

    def _only(self) -> BatchState:
        """Return the state that a returned frame updates. InputError: there are several."""
        if len(self._states) != 1:
            raise InputError(
                "update-state returned rows, and the service owns several states; expected nothing",
                states=sorted(self._states),
                next_step="call update(rows) of the state, and return nothing",
            )
        return next(iter(self._states.values()))


# ---- the rows of a state as columns in memory, for functions of whole batches --------------------
# Every step works on all keys that it is given at once; none on all keys of the state, except the
# expiry of a state with a TTL. The memory and the look-up of keys are those of keyed state.
#
# Source: an extension of this project; the decisions `sdf-columnar.md` and `keyed-state.md`.

_LIVE, _CHANGED = np.uint8(1), np.uint8(2)
_NEVER = 1 << 62

Undo = Callable[[], None]
"""Takes a write back. Later writes must have been taken back before."""


@dataclass(frozen=True)
class BatchKeys:
    """Keys by their text, each once."""

    series: pl.Series

    @cached_property
    def listed(self) -> list[str]:
        """The keys as a list."""
        return self.series.to_list()

    @cached_property
    def array(self) -> pa.Array:
        """The keys as an Arrow array of type `string`."""
        return self.series.to_arrow(compat_level=pl.CompatLevel.oldest()).cast(pa.string())


class ColumnRows:
    """The rows of an unwindowed state by key.

    Args:
        state: the definition of the state.
    """

    def __init__(self, state: StateDef) -> None:
        self._state = state
        self._columns = state_columns(state)
        values = [pa.field(one.name, arrow_type(one.type), nullable=False) for one in self._columns]
        updated = pa.field("updated_ms", pa.int64(), nullable=False)
        self._rows = KeyedRows([pa.field(KEY, pa.string(), nullable=False)], [*values, updated])
        self._flags: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._touched: list[Slots] = []
        self._oldest_ms = _NEVER
        self._last_found: tuple[BatchKeys, Keys, Slots] | None = None

    def values_of(self, keys: BatchKeys, now_ms: int) -> list[pa.Array]:
        """Return the values of keys by column; a key without a row has defaults."""
        _, slots = self._find(keys)
        at = np.flatnonzero(slots >= 0)
        at = at[self._has(slots[at], _LIVE)]
        if self._state.ttl_ms is not None:
            updated = self._rows.take_values(slots[at])[-1].to_numpy()
            at = at[now_ms - updated < self._state.ttl_ms]
        values = self._rows.take_values(slots[at])[:-1]
        if len(at) == len(slots):
            return values
        places = np.zeros(len(slots), np.int64)
        places[at] = np.arange(len(at))
        absent = np.ones(len(slots), bool)
        absent[at] = False
        taken = pa.array(places, mask=absent)
        return [
            fill_defaults(column.take(taken), one)
            for one, column in zip(self._columns, values, strict=True)
        ]

    def replace(self, keys: BatchKeys, values: Sequence[pa.Array] | None, now_ms: int) -> Undo:
        """Write the rows of keys, or delete them.

        Args:
            keys: the keys.
            values: by column, in the columns' types; None = delete.
            now_ms: the engine's clock.

        Returns:
            What takes the write back.
        """
        slots = self._slots_for(*self._find(keys))
        before, flags = self._rows.take_values(slots), self._flags[slots]
        self._touched.append(slots)
        if values is None:
            self._flags[slots] = _CHANGED
        else:
            self._put(slots, [*values, pa.repeat(pa.scalar(now_ms, pa.int64()), len(slots))])
            self._flags[slots] = _LIVE | _CHANGED

        def undo() -> None:
            self._rows.put(slots, before)
            self._flags[slots] = flags

        return undo

    def load(self, rows: pa.Table) -> None:
        """Add stored rows of keys that have none here, as they are in the state's table."""
        keys = rows.column(KEY).combine_chunks()
        values = [fill_defaults(rows.column(one.name), one) for one in self._columns]
        updated = updated_at_ms(self._state, rows)
        self._last_found = None
        found = self._rows.keys_of([keys])
        slots = self._slots_for(found, self._rows.find(found))
        self._put(slots, [column.combine_chunks() for column in (*values, updated)])
        self._flags[slots] = _LIVE

    def _put(self, slots: Slots, values: Sequence[pa.Array]) -> None:
        self._rows.put(slots, values)
        if len(slots):
            self._oldest_ms = min(self._oldest_ms, pc.min(values[-1]).as_py())

    def _find(self, keys: BatchKeys) -> tuple[Keys, Slots]:
        """Return the keys as they are found, and their slots, or -1; a call asks twice."""
        if self._last_found is None or self._last_found[0] is not keys:
            found = self._rows.keys_of([keys.array])
            self._last_found = keys, found, self._rows.find(found)
        return self._last_found[1:]

    def _slots_for(self, keys: Keys, slots: Slots) -> Slots:
        """Add the keys whose slot is -1; return `slots` with theirs."""
        fresh = np.flatnonzero(slots < 0)
        if len(fresh):
            slots[fresh] = self._rows.add(keys.take(fresh))
            self._flags = grown(self._flags, self._rows.slots)
        return slots

    def _has(self, slots: Slots, flag: np.uint8) -> Mask:
        return cast(Mask, (self._flags[slots] & flag) != 0)

    # ---- the barrier -----------------------------------------------------------------------------

    def take_changes(self, now_ms: int, generation: int) -> tuple[pa.Table | None, pa.Table | None]:
        """Return what changed since the last call: rows that were written, and deleted ones."""
        slots = np.concatenate([np.zeros(0, np.int64), *self._touched])
        self._touched = []
        slots = slots[np.sort(np.unique(slots, return_index=True)[1])]  # in the order of writes
        changed, live = self._has(slots, _CHANGED), self._has(slots, _LIVE)
        written, gone = slots[changed & live], slots[changed & ~live]
        found = self._table(written, generation), self._deleted(gone, now_ms, generation)
        self._flags[written] = _LIVE
        self._drop(slots[~live])
        return found

    def _table(self, slots: Slots, generation: int) -> pa.Table | None:
        (keys,), (*values, updated) = self._rows.take_keys(slots), self._rows.take_values(slots)
        return column_rows(self._state, GLOBAL_WINDOW, keys, values, updated, generation)

    def _deleted(self, slots: Slots, now_ms: int, generation: int) -> pa.Table | None:
        (keys,), count = self._rows.take_keys(slots), len(slots)
        values = [
            pa.repeat(pa.scalar(one.type.default, arrow_type(one.type)), count)
            for one in self._columns
        ]
        updated = pa.repeat(pa.scalar(now_ms, pa.int64()), count)
        return column_rows(self._state, GLOBAL_WINDOW, keys, values, updated, generation)

    def _drop(self, slots: Slots) -> None:
        self._last_found = None
        self._flags[slots] = 0
        self._rows.drop(slots)

    def expire(self, now_ms: int) -> int:
        """Remove the rows with an expired TTL, and return their number."""
        ttl = self._state.ttl_ms
        if ttl is None or now_ms - self._oldest_ms < ttl:
            return 0
        live = np.flatnonzero(self._flags[: self._rows.slots] & _LIVE)
        updated = self._rows.take_values(live)[-1].to_numpy()
        expired = now_ms - updated >= ttl
        self._drop(live[expired])
        self._oldest_ms = int(updated[~expired].min(initial=_NEVER))
        return int(expired.sum())
