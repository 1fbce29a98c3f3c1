"""Timers: due once, in the order of time and then of key, whatever was cancelled meanwhile."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.tables.keyed.definition import keyed_timers
from arroyo_dagster.state.tables.keyed.timers import Timers
from tests.keyed_subtasks import Subtasks


def due(timers: Timers, micros: int) -> list[tuple[int, str]]:
    found = timers.take_due(micros)
    if found is None:
        return []
    times = found["at"].cast(pa.int64()).to_pylist()
    return list(zip([time // 1000 for time in times], found["key"].to_pylist(), strict=True))


def test_timers_are_due_by_time_then_key_and_once() -> None:
    timers = Subtasks(keyed_timers("t", str)).open().get_keyed_state("t", Timers)
    timers.register_many(["b", "a", "c", "a"], [2000, 2000, 1000, 5000])
    timers.register("a", 2)  # again, which changes nothing
    assert len(timers) == 4
    assert due(timers, 0) == []
    assert due(timers, 4) == [(1, "c"), (2, "a"), (2, "b")]
    assert due(timers, 4) == []
    timers.register("a", 1)  # in the past
    assert due(timers, 5) == [(1, "a"), (5, "a")]


def test_a_cancelled_timer_is_not_due_and_may_be_registered_again() -> None:
    timers = Subtasks(keyed_timers("t", str)).open().get_keyed_state("t", Timers)
    timers.register_many(["a", "b"], [1000, 1000])
    timers.cancel("a", 1)
    timers.cancel("none", 1)
    timers.register("c", 1)  # where the cancelled one was
    assert due(timers, 1) == [(1, "b"), (1, "c")]
    timers.register("a", 3)
    timers.cancel("a", 3)
    timers.register("a", 3)
    assert due(timers, 9) == [(3, "a")]


def test_a_timer_that_is_registered_again_is_not_written_again() -> None:
    tasks = Subtasks(keyed_timers("t", str))
    manager = tasks.open()
    timers = manager.get_keyed_state("t", Timers)
    timers.register_many(["a", "b"], [1000, 1000])
    tasks.write(manager)
    timers.register_many(["a", "b"], [1000, 1000])
    tasks.write(manager)
    assert len(tasks.files("t")) == 1
    assert due(timers, 1) == [(1, "a"), (1, "b")]


def test_timers_of_one_clock_do_not_become_those_of_the_other() -> None:
    tasks = Subtasks(keyed_timers("t", str))
    manager = tasks.open()
    manager.get_keyed_state("t", Timers).register("a", 1)
    tasks.write(manager)
    tasks.configs = {"t": keyed_timers("t", str, processing_time=True)}  # type: ignore[dict-item]
    with pytest.raises(InputError, match="held event-time timers"):
        tasks.open()


def test_random_timers_are_those_of_a_set_over_restores() -> None:
    chance = random.Random(3)
    tasks = Subtasks(keyed_timers("t", str))
    manager, model, now = tasks.open(), set[tuple[int, str]](), 0
    for step in range(300):
        timers = manager.get_keyed_state("t", Timers)
        picked = [(now + chance.randint(0, 30), chance.choice("abcde")) for _ in range(6)]
        keys, nanos = [key for _, key in picked], [time * 1000 for time, _ in picked]
        if chance.random() < 0.7:
            timers.register_many(keys, nanos)
            model.update(picked)
        else:
            timers.cancel_many(keys, nanos)
            model.difference_update(picked)
        if chance.random() < 0.5:
            now += chance.randint(0, 9)
            assert due(timers, now) == sorted(timer for timer in model if timer[0] <= now)
            model = {timer for timer in model if timer[0] > now}
        if step % 11 == 0:
            tasks.write(manager)
        if step % 55 == 0:
            manager = tasks.open()
        assert len(manager.get_keyed_state("t", Timers)) == len(model)


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


def test_the_next_alarm_is_that_of_the_engines_clock() -> None:
    manager = Subtasks(keyed_timers("e", str), keyed_timers("p", str, processing_time=True)).open()
    events, alarms = manager.get_keyed_state("e", Timers), manager.get_keyed_state("p", Timers)
    events.register("a", 5)
    assert events.next_alarm_micros() is None
    assert alarms.next_alarm_micros() is None
    alarms.register_many(["a", "b"], [7001, 9000])
    assert alarms.next_alarm_micros() == 8
    assert due(alarms, 7) == []
    assert due(alarms, 8) == [(7, "a")]
    assert alarms.next_alarm_micros() == 9
    alarms.cancel("b", 9)
    assert alarms.next_alarm_micros() is None
    assert list(manager.all_timers()) == ["e", "p"]


@pytest.mark.parametrize("given", [(["a"], [None]), (["a"], [1, 2]), ([1], [1]), (["a"], ["x"])])
def test_what_does_not_fit_is_refused(given: Any) -> None:
    timers = Subtasks(keyed_timers("t", str)).open().get_keyed_state("t", Timers)
    with pytest.raises(InputError):
        timers.register_many(*given)
    assert not len(timers)
