"""State as frames of Spark: the rows of a restore, with exact types, pushed filters and names."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import functions as f

from arroyo_dagster.errors import InputError, NotFoundError
from arroyo_dagster.spark.query.frames import frame_of, register_views
from arroyo_dagster.spark.query.source import register_source
from arroyo_dagster.state.codec.common_types import TypeOptions
from arroyo_dagster.state.operations.query.state import StateCatalog, open_state
from arroyo_dagster.state.operations.query.table import EpochTable
from tests.compat.arroyo import unpack

FLOORED = TypeOptions(nanos="floor")


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> StateCatalog:
    return open_state(unpack("flights", tmp_path_factory.mktemp("flights")))


@pytest.fixture(scope="module")
def reading(session: Any) -> Any:
    register_source(session)
    return session


def tables(state: StateCatalog) -> list[EpochTable]:
    return [table for job in state.jobs() for table in job.epoch().tables()]


def counted(rows: pa.Table) -> Counter[str]:
    return Counter(map(repr, rows.to_pylist()))


def expected(table: EpochTable) -> Counter[str]:
    return counted(FLOORED.convert(table.to_arrow()))


def read(session: Any, state: StateCatalog, table: EpochTable, **options: str) -> Any:
    reader = session.read.format("arroyo").options(table=str(table.name), **options)
    return reader.load(state.store.url)


def test_the_source_gives_the_rows_of_a_restore(reading: Any, state: StateCatalog) -> None:
    kinds = {(table.scan.name, len(table.schema)): table for table in tables(state)}
    for table in kinds.values():
        rows = read(reading, state, table, nanos="floor").toArrow()
        assert counted(rows) == expected(table), table.name
        rows = frame_of(reading, table, types=FLOORED).toArrow()
        assert counted(rows) == expected(table), table.name
    assert table.to_spark(reading).columns == table.schema.names


def test_filters_and_columns_are_pushed_down(reading: Any, state: StateCatalog) -> None:
    table = state.table("same_aircraft.join_5.left")
    rows = table.to_arrow(["tailnum", "seq"])
    wanted = rows.column("tailnum")[0].as_py()
    found = (
        reading.read.format("arroyo")
        .schema("seq long, tailnum string")
        .load(state.store.url, table=str(table.name))
        .filter(f.col("tailnum") == wanted)
    )
    assert found.columns == ["seq", "tailnum"]
    same = [row for row in rows.to_pylist() if row["tailnum"] == wanted]
    assert Counter(map(repr, found.toArrow().select(["tailnum", "seq"]).to_pylist())) == Counter(
        map(repr, same)
    )
    plan = found._jdf.queryExecution().toString()
    assert "PushedFilters" in plan or "tailnum" in plan


def test_metadata_tables_and_views_have_the_names_of_sql(reading: Any, state: StateCatalog) -> None:
    jobs = reading.read.format("arroyo").load(state.store.url, table="jobs")
    assert {row.job for row in jobs.collect()} == {job.name for job in state.jobs()}
    names = register_views(reading, state, ["same_aircraft"])
    assert "arroyo.same_aircraft.join_5.left" in names
    count = reading.sql("select count(*) from `arroyo.same_aircraft.join_5.left`").first()[0]
    assert count == state.table("same_aircraft.join_5.left").to_arrow().num_rows


def test_wrong_options_and_names_are_named(reading: Any, state: StateCatalog) -> None:
    for options, message in (
        ({}, "option table is missing"),
        ({"table": "same_aircraft.join_5.lfet"}, "did you mean left"),
        ({"table": "same_aircrat.join_5.left"}, "did you mean same_aircraft"),
        ({"table": "jobs", "epohc": "1"}, "did you mean epoch"),
        ({"table": "jobs", "raw": "perhaps"}, "raw"),
        ({"table": "jobs", "nanos": "half"}, "nanos"),
    ):
        with pytest.raises(PySparkException, match=message):
            reading.read.format("arroyo").options(**options).load(state.store.url).schema.names
    with pytest.raises(NotFoundError, match="did you mean tailnum"):
        frame_of(reading, state.table("same_aircraft.join_5.left"), columns=["tailnumb"])


def test_types_that_spark_does_not_have_are_exact() -> None:
    nanos = pa.array([-1, 1500, None], pa.timestamp("ns"))
    rows = pa.table(
        {
            "u": pa.array([2**64 - 1, 0, None], pa.uint64()),
            "t": nanos,
            "l": pa.array([[2**63], None, []], pa.list_(pa.uint64())),
            "s": pa.array(
                [{"d": dt.timedelta(microseconds=5)}, None, {"d": None}],
                pa.struct([("d", pa.duration("ns"))]),
            ),
            "m": pa.array([[("a", 1)], None, []], pa.map_(pa.string(), pa.uint8())),
        }
    )
    with pytest.raises(InputError, match="no exact form"):
        TypeOptions().convert(rows)
    floored = TypeOptions(nanos="floor").convert(rows)
    assert floored.column("u").to_pylist() == [Decimal(2**64 - 1), Decimal(0), None]
    assert floored.column("t").cast(pa.int64()).to_pylist() == [-1, 1, None]
    assert floored.column("l").to_pylist() == [[Decimal(2**63)], None, []]
    assert floored.column("m").to_pylist() == [[("a", 1)], None, []]
    assert floored.slice(1).column("l").to_pylist() == [None, []]
    exact = TypeOptions(nanos="long").convert(rows.slice(1))
    assert exact.column("t").to_pylist() == [1500, None]
    with pytest.raises(InputError, match="unsigned"):
        TypeOptions(unsigned="long").convert(rows.select(["u"]))


def test_a_scan_reads_workers_disks_through_the_store(
    reading: Any, state: StateCatalog, tmp_path: Path
) -> None:
    table = state.table("same_aircraft.join_5.left").raw()
    frame = read(reading, state, table, raw="true", partitions="3")
    assert frame.rdd.getNumPartitions() == min(3, len(set(table.scan.paths)))
    assert frame.count() == table.to_arrow().num_rows
