"""SIGKILL a run again and again, and compare what it comes to with a run left alone."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from arroyo_dagster.errors import NotFoundError
from arroyo_dagster.state.backend import ParquetBackend
from arroyo_dagster.state.local.pipeline import run_pipeline
from arroyo_dagster.state.storage.open import open_store
from tests.run_words import ROWS, ROWS_PER_EPOCH, pipeline_in
from tests.words import newest, output_of, tables_of

PROJECT = Path(__file__).parents[1]
SECONDS = 120


def kill_and_finish(folder: Path, where: str, *, kills: int, within_seconds: float) -> None:
    """Run `tests.run_words`, kill it at random moments of its whole length, let it end, compare.

    Args:
        within_seconds: up to how long behind the epoch chosen each kill comes: about an epoch or
            two, so that every moment of one is met.
    """
    seed = time.time_ns() % 1_000_000
    print(f"seed {seed}")
    chance = random.Random(seed)
    store = open_store(f"file://{folder}/state")
    pipeline = pipeline_in(str(folder), seed, where)
    backend = ParquetBackend(store, pipeline.paths)
    epochs = ROWS // ROWS_PER_EPOCH[where]
    for kill in range(1, kills + 1):
        _run(folder, seed, where, backend, kill * epochs // (kills + 1), chance, within_seconds)
    _run(folder, seed, where, backend, None, chance, 0)
    plain = open_store(f"file://{folder}/plain/state")
    undisturbed = pipeline_in(f"{folder}/plain", seed, where)
    run_pipeline(undisturbed, plain)
    done = newest(store, pipeline)
    assert tables_of(store, done) == tables_of(plain, newest(plain, undisturbed))
    assert output_of(folder / "output") == output_of(folder / "plain" / "output")
    assert done.worker_generation is not None
    assert 1 < done.worker_generation <= kills + 1


def _run(
    folder: Path,
    seed: int,
    where: str,
    backend: ParquetBackend,
    until_epoch: int | None,
    chance: random.Random,
    within_seconds: float,
) -> None:
    log = folder / "log"
    with log.open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.run_words", str(folder), str(seed), where],
            cwd=PROJECT,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        if until_epoch is None:
            assert process.wait(SECONDS) == 0, log.read_text()
            return
        deadline = time.monotonic() + SECONDS
        while _newest_epoch(backend) < until_epoch and process.poll() is None:
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.005)
        time.sleep(chance.uniform(0, within_seconds))
        assert process.poll() in (None, 0), log.read_text()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _newest_epoch(backend: ParquetBackend) -> int:
    try:
        return max(backend.epochs(), default=0)
    except NotFoundError:
        return 0
