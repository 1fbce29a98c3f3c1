"""Plans that are made a directory at a time are those of the whole job at once."""

from __future__ import annotations

from typing import Any

import pytest

from arroyo_dagster.errors import ProtocolError
from arroyo_dagster.spark.gc import plan_on
from arroyo_dagster.state import (
    Epoch,
    GcRequest,
    JobPaths,
    MemoryStore,
    StatePath,
    WorkerGeneration,
    WriteProtected,
    plan_gc,
)
from arroyo_dagster.state.operations.engines import HERE
from arroyo_dagster.state.planning.engines import WorkAmount
from tests.fleets import OPERATOR, TABLE, Written, legacy_job, protocol_job
from tests.formats import GcPlan
from tests.gc_jobs import Clock, expiry, orphans

LAYOUTS = pytest.mark.parametrize(
    "paths", [protocol_job("p"), legacy_job("j")], ids=["protocol", "legacy"]
)


def written(paths: JobPaths, clock: Clock, epochs: int = 20) -> MemoryStore:
    store = MemoryStore(clock=clock)
    job = Written(store, paths, start=clock.micros, keep=2)
    job.epochs(epochs)
    generation = WorkerGeneration(1) if paths.pipeline else None
    for number in (1, 2, 3):
        lost = paths.data_file(OPERATOR, TABLE, 7, Epoch(number), generation, attempt="lost")
        store.put(lost, b"lost")
    for name in ("notes.txt", "old/notes.txt", "checkpoints.bak", "_arroyo_dagster/leases/x"):
        store.put(StatePath(f"{paths.root}/{name}"), b"x")
    clock.days(5)
    return store


def both(store: MemoryStore, paths: JobPaths, request: GcRequest, now: int) -> tuple[Any, Any]:
    here = plan_gc(store, paths, request, now_micros=now)
    choice = HERE.choose("plan", WorkAmount(objects=1))
    there = plan_on(HERE, choice, WriteProtected(store), paths, request, now_micros=now)
    return here, there


def equal(here: GcPlan, there: GcPlan) -> None:
    assert list(there.data) == list(here.data)
    assert list(there.records) == list(here.records)
    assert list(there.metadata) == list(here.metadata)
    assert set(there.foreign) == set(here.foreign)
    assert there.stays == here.stays
    assert there.proof == here.proof
    assert there.digest == here.digest


@LAYOUTS
@pytest.mark.parametrize("kind", ["orphans", "expiry"])
def test_plans_are_those_of_the_whole_job(paths: JobPaths, kind: str) -> None:
    clock = Clock()
    store, stopped = written(paths, clock), {str(paths.root): "stopped"}
    request = orphans(**stopped) if kind == "orphans" else expiry(2, **stopped)
    here, there = both(store, paths, request, clock())
    assert len(here.data) >= 2
    assert here.data.size_bytes > 0
    assert (len(here.metadata) >= 5) is (kind == "expiry")
    equal(here, there)


@LAYOUTS
def test_a_second_name_of_a_directory_is_refused_as_in_process(paths: JobPaths) -> None:
    clock = Clock()
    store = written(paths, clock)
    inner = "generations/01/checkpoints" if paths.pipeline else "Checkpoints"
    name = f"{paths.root}/{inner}/checkpoint-0000001/operator-{OPERATOR}/table-{TABLE}-000-x"
    store.put(StatePath(name), b"a copy")
    for request in (orphans(**{str(paths.root): "stopped"}), expiry(2)):
        refused = []
        for plan in (plan_gc, lambda *given, **more: plan_on(HERE, None, *given, **more)):  # type: ignore[arg-type]
            with pytest.raises(ProtocolError) as caught:
                plan(store, paths, request, now_micros=clock())
            refused.append(caught.value.message)
        assert refused[0] == refused[1]
