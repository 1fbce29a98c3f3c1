"""Interrupts: deferred during short operations that must not end halfway, and passed on to threads.

Only the main thread gets signals. A thread that works on its behalf gets its interrupt from
`Interrupts`, at the next call of its store, once: what is done on the way out, such as the release
of a lease, is not interrupted again.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from types import FrameType
from typing import Any, BinaryIO, TypeVar

from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.storage.wrappers import Wrapper

T = TypeVar("T")
_NUMBERS = (signal.SIGINT, signal.SIGTERM)
_HERE = threading.local()
_POLL_SECONDS = 0.2


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Defer SIGINT and SIGTERM until the end of the block; a second signal is delivered at once.

    Only the main thread handles signals. In a thread with `Interrupts`, theirs is deferred.
    """
    if threading.current_thread() is not threading.main_thread():
        with _deferred_here():
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


@contextmanager
def _deferred_here() -> Iterator[None]:
    depth = getattr(_HERE, "depth", 0)
    _HERE.depth = depth + 1
    try:
        yield
    finally:
        _HERE.depth = depth


class InterruptedThreadError(BaseException):
    """The interrupt of a thread, which no `except Exception` catches."""


class Interrupts:
    """Passes an interrupt of the main thread on to the threads that work for it."""

    def __init__(self) -> None:
        self._requested = threading.Event()

    def request(self) -> None:
        """Interrupt every thread at its next call of a store, or of `check_interrupt`."""
        self._requested.set()

    @property
    def requested(self) -> bool:
        """Whether the threads are to end."""
        return self._requested.is_set()

    def wait(self, seconds: float) -> None:
        """Wait until the threads are to end, but no longer than this."""
        self._requested.wait(seconds)

    @contextmanager
    def here(self) -> Iterator[None]:
        """Let this thread be interrupted until the end of the block."""
        _HERE.interrupts, _HERE.delivered = self, False
        try:
            yield
        finally:
            _HERE.interrupts = None


def check_interrupt() -> None:
    """Deliver the interrupt of this thread, if there is one.

    Raises:
        InterruptedThreadError: once in each thread.
    """
    signals: Interrupts | None = getattr(_HERE, "interrupts", None)
    if signals is None or not signals.requested or _HERE.delivered or getattr(_HERE, "depth", 0):
        return
    _HERE.delivered = True
    raise InterruptedThreadError("the work of this thread was interrupted")


def interruptible_sleep(seconds: float) -> None:
    """Sleep; the interrupt of this thread ends it.

    Raises:
        InterruptedThreadError: as `check_interrupt`.
    """
    signals: Interrupts | None = getattr(_HERE, "interrupts", None)
    if signals is None:
        time.sleep(seconds)
        return
    signals.wait(seconds)
    check_interrupt()


def wait_until_done(future: Future[T]) -> T:
    """Return the result of a future; the interrupt of this thread ends the wait.

    Raises:
        InterruptedThreadError: as `check_interrupt`.
    """
    while getattr(_HERE, "interrupts", None) is not None and not future.done():
        wait([future], _POLL_SECONDS)
        check_interrupt()
    return future.result()


class Interruptible(Wrapper):
    """A store whose calls deliver the interrupt of the thread that makes them."""

    def open_input(self, path: StatePath) -> BinaryIO:
        """Open the object for random access, as the wrapped store does."""
        check_interrupt()
        return self.inner.open_input(path)

    def _call(self, verb: str, path: str, action: Callable[[], T], data: bytes = b"") -> T:
        check_interrupt()
        return action()
