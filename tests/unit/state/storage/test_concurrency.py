"""Many calls at once: results in order, the first error in order, none too far ahead."""

from __future__ import annotations

import itertools
import threading
import time

import pytest

from arroyo_dagster.state.storage.concurrency import CONCURRENCY, ahead, concurrently


@pytest.mark.parametrize("run", [concurrently, ahead])
@pytest.mark.parametrize("count", [0, 1, 2, 100])
def test_results_are_in_order_whatever_ends_first(run: object, count: int) -> None:
    def late(number: int) -> int:
        time.sleep(0.002 * (number % 3 == 0))
        return number * 2

    assert list(run(late, range(count))) == [number * 2 for number in range(count)]  # type: ignore[operator]


@pytest.mark.parametrize("run", [concurrently, ahead])
def test_the_first_error_in_order_is_raised(run: object) -> None:
    def failing(number: int) -> int:
        if number >= 3:
            raise ValueError(str(number))
        return number

    with pytest.raises(ValueError, match="3"):
        list(run(failing, range(50)))  # type: ignore[operator]


def test_no_more_is_called_ahead_than_there_is_room_for() -> None:
    begun = itertools.count()
    lock = threading.Lock()
    most = [0]

    def call(number: int) -> int:
        with lock:
            most[0] = max(most[0], next(begun) + 1)
        return number

    results = ahead(call, itertools.count())
    for taken in range(1, 40):
        next(results)
        time.sleep(0.001)
        with lock:
            assert most[0] <= taken + CONCURRENCY
    results.close()  # type: ignore[attr-defined]
