"""Jobs, epochs, tables and rows read from stores, none of which may be written to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import pyarrow as pa
import pytest

from arroyo_dagster import (
    GLOBAL_KEY_VALUE_SCHEMA,
    Catalogue,
    Epoch,
    JobId,
    JobPaths,
    KnownTable,
    MemoryStore,
    ObjectStore,
    OperatorCheckpoint,
    ParquetBackend,
    ReadOptions,
    StatePath,
    TableName,
    WorkerGeneration,
    WriteProtected,
    codec_for,
    describe_epoch,
    find_hash_variant,
    global_table_config,
    list_epochs,
    read_rows,
    verify_job,
)
from arroyo_dagster.errors import FormatError, StorageError
from arroyo_dagster.state.codec import metadata
from arroyo_dagster.state.codec.parquet import decode_file, encode_rows
from arroyo_dagster.state.codec.proto import state_pb2 as pb
from arroyo_dagster.state.model.checkpoints import LegacyCheckpoint
from arroyo_dagster.state.model.tables import GlobalKeyedFiles
from arroyo_dagster.state.model.types import SystemTimeNanos
from arroyo_dagster.state.operations.catalog.query import load_epoch
from arroyo_dagster.state.storage import Counting
from arroyo_dagster.state.storage.wrappers import Wrapper
from arroyo_dagster.state.tables.global_keys import first_entries
from tests.jobs import run_word_job, word_job

P = StatePath
T = TypeVar("T")


@pytest.fixture(scope="module")
def written() -> MemoryStore:
    store = MemoryStore()
    run_word_job(store, keep_epochs=None, merge_files_after=512)
    return store


@pytest.fixture
def store(written: MemoryStore) -> MemoryStore:
    """A copy that a test may break."""
    copy = MemoryStore()
    for info in written.list():
        copy.put(info.path, written.read(info.path))
    return copy


def paths_of(store: ObjectStore) -> JobPaths:
    return word_job(store).paths


def data_files(store: ObjectStore) -> list[StatePath]:
    checkpoint = load_epoch(store, paths_of(store))
    return [path for one in checkpoint.operators for path in one.paths]


# ---- epochs --------------------------------------------------------------------------------------


def test_every_state_of_a_checkpoint_is_told(store: MemoryStore) -> None:
    paths = paths_of(store)
    backend = ParquetBackend(store, paths)
    newest = backend.load()
    manifest = metadata.decode_manifest(store.read(newest.ref), newest.ref)
    store.delete_many([P(newest.ref.replace("checkpoint-manifest.pb", "committed.json"))])
    # Another generation lost epoch 6, left 7 without a claim, and 8 without a manifest.
    later = WorkerGeneration(2)
    for epoch in (6, 7):
        lost = replace(manifest, worker_generation=later, epoch=Epoch(epoch))
        store.put(paths.manifest(later, Epoch(epoch)), metadata.encode_manifest(lost))
    store.put(paths.checkpoint(Epoch(8), later) / "operator-x/table-t-000", b"x")
    found = list_epochs(WriteProtected(store), paths)
    assert [(one.epoch, one.worker_generation, one.state and one.state.value) for one in found] == [
        *((epoch, 1, "ready") for epoch in range(1, 6)),
        (6, 1, "committing"),
        (6, 2, "orphaned"),
        (7, 2, "unclaimed"),
        (8, 2, "invisible"),
    ]
    assert [one.problem for one in found] == [None] * 9


def test_an_epoch_that_expires_while_it_is_listed_is_left_out(store: MemoryStore) -> None:
    paths = paths_of(store)

    class Expiring(Counting):
        def list_dir(self, prefix: str = "") -> Any:
            listing = super().list_dir(prefix)
            if prefix == paths.epochs:
                store.delete_many([paths.epoch_record(Epoch(1)), load_epoch(store, paths, 1).ref])
            return listing

    found = list_epochs(Expiring(store), paths)
    assert [one.epoch for one in found] == [2, 3, 4, 5, 6]
    assert not any(one.problem for one in found)


# ---- the legacy layout ---------------------------------------------------------------------------


@pytest.fixture
def legacy(store: MemoryStore) -> JobPaths:
    """The same job's newest epoch, told in the legacy layout as epochs 3 and 4."""
    paths = JobPaths(JobId("old"))
    newest = load_epoch(store, paths_of(store))
    for epoch in (Epoch(3), Epoch(4)):
        for operator in newest.operators:
            data = metadata.encode_operator(replace(operator, epoch=epoch, job=paths.job))
            store.put(paths.operator_metadata(operator.operator, epoch), data)
        head = LegacyCheckpoint(
            job=paths.job,
            epoch=epoch,
            min_epoch=Epoch(0),
            start_time_micros=1,
            finish_time_micros=2,
            operators=tuple(operator.operator for operator in newest.operators),
        )
        store.put(paths.legacy_metadata(epoch), metadata.encode_legacy_checkpoint(head))
    for number in (1, 5):  # the remains of an expired epoch, and one being written
        store.put(paths.checkpoint(Epoch(number)) / "operator-x/table-t-000", b"x")
    return paths


# ---- tables --------------------------------------------------------------------------------------


def breaking(path_of: Callable[[ObjectStore], StatePath], data: bytes | None) -> Any:
    def damage(store: MemoryStore) -> StatePath:
        path = path_of(store)
        if data is None:
            store.delete_many([path])
        else:
            store.put(path, data)
        return path

    return damage


def with_unknown_kind(store: MemoryStore) -> StatePath:
    ref = load_epoch(store, paths_of(store)).ref
    manifest = pb.CheckpointManifest()
    manifest.ParseFromString(store.read(ref))
    table = next(t for one in manifest.operators for t in one.table_checkpoint_metadata.values())
    table.table_type = 9
    store.put(ref, manifest.SerializeToString())
    return ref


@pytest.mark.parametrize(
    "damage",
    [
        breaking(lambda store: data_files(store)[0], None),
        breaking(lambda store: data_files(store)[0], b"PAR1"),
        breaking(lambda store: load_epoch(store, paths_of(store)).ref, None),
        breaking(lambda store: load_epoch(store, paths_of(store)).ref, b"\xff\xff"),
        breaking(lambda store: paths_of(store).epoch_record(Epoch(6)), b'{"version":1'),
        with_unknown_kind,
    ],
    ids=["gone", "cut", "no manifest", "bad manifest", "bad record", "unknown kind"],
)
def test_a_broken_object_is_one_error_that_names_it(
    store: MemoryStore, damage: Callable[[MemoryStore], StatePath]
) -> None:
    path = damage(store)
    with pytest.raises(FormatError) as caught:
        describe_epoch(WriteProtected(store), paths_of(store))
    assert caught.value.facts["path"] == path
    assert caught.value.next_step


# ---- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [None, 1000])
def test_a_value_that_is_not_of_its_stored_type_is_shown_as_bytes_and_named(
    store: MemoryStore, limit: int | None
) -> None:
    whole = read_rows(store, paths_of(store), "count", "counts", ReadOptions(limit=limit))
    operator = load_epoch(store, paths_of(store)).operator("count")
    assert operator is not None
    rows = pa.Table.from_pydict(
        {"key": [b"\x01!"], "value": [b"\xfd"]}, schema=GLOBAL_KEY_VALUE_SCHEMA
    )
    path = StatePath(f"{operator.paths[-1]}-damaged")
    store.put(path, encode_rows(rows))
    list_pairs_of(store, "count", "counts", path)
    found = read_rows(
        WriteProtected(store), paths_of(store), "count", "counts", ReadOptions(limit=limit)
    )
    assert found.rows[:-1] == whole.rows
    assert found.rows[-1] == {"key_hex": "0121", "value_hex": "fd"}
    assert found.problem is not None
    assert "1 of the" in found.problem
    assert "key 0121: not the bincode of" in found.problem


def list_pairs_of(store: MemoryStore, operator: str, table: str, path: StatePath) -> None:
    """Let the newest epoch list one more file of a global keyed table."""
    ref = load_epoch(store, paths_of(store)).ref
    manifest = metadata.decode_manifest(store.read(ref), ref)

    def changed(one: OperatorCheckpoint) -> OperatorCheckpoint:
        if one.operator != operator:
            return one
        name = TableName(table)
        files = one.tables[name]
        assert isinstance(files, GlobalKeyedFiles)
        files = replace(files, files=(*files.files, path))
        return replace(one, tables={**one.tables, name: files})

    operators = tuple(map(changed, manifest.operators))
    store.put(ref, metadata.encode_manifest(replace(manifest, operators=operators)))


def test_a_far_off_time_of_a_known_table_is_a_number_and_no_error(store: MemoryStore) -> None:
    """No Arrow column holds it: such a value is decoded by itself."""
    far = codec_for(SystemTimeNanos).encode(10**9 * 2**60)
    known = KnownTable(owner="test", holds="times", table="counts", key=str, value=SystemTimeNanos)
    rows = pa.Table.from_pydict({"key": [b"\x01!"], "value": [far]}, schema=GLOBAL_KEY_VALUE_SCHEMA)
    path = StatePath("words/main/far")
    store.put(path, encode_rows(rows))
    entries = first_entries(store, [path], 9).first
    config = global_table_config("counts")
    form = Catalogue([known]).form_of("count", config, entries)
    assert form.problem is None
    ((key, (_, value)),) = entries.items()
    assert form.plain(key, value) == {"key": "!", "value": f"{10**9 * 2**60}ns since 1970"}


def test_a_text_that_is_not_utf_8_is_shown_in_hex_and_told(store: MemoryStore) -> None:
    operator = load_epoch(store, paths_of(store)).operator("keep")
    assert operator is not None
    path = operator.paths[-1]
    rows, _ = decode_file(store.read(path), path)
    place = rows.schema.types.index(pa.string())
    broken = pa.array([b"\xff\xfe"] * rows.num_rows, pa.binary()).view(pa.string())
    rows = rows.set_column(place, rows.schema.field(place), broken)
    store.put(path, encode_rows(rows))
    found = read_rows(WriteProtected(store), paths_of(store), "keep", "rows")
    shown = [row[rows.schema.names[place]] for row in found.rows]
    assert {"hex": "fffe"} in shown
    assert any(isinstance(one, str) for one in shown)
    assert found.problem is not None
    assert "not match its column's type" in found.problem


@pytest.mark.parametrize("verb", ["read", "read_range"])
def test_a_store_that_fails_is_no_broken_file(store: MemoryStore, verb: str) -> None:
    class Failing(Wrapper):
        def _call(self, called: str, path: str, action: Callable[[], T], data: bytes = b"") -> T:
            if called == verb and "table-" in path:
                raise StorageError("the connection was lost", path=path)
            return action()

    failing, paths = Failing(store), paths_of(store)
    calls: list[Callable[[], object]] = [
        lambda: read_rows(failing, paths, "keep", "rows", ReadOptions(limit=1)),
        lambda: read_rows(failing, paths, "count", "counts", ReadOptions(limit=1)),
    ]
    if verb == "read":
        calls = [lambda: read_rows(failing, paths, "count", "counts")]
    else:
        calls += [
            lambda: describe_epoch(failing, paths),
            lambda: find_hash_variant(failing, load_epoch(failing, paths)),
            lambda: verify_job(failing, paths),
            lambda: verify_job(failing, paths, level=1),
            lambda: ParquetBackend(failing, paths).prepare_checkpoint_load(
                load_epoch(failing, paths).epoch
            ),
        ]
    for call in calls:
        with pytest.raises(StorageError) as caught:
            call()
        assert caught.value.retryable
