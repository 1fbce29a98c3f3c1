"""The clocks of this machine. Planning functions use none; they take the time as an argument."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], int]
"""Returns a time in whole units: microseconds, unless the argument's name says otherwise."""


def wall_clock() -> int:
    """Return microseconds since 1970, by this machine's clock."""
    return time.time_ns() // 1000


def wall_clock_ms() -> int:
    """Return milliseconds since 1970, by this machine's clock."""
    return time.time_ns() // 1_000_000


def own_clock() -> int:
    """Return microseconds of a clock that is never adjusted and runs while the machine sleeps.

    Without `CLOCK_BOOTTIME`, return those of the monotonic clock.
    """
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000
    return time.monotonic_ns() // 1000
