"""Files that killed runs staged for a sink are collected, and the output stays exact."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from arroyo_dagster.dataflow.topics.cells import JsonLines
from arroyo_dagster.dataflow.topics.sinks import KeptSink, LinesFolderSink
from arroyo_dagster.engine import run_pipeline
from arroyo_dagster.engine.connectors import FolderSink
from arroyo_dagster.state import (
    Epoch,
    GcOptions,
    MemoryStore,
    ParquetBackend,
    StatePath,
    plan_gc,
    run_gc,
)
from tests.faulty_stores import Crash, FaultInjecting
from tests.formats import ObjectKind, object_name
from tests.gc_jobs import DAY, Clock, clock_of_all, orphans
from tests.reading import read_on
from tests.stores import LocalDiskStore
from tests.unit.dataflow.topics.test_ways_out import LINES, appended, between, job


def staged(store: MemoryStore) -> list[StatePath]:
    return [info.path for info in store.list() if "/_staging/" in f"/{info.path}"]


class Killed(FaultInjecting):
    """A store on which a run dies between staging an epoch and publishing it."""

    def create(self, path: StatePath, data: bytes) -> bool:
        if path.endswith(("checkpoint-manifest.pb", ".record")):
            raise Crash("the process died")
        return super().create(path, data)

    def put(self, path: StatePath, data: bytes) -> None:
        if path.endswith("checkpoint-manifest.pb"):
            raise Crash("the process died")
        super().put(path, data)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return clock_of_all(monkeypatch)


@pytest.fixture
def store(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    found = MemoryStore(uuid.uuid4().hex, clock=clock)
    monkeypatch.setattr(
        "arroyo_dagster.dataflow.topics.sinks.get_storage_provider", lambda url: found
    )
    return found


def killed(store: MemoryStore, times: int) -> None:
    for _ in range(times):
        with contextlib.suppress(Crash):
            run_pipeline(job(KeptSink(store.url, "counts")), Killed(store), max_epochs=1)


def test_what_killed_runs_staged_in_the_job_is_collected_and_the_output_is_exact(
    store: MemoryStore, clock: Clock
) -> None:
    pipeline = job(KeptSink(store.url, "counts"))
    paths = pipeline.paths
    run_pipeline(pipeline, store, max_epochs=1)
    killed(store, 3)
    left = staged(store)
    assert len(left) == 3
    assert {object_name(paths, path).kind for path in left} == {ObjectKind.STAGED}
    clock.days(5)
    plan = plan_gc(store, paths, orphans(), now_micros=clock())
    assert not [path for path in plan.records.paths if path in left], (
        "epoch 2 may still commit them"
    )
    assert plan.stays["uncommitted"][0] == 3
    run_pipeline(job(KeptSink(store.url, "counts")), store, max_epochs=2)
    killed(store, 1)
    (young,) = set(staged(store)) - set(left)
    plan = plan_gc(store, paths, orphans(), now_micros=clock())
    assert set(left) <= set(plan.records.paths)
    outcome = run_gc(store, paths, orphans(), GcOptions(clock=clock))
    assert outcome.done
    assert staged(store) == [young]
    run_pipeline(job(KeptSink(store.url, "counts")), store)
    reader = between(store, pipeline)
    assert read_on(reader, reader.initial_offset())[0] == LINES
    plan = plan_gc(store, paths, orphans(), now_micros=clock())
    assert young not in set(plan.records.paths)
    clock.days(5)
    assert run_gc(store, paths, orphans(), GcOptions(clock=clock)).deleted
    assert staged(store) == []
    assert read_on(reader, reader.initial_offset())[0] == LINES


def test_what_an_unfinished_commit_needs_is_never_collected(
    store: MemoryStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object) -> None:
        raise Crash("the process died")

    pipeline = job(KeptSink(store.url, "counts"))
    run_pipeline(pipeline, store, max_epochs=1)
    with monkeypatch.context() as patched:
        patched.setattr(FolderSink, "commit", die)
        with pytest.raises(Crash):
            run_pipeline(pipeline, store, max_epochs=1)
    (needed,) = staged(store)
    clock.days(30)
    outcome = run_gc(store, pipeline.paths, orphans(), GcOptions(clock=clock))
    assert needed in staged(store)
    assert needed not in list(outcome.plan.records.paths)
    run_pipeline(job(KeptSink(store.url, "counts")), store)
    assert ParquetBackend(store, pipeline.paths).epochs()[-1] == Epoch(5)
    reader = between(store, pipeline)
    assert read_on(reader, reader.initial_offset())[0] == LINES


def age(folder: Path, days: float) -> None:
    then = time.time() - days * DAY / 1e6
    for path in folder.rglob("*"):
        if path.is_file():
            os.utime(path, (then, then))


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_what_killed_runs_staged_in_a_folder_is_removed_by_a_later_run(tmp_path: Path) -> None:
    out = tmp_path / "out"
    store = MemoryStore()

    def pipeline() -> Any:
        return job(LinesFolderSink("counts", f"file://{out}", JsonLines("counts")))

    run_pipeline(pipeline(), store, max_epochs=1)
    for _ in range(3):
        with contextlib.suppress(Crash):
            run_pipeline(pipeline(), Killed(store), max_epochs=1)
    left = [name for name in files_below(out) if "_staging/" in name]
    assert len(left) == 3
    assert all(name.startswith("_staging/s.d/writer/sink/0000002-") for name in left)
    # Another job of the same name for its operator, and a user's file beside.
    other = out / "_staging/s.d/other/sink/0000001-000-0123456789abcdef.jsonl"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"in flight")
    mine = out / "_staging/s.d/writer/sink/notes.txt"
    mine.write_bytes(b"mine")
    age(out, 4)
    with contextlib.suppress(Crash):
        run_pipeline(pipeline(), Killed(store), max_epochs=1)
    assert set(left) <= set(files_below(out)), "epoch 2 is not committed"
    run_pipeline(pipeline(), store, max_epochs=1)
    assert set(left) <= set(files_below(out)), "those of epoch 2 itself wait for the next"
    run_pipeline(pipeline(), store)
    found = {name for name in files_below(out) if "_staging/" in name}
    assert not found & set(left)
    young = {name for name in found if "writer/sink/0000002-" in name}
    assert len(young) == 1, "staged less than three days ago"
    assert found - young == {str(other.relative_to(out)), str(mine.relative_to(out))}
    lines = [
        line
        for name in files_below(out)
        if "_staging" not in name
        for line in (out / name).read_bytes().splitlines()
    ]
    assert lines == LINES


def test_what_killed_runs_staged_beside_a_file_is_removed_by_a_later_run(tmp_path: Path) -> None:
    store = MemoryStore()
    path = tmp_path / "out.jsonl"
    run_pipeline(job(appended(path)), store, max_epochs=1)
    for _ in range(3):
        with contextlib.suppress(Crash):
            run_pipeline(job(appended(path)), Killed(store), max_epochs=1)
    staging = LocalDiskStore(str(tmp_path / ".out.jsonl.staging"))
    assert len(list(staging.list())) == 3
    age(tmp_path / ".out.jsonl.staging", 4)
    run_pipeline(job(appended(path)), store, max_epochs=1)
    assert len(list(staging.list())) == 3
    run_pipeline(job(appended(path)), store)
    assert list(staging.list()) == []
    assert path.read_bytes().splitlines() == LINES
