"""Event-time windows: which windows a record belongs to, and when a window closes.

Pure functions without clock and state. Times are epoch milliseconds, windows are half-open, and a
watermark of None is before all times.

Source: sdf-states.md 3.5, W1 to W13.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Window(NamedTuple):
    """A window from `start_ms` (inclusive) to `end_ms` (exclusive). Sorts by start, then end."""

    start_ms: int
    end_ms: int


GLOBAL_WINDOW = Window(-(2**63), 2**63 - 1)
"""What `window()` returns outside of windows."""

MOST_WINDOWS = 10_000
"""The maximum number of sliding windows per record: a slide far below the duration is an error."""


class WindowKind(enum.Enum):
    """The kind of a window."""

    TUMBLING = "tumbling"
    SLIDING = "sliding"


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowDef:
    """The windows of a service.

    Attributes:
        slide_ms: the time from one start to the next; for tumbling windows, the duration.
        offset_ms: the offset of the starts from multiples of the slide.
        idleness_ms: the time without a record after which open windows close; None = never.
        grace_ms: how far the watermark must pass a window's end before it closes.
    """

    kind: WindowKind
    duration_ms: int
    slide_ms: int
    offset_ms: int = 0
    idleness_ms: int | None = None
    grace_ms: int = 0

    def windows_of(self, time_ms: int) -> tuple[Window, ...]:
        """Return the windows of a record with this time, earliest first; one if tumbling.

        Never empty, since no slide is longer than the duration. At most duration / slide windows,
        rounded up.
        """
        newest = time_ms - (time_ms - self.offset_ms) % self.slide_ms
        count = (newest - time_ms + self.duration_ms - 1) // self.slide_ms + 1
        starts = (newest - self.slide_ms * back for back in range(count - 1, -1, -1))
        return tuple(Window(start, start + self.duration_ms) for start in starts)

    def is_closed(self, window: Window, watermark_ms: int | None) -> bool:
        """Return whether the watermark has reached a window's end plus the grace period.

        The same rule decides both: a window closes at `watermark >= end + grace`, and accepts
        records until then.
        """
        return watermark_ms is not None and watermark_ms >= window.end_ms + self.grace_ms

    def accepted(self, time_ms: int, watermark_ms: int | None) -> tuple[Window, ...]:
        """Return the windows that accept a record; empty = it is late: drop and count it.

        Args:
            time_ms: the event time of the record.
            watermark_ms: the watermark before this record advances it.
        """
        windows = self.windows_of(time_ms)
        return tuple(window for window in windows if not self.is_closed(window, watermark_ms))

    def due(self, opened: Iterable[Window], watermark_ms: int | None) -> tuple[Window, ...]:
        """Return the open windows that close now, in closing order: by end, then start."""
        closing = (window for window in opened if self.is_closed(window, watermark_ms))
        return tuple(sorted(closing, key=lambda window: (window.end_ms, window.start_ms)))

    def idle_watermark(self, opened: Iterable[Window], watermark_ms: int | None) -> int | None:
        """Return the watermark that an idle service advances to: it closes every open window.

        Without open windows it is unchanged. It never decreases.
        """
        ends = [window.end_ms + self.grace_ms for window in opened]
        return max([*ends, *([] if watermark_ms is None else [watermark_ms])], default=None)


def advanced(watermark_ms: int | None, time_ms: int) -> int:
    """Return the watermark after a record of this time, late or not; it never decreases."""
    return time_ms if watermark_ms is None else max(watermark_ms, time_ms)
