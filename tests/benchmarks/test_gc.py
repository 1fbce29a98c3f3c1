"""Garbage collection at the size it was made for: plans of a process each, deletes at 20 ms."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from arroyo_dagster.state import GcOptions, GcRequest, MemoryStore, PlanKind, Progress, run_gc
from tests.faulty_stores import Slow
from tests.formats import GRACE_FLOOR_MICROS
from tests.gc_jobs import PATHS, Clock, begun
from tests.jobs import copied

PROJECT = Path(__file__).parents[2]
SECONDS = 600

_PLAN = """
import json, sys, time
from arroyo_dagster.state.operations.gc.plan import GcRequest, plan_gc
from arroyo_dagster.state.operations.progress import heartbeat
from arroyo_dagster.state.model.garbage import PlanKind, Retention
from tests.epochs import PATHS, MadeUpJob
what, epochs = sys.argv[1], int(sys.argv[2])
expiry = what == "expire"
asked = GcRequest(
    kind=PlanKind.EXPIRE if expiry else PlanKind.ORPHANS,
    retention=Retention(keep_epochs=10) if expiry else None,
)
store = MadeUpJob(epochs)
def peak():
    text = open("/proc/self/status").read()
    return int(text.partition("VmHWM:")[2].split()[0]) * 1024
store.manifest(1), store.record(1)
before, told = peak(), []
begun, used = time.perf_counter(), time.process_time()
with heartbeat(lambda done: told.append(time.perf_counter())) as say:
    plan = plan_gc(
        store, PATHS, asked, now_micros=10**14, with_sizes=not expiry,
        on_progress=say,
    )
ends = [begun, *told, time.perf_counter()]
print(json.dumps({
    "seconds": ends[-1] - begun,
    "cpu": time.process_time() - used,
    "megabytes": (peak() - before) / 2**20,
    "objects": plan.objects,
    "referenced": plan.proof.referenced,
    "silent": max(b - a for a, b in zip(ends, ends[1:])),
    "twice": sum(count > 1 for count in store.reads.values()),
    "lists": store.calls["list"] + store.calls["list_dir"],
}))
"""


def planned(what: str, epochs: int) -> dict[str, float]:
    """What a plan takes, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", _PLAN, what, str(epochs)],
        check=True,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        cwd=PROJECT,
    )
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def show(what: str, found: dict[str, float], goal: str) -> None:
    print(
        f"\n{what}: {found['seconds']:.1f} s ({found['cpu']:.1f} s of processor), "
        f"{found['megabytes']:.0f} MB, {found['objects']:.0f} objects, "
        f"{found['referenced']:.0f} referenced, at most {found['silent']:.1f} s without a word; "
        f"goal {goal}"
    )


@pytest.mark.parametrize("epochs", [1_000, 10_000])
def test_an_expiry_of_10_000_epochs_is_planned_within_a_minute(epochs: int) -> None:
    found = planned("expire", epochs)
    show(f"expire plan over {epochs} epochs x 50 operators x 4 tables", found, "60 s, memory flat")
    assert found["lists"] == 0
    assert found["twice"] <= 1  # the fence alone is read again in the end


def test_orphans_among_1_100_000_objects_are_planned_within_a_gigabyte() -> None:
    found = planned("orphans", 5_000)
    show("orphan plan over 1,000,000 referenced and 100,000 orphans", found, "1024 MB")
    assert found["referenced"] == 1_000_000
    assert found["objects"] > 99_000  # those beside the newest epoch's files stay
    assert found["megabytes"] < 1024


def test_10_000_objects_are_deleted_within_a_second_at_20_ms_a_request() -> None:
    clock = Clock()
    store = begun(3, clock, sinks=0, parallelism=1)
    clock.days(-5)
    for number in range(10_000):
        store.put(
            PATHS.data_file("count", "counts", 0, 1, 1, attempt=f"lost{number:05}"),  # type: ignore[arg-type]
            b"an attempt that nobody waits for",
        )
    clock.days(5)
    asked = GcRequest(kind=PlanKind.ORPHANS, grace_micros=GRACE_FLOOR_MICROS)
    took = []
    for seconds in (0.02, 0.0):
        told: list[tuple[float, Progress]] = []
        slow = Slow(copied(store, clock=clock, keep_times=True), seconds)
        begun_at = time.perf_counter()
        done = run_gc(
            slow,
            PATHS,
            asked,
            GcOptions(
                clock=clock,
                on_progress=lambda state, told=told: told.append((time.perf_counter(), state)),
            ),
        )
        whole = time.perf_counter() - begun_at
        assert done.deleted == 10_000
        deleting = [at for at, state in told if state.step == "data"]
        took.append((whole, deleting[-1] - min(at for at, s in told if s.step != "data")))
    (slow_whole, slow_deletes), (whole, deletes) = took
    print(
        f"\n10,000 deletes: {slow_deletes:.2f} s at 20 ms a request, {deletes:.2f} s at none; "
        f"with plan and read-back {slow_whole:.2f} s and {whole:.2f} s; goal 1 s"
    )
    assert isinstance(store, MemoryStore)
