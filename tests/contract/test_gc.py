"""Garbage collection on real stores: their listings, their clocks, their bulk deletes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from arroyo_dagster.state import (
    Epoch,
    GcOptions,
    ObjectStore,
    OperatorId,
    ParquetBackend,
    TableName,
    WorkerGeneration,
    open_store,
    run_gc,
)
from tests.fleets import Written, protocol_job
from tests.gc_jobs import expiry, orphans, whole, without_ours
from tests.internals import read_journal, run_undelete

PATHS = protocol_job("p")
STOPPED = {"p/main": "stopped"}
LOST = PATHS.data_file(
    OperatorId("SessionWindow<30s>"),
    TableName("s"),
    0,
    Epoch(1),
    WorkerGeneration(1),
    attempt="lost",
)


@pytest.mark.parametrize("new_store", ["local", "s3-obstore", "s3-fsspec"], indirect=True)
def test_what_goes_is_read_back_and_comes_back(new_store: Callable[[], ObjectStore]) -> None:
    store = new_store()
    Written(store, PATHS, start=time.time_ns() // 1000).epochs(4)
    before = without_ours(store)
    outcome = run_gc(store, PATHS, expiry(2, **STOPPED), GcOptions(quarantine=True))
    assert outcome.deleted == outcome.plan.objects
    assert outcome.size_bytes == sum(len(before[p]) for p in before.keys() - without_ours(store))
    assert {entry.outcome for entry in read_journal(store, PATHS)} == {"moved"}
    whole(store, PATHS, 3, 4)
    assert ParquetBackend(store, PATHS).epochs() == [3, 4]
    run_undelete(store, PATHS, str(outcome.quarantine))
    assert without_ours(store) == before
    store.put(LOST, b"x")
    young = run_gc(store, PATHS, orphans(**STOPPED))
    assert (young.done, young.plan.stays["young"]) == (False, (1, 1))


def test_empty_directories_go_with_what_was_in_them(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    Written(store, PATHS, start=time.time_ns() // 1000).epochs(6)
    store.put(LOST, b"x")
    lost = next(tmp_path.rglob("*-lost"))
    assert "%3C" in str(lost)
    os.utime(lost, (1_700_000_000, 1_700_000_000))
    run_gc(store, PATHS, expiry(2, **STOPPED))
    assert lost.exists()
    assert not (tmp_path / PATHS.checkpoint(Epoch(2), WorkerGeneration(1))).exists()
    run_gc(store, PATHS, orphans(**STOPPED))
    assert not lost.parent.parent.exists()
    assert not [path for path in tmp_path.rglob("*") if path.is_dir() and not any(path.iterdir())]
    whole(store, PATHS, 5, 6)
