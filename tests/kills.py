"""SIGKILL a run again and again, and compare what it comes to with a run left alone."""

from __future__ import annotations

import contextlib
import glob
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
from click.testing import CliRunner

from arroyo_dagster import cli
from arroyo_dagster.engine import Pipeline, run_pipeline
from arroyo_dagster.errors import NotFoundError
from arroyo_dagster.state import ObjectStore, ParquetBackend, open_store
from tests import s3_servers
from tests.run_words import ROWS, ROWS_PER_EPOCH, pipeline_in
from tests.seeds import run_seed
from tests.stories import flags, newest_epoch, outcome, run_story, write_story
from tests.words import newest, output_of, tables_of

PROJECT = Path(__file__).parents[1]
SECONDS = 300
CLOCKS = ("+0", "+3m", "-4m")


def kill_and_finish(
    folder: Path,
    where: str,
    *,
    kills: int,
    within_seconds: float,
    finish: Callable[[Pipeline, ObjectStore], object] = run_pipeline,
    server: str | None = None,
    clocks: Sequence[str] = (),
) -> None:
    """Run `tests.run_words`, kill it at random moments of its whole length, let it end, compare.

    Args:
        finish: the last run, which is left alone, in this process.
        within_seconds: up to how long behind the epoch chosen each kill comes: about an epoch or
            two, so that every moment of one is met.
        server: of `s3_servers`, where the state lies; on local disk unless given.
        clocks: offsets of the clocks of the runs, as libfaketime takes them (`+3m`), in turn.
    """
    with _state_url(folder, server) as url:
        _kill_and_finish(folder, where, kills, within_seconds, finish, url, clocks)


@contextlib.contextmanager
def _state_url(folder: Path, server: str | None) -> Iterator[str]:
    if server is None:
        yield f"file://{folder}/state"
        return
    keys = s3_servers.options_of(server)
    names = {f"AWS_{name.upper()}": value for name, value in keys.items()}
    with s3_servers.s3_server(server, "kills") as endpoint, mock.patch.dict(os.environ, names):
        yield f"s3::http://{endpoint}/kills/state"


def _kill_and_finish(
    folder: Path,
    where: str,
    kills: int,
    within_seconds: float,
    finish: Callable[[Pipeline, ObjectStore], object],
    url: str,
    clocks: Sequence[str],
) -> None:
    seed = run_seed()
    print(f"seed {seed}; to repeat: SOAK_SEED={seed}")
    chance = random.Random(seed)
    store = open_store(url)
    pipeline = pipeline_in(str(folder), seed, where)
    backend = ParquetBackend(store, pipeline.paths)
    epochs = ROWS // ROWS_PER_EPOCH[where]
    command = ["tests.run_words", str(folder), str(seed), where, url]
    for kill in range(1, kills + 1):
        run_until_killed(
            command,
            folder / "log",
            lambda: _newest_epoch(backend),
            kill * epochs // (kills + 1),
            chance,
            within_seconds,
            {} if not clocks else clock_offset(clocks[kill % len(clocks)]),
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
    done = CliRunner().invoke(cli.main, command, catch_exceptions=False)
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
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run a command of ours with everything it starts, and SIGKILL it behind an epoch.

    Args:
        log: where its output goes, behind what is there.
        newest_epoch: how far it is.
        within_seconds: up to how long behind the epoch the kill comes.
        environment: variables that the command gets besides those of this process.
    """
    with log.open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=PROJECT,
            env={**os.environ, **(environment or {})},
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


def clock_offset(offset: str) -> dict[str, str]:
    """The environment of a process whose clock is off, by `libfaketime` (Debian: `faketime`)."""
    given = os.environ.get("LIBFAKETIME")
    found = [given] if given else glob.glob("/usr/lib/*/faketime/libfaketime.so.1")
    if not found:
        pytest.skip("libfaketime is not installed (Debian: apt-get install faketime)")
    return {"LD_PRELOAD": found[0], "FAKETIME": offset, "FAKETIME_DONT_FAKE_MONOTONIC": "1"}


def _newest_epoch(backend: ParquetBackend) -> int:
    try:
        return max(backend.epochs(), default=0)
    except NotFoundError:
        return 0
