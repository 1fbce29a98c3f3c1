"""Values leave the state as they are, or with an error: whole numbers, views, reserved names."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import arroyo_dagster as ad
from arroyo_dagster import cli

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
