"""State by key: the cost of a change beside the number of keys, memory, restore, bytes of an epoch.

`python -m tests.benchmarks.test_keyed_state` prints the table of docs/state-by-key.md as CSV, for
docs/site/keyed_state.csv.
"""

from __future__ import annotations

import gc
import json
import pickle
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from arroyo_dagster.engine import ValueState, keyed_state
from arroyo_dagster.state import (
    DeleteKey,
    KeyTimeView,
    ObjectStore,
    global_table_config,
    open_store,
    timestamp_table_config,
)
from arroyo_dagster.state.codec.operations import encode_key
from tests.benchmarks.conftest import Comparison
from tests.formats import encode_operation
from tests.keyed_subtasks import TIMED, Subtasks

SIZES = (10**4, 10**5, 10**6, 10**7)
BATCH = 1000
ROUNDS, WARM = 51, 5
SLICE = 1 << 16
_MODULE = "tests.benchmarks.test_keyed_state"
KEY_AND_VALUE_BYTES = 11 + 8
"""A key `k0000000000`, and an int64."""


def keys_of(numbers: Any) -> pa.Array:
    return pa.array([f"k{number:010}" for number in numbers.tolist()], pa.string())


def filled(size: int, store: ObjectStore | None = None) -> Subtasks:
    """An operator with this many keys, at its first epoch."""
    tasks = Subtasks(keyed_state("t", str, int), store=store)
    manager = tasks.open()
    state = manager.get_keyed_state("t", ValueState)
    for first in range(0, size, SLICE):
        numbers = np.arange(first, min(size, first + SLICE))
        state.put_many(keys_of(numbers), pa.array(numbers))
    tasks.write(manager)
    return tasks


class Opened:
    """One size: the state in memory, and what is measured of it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.tasks = filled(size)
        self.chance = np.random.default_rng(size)
        begun = time.perf_counter()
        self.manager = self.tasks.open()
        self.state = self.manager.get_keyed_state("t", ValueState)
        self.restore_seconds = time.perf_counter() - begun
        assert len(self.state) == size
        self.micros: dict[str, list[float]] = {"one": [], "batch": [], "epoch": []}

    def measure(self, name: str) -> None:
        """Change one key, or a batch of keys, without a barrier or with one."""
        keys = keys_of(np.unique(self.chance.integers(0, self.size, 1 if name == "one" else BATCH)))
        values = pa.array(np.arange(len(keys)))
        change = self._epoch if name == "epoch" else self._change
        begun = time.perf_counter()
        change(keys, values)
        self.micros[name].append((time.perf_counter() - begun) * 1e6 / len(keys))

    def _change(self, keys: pa.Array, values: pa.Array) -> None:
        """Get, delete and insert each key."""
        self.state.get_many(keys)
        self.state.remove_many(keys)
        self.state.put_many(keys, values)

    def _epoch(self, keys: pa.Array, values: pa.Array) -> None:
        self._change(keys, values)
        self.tasks.write(self.manager)

    def epoch_bytes(self) -> int:
        """The bytes of the data file of an epoch in which one key changed."""
        self.state.put_many(keys_of(np.array([1])), pa.array([1]))
        self.tasks.write(self.manager)
        return len(self.tasks.store.read(self.tasks.files("t")[-1].path))


@dataclass(frozen=True)
class Figures:
    """One row of the table: times in microseconds for each key, medians of the rounds."""

    keys: int
    one_micros: float
    batch_micros: float
    epoch_micros: float
    memory_bytes: float
    restore_seconds: float
    epoch_bytes: int


def measured(sizes: tuple[int, ...] = SIZES, rounds: int = ROUNDS) -> list[Figures]:
    """Measure all sizes in turn, so that a busy moment of the machine hits all of them."""
    memory = {size: memory_of(size) for size in sizes}
    opened = [Opened(size) for size in sizes]
    gc.collect()
    gc.disable()
    for name in ("one", "batch", "epoch"):
        for turn in range(WARM + rounds):
            for one in opened:
                one.measure(name)
                if turn < WARM:
                    one.micros[name].clear()
    gc.enable()
    return [
        Figures(
            keys=one.size,
            one_micros=round(statistics.median(one.micros["one"])),
            batch_micros=round(statistics.median(one.micros["batch"]), 2),
            epoch_micros=round(statistics.median(one.micros["epoch"]), 2),
            memory_bytes=memory[one.size],
            restore_seconds=round(one.restore_seconds, 2),
            epoch_bytes=one.epoch_bytes(),
        )
        for one in opened
    ]


def memory_of(size: int) -> float:
    """Bytes for each key beyond key and value: what a process grows by when it restores the state
    that another has written.
    """
    with tempfile.TemporaryDirectory() as folder:
        for part in ("write", "read"):
            answer = subprocess.run(
                [sys.executable, "-m", _MODULE, part, folder, str(size)],
                capture_output=True,
                text=True,
                check=True,
            )
    return round(float(answer.stdout), 1)


def _resident() -> int:
    gc.collect()
    pa.default_memory_pool().release_unused()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _part_of_memory(part: str, folder: str, size: int) -> None:
    place = Path(folder, "newest")
    store = open_store(f"file://{folder}/state")
    if part == "write":
        tasks = filled(size, store)
        place.write_bytes(pickle.dumps(tasks.newest))
        return
    filled(1000).open().get_keyed_state("t", ValueState)  # what the first use loads
    tasks = Subtasks(keyed_state("t", str, int), store=store)
    tasks.newest = pickle.loads(place.read_bytes())
    manager = tasks.open()
    before = _resident()
    state = manager.get_keyed_state("t", ValueState)
    assert len(state) == size
    print((_resident() - before) / size - KEY_AND_VALUE_BYTES)


# ---- benchmarks ----------------------------------------------------------------------------------


def test_a_change_costs_the_same_at_any_number_of_keys() -> None:
    """Goals: within 1.5 of each other; 150 bytes a key; 60 s to restore 10^7 keys."""
    figures = measured()
    print()
    for one in figures:
        print(json.dumps(asdict(one)))
    for name in ("one_micros", "batch_micros", "epoch_micros", "epoch_bytes"):
        values = [getattr(one, name) for one in figures]
        print(f"{name}: largest beside smallest {max(values) / min(values):.2f}, goal 1.5")
    for one in figures:
        print(f"{one.keys:>9} keys: {one.memory_bytes} bytes a key beyond key and value, goal 150")
    print(f"restore of {figures[-1].keys} keys: {figures[-1].restore_seconds} s, goal 60")


def timed_rows(numbers: Any, nanos: int) -> pa.Table:
    times = np.full(len(numbers), nanos)
    return pa.table([keys_of(numbers), numbers, times], schema=TIMED)


def test_a_change_of_a_view_by_key_costs_the_same_at_any_number_of_rows() -> None:
    """`KeyTimeView`: one get, delete and insert took 17, 185 and 1,610 ms at the first sizes."""
    config = timestamp_table_config("t", retention_micros=1 << 60, schema=TIMED, keys=["k"])
    views: dict[int, KeyTimeView] = {}
    for size in SIZES[:3]:
        views[size] = Subtasks(config).open().get_key_time_table("t")
        views[size].insert(timed_rows(np.arange(size), 1))
        views[size].get("k0000000001")
    times: dict[int, list[float]] = {size: [] for size in views}
    chance = np.random.default_rng(1)
    for turn in range(ROUNDS):
        for size, view in views.items():
            (number,) = chance.integers(0, size, 1)
            row = timed_rows(np.array([number]), 2 + turn)
            key = row["k"][0].as_py()
            begun = time.perf_counter()
            view.get(key)
            view.delete_key(key)
            view.insert(row)
            times[size].append(time.perf_counter() - begun)
    medians = {size: statistics.median(found) * 1e3 for size, found in times.items()}
    print("\n" + ", ".join(f"{size} rows: {found:.2f} ms" for size, found in medians.items()))
    print(f"largest beside smallest {max(medians.values()) / min(medians.values()):.2f}, goal 1.5")


def test_merge_of_a_batch_beside_a_loop_over_its_rows(comparison: Comparison) -> None:
    """A global table of a thousand keys, in batches of 10,000 rows."""
    chance = np.random.default_rng(1)
    keys, values = keys_of(chance.integers(0, 1000, 10_000)), pa.array(np.arange(10_000))
    tasks = Subtasks(global_table_config("t", key=str, value=int))

    def merged(view: Any) -> None:
        view.merge(keys, values, "sum")

    def by_row(view: Any) -> None:
        for key, value in zip(keys.to_pylist(), values.to_pylist(), strict=True):
            view.insert(key, view.get(key, 0) + value)

    def view() -> Any:
        return tasks.open().get_global_keyed_state("t", str, int)

    comparison.ratio(merged, by_row, goal=0.2, prepare=view)


@pytest.mark.parametrize("rows", [10_000])
def test_deletes_by_columns_beside_one_by_one(comparison: Comparison, rows: int) -> None:
    """And which share of an epoch that deletes and inserts every key they are; it was 90 %."""
    config = timestamp_table_config("t", retention_micros=1 << 60, schema=TIMED, keys=["k"])
    table = timed_rows(np.arange(rows), 1)

    def by_columns(manager: Any) -> None:
        manager.get_uncached_key_value_view("t").delete_keys(table)

    def one_by_one(manager: Any) -> None:
        fields = [TIMED.field(0)]
        for key in table["k"].to_pylist():
            encode_operation(DeleteKey(encode_key(fields, [key])))

    tasks = Subtasks(config)
    comparison.ratio(by_columns, one_by_one, goal=0.2, prepare=tasks.open)
    shares = []
    for _ in range(ROUNDS):
        manager = tasks.open()
        view = manager.get_uncached_key_value_view("t")
        begun = time.perf_counter()
        view.delete_keys(table)
        deleted = time.perf_counter()
        view.insert(table)
        tasks.write(manager)
        shares.append((deleted - begun) / (time.perf_counter() - begun))
        tasks.newest = None
    print(f"share of delete_keys in such an epoch: {statistics.median(shares):.2f}, goal 0.3")


def _print_table() -> None:
    table = [asdict(one) for one in measured()]
    print(",".join(table[0]))
    for row in table:
        print(",".join(str(value) for value in row.values()))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _part_of_memory(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    else:
        _print_table()
