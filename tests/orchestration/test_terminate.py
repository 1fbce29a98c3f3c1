"""Terminate ends a run for good: no second attempt, no lease left behind, nothing half done."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from arroyo_dagster.orchestration import ArroyoStateStore
from arroyo_dagster.state import ParquetBackend, open_store
from tests.formats import is_compacted
from tests.orchestration.results import COMPACT, GC, KEY, PATHS, assert_free_and_clean, loaded
from tests.orchestration.terminating import Phase, Terminator, definitions, events_of
from tests.shares import some_of

CONFIG = {"arroyo_compaction": COMPACT, "arroyo_gc": GC}
LEASE = r"leases/\d+\.json$"

# Each a call of the store; the work of both is some fifty calls.
COMPACTION_PHASES = {
    "planning": Phase("list_dir", "epochs$"),
    "taking the lease": Phase("create", LEASE, done=True),
    "lease taken": Phase("list_dir", "epochs$", 2),
    "half of the merges": Phase("put", "-compacted$", 2, done=True),
    "before publishing": Phase("create", "generation-manifest.json$"),
    "half published": Phase("create", r"epoch-0000009\.record$"),
    "giving the lease back": Phase("put", LEASE),
    "done": Phase("put", LEASE, done=True),
}
GC_PHASES = {
    "planning": Phase("list", "^words/main$"),
    "taking the lease": Phase("create", LEASE, done=True),
    "lease taken": Phase("list_dir", "journal$"),
    "before deleting": Phase("delete_many", "table-"),
    "half of the files": Phase("delete_many", "table-", done=True),
    "half of the metadata": Phase("delete_many", "checkpoint-manifest.pb$", 3, done=True),
    "giving the lease back": Phase("put", LEASE),
    "done": Phase("put", LEASE, done=True),
}


@pytest.fixture(scope="module")
def terminator(_shared_instance: dg.DagsterInstance) -> Terminator:
    return Terminator(_shared_instance)


def assert_ended_for_good(instance: dg.DagsterInstance, run_id: str, status: str) -> None:
    run = instance.get_run_by_id(run_id)
    assert run is not None
    assert run.status.value == status
    events = events_of(instance, run_id)
    assert "STEP_UP_FOR_RETRY" not in events
    assert "STEP_RESTARTED" not in events


def next_run(terminator: Terminator, root: Path, job: str) -> dg.ExecuteInProcessResult:
    found = definitions(ArroyoStateStore(checkpoint_url=str(root)), KEY).resolve_job_def(job)
    return found.execute_in_process(instance=terminator.instance, run_config=CONFIG[job])


def terminate(terminator: Terminator, root: Path, job: str, phase: Phase, **options: Any) -> str:
    return terminator.terminated(str(root), job, CONFIG[job], phase, **options)


@pytest.mark.parametrize("phase", some_of(COMPACTION_PHASES, 4, first=3))
def test_a_terminated_compaction_ends_and_the_next_run_does_the_work(
    phase: str, terminator: Terminator, root: Path
) -> None:
    store = open_store(str(root))
    before = loaded(store)
    run_id = terminate(terminator, root, "arroyo_compaction", COMPACTION_PHASES[phase])
    assert_ended_for_good(terminator.instance, run_id, "CANCELED")
    assert_free_and_clean(store)
    published = any(map(is_compacted, ParquetBackend(store, PATHS).load().paths))
    events = events_of(terminator.instance, run_id)
    assert ("ASSET_MATERIALIZATION" in events) is published
    result = next_run(terminator, root, "arroyo_compaction")
    assert result.success
    assert len(result.get_asset_materialization_events()) == (0 if published else 1)
    assert any(map(is_compacted, ParquetBackend(store, PATHS).load().paths))
    assert loaded(store) == before


@pytest.mark.parametrize("phase", some_of(GC_PHASES, 4))
def test_a_terminated_collection_ends_and_the_next_run_does_the_rest(
    phase: str, terminator: Terminator, root: Path
) -> None:
    store = open_store(str(root))
    before = loaded(store)
    run_id = terminate(terminator, root, "arroyo_gc", GC_PHASES[phase])
    assert_ended_for_good(terminator.instance, run_id, "CANCELED")
    assert_free_and_clean(store)
    assert next_run(terminator, root, "arroyo_gc").success
    assert ParquetBackend(store, PATHS).epochs() == [6, 7, 8]
    assert_free_and_clean(store)
    assert loaded(store) == before


@pytest.mark.parametrize(
    ("phase", "signals", "canceling"),
    [
        ("half of the merges", (signal.SIGTERM,), True),  # as Kubernetes does
        ("half of the merges", (signal.SIGINT,), False),  # its maximum runtime is over
        ("half published", (signal.SIGINT, signal.SIGINT), True),  # the first is put off
    ],
    ids=["SIGTERM", "max_runtime", "twice"],
)
def test_however_a_run_is_ended_there_is_no_second_attempt(
    phase: str, signals: tuple[int, ...], canceling: bool, terminator: Terminator, root: Path
) -> None:
    run_id = terminate(
        terminator,
        root,
        "arroyo_compaction",
        COMPACTION_PHASES[phase],
        signals=signals,
        canceling=canceling,
    )
    status = "CANCELED" if canceling else "FAILURE"
    assert_ended_for_good(terminator.instance, run_id, status)
    assert_free_and_clean(open_store(str(root)))
    assert next_run(terminator, root, "arroyo_compaction").success
