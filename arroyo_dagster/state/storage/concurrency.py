"""Many store calls at once, results in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
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


def ahead(call: Callable[[_A], _B], items: Iterable[_A]) -> Iterator[_B]:
    """As `concurrently`, but no more than 16 results are ever there that were not asked for yet.

    What is never asked for, because of an error or because the caller has enough, may have been
    called.
    """
    waiting: deque[Future[_B]] = deque()
    with ThreadPoolExecutor(CONCURRENCY, "arroyo-state") as pool:
        try:
            for item in items:
                waiting.append(pool.submit(call, item))
                if len(waiting) == CONCURRENCY:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for one in waiting:
                one.cancel()
