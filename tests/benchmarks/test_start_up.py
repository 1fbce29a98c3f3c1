"""Processor time of the commands that read, against the import of what each needs most."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from arroyo_dagster.state import open_store
from tests.jobs import run_word_job

ROUNDS = 7
NEEDED = 0.35
"""Seconds that a command may take in any case."""

PARQUET = "import pyarrow.parquet"
COMPUTE = "import pyarrow.parquet, pyarrow.compute"
POLARS = "import polars"
COMMANDS = {
    "jobs": PARQUET,
    "epochs main": PARQUET,
    "show main": POLARS,
    "sql @pins main": POLARS,
    "sql @journal main": POLARS,
    "sql @offsets main": POLARS,
    "sql @watermarks main": POLARS,
    "rows main count counts": COMPUTE,
    "verify main": COMPUTE,
    "health": COMPUTE,
    "compact plan": COMPUTE,
    "compact plan main": COMPUTE,
    "compact run main": COMPUTE,
    "rollback main 1": COMPUTE,
    "gc plan expire main --keep 9": COMPUTE,
    "gc explain words/main/": COMPUTE,
    "gc purge main": PARQUET,
    "sql @leases": POLARS,
}
CALLED = "import click; from arroyo_dagster.cli import main; main({words!r}, standalone_mode=False)"


def processor_seconds(code: str) -> float:
    """Run a program, and return the user and system time that it took."""
    # As an installed package: compiled once.
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    child = os.posix_spawn(
        sys.executable,
        [sys.executable, "-c", code],
        kept,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_WRONLY, 0)
            for fd in (sys.stdout.fileno(), sys.stderr.fileno())
            if fd in (1, 2)
        ],
    )
    _, _, used = os.wait4(child, 0)
    return used.ru_utime + used.ru_stime


def loading(words: Sequence[str]) -> str:
    """The command's `--help`: it is imported, and does nothing."""
    return CALLED.format(words=[*words, "--help"])


@pytest.mark.parametrize("command", COMMANDS)
def test_processor_time(command: str, tmp_path: Path) -> None:
    run_word_job(open_store(str(tmp_path)), rows=24, rows_per_epoch=2, sinks=0, keep_epochs=None)
    words = command.split()
    whole = CALLED.format(words=[*words, "--url", str(tmp_path)])
    programs = (COMMANDS[command], loading(words), whole)
    taken: list[tuple[float, ...]] = []
    for _ in range(ROUNDS + 1):
        taken.append(tuple(map(processor_seconds, programs)))
    needed, loaded, done = (statistics.median(column) for column in zip(*taken[1:], strict=True))
    ratio = statistics.median(row[2] / row[0] for row in taken[1:])
    print(
        f"\n{command}: {done:.3f} s, of which {loaded:.3f} s load the command; "
        f"`{COMMANDS[command]}` {needed:.3f} s, ratio {ratio:.2f}, "
        f"goal 1.5 or {NEEDED} s"
    )
