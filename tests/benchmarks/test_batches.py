"""A batch of small jobs: at the same time, beside one after the other; on Spark, beside one job."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from arroyo_dagster.orchestration.directory import ArroyoDirectory
from arroyo_dagster.orchestration.job_pool import JobPool, Tools
from arroyo_dagster.orchestration.resources import SparkSessionResource
from arroyo_dagster.orchestration.runners import InProcessRunner, MaintenanceRunner, SparkRunner
from arroyo_dagster.state.operations.catalog.jobs import list_jobs
from arroyo_dagster.state.storage import MemoryStore, ObjectStore
from arroyo_dagster.state.storage.remote.open import open_store
from tests.benchmarks.conftest import Comparison
from tests.faulty_stores import Slow
from tests.jobs import copied, run_word_job
from tests.orchestration.test_week import JOB, Resource, kinds

JOBS = 50
REQUEST_SECONDS = 0.02
"""As of an object store in the same region."""


ROUNDS = 3


def written_jobs() -> MemoryStore:
    """Some jobs at rest, with five epochs each."""
    written = MemoryStore()
    for number in range(JOBS):
        run_word_job(written, rows=16, job=f"job{number}", max_epochs=5, **JOB)
    return written


def seconds(
    store: ObjectStore, runner: MaintenanceRunner, parallel_jobs: int, jobs: int = JOBS
) -> float:
    """Compact the first `jobs` jobs of a store in one batch."""
    keys = [str(paths.root) for paths in list_jobs(store)][:jobs]
    kind, settings = kinds()["compaction"]
    resource: Any = Resource(store, MemoryStore())
    tools = Tools(resource, runner, ArroyoDirectory())
    log = SimpleNamespace(info=print, warning=print, error=print)
    run = SimpleNamespace(run_id="bench", tags={})
    context: Any = SimpleNamespace(run=run, log=log)
    config = SimpleNamespace(settings=settings, budget_minutes=10**6, parallel_jobs=parallel_jobs)
    begun = time.perf_counter()
    pool = JobPool(kind.events, context, config, tools)
    served = list(pool.served(keys, True, lease_wait_seconds=0.0))
    assert [one.error for one in served] == [None] * jobs
    return time.perf_counter() - begun


def test_50_small_jobs_at_the_same_time_beside_one_after_the_other(comparison: Comparison) -> None:
    written = written_jobs()

    def took(parallel_jobs: int) -> float:
        return seconds(Slow(copied(written), REQUEST_SECONDS), InProcessRunner(), parallel_jobs)

    assert comparison.report([took(4)], [took(1)], goal=0.35) < 0.6


def on_spark(url: str, jobs: int) -> None:
    """Print the seconds of a batch whose merges run on Spark, with the start of the session."""
    spark = SparkSessionResource(master="local[2]")
    runner = SparkRunner(spark=spark, in_process_mb=0, spark_from_files=0, spark_from_objects=0)
    print(seconds(open_store(url), runner, parallel_jobs=4, jobs=jobs))


def test_50_small_jobs_on_spark_beside_one(comparison: Comparison, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    memory = written_jobs()
    for one in memory.list(""):
        path = root / one.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(memory.read(one.path))

    def took(jobs: int, turn: int) -> float:
        copy = shutil.copytree(root, tmp_path / f"{jobs}-{turn}")
        call = (
            f"from tests.benchmarks.test_batches import on_spark; on_spark({str(copy)!r}, {jobs})"
        )
        done = subprocess.run(
            [sys.executable, "-c", call],
            env={**os.environ, "PYTHONPATH": os.getcwd()},
            capture_output=True,
            text=True,
            check=True,
        )
        return float(done.stdout.splitlines()[-1])

    many, single = zip(*((took(JOBS, turn), took(1, turn)) for turn in range(ROUNDS)), strict=True)
    assert comparison.report(list(many), list(single), goal=2.0) < 4.0
