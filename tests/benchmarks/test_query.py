"""What queries cost: push-down against a full restore, Polars against DuckDB, look-ups by key."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from arroyo_dagster.state import (
    CompactionPolicy,
    CompactionSettings,
    EpochTable,
    JobId,
    JobPaths,
    open_state,
    open_store,
    run_compaction,
    timestamp_table_config,
)
from arroyo_dagster.state.model.compaction import SortOrder
from arroyo_dagster.state.model.tables import ExpiringTimeKeyFiles
from arroyo_dagster.state.operations.query import diff
from arroyo_dagster.state.operations.query.diff import diff_tables
from arroyo_dagster.state.operations.query.sql import SqlCatalog
from tests.benchmarks.conftest import Comparison
from tests.fabricated import OPERATOR, PATHS, publish, stored_rows, time_files

SCHEMA = pa.schema(
    [
        ("key", pa.int64()),
        ("a", pa.int64()),
        ("b", pa.float64()),
        ("d", pa.string()),
        pa.field("_timestamp", pa.timestamp("ns"), nullable=False),
    ]
)
CONFIG = timestamp_table_config("t", retention_micros=10**15, schema=SCHEMA, keys=["key"])
ROWS = int(10**6 * float(os.environ.get("ARROYO_BENCH_SCALE", "1")))
EPOCHS = 20


def made_rows(seed: int, rows: int) -> pa.Table:
    """The rows of one of `EPOCHS` epochs that have so many together."""
    chance, count = np.random.default_rng(seed), rows // EPOCHS
    return pa.table(
        [
            pa.array(chance.integers(0, rows // 10, count)),
            pa.array(chance.integers(0, 1000, count)),
            pa.array(chance.normal(size=count)),
            pa.array(np.char.add("flight-", chance.integers(0, 10**6, count).astype(str))),
            pa.array(np.arange(count) * 10**6 + seed * 10**12, pa.timestamp("ns")),
        ],
        schema=SCHEMA,
    )


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A job of 20 epochs, as it was written."""
    folder = str(tmp_path_factory.mktemp("written"))
    store = open_store(folder)
    files = time_files(
        store, CONFIG, (stored_rows(CONFIG, made_rows(seed, ROWS)) for seed in range(EPOCHS)), 2
    )
    publish(store, [(CONFIG, ExpiringTimeKeyFiles(files=files))])
    return folder


@pytest.fixture(scope="module", params=[None, *SortOrder], ids=str)
def form(request: pytest.FixtureRequest, url: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same as it was written, and compacted in each order."""
    if request.param is None:
        return url
    folder = tmp_path_factory.mktemp("compacted")
    store = open_store(str(folder))
    for info in open_store(url).list():
        store.put(info.path, open_store(url).read(info.path))
    run_compaction(
        store, PATHS, CompactionSettings(policy=CompactionPolicy.FULL, sort=request.param)
    )
    return str(folder)


def _table(url: str) -> EpochTable:
    return open_state(url).job(PATHS.root).epoch().table(OPERATOR, "t")


def _name() -> str:
    return f'"{PATHS.root}"."{OPERATOR}".t'


def test_key_filter_against_full_restore(comparison: Comparison, form: str) -> None:
    table = _table(form)

    def filtered(_: Any) -> None:
        table.to_polars().filter(pl.col("key") == 4711).select("a").collect()

    comparison.ratio(filtered, lambda _: table.to_arrow(), goal=0.1)


def test_look_up_against_full_restore(comparison: Comparison, form: str) -> None:
    """Warm: metadata and footers are known."""
    table = _table(form)
    for key in range(200):
        table.lookup(key)
    comparison.ratio(lambda _: table.lookup(4711), lambda _: table.to_arrow(), goal=0.1)


QUERIES = {
    "filter": "select a, d from {} where key = 4711",
    "projection": "select sum(a) as s from {}",
    "group": "select key, count(*) as n, max(b) as b from {} group by key order by n desc limit 10",
    "time": "select count(*) as n from {} where _timestamp >= 15000000000000",
}


@pytest.mark.parametrize("query", QUERIES)
def test_polars_against_duckdb(comparison: Comparison, url: str, query: str) -> None:
    """DuckDB gets batches of the columns that a query names: it pushes nothing into them."""
    import duckdb

    table, name = _table(url), _name()
    catalog = SqlCatalog(open_state(url))
    columns = {"filter": ["key", "a", "d"], "projection": ["a"], "group": ["key", "b"]}

    def polars(_: Any) -> None:
        catalog.collect(
            QUERIES[query]
            .format(name)
            .replace("15000000000000", "'1970-01-01 04:10:00'::timestamp")
            if query == "time"
            else QUERIES[query].format(name)
        )

    def duck(_: Any) -> None:
        wanted = columns.get(query, ["_timestamp"])
        rows = pa.RecordBatchReader.from_batches(
            pa.schema([table.schema.field(one) for one in wanted]), table.to_batches(wanted)
        )
        with duckdb.connect() as connection:
            connection.register("rows", rows)
            text = (
                QUERIES[query]
                .format("rows")
                .replace("15000000000000", "timestamp '1970-01-01 04:10:00'")
            )
            connection.execute(text).to_arrow_table()

    comparison.ratio(polars, duck, goal=1.0)


GENERATIONAL = timestamp_table_config(
    "g", retention_micros=10**15, schema=SCHEMA, keys=["key"], generational=True
)


def _generations(keys: np.ndarray[Any, Any], generation: int) -> pa.Table:
    chance, count = np.random.default_rng(generation), len(keys)
    return pa.table(
        [
            pa.array(keys),
            pa.array(chance.integers(0, 1000, count)),
            pa.array(chance.normal(size=count)),
            pa.array(np.char.add("flight-", chance.integers(0, 10**6, count).astype(str))),
            pa.array(np.full(count, 10**12 + generation), pa.timestamp("ns")),
            pa.array(np.full(count, generation), pa.uint64()),
        ],
        schema=SCHEMA.append(pa.field("_generation", pa.uint64(), nullable=False)),
    )


def test_diff_of_keyed_tables_that_share_files(comparison: Comparison, tmp_path: Path) -> None:
    """One row in a hundred has a newer generation. The peer reads both tables whole."""
    store = open_store(str(tmp_path))
    chance = np.random.default_rng(0)
    old = [np.arange(at, ROWS, EPOCHS) for at in range(EPOCHS)]
    new = chance.choice(ROWS, ROWS // 100, replace=False)
    made = [_generations(keys, 0) for keys in old] + [_generations(new, 1)]
    batches = (stored_rows(GENERATIONAL, rows) for rows in made)
    files = time_files(store, GENERATIONAL, batches, 2)
    before, after = PATHS, JobPaths(JobId("after"), PATHS.pipeline)
    publish(store, [(GENERATIONAL, ExpiringTimeKeyFiles(files=files[:-2]))], paths=before)
    publish(store, [(GENERATIONAL, ExpiringTimeKeyFiles(files=files))], paths=after)
    state = open_state(str(tmp_path))

    def compared(_: Any) -> None:
        pair = [state.job(one.root).epoch().table(OPERATOR, "g") for one in (before, after)]
        assert len(diff_tables(*pair).changes) == 2 * len(new)

    def brute_force(_: Any) -> None:
        with mock.patch.object(diff, "_changed_keys", return_value=None):
            compared(_)

    comparison.ratio(compared, brute_force, goal=0.1, rounds=3)
