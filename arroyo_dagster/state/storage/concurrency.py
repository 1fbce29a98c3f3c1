"""Many store calls at once, results in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_A = TypeVar("_A")
_B = TypeVar("_B")

CONCURRENCY = 16


def concurrently(call: Callable[[_A], _B], items: Iterable[_A]) -> list[_B]:
    """`[call(item) for item in items]`, up to 16 at a time.

    Raises:
        The first error in the order of `items`.
    """
    listed = list(items)
    if len(listed) < 2:
        return [call(item) for item in listed]
    with ThreadPoolExecutor(min(CONCURRENCY, len(listed)), "arroyo-state") as pool:
        return list(pool.map(call, listed))
