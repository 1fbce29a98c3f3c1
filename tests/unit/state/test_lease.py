"""Leases: one maintainer of a job at a time."""

from __future__ import annotations

import threading
import time

import pytest

from arroyo_dagster.errors import ConflictError
from arroyo_dagster.state.lease import lease
from arroyo_dagster.state.model.ids import JobId, PipelineId, StatePath
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.storage import Crash, FaultInjecting, MemoryStore

PATHS = JobPaths(JobId("j"), PipelineId("p"))
SOMETHING = StatePath("p/j/something")


class Clock:
    def __init__(self) -> None:
        self.seconds = 1_000.0

    def __call__(self) -> int:
        return int(self.seconds * 1e6)


def test_one_holds_it_and_gives_it_back() -> None:
    store, clock = MemoryStore(), Clock()
    with lease(store, PATHS, "one", clock=clock) as held:
        held.put(SOMETHING, b"1")
        with (
            pytest.raises(ConflictError, match="runs out in 60 seconds"),
            lease(store, PATHS, "two", clock=clock),
        ):
            pass
    with lease(store, PATHS, "two", clock=clock) as held:
        assert held.lease.token == 2
        assert held.read(SOMETHING) == b"1"


def test_a_dead_ones_lease_runs_out_and_it_changes_nothing_any_more() -> None:
    store, clock = MemoryStore(), Clock()
    dead = lease(store, PATHS, "dead", clock=clock)
    held = dead.__enter__()
    clock.seconds += 61
    with lease(store, PATHS, "next", clock=clock) as new:
        new.put(SOMETHING, b"new")
        for change in (
            lambda: held.put(SOMETHING, b"old"),
            lambda: held.create(StatePath("p/j/other"), b"old"),
            lambda: held.delete_many([SOMETHING]),
        ):
            with pytest.raises(ConflictError, match="lease on the job"):
                change()
        assert held.read(SOMETHING) == b"new"


def test_the_same_owner_takes_over_from_itself() -> None:
    store, clock = MemoryStore(), Clock()
    first = lease(store, PATHS, "run 7", clock=clock)
    first.__enter__()
    with lease(store, PATHS, "run 7", clock=clock) as held:
        assert held.lease.token == 2


def test_of_many_at_once_one_gets_it() -> None:
    store = MemoryStore()
    won: list[int] = []
    barrier = threading.Barrier(8)

    def ask(number: int) -> None:
        barrier.wait()
        try:
            with lease(store, PATHS, f"owner {number}"):
                won.append(number)
                time.sleep(0.2)
        except ConflictError:
            pass

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1


def test_it_is_renewed_while_its_holder_lives() -> None:
    store = MemoryStore()
    with lease(store, PATHS, "one", seconds=0.3):
        time.sleep(0.8)
        with pytest.raises(ConflictError), lease(store, PATHS, "two"):
            pass


def test_a_crash_at_any_change_leaves_a_lease_that_runs_out() -> None:
    for at in range(1, 5):
        store, clock = MemoryStore(), Clock()
        with lease(store, PATHS, "before", clock=clock):
            pass
        try:
            with lease(FaultInjecting(store, fail_at=at, crash=True), PATHS, "one", clock=clock):
                pass
        except Crash:
            pass
        clock.seconds += 61
        with lease(store, PATHS, "next", clock=clock) as held:
            held.put(SOMETHING, b"1")


def test_a_lost_answer_to_the_create_is_found_out() -> None:
    store = MemoryStore()

    class Forgetful(FaultInjecting):
        def create(self, path: StatePath, data: bytes) -> bool:
            super().create(path, data)
            return False  # a client that repeated its request sees its own object

    with lease(Forgetful(store), PATHS, "one") as held:
        assert held.lease.token == 1


def test_old_leases_do_not_pile_up() -> None:
    store = MemoryStore()
    for _ in range(6):
        with lease(store, PATHS, "one"):
            pass
    assert len(list(store.list(PATHS.leases))) == 2
