"""What compaction costs beside peers, in one run: a table of floor, goal and measured.

Rates are compared: 1.0 is as fast as the peer, more is faster. Ours plans, merges, reads back what
it wrote, proves it the same and publishes it; peers read and write.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from arroyo_dagster.spark.compaction import run_compaction_on_spark
from arroyo_dagster.spark.session import get_session
from arroyo_dagster.spark.thresholds import SparkThresholds
from arroyo_dagster.state import (
    GLOBAL_KEY_VALUE_SCHEMA,
    CompactionPolicy,
    CompactionSettings,
    ParquetBackend,
    StatePath,
    global_table_config,
    open_store,
    plan_compaction,
    run_compaction,
    timestamp_table_config,
)
from arroyo_dagster.state.codec.parquet import encode_pair_columns
from arroyo_dagster.state.tables.merge.task import MergeTask, run_merge
from tests.fabricated import PATHS, publish, stored_rows, time_files
from tests.formats import ExpiringTimeKeyFiles, GlobalKeyedFiles

ALWAYS = SparkThresholds(size_bytes=0, files=0, objects=0)
FULL = CompactionSettings(policy=CompactionPolicy.FULL)
SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("a", pa.int64()),
        ("b", pa.float64()),
        ("c", pa.bool_()),
        ("d", pa.string()),
        pa.field("_timestamp", pa.timestamp("ns"), nullable=False),
    ]
)
CONFIG = timestamp_table_config("t", retention_micros=10**15, schema=SCHEMA, keys=["key"])
PAIRS = global_table_config("g", key=bytes, value=bytes)
SCALE = float(os.environ.get("ARROYO_BENCH_SCALE", "1"))
ROUNDS = int(os.environ.get("ARROYO_BENCH_ROUNDS", "3"))
KEYS = 5000


@dataclass
class Measured:
    """The lines of the table."""

    lines: list[tuple[str, float | None, float | None, str]] = field(default_factory=list)

    def rate(
        self,
        what: str,
        ours: Callable[[], object],
        peer: Callable[[], object],
        floor: float,
        goal: float,
        rounds: int = ROUNDS,
    ) -> None:
        """How fast `ours` is beside `peer`: the median over rounds in turn."""
        ratios = []
        for turn in range(rounds + 1):
            mine, other = _seconds(ours), _seconds(peer)
            if turn:
                ratios.append(other / mine)
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        self.add(what, floor, goal, spread)

    def add(self, what: str, floor: float | None, goal: float | None, found: str) -> None:
        """A line of the table, printed at once and again at the end."""
        self.lines.append((what, floor, goal, found))
        print(f"\n{what}: {found} (floor {floor}, goal {goal})", flush=True)


@pytest.fixture(scope="module")
def measured() -> Iterator[Measured]:
    found = Measured()
    yield found
    print("\n\n| work | floor | goal | measured |\n|---|---|---|---|")
    for what, floor, goal, value in found.lines:
        print(f"| {what} | {floor or ''} | {goal or ''} | {value} |")


def _seconds(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    result = call()
    taken = time.perf_counter() - begun
    return float(result) if isinstance(result, float) else taken


# ---- what is compacted ---------------------------------------------------------------------------


def _rows(count: int, seed: int) -> pa.Table:
    chance = np.random.default_rng(seed)
    names = pa.array([f"carrier-{number:05}" for number in range(KEYS)])
    times = np.sort(chance.integers(0, 10**9 * 60, count)) + seed * 60 * 10**9
    return pa.table(
        [
            names.take(pa.array(chance.integers(0, KEYS, count))),
            pa.array(chance.integers(0, 1000, count)),
            pa.array(chance.normal(size=count)),
            pa.array(chance.integers(0, 2, count).astype(bool)),
            pa.array(np.char.add("flight-", chance.integers(0, 10**6, count).astype(str))),
            pa.array(times + 1_700_000_000 * 10**9, pa.timestamp("ns")),
        ],
        schema=SCHEMA,
    )


def _job(folder: Path, epochs: int, rows: int, parallelism: int = 2) -> str:
    """A job of so many epochs; each gives a file for each subtask."""
    url = str(folder)
    store = open_store(url)
    batches = (stored_rows(CONFIG, _rows(int(rows * SCALE), seed)) for seed in range(epochs))
    files = time_files(store, CONFIG, batches, parallelism)
    publish(store, [(CONFIG, ExpiringTimeKeyFiles(files=files))], parallelism=parallelism)
    return url


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> str:
    """400 files of 20,000 rows and 8 columns."""
    return _job(tmp_path_factory.mktemp("many"), 200, 40_000)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> str:
    """8 files of 2 million rows."""
    return _job(tmp_path_factory.mktemp("few"), 4, 4_000_000)


def _files(url: str) -> list[str]:
    return sorted(str(path) for path in Path(url).rglob("table-*-x"))


@contextlib.contextmanager
def _undone(url: str) -> Iterator[None]:
    kept, job = Path(f"{url}-kept"), Path(url) / PATHS.root
    if not kept.exists():
        shutil.copytree(job, kept, copy_function=os.link)
    try:
        yield
    finally:
        shutil.rmtree(job)
        shutil.copytree(kept, job, copy_function=os.link)


def _ours(session: Any, url: str) -> Callable[[], float]:
    def run() -> float:
        with _undone(url):
            begun = time.perf_counter()
            outcome = run_compaction_on_spark(
                lambda: session, open_store(url), PATHS, FULL, thresholds=ALWAYS
            )
            taken = time.perf_counter() - begun
            assert outcome.published == "epoch"
        return taken

    return run


# ---- peers ---------------------------------------------------------------------------------------

BARE = """
import pickle, sys, time
from arroyo_dagster.state.storage.remote.open import open_store
from arroyo_dagster.state.tables.merge.task import run_merge
url, tasks, warm = pickle.loads(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())))
store = open_store(url)
run_merge(store, warm)
print("ready", flush=True)
sys.stdin.buffer.readline()
for task in tasks:
    run_merge(store, task)
print("done", flush=True)
"""


def _tasks(url: str) -> list[MergeTask]:
    """The merges of a plan, as `run_compaction` hands them out."""
    store = open_store(url)
    plan = plan_compaction(store, PATHS, FULL)
    (operator,) = ParquetBackend(store, PATHS).load().operators
    return [
        MergeTask(
            paths=PATHS,
            epoch=plan.epoch,
            worker_generation=ParquetBackend(store, PATHS).load().worker_generation,
            parallelism=2,
            config=operator.configs[merge.table],
            merge=merge,
        )
        for merge in plan.merges
    ]


def _two_processes(url: str) -> Callable[[], float]:
    """The same kernel, half of the tasks in each of two warm processes: nothing else."""

    def run() -> float:
        tasks = _tasks(url)
        first = tasks[0].merge
        warm = replace(
            tasks[0], merge=replace(first, inputs=first.inputs[:1], sizes=first.sizes[:1])
        )
        with _undone(url), contextlib.ExitStack() as stack:
            found = []
            for half in range(2):
                process = stack.enter_context(
                    subprocess.Popen(
                        [sys.executable, "-c", BARE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
                    )
                )
                data = pickle.dumps((url, tasks[half::2], warm))
                assert process.stdin is not None
                process.stdin.write(f"{len(data)}\n".encode() + data)
                process.stdin.flush()
                found.append(process)
            for process in found:
                assert process.stdout is not None
                assert process.stdout.readline() == b"ready\n"
            begun = time.perf_counter()
            for process in found:
                assert process.stdin is not None
                process.stdin.write(b"go\n")
                process.stdin.flush()
            for process in found:
                assert process.stdout is not None
                assert process.stdout.readline() == b"done\n"
            return time.perf_counter() - begun

    return run


def _polars(url: str, out: Path) -> Callable[[], object]:
    files = _files(url)
    return lambda: pl.scan_parquet(files).sink_parquet(
        out / "polars.parquet", compression="zstd", compression_level=1
    )


def _duckdb(url: str, out: Path) -> Callable[[], object]:
    import duckdb

    sql = (
        f"COPY (SELECT * FROM read_parquet({_files(url)!r})) TO '{out}/duck.parquet' "
        "(FORMAT parquet, COMPRESSION zstd)"
    )
    connection = duckdb.connect(config={"threads": os.cpu_count() or 2})
    return lambda: connection.sql(sql)


def _coalesced(session: Any, url: str, out: Path) -> Callable[[], object]:
    def run() -> None:
        session.conf.set("spark.sql.legacy.parquet.nanosAsLong", "true")
        session.conf.set("spark.sql.parquet.compression.codec", "zstd")
        rows = session.read.parquet(*_files(url))
        rows.coalesce(2).write.mode("overwrite").parquet(str(out / "coalesced"))

    return run


DELTA = """
import glob, shutil, sys, time
import pyarrow.parquet as pq
from deltalake import DeltaTable, convert_to_deltalake, write_deltalake
files, out = sys.argv[1], sys.argv[2]
shutil.rmtree(out, ignore_errors=True)
import os
os.makedirs(out)
for at, path in enumerate(open(files).read().split()):
    rows = pq.ParquetFile(path).read()
    names = rows.schema.names
    for name in names:
        kind = str(rows.schema.field(name).type)
        if kind == "uint64" or kind.startswith("timestamp"):
            place = rows.schema.get_field_index(name)
            column = rows.column(name)
            rows = rows.set_column(place, name, column.view("int64") if hasattr(column, "view")
                                   else column.cast("int64", safe=False))
    pq.write_table(rows, f"{out}/{at:05}.parquet", compression="zstd", compression_level=1)
convert_to_deltalake(out)
table = DeltaTable(out)
begun = time.perf_counter()
table.optimize.compact()
print(time.perf_counter() - begun)
"""


def _delta(url: str, out: Path) -> Callable[[], float]:
    python = os.environ.get("ARROYO_BENCH_DELTA_PYTHON")
    if not python:
        pytest.skip(
            "delta-rs is not measured: ARROYO_BENCH_DELTA_PYTHON names no interpreter of an "
            "environment with deltalake and pyarrow"
        )
    listed = out / "files.txt"
    listed.write_text("\n".join(_files(url)))

    def run() -> float:
        command = [python, "-c", DELTA, str(listed), str(out / "delta")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"delta-rs failed: {done.stderr[-300:]}")
        return float(done.stdout.split()[-1])

    return run


# ---- rates ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def session() -> Iterator[Any]:
    found, started = get_session("local[2]")
    yield found
    if started:
        found.stop()


def test_many_small_files_beside_the_same_kernel(
    measured: Measured, session: Any, many: str
) -> None:
    what = "400 files × 20k rows × 8 columns: against the same kernel in two bare processes"
    measured.rate(what, _ours(session, many), _two_processes(many), 0.95, 1.0)


@pytest.mark.parametrize(
    ("peer", "floor", "goal"),
    [("polars", 0.5, 0.65), ("delta-rs", 0.75, 1.0), ("DuckDB", 0.85, 1.1), ("Spark", 3.0, 3.5)],
)
def test_many_small_files_beside_others(
    measured: Measured,
    session: Any,
    many: str,
    tmp_path: Path,
    peer: str,
    floor: float,
    goal: float,
) -> None:
    calls: dict[str, Callable[[], Callable[[], object]]] = {
        "polars": lambda: _polars(many, tmp_path),
        "delta-rs": lambda: _delta(many, tmp_path),
        "DuckDB": lambda: _duckdb(many, tmp_path),
        "Spark": lambda: _coalesced(session, many, tmp_path),
    }
    measured.rate(f"… against {peer}", _ours(session, many), calls[peer](), floor, goal)


def test_few_large_files_beside_the_same_kernel(measured: Measured, session: Any, few: str) -> None:
    what = "8 files × 2M rows against the two-process kernel"
    measured.rate(what, _ours(session, few), _two_processes(few), 0.85, 0.95, rounds=2)


def test_global_merge_beside_polars(measured: Measured, tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "job"))
    chance = np.random.default_rng(3)
    count = int(100_000 * SCALE)
    paths = []
    for number in range(50):
        picked = np.sort(chance.choice(count * 10, count, replace=False))
        keys = pa.array([b"key-%010d" % key for key in picked], pa.binary())
        values = pa.array([b"%016d" % (key * number) for key in picked], pa.binary())
        paths.append(StatePath(f"{PATHS.root}/data/e{number}/table-g-000-x"))
        data = encode_pair_columns(keys, values, GLOBAL_KEY_VALUE_SCHEMA, version=0)
        store.put(paths[-1], data)
    publish(store, [(PAIRS, GlobalKeyedFiles(files=tuple(paths)))])
    files = [str(tmp_path / "job" / path) for path in paths]
    (task,) = _tasks(str(tmp_path / "job"))
    out = tmp_path / "unique.parquet"

    def peer() -> None:
        rows = pl.read_parquet(files).unique(subset="key", keep="last", maintain_order=False)
        rows.write_parquet(out, compression="zstd", compression_level=1)

    what = '50 × 100k keys merged against polars unique(keep="last") in one process'
    measured.rate(what, lambda: run_merge(store, task).rows_out, peer, 0.8, 1.0)


# ---- size, memory, machines ----------------------------------------------------------------------


def test_bytes_out_beside_an_uncompressed_file(
    measured: Measured, many: str, tmp_path: Path
) -> None:
    with _undone(many):
        outcome = run_compaction(open_store(many), PATHS, FULL)
        ours = sum(merge.size_bytes_out for merge in outcome.merges)
        outputs = [path for merge in outcome.merges for path in merge.merged.output_paths]
        rows = pa.concat_tables([pq.ParquetFile(f"{many}/{path}").read() for path in outputs])
        pq.write_table(rows, tmp_path / "plain.parquet", compression="none")
    plain = (tmp_path / "plain.parquet").stat().st_size
    measured.add(
        "bytes out against an uncompressed Parquet of the same rows (≤)",
        0.46,
        0.45,
        f"{ours / plain:.3f}",
    )


MEMORY = """
import pickle, re, sys
from arroyo_dagster.state.storage.remote.open import open_store
from arroyo_dagster.state.tables.merge.task import run_merge
url, task = pickle.loads(sys.stdin.buffer.read())
run_merge(open_store(url), task)
# Not ru_maxrss: that begins with what the parent had.
print(int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) // 1024)
"""


@pytest.mark.parametrize("which", ["many", "few"])
def test_memory_of_a_rewrite(
    measured: Measured, which: str, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue(which)
    with _undone(url):
        data = pickle.dumps((url, max(_tasks(url), key=lambda task: task.merge.size_bytes)))
        done = subprocess.run(
            [sys.executable, "-c", MEMORY], input=data, capture_output=True, check=True
        )
    what = {"many": "200 files × 20k rows", "few": "4 files × 2M rows"}[which]
    found = f"{int(done.stdout)} MB"
    measured.add(f"memory of a streaming rewrite task, {what} (≤, MB)", 400, 350, found)
