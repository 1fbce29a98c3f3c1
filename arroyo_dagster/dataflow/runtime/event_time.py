"""The watermark and the open windows of a service.

Source: sdf-states.md 3.5, W4 to W8, W13.
"""

from __future__ import annotations

from arroyo_dagster.dataflow.definition.names import WATERMARK
from arroyo_dagster.dataflow.definition.windows import Window, WindowDef, advanced
from arroyo_dagster.dataflow.storage.engine_tables import WINDOWS, WindowBounds
from arroyo_dagster.engine.operators import OperatorContext
from arroyo_dagster.state.model.types import I64, U32, U64


class EventTime:
    """Tracks the watermark and the open windows of a service, in the order records arrive."""

    def __init__(self, window: WindowDef, ctx: OperatorContext) -> None:
        tables = ctx.table_manager
        self._window = window
        self._subtask = ctx.task_info.task_index
        self._watermarks = tables.get_global_keyed_state(WATERMARK, U32, I64)
        self._stored = tables.get_global_keyed_state(WINDOWS, WindowBounds, U64)
        marks = self._watermarks.get_all()
        self._watermark: int | None = max(marks.values(), default=None)
        self._open: dict[Window, int] = {
            key.window: count for key, count in self._stored.get_all().items()
        }
        self._told = self._watermark
        self._changed: set[Window] = set()
        self._closed: list[Window] = []

    def accept(self, time_ms: int) -> tuple[Window, ...]:
        """Return the windows that accept a record. It advances the watermark even if it is late."""
        windows = self._window.accepted(time_ms, self._watermark)
        self._watermark = advanced(self._watermark, time_ms)
        for window in windows:
            self._open[window] = self._open.get(window, 0) + 1
            self._changed.add(window)
        return windows

    def tick(self, *, idle: bool) -> None:
        """Advance the watermark of an idle service so that its open windows close."""
        if idle:
            self._watermark = self._window.idle_watermark(self._open, self._watermark)

    def close(self) -> tuple[int, tuple[Window, ...]] | None:
        """Close the windows that are due; return the watermark and these windows, by end.

        None if the watermark has not changed since the last call.
        """
        if self._watermark is None or self._watermark == self._told:
            return None
        closing = self._window.due(self._open, self._watermark)
        for window in closing:
            del self._open[window]
        self._closed.extend(closing)
        self._told = self._watermark
        return self._watermark, closing

    def write(self) -> None:
        """Write the changes to the tables."""
        closed = set(self._closed)
        self._stored.remove_many(WindowBounds(*window) for window in closed)
        self._stored.insert_many(
            (WindowBounds(*window), self._open[window]) for window in sorted(self._changed - closed)
        )
        if self._watermark is not None and self._watermark != self._watermarks.get(self._subtask):
            self._watermarks.insert(self._subtask, self._watermark)
        self._closed.clear()
        self._changed.clear()
