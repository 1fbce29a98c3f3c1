"""Progress that is told at least every few seconds, however long the work is silent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
SILENT_SECONDS = 3.0


def unheard(state: object) -> None:
    """Nobody listens."""


@contextmanager
def told_again(
    tell: Callable[[T], None], seconds: float = SILENT_SECONDS
) -> Iterator[Callable[[T], None]]:
    """Tell what is said, and the last of it again where nothing was said for a while.

    Args:
        tell: may be called from another thread, never from two at once.
    """
    if tell is unheard:
        yield tell
        return
    last: list[T] = []
    lock, ended = threading.Lock(), threading.Event()
    said = time.monotonic()

    def say(state: T) -> None:
        nonlocal said
        with lock:
            last[:] = [state]
            said = time.monotonic()
            tell(state)

    def repeat() -> None:
        while not ended.wait(seconds / 3):
            if last and time.monotonic() - said >= seconds:
                say(last[0])

    thread = threading.Thread(target=repeat, name="arroyo-progress", daemon=True)
    thread.start()
    try:
        yield say
    finally:
        ended.set()
        thread.join()
