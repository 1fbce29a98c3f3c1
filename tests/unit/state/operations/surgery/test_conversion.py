"""Converted files keep the row groups and the order of rows, on which restores depend."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest

from arroyo_dagster import Epoch, MemoryStore, OperatorId, StatePath, TableConfig
from arroyo_dagster.errors import ProtocolError
from arroyo_dagster.state.codec.parquet import BATCH_ROWS, RowsEncoder
from arroyo_dagster.state.codec.row_groups import DataFile
from arroyo_dagster.state.operations.surgery.conversion import RowConversion, convert_file
from arroyo_dagster.state.planning.surgery.columns import ColumnMap, map_columns
from arroyo_dagster.state.tables.data_files import SLICE_ROWS
from tests.arroyo_jobs import as_stored, table_rows
from tests.evolved_jobs import COUNT, LEAST, SUM, TIME, Sql, schema_of
from tests.formats import ExpiringTimeKeyConfig, Overrides, TimeFile, encode_rows, file_schema
from tests.surgery_jobs import NANOS

OLD, NEW = StatePath("job_a/old"), StatePath("job_b/new")


def config_of(table: TableConfig) -> ExpiringTimeKeyConfig:
    assert isinstance(table.config, ExpiringTimeKeyConfig)
    return table.config


def stored(sql: Sql, count: int) -> pa.Table:
    times = [n * NANOS for n in range(count)]
    columns = [[f"k{n}" for n in range(count)], [*range(count)], [*range(count)], times]
    return as_stored(sql.config("t"), table_rows(schema_of((sql.key, *sql.window, TIME)), columns))


def conversion_of(was: Sql, now: Sql) -> RowConversion:
    theirs, target = config_of(was.config("t")), config_of(now.config("t"))
    columns = map_columns(theirs, target, OperatorId("tumbling_1"), Overrides())
    assert isinstance(columns, ColumnMap)
    return RowConversion(source=theirs, target=target, columns=columns)


FILE = TimeFile(
    epoch=Epoch(1), path=OLD, min_routing_key=0, max_routing_key=1, max_timestamp_micros=1
)


def test_each_row_group_is_converted_for_itself() -> None:
    was = Sql(window=(COUNT, SUM))
    conversion = conversion_of(was, Sql(window=(SUM, LEAST, COUNT)))
    rows = stored(was, 7)
    encoder = RowsEncoder(file_schema(conversion.source))
    for start, count in ((0, 3), (3, 1), (4, 3)):
        encoder.write(rows.slice(start, count))
    store = MemoryStore()
    store.put(OLD, encoder.finish())
    file = replace(FILE, epoch=Epoch(3), max_timestamp_micros=9_000_000, compaction_generation=2)
    new = convert_file(store, store, file, NEW, conversion)
    assert new is not None
    data = DataFile(store.read(NEW), NEW)
    assert data.row_groups == (3, 1, 3)
    found = data.read(range(len(data.schema)), range(3))
    assert found.schema.equals(file_schema(conversion.target))
    assert found.column(1).to_pylist() == [*range(7)]
    assert found.column(2).null_count == 7
    for name in ("k", "_timestamp", "_key_hash", "_operation"):
        assert found.column(name) == rows.column(name)
    hashes = rows.column("_key_hash").to_pylist()
    assert (new.min_routing_key, new.max_routing_key) == (min(hashes), max(hashes))
    assert (new.max_timestamp_micros, new.epoch) == (6_000_000, Epoch(3))
    assert new.compaction_generation == 2


def test_a_large_row_group_becomes_pieces_of_whole_record_batches() -> None:
    was = Sql(window=(COUNT, SUM))
    rows = stored(was, SLICE_ROWS + 5_000)
    store = MemoryStore()
    store.put(OLD, encode_rows(rows))
    assert len(DataFile(store.read(OLD), OLD).row_groups) == 1
    conversion = conversion_of(was, Sql(window=(SUM, COUNT)))
    new = convert_file(store, store, FILE, NEW, conversion)
    assert new is not None
    data = DataFile(store.read(NEW), NEW)
    *most, last = data.row_groups
    assert most
    assert all(0 < one <= SLICE_ROWS and one % BATCH_ROWS == 0 for one in most)
    found = data.read(range(len(data.schema)), range(len(most) + 1))
    assert sum(most) + last == found.num_rows == rows.num_rows
    for name in ("k", "_timestamp", "_key_hash"):
        assert found.column(name) == rows.column(name)
    hashes = rows.column("_key_hash").to_pylist()
    assert (new.min_routing_key, new.max_routing_key) == (min(hashes), max(hashes))
    assert new.max_timestamp_micros == (rows.num_rows - 1) * 1_000_000


def test_a_file_that_reads_back_in_another_order_is_refused() -> None:
    class Reordering(MemoryStore):
        def put(self, path: StatePath, data: bytes) -> None:
            found = DataFile(data, path)
            rows = found.read(range(len(found.schema)), [0])
            super().put(path, encode_rows(rows.take([1, 0, *range(2, rows.num_rows)])))

    was = Sql(window=(COUNT, SUM))
    store = MemoryStore()
    store.put(OLD, encode_rows(stored(was, 7)))
    conversion = conversion_of(was, Sql(window=(SUM, COUNT)))
    with pytest.raises(ProtocolError, match="reads back different"):
        convert_file(store, Reordering(), FILE, NEW, conversion)
