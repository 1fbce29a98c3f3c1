"""Garbage collection of one job: what stays is whole, whatever goes wrong,
also beside a writer that goes on."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from arroyo_dagster import (
    CompactionPolicy,
    CompactionSettings,
    Epoch,
    GcOptions,
    GcRequest,
    Layout,
    MemoryStore,
    ParquetBackend,
    StatePath,
    WorkerGeneration,
    WriteProtected,
    list_jobs,
    open_store,
    pin_epoch,
    plan_gc,
    run_compaction,
    run_gc,
)
from arroyo_dagster.errors import InputError
from arroyo_dagster.state.planning.gc.reachability import referenced_by
from arroyo_dagster.state.planning.restore import recovery
from arroyo_dagster.state.storage.wrappers import Counting
from tests.compat.arroyo import ARCHIVES, unpack
from tests.formats import encode, metadata, records
from tests.gc_jobs import (
    JOB,
    PATHS,
    Clock,
    begun,
    data_files,
    expiry,
    orphans,
    reachable,
    restorable,
    whole,
)
from tests.internals import LocalRun, Pace, read_roots
from tests.jobs import output_of, run_word_job, state_of, word_job
from tests.stores import Wrapper

pytestmark = pytest.mark.usefixtures("one_at_a_time")

QUICK = Pace(sleep=lambda seconds: None)


# ---- expire --------------------------------------------------------------------------------------


def test_an_expiry_keeps_what_it_says_and_a_second_one_finds_nothing(clock: Clock) -> None:
    store = begun(8, clock)
    planned = plan_gc(WriteProtected(store), PATHS, expiry(3), now_micros=clock())
    assert planned.epochs == (1, 2, 3, 4, 5)
    outcome = run_gc(store, PATHS, expiry(3), GcOptions(clock=clock))
    assert outcome.done
    assert (outcome.deleted, outcome.size_bytes) == (planned.objects, planned.size_bytes)
    assert outcome.plan.digest == planned.digest
    restorable(store, PATHS, 6, 7, 8)
    again = run_gc(store, PATHS, expiry(3), GcOptions(clock=clock))
    assert (again.done, again.plan.objects) == (False, 0)
    assert data_files(store, PATHS) == reachable(store, PATHS)
    with pytest.raises(InputError, match="at least 1"):
        run_gc(store, PATHS, expiry(0), GcOptions(clock=clock))
    restorable(store, PATHS, 6, 7, 8)
    run_word_job(store, **JOB)


@pytest.mark.parametrize("archive", ARCHIVES)
def test_what_is_reachable_is_what_brute_force_finds(archive: str, tmp_path: Path) -> None:
    store = WriteProtected(open_store(unpack(archive, tmp_path)))
    for paths in list_jobs(store):
        roots = read_roots(store, paths)
        found = referenced_by(roots, (*roots.epochs, *roots.attempts))
        expected = reachable(store, paths)
        assert len(found) == len(expected)
        assert all(path in found for path in expected)


@pytest.mark.parametrize("archive", ARCHIVES)
def test_an_expiry_to_the_newest_two_leaves_both_restorable(archive: str, tmp_path: Path) -> None:
    store = open_store(unpack(archive, tmp_path))
    for paths in list_jobs(store):
        before = ParquetBackend(store, paths).epochs()
        newest = before[-2:]
        said = {str(paths.root): "stopped"}
        outcome = run_gc(store, paths, expiry(2, **said))
        restorable(store, paths, *newest)
        assert reachable(store, paths) <= data_files(store, paths)
        if paths.layout is Layout.PROTOCOL:
            assert outcome.done
            assert ParquetBackend(store, paths).epochs() == newest
        else:
            # Arroyo's own cleanup needs the ten before either of the two newest.
            left = ParquetBackend(store, paths).epochs()
            assert left[0] == max(before[0], newest[0] - 10)


def test_an_expiry_without_sizes_lists_nothing_and_reads_every_object_once() -> None:
    store = Counting(WriteProtected(begun(9)))
    reads: Counter[str] = Counter()
    store.read = lambda path: (reads.update([path]), Counting.read(store, path))[1]  # type: ignore[method-assign,misc]
    plan = plan_gc(store, PATHS, expiry(3), with_sizes=False)
    assert plan.epochs == (1, 2, 3, 4, 5, 6)
    assert store.calls["list"] == store.calls["list_dir"] == 0
    assert {path for path, count in reads.items() if count > 1} <= {PATHS.current_generation}
    full = plan_gc(WriteProtected(store), PATHS, expiry(3))
    assert list(plan.data.paths) == sorted(full.data.paths, key=list(plan.data.paths).index)


def ended(store: MemoryStore) -> tuple[Any, Any]:
    """What a job of at most 8 epochs holds and has put out at its end."""
    job = {**JOB, "rows": 16}
    run_word_job(store, **job)
    found = state_of(store, word_job(store, **job))
    found.pop("")
    return found, output_of(store)


def test_after_a_compaction_most_files_go_and_what_waits_to_be_taken_over_stays() -> None:
    full = CompactionSettings(policy=CompactionPolicy.FULL)
    expected = ended(begun(1, rows=16))
    store = begun(6, rows=16)
    run_compaction(store, PATHS, full)
    files = data_files(store, PATHS)
    run_gc(store, PATHS, expiry(2))
    assert len(data_files(store, PATHS)) < len(files)
    whole(store, PATHS, *ParquetBackend(store, PATHS).epochs()[-2:])
    assert ended(store) == expected
    store = MemoryStore()
    run = LocalRun.start(word_job(store, **{**JOB, "rows": 16}), store)
    for _ in range(6):
        run.step()
    run_compaction(store, PATHS, full)
    run_gc(store, PATHS, expiry(2))
    run.step()
    run_gc(store, PATHS, expiry(2))
    whole(store, PATHS, *ParquetBackend(store, PATHS).epochs()[-2:])
    assert ended(store) == expected


MANIFEST = PATHS.generation_manifest(WorkerGeneration(2))
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
