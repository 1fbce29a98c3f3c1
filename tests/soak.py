"""A job of one epoch a second, killed now and then, with compaction and gc beside it, for an hour.

    python -m tests.soak FOLDER --minutes 60 --kills 10

Both processes are sampled every few seconds: `FOLDER/samples.csv` holds seconds, epoch, objects,
bytes, and the resident memory of writer and maintainer. In the end the tables and the output are
compared with those of a run that nobody disturbed, and nothing may have grown.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

from click.testing import CliRunner

from arroyo_dagster.cli import main as arroyo_state
from arroyo_dagster.engine import Pipeline, run_pipeline
from arroyo_dagster.errors import NotFoundError
from arroyo_dagster.state import ParquetBackend, open_store, verify_job
from tests.words import newest, output_of, random_words, tables_of, words_pipeline

ROWS_PER_EPOCH = 20
KEEP = 20
SAMPLE_SECONDS = 5.0
MAINTENANCE_SECONDS = 5.0
PASSING = ("is leased by", "somebody else", "changed", "ran out", "lease")
"""Words of errors that two processes beside each other may meet: the next round does the work."""


def soak_pipeline(folder: Path, minutes: float, seed: int, **options: int | None) -> Pipeline:
    """The pipeline, with rows for so many minutes at one epoch a second."""
    rows = random_words(int(minutes * 60) * ROWS_PER_EPOCH, seed)
    output = f"file://{folder}/output"
    return words_pipeline(rows, output, rows_per_epoch=ROWS_PER_EPOCH, **options)


def write(folder: Path, minutes: float, seed: int, interval_seconds: float) -> None:
    """Run the job to its end; every other one is left to gc, so that both clean up."""
    pipeline = soak_pipeline(folder, minutes, seed, keep_epochs=2 * KEEP)
    store = open_store(f"file://{folder}/state")
    run_pipeline(pipeline, store, interval_seconds=interval_seconds)


def maintain(folder: Path) -> None:
    """Compact and collect by the commands that a user types, until killed."""
    url = ("--url", f"file://{folder}/state")
    job = "words/main"
    rounds = 0
    while True:
        commands = [
            ("compact", "run", job, "--yes"),
            ("gc", "run", "expire", job, "--keep", str(KEEP), "--yes"),
        ]
        if rounds % 6 == 5:
            commands.append(("gc", "run", "orphans", job, "--older-than", "1h", "--yes"))
            commands.append(("verify", job, "--level", "1"))
        for command in commands:
            done = CliRunner().invoke(arroyo_state, [*command, *url])
            words = " ".join((done.output or "").split())
            print(f"{time.time():.1f} {' '.join(command[:3])}: {done.exit_code} {words[-300:]}")
            if done.exit_code and not any(passing in words for passing in PASSING):
                print(f"FAILED {done.exception!r}")
            sys.stdout.flush()
        rounds += 1
        time.sleep(MAINTENANCE_SECONDS)


# ---- the driver ----------------------------------------------------------------------------------


class _Child:
    """A process of this module, started again whenever it is killed."""

    def __init__(self, folder: Path, *words: str) -> None:
        self._folder = folder
        self._words = words
        self.kills = 0
        self.process = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        with (self._folder / f"{self._words[0]}.log").open("ab") as log:
            command = [sys.executable, "-m", "tests.soak", str(self._folder), *self._words]
            return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.kills += 1
        self.process = self._started()

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def memory_bytes(self) -> int:
        try:
            pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        except (OSError, IndexError):
            return 0
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


def soak(folder: Path, minutes: float, kills: int, seed: int, interval_seconds: float) -> None:
    """Run it all, then compare.

    Raises:
        AssertionError: rows differ, maintenance failed, or something grew.
    """
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(seed)
    expected_seconds = minutes * 60 * max(interval_seconds, 0.1)
    kill_at = sorted(chance.uniform(0.05, 0.95) * expected_seconds for _ in range(kills))
    began = time.monotonic()
    arguments = ("--minutes", str(minutes), "--seed", str(seed))
    writer = _Child(folder, "--write", *arguments, "--interval", str(interval_seconds))
    backend = ParquetBackend(
        open_store(f"file://{folder}/state"), soak_pipeline(folder, 0.05, seed).paths
    )
    while _epoch(backend) < 1:
        time.sleep(0.2)
    maintainer = _Child(folder, "--maintain")
    try:
        with (folder / "samples.csv").open("w", newline="") as out:
            samples = csv.writer(out)
            samples.writerow(("seconds", "epoch", "objects", "bytes", "writer", "maintainer"))
            while writer.process.poll() is None:
                seconds = time.monotonic() - began
                if kill_at and seconds >= kill_at[0]:
                    kill_at.pop(0)
                    (writer if chance.random() < 0.7 else maintainer).kill()
                memory = (writer.memory_bytes(), maintainer.memory_bytes())
                samples.writerow((f"{seconds:.1f}", _epoch(backend), *_objects(folder), *memory))
                out.flush()
                time.sleep(SAMPLE_SECONDS)
    finally:
        writer.end()
        maintainer.end()
    assert writer.process.returncode == 0, (folder / "--write.log").read_text()[-2000:]
    print(f"{writer.kills} kills of the writer, {maintainer.kills} of the maintainer")
    _compare(folder, minutes, seed)
    _check_flat(folder)


def _epoch(backend: ParquetBackend) -> int:
    try:
        return max(backend.epochs(), default=0)
    except NotFoundError:
        return 0


def _objects(folder: Path) -> tuple[int, int]:
    """How many objects there are, and their bytes without the journal, which is kept for ever."""
    count = size = 0
    for where, _, names in os.walk(folder / "state"):
        for name in names:
            count += 1
            if "/journal/" in where or where.endswith("/journal"):
                continue
            try:
                size += os.stat(os.path.join(where, name)).st_size
            except FileNotFoundError:
                continue  # gone since it was listed
    return count, size


def _compare(folder: Path, minutes: float, seed: int) -> None:
    plain = folder / "undisturbed"
    undisturbed = soak_pipeline(plain, minutes, seed, keep_epochs=2 * KEEP)
    store = open_store(f"file://{folder}/state")
    pipeline = soak_pipeline(folder, minutes, seed)
    quiet = open_store(f"file://{plain}/state", options={})
    run_pipeline(undisturbed, quiet)
    assert tables_of(store, newest(store, pipeline)) == tables_of(quiet, newest(quiet, undisturbed))
    rows = output_of(folder / "output")
    assert rows == output_of(plain / "output")
    verdict = verify_job(store, pipeline.paths, level=2).verdict
    assert verdict.errors == (), verdict.errors
    failed = [
        line
        for line in (folder / "--maintain.log").read_text().splitlines()
        if line.startswith("FAILED")
    ]
    assert not failed, failed
    print(f"{len(rows)} rows of output, as of an undisturbed run; verify finds no error")


def _check_flat(folder: Path) -> None:
    """The last third of the samples must not lie above the middle third by more than a quarter."""
    with (folder / "samples.csv").open() as found:
        rows = [
            {name: float(value) for name, value in row.items()} for row in csv.DictReader(found)
        ]
    third = len(rows) // 3
    for name in ("objects", "bytes", "writer", "maintainer"):
        middle = statistics.median(row[name] for row in rows[third : 2 * third])
        last = statistics.median(row[name] for row in rows[2 * third :])
        print(f"{name}: median {middle:.0f} in the middle third, {last:.0f} in the last")
        assert last <= middle * 1.25, name


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two epochs")
    parser.add_argument("--write", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--maintain", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    given = _arguments()
    if given.write:
        write(given.folder, given.minutes, given.seed, given.interval)
    elif given.maintain:
        maintain(given.folder)
    else:
        print(f"seed {given.seed}")
        soak(given.folder, given.minutes, given.kills, given.seed, given.interval)
