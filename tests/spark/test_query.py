"""State as frames of Spark: the rows of a restore, with exact types, pushed filters and names."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import functions as f

from arroyo_dagster.errors import InputError
from arroyo_dagster.spark.query.frames import frame_of
from arroyo_dagster.spark.versions import DATA_SOURCES, pyspark_version
from arroyo_dagster.state import EpochTable, StateCatalog, open_state, open_store
from arroyo_dagster.state.codec.common_types import TypeOptions
from arroyo_dagster.state.operations.query.diff import diff_tables
from tests.compat.arroyo import unpack
from tests.internals import LocalRun
from tests.jobs import word_job

FLOORED = TypeOptions(nanos="floor")


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> StateCatalog:
    return open_state(unpack("flights", tmp_path_factory.mktemp("flights")))


@pytest.fixture(scope="module")
def reading(session: Any) -> Any:
    if pyspark_version() < DATA_SOURCES:
        pytest.skip("this pyspark has no data sources in Python")
    from arroyo_dagster.spark.query.source import register_source

    register_source(session)
    return session


def tables(state: StateCatalog) -> list[EpochTable]:
    return [table for job in state.jobs() for table in job.epoch().tables()]


def counted(rows: pa.Table | pa.RecordBatch) -> Counter[str]:
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
    assert table.to_spark(reading).columns == table.schema.names


def test_a_frame_has_the_rows_of_a_restore(session: Any, state: StateCatalog) -> None:
    for table in {len(table.schema): table for table in tables(state)}.values():
        batches = frame_of(session, table, types=FLOORED)._collect_as_arrow()
        assert sum(map(counted, batches), Counter()) == expected(table), table.name


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


def job_of_changes(tmp_path: Path) -> tuple[StateCatalog, LocalRun]:
    store = open_store(str(tmp_path / "state"))
    run = LocalRun.start(word_job(store, rows=60, keep_epochs=None), store)
    return open_state(str(tmp_path / "state")), run


def changed(rows: pa.Table) -> Counter[str]:
    return Counter(repr(row) for row in rows.to_pylist())


def test_changes_are_a_stream_of_epochs(reading: Any, tmp_path: Path) -> None:
    state, run = job_of_changes(tmp_path)
    for _ in range(3):
        run.step()
    source = reading.readStream.format("arroyo").options(
        table='"words/main".keep."rows"', changes="true", nanos="floor", partitions="2"
    )

    def read_what_is_there() -> pa.Table:
        query = (
            source.load(state.store.url)
            .writeStream.format("parquet")
            .option("checkpointLocation", str(tmp_path / "offsets"))
            .trigger(availableNow=True)
            .start(str(tmp_path / "rows"))
        )
        assert query.awaitTermination(60)
        if query.exception() is not None:
            raise query.exception()
        return reading.read.parquet(str(tmp_path / "rows")).toArrow()

    job = state.job("main")
    first = read_what_is_there()
    assert set(first.column("_change").to_pylist()) == {"inserted"}
    assert set(first.column("_epoch").to_pylist()) == {3}
    whole = job.epoch(3).table("keep", "rows").to_arrow()
    assert changed(first.select(whole.column_names)) == changed(FLOORED.convert(whole))
    for _ in range(3):
        run.step()
    found = read_what_is_there()
    expected = changed(first)
    for before, after in ((3, 4), (4, 5), (5, 6)):
        diff = diff_tables(*(job.epoch(at).table("keep", "rows") for at in (before, after)))
        numbered = diff.changes.append_column(
            "_epoch", pa.array([after] * len(diff.changes), pa.int64())
        )
        expected += changed(FLOORED.convert(numbered))
    assert changed(found) == expected
    assert changed(read_what_is_there()) == expected
    once = reading.read.format("arroyo").options(
        table='"words/main".keep."rows"', changes="true", nanos="floor", epoch="3"
    )
    assert changed(once.load(state.store.url).toArrow()) == expected - changed(first)
