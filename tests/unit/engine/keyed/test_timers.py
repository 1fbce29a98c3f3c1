"""Timers: due once, in the order of time and then of key, whatever was cancelled meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from arroyo_dagster.engine import Timers, keyed_timers
from arroyo_dagster.errors import InputError
from tests.keyed_subtasks import Subtasks


def test_timers_of_one_clock_do_not_become_those_of_the_other() -> None:
    tasks = Subtasks(keyed_timers("t", str))
    manager = tasks.open()
    manager.get_keyed_state("t", Timers).register("a", 1)
    tasks.write(manager)
    tasks.configs = {"t": keyed_timers("t", str, processing_time=True)}  # type: ignore[dict-item]
    with pytest.raises(InputError, match="held event-time timers"):
        tasks.open()


def test_cancelled_timers_do_not_pile_up() -> None:
    """As a session window uses them: each row moves the timer of its key."""
    tasks = Subtasks(keyed_timers("t", str))
    manager = tasks.open()
    timers = manager.get_keyed_state("t", Timers)
    keys = [f"k{at}" for at in range(100)]
    timers.register_many(keys, [10**12] * 100)
    for turn in range(100):
        timers.cancel_many(keys, [10**12 + turn] * 100)
        timers.register_many(keys, [10**12 + turn + 1] * 100)
        tasks.write(manager)
    assert len(timers) == 100
    assert len(timers._queue) <= 2 * 100 + 1024 + 100


@pytest.mark.parametrize("given", [(["a"], [None]), (["a"], [1, 2]), ([1], [1]), (["a"], ["x"])])
def test_what_does_not_fit_is_refused(given: Any) -> None:
    timers = Subtasks(keyed_timers("t", str)).open().get_keyed_state("t", Timers)
    with pytest.raises(InputError):
        timers.register_many(*given)
    assert not len(timers)
