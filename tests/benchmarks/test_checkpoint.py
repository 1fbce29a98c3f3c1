"""What a checkpoint costs beside the Parquet file it cannot do without."""

from __future__ import annotations

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from arroyo_dagster.state.codec.hashing.routing import key_hashes
from arroyo_dagster.state.codec.parquet import MAX_ROW_GROUP_ROWS
from arroyo_dagster.state.codec.schema import file_schema
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.model.ids import (
    JobId,
    OperatorId,
    PipelineId,
    TableName,
    WorkerGeneration,
)
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.storage.memory import MemoryStore
from arroyo_dagster.state.tables.expiring_time_key import timestamp_table_config
from arroyo_dagster.state.tables.global_keyed import global_table_config
from arroyo_dagster.state.tables.manager import TableManager
from arroyo_dagster.state.tables.table import TaskInfo
from tests.benchmarks.conftest import Comparison

ROWS = 1_000_000
SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("n", pa.int64()),
        ("x", pa.float64()),
        pa.field("_timestamp", pa.timestamp("ns"), nullable=False),
    ]
)
GENERATION = WorkerGeneration(1)


def _rows() -> pa.Table:
    chance = np.random.default_rng(1)
    keys = pa.array([f"key-{number}" for number in range(10_000)])
    return pa.Table.from_arrays(
        [
            keys.take(pa.array(chance.integers(0, 10_000, ROWS))),
            pa.array(chance.integers(0, 1_000_000, ROWS)),
            pa.array(chance.random(ROWS)),
            pa.array(np.sort(chance.integers(0, 10**15, ROWS)), pa.timestamp("ns")),
        ],
        schema=SCHEMA,
    )


def _manager(config: object) -> TableManager:
    paths = JobPaths(JobId("job"), PipelineId("bench"))
    store = MemoryStore()
    backend = ParquetBackend(store, paths, generation=GENERATION)
    task = TaskInfo(
        pipeline=paths.pipeline,
        job=paths.job,
        operator=OperatorId("operator"),
        task_index=0,
        parallelism=1,
    )
    return TableManager(backend, task, {TableName("t"): config}, None)  # type: ignore[dict-item]


def _checkpoint(manager: TableManager) -> None:
    manager.checkpoint(1, 1, 0, False)


def test_checkpoint_of_a_million_rows_against_write_table(comparison: Comparison) -> None:
    config = timestamp_table_config("t", retention_micros=10**15, schema=SCHEMA, keys=["key"])
    rows = _rows()
    hashes = key_hashes([rows.column(0)], rows=ROWS)
    operations = pa.array([b"\x00"] * ROWS, pa.binary())
    stored = pa.Table.from_arrays(
        [*rows.columns, hashes, operations], schema=file_schema(config.config)
    )  # type: ignore[arg-type]

    def filled() -> TableManager:
        manager = _manager(config)
        manager.get_expiring_time_key_table("t").insert(rows)
        return manager

    def peer(_: object) -> None:
        pq.write_table(
            stored,
            io.BytesIO(),
            compression="zstd",
            compression_level=1,
            use_compliant_nested_type=False,
            row_group_size=MAX_ROW_GROUP_ROWS,
        )

    comparison.ratio(_checkpoint, peer, goal=1.3, prepare=filled)


def test_checkpoint_of_a_million_pairs_against_write_table(comparison: Comparison) -> None:
    config = global_table_config("t", key=str, value=int)
    pairs = [(f"key-{number}", number) for number in range(ROWS)]
    keys = [key.encode() for key, _ in pairs]
    plain = pa.table({"key": pa.array(keys), "value": pa.array(keys)}).sort_by("key")

    def filled() -> TableManager:
        manager = _manager(config)
        manager.get_global_keyed_state("t", str, int).insert_many(pairs)
        return manager

    def peer(_: object) -> None:
        pq.write_table(plain, io.BytesIO(), compression="zstd", compression_level=1)

    comparison.ratio(_checkpoint, peer, goal=1.3, rounds=3, prepare=filled)
