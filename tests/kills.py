"""SIGKILL a run again and again, and compare what it comes to with a run left alone."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from click.testing import CliRunner

from arroyo_dagster.cli import main
from arroyo_dagster.errors import NotFoundError
from arroyo_dagster.state.backend import ParquetBackend
from arroyo_dagster.state.local.pipeline import run_pipeline
from arroyo_dagster.state.pipeline import Pipeline
from arroyo_dagster.state.storage.open import open_store
from arroyo_dagster.state.storage.store import ObjectStore
from tests.run_words import ROWS, ROWS_PER_EPOCH, pipeline_in
from tests.seeds import run_seed
from tests.stories import flags, newest_epoch, outcome, run_story, write_story
from tests.words import newest, output_of, tables_of

PROJECT = Path(__file__).parents[1]
SECONDS = 300


def kill_and_finish(
    folder: Path,
    where: str,
    *,
    kills: int,
    within_seconds: float,
    finish: Callable[[Pipeline, ObjectStore], object] = run_pipeline,
) -> None:
    """Run `tests.run_words`, kill it at random moments of its whole length, let it end, compare.

    Args:
        finish: the last run, which is left alone, in this process.
        within_seconds: up to how long behind the epoch chosen each kill comes: about an epoch or
            two, so that every moment of one is met.
    """
    seed = run_seed()
    print(f"seed {seed}; to repeat: SOAK_SEED={seed}")
    chance = random.Random(seed)
    store = open_store(f"file://{folder}/state")
    pipeline = pipeline_in(str(folder), seed, where)
    backend = ParquetBackend(store, pipeline.paths)
    epochs = ROWS // ROWS_PER_EPOCH[where]
    command = ["tests.run_words", str(folder), str(seed), where]
    for kill in range(1, kills + 1):
        run_until_killed(
            command,
            folder / "log",
            lambda: _newest_epoch(backend),
            kill * epochs // (kills + 1),
            chance,
            within_seconds,
        )
    finish(pipeline, store)
    plain = open_store(f"file://{folder}/plain/state")
    undisturbed = pipeline_in(f"{folder}/plain", seed, where)
    run_pipeline(undisturbed, plain)
    done = newest(store, pipeline)
    assert tables_of(store, done) == tables_of(plain, newest(plain, undisturbed))
    assert output_of(folder / "output") == output_of(folder / "plain" / "output")
    assert done.worker_generation is not None
    assert 1 < done.worker_generation <= kills + 1


def kill_and_finish_story(
    folder: Path, *, kills: int, sentences: int, rows_per_epoch: int, how: Sequence[str] = ()
) -> None:
    """Run the dataflow of `stories.py` by the command line, kill it at random moments, let it end
    in this process, compare with a run left alone."""
    seed = run_seed()
    print(f"seed {seed}; to repeat: SOAK_SEED={seed}")
    chance = random.Random(seed)
    killed, plain = folder / "killed", folder / "plain"
    write_story(killed, sentences, seed)
    write_story(plain, sentences, seed)
    store = open_store(f"file://{killed}/state")
    rounds = sentences // rows_per_epoch
    command = ["sdf", "run", str(killed / "story.yaml"), *flags(killed, rows_per_epoch)]
    command += ["--url", store.url, "--flush-open", "--keep-epochs", "4", *how]
    for kill in range(1, kills + 1):
        service = chance.choice(["split", "count", "follow", "gather"])
        run_until_killed(
            ["arroyo_dagster.cli", *command],
            killed / "log",
            partial(newest_epoch, store, service),
            kill * rounds // (kills + 1),
            chance,
            0.15,
        )
    done = CliRunner().invoke(main, command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    undisturbed = open_store(f"file://{plain}/state")
    run_story(undisturbed, plain, rows_per_epoch=rows_per_epoch)
    assert outcome(store, killed) == outcome(undisturbed, plain)


def run_until_killed(
    command: Sequence[str],
    log: Path,
    newest_epoch: Callable[[], int],
    until_epoch: int,
    chance: random.Random,
    within_seconds: float,
) -> None:
    """Run a command of ours with everything it starts, and SIGKILL it behind an epoch.

    Args:
        log: where its output goes, behind what is there.
        newest_epoch: how far it is.
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
