"""Versions of Delta and Iceberg tables: the rows that the table has, exactly, or an error."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.manifest import DataFileContent

from arroyo_dagster.errors import FormatError, InputError, NotFoundError, StorageError
from arroyo_dagster.state.runtime.lakes import snapshot as lake_snapshots
from arroyo_dagster.state.runtime.lakes.delta import delta_snapshot
from arroyo_dagster.state.runtime.lakes.iceberg import catalog_snapshot, iceberg_snapshot
from arroyo_dagster.state.runtime.lakes.snapshot import LakeSnapshot
from tests import lakes
from tests.contract import servers
from tests.lakes import field, in_any_order, mapped, rows_of
from tests.s3_servers import KEYS


class DeltaEvents:
    """A Delta table in a folder."""

    def __init__(self, root: Path) -> None:
        self.path = f"{root}/delta"

    def append(self, rows: pa.Table, partition_by: list[str] | None = None) -> None:
        write_deltalake(self.path, rows, mode="append", partition_by=partition_by)

    def at(self, version: int | None = None, **options: Any) -> LakeSnapshot:
        return delta_snapshot(self.path, version, options)

    def versions(self) -> list[int]:
        return list(range(DeltaTable(self.path).version() + 1))


class IcebergEvents:
    """An Iceberg table in a folder, with its catalog."""

    def __init__(self, root: Path) -> None:
        root.joinpath("iceberg").mkdir()
        self.catalog = SqlCatalog("lake", **lakes.catalog_of(root / "iceberg"))
        self.catalog.create_namespace("db")
        self.path = f"{root}/iceberg/warehouse/db/events"

    @property
    def table(self) -> Any:
        return self.catalog.load_table("db.events")

    def append(self, rows: pa.Table, partition_by: list[str] | None = None) -> None:
        if not self.catalog.table_exists("db.events"):
            table = self.catalog.create_table("db.events", rows.schema)
            with table.update_spec() as spec:
                for name in partition_by or ():
                    spec.add_identity(name)
        self.table.append(rows)

    def at(self, version: int | None = None, **options: Any) -> LakeSnapshot:
        return iceberg_snapshot(self.path, version, options)

    def versions(self) -> list[int]:
        return [one.snapshot_id for one in self.table.metadata.snapshots]


Events = DeltaEvents | IcebergEvents
KINDS: dict[str, type[Events]] = {"delta": DeltaEvents, "iceberg": IcebergEvents}


@pytest.fixture(params=KINDS)
def events(request: pytest.FixtureRequest, tmp_path: Path) -> Events:
    return KINDS[request.param](tmp_path)


def table_of(**columns: Any) -> pa.Table:
    return pa.table(columns)


NESTED = pa.struct([("x", pa.int64()), ("tags", pa.list_(pa.string()))])
EVERY = table_of(
    flag=pa.array([True, None, False]),
    small=pa.array([1, None, -(2**31)], pa.int32()),
    large=pa.array([2**63 - 1, None, -(2**63)], pa.int64()),
    real=pa.array([1.5, None, float("inf")], pa.float32()),
    double=pa.array([1e300, None, -0.0], pa.float64()),
    text=pa.array(["", None, "a\0é🙂"]),
    data=pa.array([b"\xff", None, b""]),
    day=pa.array([0, None, -1], pa.date32()),
    at=pa.array([1, None, -1], pa.timestamp("us", "UTC")),
    local=pa.array([1, None, -1], pa.timestamp("us")),
    price=pa.array([Decimal("1.10"), None, Decimal("-9.99")], pa.decimal128(20, 2)),
    nested=pa.array([{"x": 1, "tags": ["a", None]}, None, {"x": None, "tags": None}], NESTED),
    lists=pa.array([[[1], []], None, [None]], pa.list_(pa.list_(pa.int64()))),
    pairs=pa.array([[("a", 1)], None, [("b", None), ("c", 3)]], pa.map_(pa.string(), pa.int64())),
)


def test_every_type_and_null_is_read_as_it_was_written(events: Events) -> None:
    events.append(EVERY)
    events.append(EVERY.slice(1, 1))
    found = events.at()
    assert in_any_order(rows_of(found)) == in_any_order(
        EVERY.to_pylist() + EVERY.slice(1, 1).to_pylist()
    )
    assert not found.unreadable


def test_a_version_is_read_as_it_was(events: Events) -> None:
    events.append(table_of(v=[1]))
    events.append(table_of(v=[2, 3]))
    first, second = events.versions()
    assert rows_of(events.at(first)) == [{"v": 1}]
    assert in_any_order(rows_of(events.at())) == in_any_order({"v": one} for one in (1, 2, 3))
    assert events.at().summary == events.at(second).summary != events.at(first).summary
    with pytest.raises(InputError, match=r"(version|snapshot) 77"):
        events.at(77)


STRANGE = [None, "", "x/y é", "a=b%20c", "../..", "__HIVE_DEFAULT_PARTITION__x", " ", "🙂+&?#"]


def test_partitions_have_their_values_whatever_their_folders_are_called(events: Events) -> None:
    rows = table_of(
        v=range(8),
        p=STRANGE,
        day=pa.array([0, None, 2, 3, 4, 5, 6, 7], pa.date32()),
        at=pa.array([None, 1, 2, 3, 4, 5, 6, 7], pa.timestamp("us", "UTC")),
        n=pa.array([1, 2, None, -4, 5, 6, 7, 8], pa.int32()),
    )
    events.append(rows, ["p", "day", "at", "n"])
    wanted = rows.to_pylist()
    if isinstance(events, DeltaEvents):
        wanted[1]["p"] = None  # by the format: an empty text is no value
    assert in_any_order(rows_of(events.at())) == in_any_order(wanted)


def test_an_empty_table_has_no_rows(events: Events) -> None:
    events.append(table_of(v=pa.array([], pa.int64())))
    assert rows_of(events.at()) == []
    assert events.at().tasks(4) == []


def test_a_large_file_is_read_in_parts_each_row_once(
    events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    events.append(table_of(v=range(1000)))
    (file,) = events.at().files
    whole = pq.read_table(f"/{file.key}")
    pq.write_table(whole, f"/{file.key}", row_group_size=100)
    monkeypatch.setattr(lake_snapshots, "PART_BYTES", 200)
    found = events.at()
    assert len(found.tasks(1)) > 3
    assert sorted(row["v"] for row in rows_of(found)) == list(range(1000))


def test_many_files_are_few_tasks(events: Events) -> None:
    for number in range(5):
        events.append(table_of(v=[number]))
    assert [len(task) for task in events.at().tasks(2)] in ([3, 2], [2, 2, 1])


def test_a_file_that_is_gone_is_named(events: Events) -> None:
    events.append(table_of(v=[1]))
    found = events.at()
    Path(f"/{found.files[0].key}").unlink()
    with pytest.raises(NotFoundError, match="does not exist any more"):
        rows_of(found)


def test_what_is_no_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="there is no `_delta_log`"):
        delta_snapshot(str(tmp_path))
    with pytest.raises(NotFoundError, match="is no Iceberg table"):
        iceberg_snapshot(str(tmp_path))
    for read in (delta_snapshot, iceberg_snapshot):
        with pytest.raises(NotFoundError):
            read(f"{tmp_path}/nothing")


# ---- Delta ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["name", "id"])
def test_columns_of_delta_are_found_by_their_mapping(tmp_path: Path, mode: str) -> None:
    """`v` was renamed from `w`, and a new `w` was added: the old file has neither name."""
    inner = {"type": "struct", "fields": [field("y", "long", **mapped(5))]}
    ids = pa.schema(
        [
            pa.field("col-1", pa.int64(), metadata={"PARQUET:field_id": "1"}),
            pa.field(
                "col-4",
                pa.struct([pa.field("col-5", pa.int64(), metadata={"PARQUET:field_id": "5"})]),
                metadata={"PARQUET:field_id": "4"},
            ),
        ]
    )
    old = pa.table({"col-1": [1], "col-4": [{"col-5": 7}]}).cast(ids)
    lakes.write_delta_log(
        tmp_path / "t",
        [
            field("v", "long", **mapped(1)),
            field("w", "long", **mapped(2)),
            field("p", "string", **mapped(3)),
            field("s", inner, **mapped(4)),
        ],
        {"a.parquet": (old, {"col-3": "z"}, {})},
        features=["columnMapping"],
        configuration={"delta.columnMapping.mode": mode},
        partitioned_by=["p"],
    )
    found = delta_snapshot(str(tmp_path / "t"))
    assert rows_of(found) == [{"v": 1, "w": None, "p": "z", "s": {"y": 7}}]


V = [field("v", "long")]
ROWS = {"a.parquet": (pa.table({"v": [1, 2, 3]}), {}, {})}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a deletion vector": (
        {
            "files": {"a.parquet": (*ROWS["a.parquet"][:2], lakes.deletion_vector(1))},
            "features": ["deletionVectors"],
        },
        "has deletion vectors: deleted rows",
    ),
    "a feature that deltalake knows": ({"features": ["variantType"]}, "read here: variantType"),
    "a feature of the future": ({"features": ["rowShuffle"]}, "a reader that deltalake is not"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_delta_table_that_cannot_be_read_exactly_is_refused(tmp_path: Path, name: str) -> None:
    given, expected = REFUSED[name]
    lakes.write_delta_log(tmp_path / "t", V, **{"files": ROWS, **given})
    with pytest.raises(InputError, match=expected) as caught:
        delta_snapshot(str(tmp_path / "t"))
    assert "the Delta table file://" in str(caught.value)
    assert "Next: " in str(caught.value)


def test_deletion_vectors_may_be_allowed_where_there_are_none(tmp_path: Path) -> None:
    lakes.write_delta_log(tmp_path / "t", V, ROWS, features=["deletionVectors"])
    assert len(rows_of(delta_snapshot(str(tmp_path / "t")))) == 3


def test_a_type_that_is_not_read_is_listed_and_the_others_are_read(tmp_path: Path) -> None:
    lakes.write_delta_log(tmp_path / "t", [*V, field("odd", "interval year to month")], ROWS)
    found = delta_snapshot(str(tmp_path / "t"))
    assert found.unreadable == {"odd": "interval year to month"}
    assert len(rows_of(found)) == 3


def test_widened_columns_and_those_of_later_versions_are_read(tmp_path: Path) -> None:
    fields = [
        *V,
        field("price", "decimal(20,2)"),
        field("later", {"type": "struct", "fields": [field("a", "long"), field("b", "string")]}),
    ]
    old = pa.table(
        {
            "v": pa.array([1], pa.int32()),
            "price": pa.array([Decimal("1.1")], pa.decimal128(5, 1)),
            "later": pa.array([{"a": 1}], pa.struct([("a", pa.int64())])),
        }
    )
    new = pa.table({"v": [2]})
    files = {"a.parquet": (old, {}, {}), "b.parquet": (new, {}, {})}
    lakes.write_delta_log(tmp_path / "t", fields, files, features=["typeWidening"])
    assert rows_of(delta_snapshot(str(tmp_path / "t"))) == [
        {"v": 1, "price": Decimal("1.10"), "later": {"a": 1, "b": None}},
        {"v": 2, "price": None, "later": None},
    ]


def test_values_that_do_not_fit_are_no_rows(tmp_path: Path) -> None:
    fields = [field("at", "timestamp")]
    rows = pa.table({"at": pa.array([1], pa.timestamp("ns", "UTC"))})
    lakes.write_delta_log(tmp_path / "t", fields, {"a.parquet": (rows, {}, {})})
    with pytest.raises(FormatError, match=r"column 'at' is timestamp\[ns"):
        rows_of(delta_snapshot(str(tmp_path / "t")))


def test_a_column_that_must_not_be_null_is_not_made_up(tmp_path: Path) -> None:
    fields = [*V, {**field("must", "long"), "nullable": False}]
    lakes.write_delta_log(tmp_path / "t", fields, ROWS)
    with pytest.raises(FormatError, match="lacks the columns must"):
        rows_of(delta_snapshot(str(tmp_path / "t")))


# ---- Iceberg -------------------------------------------------------------------------------------


@pytest.fixture
def iceberg(tmp_path: Path) -> IcebergEvents:
    return IcebergEvents(tmp_path)


def test_columns_of_iceberg_are_found_by_their_ids(iceberg: IcebergEvents) -> None:
    """A new column may have the name of one that was dropped: its values are not those."""
    inner = pa.struct([("y", pa.int64())])
    iceberg.append(table_of(v=[1], w=[10], s=pa.array([{"y": 5}], inner)))
    with iceberg.table.update_schema() as change:
        change.delete_column("w")
        change.rename_column("v", "renamed")
        change.rename_column(("s", "y"), "z")
    with iceberg.table.update_schema() as change:
        from pyiceberg.types import LongType

        change.add_column("w", LongType())
        change.add_column("v", LongType())
        change.add_column(("s", "y"), LongType())
    first = iceberg.versions()[0]
    assert rows_of(iceberg.at()) == [{"renamed": 1, "s": {"z": 5, "y": None}, "w": None, "v": None}]
    assert rows_of(iceberg.at(first)) == [{"v": 1, "w": 10, "s": {"y": 5}}]


@pytest.mark.parametrize(
    "content", [DataFileContent.POSITION_DELETES, DataFileContent.EQUALITY_DELETES]
)
def test_an_iceberg_table_with_deleted_rows_is_refused(
    iceberg: IcebergEvents, tmp_path: Path, content: DataFileContent
) -> None:
    iceberg.append(table_of(v=[1, 2]))
    metadata = lakes.add_delete_file(iceberg.table, content, tmp_path)
    with pytest.raises(InputError, match="has delete files: deleted rows"):
        iceberg_snapshot(metadata)
    before = iceberg_snapshot(metadata, iceberg.versions()[0])
    assert rows_of(before) == [{"v": 1}, {"v": 2}]


def test_files_without_ids_are_read_by_the_name_mapping(
    iceberg: IcebergEvents, tmp_path: Path
) -> None:
    iceberg.append(table_of(v=[1]))
    pq.write_table(table_of(v=[2]), tmp_path / "added.parquet")
    iceberg.table.add_files([str(tmp_path / "added.parquet")])
    with iceberg.table.update_schema() as change:
        change.rename_column("v", "renamed")
    assert in_any_order(rows_of(iceberg.at())) == in_any_order([{"renamed": 1}, {"renamed": 2}])


def test_the_newest_metadata_is_one_file_or_the_user_names_it(iceberg: IcebergEvents) -> None:
    iceberg.append(table_of(v=[1]))
    location = iceberg.table.metadata_location
    assert "whether its catalog has committed" in iceberg.at().unknown[0]
    named = iceberg_snapshot(location)
    assert not named.unknown
    assert named.summary == iceberg.at().summary
    file = Path(location.removeprefix("file://"))
    shutil.copy(file, file.with_name(file.name.split("-")[0] + "-left-over.metadata.json"))
    with pytest.raises(InputError, match="several metadata files of the highest number"):
        iceberg.at()
    assert rows_of(iceberg_snapshot(location)) == [{"v": 1}]


def test_a_table_is_found_in_a_catalog_by_its_name(
    iceberg: IcebergEvents, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyiceberg import catalog
    from pyiceberg.utils.config import Config

    iceberg.append(table_of(v=[1]))
    for name, value in iceberg.catalog.properties.items():
        monkeypatch.setenv(f"PYICEBERG_CATALOG__LAKE__{name.upper()}", value)
    monkeypatch.setattr(catalog, "_ENV_CONFIG", Config())
    assert rows_of(catalog_snapshot("db.events", "lake")) == [{"v": 1}]
    with pytest.raises(NotFoundError, match=re.escape("db.nothing does not exist in the catalog")):
        catalog_snapshot("db.nothing", "lake")
    with pytest.raises(StorageError, match="the catalog 'absent' failed"):
        catalog_snapshot("db.events", "absent")


# ---- S3 ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with servers.moto_server() as host:
        servers.make_moto_bucket("lake")
        yield f"http://{host}"


def _delta_on_s3(rows: pa.Table, endpoint: str) -> Callable[[dict[str, Any]], LakeSnapshot]:
    keys = {f"aws_{name}": value for name, value in KEYS.items()}
    given = {**keys, "aws_endpoint_url": endpoint, "aws_allow_http": "true"}
    write_deltalake(
        "s3://lake/de lta", rows, partition_by=["p"], storage_options={**given}, mode="overwrite"
    )
    return lambda options: delta_snapshot("s3://lake/de lta", None, options)


def _iceberg_on_s3(rows: pa.Table, endpoint: str, root: Path) -> Any:
    catalog = SqlCatalog(
        "test",
        **{
            "uri": f"sqlite:///{root}/catalog.db",
            "warehouse": "s3://lake/ware house",
            "s3.endpoint": endpoint,
            "s3.access-key-id": KEYS["access_key_id"],
            "s3.secret-access-key": KEYS["secret_access_key"],
            "s3.region": KEYS["region"],
        },
    )
    catalog.create_namespace_if_not_exists("db")
    table = catalog.create_table("db.events", rows.schema)
    with table.update_spec() as spec:
        spec.add_identity("p")
    table.append(rows)
    return lambda options: iceberg_snapshot(table.location(), None, options)


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_on_s3_is_read_with_the_options_of_our_store(
    kind: str, endpoint: str, tmp_path: Path
) -> None:
    rows = table_of(v=range(3), p=["x/y é", None, "a=b%20c"])
    if kind == "delta":
        opened = _delta_on_s3(rows, endpoint)
    else:
        opened = _iceberg_on_s3(rows, endpoint, tmp_path)
    options: dict[str, Any] = {**KEYS, "endpoint": endpoint}
    for more in ({}, {"client": "fsspec"}):
        found = opened({**options, **more})
        assert in_any_order(rows_of(found)) == in_any_order(rows.to_pylist())
        assert KEYS["secret_access_key"] not in repr(found)
    nobody = {**options, "endpoint": "http://127.0.0.1:9", "max_retries": 0}
    with pytest.raises(StorageError) as caught:
        opened(nobody)
    assert "Next: " in str(caught.value)
