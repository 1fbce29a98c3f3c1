"""How much memory an edit, a fork and an evolve of 256 MB of state take, and of 1 GB.

Each is a process of its own; what counts is the most memory it ever had, less what the imports
take.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest

from arroyo_dagster.state import Layout, open_store
from tests.evolved_jobs import COUNT, EXPIRING, LEAST, Column, Sql, sql_job
from tests.formats import ExpiringTimeKeyConfig, memory_schema
from tests.surgery_jobs import BEGAN, NANOS

MEGABYTE = 1 << 20
EPOCHS = 10
PAYLOAD = 100
BYTES: Column = ("max(payload)[value]", pa.binary(), True)
SQL = Sql(
    window=(COUNT, BYTES),
    totals=(COUNT, BYTES),
    left=(("payload", pa.binary(), True),),
    distinct=(),
    without=("b", "s"),
)
NOW = replace(SQL, window=(BYTES, COUNT, LEAST), totals=(BYTES, COUNT, LEAST))
CHANGED = tuple(
    word for name in ("window", "totals") for word in ("--map", f"{SQL.ids[name]}={NOW.ids[name]}")
)
SINCE = "1970-01-02T03:47:25Z"

_RUN = """
import json, sys
from arroyo_dagster import cli
import arroyo_dagster.cli.surgery.commands, arroyo_dagster.cli.surgery.evolve
import arroyo_dagster.cli.surgery.fork
from arroyo_dagster.state import default_catalogue, hash_key
hash_key("warm"), default_catalogue()
def peak():
    # Of this process alone: ru_maxrss of a child begins with that of whoever started it.
    text = open("/proc/self/status").read()
    return int(text.partition("VmHWM:")[2].split()[0]) * 1024
before = peak()
cli.main(json.loads(sys.argv[1]), standalone_mode=False)
print(json.dumps(peak() - before))
"""


def run(url: str, *command: str) -> tuple[float, str]:
    """The most memory in MB that a command took, and what it printed."""
    words = [*command, "--yes", "--url", url]
    done = subprocess.run(
        [sys.executable, "-c", _RUN, json.dumps(words)],
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *printed, taken = done.stdout.splitlines()
    return json.loads(taken) / MEGABYTE, "\n".join(printed)


def write_state(url: str, table: str, megabytes: int) -> None:
    """A job with so many MB of random bytes in one of its tables, and two to take its state."""
    # Any store does: the job only puts objects.
    store = cast(Any, open_store(url))
    job = sql_job(Layout.LEGACY, "job_a", SQL, store=store, epochs=1)
    sql_job(Layout.LEGACY, "job_b", SQL, store=store, base=7, epochs=1)
    sql_job(Layout.LEGACY, "job_c", NOW, store=store, base=7, epochs=1)
    config = SQL.config(table)
    assert isinstance(config.config, ExpiringTimeKeyConfig)
    chance = np.random.default_rng(7)
    count = megabytes * MEGABYTE // EPOCHS // (PAYLOAD + 16)
    for epoch in range(EPOCHS):
        columns: list[pa.Array] = []
        for field in memory_schema(config.config):
            if field.name == "k":
                keys = chance.permutation(count) + epoch * count
                columns.append(pa.array([f"key-{n}" for n in keys]))
            elif field.name == "_timestamp":
                seconds = BEGAN * 1000 + (30 + np.arange(count) % 30) * NANOS
                columns.append(pa.array(seconds, field.type))
            elif field.name == "_generation":
                columns.append(pa.array(np.full(count, epoch + 1), field.type))
            elif field.type == pa.binary():
                raw = pa.py_buffer(chance.bytes(count * PAYLOAD))
                ends = pa.py_buffer(np.arange(0, (count + 1) * PAYLOAD, PAYLOAD, dtype=np.int32))
                columns.append(pa.Array.from_buffers(pa.binary(), count, [None, ends, raw]))
            else:
                columns.append(pa.array(np.arange(count), field.type))
        rows = pa.Table.from_arrays(columns, schema=memory_schema(config.config))
        job.write({(SQL.ids[EXPIRING[table]], config): rows})


@pytest.mark.parametrize("table", ["t", "a", "left"])
def test_memory_for_the_surgery_of_a_gigabyte(table: str, tmp_path: Path) -> None:
    operator = SQL.ids[EXPIRING[table]]
    commands = {
        "delete-key": ("edit", "delete-key", "job_a", "key-77"),
        "retain": ("edit", "retain", "job_a", SINCE),
        "fork": ("fork", "job_a", "job_b"),
        "evolve": ("evolve", "job_a", "job_c", *CHANGED),
    }
    if table == "a":
        del commands["retain"]  # it leaves aggregates as they are
    found: dict[str, list[float]] = {name: [] for name in commands}
    for megabytes in (256, 1024):
        folder = tmp_path / str(megabytes)
        write_state(str(folder), table, megabytes)
        stored = sum(
            one.stat().st_size for one in folder.rglob(f"operator-{operator}/table-{table}-*")
        )
        assert stored > 0.9 * megabytes * MEGABYTE
        for name, command in commands.items():
            assume = ("--assume", f"{command[2]}=stopped")
            taken, printed = run(str(folder), *command, *assume, "--quiet", "0")
            assert " done at epoch " in printed, printed
            found[name].append(taken)
        shutil.rmtree(folder)
    for name, (small, large) in found.items():
        print(f"\n{table} {name}: {small:.0f} MB for 256 MB, {large:.0f} MB for 1 GB; floor 768")
        assert large < 768
