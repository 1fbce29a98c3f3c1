"""Concurrent store calls with results in order, and work in the background."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

_A = TypeVar("_A")
_B = TypeVar("_B")

CONCURRENCY = 16


def concurrently(
    call: Callable[[_A], _B], items: Iterable[_A], most: int = CONCURRENCY
) -> list[_B]:
    """Return `[call(item) for item in items]`, with up to `most` concurrent calls.

    Raises:
        Exception: the first error in the order of `items`.
    """
    listed = list(items)
    if len(listed) < 2 or most < 2:
        return [call(item) for item in listed]
    with ThreadPoolExecutor(min(most, len(listed)), "arroyo-state") as pool:
        return list(pool.map(call, listed))


def ahead(call: Callable[[_A], _B], items: Iterable[_A]) -> Iterator[_B]:
    """Yield results as `concurrently` returns them, with at most 16 unread results at a time.

    If the caller stops early or an error occurs, up to 16 further items may have been called.
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
            for future in waiting:
                future.cancel()


def read_ahead(
    call: Callable[[_A], _B], items: Iterable[tuple[_A, int]], most: int
) -> Iterator[_B]:
    """Yield `call(item)` for each item in order; calls begin before their results are requested.

    Args:
        items: each with its weight.
        most: the maximum total weight of unread results and running calls; a single heavier item
            runs alone.

    Raises:
        Exception: the error of `call`, when it is that item's turn.
    """
    waiting: deque[tuple[Future[_B], int]] = deque()
    weight = 0
    with ThreadPoolExecutor(CONCURRENCY, "arroyo-ahead") as pool:
        try:
            for item, heavy in items:
                while waiting and weight + heavy > most:
                    done, light = waiting.popleft()
                    weight -= light
                    yield done.result()
                waiting.append((pool.submit(call, item), heavy))
                weight += heavy
            while waiting:
                yield waiting.popleft()[0].result()
        finally:
            for left, _ in waiting:
                left.cancel()


@dataclass(frozen=True, slots=True)
class _Ended:
    error: BaseException | None


def in_background(items: Iterator[_A]) -> Generator[_A, None, None]:
    """Yield `items`, which another thread produces, up to two of them in advance.

    Raises:
        Exception: the error of the iterator `items`.
    """
    results: queue.Queue[_A | _Ended] = queue.Queue(2)
    stopped = threading.Event()

    def put(item: _A | _Ended) -> None:
        while not stopped.is_set():
            with suppress(queue.Full):
                results.put(item, timeout=0.1)
                break

    def make() -> None:
        error: BaseException | None = None
        try:
            for item in items:
                put(item)
                if stopped.is_set():
                    break
        except BaseException as raised:
            error = raised
        finally:
            close = getattr(items, "close", None)
            if close is not None:
                close()
        put(_Ended(error))

    thread = threading.Thread(target=make, name="arroyo-background", daemon=True)
    thread.start()
    try:
        while not isinstance(item := results.get(), _Ended):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        stopped.set()
        thread.join()
