"""How a plan is carried out: in bulk, patiently, by what the store says, not what it promises."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from arroyo_dagster import (
    Epoch,
    GcOptions,
    MemoryStore,
    Progress,
    StatePath,
    WorkerGeneration,
    run_gc,
)
from arroyo_dagster.errors import StorageError
from tests.fleets import OPERATOR, TABLE, Written, protocol_job
from tests.formats import GcPlan
from tests.gc_jobs import Clock, expiry, orphans, whole, without_ours
from tests.internals import Pace, read_journal
from tests.stores import DeleteOutcome, ObjectInfo, Wrapper

PATHS = protocol_job("p")
STOPPED = {"p/main": "stopped"}
THROTTLED = "the store is throttling us (503 SlowDown: reduce your request rate)"
DENIED = "permission denied (403 AccessDenied)"


class Answering(Wrapper):
    """A store whose bulk deletes answer as a test says.

    Args:
        answer: given the number of the call and its paths, the reason for each that fails.
    """

    def __init__(
        self,
        store: MemoryStore,
        answer: Callable[[int, list[StatePath]], dict[StatePath, str]] = lambda call, paths: {},
    ) -> None:
        super().__init__(store)
        self.batches: list[int] = []
        self._answer = answer

    def delete_many(self, paths: Iterable[StatePath]) -> DeleteOutcome:
        doomed = [path for path in paths if "_arroyo_dagster/" not in path]
        if not doomed:
            return self.inner.delete_many(paths)
        self.batches.append(len(doomed))
        failed = self._answer(len(self.batches), doomed)
        gone = [path for path in doomed if path not in failed]
        self.inner.delete_many(gone)
        return DeleteOutcome(deleted=tuple(gone), failed=failed)


def job_with_orphans(count: int, clock: Clock) -> MemoryStore:
    store = MemoryStore(clock=clock)
    job = Written(store, PATHS, start=clock.micros)
    job.epochs(3)
    for number in range(count):
        name = PATHS.data_file(OPERATOR, TABLE, number, Epoch(1), WorkerGeneration(1), attempt="l")
        store.put(name, b"lost")
    clock.days(4)
    return store


def run(store: Any, clock: Clock, plan: GcPlan | None = None, **options: Any) -> Any:
    options.setdefault("pace", Pace(sleep=lambda seconds: None))
    asked = GcOptions(clock=clock, **options)
    return run_gc(store, PATHS, orphans(**STOPPED), asked, plan=plan)


def test_objects_go_by_the_thousand_and_are_counted_by_a_listing(clock: Clock) -> None:
    store = Answering(job_with_orphans(2500, clock))
    told: list[Progress] = []
    outcome = run(store, clock, on_progress=told.append)
    assert (outcome.deleted, outcome.size_bytes) == (2500, 10_000)
    assert store.batches == [1000, 1000, 500]
    assert told[-1].done == told[-1].total == 2500
    assert told[-1].seconds_left == 0
    whole(store, PATHS, 1, 2, 3)


def test_throttled_keys_are_tried_again_and_nothing_else(clock: Clock) -> None:

    def answer(call: int, paths: list[StatePath]) -> dict[StatePath, str]:
        return dict.fromkeys(paths[:7], THROTTLED) if call <= 2 else {}

    store = Answering(job_with_orphans(30, clock), answer)
    waited: list[float] = []
    outcome = run(store, clock, pace=Pace(sleep=waited.append))
    assert outcome.deleted == 30
    assert store.batches == [30, 7, 7]
    assert waited == sorted(waited)
    assert len(waited) == 2
    assert Counter(e.outcome for e in read_journal(store, PATHS)) == {"deleted": 30}


def test_a_store_that_throttles_for_ever_is_told_and_metadata_stays(clock: Clock) -> None:
    start = MemoryStore(clock=clock)
    Written(start, PATHS, start=clock.micros, keep=1).epochs(6)
    before = set(without_ours(start))
    store = Answering(
        start, lambda call, paths: {p: THROTTLED for p in paths if "0000002/operator" in p}
    )
    pace = Pace(tries=3, sleep=lambda seconds: None)
    with pytest.raises(StorageError, match="throttling") as found:
        run_gc(store, PATHS, expiry(2, **STOPPED), GcOptions(clock=clock, pace=pace))
    assert found.value.retryable
    gone = before - set(without_ours(start))
    assert {path.rpartition("/")[2] for path in gone} == {"table-counts-000-x"}
    outcomes = Counter(e.outcome.partition(":")[0] for e in read_journal(store, PATHS))
    assert outcomes == {"deleted": 3, "there": 1}
    whole(store, PATHS, 5, 6)
    # Once it answers again the next run finishes what is left.
    done = run_gc(start, PATHS, expiry(2, **STOPPED), GcOptions(clock=clock, pace=pace))
    assert done.done
    whole(start, PATHS, 5, 6)


def test_what_is_forbidden_is_not_tried_again(clock: Clock) -> None:
    store = Answering(
        job_with_orphans(30, clock), lambda call, paths: dict.fromkeys(paths[:1], DENIED)
    )
    with pytest.raises(StorageError, match="permission denied") as found:
        run(store, clock)
    assert not found.value.retryable
    assert store.batches == [30]


def test_an_answer_that_was_lost_is_asked_for_again(clock: Clock) -> None:
    start = job_with_orphans(30, clock)

    class Lost(Answering):
        def delete_many(self, paths: Iterable[StatePath]) -> DeleteOutcome:
            outcome = super().delete_many(paths)
            if self.batches == [30]:
                raise StorageError("the store did not answer in time")
            return outcome

    store = Lost(start)
    assert run(store, clock).deleted == 30
    assert store.batches == [30, 30]


def test_a_store_that_says_it_deleted_and_did_not_is_found_out(clock: Clock) -> None:

    class Lying(Wrapper):
        def delete_many(self, paths: Iterable[StatePath]) -> DeleteOutcome:
            listed = tuple(paths)
            self.inner.delete_many([p for p in listed if not p.endswith("-007-l")])
            return DeleteOutcome(deleted=listed)

    for count in (30, 100):
        store = Lying(job_with_orphans(count, clock))
        with pytest.raises(StorageError, match="1 objects still exist"):
            run(store, clock)


def test_a_listing_of_nothing_is_no_proof_that_all_is_gone(clock: Clock) -> None:
    start = job_with_orphans(100, clock)

    class Blind(Wrapper):
        listings = 0

        def list(self, prefix: str = "", *, start_after: str | None = None) -> Iterator[ObjectInfo]:
            self.listings += 1
            found = self.inner.list(prefix, start_after=start_after)
            return found if self.listings == 1 else iter(())

    with pytest.raises(StorageError, match="lists nothing below the job"):
        run(Blind(start), clock)


def test_requests_are_no_faster_than_asked_for(clock: Clock) -> None:
    waited: list[float] = []
    store = job_with_orphans(2500, clock)
    run(store, clock, pace=Pace(batches_per_second=2, sleep=waited.append))
    assert sum(waited) == pytest.approx(1.5)
