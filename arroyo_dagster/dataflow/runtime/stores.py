"""Keep the states of one subtask in memory, and write their changes to the tables.

Source: sdf-states.md 2.8, 3.5 (W11, W12), 6.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arroyo_dagster.dataflow.definition.definition import StateDef
from arroyo_dagster.dataflow.definition.windows import GLOBAL_WINDOW, Window
from arroyo_dagster.dataflow.runtime.batch_states import ColumnSlot
from arroyo_dagster.dataflow.runtime.handles import DELETED, CellSlot, RowSlot, Slot
from arroyo_dagster.dataflow.storage.columns import KEY
from arroyo_dagster.dataflow.storage.state_tables import (
    VALUE,
    WindowKey,
    entries_of,
    entry_values,
    rows_of,
    updated_at_ms,
)
from arroyo_dagster.dataflow.storage.values import arrow_type, bincode_type
from arroyo_dagster.engine.operators import OperatorContext
from arroyo_dagster.state.codec.hashing.routing import key_hashes, subtasks_for_hashes
from arroyo_dagster.state.tables.key_index import KeyIndex
from arroyo_dagster.state.tables.table import TaskInfo


class Store:
    """The entries of one state by window, with those written since the last barrier separately."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.state: StateDef = slot.state
        self._entries: dict[Window, dict[str, Any]] = {}
        self._fresh: dict[Window, dict[str, Any]] = {}
        self.enter(GLOBAL_WINDOW)

    def enter(self, window: Window) -> None:
        """Switch the slot to the entries of a window."""
        self.slot.stored = self._entries.setdefault(window, {})
        self.slot.fresh = self._fresh.setdefault(window, {})

    def prefetch(self, keys: pa.Array) -> None:
        """Load the entries of the keys that the next records have."""

    def close(self, window: Window) -> pa.Table:
        """Return the content of a closing window, and remove it.

        Sorted by key; the columns are those of `rows_of`, or `_key` and `value` for scalars.
        """
        entries, fresh = self._entries.pop(window, {}), self._fresh.pop(window, {})
        self.enter(GLOBAL_WINDOW)
        for key, written in fresh.items():
            if written is DELETED:
                entries.pop(key, None)
        live = sorted({**entries, **self.slot.entries(fresh)}.items())
        return self._content(window, live)

    def _content(self, window: Window, entries: list[tuple[str, Any]]) -> pa.Table:
        raise NotImplementedError

    def write(self, generation: int) -> int:
        """Write the changes to the table, and return the number of expired rows."""
        raise NotImplementedError


def open_store(
    slot: Slot, ctx: OperatorContext, watermark_ms: int | None, *, as_pairs: bool
) -> Store:
    """Return the store of a slot, with the entries of the restored epoch.

    Args:
        slot: of the state.
        ctx: has the tables.
        watermark_ms: event time; None = none yet.
        as_pairs: see `state_config`.
    """
    if isinstance(slot, ColumnSlot):
        return ColumnStore(slot, ctx)
    in_windows = slot.state.window is not None
    if isinstance(slot, CellSlot) and (in_windows or as_pairs):
        return PairStore(slot, ctx, watermark_ms)
    return RowStore(slot, ctx, watermark_ms)


class PairStore(Store):
    """A primitive state in a global keyed table, which every subtask reads as a whole.

    It keeps the entries of its own keys in memory. See `state_tables` for which states these are.
    """

    def __init__(self, slot: Slot, ctx: OperatorContext, watermark_ms: int | None) -> None:
        super().__init__(slot)
        assert isinstance(slot, CellSlot)
        windowed = self.state.window is not None
        value = bincode_type(slot.scalar)
        self._view = ctx.table_manager.get_global_keyed_state(
            self.state.name, WindowKey if windowed else str, value
        )
        self._stored_in: dict[Window, set[str]] = {}
        # Every subtask reads the whole table, but keeps only its own keys.
        everything = self._view.get_all()
        if not windowed:
            mine = own_keys(list(everything), ctx.task_info)
            self._entries[GLOBAL_WINDOW].update((key, (everything[key], 0)) for key in mine)
            return
        own = set(own_keys([key.key for key in everything], ctx.task_info))
        for key, stored in everything.items():
            if key.key not in own:
                continue
            window = Window(key.window_start, key.window_end)
            self._entries.setdefault(window, {})[key.key] = (stored, 0)
            self._stored_in.setdefault(window, set()).add(key.key)

    def _content(self, window: Window, entries: list[tuple[str, Any]]) -> pa.Table:
        assert self.state.scalar_type is not None
        stored_keys = self._stored_in.pop(window, set())
        self._view.remove_many(WindowKey(*window, key) for key in sorted(stored_keys))
        return pa.table(
            {
                KEY: pa.array([key for key, _ in entries], pa.string()),
                VALUE: pa.array(
                    [entry[0] for _, entry in entries], arrow_type(self.state.scalar_type)
                ),
            }
        )

    def write(self, generation: int) -> int:
        for window, fresh in self._fresh.items():
            deleted = [key for key, written in fresh.items() if written is DELETED]
            live = {key: written for key, written in fresh.items() if written is not DELETED}
            if self.state.window is not None:
                stored = self._stored_in.setdefault(window, set())
                stored.update(live)
                stored.difference_update(deleted)
            self._view.remove_many(self._stored_key(window, key) for key in deleted)
            self._view.insert_columns(
                [self._stored_key(window, key) for key in live], list(live.values())
            )
            self.enter(window)
            self.slot.settle()
        self.enter(GLOBAL_WINDOW)
        return 0

    def _stored_key(self, window: Window, key: str) -> str | WindowKey:
        return key if self.state.window is None else WindowKey(*window, key)


def own_keys(keys: Sequence[str], task: TaskInfo) -> Sequence[str]:
    """Return those of `keys` that are routed to a subtask."""
    if task.parallelism == 1 or not keys:
        return keys
    hashes = key_hashes([pa.array(keys, pa.string())], rows=len(keys))
    subtasks = subtasks_for_hashes(hashes, task.parallelism).tolist()
    return [key for key, subtask in zip(keys, subtasks, strict=True) if subtask == task.task_index]


class RowStore(Store):
    """A state with a row per key, or a value per key, with all keys of this subtask in memory.

    Restored rows stay Arrow columns until a record has their key. Rows of windows, which are few
    and small, become entries at once.
    """

    def __init__(self, slot: Slot, ctx: OperatorContext, watermark_ms: int | None) -> None:
        super().__init__(slot)
        assert isinstance(slot, RowSlot | CellSlot)
        self._rows = slot
        self._view = ctx.table_manager.get_uncached_key_value_view(self.state.name)
        window = self.state.window
        self._restored = UnreadRows(self.state, *self._view.indexed()) if window is None else None
        self._prefetched: dict[str, int] = {}
        if window is not None:
            for bounds, entries in entries_of(self.state, self._view.get_newest()).items():
                if not window.is_closed(bounds, watermark_ms):
                    self._entries[bounds] = entries
        self.enter(GLOBAL_WINDOW)

    def prefetch(self, keys: pa.Array) -> None:
        if self._restored is None:
            return
        places, entries = self._restored.find(keys)
        if not entries:
            return
        self._entries[GLOBAL_WINDOW].update(entries)
        if self.state.ttl_ms is None:
            self._restored.drop(places)
        else:
            self._prefetched.update(zip(entries, places.tolist(), strict=True))

    def _content(self, window: Window, entries: list[tuple[str, Any]]) -> pa.Table:
        tables = list(rows_of(self.state, {window: dict(entries)}, 0))
        return tables[0] if tables else self._view.schema.empty_table()

    def write(self, generation: int) -> int:
        self._evict()
        carrier = (*self._rows.defaults, self._rows.now_ms)
        live: dict[Window, dict[str, Any]] = {}
        removals: dict[Window, dict[str, Any]] = {}
        for window, fresh in self._fresh.items():
            deleted = [key for key, entry in fresh.items() if entry is DELETED]
            removals[window] = dict.fromkeys(sorted(deleted), carrier)
            live[window] = self.slot.entries(fresh)
            self._merge(self._entries[window], live[window], deleted)
            fresh.clear()
        for rows in rows_of(self.state, live, generation):
            self._view.insert(rows)
        for rows in rows_of(self.state, removals, generation):
            self._view.delete_keys(rows)
        # Remove expired rows from memory and return their number; the oldest entries are first.
        ttl, now = self.state.ttl_ms, self._rows.now_ms
        if ttl is None:
            return 0
        count = 0 if self._restored is None else self._restored.expire(now)
        for entries in self._entries.values():
            while entries:
                key = next(iter(entries))
                if now - entries[key][-1] < ttl:
                    break
                del entries[key]
                count += 1
        return count

    def _evict(self) -> None:
        """Return prefetched entries to the restored rows unless they were written. Only with a TTL.

        Entries must be in order of update time.
        """
        if self._restored is None:
            return
        entries, fresh = self._entries[GLOBAL_WINDOW], self._fresh[GLOBAL_WINDOW]
        written = [place for key, place in self._prefetched.items() if key in fresh]
        self._restored.drop(np.array(written, np.int64))
        for key in self._prefetched:
            del entries[key]
        self._prefetched.clear()

    def _merge(
        self, entries: dict[str, Any], fresh: dict[str, Any], deleted: Sequence[str]
    ) -> None:
        # With a TTL, keep the entries in order of update time.
        for key in deleted if self.state.ttl_ms is None else (*deleted, *fresh):
            entries.pop(key, None)
        entries.update(fresh)


class ColumnStore(Store):
    """A state with a row per key that only functions of whole batches access, as columns."""

    def __init__(self, slot: ColumnSlot, ctx: OperatorContext) -> None:
        super().__init__(slot)
        self._rows = slot.rows
        self._view = ctx.table_manager.get_uncached_key_value_view(self.state.name)
        self._restored = UnreadRows(self.state, *self._view.indexed())

    def prefetch(self, keys: pa.Array) -> None:
        places, rows = self._restored.find_rows(keys)
        if len(places):
            self._rows.load(rows)
            self._restored.drop(places)

    def write(self, generation: int) -> int:
        now_ms = self.slot.now_ms
        written, deleted = self._rows.take_changes(now_ms, generation)
        if written is not None:
            self._view.insert(written)
        if deleted is not None:
            self._view.delete_keys(deleted)
        return self._restored.expire(now_ms) + self._rows.expire(now_ms)


# ---- restore -------------------------------------------------------------------------------------
# Keep the rows of a restored epoch as Arrow columns; make entries only for keys that occur.
#
# A state may have millions of keys, and an epoch uses few of them. As Python values they would take
# ten times the memory, and every restore would have to create them.

RowIndexes = npt.NDArray[np.int64]
StateEntry = tuple[Any, ...]


class UnreadRows:
    """The restored rows of an unwindowed arrow-row state that no entry has replaced yet.

    Args:
        state: the definition of the state.
        rows: the rows of the state's table, possibly with older rows of the same keys.
        index: the index of the newest row per `_key`.
    """

    def __init__(self, state: StateDef, rows: pa.Table, index: KeyIndex) -> None:
        self._state = state
        self._rows = rows
        self._index = index
        self._left = np.ones(rows.num_rows, bool)
        self._any_left = rows.num_rows > 0
        self._updated_ms: RowIndexes | None = None
        if state.ttl_ms is not None:  # expired keys are counted: each once
            self._left[:] = False
            self._left[index.newest()] = True
            self._updated_ms = updated_at_ms(state, rows).to_numpy()

    def find(self, keys: pa.Array) -> tuple[RowIndexes, dict[str, StateEntry]]:
        """Return the sorted indexes of the rows of `keys` that are left, and these as entries."""
        places, rows = self.find_rows(keys)
        entries = zip(rows.column(KEY).to_pylist(), entry_values(self._state, rows), strict=True)
        return places, dict(entries)

    def find_rows(self, keys: pa.Array) -> tuple[RowIndexes, pa.Table]:
        """Return the sorted indexes of the rows of `keys` that are left, and these rows."""
        if not self._any_left:
            return np.zeros(0, np.int64), self._rows.slice(0, 0)
        places = self._index.find([keys])
        places = np.unique(places[places >= 0])
        places = places[self._left[places]]
        return places, self._rows.take(pa.array(places))

    def drop(self, places: RowIndexes) -> None:
        """Remove rows that are replaced by entries."""
        self._left[places] = False
        self._any_left = bool(self._left.any())

    def expire(self, now_ms: int) -> int:
        """Remove the rows with an expired TTL, and return their number."""
        ttl, updated = self._state.ttl_ms, self._updated_ms
        if ttl is None or updated is None:
            return 0
        expired = np.flatnonzero(self._left & (now_ms - updated >= ttl))
        self.drop(expired)
        return len(expired)
