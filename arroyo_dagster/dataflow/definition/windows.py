"""Windows of event time: which a record falls into, when one is due; no clock, no state.

Times are epoch milliseconds, windows half-open, a watermark of None is before all time.

Source: sdf-states.md 3.5, W1 to W13.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Window(NamedTuple):
    """`start_ms` included, `end_ms` excluded. Sorts by start, then end."""

    start_ms: int
    end_ms: int


GLOBAL_WINDOW = Window(-(2**63), 2**63 - 1)
"""What `window()` gives where there is none."""

MOST_WINDOWS = 10_000
"""Into how many sliding windows a record may fall: a slide far below the duration is a slip."""


class WindowKind(enum.Enum):
    """How windows follow each other."""

    TUMBLING = "tumbling"
    SLIDING = "sliding"


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowDef:
    """The windows of a service.

    Attributes:
        slide_ms: from one start to the next; that of tumbling windows is their duration.
        offset_ms: how far the starts lie behind multiples of the slide.
        idleness_ms: without a record for so long, open windows close; None = they stay open.
        grace_ms: how far the watermark must pass a window's end before it closes.
    """

    kind: WindowKind
    duration_ms: int
    slide_ms: int
    offset_ms: int = 0
    idleness_ms: int | None = None
    grace_ms: int = 0

    def windows_of(self, time_ms: int) -> tuple[Window, ...]:
        """The windows a record of this time falls into, earliest first; one if tumbling.

        Never empty, since no slide is longer than the duration; at most duration / slide, rounded
        up, of them.
        """
        newest = time_ms - (time_ms - self.offset_ms) % self.slide_ms
        count = (newest - time_ms + self.duration_ms - 1) // self.slide_ms + 1
        starts = (newest - self.slide_ms * back for back in range(count - 1, -1, -1))
        return tuple(Window(start, start + self.duration_ms) for start in starts)

    def is_closed(self, window: Window, watermark_ms: int | None) -> bool:
        """Whether the watermark has passed a window's end and grace: it is due, and takes no more.

        Both rules are one: a window closes at `wm >= end + grace` and accepts while that is false.
        """
        return watermark_ms is not None and watermark_ms >= window.end_ms + self.grace_ms

    def accepted(self, time_ms: int, watermark_ms: int | None) -> tuple[Window, ...]:
        """The windows that take a record; none = it is late, to be dropped and counted.

        Args:
            watermark_ms: as it stood before this record moved it.
        """
        windows = self.windows_of(time_ms)
        return tuple(window for window in windows if not self.is_closed(window, watermark_ms))

    def due(self, opened: Iterable[Window], watermark_ms: int | None) -> tuple[Window, ...]:
        """Which of the open windows close now, in the order they close: by end, then start."""
        closing = (window for window in opened if self.is_closed(window, watermark_ms))
        return tuple(sorted(closing, key=lambda window: (window.end_ms, window.start_ms)))

    def is_idle(self, last_arrival_ms: int, now_ms: int) -> bool:
        """Whether the service has been without a record for its idleness.

        Args:
            last_arrival_ms, now_ms: of the engine's clock, not event time.
        """
        return self.idleness_ms is not None and now_ms - last_arrival_ms >= self.idleness_ms

    def idle_watermark(self, opened: Iterable[Window], watermark_ms: int | None) -> int | None:
        """The watermark an idle service goes on to: every open window is due then.

        It stays where it is when no window is open, and never goes back.
        """
        ends = [window.end_ms + self.grace_ms for window in opened]
        return max([*ends, *([] if watermark_ms is None else [watermark_ms])], default=None)


def advanced(watermark_ms: int | None, time_ms: int) -> int:
    """The watermark after a record of this time, late or not; it never goes back."""
    return time_ms if watermark_ms is None else max(watermark_ms, time_ms)
