"""SIGKILL a run again and again, and compare what it comes to with a run left alone."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from arroyo_dagster.errors import NotFoundError
from arroyo_dagster.state.backend import ParquetBackend
from arroyo_dagster.state.local.pipeline import run_pipeline
from arroyo_dagster.state.storage.open import open_store
from tests.run_words import ROWS, ROWS_PER_EPOCH, pipeline_in
from tests.words import newest, output_of, tables_of

PROJECT = Path(__file__).parents[1]
SECONDS = 300


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
    command = ["tests.run_words", str(folder), str(seed), where]
    for until in [*(kill * epochs // (kills + 1) for kill in range(1, kills + 1)), None]:
        run_until_killed(
            command, folder / "log", lambda: _newest_epoch(backend), until, chance, within_seconds
        )
    plain = open_store(f"file://{folder}/plain/state")
    undisturbed = pipeline_in(f"{folder}/plain", seed, where)
    run_pipeline(undisturbed, plain)
    done = newest(store, pipeline)
    assert tables_of(store, done) == tables_of(plain, newest(plain, undisturbed))
    assert output_of(folder / "output") == output_of(folder / "plain" / "output")
    assert done.worker_generation is not None
    assert 1 < done.worker_generation <= kills + 1


def run_until_killed(
    command: Sequence[str],
    log: Path,
    newest_epoch: Callable[[], int],
    until_epoch: int | None,
    chance: random.Random,
    within_seconds: float,
) -> None:
    """Run a command of ours with everything it starts, and SIGKILL it behind an epoch.

    Args:
        log: where its output goes, behind what is there.
        newest_epoch: how far it is.
        until_epoch: the epoch; None = it is left alone, and ends well.
        within_seconds: up to how long behind the epoch the kill comes.
    """
    with log.open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
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
        while newest_epoch() < until_epoch and process.poll() is None:
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.03)  # what it looks at costs the machine as much as what it waits for
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
