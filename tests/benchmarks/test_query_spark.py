"""What it costs Spark to read state, against its own reader on a copy that it can read."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from arroyo_dagster.spark.query.frames import frame_of
from arroyo_dagster.spark.query.source import register_source
from arroyo_dagster.spark.session import get_session
from arroyo_dagster.state.model.tables import ExpiringTimeKeyFiles
from arroyo_dagster.state.operations.query.state import open_state
from arroyo_dagster.state.storage.remote.open import open_store
from tests.benchmarks.conftest import Comparison
from tests.benchmarks.test_query import CONFIG, EPOCHS, SCHEMA, made_rows
from tests.fabricated import OPERATOR, PATHS, publish, stored_rows, time_files

ROWS = int(10**7 * float(os.environ.get("ARROYO_BENCH_SCALE", "1")))
ROUNDS = 5


@pytest.fixture
def session() -> Iterator[Any]:
    found, ours = get_session("local[2]")
    yield found
    if ours:
        found.stop()


def test_a_full_scan_against_sparks_own_reader(
    comparison: Comparison, tmp_path: Path, session: Any
) -> None:
    """Four columns and a time: the copy has it in microseconds, and no columns of ours."""
    store, copy = open_store(str(tmp_path / "state")), tmp_path / "copy"
    batches = (stored_rows(CONFIG, made_rows(seed, ROWS)) for seed in range(EPOCHS))
    files = time_files(store, CONFIG, batches, 1)
    publish(store, [(CONFIG, ExpiringTimeKeyFiles(files=files))], parallelism=1)
    copy.mkdir()
    for number, file in enumerate(files):
        rows = pq.ParquetFile(tmp_path / "state" / file.path).read().select(SCHEMA.names)
        micros = rows.column("_timestamp").cast(pa.timestamp("us"))
        rows = rows.set_column(rows.num_columns - 1, "_timestamp", micros)
        pq.write_table(rows, copy / f"{number}.parquet", compression="zstd")
    table = open_state(str(tmp_path / "state")).job(PATHS.root).epoch().table(OPERATOR, "t")
    register_source(session)
    source = session.read.format("arroyo").option("table", str(table.name))
    frames = {
        "spark": lambda: session.read.parquet(str(copy)),
        "source arroyo, goal 1.8": lambda: source.load(str(tmp_path / "state")),
        "frame_of": lambda: frame_of(session, table),
    }
    times: dict[str, list[float]] = {name: [] for name in frames}
    for turn in range(ROUNDS + 1):
        for name, frame in frames.items():
            begun = time.perf_counter()
            frame().write.format("noop").mode("overwrite").save()
            if turn:
                times[name].append(time.perf_counter() - begun)
    for name in list(frames)[1:]:
        print(f"\n{name}:")
        comparison.report(times[name], times["spark"], goal=1.8)
    shutil.rmtree(copy)
