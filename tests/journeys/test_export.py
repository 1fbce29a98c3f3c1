"""Exports: every epoch exactly once, whatever dies when, and changes that add up."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from deltalake import DeltaTable, write_deltalake
from pyiceberg.catalog.sql import SqlCatalog

from arroyo_dagster import (
    DeltaTarget,
    Epoch,
    IcebergTarget,
    MemoryStore,
    ObjectStore,
    ParquetTarget,
    StateJob,
    StatePath,
    cli,
    export_changes,
    export_epochs,
    open_state,
    open_store,
)
from arroyo_dagster.errors import (
    ConflictError,
    FormatError,
    InputError,
    NotFoundError,
    StorageError,
)
from arroyo_dagster.state.codec.common_types import TypeOptions
from arroyo_dagster.state.operations.export import epochs, tables
from arroyo_dagster.state.operations.export.delta_table import OpenDeltaTable
from arroyo_dagster.state.operations.export.epochs import change_feed
from arroyo_dagster.state.operations.export.iceberg_table import OpenIcebergTable
from arroyo_dagster.state.operations.export.lake_table import OpenTable
from arroyo_dagster.state.operations.export.tables import SOURCE, LakeTarget
from arroyo_dagster.state.operations.export.targets import ExportUnit
from tests.faulty_stores import Crash, FaultInjecting
from tests.internals import CHANGE, Change
from tests.jobs import as_multiset, copy_into, listing, written_by_word_job

PROJECT = Path(__file__).parents[2]


class DeltaPlace:
    """A folder with a Delta table."""

    opened: type[OpenTable] = OpenDeltaTable

    def __init__(self, root: Path) -> None:
        self.root = root

    def target(self, **more: Any) -> LakeTarget:
        return DeltaTarget(url=f"file://{self.root}/table", **more)

    @property
    def words(self) -> list[str]:
        return [f"{self.root}/table", "--format", "delta"]

    def rows(self) -> pa.Table:
        return DeltaTable(f"{self.root}/table").to_pyarrow_table()

    def commits(self) -> list[str]:
        found = DeltaTable(f"{self.root}/table").history()
        return [one["arroyoEpoch"] for one in reversed(found) if "arroyoEpoch" in one]

    def append(self, rows: pa.Table) -> None:
        write_deltalake(f"{self.root}/table", rows, mode="append")

    def create(self, columns: pa.Schema) -> None:
        DeltaTable.create(f"{self.root}/table", columns)


class IcebergPlace:
    """A folder with a catalog and an Iceberg table."""

    opened: type[OpenTable] = OpenIcebergTable

    def __init__(self, root: Path) -> None:
        self.root = root
        self.catalog = {
            "name": "test",
            "type": "sql",
            "uri": f"sqlite:///{root}/catalog.db",
            "warehouse": f"file://{root}/warehouse",
        }

    def target(self, **more: Any) -> LakeTarget:
        return IcebergTarget(table="db.words", catalog=self.catalog, **more)

    @property
    def words(self) -> list[str]:
        given = [f"--property={name}={value}" for name, value in self.catalog.items()]
        return ["db.words", "--format", "iceberg", *given]

    def rows(self) -> pa.Table:
        return SqlCatalog(**self.catalog).load_table("db.words").scan().to_arrow()

    def commits(self) -> list[str]:
        snapshots = SqlCatalog(**self.catalog).load_table("db.words").snapshots()
        return [one.summary["arroyo.epoch"] for one in snapshots if one.summary is not None]

    def append(self, rows: pa.Table) -> None:
        SqlCatalog(**self.catalog).load_table("db.words").append(rows)

    def create(self, columns: pa.Schema) -> None:
        catalog = SqlCatalog(**self.catalog)
        catalog.create_namespace("db")
        catalog.create_table("db.words", columns)


class FilesPlace:
    """A folder with a folder of Parquet files, as readers of Hive's partitions see it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def target(self) -> ParquetTarget:
        types = TypeOptions(nanos="floor")
        return ParquetTarget(store=open_store(f"{self.root}/table"), types=types)

    @property
    def words(self) -> list[str]:
        return [f"{self.root}/table", "--nanos", "floor"]

    def rows(self) -> pa.Table:
        return ds.dataset(f"{self.root}/table", partitioning="hive").to_table()


Place = DeltaPlace | IcebergPlace
PLACES: dict[str, type[Place]] = {"delta": DeltaPlace, "iceberg": IcebergPlace}
AnyPlace = Place | FilesPlace
ALL_PLACES: dict[str, type[AnyPlace]] = {**PLACES, "parquet": FilesPlace}


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return PLACES[request.param](tmp_path)


@pytest.fixture(params=ALL_PLACES)
def anywhere(request: pytest.FixtureRequest, tmp_path: Path) -> AnyPlace:
    return ALL_PLACES[request.param](tmp_path)


@pytest.fixture(scope="module")
def job() -> StateJob:
    return open_state(
        written_by_word_job(rows=60, keep_epochs=None, retention_micros=20_000_000)
    ).job("main")


def of_epoch(rows: pa.Table, epoch: int) -> pa.Table:
    return rows.filter(pa.compute.equal(rows["epoch"], epoch)).drop_columns(["epoch"])


def rows_of(place: AnyPlace, job: StateJob, epoch: int) -> pa.Table:
    """The rows of an epoch, as the place is to hold them."""
    types = place.target().types
    assert types is not None
    return types.convert(job.epoch(epoch).table("keep", "rows").to_arrow())


def assert_exact(place: AnyPlace, job: StateJob, epochs: Iterable[int]) -> None:
    """Compare the table with every epoch's rows, as multisets."""
    found = place.rows()
    assert {*found["epoch"].to_pylist()} == {*epochs}
    for epoch in epochs:
        rows = rows_of(place, job, epoch)
        assert as_multiset(of_epoch(found, epoch).select(rows.column_names)) == as_multiset(rows)


def export(place: AnyPlace, job: StateJob, epochs: Iterable[Epoch], **more: Any) -> list[Any]:
    return list(export_epochs(job, "keep", "rows", place.target(**more), epochs))


def test_every_epoch_is_in_the_table_once_in_any_order(place: Place, job: StateJob) -> None:
    numbers = job.epochs()
    (newest,) = export(place, job, numbers[-1:])
    assert newest.new
    assert newest.files == 1
    assert_exact(place, job, numbers[-1:])
    assert [one.new for one in export(place, job, numbers)] == [True] * (len(numbers) - 1) + [False]
    assert_exact(place, job, numbers)
    commits = place.commits()
    assert commits == [str(one) for one in (numbers[-1], *numbers[:-1])]
    again = export(place, job, numbers)
    assert not any(one.new for one in again)
    assert [one.rows for one in again] == [
        job.epoch(one).table("keep", "rows").to_arrow().num_rows for one in numbers
    ]
    assert place.commits() == commits


def test_a_large_epoch_is_several_files_in_one_commit(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are closed at a size, so that no more than one is in memory."""
    monkeypatch.setattr(tables, "PART_BYTES", 1)
    pieces = [pa.table({"a": [at]}) for at in range(3)]
    unit = ExportUnit(source="a", epoch=Epoch(1), finished_at_micros=1)
    found = place.target().write(unit, pieces, pieces[0].schema)
    assert (found.files, found.rows) == (3, 3)
    assert place.commits() == ["1"]
    assert sorted(place.rows()["a"].to_pylist()) == [0, 1, 2]


def exported(store: ObjectStore, epoch: int) -> pa.Table:
    folder = StatePath(f"epoch={epoch}")
    done = json.loads(store.read(folder / "_SUCCESS"))
    names = [f"part-{at:05}.parquet" for at in range(done["exported"]["files"])]
    return pa.concat_tables([pq.read_table(BytesIO(store.read(folder / name))) for name in names])


def test_every_epoch_is_in_the_folder_once_as_it_is(job: StateJob) -> None:
    target = ParquetTarget(store=MemoryStore())
    found = list(export_epochs(job, "keep", "rows", target, job.epochs()))
    assert all(one.new for one in found)
    before = listing(target.store)
    again = list(export_epochs(job, "keep", "rows", target, job.epochs()))
    assert not any(one.new for one in again)
    assert [one.rows for one in again] == [one.rows for one in found]
    assert listing(target.store) == before
    for one in found:
        rows = job.epoch(one.epoch).table("keep", "rows").to_arrow()
        assert as_multiset(exported(target.store, one.epoch)) == as_multiset(rows)


# ---- crashes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
def test_an_export_that_ends_around_its_commit_is_completed(
    place: Place, job: StateJob, behind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = job.epochs()
    export(place, job, numbers[:1])
    real = place.opened.append

    def crash(*given: Any, **named: Any) -> None:
        if behind:
            real(*given, **named)
        raise Crash

    monkeypatch.setattr(place.opened, "append", crash)
    with pytest.raises(Crash):
        export(place, job, numbers)
    monkeypatch.undo()
    assert_exact(place, job, numbers[: 2 if behind else 1])
    assert [one.new for one in export(place, job, numbers)][:2] == [False, not behind]
    assert_exact(place, job, numbers)


def test_an_interrupted_export_of_files_is_completed(job: StateJob) -> None:
    whole = MemoryStore()
    list(export_epochs(job, "keep", "rows", ParquetTarget(store=whole), job.epochs()))
    for at, mode in itertools.product(range(1, 6), ("before", "after")):
        store = MemoryStore()
        faulty = ParquetTarget(store=FaultInjecting(store, at, mode=mode, crash=True))
        with pytest.raises(Crash):
            list(export_epochs(job, "keep", "rows", faulty, job.epochs()))
        list(export_epochs(job, "keep", "rows", ParquetTarget(store=store), job.epochs()))
        assert listing(store).keys() == listing(whole).keys()
        for epoch in job.epochs():
            assert exported(store, epoch).equals(exported(whole, epoch))


KILLED = """
import os, signal, sys
from pathlib import Path
from arroyo_dagster import open_state
from tests.journeys import test_export as lakes

place = lakes.PLACES[sys.argv[1]](Path(sys.argv[2]))
job = open_state(f"file://{sys.argv[2]}/state").job("main")
place.opened.append = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
lakes.export(place, job, job.epochs())
"""


@pytest.mark.parametrize("kind", PLACES)
def test_a_process_killed_between_data_and_commit_loses_and_doubles_nothing(
    kind: str, job: StateJob, tmp_path: Path
) -> None:
    copy_into(open_store(f"file://{tmp_path}/state"), job.catalog.store)
    done = subprocess.run(
        [sys.executable, "-c", KILLED, kind, str(tmp_path)],
        cwd=PROJECT,
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    place = PLACES[kind](tmp_path)
    assert place.rows().num_rows == 0
    assert [*tmp_path.rglob("part-*.parquet")], "its data file is there, and in no table"
    export(place, job, job.epochs())
    assert_exact(place, job, job.epochs())


def test_two_exports_at_the_same_time_add_an_epoch_once(
    place: Place, job: StateJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = job.epochs()
    export(place, job, numbers[:1])
    real, raced = place.opened.append, []

    def after_another(*given: Any, **named: Any) -> None:
        if not raced:
            raced.append(1)
            export(place, job, numbers[1:2])  # both have found that the epoch is missing
        real(*given, **named)

    monkeypatch.setattr(place.opened, "append", after_another)
    (found,) = export(place, job, numbers[1:2])
    assert raced
    assert not found.new
    assert_exact(place, job, numbers[:2])


# ---- what is refused -----------------------------------------------------------------------------


def test_places_and_epochs_that_do_not_fit_are_refused(anywhere: AnyPlace, job: StateJob) -> None:
    export(anywhere, job, job.epochs()[:1])
    with pytest.raises(ConflictError, match="epochs of words/main keep rows"):
        list(export_epochs(job, "count", "counts", anywhere.target(), job.epochs()[:1]))
    with pytest.raises(NotFoundError):
        export(anywhere, job, [Epoch(999)])
    with pytest.raises(NotFoundError):
        list(change_feed(job, "count", "counts", Epoch(999)))


def test_a_table_of_others_is_refused(place: Place, job: StateJob) -> None:
    place.create(pa.schema([pa.field("n", pa.int64())]))
    with pytest.raises(InputError, match="not created by an export"):
        export(place, job, job.epochs()[:1])


@pytest.mark.parametrize("at", [0, 1], ids=["older", "newest"])
def test_epochs_of_a_job_that_began_anew_are_refused(
    anywhere: AnyPlace, job: StateJob, at: int
) -> None:
    """Its epoch 1 is another one: taking it for the old one would lose all of its rows."""
    numbers = job.epochs()[:2]
    export(anywhere, job, numbers)
    finished = job.epoch(numbers[1]).checkpoint.finish_time_micros
    unit = ExportUnit(
        source="words/main keep rows", epoch=numbers[at], finished_at_micros=finished + 1
    )
    with pytest.raises(ConflictError, match="of another state of the job"):
        anywhere.target().exported(unit)
    with pytest.raises(ConflictError, match="of another state of the job"):
        anywhere.target().write(unit, [], pa.schema([]))


def test_a_damaged_marker_of_an_export_is_refused_by_its_name(job: StateJob) -> None:
    target, epoch = ParquetTarget(store=MemoryStore()), job.epochs()[0]
    marker = StatePath(f"epoch={epoch}/_SUCCESS")
    for damaged in (b"", b"{}", b'{"version":1,"unit":1,"exported":{}}'):
        target.store.put(marker, damaged)
        with pytest.raises(FormatError) as refused:
            list(export_epochs(job, "keep", "rows", target, [epoch]))
        assert refused.value.facts["path"] == marker


def test_a_store_that_fails_is_named(job: StateJob) -> None:
    failing = ParquetTarget(store=FaultInjecting(MemoryStore(), 1))
    with pytest.raises(StorageError, match="injected"):
        list(export_epochs(job, "count", "counts", failing, [job.epochs()[-1]]))


# ---- columns -------------------------------------------------------------------------------------


def written(place: Place, epoch: int, rows: pa.Table, **more: Any) -> Any:
    unit = ExportUnit(source="a", epoch=Epoch(epoch), finished_at_micros=epoch)
    target = place.target(**more)
    return target.exported(unit) or target.write(unit, [rows], rows.schema)


def test_later_epochs_may_have_other_columns(place: Place) -> None:
    written(place, 1, pa.table({"a": [1], "gone": ["x"], "wide": [1]}))
    written(place, 2, pa.table({"a": [2], "more": [{"n": [1, None]}], "wide": [2]}))
    written(place, 3, pa.table({"a": [3], "wide": pa.array([3], pa.int32())}))
    rows = place.rows().sort_by("epoch").to_pylist()
    assert rows == [
        {"epoch": 1, "a": 1, "gone": "x", "wide": 1, "more": None},
        {"epoch": 2, "a": 2, "gone": None, "wide": 2, "more": {"n": [1, None]}},
        {"epoch": 3, "a": 3, "gone": None, "wide": 3, "more": None},
    ]
    with pytest.raises(InputError, match="a is string in this epoch, int64 in the table"):
        written(place, 4, pa.table({"a": ["4"]}))
    with pytest.raises(InputError, match="have a column 'epoch' already"):
        written(place, 4, pa.table({"epoch": [4]}))
    assert place.rows().num_rows == 3


def test_a_required_column_that_an_epoch_lacks_is_named(place: Place) -> None:
    columns = [pa.field("epoch", pa.int64()), pa.field("must", pa.int64(), nullable=False)]
    place.target().lake.create(pa.schema(columns), ["epoch"], {SOURCE: "a"})
    with pytest.raises(InputError, match="must is required in the table"):
        written(place, 1, pa.table({"a": [1]}))


def test_rows_with_an_epoch_column_have_it_beside_the_epochs(place: Place) -> None:
    written(place, 7, pa.table({"epoch": ["x"]}), epoch_column="at_epoch")
    assert place.rows().to_pylist() == [{"at_epoch": 7, "epoch": "x"}]


def test_every_type_of_arrow_keeps_its_values(place: Place) -> None:
    columns = {
        "u64": pa.array([2**64 - 1, None], pa.uint64()),
        "u32": pa.array([2**32 - 1, 0], pa.uint32()),
        "ns": pa.array([1_000, -1_000], pa.timestamp("ns")),
        "zoned": pa.array([1_000, None], pa.timestamp("ns", "Europe/Berlin")),
        "took": pa.array([5_000, -5_000], pa.duration("ns")),
        "text": pa.array(["a", "b"], pa.large_string()),
        "coded": pa.array(["a", "a"]).dictionary_encode(),
        "bytes": pa.array([b"a", None], pa.binary()),
        "map": pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.uint64())),
        "day": pa.array([0, 1], pa.date32()),
        "flag": pa.array([True, None]),
    }
    written(place, 1, pa.table(columns))
    found = place.rows().drop_columns(["epoch"])
    wanted = pa.table(
        {
            **columns,
            "u64": columns["u64"].cast(pa.decimal128(20, 0)),
            "u32": columns["u32"].cast(pa.int64()),
            "ns": columns["ns"].cast(pa.timestamp("us")),
            "zoned": columns["zoned"].cast(pa.timestamp("us", "UTC")),
            "took": pa.array([5, -5]),
        }
    )
    for name in wanted.column_names:
        assert found[name].to_pylist() == wanted[name].to_pylist(), name
    with pytest.raises(InputError, match="nanos=floor"):
        written(place, 2, pa.table({"ns": pa.array([1], pa.timestamp("ns"))}))


def test_an_epoch_without_rows_is_exported_once(place: Place) -> None:
    empty = pa.table({"a": pa.array([], pa.int64())})
    assert written(place, 1, empty).new
    assert not written(place, 1, empty).new
    written(place, 3, pa.table({"a": [1]}))
    assert not written(place, 2, empty).new, "nothing to add"
    assert place.rows().to_pylist() == [{"epoch": 3, "a": 1}]


def test_changes_add_up_to_the_newest_epoch(anywhere: AnyPlace, job: StateJob) -> None:
    numbers = job.epochs()
    for _ in range(2):
        list(export_changes(job, "keep", "rows", anywhere.target(), numbers[0]))
    first = rows_of(anywhere, job, numbers[0])
    rows, changes = as_multiset(first), anywhere.rows()
    kinds = changes[CHANGE].to_pylist()
    taken = changes.select(first.column_names)
    added = [kind in (Change.INSERTED.value, Change.UPDATED_TO.value) for kind in kinds]
    rows += as_multiset(taken.filter(pa.array(added)))
    rows -= as_multiset(taken.filter(pa.array([not one for one in added])))
    newest = rows_of(anywhere, job, numbers[-1])
    assert Counter(rows) == as_multiset(newest)
    feed = list(change_feed(job, "count", "counts", numbers[0]))
    assert [one.epoch for one in feed] == numbers[1:]


def test_changes_that_do_not_follow_those_of_the_place_are_refused(
    anywhere: AnyPlace, job: StateJob
) -> None:
    """Epoch 2 was collected before epoch 3 was exported: what changed in between would be lost."""
    numbers = job.epochs()
    list(export_changes(job, "keep", "rows", anywhere.target(), numbers[0], numbers[1]))
    with pytest.raises(ConflictError, match=f"which end at epoch {numbers[1]}"):
        list(export_changes(job, "keep", "rows", anywhere.target(), numbers[2]))
    found = list(export_changes(job, "keep", "rows", anywhere.target(), numbers[1]))
    assert len(found) == len(numbers) - 2
    assert {*anywhere.rows()["epoch"].to_pylist()} <= {*numbers[1:]}


def test_epochs_without_changes_are_no_gap(
    place: Place, job: StateJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers, real = job.epochs(), epochs.diff_epochs

    def unchanged(before: Any, after: Any, *names: str) -> Any:
        found = real(before, after, *names)
        if after.number in (numbers[1], numbers[3]):
            return [replace(one, changes=one.changes.slice(0, 0)) for one in found]
        return found

    monkeypatch.setattr(epochs, "diff_epochs", unchanged)
    changes = ("keep", "rows", place.target(), numbers[0])
    first = list(export_changes(job, *changes, numbers[-2]))
    assert [one.new for one in first] == [True] * len(first)
    again = list(export_changes(job, *changes))
    assert [one.new for one in again] == [False] * len(first) + [True]
    assert {*place.rows()["epoch"].to_pylist()} == {*numbers[1:]} - {numbers[1], numbers[3]}
    monkeypatch.undo()
    with pytest.raises(ConflictError, match="do not follow"):
        list(export_changes(job, *changes))


# ---- the command ---------------------------------------------------------------------------------


def test_the_command_is_repeatable(anywhere: AnyPlace, job: StateJob, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/state"
    copy_into(open_store(url), job.catalog.store)
    words = ["export", "main", "keep", "rows", *anywhere.words, "--url", url]
    first = CliRunner().invoke(cli.main, [*words, "--every-epoch"])
    assert first.exit_code == 0, first.output
    assert "written" in first.output
    again = CliRunner().invoke(cli.main, words)
    assert "was there" in again.output
    assert_exact(anywhere, job, job.epochs())


def test_the_command_writes_no_files_among_the_checkpoints(job: StateJob, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/state"
    copy_into(open_store(url), job.catalog.store)
    words = ["export", "main", "keep", "rows", f"{tmp_path}/state", "--url", url]
    same = CliRunner().invoke(cli.main, words)
    assert "checkpoint URL itself" in same.output


def test_a_catalog_that_does_not_answer_is_named(job: StateJob) -> None:
    target = IcebergTarget(
        table="db.words", catalog={"name": "x", "type": "rest", "uri": "http://127.0.0.1:9"}
    )
    with pytest.raises(StorageError, match="pyiceberg failed"):
        list(export_epochs(job, "keep", "rows", target, job.epochs()))


def test_parquet_files_are_not_put_into_a_delta_table(job: StateJob, tmp_path: Path) -> None:
    place = DeltaPlace(tmp_path)
    export(place, job, job.epochs()[:1])
    store = open_store(f"{tmp_path}/table")
    before = sorted(info.path for info in store.list())
    target = ParquetTarget(store=store)
    with pytest.raises(InputError, match="is a Delta table"):
        list(export_epochs(job, "count", "counts", target, job.epochs()))
    assert sorted(info.path for info in store.list()) == before
