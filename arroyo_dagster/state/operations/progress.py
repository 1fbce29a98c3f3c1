"""Progress callbacks that add the time, and that repeat a report while long work is silent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.progress import OnProgress, Progress, ProgressUnit, no_progress
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.storage.wrappers import Wrapper

SILENT_SECONDS = 3.0

_T = TypeVar("_T")


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


class CountedReads(Wrapper):
    """A store that reports how many of some files have been opened, each of them once.

    Args:
        step: as of `Progress`.
    """

    def __init__(
        self, store: ObjectStore, paths: Collection[StatePath], report: OnProgress, step: str
    ) -> None:
        super().__init__(store)
        self._left = set(paths)
        self._count = counter(report, step, len(self._left), ProgressUnit.FILES)

    def _call(self, verb: str, path: str, action: Callable[[], _T], data: bytes = b"") -> _T:
        with self._lock:
            first = path in self._left
            self._left.discard(StatePath(path))
        if first:
            self._count()
        return action()


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
