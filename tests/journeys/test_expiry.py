"""Expiry of one job: what is kept stays whole, whatever goes wrong."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, Literal

import pytest

from arroyo_dagster import (
    CompactionPolicy,
    CompactionSettings,
    MemoryStore,
    ParquetBackend,
    WriteProtected,
    list_jobs,
    open_store,
    plan_gc,
    run_compaction,
    run_gc,
)
from arroyo_dagster.errors import InputError, ProtocolError, StorageError
from tests.compat.arroyo import unpack
from tests.faulty_stores import Crash, FaultInjecting
from tests.gc_jobs import expiry
from tests.internals import LocalRun, lease
from tests.jobs import (
    copied,
    listing,
    output_of,
    run_word_job,
    state_of,
    word_job,
    written_by_word_job,
)
from tests.shares import EITHER_OR_BOTH, Share, dealt_out, either_or_both

pytestmark = pytest.mark.usefixtures("one_at_a_time")

JOB: dict[str, Any] = {
    "rows": 24,
    "rows_per_epoch": 2,
    "keep_epochs": None,
    "merge_files_after": 99,
}
SHORT = {**JOB, "rows": 16}
"""Two epochs behind the sixth: what an expiry took too much of is missed in the first of them."""
PATHS = word_job(MemoryStore(), **JOB).paths
OURS = "/_arroyo_dagster/"
FULL = CompactionSettings(policy=CompactionPolicy.FULL)


def begun(epochs: int, job: dict[str, Any] = JOB) -> MemoryStore:
    return written_by_word_job(**job, max_epochs=epochs)


def end_of(store: MemoryStore, job: dict[str, Any] = JOB) -> tuple[Any, Any]:
    run_word_job(store, **job)
    found = state_of(store, word_job(store, **job))
    found.pop("")
    return found, output_of(store)


def ended(job: dict[str, Any] = JOB) -> tuple[Any, Any]:
    return end_of(begun(1, job), job)


def kept_whole(store: MemoryStore, keep: int) -> None:
    backend = ParquetBackend(store, PATHS)
    for epoch in backend.epochs()[-keep:]:
        backend.prepare_checkpoint_load(epoch)


def test_after_a_compaction_most_files_go() -> None:
    store = begun(9)
    run_compaction(store, PATHS, FULL)
    files = sum("table-" in info.path for info in store.list())
    run_gc(store, PATHS, expiry(2))
    left = sum("table-" in info.path for info in store.list())
    assert left < files
    kept_whole(store, 2)
    assert end_of(store) == ended()


def test_what_waits_to_be_taken_over_stays() -> None:
    store = MemoryStore()
    run = LocalRun.start(word_job(store, **JOB), store)
    for _ in range(6):
        run.step()
    run_compaction(store, PATHS, FULL)
    run_gc(store, PATHS, expiry(2))
    run.step()
    run_gc(store, PATHS, expiry(2))
    kept_whole(store, 2)
    assert end_of(store) == ended()


@EITHER_OR_BOTH
@pytest.mark.parametrize(
    ("mode", "crash", "share"),
    dealt_out([("before", False), ("after", False), ("after", True), ("partial", True)], 3),
)
def test_a_fault_at_any_change_of_an_expiry_leaves_what_is_kept_whole(
    mode: Literal["before", "after", "partial"], crash: bool, share: Share, both: bool
) -> None:
    start, expected = begun(6, SHORT), ended(SHORT)
    counted = FaultInjecting(copied(start))
    run_gc(counted, PATHS, expiry(2))
    clean = {path for path in listing(counted) if OURS not in path}
    assert counted.changes > 6
    for at in share(range(1, counted.changes + 1)):
        store = copied(start)
        faulty = FaultInjecting(store, fail_at=at, mode=mode, crash=crash)
        with contextlib.suppress(Crash, StorageError):
            run_gc(faulty, PATHS, expiry(2))
        kept_whole(store, 2)
        at_once = copied(store)
        run_gc(store, PATHS, expiry(2))
        left = {path for path in listing(store) if OURS not in path}
        assert left == clean, f"fault at change {at}: not finished by the next run"
        for end in either_or_both(at_once, store, at, both=both):
            assert end_of(end, SHORT) == expected, f"fault at change {at}"


def test_bad_requests_are_refused_before_anything_goes(tmp_path: Path) -> None:
    store = begun(4)
    before = listing(store)
    with pytest.raises(InputError, match="at least 1"):
        run_gc(store, PATHS, expiry(0))
    with lease(copied(store), PATHS, "other"):
        pass
    assert {p for p in listing(store) if OURS not in p} == set(before)
    arroyo = open_store(unpack("flights", tmp_path))
    with pytest.raises(ProtocolError, match="unknown: no job-status source is configured"):
        plan_gc(WriteProtected(arroyo), list_jobs(arroyo)[0], expiry(2))
