"""The clocks of this machine. Planning reads none: its rules take the time as an argument."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], int]
"""Gives a time in whole units: microseconds, unless the name of the argument says another one."""


def wall_clock() -> int:
    """Microseconds since 1970, by this machine."""
    return time.time_ns() // 1000


def wall_clock_ms() -> int:
    """Milliseconds since 1970, by this machine."""
    return time.time_ns() // 1_000_000


def own_clock() -> int:
    """Microseconds by a clock that nobody sets, and that goes on while this machine sleeps."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000
    return time.monotonic_ns() // 1000
