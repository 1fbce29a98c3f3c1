"""What an epoch on Spark costs beside a micro-batch of structured streaming."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from arroyo_dagster.spark.pipeline import SparkRun
from arroyo_dagster.spark.session import get_session
from arroyo_dagster.state.model.tables import TableConfig
from arroyo_dagster.state.runtime.connectors import ParquetReplay
from arroyo_dagster.state.runtime.operators import Collector, Operator, OperatorContext
from arroyo_dagster.state.runtime.pipeline import Pipeline
from arroyo_dagster.state.storage.remote.open import open_store
from arroyo_dagster.state.tables.global_keyed import global_table_config
from tests.benchmarks.conftest import Comparison
from tests.benchmarks.stream_spark import ROCKSDB, transform_with_state
from tests.benchmarks.streams import Work

EPOCHS = 14
WARM_UP = 4


class Totals(Operator):
    """Counts rows by key: what the smallest useful operator does."""

    def tables(self) -> list[TableConfig]:
        return [global_table_config("totals", key=str, value=int)]

    def on_start(self, ctx: OperatorContext) -> None:
        self.totals = ctx.table_manager.get_global_keyed_state("totals", str, int)

    def process_batch(
        self, batch: pa.RecordBatch, ctx: OperatorContext, collector: Collector
    ) -> None:
        self.totals.merge(batch["key"], None, "count")


def _rows(path: Path, rows: int) -> None:
    chance = np.random.default_rng(1)
    keys = pa.array([f"key-{number}" for number in range(1000)])
    table = pa.table(
        {
            "key": keys.take(pa.array(chance.integers(0, 1000, rows * EPOCHS))),
            "x": pa.array(chance.random(rows * EPOCHS)),
            "at": pa.array(np.arange(rows * EPOCHS) * 1000, pa.timestamp("us")),
        }
    )
    pq.write_table(table, path, row_group_size=rows)


@pytest.mark.parametrize("rows", [100_000, 1_000_000])
def test_epoch_against_a_micro_batch_that_does_nothing(
    tmp_path: Path, comparison: Comparison, rows: int
) -> None:
    path = tmp_path / "rows.parquet"
    _rows(path, rows)
    session, _ = get_session("local[2]")
    theirs = _batch_seconds(_file_source(session, tmp_path, path), tmp_path / "log", _write_nothing)
    comparison.report(_our_seconds(session, tmp_path, path, rows), theirs, goal=1.5)


def test_small_epoch_against_a_micro_batch_with_the_same_stages(
    tmp_path: Path, comparison: Comparison
) -> None:
    _small(tmp_path, comparison, ("0 as subtask", "key"), _two_python_stages, goal=0.75)


def test_small_epoch_against_a_micro_batch_with_one_python_stage(
    tmp_path: Path, comparison: Comparison
) -> None:
    _small(tmp_path, comparison, ("0 as subtask", "key"), _one_python_stage, goal=1.0)


def test_small_epoch_against_a_micro_batch_of_the_state_api(
    tmp_path: Path, comparison: Comparison
) -> None:
    session, _ = get_session("local[2]")
    session.conf.set("spark.sql.shuffle.partitions", "2")
    session.conf.set("spark.sql.streaming.stateStore.providerClass", ROCKSDB)
    _small(
        tmp_path,
        comparison,
        ("key", "1 as cents"),
        lambda frame: frame.collect(),
        goal=0.7,
        transform=lambda stream: transform_with_state(stream, Work.COUNT),
        mode="update",
    )


def _small(
    folder: Path,
    comparison: Comparison,
    columns: tuple[str, str],
    work: Any,
    *,
    goal: float,
    transform: Callable[[Any], Any] = lambda stream: stream,
    mode: str = "append",
) -> None:
    """Compare epochs of 100 rows with micro batches of the same rows."""
    path = folder / "rows.parquet"
    _rows(path, 100)
    session, _ = get_session("local[2]")
    stream = transform(_file_source(session, folder, path).selectExpr(*columns))
    theirs = _batch_seconds(stream, folder / "log", work, mode=mode)
    comparison.report(_our_seconds(session, folder, path, 100), theirs, goal=goal)


def _pipeline(path: Path, rows: int) -> Pipeline:
    pipeline = Pipeline("bench", parallelism=2)
    source = ParquetReplay(str(path), rows_per_epoch=rows, splits=2)
    pipeline.source("source", source, timestamp="at").key_by("key").apply("totals", Totals())
    return pipeline


def _file_source(session: Any, folder: Path, path: Path) -> Any:
    """Spark's own file source, in the JVM alone: a file a batch."""
    parts = folder / "parts"
    parts.mkdir()
    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            pq.write_table(file.read_row_group(group), parts / f"{group:03}.parquet")
    schema = session.read.parquet(str(parts)).schema
    return session.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(parts))


def _write_nothing(frame: Any) -> None:
    frame.write.format("noop").mode("append").save()


def _two_python_stages(frame: Any) -> None:
    """Read in Python, exchange, process in Python, collect: as an epoch of one level."""

    def same(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches

    read = frame.mapInArrow(same, frame.schema)
    read.repartitionById(2, "subtask").mapInArrow(same, frame.schema).collect()


def _one_python_stage(frame: Any) -> None:
    def same(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches

    frame.mapInArrow(same, frame.schema).collect()


def _batch_seconds(
    stream: Any, location: Path, work: Callable[[Any], object], *, mode: str = "append"
) -> list[float]:
    marks: list[float] = []

    def batch(frame: Any, batch_id: int) -> None:
        work(frame)
        marks.append(time.perf_counter())

    writer = stream.writeStream.outputMode(mode).foreachBatch(batch)
    query = writer.option("checkpointLocation", str(location)).start()
    while len(marks) < EPOCHS and query.isActive:
        time.sleep(0.05)
    query.stop()
    return _between(marks)


def _our_seconds(session: Any, folder: Path, path: Path, rows: int) -> list[float]:
    marks: list[float] = []
    store = open_store(f"file://{folder}/state")
    run = SparkRun.start(_pipeline(path, rows), store, session)
    with contextlib.closing(run.job):
        run.run(on_epoch=lambda checkpoint: marks.append(time.perf_counter()))
    return _between(marks)


def _between(marks: list[float]) -> list[float]:
    steps = [after - before for before, after in pairwise(marks)]
    return steps[WARM_UP:]
