"""Delta and Iceberg tables as sinks: every row once, whatever dies when; no columns change."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.expressions import EqualTo, LessThan

from arroyo_dagster.errors import ArroyoStateError, InputError, NotFoundError, ProtocolError
from arroyo_dagster.state import DeltaSink, IcebergSink, Pipeline, TableSource, open_store
from arroyo_dagster.state.metadata.backend import StateBackend
from arroyo_dagster.state.runtime.in_process import run_pipeline
from arroyo_dagster.state.runtime.pipeline_run import RunOutcome
from arroyo_dagster.state.runtime.publisher import EpochPublisher
from arroyo_dagster.state.runtime.table_sink import TableSink

PROJECT = Path(__file__).parents[2]
ROWS = pa.table(
    {
        "word": [f"w{number % 5}" for number in range(40)],
        "n": range(40),
        "at": pa.array([number * 1_000_000 for number in range(40)], pa.timestamp("us", "UTC")),
    }
)
COLUMNS = ROWS.schema.append(pa.field("_timestamp", pa.timestamp("us"), nullable=False))


class DeltaPlace:
    """A folder with a Delta table and a job that writes it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = open_store(f"file://{root}/state")

    def sink(self) -> TableSink:
        return DeltaSink(f"{self.root}/table")

    def create(self, schema: pa.Schema) -> None:
        DeltaTable.create(f"{self.root}/table", schema)

    def partition(self, *columns: str) -> None:
        DeltaTable.create(f"{self.root}/table", COLUMNS, partition_by=list(columns))

    def append(self, rows: pa.Table) -> None:
        write_deltalake(f"{self.root}/table", rows, mode="append")

    def add_column(self) -> None:
        more = pa.table({"more": pa.array([], pa.string())})
        write_deltalake(f"{self.root}/table", more, mode="append", schema_mode="merge")

    def rows(self) -> pa.Table:
        return DeltaTable(f"{self.root}/table").to_pyarrow_table()

    def commits(self) -> list[str]:
        found = DeltaTable(f"{self.root}/table").history()
        return [one["arroyoEpoch"] for one in reversed(found) if "arroyoEpoch" in one]


class IcebergPlace:
    """A folder with a catalog, an Iceberg table and a job that writes it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = open_store(f"file://{root}/state")
        self.catalog = {
            "name": "test",
            "type": "sql",
            "uri": f"sqlite:///{root}/catalog.db",
            "warehouse": f"file://{root}/warehouse",
        }
        self.opened = SqlCatalog(**self.catalog)
        self.opened.create_namespace_if_not_exists("db")

    def sink(self) -> TableSink:
        if not self.opened.table_exists("db.words"):
            self.create(COLUMNS)
        return IcebergSink("db.words", self.catalog)

    def create(self, schema: pa.Schema) -> None:
        self.opened.create_table("db.words", schema)

    def partition(self, *columns: str) -> None:
        if not self.opened.table_exists("db.words"):
            self.create(COLUMNS)
        with self.opened.load_table("db.words").update_spec() as update:
            for column in columns:
                update.add_identity(column)

    def append(self, rows: pa.Table) -> None:
        self.opened.load_table("db.words").append(rows)

    def add_column(self) -> None:
        with self.opened.load_table("db.words").update_schema() as update:
            update.union_by_name(COLUMNS.append(pa.field("more", pa.string())))

    def rows(self) -> pa.Table:
        return self.opened.load_table("db.words").scan().to_arrow()

    def commits(self) -> list[str]:
        summaries = [one.summary for one in self.opened.load_table("db.words").snapshots()]
        assert {one["arroyo.job"] for one in summaries} <= {"words/main/out", None}
        return [one["arroyo.epoch"] for one in summaries if one["arroyo.epoch"]]


Place = DeltaPlace | IcebergPlace
PLACES: dict[str, type[Place]] = {"delta": DeltaPlace, "iceberg": IcebergPlace}


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return PLACES[request.param](tmp_path)


def built(place: Place, rows: pa.Table = ROWS, name: str = "words") -> Pipeline:
    pipeline = Pipeline(name, parallelism=2)
    source = TableSource(rows, rows_per_epoch=10)
    pipeline.source("rows", source, timestamp="at").key_by("word").sink("out", place.sink())
    return pipeline


def run(place: Place, rows: pa.Table = ROWS, name: str = "words", **options: Any) -> RunOutcome:
    return run_pipeline(built(place, rows, name), place.store, **options)


def assert_exact(place: Place, copies: int = 1) -> None:
    found = place.rows()
    assert sorted(found["n"].to_pylist()) == sorted([*range(40)] * copies)
    assert found.column_names == COLUMNS.names


def test_rows_are_in_the_table_once_one_commit_an_epoch(place: Place) -> None:
    assert run(place, max_epochs=1).epochs == 1
    run(place)
    assert_exact(place)
    assert place.commits() == ["1", "2", "3", "4"]
    found = place.rows().sort_by("n").select(ROWS.column_names).cast(ROWS.schema)
    assert found == ROWS.sort_by("n")


# ---- crashes -------------------------------------------------------------------------------------


class Crash(BaseException):
    """The end of a process, at one point."""


@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
@pytest.mark.parametrize(
    ("target", "name"),
    [(EpochPublisher, "publish"), (TableSink, "commit"), (StateBackend, "mark_committed")],
    ids=["publish", "table-commit", "mark"],
)
def test_a_run_that_ends_anywhere_in_a_commit_adds_each_row_once(
    place: Place, target: Any, name: str, behind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(place, max_epochs=1)
    real = getattr(target, name)

    def crash(*given: Any, **named: Any) -> None:
        if behind:
            real(*given, **named)
        raise Crash

    monkeypatch.setattr(target, name, crash)
    with pytest.raises(Crash):
        run(place)
    monkeypatch.undo()
    run(place)
    assert_exact(place)
    assert place.commits() == ["1", "2", "3", "4"]


KILLED = """
import os, signal, sys
from pathlib import Path
from arroyo_dagster.state.metadata.backend import StateBackend
from tests.journeys.test_table_sinks import PLACES, run

StateBackend.mark_committed = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
run(PLACES[sys.argv[1]](Path(sys.argv[2])))
"""


@pytest.mark.parametrize("kind", PLACES)
def test_a_process_killed_between_the_tables_commit_and_our_record_adds_each_row_once(
    kind: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, kind, str(tmp_path)],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    place = PLACES[kind](tmp_path)
    assert place.rows().num_rows == 10
    run(place)
    assert_exact(place)


def test_a_fenced_run_that_commits_late_adds_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have found that the token is missing, and commit the same epoch at the same time."""
    real = TableSink.check_files
    repeated: list[int] = []

    def commit_first(sink: TableSink, commit: Any) -> None:
        real(sink, commit)
        if not repeated:
            repeated.append(commit.epoch)
            place.sink().add_files(commit)

    monkeypatch.setattr(TableSink, "check_files", commit_first)
    run(place)
    assert repeated == [1]
    assert_exact(place)
    assert place.commits() == ["1", "2", "3", "4"]


def test_another_writer_that_commits_meanwhile_loses_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = TableSink.check_files
    other = ROWS.append_column(
        COLUMNS.field("_timestamp"), ROWS["at"].cast(pa.timestamp("us"))
    ).cast(COLUMNS)

    def append_first(sink: TableSink, commit: Any) -> None:
        real(sink, commit)
        if commit.epoch == 2 and place.rows().num_rows == 10:
            place.append(other)

    monkeypatch.setattr(TableSink, "check_files", append_first)
    run(place)
    assert_exact(place, copies=2)


# ---- partitions ----------------------------------------------------------------------------------

KEYS = [
    "a",
    None,
    "ü / = %",
    "a text longer than the sixteen characters of statistics",
    "a text long",
]
TIMES = pa.array([1_000_000, None, 3_600_000_000, 86_400_000_000, -1], pa.timestamp("us", "UTC"))
KEYED = pa.table(
    {
        "key": pa.array(KEYS * 4),
        "number": pa.array([0, 1, None, -7] * 5, pa.int32()),
        "flag": pa.array([True, False, None, True] * 5),
        "day": pa.array([0, -1, None, 20_000] * 5, pa.date32()),
        "time": pa.chunked_array([TIMES] * 4),
        "at": pa.array(range(20), pa.timestamp("us", "UTC")),
    }
)


def keyed(sink: TableSink) -> Pipeline:
    pipeline = Pipeline("keyed", parallelism=2)
    rows = pipeline.source("rows", TableSource(KEYED, rows_per_epoch=10), timestamp="at")
    rows.key_by("number").sink("out", sink)
    return pipeline


def assert_keyed(found: pa.Table) -> None:
    in_order = found.select(KEYED.column_names).cast(KEYED.schema).sort_by("at")
    assert in_order.to_pylist() == KEYED.to_pylist()


@pytest.mark.parametrize("columns", [["key"], ["number", "flag", "day"]], ids=",".join)
def test_rows_of_a_partitioned_delta_table_keep_their_values(
    columns: list[str], tmp_path: Path
) -> None:
    place = DeltaPlace(tmp_path)
    run_pipeline(keyed(DeltaSink(f"{tmp_path}/table", partition_by=columns)), place.store)
    assert_keyed(place.rows())
    table = DeltaTable(f"{tmp_path}/table")
    assert table.metadata().partition_columns == columns
    wanted = len({tuple(row[name] for name in columns) for row in KEYED.to_pylist()})
    assert len(table.partitions()) == wanted
    if columns == ["key"]:
        for key in filter(None, KEYS):  # files are found by their partitions
            assert table.to_pyarrow_table(filters=[("key", "=", key)]).num_rows == 4


@pytest.mark.parametrize(
    "transforms",
    [
        {"key": "identity"},
        {"number": "identity", "day": "identity"},
        {"time": "day"},
        {"time": "hour", "day": "month", "at": "year"},
    ],
    ids=str,
)
def test_rows_of_a_partitioned_iceberg_table_keep_their_values(
    transforms: dict[str, str], tmp_path: Path
) -> None:
    place = IcebergPlace(tmp_path)
    place.create(KEYED.schema.append(COLUMNS.field("_timestamp")))
    with place.opened.load_table("db.words").update_spec() as update:
        for column, transform in transforms.items():
            update.add_field(column, transform)
    run_pipeline(keyed(IcebergSink("db.words", place.catalog)), place.store)
    assert_keyed(place.rows())
    wanted = {
        tuple(_rounded(row[name], unit) for name, unit in transforms.items())
        for row in KEYED.to_pylist()
    }
    table = place.opened.load_table("db.words")
    assert table.inspect.partitions().num_rows == len(wanted)
    for key in filter(None, KEYS):  # files are found by their partitions
        assert table.scan(row_filter=EqualTo("key", key)).to_arrow().num_rows == 4
    assert table.scan(row_filter=LessThan("at", "1970-01-01T00:00:00.000010+00:00")).count() == 10


def _rounded(value: Any, unit: str) -> Any:
    digits = {"year": 4, "month": 7, "day": 10, "hour": 13}.get(unit)
    return value if value is None or digits is None else str(value)[:digits]


def test_partitions_that_a_sink_cannot_write_are_refused(tmp_path: Path) -> None:
    place = IcebergPlace(tmp_path)
    place.create(COLUMNS)
    with place.opened.load_table("db.words").update_spec() as update:
        update.add_field("n", "bucket[4]")
    with pytest.raises(InputError, match=r"partitions by bucket\[4\]"):
        place.sink()
    delta = DeltaPlace(tmp_path)
    for column in ("time", "nothing"):
        with pytest.raises(InputError, match="by which Delta can partition"):
            run_pipeline(keyed(DeltaSink(f"{tmp_path}/t", partition_by=[column])), delta.store)
    empty = KEYED.set_column(0, "key", pa.array([""] * 20))
    pipeline = Pipeline("empty")
    rows = pipeline.source("rows", TableSource(empty, rows_per_epoch=10), timestamp="at")
    rows.sink("out", DeltaSink(f"{tmp_path}/t", partition_by=["key"]))
    with pytest.raises(InputError, match="an empty text in 'key' would be null"):
        run_pipeline(pipeline, delta.store)


# ---- what is refused -----------------------------------------------------------------------------


def test_a_job_whose_state_was_deleted_is_not_taken_for_the_one_that_wrote(place: Place) -> None:
    run(place, max_epochs=1)
    shutil.rmtree(place.root / "state")
    with pytest.raises(ProtocolError, match=r"has epoch 1 .* another state") as found:
        run(place)
    assert "another name" in str(found.value.next_step)
    run(place, name="again")
    shutil.rmtree(place.root / "state")
    with pytest.raises(ProtocolError, match=r"has epoch 4 .* another state"):
        run(place, name="again")
    assert place.rows().num_rows == 10 + 40


def test_rows_with_other_columns_are_refused_before_anything_is_written(place: Place) -> None:
    run(place, max_epochs=1)
    before = [one.path for one in place.store.list()]
    wrong: list[tuple[pa.Table, str]] = [
        (ROWS.append_column("more", ROWS["n"]), "more is not in the table"),
        (ROWS.drop_columns("n"), "n is not in the rows"),
        (ROWS.set_column(1, "n", ROWS["n"].cast(pa.string())), "n is string in the rows, int64"),
    ]
    for rows, message in wrong:
        with pytest.raises(InputError, match=message) as found:
            run(place, rows)
        assert "never changes the columns" in str(found.value.next_step)
    assert [one.path for one in place.store.list()] == before
    run(place)
    assert_exact(place)


def test_a_table_that_was_altered_gets_the_epoch_that_is_pending(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(place, max_epochs=1)
    monkeypatch.setattr(TableSink, "commit", _crash)
    with pytest.raises(Crash):
        run(place)
    monkeypatch.undo()
    place.add_column()
    with pytest.raises(InputError, match="more is not in the rows"):
        run(place)
    more = ROWS.append_column("more", ROWS["word"])
    columns = pa.table({name: more[name] for name in ("word", "n", "at", "more")})
    run(place, columns)
    found = place.rows()
    assert sorted(found["n"].to_pylist()) == list(range(40))
    assert found["more"].null_count == 20  # of the two epochs before


def _crash(*_: Any) -> None:
    raise Crash


def test_a_table_that_is_partitioned_in_another_way_is_refused(place: Place) -> None:
    pipeline = built(place)
    place.partition("word")
    with pytest.raises(InputError, match="partitioned in another way") as found:
        run_pipeline(pipeline, place.store)
    assert found.value.facts["table_by"] == ["word"]
    assert found.value.facts["sink_by"] == []


def test_a_missing_file_is_named_and_the_table_stays(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(place, max_epochs=1)
    monkeypatch.setattr(TableSink, "commit", _crash)
    with pytest.raises(Crash):
        run(place)
    monkeypatch.undo()
    for file in place.root.rglob("0000002-*.parquet"):
        file.unlink()
    with pytest.raises(ProtocolError, match="a data file that a checkpoint must commit is missing"):
        run(place)
    assert place.rows().num_rows == 10


def test_unsigned_numbers_are_exact(tmp_path: Path) -> None:
    place = DeltaPlace(tmp_path)
    numbers = pa.array(range(2**64 - 40, 2**64), pa.uint64())
    run(place, ROWS.set_column(1, "n", numbers))
    found = place.rows()
    assert found.schema.field("n").type == pa.decimal128(20, 0)
    assert sorted(map(int, found["n"].to_pylist())) == numbers.to_pylist()


def test_times_that_a_table_cannot_hold_are_refused(place: Place) -> None:
    times = pa.array([1], pa.timestamp("ns"))
    rows = pa.table({"word": ["a"], "n": [1], "at": times})
    with pytest.raises(InputError, match="does not fit into the microseconds"):
        run(place, rows.set_column(2, "at", times.cast(pa.timestamp("ns", "UTC"))))


def test_a_table_of_delta_with_constraints_is_refused(tmp_path: Path) -> None:
    place = DeltaPlace(tmp_path)
    place.create(COLUMNS)
    DeltaTable(f"{tmp_path}/table").alter.add_constraint({"positive": "n >= 0"})
    with pytest.raises(InputError, match=r"cannot write to a Delta table with delta\.constraints"):
        run(place)


def test_an_iceberg_table_that_does_not_exist_is_named(tmp_path: Path) -> None:
    place = IcebergPlace(tmp_path)
    with pytest.raises(NotFoundError, match="the catalog has no such table") as found:
        IcebergSink("db.nothing", place.catalog)
    assert found.value.facts["table"] == "db.nothing"
    with pytest.raises(ArroyoStateError, match="pyiceberg failed"):
        IcebergSink("db.words", {"type": "rest", "uri": "http://127.0.0.1:9"})
