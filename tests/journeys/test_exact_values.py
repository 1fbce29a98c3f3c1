"""Values leave the state as they are, or with an error: whole numbers, views, reserved names;
DuckDB and Polars read our raw files, and see what our own readers see."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import arroyo_dagster as ad
from arroyo_dagster import cli
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

MOST = 2**64 - 1


class Keep(ad.Operator):
    """Keeps all rows in a table."""

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema

    def tables(self) -> list[Any]:
        config = ad.timestamp_table_config(
            "rows", retention_micros=10**12, schema=self.schema, keys=[]
        )
        return [config]

    def process_batch(self, batch: pa.RecordBatch, ctx: Any, collector: Any) -> None:
        ctx.table_manager.get_expiring_time_key_table("rows").insert(batch)


def write(url: str, columns: dict[str, pa.Array], parquet: Path | None = None) -> None:
    rows = next(iter(columns.values()))
    times = pa.array(range(len(rows)), pa.timestamp("us"))
    table = pa.table({**columns, "at": times})
    pipeline = ad.Pipeline("exact")
    source: ad.Source = ad.TableSource(table, rows_per_epoch=100)
    if parquet is not None:
        pq.write_table(table, parquet)
        source = ad.ParquetReplay(str(parquet))
        assert "string_view" in str(source.schema)
    stream = pipeline.source("in", source, timestamp="at")
    stream.apply("keep", Keep(pipeline.sources["in"].schema))
    ad.run_pipeline(pipeline, ad.open_store(url))


def call(url: str, *arguments: str) -> Any:
    done = CliRunner().invoke(cli.main, [*arguments, "--url", url])
    assert "Traceback" not in done.output
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


@pytest.fixture
def numbers(tmp_path: Path) -> str:
    url = f"file://{tmp_path}/state"
    write(
        url,
        {
            "u": pa.array([MOST, None, MOST], pa.uint64()),
            "i": pa.array([2**63 - 1, None, 2**63 - 1], pa.int64()),
            "small": pa.array([2**31 - 1] * 3, pa.int32()),
            "list": pa.array([[MOST, None], None, [1]], pa.list_(pa.uint64())),
            "struct": pa.array([{"x": MOST}, {"x": None}, None], pa.struct([("x", pa.uint64())])),
        },
    )
    return url


def test_whole_numbers_beside_nulls_stay_whole_in_pandas(numbers: str) -> None:
    state = ad.open_state(numbers)
    frame = state.job("exact/main").epoch().table("keep", "rows").to_pandas()
    assert frame["u"].tolist()[0] == MOST
    assert frame["u"].isna().tolist() == [False, True, False]
    assert frame["i"].tolist()[0] == 2**63 - 1
    assert list(frame["list"][0]) == [MOST, None]
    assert frame["struct"][0] == {"x": MOST}


@pytest.mark.parametrize("column", ["u", "i"])
def test_a_sum_never_wraps(numbers: str, column: str) -> None:
    table = '"exact/main".keep.rows'
    done = call(numbers, "sql", f"select sum({column}) as n from {table}", "--format", "jsonl")
    assert done.exit_code != 0
    assert "64 bits" in done.output
    assert "as double" in done.output
    done = call(
        numbers, "sql", f"select sum({column}) / 2 as n, avg({column}) as m from {table}", "--json"
    )
    (row,) = json.loads(done.stdout)
    assert row["n"] == pytest.approx(row["m"]) == pytest.approx({"u": MOST, "i": 2**63}[column])


def test_sums_of_small_numbers_are_wide(numbers: str) -> None:
    query = (
        'select sum(r.small) as n, max(r.small) as m from "exact/main".keep.rows r '
        'join "exact/main".keep.rows s on r.small = s.small '
        "group by r.small having sum(r.small) > 5"
    )
    done = call(numbers, "sql", query, "--json")
    assert json.loads(done.stdout) == [{"n": 9 * (2**31 - 1), "m": 2**31 - 1}]


def test_every_text_format_has_all_digits(numbers: str) -> None:
    query = 'select u, i from "exact/main".keep.rows'
    for form in ("jsonl", "csv"):
        done = call(numbers, "sql", query, "--format", form)
        assert str(MOST) in done.stdout
        assert str(2**63 - 1) in done.stdout
    assert [*csv.reader(io.StringIO(done.stdout))][2] == ["", ""]


# ---- exports -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["epoch", "Epoch", "EPOCH"])
def test_an_export_refuses_a_column_named_like_its_partition(tmp_path: Path, name: str) -> None:
    url = f"file://{tmp_path}/state"
    write(url, {name: pa.array([1, 2])})
    for form in ("parquet", "delta"):
        target = f"{tmp_path}/{form}"
        done = call(
            url, "export", "exact/main", "keep", "rows", f"file://{target}", "--format", form
        )
        assert done.exit_code != 0, form
        assert f"'{name}'" in done.output
        assert not [*Path(target).rglob("*.parquet")]


def test_a_delta_export_refuses_columns_that_differ_by_case_only(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/state"
    write(url, {"key": pa.array([1, 2]), "Key": pa.array([3, 4])})
    target = f"file://{tmp_path}/delta"
    done = call(url, "export", "exact/main", "keep", "rows", target, "--format", "delta")
    assert done.exit_code != 0
    assert "'key'" in done.output
    assert "'Key'" in done.output


# ---- types that state files do not have ----------------------------------------------------------

NAMES = pa.struct([("names", pa.list_view(pa.string_view())), ("n", pa.uint64())])
VIEWS = {
    "text": pa.array(["ada", None, "a text that is longer than twelve bytes"], pa.string_view()),
    "bytes": pa.array([b"x", None, b""], pa.binary_view()),
    "list": pa.array([[1], None, []], pa.list_view(pa.int64())),
    "large": pa.array([["a", None], None, ["b"]], pa.large_list_view(pa.string_view())),
    "struct": pa.array([{"names": ["a"], "n": 1}, None, {"names": None, "n": None}], NAMES),
}


@pytest.mark.parametrize("kind", ["table", "parquet"])
def test_views_are_stored_as_plain_types(tmp_path: Path, kind: str) -> None:
    url = f"file://{tmp_path}/state"
    columns = VIEWS
    if kind == "parquet":
        columns = {name: VIEWS[name] for name in ("text", "bytes")}
    write(url, columns, parquet=tmp_path / "rows.parquet" if kind == "parquet" else None)
    rows = ad.open_state(url).job("exact/main").epoch().table("keep", "rows").to_arrow()
    for name, values in columns.items():
        assert rows[name].to_pylist() == values.to_pylist(), name
    assert "view" not in str(rows.schema)
    assert call(url, "verify", "exact/main").exit_code == 0


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
