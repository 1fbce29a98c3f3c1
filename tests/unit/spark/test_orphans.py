"""Orphans judged a directory at a time: the same plan as of the whole job at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from arroyo_dagster.spark import orphans as on_spark
from arroyo_dagster.state.model.ids import Epoch, StatePath, WorkerGeneration
from arroyo_dagster.state.operations.gc.plan import plan_gc
from arroyo_dagster.state.storage import MemoryStore, WriteProtected
from tests.fleets import OPERATOR, TABLE, Written, legacy_job, protocol_job
from tests.gc_jobs import Clock, orphans


def run_here(
    session: object,
    function: Callable[[Any], Any],
    items: Sequence[Any],
    weights: Sequence[int],
    *,
    store: object,
) -> list[Any]:
    assert len(items) == len(weights)
    return [function(item) for item in items]


@pytest.mark.parametrize("paths", [protocol_job("p"), legacy_job("j")], ids=["protocol", "legacy"])
def test_the_plan_is_the_same_as_that_of_the_whole_job(
    paths: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_spark, "run_items", run_here)
    clock = Clock()
    store = MemoryStore(clock=clock)
    job = Written(store, paths, start=clock.micros, keep=2)
    job.epochs(5)
    generation = WorkerGeneration(1) if paths.pipeline else None
    for number in (1, 2, 3):
        lost = paths.data_file(OPERATOR, TABLE, 7, Epoch(number), generation, attempt="lost")
        store.put(lost, b"lost")
    for name in ("notes.txt", "old/notes.txt", "checkpoints.bak", "_arroyo_dagster/leases/x"):
        store.put(StatePath(f"{paths.root}/{name}"), b"x")
    clock.days(5)
    said = orphans(**{str(paths.root): "stopped"})
    now = clock()
    here = plan_gc(store, paths, said, now_micros=now)
    there = on_spark.plan_orphans_on_spark(
        lambda: None,  # type: ignore[arg-type,return-value]
        WriteProtected(store),
        paths,
        said,
        now_micros=now,
    )
    assert len(here.data) >= 2
    assert list(there.data) == list(here.data)
    assert list(there.metadata) == list(here.metadata)
    assert set(there.foreign) == set(here.foreign)
    assert there.stays == here.stays
    assert there.proof == here.proof
    assert there.digest == here.digest
