"""Calls that the package makes at once, made one after the other.

Fault tests run the same job thousands of times on a store in memory. Without threads the k-th call
is the same in every run, and a run takes a third of the processor time.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

T = TypeVar("T")


class InOrder(Executor):
    """Makes each call where it is submitted."""

    def __init__(self, *_: Any) -> None:
        pass

    def submit(self, call: Callable[..., T], /, *args: Any, **named: Any) -> Future[T]:
        made: Future[T] = Future()
        try:
            made.set_result(call(*args, **named))
        except BaseException as error:
            made.set_exception(error)
        return made
