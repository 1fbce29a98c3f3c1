"""Garbage collection beside others: a writer that goes on, a second collector, one that died."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from arroyo_dagster import (
    Epoch,
    GcOptions,
    GcRequest,
    MemoryStore,
    ParquetBackend,
    StatePath,
    WorkerGeneration,
    pin_epoch,
    plan_gc,
    run_gc,
)
from arroyo_dagster.errors import ArroyoStateError, ConflictError
from arroyo_dagster.state.codec.derived import encode
from arroyo_dagster.state.planning.restore import recovery
from tests.formats import metadata, records
from tests.gc_jobs import (
    JOB,
    PATHS,
    Clock,
    Interrupted,
    begun,
    clock_of_all,
    data_files,
    expiry,
    orphans,
    restorable,
    whole,
)
from tests.internals import LeaseOptions, LocalRun, Pace, lease, read_roots
from tests.jobs import copied, output_of, run_word_job, state_of, word_job
from tests.stores import Wrapper

pytestmark = pytest.mark.usefixtures("one_at_a_time")

MANIFEST = PATHS.generation_manifest(WorkerGeneration(2))
QUICK = Pace(sleep=lambda seconds: None)
SMALL: dict[str, Any] = {"sinks": 0, "parallelism": 1}


def run_of(store: MemoryStore, **changes: Any) -> LocalRun:
    return LocalRun.start(word_job(store, **{**JOB, **SMALL, **changes}), store)


class PublishedLate(Wrapper):
    """A store whose newest epoch becomes visible once its record was looked for so many times."""

    def __init__(self, store: MemoryStore, times: int) -> None:
        super().__init__(store)
        self._times = times
        self._record = PATHS.epoch_record(ParquetBackend(store, PATHS).epochs()[-1])
        self._late = {path: store.read(path) for path in (self._record, MANIFEST)}
        store.delete_many([self._record])
        manifest = records.decode_generation_manifest(store.read(MANIFEST), MANIFEST)
        hidden = replace(manifest, latest_ref=None)
        store.put(MANIFEST, encode(hidden))

    def read(self, path: StatePath) -> bytes:
        try:
            return super().read(path)
        finally:
            self._times -= path == self._record
            if self._times == 0:
                for late, data in self._late.items():
                    self.inner.put(late, data)
                self._late = {}


@pytest.mark.parametrize("times", [1, 2, 3, 4])
@pytest.mark.parametrize("asked", [expiry(2), orphans()], ids=["expire", "orphans"])
def test_an_epoch_that_is_published_between_two_reads_is_no_gap(
    asked: GcRequest, times: int
) -> None:
    """A job that runs is not refused because its newest epoch was half published at first."""
    clock = Clock()
    store = begun(5, clock, **SMALL)
    running = run_of(store)
    running.step()
    late = PublishedLate(store, times)
    plan = plan_gc(late, PATHS, asked, now_micros=clock())
    assert plan.proof.head is not None
    backend = ParquetBackend(store, PATHS)
    assert plan.proof.head in [backend.load(epoch).ref for epoch in backend.epochs()]


@pytest.mark.parametrize("pinned", [False, True], ids=["expired", "pinned"])
@pytest.mark.parametrize("asked", [expiry(2), orphans()], ids=["expire", "orphans"])
def test_a_job_whose_newest_epoch_is_being_published_is_collected_all_the_same(
    asked: GcRequest, pinned: bool
) -> None:
    """Between the hint of a run and its epoch record nothing but the parent leads to an epoch, once
    the epoch that the run began from has expired."""
    clock = Clock()
    store = begun(5, clock, **SMALL)
    running = run_of(store)
    for _ in range(5):
        running.step()
    if pinned:
        pin_epoch(store, PATHS, Epoch(5), owner="test", clock=clock, sleep=lambda seconds: None)
    run_gc(store, PATHS, expiry(3), GcOptions(clock=clock, pace=QUICK))
    store.delete_many([PATHS.epoch_record(Epoch(10))])
    newest = PATHS.manifest(WorkerGeneration(2), Epoch(10))
    listed = data_files(store, PATHS)
    outcome = run_gc(store, PATHS, asked, GcOptions(clock=clock, pace=QUICK))
    assert outcome.plan.proof.head == PATHS.manifest(WorkerGeneration(2), Epoch(9))
    assert store.head(newest) is not None
    store.put(*late_record(store, newest))
    restorable(store, PATHS, 9, 10)
    assert asked.retention is not None or listed == data_files(store, PATHS)


def late_record(store: MemoryStore, ref: StatePath) -> tuple[StatePath, bytes]:
    """The epoch record that a run writes for its manifest."""
    manifest = metadata.decode_manifest(store.read(ref), ref)
    record = recovery.claim_of(ref, manifest, 1)
    return PATHS.epoch_record(manifest.epoch), encode(record)


def test_the_parent_of_the_newest_epoch_may_vanish_while_it_is_looked_for(clock: Clock) -> None:
    """Epochs come and go while the chain is walked: what was read is then read again."""
    start = begun(3, clock, **SMALL)
    counted = Interrupted(copied(start))
    read_roots(counted, PATHS)
    for at in range(1, counted.calls + 1):
        store = copied(start, clock=clock)
        running = run_of(store, keep_epochs=2)

        def go_on(running: LocalRun = running, store: MemoryStore = store) -> None:
            for _ in range(3):
                running.step()
            ParquetBackend(store, PATHS).cleanup_checkpoint(6)  # type: ignore[arg-type]

        try:
            roots = read_roots(Interrupted(store, at, go_on), PATHS)
        except ConflictError:
            continue  # too fast for it: looked three times, and nothing was decided
        assert len(roots.epochs) >= 2, f"before call {at}"
        assert roots.head.epoch in (3, 6)


def test_of_two_collectors_at_once_one_waits_for_its_turn(clock: Clock) -> None:
    store = begun(6, clock, **SMALL)
    refused: list[ArroyoStateError] = []
    ended: list[int] = []
    together = threading.Barrier(2)

    def run(owner: str) -> None:
        together.wait()
        try:
            ended.append(
                run_gc(store, PATHS, expiry(2), GcOptions(clock=clock, owner=owner)).deleted
            )
        except ConflictError as error:
            refused.append(error)

    threads = [threading.Thread(target=run, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ended) + len(refused) == 2
    assert sum(count > 0 for count in ended) == 1
    assert all(error.retryable for error in refused)
    restorable(store, PATHS, 5, 6)


def test_a_lock_left_by_a_dead_run_is_taken_once_it_has_run_out(clock: Clock) -> None:
    store = begun(5, clock, **SMALL)
    held = lease(store, PATHS, "dead", LeaseOptions(clock=clock, seconds=60))
    dead = held.__enter__()  # its process ends here: nobody gives it back
    with pytest.raises(ConflictError, match="leased by"):
        run_gc(store, PATHS, expiry(2), GcOptions(clock=clock))
    clock.micros += 61_000_000
    assert run_gc(store, PATHS, expiry(2), GcOptions(clock=clock)).done
    with pytest.raises(ConflictError):
        dead.delete_many([PATHS.current_generation])
    assert store.head(PATHS.current_generation) is not None


def test_a_collector_that_lost_its_lease_deletes_nothing_more(clock: Clock) -> None:
    start = begun(5, clock, **SMALL)
    counted = Interrupted(copied(start, clock=clock))
    run_gc(counted, PATHS, expiry(2), GcOptions(clock=clock))
    for at in range(5, counted.calls, 4):
        store = copied(start, clock=clock)
        seen: list[set[str]] = []

        def take(store: MemoryStore = store, seen: list[set[str]] = seen) -> None:
            clock.micros += 120_000_000
            with lease(store, PATHS, "another", LeaseOptions(clock=clock)):
                seen.append({*map(str, data_files(store, PATHS))})

        try:
            run_gc(Interrupted(store, at, take), PATHS, expiry(2), GcOptions(clock=clock))
        except ConflictError:
            assert {*map(str, data_files(store, PATHS))} == seen[0], f"before call {at}"
        whole(store, PATHS, 4, 5)


def test_an_expired_and_collected_job_ends_as_one_that_was_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = clock_of_all(monkeypatch)
    store, plain = MemoryStore(clock=clock), MemoryStore()
    running = run_of(store, sinks=1)
    for _ in range(8):
        running.step()
        run_gc(store, PATHS, expiry(2), GcOptions(clock=clock))
        clock.days(4)
        run_gc(store, PATHS, orphans(), GcOptions(clock=clock))
    for one in (store, plain):
        run_word_job(one, **{**JOB, **SMALL, "sinks": 1})
    job = word_job(store, **{**JOB, **SMALL, "sinks": 1})
    found, expected = state_of(store, job), state_of(plain, job)
    for one in (found, expected):
        one.pop("")
    assert found == expected
    assert output_of(store) == output_of(plain)
