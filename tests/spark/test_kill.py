"""SIGKILL on Spark: whatever moment it comes at, nothing is lost and nothing comes twice."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from arroyo_dagster.errors import NotFoundError
from arroyo_dagster.state.backend import ParquetBackend
from arroyo_dagster.state.local.pipeline import run_pipeline as run_in_process
from arroyo_dagster.state.storage.open import open_store
from tests.spark.run_words import ROWS, ROWS_PER_EPOCH, pipeline_in
from tests.spark.words import newest, output_of, tables_of

PROJECT = Path(__file__).parents[2]


def _kill_and_finish(tmp_path: Path, kills: int, seed: int) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    store = open_store(f"file://{tmp_path}/state")
    pipeline = pipeline_in(str(tmp_path), seed)
    last = ROWS // ROWS_PER_EPOCH
    backend = ParquetBackend(store, pipeline.paths)
    for kill in range(1, kills + 1):
        # At any moment of the epochs that follow: not always behind the same call.
        _run(tmp_path, seed, backend, kill * last // (kills + 1), chance.uniform(0, 0.6))
    _run(tmp_path, seed, backend, None, 0)
    plain = open_store(f"file://{tmp_path}/plain/state")
    undisturbed = pipeline_in(f"{tmp_path}/plain", seed)
    run_in_process(undisturbed, plain)
    assert tables_of(store, newest(store, pipeline)) == tables_of(
        plain, newest(plain, undisturbed)
    )
    assert output_of(tmp_path / "output") == output_of(tmp_path / "plain" / "output")
    generation = newest(store, pipeline).worker_generation
    assert generation == kills + 1


def _run(
    tmp_path: Path, seed: int, backend: ParquetBackend, until_epoch: int | None, more: float
) -> None:
    log = tmp_path / "log"
    with log.open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.spark.run_words", str(tmp_path), str(seed)],
            cwd=PROJECT,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        if until_epoch is None:
            assert process.wait(120) == 0, log.read_text()
            return
        deadline = time.monotonic() + 120
        while _newest_epoch(backend) < until_epoch:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        time.sleep(more)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _newest_epoch(backend: ParquetBackend) -> int:
    try:
        return max(backend.epochs(), default=0)
    except NotFoundError:
        return 0


def test_a_run_killed_twice_goes_on_exactly_once(tmp_path: Path) -> None:
    _kill_and_finish(tmp_path, kills=2, seed=int(time.time()))


@pytest.mark.soak
def test_a_run_killed_ten_times_goes_on_exactly_once(tmp_path: Path) -> None:
    _kill_and_finish(tmp_path, kills=10, seed=int(time.time()))
