"""What an epoch on Spark costs beside a micro-batch that does nothing with the same rows."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from arroyo_dagster.spark.pipeline import SparkOptions, SparkRun
from arroyo_dagster.spark.session import get_session
from arroyo_dagster.spark.stream import open_streams
from arroyo_dagster.spark.worker import PackedPipeline
from arroyo_dagster.state.model.tables import TableConfig
from arroyo_dagster.state.runtime.connectors import ParquetReplay
from arroyo_dagster.state.runtime.operators import Collector, Operator, OperatorContext
from arroyo_dagster.state.runtime.pipeline import Pipeline
from arroyo_dagster.state.storage.remote.open import open_store
from arroyo_dagster.state.tables.global_keyed import global_table_config
from tests.benchmarks.conftest import Comparison

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
        counts = batch["key"].value_counts()
        keys = counts.field("values").to_pylist()
        known = self.totals.get_many(keys)
        new = counts.field("counts").to_pylist()
        self.totals.insert_many(
            (key, (old or 0) + more) for key, old, more in zip(keys, known, new, strict=True)
        )


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
@pytest.mark.parametrize("peer", ["same_source", "file_source"])
def test_micro_batch_against_no_op(
    tmp_path: Path, comparison: Comparison, rows: int, peer: str
) -> None:
    path = tmp_path / "rows.parquet"
    _rows(path, rows)
    session, _ = get_session("local[2]")
    same = peer == "same_source"
    stream = _same_source(session, path, rows) if same else _file_source(session, tmp_path, path)
    theirs = _no_op_seconds(stream, tmp_path / "no-op")
    ours = _our_seconds(session, tmp_path, path, rows)
    comparison.report(ours, theirs, goal=1.5)


def _pipeline(path: Path, rows: int) -> Pipeline:
    pipeline = Pipeline("bench", parallelism=2)
    source = ParquetReplay(str(path), rows_per_epoch=rows, splits=2)
    pipeline.source("source", source, timestamp="at").key_by("key").apply("totals", Totals())
    return pipeline


def _same_source(session: Any, path: Path, rows: int) -> Any:
    """What our runtime reads, read and thrown away."""
    pipeline = _pipeline(path, rows)
    starts = {name: node.source.initial_offset() for name, node in pipeline.sources.items()}
    return open_streams(session, PackedPipeline.pack(pipeline), starts)


def _file_source(session: Any, folder: Path, path: Path) -> Any:
    """Spark's own file source, in the JVM alone: a file a batch."""
    parts = folder / "parts"
    parts.mkdir()
    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            pq.write_table(file.read_row_group(group), parts / f"{group:03}.parquet")
    schema = session.read.parquet(str(parts)).schema
    return session.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(parts))


def _no_op_seconds(stream: Any, location: Path) -> list[float]:
    marks: list[float] = []

    def nothing(frame: Any, batch_id: int) -> None:
        frame.write.format("noop").mode("append").save()
        marks.append(time.perf_counter())

    writer = stream.writeStream.foreachBatch(nothing)
    query = writer.option("checkpointLocation", str(location)).start()
    while len(marks) < EPOCHS and query.isActive:
        time.sleep(0.05)
    query.stop()
    return _between(marks)


def _our_seconds(session: Any, folder: Path, path: Path, rows: int) -> list[float]:
    marks: list[float] = []
    run = SparkRun.start(
        _pipeline(path, rows),
        open_store(f"file://{folder}/state"),
        SparkOptions(),
        on_epoch=lambda checkpoint: marks.append(time.perf_counter()),
    )
    run.run(session)
    return _between(marks)


def _between(marks: list[float]) -> list[float]:
    steps = [after - before for before, after in pairwise(marks)]
    return steps[WARM_UP:]
