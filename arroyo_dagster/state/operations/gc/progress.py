"""Progress reports that are repeated while no new one arrives."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
SILENT_SECONDS = 3.0


def no_progress(state: object) -> None:
    """No-op progress callback."""


@contextmanager
def heartbeat(
    report: Callable[[T], None], seconds: float = SILENT_SECONDS
) -> Iterator[Callable[[T], None]]:
    """Repeat the last report after `seconds` without one.

    Args:
        report: may be called from another thread, never from two at once.
    """
    if report is no_progress:
        yield report
        return
    last: list[T] = []
    lock, ended = threading.Lock(), threading.Event()
    reported_at = time.monotonic()

    def report_now(state: T) -> None:
        nonlocal reported_at
        with lock:
            last[:] = [state]
            reported_at = time.monotonic()
            report(state)

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
