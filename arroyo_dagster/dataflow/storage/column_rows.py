"""The rows of a state as columns in memory, for functions of whole batches.

Every step works on all keys that it is given at once; none on all keys of the state, except the
expiry of a state with a TTL. The memory and the look-up of keys are those of keyed state.

Source: an extension of this project; the decisions `sdf-columnar.md` and `keyed-state.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.dataflow.definition.definition import StateDef
from arroyo_dagster.dataflow.definition.windows import GLOBAL_WINDOW
from arroyo_dagster.dataflow.storage.columns import KEY
from arroyo_dagster.dataflow.storage.state_tables import (
    column_rows,
    fill_defaults,
    state_columns,
    updated_at_ms,
)
from arroyo_dagster.dataflow.storage.values import arrow_type
from arroyo_dagster.state.tables.keyed.cells import Mask, Slots, grown
from arroyo_dagster.state.tables.keyed.rows import KeyedRows, Keys

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
