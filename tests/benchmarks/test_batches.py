"""A batch of small jobs: served at the same time, beside one after the other."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from arroyo_dagster.orchestration.directory import ArroyoDirectory
from arroyo_dagster.orchestration.job_pool import JobPool, Tools
from arroyo_dagster.orchestration.runners import InProcessRunner
from arroyo_dagster.state.operations.catalog.jobs import list_jobs
from arroyo_dagster.state.storage import MemoryStore
from arroyo_dagster.state.storage.wrappers import Slow
from tests.benchmarks.conftest import Comparison
from tests.jobs import copied, run_word_job
from tests.orchestration.test_week import JOB, Resource, kinds

JOBS = 50
REQUEST_SECONDS = 0.02
"""As of an object store in the same region."""


def test_50_small_jobs_at_the_same_time_beside_one_after_the_other(comparison: Comparison) -> None:
    written = MemoryStore()
    for number in range(JOBS):
        run_word_job(written, rows=16, job=f"job{number}", max_epochs=5, **JOB)
    keys = [str(paths.root) for paths in list_jobs(written)]
    kind, settings = kinds()["compaction"]

    def seconds(parallel_jobs: int) -> float:
        resource: Any = Resource(Slow(copied(written), REQUEST_SECONDS), MemoryStore())
        tools = Tools(resource, InProcessRunner(), ArroyoDirectory())
        log = SimpleNamespace(info=print, warning=print, error=print)
        context: Any = SimpleNamespace(run=SimpleNamespace(run_id="bench"), log=log)
        config = SimpleNamespace(
            settings=settings, budget_minutes=10**6, parallel_jobs=parallel_jobs
        )
        begun = time.perf_counter()
        pool = JobPool(kind.events, context, config, tools)
        served = list(pool.served(keys, True, lease_wait_seconds=0.0))
        assert [one.error for one in served] == [None] * JOBS
        return time.perf_counter() - begun

    assert comparison.report([seconds(4)], [seconds(1)], goal=0.35) < 0.6
