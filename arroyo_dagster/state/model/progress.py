"""Progress of long work: one value and one callback for every operation."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass

from arroyo_dagster.state.model.units import format_bytes, format_micros

_LOG_SECONDS = 10.0
LEAST_SHARE = 0.02
"""Below this share the speed so far does not predict the remaining time."""


class ProgressUnit(enum.StrEnum):
    """What an operation counts."""

    OBJECTS = "objects"
    FILES = "files"
    JOBS = "jobs"
    EPOCHS = "epochs"
    PREFIXES = "prefixes"
    SHARDS = "shards"
    BYTES = "bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far an operation is.

    Attributes:
        step: what is being done, for example `listed objects`.
        done: how much of it is done, in `unit`.
        total: how much there is to do, in `unit`; None = not known yet.
        seconds: since the operation began.
    """

    step: str
    done: int
    total: int | None = None
    unit: ProgressUnit = ProgressUnit.OBJECTS
    seconds: float = 0.0

    @property
    def share(self) -> float | None:
        """How much of it is done, from 0 to 1; None while the total is not known."""
        if self.total is None:
            return None
        return self.done / self.total if self.total else 1.0

    @property
    def seconds_left(self) -> float | None:
        """How long the rest takes at the speed so far; None while that cannot be estimated."""
        share = self.share
        if share is None or share < LEAST_SHARE:
            return None
        return self.seconds * (1 - share) / share


OnProgress = Callable[[Progress], None]
"""Called now and then while an operation runs, perhaps by another thread."""


def no_progress(progress: Progress) -> None:
    """No-op progress callback."""


def format_progress(progress: Progress) -> str:
    """Format how far an operation is, and the time left: `merge: 25%, 1.0 MB of 4.2 MB, 9 s left`.

    Where the time left cannot be estimated, say so, and how long it has taken.
    """
    share = "" if progress.share is None else f"{progress.share:.0%}, "
    done, total = _amount(progress.done, progress.unit), progress.total
    of = "" if total is None else f" of {_amount(total, progress.unit)}"
    # Steps such as `verified files` name the unit themselves, and sizes have one.
    named = progress.unit is ProgressUnit.BYTES or progress.unit in progress.step
    unit = "" if named else f" {progress.unit}"
    left = progress.seconds_left
    if left is None:
        time = f"after {format_micros(progress.seconds * 1e6)}, time left unknown"
    else:
        time = f"{left:.0f} s left" if left < 60 else f"{format_micros(left * 1e6)} left"
    return f"{progress.step}: {share}{done}{of}{unit}, {time}"


def progress_logger(
    log: Callable[[str], object], clock: Callable[[], float] = time.monotonic
) -> OnProgress:
    """Return a callback that logs progress every ten seconds, and at the end."""
    logged: Progress | None = None
    logged_at = clock()

    def log_progress(progress: Progress) -> None:
        nonlocal logged, logged_at
        early = clock() - logged_at < _LOG_SECONDS and progress.share != 1
        if early or progress == logged:  # a heartbeat repeats what was reported
            return
        logged, logged_at = progress, clock()
        log(format_progress(progress))

    return log_progress


def _amount(count: int, unit: ProgressUnit) -> str:
    return format_bytes(count) if unit is ProgressUnit.BYTES else f"{count:,}"
