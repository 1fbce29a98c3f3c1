"""The states of one subtask in memory, and how what changed reaches their tables.

Source: sdf-states.md 2.8, 3.5 (W11, W12), 6.3.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import polars as pl
import pyarrow as pa

from arroyo_dagster.state.operators import OperatorContext
from arroyo_dagster.state.sdf.definition import StateDef, ValueKind
from arroyo_dagster.state.sdf.handles import CellSlot, RowSlot, Slot
from arroyo_dagster.state.sdf.sql import KEY
from arroyo_dagster.state.sdf.state_tables import VALUE, WindowKey, entries_of, rows_of
from arroyo_dagster.state.sdf.values import arrow_type, bincode_type
from arroyo_dagster.state.sdf.windows import GLOBAL_WINDOW, Window


class Store:
    """The entries of one state by window, those that changed since the last barrier noted."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.state: StateDef = slot.state
        self._entries: dict[Window, dict[str, Any]] = {}
        self._changed: dict[Window, set[str]] = {}
        self.enter(GLOBAL_WINDOW)

    def enter(self, window: Window) -> None:
        """Work on the entries of a window."""
        self.slot.stored = self._entries.setdefault(window, {})
        self.slot.changed = self._changed.setdefault(window, set())

    def fetch(self, keys: Sequence[str]) -> None:
        """Have the entries of these keys at hand."""

    def close(self, window: Window) -> pa.Table:
        """Give the content of a window that closes, and forget it.

        Columns as `rows_of` gives them, or `_key` and `value`; by key.
        """
        entries = self._entries.pop(window, {})
        self._changed.pop(window, None)
        self.enter(GLOBAL_WINDOW)
        return self._content(window, sorted(entries.items()))

    def _content(self, window: Window, entries: list[tuple[str, Any]]) -> pa.Table:
        raise NotImplementedError

    def write(self, generation: int) -> int:
        """Put what changed into the table. Returns how many rows outlived their ttl."""
        raise NotImplementedError


def open_store(slot: Slot, ctx: OperatorContext, watermark_ms: int | None) -> Store:
    """The store of a slot, as the restored epoch has it."""
    kind = RowStore if slot.state.value_kind is ValueKind.ROW else CellStore
    return kind(slot, ctx, watermark_ms)


class CellStore(Store):
    """A primitive state. Unwindowed entries are read as their keys come."""

    def __init__(self, slot: Slot, ctx: OperatorContext, watermark_ms: int | None) -> None:
        super().__init__(slot)
        assert isinstance(slot, CellSlot)
        windowed = self.state.window is not None
        value = bincode_type(slot.scalar)
        self._view = ctx.table_manager.get_global_keyed_state(
            self.state.name, WindowKey if windowed else str, value
        )
        self._stored_in: dict[Window, set[str]] = {}
        if self.state.window is not None:
            for key, stored in self._view.get_all().items():
                window = Window(key.window_start, key.window_end)
                self._entries.setdefault(window, {})[key.key] = stored
                self._stored_in.setdefault(window, set()).add(key.key)

    def fetch(self, keys: Sequence[str]) -> None:
        if self.state.window is not None or not len(self._view):
            return
        known = self._entries[GLOBAL_WINDOW]
        missing = [key for key in dict.fromkeys(keys) if key not in known]
        found = zip(missing, self._view.get_many(missing), strict=True)
        known.update((key, value) for key, value in found if value is not None)

    def _content(self, window: Window, entries: list[tuple[str, Any]]) -> pa.Table:
        assert self.state.scalar_type is not None
        gone = self._stored_in.pop(window, set())
        self._view.remove_many(WindowKey(*window, key) for key in sorted(gone))
        return pa.table(
            {
                KEY: pa.array([key for key, _ in entries], pa.string()),
                VALUE: pa.array(
                    [value for _, value in entries], arrow_type(self.state.scalar_type)
                ),
            }
        )

    def write(self, generation: int) -> int:
        self._view.insert_many(self._pairs())
        for window, keys in self._changed.items():
            if self.state.window is not None:
                self._stored_in.setdefault(window, set()).update(keys)
            keys.clear()
        return 0

    def _pairs(self) -> Iterator[tuple[Any, Any]]:
        for window, keys in self._changed.items():
            entries = self._entries[window]
            for key in keys:
                stored_key = key if self.state.window is None else WindowKey(*window, key)
                yield stored_key, entries[key]


class RowStore(Store):
    """An arrow-row state, all of this subtask's keys in memory."""

    def __init__(self, slot: Slot, ctx: OperatorContext, watermark_ms: int | None) -> None:
        super().__init__(slot)
        assert isinstance(slot, RowSlot)
        self._rows = slot
        self._view = ctx.table_manager.get_uncached_key_value_view(self.state.name)
        window = self.state.window
        for known, entries in entries_of(self.state, self._view.get_newest()).items():
            if window is None or not window.is_closed(known, watermark_ms):
                self._entries[known] = entries
        self.enter(GLOBAL_WINDOW)

    def _content(self, window: Window, entries: list[tuple[str, Any]]) -> pa.Table:
        made = list(rows_of(self.state, {window: entries}, 0))
        return made[0] if made else self._view.schema.empty_table()

    def write(self, generation: int) -> int:
        live: dict[Window, Iterable[tuple[str, Any]]] = {}
        gone: dict[Window, Iterable[tuple[str, Any]]] = {}
        for window, keys in self._changed.items():
            entries = self._entries[window]
            live[window] = [(key, entries[key]) for key in keys if key in entries]
            carrier = (*self._rows.defaults, self._rows.now_ms)
            gone[window] = [(key, carrier) for key in sorted(keys) if key not in entries]
            keys.clear()
        for rows in rows_of(self.state, live, generation):
            self._view.insert(rows)
        for rows in rows_of(self.state, gone, generation):
            self._view.delete_keys(rows)
        return self._expire()

    def _expire(self) -> int:
        """Drop rows past their ttl from memory: those updated first come first."""
        ttl, now = self.state.ttl_ms, self._rows.now_ms
        if ttl is None:
            return 0
        count = 0
        for entries in self._entries.values():
            while entries:
                key = next(iter(entries))
                if now - entries[key][-1] < ttl:
                    break
                del entries[key]
                count += 1
        return count


def frame_of(content: pa.Table, state: StateDef) -> pl.DataFrame:
    """The content of a closed window as a frame: `_key`, the columns by name."""
    from arroyo_dagster.state.sdf.snapshots import frame_of_rows

    return frame_of_rows(state, content)
