"""Whatever a table holds: queries give the rows of a restore, differences those of brute force."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.compute as pc
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from arroyo_dagster.state import (
    CompactionPolicy,
    CompactionSettings,
    EpochTable,
    JobId,
    JobPaths,
    MemoryStore,
    TableConfig,
    open_state,
    run_compaction,
    timestamp_table_config,
)
from arroyo_dagster.state.codec.plain import unique_names
from arroyo_dagster.state.operations.query.diff import diff_tables
from arroyo_dagster.state.operations.query.scans import conform
from arroyo_dagster.state.tables import data_files, time_files
from tests.fabricated import OPERATOR, PATHS, publish, stored_rows
from tests.fabricated import time_files as written_files
from tests.formats import ExpiringTimeKeyFiles
from tests.internals import CHANGE, Change, SqlCatalog
from tests.property.test_compaction_properties import (
    CUTOFF_NANOS,
    RETENTION,
    WATERMARK,
    multiset,
    restored,
    tables,
    ways,
)
from tests.shares import fewer_examples

Made = tuple[TableConfig, list[tuple[pa.Table, pa.Array]], int]
AFTER = JobPaths(JobId("after"), PATHS.pipeline)


def read(store: MemoryStore, paths: JobPaths) -> EpochTable:
    return open_state(store).job(paths.root).epoch().table(OPERATOR, "t")


def published(
    store: MemoryStore, made: Made, files: Any, paths: JobPaths, watermark_micros: int = WATERMARK
) -> EpochTable:
    config, _, parallelism = made
    publish(
        store,
        [(config, ExpiringTimeKeyFiles(files=files))],
        parallelism=parallelism,
        watermark_micros=watermark_micros,
        paths=paths,
    )
    return read(store, paths)


def written(store: MemoryStore, made: Made) -> Any:
    config, epochs, parallelism = made
    batches = [stored_rows(config, rows, operations) for rows, operations in epochs]
    return written_files(store, config, batches, parallelism)


def check(table: EpochTable, expected: Counter[Any]) -> None:
    rows = table.to_arrow()
    assert multiset(rows) == expected
    splits = [conform(part, rows.schema) for one in table.splits(3) for part in table.read(one)]
    assert multiset(pa.concat_tables([rows.slice(0, 0), *splits])) == expected
    some = rows.schema.names[::2]
    assert multiset(table.to_arrow(some)) == multiset(rows.select(some))
    for name in ("k", "k2", "_timestamp"):
        column = rows.column(name)
        for value in [one for one in column if one.is_valid][:3]:
            for relation, compare in (("=", pc.equal), (">=", pc.greater_equal), ("<", pc.less)):
                mask = pc.fill_null(compare(column, value), False)
                found = table.to_arrow(where=[(name, relation, value)])
                assert multiset(found) == multiset(rows.filter(mask)), (name, relation, value)
    keys = list(table.key_columns)
    for key in rows.select(keys).to_pylist()[:3] if keys else ():
        same = [all(one[k] == key[k] for k in keys) for one in rows.select(keys).to_pylist()]
        assert multiset(table.lookup(key)) == multiset(rows.filter(pa.array(same)))


@settings(fewer_examples(2), suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(tables(), ways(), st.sampled_from([1, 1 << 23]))
def test_queries_give_the_rows_of_a_restore(
    made: Made, way: CompactionSettings, chunk_bytes: int
) -> None:
    config, _, parallelism = made
    store = MemoryStore()
    files = written(store, made)
    expected = restored(store, config, files, parallelism, WATERMARK - RETENTION)
    with (
        mock.patch.object(time_files, "CHUNK_BYTES", chunk_bytes),
        mock.patch.object(data_files, "WHOLE_BYTES", chunk_bytes),
    ):
        check(published(store, made, files, PATHS), expected)
        run_compaction(store, PATHS, way)
        table = read(store, PATHS)
        check(table, expected)
    count = SqlCatalog(open_state(store)).collect(f"select count(*) as n from {table.name}")
    assert count.to_dicts() == [{"n": sum(expected.values())}]
    raw = table.raw().to_arrow()
    assert set(unique_names(table.schema.names)) <= set(raw.schema.names)


@settings(fewer_examples(2), suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(tables(), st.integers(0, 7), st.sampled_from([0, 1, 100_000]), st.booleans())
def test_differences_lead_from_one_table_to_the_other(
    made: Made, shared_epochs: int, later_micros: int, compacted: bool
) -> None:
    store = MemoryStore()
    files = written(store, made)
    shared = tuple(file for file in files if file.epoch <= shared_epochs)
    before = published(store, made, shared, PATHS)
    after = published(store, made, files, AFTER, WATERMARK + later_micros)
    if compacted:
        run_compaction(store, AFTER, CompactionSettings(policy=CompactionPolicy.FULL))
        after = read(store, AFTER)
    was, now = multiset(before.to_arrow()), multiset(after.to_arrow())
    diff = diff_tables(before, after)
    kinds = diff.changes.column(CHANGE).to_pylist()
    added = {Change.INSERTED.value, Change.UPDATED_TO.value}
    rows = diff.changes.drop_columns([CHANGE])
    plus = multiset(rows.filter(pa.array([one in added for one in kinds], pa.bool_())))
    minus = multiset(rows.filter(pa.array([one not in added for one in kinds], pa.bool_())))
    assert now == was - minus + plus
    assert minus <= was
    assert not minus & plus, "a row that did not change is named"


def test_a_condition_on_time_brings_no_older_row_generation_back() -> None:
    """The newest row of a key is the older one by event time, in a file of its own."""
    schema = pa.schema([("k", pa.int64()), pa.field("_timestamp", pa.timestamp("ns"), False)])
    config = timestamp_table_config(
        "t", retention_micros=RETENTION, schema=schema, keys=["k"], generational=True
    )
    stored = schema.append(pa.field("_generation", pa.uint64(), nullable=False))
    early, late = CUTOFF_NANOS + 1, CUTOFF_NANOS + 10**6
    pairs = [(late, 0), (early, 1)]
    epochs = [pa.table([[7], [time], [generation]], schema=stored) for time, generation in pairs]
    store = MemoryStore()
    files = written_files(store, config, (stored_rows(config, rows) for rows in epochs), 1)
    table = published(store, (config, [], 1), files, PATHS)
    moment = pa.scalar((early + late) // 2, pa.timestamp("ns"))
    assert table.to_arrow(where=[("_timestamp", ">", moment)]).num_rows == 0
    assert table.to_arrow(where=[("_timestamp", "<=", moment)]).num_rows == 1
