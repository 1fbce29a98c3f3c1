"""Two writers of one job at once, one call of the store after the other, in many orders.

Each runs in a thread that stops before every call; the test says who goes on. Exactly one may
own an epoch; the other stops with a ConflictError, and whoever starts next finds everything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from arroyo_dagster.errors import ConflictError
from arroyo_dagster.state import MemoryStore, ObjectStore
from tests.jobs import copied, output_of, run_word_job, state_of, word_job
from tests.shares import Share, dealt_out
from tests.stores import Wrapper

T = TypeVar("T")

JOB: dict[str, Any] = {"parallelism": 1, "rows": 6, "rows_per_epoch": 2}
ALL = 10_000


class Stepped(Wrapper):
    """A store whose caller waits before every call until it is let on."""

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store)
        self.owner: threading.Thread | None = None
        self.waiting = threading.Semaphore(0)
        self.let_on = threading.Semaphore(0)

    def _call(self, verb: str, path: str, action: Callable[[], T], data: bytes = b"") -> T:
        # Reads done side by side have threads of their own: they go with the call around them.
        if threading.current_thread() is self.owner:
            self.waiting.release()
            self.let_on.acquire()
        return action()


class Writer:
    """One run of the job, which goes on a number of calls at a time."""

    def __init__(self, store: MemoryStore) -> None:
        self.error: BaseException | None = None
        self.done = False
        self.calls = 0
        self._store = Stepped(store)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._store.owner = self._thread

    def _run(self) -> None:
        try:
            run_word_job(self._store, **JOB)
        except BaseException as error:
            self.error = error
        self.done = True
        self._store.waiting.release()

    def go(self, calls: int) -> None:
        """Let it make so many calls; at the end it waits before the next, or is done."""
        if self._thread.ident is None and calls:
            self._thread.start()
            assert self._store.waiting.acquire(timeout=30)
        for _ in range(calls):
            if self.done:
                return
            self.calls += 1
            self._store.let_on.release()
            assert self._store.waiting.acquire(timeout=30)


def check(store: MemoryStore, writers: list[Writer], expected: Any, schedule: Any) -> None:
    failed = [writer.error for writer in writers if writer.error is not None]
    for error in failed:
        assert isinstance(error, ConflictError), (schedule, error)
    if len(failed) == len(writers):
        # An older run published just before it was fenced: the newer stopped, to be tried again.
        assert any(error.retryable for error in failed if isinstance(error, ConflictError))
    run_word_job(store, **JOB)
    assert (state_of(store, word_job(store, **JOB)), output_of(store)) == expected, schedule


def interleaved(begun: MemoryStore, first: int, second: int) -> tuple[MemoryStore, list[Writer]]:
    """One writer makes `first` calls, the other `second`, then each goes on to its end."""
    store = copied(begun)
    writers = [Writer(store), Writer(store)]
    writers[0].go(first)
    writers[1].go(second)
    writers[0].go(ALL)
    writers[1].go(ALL)
    return store, writers


@pytest.fixture(scope="module")
def expected() -> Any:
    store = MemoryStore()
    run_word_job(store, **JOB)
    return state_of(store, word_job(store, **JOB)), output_of(store)


@pytest.fixture(scope="module")
def begun() -> MemoryStore:
    store = MemoryStore()
    run_word_job(store, **JOB, max_epochs=2)
    return store


def calls_of(begun: MemoryStore) -> int:
    writer = Writer(copied(begun))
    writer.go(ALL)
    assert writer.error is None
    return writer.calls


@pytest.mark.parametrize(("from_nothing", "share"), dealt_out([True, False], 3))
def test_a_writer_held_up_before_any_call_finds_that_another_has_taken_over(
    begun: MemoryStore, expected: Any, from_nothing: bool, share: Share
) -> None:
    start = MemoryStore() if from_nothing else begun
    for held_at in share(range(calls_of(start))):
        store, writers = interleaved(start, held_at, ALL)
        assert writers[1].error is None, f"the newer run stopped, held at {held_at}"
        check(store, writers, expected, held_at)
