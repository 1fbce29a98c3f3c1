"""What a real Arroyo wrote, read whole: every value of the description that an independent reader
gives of it, at every epoch of every job, content digests included. Queries of
every table, in each way to read, give the rows of a restore."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from arroyo_dagster.state import (
    Checkpoint,
    CheckpointState,
    EpochTable,
    GlobalKeyedTable,
    JobPaths,
    ObjectStore,
    OperatorCheckpoint,
    ParquetBackend,
    StateCatalog,
    StatePath,
    TableName,
    WriteProtected,
    find_job,
    list_epochs,
    list_jobs,
    open_state,
    open_store,
)
from arroyo_dagster.state.codec.bincode.arrow_values import decode_to_arrow
from arroyo_dagster.state.codec.plain import plain_scalar, unique_names
from arroyo_dagster.state.metadata.objects import MetadataReader
from arroyo_dagster.state.operations.query.expiring_scan import ExpiringScan
from arroyo_dagster.state.operations.query.names import parse_name
from arroyo_dagster.state.planning.restore.recovery import resolve_with
from tests.compat.arroyo import ARCHIVES, description, unpack
from tests.formats import ExpiringTimeKeyConfig, ExpiringTimeKeyFiles, GlobalKeyedFiles, decode_file
from tests.internals import Restore, restored_rows
from tests.shares import Share, all_but, share_or_all
from tests.stores import Counting

Described = Mapping[str, Any]


class Root:
    """One archive, unpacked, and what is said of it; each data file is read once."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.store: ObjectStore = WriteProtected(open_store(url))
        self.described: dict[str, Any] = description(name)
        self._files: dict[StatePath, tuple[pa.Table, int, int]] = {}

    def jobs(self) -> Iterable[tuple[JobPaths, Described]]:
        for name, job in self.described.items():
            yield find_job(self.store, name), job

    def epochs(self) -> Iterable[tuple[Checkpoint, Described]]:
        for paths, job in self.jobs():
            backend = ParquetBackend(self.store, paths)
            for epoch in job["epochs"]:
                yield backend.load(epoch["epoch"]), epoch

    def tables(self) -> Iterable[tuple[OperatorCheckpoint, TableName, Described]]:
        for checkpoint, epoch in self.epochs():
            for name, one in epoch["operators"].items():
                operator = checkpoint.operator(name)
                assert operator is not None
                for table, facts in one["tables"].items():
                    yield operator, TableName(table), facts

    def file(self, path: StatePath) -> tuple[pa.Table, int, int]:
        """Rows, the sum of their hashes, and bytes."""
        if path not in self._files:
            data = self.store.read(path)
            rows, _ = decode_file(data, path)
            self._files[path] = rows, digest(rows), len(data)
        return self._files[path]


def digest(rows: pa.Table) -> int:
    """As the description defines it: BLAKE2b of the repr of each row, summed over 64 bits.

    The first byte of each hash is the highest; times are numbers at any depth.
    """
    columns = [as_plain(rows.column(index)) for index in range(rows.num_columns)]
    return sum(
        int.from_bytes(hashlib.blake2b(repr(row).encode(), digest_size=8).digest(), "big")
        for row in zip(*columns, strict=True)
    )


def as_plain(column: pa.ChunkedArray) -> list[Any]:
    found: list[Any] = column.cast(timeless(column.type)).to_pylist()
    return found


def timeless(kind: pa.DataType) -> pa.DataType:
    """A type with numbers where it has times."""
    if pa.types.is_timestamp(kind):
        return pa.int64()
    if pa.types.is_struct(kind):
        fields = [kind.field(index) for index in range(kind.num_fields)]
        return pa.struct([field.with_type(timeless(field.type)) for field in fields])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(timeless(kind.value_type)))
    return kind


@pytest.fixture(scope="module", params=ARCHIVES)
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Root:
    return Root(request.param, unpack(request.param, tmp_path_factory.mktemp(request.param)))


def test_the_jobs_and_their_layouts_are_those_described(root: Root) -> None:
    found = {str(paths.root): paths.layout.value for paths in list_jobs(root.store)}
    assert found == {name: job["layout"] for name, job in root.described.items()}


def test_every_epoch_says_what_was_described(root: Root) -> None:
    seen = 0
    for paths, job in root.jobs():
        backend = ParquetBackend(root.store, paths)
        assert backend.epochs() == [epoch["epoch"] for epoch in job["epochs"]]
    for checkpoint, epoch in root.epochs():
        assert (checkpoint.epoch, checkpoint.min_epoch) == (epoch["epoch"], epoch["min_epoch"])
        assert set(epoch["operators"]) == {one.operator for one in checkpoint.operators}
        assert len(checkpoint.operators) == len(epoch["operators"])
        assert checkpoint.state is CheckpointState.READY
        assert checkpoint.record_version == 1
        if root.name == "leader":
            assert checkpoint.worker_generation == epoch["generation"]
            assert checkpoint.parent_ref == epoch["parent"]
            assert checkpoint.needs_commit == epoch["needs_commit"]
        seen += 1
    assert seen == sum(len(job["epochs"]) for job in root.described.values()) > 20


def test_every_epoch_is_shown_whole_and_nothing_beside_them_but_what_is_known(root: Root) -> None:
    for paths, job in root.jobs():
        found = list_epochs(root.store, paths)
        ready = [one for one in found if one.state is CheckpointState.READY]
        assert [one.epoch for one in ready] == [epoch["epoch"] for epoch in job["epochs"]]
        assert all(one.problem is None and one.missing == 0 for one in found)
        others = {one.state for one in found} - {CheckpointState.READY}
        # The two workers that were killed left an epoch half written.
        assert others <= ({CheckpointState.INVISIBLE} if root.name == "leader" else set())


def test_every_operator_says_what_was_described(root: Root) -> None:
    for checkpoint, epoch in root.epochs():
        for name, one in epoch["operators"].items():
            operator = checkpoint.operator(name)
            assert operator is not None
            assert {
                "operator_id": operator.operator,
                "epoch": operator.epoch,
                "parallelism": operator.parallelism,
                "min_watermark_us": operator.min_watermark_micros,
                "max_watermark_us": operator.max_watermark_micros,
            } == {key: value for key, value in one.items() if key != "tables"}
            assert set(operator.tables) == set(operator.configs) == set(one["tables"])


def test_every_table_is_configured_as_described(root: Root) -> None:
    for operator, name, facts in root.tables():
        config, files = operator.configs[name], operator.tables[name]
        assert config.config.description == facts["description"]
        assert config.state_version == facts["state_version"]
        assert len(files.paths) == facts["files"]
        if isinstance(files, GlobalKeyedFiles):
            assert facts["kind"] == "global"
            assert config.uses_two_phase_commit == facts["two_phase_commit"]
            assert len(files.commit_data_by_subtask) == facts["commit_data_subtasks"]
            assert list(files.paths) == facts.get("paths", list(files.paths))
        else:
            assert isinstance(config.config, ExpiringTimeKeyConfig)
            assert facts["kind"] == "expiring"
            assert config.config.retention_micros == facts["retention_us"]
            assert config.config.generational == facts["generational"]
            assert time_files(files) == facts.get("file_info", time_files(files))


def time_files(files: ExpiringTimeKeyFiles) -> list[dict[str, Any]]:
    return [
        {
            "epoch": file.epoch,
            "file": file.path,
            "level": file.compaction_generation,
            "max_routing_key": file.max_routing_key,
            "max_timestamp_us": file.max_timestamp_micros,
            "min_routing_key": file.min_routing_key,
        }
        for file in files.files
    ]


def test_rows_bytes_columns_times_and_digests_equal_the_description(root: Root) -> None:
    compared, entries = 0, 0
    for operator, name, facts in root.tables():
        parts = [root.file(path) for path in operator.tables[name].paths]
        tables = [rows for rows, _, _ in parts]
        assert sum(rows.num_rows for rows in tables) == facts["rows"]
        assert sum(size for _, _, size in parts) == facts["bytes"]
        total = sum(hashed for _, hashed, _ in parts) % 2**64
        assert f"{total:016x}" == facts["digest"], (operator.operator, name)
        if "columns" in facts and tables:
            assert columns_of(tables[0].schema) == facts["columns"]
        if facts.get("timestamp_ns"):
            assert times_of(tables) == facts["timestamp_ns"]
        if "entries_hex" in facts:
            pairs = sorted(
                [key.hex(), value.hex()]
                for rows in tables
                for key, value in zip(*(column.to_pylist() for column in rows.columns), strict=True)
            )
            assert pairs == sorted(facts["entries_hex"])
            entries += len(pairs)
        compared += 1
    assert compared > 100
    assert entries > 10


def columns_of(schema: pa.Schema) -> list[list[str]]:
    return [
        [field.name, str(field.type) + ("" if field.nullable else " not null")] for field in schema
    ]


def times_of(tables: Sequence[pa.Table]) -> list[int]:
    found = [
        value
        for rows in tables
        for value in rows.column("_timestamp").cast(pa.int64()).to_pylist()
        if value is not None
    ]
    return [min(found), max(found)]


@share_or_all(4)
def test_every_epoch_of_every_job_can_be_restored(root: Root, share: Share) -> None:
    for paths, job in root.jobs():
        backend = ParquetBackend(root.store, paths)
        for epoch in share(job["epochs"]):
            assert backend.prepare_checkpoint_load(epoch["epoch"]).epoch == epoch["epoch"]


def test_the_next_start_of_a_leader_would_restore_the_newest_epoch(root: Root) -> None:
    if root.name != "leader":
        return
    for paths, job in root.jobs():
        asked: Callable[[StatePath], Any] = MetadataReader(root.store, paths).fact
        fence = asked(paths.current_generation)
        starting = fence.worker_generation + 1
        found = resolve_with(asked, paths, starting, {}, as_arroyo=True)
        assert isinstance(found, Restore)
        assert (found.manifest.epoch, found.replay_commit) == (job["epochs"][-1]["epoch"], False)


def test_nothing_was_written_while_all_this_was_read(root: Root) -> None:
    counting = Counting(root.store)
    for paths, _ in root.jobs():
        backend = ParquetBackend(counting, paths)
        assert [backend.load(epoch) for epoch in backend.epochs()]
    assert not {"put", "create", "delete_many"} & set(counting.calls)


ROWS_TO_LOOK_UP = 3
COMPARED = {
    "=": pc.equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}


@pytest.fixture(scope="module", params=all_but(ARCHIVES, ["leader"]))
def state(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> StateCatalog:
    return open_state(unpack(request.param, tmp_path_factory.mktemp(request.param)))


def tables(state: StateCatalog) -> Iterator[EpochTable]:
    for job in state.jobs():
        numbers = job.epochs()
        for number in {numbers[0], numbers[-1]}:
            yield from job.epoch(number).tables()


def counted(rows: pa.Table) -> Counter[str]:
    """Rows as a multiset."""
    columns = [[repr(plain_scalar(value)) for value in column] for column in rows.columns]
    return Counter(map(repr, zip(*columns, strict=True)))


def same_rows(found: pa.Table, expected: pa.Table) -> bool:
    """Whether both hold the same rows, in any order; fast where the order is the same."""
    return found.equals(expected) or counted(found) == counted(expected)


def brute_force(table: EpochTable) -> pa.Table:
    """The rows that a restore holds, by the code that `rows` and `verify` use."""
    scan = table.scan
    if isinstance(scan, ExpiringScan):
        rows = restored_rows(
            scan.store, scan.operator, scan.name, managed=scan.checkpoint.progress is not None
        ).rows
        return rows.rename_columns(unique_names(rows.schema.names))
    stored = GlobalKeyedTable(scan.operator.configs[scan.name], scan.store)
    held = stored.load_with_version(scan.paths)
    kinds = (scan.form.key_type, scan.form.value_type)
    entries = (list(held), [value for _, value in held.values()])
    columns = [
        pa.chunked_array([column], pa.binary())
        if kind is None
        else decode_to_arrow(pa.chunked_array([column], pa.binary()), kind)
        for column, kind in zip(entries, kinds, strict=True)
    ]
    return pa.Table.from_arrays(columns, schema=scan.schema)


def test_every_way_to_read_gives_the_rows_of_a_restore(state: StateCatalog) -> None:
    inspected = 0
    for table in tables(state):
        expected = counted(brute_force(table))
        rows = table.to_arrow()
        assert counted(rows) == expected, table.name
        assert rows.schema.equals(table.schema)
        parts = [part for split in table.splits(3) for part in table.read(split)]
        assert sum(map(counted, parts), Counter()) == expected, table.name
        assert table.to_polars().collect().height == rows.num_rows
        some = table.schema.names[:2]
        assert same_rows(table.to_arrow(some), rows.select(some))
        assert table.to_arrow(limit=2).num_rows == min(2, rows.num_rows)
        at_epoch = replace(table.name, job=f"{table.name.job}@{table.epoch}")
        assert state.table(str(at_epoch)).epoch == table.epoch
        inspected += rows.num_rows
    assert inspected


def test_raw_rows_are_all_stored_rows(state: StateCatalog) -> None:
    for table in tables(state):
        raw = table.raw().to_arrow()
        paths = set(raw.column("_file").to_pylist())
        assert paths <= set(table.scan.paths)
        assert set(raw.column("_operation").to_pylist()) <= {"insert"}
        assert raw.num_rows >= table.to_arrow().num_rows or not table.scan.divisible_by_file


def test_filters_and_look_ups_agree_with_all_rows(state: StateCatalog) -> None:
    looked_up = 0
    for table in tables(state):
        rows = table.to_arrow()
        # Only of the newest epoch: these read each file seven times per column.
        if table.epoch == state.job(table.name.job).epochs()[-1]:
            for position, name in enumerate(table.schema.names):
                looked_up += _filters_agree(table, rows, name, position % 2)
        keys = list(table.key_columns)
        listed = rows.select(keys).to_pylist()
        for row in rows.select(keys).slice(0, ROWS_TO_LOOK_UP).to_pylist() if keys else ():
            if any(isinstance(value, dict | float) for value in row.values()):
                continue
            found = table.lookup(row if isinstance(table.scan, ExpiringScan) else row["key"])
            same = [all(one[k] == row[k] for k in keys) for one in listed]
            assert same_rows(found, rows.filter(pa.array(same))), table.name
            looked_up += 1
    assert looked_up


def _filters_agree(table: EpochTable, rows: pa.Table, name: str, first: int) -> int:
    """Every other relation, from the first one on: the columns take turns."""
    kind = rows.schema.field(name).type
    values: list[pa.Scalar] = list(rows.column(name).drop_null().slice(0, ROWS_TO_LOOK_UP))
    if not values or pa.types.is_nested(kind) or pa.types.is_floating(kind):
        return 0
    for relation, compare in list(COMPARED.items())[first::2]:
        found = table.to_arrow(where=[(name, relation, values[-1])])
        mask = pc.fill_null(compare(rows.column(name), values[-1]), False)
        assert same_rows(found, rows.filter(mask)), (table.name, name, relation)
    within = pc.is_in(rows.column(name), pa.array(values, kind))
    found = table.to_arrow(where=[(name, "in", values)])
    assert same_rows(found, rows.filter(within)), (table.name, name)
    return 1


def test_names_of_tables_survive_quoting(state: StateCatalog) -> None:
    for table in tables(state):
        assert parse_name(str(table.name)) == table.name
