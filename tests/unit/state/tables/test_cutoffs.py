"""Which rows expire, to the nanosecond, wherever they may: in memory, on restore, when merged."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from arroyo_dagster.state import (
    Epoch,
    ExpiringTimeKeyTable,
    ExpiringTimeKeyView,
    JobId,
    KeyTimeView,
    MemoryStore,
    OperatorCheckpoint,
    OperatorId,
    StatePath,
    TableConfig,
    TableName,
    range_for_server,
    timestamp_table_config,
)
from arroyo_dagster.state.model.checkpoints import ExpiringTimeKeyReport
from arroyo_dagster.state.planning.restore.checkpoint import files_to_carry
from arroyo_dagster.state.tables.table import EpochFiles
from tests.formats import (
    ExpiringTimeKeyConfig,
    ExpiringTimeKeyFiles,
    SubtaskCheckpoint,
    TimeFile,
    encode_rows,
    file_schema,
)
from tests.internals import merge_operator, restored_rows

T, OP = TableName("t"), OperatorId("o")
ALL_KEYS = range_for_server(0, 1)
SCHEMA = pa.schema(
    [pa.field("n", pa.int64()), pa.field("_timestamp", pa.timestamp("ns"), nullable=False)]
)
RETENTION = 10
WATERMARK = 15
CUTOFF_NANOS = (WATERMARK - RETENTION) * 1000
EDGE = [CUTOFF_NANOS - 1, CUTOFF_NANOS, CUTOFF_NANOS + 1]


def config(
    description: str = "", *, generational: bool = False, retention: int = RETENTION
) -> TableConfig:
    return timestamp_table_config(
        "t",
        description,
        retention_micros=retention,
        schema=SCHEMA,
        keys=["n"],
        generational=generational,
    )


def rows(times: Sequence[int]) -> pa.Table:
    return pa.table([[1] * len(times), times], schema=SCHEMA)


def times_of(table: pa.Table) -> list[int]:
    return list(table.column("_timestamp").cast(pa.int64()).to_pylist())


def store_file(
    store: MemoryStore,
    table: TableConfig,
    times: Sequence[int],
    *,
    row_group_rows: int | None = None,
    name: str = "f",
    epoch: int = 1,
    compacted: int = 0,
) -> TimeFile:
    """A file as Arroyo would write it."""
    assert isinstance(table.config, ExpiringTimeKeyConfig)
    schema = file_schema(table.config)
    count = len(times)
    columns = [[1] * count, list(times), *([[0] * count] if table.config.generational else [])]
    stored = pa.table([*columns, [7] * count, [b"\x00"] * count], schema=schema)
    data = encode_rows(stored)
    if row_group_rows:
        sink = pa.BufferOutputStream()
        pq.write_table(stored, sink, row_group_size=row_group_rows)
        data = sink.getvalue().to_pybytes()
    store.put(StatePath(name), data)
    return TimeFile(
        epoch=Epoch(epoch),
        path=StatePath(name),
        min_routing_key=7,
        max_routing_key=7,
        max_timestamp_micros=max(times) // 1000,
        compaction_generation=compacted,
    )


def operator(table: TableConfig, *files: TimeFile, watermark: int | None) -> OperatorCheckpoint:
    return OperatorCheckpoint(
        job=JobId("j"),
        operator=OP,
        epoch=Epoch(2),
        parallelism=1,
        min_watermark_micros=watermark,
        max_watermark_micros=watermark,
        start_time_micros=0,
        finish_time_micros=0,
        tables={T: ExpiringTimeKeyFiles(files=files)},
        configs={T: table},
    )


def restored(
    table: TableConfig, times: Sequence[int], *, managed: bool, watermark: int | None = WATERMARK
) -> list[int]:
    store = MemoryStore()
    file = store_file(store, table, times)
    found = restored_rows(store, operator(table, file, watermark=watermark), T, managed=managed)
    return times_of(found.rows)


# ---- in memory, and what is written --------------------------------------------------------------


def test_at_a_barrier_a_row_at_the_cutoff_is_kept_and_written_and_one_before_it_is_neither() -> (
    None
):
    table = ExpiringTimeKeyTable(config(), MemoryStore())
    checkpointer = table.checkpoint(
        EpochFiles(epoch=Epoch(1), keys=ALL_KEYS, name_file=lambda suffix: StatePath("x"))
    )
    for view in (
        ExpiringTimeKeyView(table, lambda message: checkpointer.apply(message.data)),
        KeyTimeView(table, lambda message: None),
    ):
        view.insert(rows(EDGE))
        view.evict(table.cutoff_micros(WATERMARK))
        assert times_of(view.rows()) == EDGE[1:]
    checkpointer.prepare(WATERMARK)
    report, _ = checkpointer.finish(WATERMARK, ())
    assert report is not None
    (written,) = table.read(report.files, ALL_KEYS)
    assert times_of(written.rows) == EDGE[1:]
    assert report.files[0].max_timestamp_micros == 5


@pytest.mark.parametrize(
    ("latest_nanos", "kept"), [(4_999, False), (5_000, True), (5_001, True), (5_999, True)]
)
def test_file_is_carried_while_it_reaches_the_cutoff(latest_nanos: int, kept: bool) -> None:
    file = store_file(MemoryStore(), config(), [latest_nanos])
    assert bool(files_to_carry([file], 5, ALL_KEYS)) is kept
    report = SubtaskCheckpoint(
        subtask_index=0,
        start_time_micros=0,
        finish_time_micros=0,
        watermark_micros=WATERMARK,
        size_bytes=0,
        tables={T: ExpiringTimeKeyReport(watermark_micros=WATERMARK, files=(file,))},
        configs={T: config()},
    )
    merged = merge_operator(JobId("j"), OP, Epoch(2), [report], None)
    assert (T in merged.tables) is kept


# ---- restored ------------------------------------------------------------------------------------


@pytest.mark.parametrize("managed", [True, False])
def test_a_restore_keeps_rows_from_the_cutoff_on(managed: bool) -> None:
    assert restored(config(), EDGE, managed=managed) == EDGE[1:]


@pytest.mark.parametrize("watermark", [None, 0, RETENTION - 1, RETENTION])
@pytest.mark.parametrize("managed", [True, False])
def test_all_rows_are_restored_below_the_retention(managed: bool, watermark: int | None) -> None:
    assert restored(config(), [0, 1, 2], managed=managed, watermark=watermark) == [0, 1, 2]


def test_of_an_updating_join_arroyo_keeps_record_batches_whole() -> None:
    joined = config("left join data")
    assert restored(joined, [0, 1, CUTOFF_NANOS], managed=False) == [0, 1, CUTOFF_NANOS]
    assert restored(joined, [0, 1, CUTOFF_NANOS], managed=True) == [CUTOFF_NANOS]
    old, edge = [0] * 1024, [0] * 1023 + [CUTOFF_NANOS]
    assert restored(joined, old + edge, managed=False) == edge
    assert restored(joined, edge + old, managed=False) == edge
    late = [0] * 1023 + [CUTOFF_NANOS - 1]
    assert restored(joined, [*late, CUTOFF_NANOS + 1], managed=False) == [CUTOFF_NANOS + 1]


def test_record_batches_do_not_reach_from_one_row_group_into_the_next() -> None:
    joined, store = config("right join data"), MemoryStore()
    times = [0, 1, CUTOFF_NANOS, 2, 3, CUTOFF_NANOS - 1, 4]
    file = store_file(store, joined, times, row_group_rows=3)
    found = restored_rows(store, operator(joined, file, watermark=WATERMARK), T, managed=False)
    assert times_of(found.rows) == [0, 1, CUTOFF_NANOS]


def test_a_windowed_join_has_no_retention_and_keeps_rows_one_by_one() -> None:
    windowed = config("left join data", retention=0)
    times = [WATERMARK * 1000 - 1, WATERMARK * 1000]
    assert restored(windowed, times, managed=False) == times[1:]


def test_generational_tables_have_no_cutoff_with_arroyo_and_one_with_us() -> None:
    updating, store = config("accumulator_state", generational=True), MemoryStore()
    file = store_file(store, updating, EDGE)
    at = operator(updating, file, watermark=WATERMARK)
    whole = restored_rows(store, at, T, managed=False, history=True)
    assert times_of(whole.rows) == EDGE
    assert times_of(restored_rows(store, at, T, managed=True, history=True).rows) == EDGE[1:]
    old = operator(updating, store_file(store, updating, [1]), watermark=WATERMARK)
    assert times_of(restored_rows(store, old, T, managed=False).rows) == [1]


def test_arroyo_reads_files_in_the_order_of_their_epochs_and_we_in_that_of_the_list() -> None:
    table, store = config(), MemoryStore()
    second = store_file(store, table, [6_000], name="b", epoch=2)
    first = store_file(store, table, [7_000], name="a", epoch=1)
    at = operator(table, second, first, watermark=None)
    assert times_of(restored_rows(store, at, T, managed=False).rows) == [7_000, 6_000]
    assert times_of(restored_rows(store, at, T, managed=True).rows) == [6_000, 7_000]


# ---- merged --------------------------------------------------------------------------------------


def test_row_groups_that_are_too_old_are_not_read_and_the_edge_is() -> None:
    store, table = MemoryStore(), config()
    times = [0, CUTOFF_NANOS - 1, 1, CUTOFF_NANOS, 2, CUTOFF_NANOS + 1]
    file = store_file(store, table, times, row_group_rows=2, compacted=1)
    (part,) = ExpiringTimeKeyTable(table, store).read([file], ALL_KEYS, cutoff_micros=5)
    assert times_of(part.rows) == times[2:]
    at = operator(table, file, watermark=WATERMARK)
    assert times_of(restored_rows(store, at, T, managed=True).rows) == EDGE[1:]
