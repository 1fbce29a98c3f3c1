"""Progress callbacks that add the time, and that repeat a report while long work is silent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from arroyo_dagster.state.model.progress import OnProgress, Progress, ProgressUnit, no_progress

SILENT_SECONDS = 3.0


def timed(report: OnProgress, clock: Callable[[], float] = time.monotonic) -> OnProgress:
    """Return a callback that adds the seconds since this call to each report."""
    if report is no_progress:
        return report
    began = clock()
    return lambda progress: report(replace(progress, seconds=clock() - began))


def counter(
    report: OnProgress, step: str, total: int, unit: ProgressUnit = ProgressUnit.OBJECTS
) -> Callable[..., None]:
    """Return a function that any thread calls after each of `total` parts, or after several.

    Each call is reported, with the seconds since this one.
    """
    if report is no_progress:
        return lambda parts=1: None
    report_timed, done, lock = timed(report), 0, threading.Lock()

    def count(parts: int = 1) -> None:
        nonlocal done
        with lock:
            done += parts
            report_timed(Progress(step=step, done=done, total=total, unit=unit))

    return count


@contextmanager
def heartbeat(report: OnProgress, seconds: float = SILENT_SECONDS) -> Iterator[OnProgress]:
    """Repeat the last report after `seconds` without one.

    Args:
        report: may be called from another thread, never from two at once.
    """
    if report is no_progress:
        yield report
        return
    last: list[Progress] = []
    lock, ended = threading.Lock(), threading.Event()
    reported_at = time.monotonic()

    def report_now(progress: Progress) -> None:
        nonlocal reported_at
        with lock:
            last[:] = [progress]
            reported_at = time.monotonic()
            report(progress)

    def repeat() -> None:
        while not ended.wait(seconds / 3):
            if last and time.monotonic() - reported_at >= seconds:
                report_now(last[0])

    thread = threading.Thread(target=repeat, name="arroyo-progress", daemon=True)
    thread.start()
    try:
        yield report_now
    finally:
        ended.set()
        thread.join()
