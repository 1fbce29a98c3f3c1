"""Deferral of interrupts during short operations that must not end halfway."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Defer SIGINT and SIGTERM until the end of the block; a second signal is delivered at once.

    Only the main thread handles signals; in any other thread this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    handlers: dict[int, Any] = {}

    def restore() -> None:
        while handlers:
            number, handler = handlers.popitem()
            signal.signal(number, handler)

    def put_off(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if len(came) > 1:
            restore()
            signal.raise_signal(number)

    try:
        for number in _NUMBERS:
            handler = signal.getsignal(number)
            if handler not in (None, signal.SIG_IGN):
                handlers[number] = handler
                signal.signal(number, put_off)
        yield
    finally:
        restore()
        if len(came) == 1:
            signal.raise_signal(came[0])
