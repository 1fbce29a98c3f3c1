"""An interrupt ends the work of Spark's workers, too."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from arroyo_dagster.spark.tasks import run_items
from tests.stores import LocalDiskStore

SLOW_SECONDS = 60.0


class Interrupted(BaseException):
    """What a scheduler raises in the main thread to end a run."""


def _slow(directory: str, item: int) -> int:
    Path(directory, str(item)).touch()
    time.sleep(SLOW_SECONDS)
    return item


def _interrupt(number: int, frame: object) -> None:
    raise Interrupted


def test_an_interrupt_cancels_what_spark_was_asked_for(session: Any, tmp_path: Path) -> None:
    tracker = session.sparkContext.statusTracker()
    store = LocalDiskStore(str(tmp_path))

    def interrupt_once_begun() -> None:
        while not list(tmp_path.iterdir()):
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, _interrupt)
    threading.Thread(target=interrupt_once_begun, daemon=True).start()
    try:
        with pytest.raises(Interrupted):
            run_items(session, partial(_slow, str(tmp_path)), [1, 2], [1, 1], store=store)
    finally:
        signal.signal(signal.SIGUSR1, before)
    until = time.monotonic() + SLOW_SECONDS / 4
    while tracker.getActiveJobsIds() and time.monotonic() < until:
        time.sleep(0.1)
    assert not tracker.getActiveJobsIds()
    assert session.range(3).count() == 3  # the session goes on
