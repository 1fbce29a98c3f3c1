"""Garbage collection beside others: a writer that goes on, a second collector, one that died."""

from __future__ import annotations

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
from arroyo_dagster.state.codec.derived import encode
from arroyo_dagster.state.planning.restore import recovery
from tests.formats import metadata, records
from tests.gc_jobs import (
    JOB,
    PATHS,
    Clock,
    begun,
    data_files,
    expiry,
    orphans,
    restorable,
)
from tests.internals import LocalRun, Pace
from tests.jobs import word_job
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
