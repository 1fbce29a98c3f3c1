"""Jobs, epochs, tables and rows read from stores, none of which may be written to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import pyarrow as pa
import pytest

from arroyo_dagster.errors import FormatError, InputError, NotFoundError, StorageError
from arroyo_dagster.state.codec import metadata
from arroyo_dagster.state.codec.bincode.codec import codec_for
from arroyo_dagster.state.codec.parquet import (
    GLOBAL_KEY_VALUE_SCHEMA,
    decode_file,
    encode_rows,
)
from arroyo_dagster.state.codec.proto import state_pb2 as pb
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.model.checkpoints import (
    CheckpointState,
    LegacyCheckpoint,
    OperatorCheckpoint,
)
from arroyo_dagster.state.model.ids import Epoch, JobId, StatePath, TableName, WorkerGeneration
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.tables import GlobalKeyedFiles
from arroyo_dagster.state.model.types import SystemTimeNanos
from arroyo_dagster.state.operations.catalog.hash_variant import find_hash_variant
from arroyo_dagster.state.operations.catalog.jobs import (
    find_job,
    list_epochs,
    list_jobs,
    newest_generation,
    summarise_job,
    summarise_jobs,
)
from arroyo_dagster.state.operations.catalog.query import (
    ReadOptions,
    describe_epoch,
    load_epoch,
    read_rows,
)
from arroyo_dagster.state.operations.verify.job import verify_job
from arroyo_dagster.state.runtime.connectors import TableSource
from arroyo_dagster.state.runtime.in_process import run_pipeline
from arroyo_dagster.state.runtime.operators import Operator
from arroyo_dagster.state.runtime.pipeline import Pipeline
from arroyo_dagster.state.storage import Counting, MemoryStore, ObjectStore, WriteProtected
from arroyo_dagster.state.storage.wrappers import Wrapper
from arroyo_dagster.state.tables.expiring_time_key import timestamp_table_config
from arroyo_dagster.state.tables.global_keyed import global_table_config
from arroyo_dagster.state.tables.global_keys import first_entries
from arroyo_dagster.state.tables.known.catalogue import Catalogue, KnownTable
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


# ---- jobs ----------------------------------------------------------------------------------------


def test_jobs_of_both_layouts_are_found_beside_each_other(store: MemoryStore) -> None:
    legacy = JobPaths(JobId("old"))
    store.put(legacy.checkpoint(Epoch(1)) / "operator-x/table-t-000", b"")
    assert list_jobs(WriteProtected(store)) == [legacy, paths_of(store)]


def test_a_discovery_lists_directories_only_and_opens_nothing(store: MemoryStore) -> None:
    counting = Counting(WriteProtected(store))
    list_jobs(counting)
    assert set(counting.calls) == {"list_dir"}
    named = Counting(WriteProtected(store))
    find_job(named, "words/main")
    assert named.calls == {"list_dir": 1}


def test_an_empty_root_holds_no_jobs_and_a_missing_one_is_an_error() -> None:
    empty = MemoryStore()
    assert list_jobs(WriteProtected(empty)) == []
    with pytest.raises(NotFoundError):
        list_jobs(MemoryStore("never-written-to"))


def test_a_root_of_something_else_is_refused() -> None:
    store = MemoryStore()
    store.put(P("src/main.rs"), b"")
    with pytest.raises(InputError, match="not a checkpoint root") as caught:
        list_jobs(WriteProtected(store))
    assert caught.value.facts["found"] == "src/"


@pytest.mark.parametrize("name", ["", "../x", "/x", "x/", "a//b"])
def test_what_cannot_be_a_name_is_refused(store: MemoryStore, name: str) -> None:
    with pytest.raises(InputError, match="not the name of a job"):
        find_job(store, name)


def test_a_job_is_described_by_its_newest_epoch(store: MemoryStore) -> None:
    (job,) = summarise_jobs(WriteProtected(store))
    assert (job.paths.root, job.epochs, job.newest_epoch) == ("words/main", 6, 6)
    assert job.newest is not None
    assert job.newest.state is CheckpointState.READY
    assert job.watermark_micros == 1_704_067_223_000_000
    assert job.problem is None


def test_a_job_that_has_not_written_an_epoch_has_none() -> None:
    store = MemoryStore()
    pipeline = word_job(store)
    ParquetBackend(store, pipeline.paths).start()
    (job,) = summarise_jobs(WriteProtected(store))
    assert (job.epochs, job.newest_epoch, job.newest, job.problem) == (0, None, None, None)
    assert newest_generation(store, pipeline.paths) == 1
    assert list_epochs(WriteProtected(store), pipeline.paths) == []
    with pytest.raises(NotFoundError, match="no visible epoch"):
        describe_epoch(store, pipeline.paths)


# ---- epochs --------------------------------------------------------------------------------------


def test_epochs_say_what_they_list_and_what_they_added(store: MemoryStore) -> None:
    epochs = list_epochs(WriteProtected(store), paths_of(store))
    assert [one.epoch for one in epochs] == [1, 2, 3, 4, 5, 6]
    assert {one.state for one in epochs} == {CheckpointState.READY}
    for one in epochs:
        assert one.checkpoint is not None
        listed = set(one.checkpoint.paths)
        sizes = {p: info.size_bytes for p in listed if (info := store.head(p)) is not None}
        own = {p for p in listed if f"checkpoint-{one.epoch:07}/" in p}
        assert (one.files, one.size_bytes) == (len(listed), sum(sizes.values()))
        assert (one.new_files, one.new_size_bytes) == (len(own), sum(sizes[p] for p in own))


def test_a_limit_shows_the_newest_and_still_knows_what_is_new(store: MemoryStore) -> None:
    whole = list_epochs(store, paths_of(store))
    assert list_epochs(store, paths_of(store), 2) == whole[-2:]
    assert list_epochs(store, paths_of(store), 99) == whole


def test_what_is_new_in_an_epoch_whose_predecessor_has_expired_is_not_known(
    store: MemoryStore,
) -> None:
    ParquetBackend(store, paths_of(store)).cleanup_checkpoint(Epoch(4))
    epochs = list_epochs(WriteProtected(store), paths_of(store))
    assert [one.epoch for one in epochs] == [4, 5, 6]
    assert [one.new_files is None for one in epochs] == [True, False, False]
    assert [one.problem for one in epochs] == [None] * 3


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


def test_a_broken_epoch_is_a_problem_of_its_own(store: MemoryStore) -> None:
    paths = paths_of(store)
    ref = load_epoch(store, paths, 3).ref
    store.put(ref, store.read(ref)[:-20])
    found = list_epochs(WriteProtected(store), paths)
    assert [one.epoch for one in found if one.problem] == [3]
    assert isinstance(found[2].problem, FormatError)
    assert found[2].state is None
    assert found[3].new_files is None


def test_a_missing_data_file_is_a_problem_of_the_epochs_that_list_it(store: MemoryStore) -> None:
    paths = paths_of(store)
    counts = load_epoch(store, paths, 4).operator("count")
    assert counts is not None
    doomed = next(path for path in counts.paths if "checkpoint-0000004/" in path)
    store.delete_many([doomed])
    found = list_epochs(WriteProtected(store), paths)
    broken = [one for one in found if one.problem]
    assert [one.epoch for one in broken] == [4, 5, 6]
    assert broken[0].problem is not None
    assert broken[0].problem.facts["path"] == doomed


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


def test_a_store_that_fails_is_a_problem_of_each_epoch(store: MemoryStore) -> None:
    class Failing(Counting):
        def read(self, path: StatePath) -> bytes:
            raise StorageError("down")

    for one in [
        *list_epochs(Failing(store), paths_of(store)),
        summarise_job(Failing(store), paths_of(store)),
    ]:
        assert isinstance(one.problem, StorageError)


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


def test_legacy_epochs_are_those_with_metadata_and_what_is_newer_is_invisible(
    store: MemoryStore, legacy: JobPaths
) -> None:
    found = list_epochs(WriteProtected(store), legacy)
    assert [(one.epoch, one.state and one.state.value) for one in found] == [
        (3, "ready"),
        (4, "ready"),
        (5, "invisible"),
    ]
    assert found[1].new_files == 0
    assert newest_generation(store, legacy) is None
    assert describe_epoch(store, legacy).checkpoint.epoch == 4


def test_legacy_data_files_are_never_listed(store: MemoryStore, legacy: JobPaths) -> None:
    counting = Counting(store)
    summarise_job(counting, legacy)
    assert counting.calls["list"] == 0


# ---- tables --------------------------------------------------------------------------------------


def test_an_epoch_is_described_by_the_footers_of_its_files(store: MemoryStore) -> None:
    found = describe_epoch(WriteProtected(store), paths_of(store), 2)
    tables = {
        (one.operator, table.table): (table.kind.label, table.files, table.rows)
        for one in found.operators
        for table in one.tables
    }
    assert tables["lines", "offsets"] == ("global keyed", 2, 4)
    assert tables["keep", "rows"][0] == "expiring time-key"
    assert found.checkpoint.epoch == 2
    assert {one.operator: one.parallelism for one in found.operators}["count"] == 2
    sizes = sum(info.size_bytes for p in set(found.checkpoint.paths) if (info := store.head(p)))
    assert sum(table.size_bytes for one in found.operators for table in one.tables) == sizes


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


def test_an_unknown_epoch_names_those_there_are(store: MemoryStore) -> None:
    store.delete_many([paths_of(store).epoch_record(Epoch(3))])
    with pytest.raises(NotFoundError, match="no such epoch") as caught:
        load_epoch(store, paths_of(store), 9)
    assert caught.value.facts["epochs"] == "1-2, 4-6"


# ---- rows ----------------------------------------------------------------------------------------


def test_rows_of_a_global_table_are_decoded_with_removals_applied(store: MemoryStore) -> None:
    counts: dict[str, int] = {}
    for rows in range(1, 7):
        # The job forgets a word seen four times.
        counts = expected_counts(rows * 4)
        found = read_rows(
            WriteProtected(store), paths_of(store), "count", "counts", ReadOptions(epoch=rows)
        )
        assert {row["key"]: row["value"] for row in found.rows} == counts
        assert found.count == len(counts)
    assert "b" in expected_counts(16)
    assert counts != expected_counts(20)


def expected_counts(rows: int) -> dict[str, int]:
    counts: dict[str, int] = {}
    for i in range(rows):
        word = "abcdefg"[(i * 3 + i // 5) % 7]
        counts[word] = counts.get(word, 0) + 1
        if counts[word] == 4:
            del counts[word]
    return counts


def test_rows_of_an_expiring_table_are_those_a_restore_would_load(store: MemoryStore) -> None:
    found = read_rows(WriteProtected(store), paths_of(store), "keep", "rows")
    # The watermark is second 23, the retention 6 seconds; of `d` only the newest row is kept.
    expected = [("abcdefg"[(i * 3 + i // 5) % 7], i) for i in range(17, 24)]
    last_d = max(i for word, i in expected if word == "d")
    kept = [(w, i) for w, i in expected if w != "d" or i // 4 == last_d // 4]
    assert sorted((row["word"], row["_timestamp"]) for row in found.rows) == sorted(
        (word, f"2024-01-01T00:00:{i:02}.000000000") for word, i in kept
    )
    assert found.count == len(kept)


def test_a_limit_shows_some_rows_and_counts_them_all(store: MemoryStore) -> None:
    for table in (("count", "counts"), ("keep", "rows")):
        whole = read_rows(store, paths_of(store), *table)
        some = read_rows(store, paths_of(store), *table, ReadOptions(limit=2))
        assert some.rows == whole.rows[:2]
        assert some.count == whole.count > 2


def test_without_stored_types_entries_are_shown_in_hex(store: MemoryStore) -> None:
    ref = load_epoch(store, paths_of(store)).ref
    manifest = metadata.decode_manifest(store.read(ref), ref)
    operators = [
        replace(
            one,
            configs={
                name: replace(config, key_type=None, value_type=None)
                for name, config in one.configs.items()
            },
        )
        for one in manifest.operators
    ]
    data = metadata.encode_manifest(replace(manifest, operators=tuple(operators)))
    store.put(ref, data)
    found = read_rows(WriteProtected(store), paths_of(store), "lines", "offsets")
    assert {"key_hex": "03726f77", "value_hex": "023234"} in found.rows
    assert found.known is None
    assert found.problem is not None
    assert "register_table" in found.problem
    known = KnownTable(owner="test", holds="rows read", table="offsets", key=str, value=str)
    named = read_rows(
        WriteProtected(store),
        paths_of(store),
        "lines",
        "offsets",
        ReadOptions(catalogue=Catalogue([known])),
    )
    assert {"key": "row", "value": "24"} in named.rows
    assert (named.known, named.problem) == (known, None)


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


@pytest.mark.parametrize("data", [None, b"PAR1 cut off"])
def test_rows_of_a_table_with_a_broken_file_are_an_error(
    store: MemoryStore, data: bytes | None
) -> None:
    operator = load_epoch(store, paths_of(store)).operator("keep")
    assert operator is not None
    path = operator.paths[-1]
    store.put(path, data) if data else store.delete_many([path])
    with pytest.raises(FormatError) as caught:
        read_rows(WriteProtected(store), paths_of(store), "keep", "rows")
    assert caught.value.facts["path"] == path


class Nested(Operator):
    schema = pa.schema(
        [
            ("word", pa.string()),
            ("more", pa.struct([("at", pa.timestamp("ns")), ("raw", pa.list_(pa.binary()))])),
            ("share", pa.float64()),
            pa.field("_timestamp", pa.timestamp("ns"), nullable=False),
        ]
    )

    def tables(self) -> list[Any]:
        return [timestamp_table_config("t", retention_micros=0, schema=self.schema, keys=["word"])]

    def process_batch(self, batch: pa.RecordBatch, ctx: Any, collector: Any) -> None:
        more = [{"at": 1, "raw": [b"\x01", None]}] * batch.num_rows
        columns = [batch["word"], pa.array(more, self.schema.field("more").type)]
        columns += [pa.array([float("nan")] * batch.num_rows), batch["_timestamp"]]
        ctx.table_manager.get_expiring_time_key_table("t").insert(
            pa.RecordBatch.from_arrays(columns, schema=self.schema)
        )


def test_nested_values_are_shown_whole() -> None:
    store = MemoryStore()
    rows = pa.table({"word": ["a"], "at": pa.array([1], pa.timestamp("ns"))})
    pipeline = Pipeline("nested")
    stream = pipeline.source("s", TableSource(rows, rows_per_epoch=1), timestamp="at")
    stream.key_by("word").apply("keep", Nested())
    run_pipeline(pipeline, store)
    assert read_rows(WriteProtected(store), pipeline.paths, "keep", "t").rows == (
        {
            "word": "a",
            "more": {"at": "1970-01-01T00:00:00.000000001", "raw": ["01", None]},
            "share": "NaN",
            "_timestamp": "1970-01-01T00:00:00.000000001",
        },
    )
