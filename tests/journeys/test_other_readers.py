"""DuckDB and Polars read our raw files, and see what our own readers see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pytest

from arroyo_dagster.state import (
    Epoch,
    ObjectStore,
    ParquetBackend,
    StatePath,
    TableName,
    open_store,
    timestamp_table_config,
)
from arroyo_dagster.state.tables.time_files import write_time_file
from tests.compat.arroyo import unpack
from tests.formats import ExpiringTimeKeyFiles, decode_file
from tests.internals import load_epoch
from tests.jobs import run_word_job, word_job

NESTED = pa.schema(
    [
        pa.field("k", pa.uint64(), nullable=False),
        pa.field("tags", pa.list_(pa.field("item", pa.string()))),
        pa.field("span", pa.struct([("start", pa.timestamp("ns")), ("n", pa.decimal128(20, 3))])),
        pa.field("_timestamp", pa.timestamp("ns"), nullable=False),
    ]
)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[ObjectStore, Path]:
    folder = tmp_path_factory.mktemp("job")
    store = open_store(str(folder))
    run_word_job(store, keep_epochs=None)
    return store, folder


def data_files(store: ObjectStore) -> list[str]:
    paths = word_job(store).paths
    backend = ParquetBackend(store, paths)
    listed = [path for epoch in backend.epochs() for path in load_epoch(store, paths, epoch).paths]
    return list(dict.fromkeys(listed))


def managed(store: ObjectStore, path: Any) -> pa.Table:
    return decode_file(store.read(path), path)[0]


def with_duckdb(file: Path) -> pa.Table:
    with duckdb.connect() as connection:
        return connection.read_parquet(str(file)).to_arrow_table()


def test_duckdb_reads_every_file_of_a_job(job: tuple[ObjectStore, Path]) -> None:
    store, folder = job
    files = data_files(store)
    assert {"-removed" in file for file in files} == {True, False}
    for path in files:
        expected, found = managed(store, path), with_duckdb(folder / path)
        assert found.schema.names == expected.schema.names
        assert found.schema.types == expected.schema.types
        assert found.to_pydict() == expected.to_pydict()


def test_polars_reads_every_file_of_a_job(job: tuple[ObjectStore, Path]) -> None:
    store, folder = job
    for path in data_files(store):
        expected, found = managed(store, path), pl.read_parquet(folder / path)
        assert found.columns == expected.schema.names
        assert found.equals(pl.DataFrame(expected))


def test_both_count_words_as_a_restore_does(job: tuple[ObjectStore, Path]) -> None:
    store, folder = job
    checkpoint = load_epoch(store, word_job(store).paths, 3)
    (keep,) = (one for one in checkpoint.operators if one.operator == "keep")
    files = keep.tables[TableName("rows")]
    assert isinstance(files, ExpiringTimeKeyFiles)
    paths = [str(folder / path) for path in files.paths]
    rows = pa.concat_tables([managed(store, path) for path in files.paths])
    expected = sorted(
        (row["values"], row["counts"]) for row in rows["word"].value_counts().to_pylist()
    )
    with duckdb.connect() as connection:
        query = "SELECT word, count(*) FROM read_parquet(?) GROUP BY word ORDER BY word"
        assert connection.execute(query, [paths]).fetchall() == expected
    counted = pl.scan_parquet(paths).group_by("word").len().sort("word").collect()
    assert counted.rows() == expected


def test_unsigned_numbers_nanoseconds_and_nested_values_come_through_both(tmp_path: Path) -> None:
    config = timestamp_table_config("t", retention_micros=1, schema=NESTED, keys=["k"])
    rows = pa.table(
        [
            [2**64 - 1, 0],
            [["a", None], []],
            [{"start": 10**18 + 1, "n": 7}, None],
            [1, 10**18 + 999],
            pa.array([2**63, 2**64 - 1], pa.uint64()),
            [b"\x00", b"\x00"],
        ],
        schema=pa.schema(
            [*NESTED, ("_key_hash", pa.uint64()), pa.field("_operation", pa.binary())]
        ),
    )
    store = open_store(str(tmp_path))
    assert config.table == "t"
    write_time_file(store, rows, StatePath("f"), epoch=Epoch(1), timestamp_index=3)
    found = with_duckdb(tmp_path / "f")
    assert found.schema.field("k").type == pa.uint64()
    for at in (0, 1, 3, 4, 5):
        assert found.column(at).cast(rows.schema.field(at).type).equals(rows.column(at))
    starts = found.column(2).combine_chunks().field("start").cast(pa.int64())
    assert starts.to_pylist() == [10**18 + 1, None]
    polar = pl.read_parquet(tmp_path / "f")
    assert polar.equals(pl.DataFrame(rows))
    assert polar["_timestamp"].cast(pl.Int64).to_list() == [1, 10**18 + 999]


def test_duckdb_reads_columns_of_one_name_by_their_place(tmp_path: Path) -> None:
    """Of a real Arroyo: two aggregates named 0. Polars refuses such a file."""
    store = open_store(unpack("flights", tmp_path))
    seen = 0
    for info in store.list("median_delays"):
        if "/table-t-" not in info.path:
            continue
        expected = managed(store, info.path)
        found = with_duckdb(tmp_path / info.path)
        assert expected.schema.names.count("0") == 2
        assert found.schema.names[:4] == ["origin", "0", "0_1", "1"]
        assert found.num_rows == expected.num_rows
        assert found.column(2).to_pylist() == expected.column(2).to_pylist()
        with pytest.raises(pl.exceptions.PolarsError):
            pl.read_parquet(tmp_path / info.path)
        seen += 1
    assert seen > 3
