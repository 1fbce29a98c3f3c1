"""How much memory it takes to look at a table of 1 GB, beside reading one of its files whole.

Each look is a process of its own; what counts is the most memory it ever had, less what the
imports take.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from arroyo_dagster.state.codec.hashing.routing import key_hashes
from arroyo_dagster.state.codec.parquet import GLOBAL_KEY_VALUE_SCHEMA, encode_pairs
from arroyo_dagster.state.codec.schema import file_schema
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.model.checkpoints import LegacyCheckpoint, OperatorCheckpoint
from arroyo_dagster.state.model.ids import Epoch, JobId, OperatorId, StatePath, TableName
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.tables import (
    ExpiringTimeKeyConfig,
    ExpiringTimeKeyFiles,
    GlobalKeyedFiles,
    TableConfig,
    TimeFile,
)
from arroyo_dagster.state.storage import ObjectStore, open_store
from arroyo_dagster.state.tables.expiring_time_key import timestamp_table_config
from arroyo_dagster.state.tables.global_keyed import global_table_config
from arroyo_dagster.state.tables.time_files import write_time_file

MEGABYTE = 1 << 20
FILES = 10
PAYLOAD = 100
EVENTS = pa.schema(
    [
        ("key", pa.string()),
        ("payload", pa.binary()),
        pa.field("_timestamp", pa.timestamp("ns"), nullable=False),
    ]
)
EPOCH = Epoch(1)
PATHS = JobPaths(JobId("big"))
OPERATOR = OperatorId("o")

_LOOK = """
import json, resource, sys
import pyarrow.parquet as pq
from arroyo_dagster.state import *
from arroyo_dagster.state.operations.query.state import open_state
from arroyo_dagster.state.operations.verify.job import verify_job
from arroyo_dagster.state.operations.catalog.query import ReadOptions, describe_epoch, read_rows
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.ids import JobId
store, paths, what = open_store(sys.argv[1]), JobPaths(JobId("big")), sys.argv[2]
hash_key("warm"), default_catalogue()
def peak():
    # Of this process alone: ru_maxrss of a child begins with that of whoever started it.
    text = open("/proc/self/status").read()
    return int(text.partition("VmHWM:")[2].split()[0]) * 1024
before = peak()
if what == "verify":
    found = verify_job(store, paths)
    assert found.passed, found.verdict.findings
    done = sum(one.rows for one in found.restore)
elif what == "show":
    done = sum(t.rows for o in describe_epoch(store, paths).operators for t in o.tables)
elif what == "rows":
    done = read_rows(store, paths, "o", sys.argv[3], ReadOptions(limit=20)).count
elif what == "scan":
    table = open_state(store).job("big").epoch().table("o", sys.argv[3])
    done = sum(batch.num_rows for batch in table.to_batches())
else:
    done = sum(
        pq.ParquetFile(store.open_input(path)).read().num_rows
        for path in ParquetBackend(store, paths).load().paths
    )
print(json.dumps([peak() - before, done]))
"""


def look(url: str, what: str, table: str) -> tuple[float, int]:
    """The most memory in MB that a look took, and how many rows it saw."""
    done = subprocess.run(
        [sys.executable, "-c", _LOOK, url, what, table],
        check=True,
        capture_output=True,
        text=True,
        timeout=600,
    )
    taken, rows = json.loads(done.stdout)
    return taken / MEGABYTE, rows


def time_files(store: ObjectStore, config: TableConfig) -> Iterator[TimeFile]:
    """Files of 100 MB, of events that do not compress."""
    assert isinstance(config.config, ExpiringTimeKeyConfig)
    chance = np.random.default_rng(7)
    rows = 100 * MEGABYTE // (PAYLOAD + 16)
    for number in range(FILES):
        keys = pa.array([f"key-{n}" for n in chance.integers(0, 10**9, rows)])
        raw = pa.py_buffer(chance.bytes(rows * PAYLOAD))
        offsets = pa.py_buffer(np.arange(0, (rows + 1) * PAYLOAD, PAYLOAD, dtype=np.int32))
        columns = [
            keys,
            pa.Array.from_buffers(pa.binary(), rows, [None, offsets, raw]),
            pa.array(np.arange(rows) * 1000, pa.timestamp("ns")),
            key_hashes([keys]),
            pa.array([b"\x00"] * rows),
        ]
        table = pa.Table.from_arrays(columns, schema=file_schema(config.config))
        path = PATHS.data_file(OPERATOR, TableName("t"), number, EPOCH, None, attempt="0")
        file, _ = write_time_file(store, table, path, epoch=EPOCH, timestamp_index=2)
        yield replace(file, epoch=EPOCH)


def pair_files(store: ObjectStore) -> Iterator[StatePath]:
    """Files of 100 MB, of values of 1 KB."""
    chance = np.random.default_rng(8)
    rows = 100 * MEGABYTE // 1024
    for number in range(FILES):
        keys = [b"\x0c" + f"{number:02}{row:010}".encode() for row in range(rows)]
        # A length of 1,020 takes three bytes.
        values = [b"\xfb\xfc\x03" + chance.bytes(1020) for _ in range(rows)]
        path = PATHS.data_file(OPERATOR, TableName("g"), number, EPOCH, None, attempt="0")
        store.put(path, encode_pairs(keys, values, GLOBAL_KEY_VALUE_SCHEMA, version=0))
        yield path


@pytest.fixture(scope="module", params=["t", "g"])
def big(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, str]:
    """A job with one table of 1 GB, as Arroyo would have it: its URL, and the table."""
    url = str(tmp_path_factory.mktemp("big"))
    store, name = open_store(url), TableName(request.param)
    if name == "t":
        config = timestamp_table_config("t", retention_micros=1, schema=EVENTS, keys=["key"])
        files: ExpiringTimeKeyFiles | GlobalKeyedFiles = ExpiringTimeKeyFiles(
            files=tuple(time_files(store, config))
        )
    else:
        config = global_table_config("g", key=str, value=bytes)
        files = GlobalKeyedFiles(files=tuple(pair_files(store)))
    operator = OperatorCheckpoint(
        job=PATHS.job,
        operator=OPERATOR,
        epoch=EPOCH,
        parallelism=FILES,
        start_time_micros=1,
        finish_time_micros=2,
        tables={name: files},
        configs={name: config},
    )
    backend = ParquetBackend(store, PATHS)
    backend.write_operator_checkpoint_metadata(operator)
    backend.write_checkpoint_metadata(
        LegacyCheckpoint(
            job=PATHS.job,
            epoch=EPOCH,
            min_epoch=EPOCH,
            start_time_micros=1,
            finish_time_micros=2,
            operators=(OPERATOR,),
        )
    )
    return url, name


def test_memory_for_a_table_of_a_gigabyte(big: tuple[str, str]) -> None:
    url, table = big
    size = sum(path.stat().st_size for path in Path(url).rglob("table-*")) / MEGABYTE
    whole, rows = look(url, "read files whole", table)
    print(f"\ntable {table}, {size:.0f} MB, {rows} rows; one file read whole: {whole:.0f} MB")
    for what, floor, goal in (
        ("show", 0.1, 0.05),
        ("rows", 0.5, 0.25),
        ("verify", 0.5, 0.25),
        ("scan", 0.4, 0.25),
    ):
        taken, seen = look(url, what, table)
        print(
            f"{what}: {taken:.0f} MB, {taken / size:.2f} of the table, {taken / whole:.2f} of one "
            f"file read whole; of the table floor {floor}, goal {goal}"
        )
        assert seen >= rows
