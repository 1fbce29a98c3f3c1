"""Terminate, and a maximum runtime, as users have them: through code server and run launcher."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest

from arroyo_dagster.state import ObjectStore, ParquetBackend, open_store
from arroyo_dagster.state.operations.catalog.jobs import paths_of
from tests.formats import is_compacted
from tests.jobs import run_word_job
from tests.orchestration.launching import ROOTS, Webserver, webserver
from tests.orchestration.results import JOB, assert_free_and_clean, configured, loaded
from tests.orchestration.terminating import Phase, events_of
from tests.shares import all_but

JOBS = [paths_of(root) for root in ROOTS]
MERGING = Phase("put", "words/b/.*-compacted$", 2, done=True)
DELETING = Phase("delete_many", "words/b/.*table-", done=True)
MONITORING = {"run_monitoring": {"enabled": True, "poll_interval_seconds": 1}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Webserver]:
    folder = tmp_path_factory.mktemp("launched")
    with webserver(folder, MONITORING) as found:
        yield found


@pytest.fixture
def store(server: Webserver) -> ObjectStore:
    """Three jobs at rest, of eight epochs each."""
    root = server.folder / "checkpoints"
    shutil.rmtree(root, ignore_errors=True)
    found = open_store(str(root))
    for paths in JOBS:
        run_word_job(found, **JOB, job=paths.job, max_epochs=8)
    return found


def batch(table: str, *, parallel_jobs: int = 1, **settings: Any) -> dict[str, Any]:
    return configured(f"arroyo_{table}", parallel_jobs=parallel_jobs, **settings)


def states(store: ObjectStore) -> list[dict[str, Any]]:
    return [loaded(store, job=paths.job) for paths in JOBS]


def compacted(store: ObjectStore) -> list[bool]:
    return [any(map(is_compacted, ParquetBackend(store, paths).load().paths)) for paths in JOBS]


def materialized(server: Webserver, run: str) -> set[str]:
    """The pipelines that a run told of."""
    logs = [entry.dagster_event for entry in server.instance.all_logs(run)]
    events = [one for one in logs if one and one.is_step_materialization]
    return {"/".join(one.asset_key.path[1:-1]) for one in events if one.asset_key}


def launched(server: Webserver, kind: str, config: Any, phase: Phase, how: str) -> str:
    """Launch a batch and end it at a phase; its id."""
    tags = {} if how == "terminate" else {"max_runtime": "1"}
    with server.held(f"arroyo_{kind}", config, phase, **tags) as run:
        if how == "terminate":
            server.terminate(run)
        else:
            time.sleep(1.1)
            server.monitor()
        time.sleep(0.5)  # a thread that waits at the phase must not go on before
    found = server.ended(run)
    assert found.status.value == ("CANCELED" if how == "terminate" else "FAILURE")
    assert not {"STEP_UP_FOR_RETRY", "STEP_RESTARTED"} & set(events_of(server.instance, run))
    return run


@pytest.mark.parametrize("how", all_but(["terminate", "max_runtime"], ["terminate"]))
def test_a_batch_of_compactions_is_ended_for_good(
    how: str, server: Webserver, store: ObjectStore
) -> None:
    before = states(store)
    # Two at the same time, the other may be done or not; the last one never begins.
    parallel = 2 if how == "terminate" else 1
    config = batch("compacted_state", parallel_jobs=parallel, policy="full", wait_seconds=0.0)
    run = launched(server, "compaction", config, MERGING, how)
    assert_free_and_clean(store, *JOBS)
    done = compacted(store)
    assert done[1:] == [False, False]
    assert done[0] or parallel == 2
    assert materialized(server, run) == {key for key, one in zip(ROOTS, done, strict=True) if one}
    assert server.here("arroyo_compaction", config).success
    assert compacted(store) == [True, True, True]
    assert_free_and_clean(store, *JOBS)
    assert states(store) == before


@pytest.mark.parametrize("following", all_but(["here", "launched"], ["launched"]))
def test_a_batch_of_expiries_is_ended_for_good(
    following: str, server: Webserver, store: ObjectStore
) -> None:
    before = states(store)
    config = batch("retained_epochs", keep_epochs=3, dry_run=False)
    launched(server, "gc", config, DELETING, "terminate")
    assert_free_and_clean(store, *JOBS)
    assert ParquetBackend(store, JOBS[0]).epochs() == [6, 7, 8]
    assert ParquetBackend(store, JOBS[2]).epochs() == list(range(1, 9))
    if following == "here":
        assert server.here("arroyo_gc", config).success
    else:
        assert server.ended(server.launch("arroyo_gc", config)).is_success
    for paths in JOBS:
        assert ParquetBackend(store, paths).epochs() == [6, 7, 8]
    assert_free_and_clean(store, *JOBS)
    assert states(store) == before
