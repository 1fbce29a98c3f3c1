"""Readers open the columns and row groups they need: counted in bytes."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from arroyo_dagster.state import (
    Epoch,
    ExpiringTimeKeyTable,
    KeyRange,
    MemoryStore,
    StatePath,
    TableConfig,
    range_for_server,
    timestamp_table_config,
)
from arroyo_dagster.state.codec.parquet import decode_file
from arroyo_dagster.state.codec.schema import file_schema
from arroyo_dagster.state.model.tables import ExpiringTimeKeyConfig, TimeFile
from arroyo_dagster.state.storage import Counting
from arroyo_dagster.state.tables.live_rows import INSERT

ALL_KEYS = range_for_server(0, 1)
SCHEMA = pa.schema(
    [
        pa.field("k", pa.int64()),
        pa.field("text", pa.string()),
        pa.field("_timestamp", pa.timestamp("ns"), nullable=False),
    ]
)
ROWS, GROUPS = 400_000, 10


def config() -> TableConfig:
    return timestamp_table_config("t", retention_micros=10**15, schema=SCHEMA, keys=["k"])


@functools.cache
def encoded() -> bytes:
    """A merged file, sorted by key and by time, with a wide column."""
    found = config().config
    assert isinstance(found, ExpiringTimeKeyConfig)
    noise = np.random.default_rng(7).integers(0, 2**63, ROWS)
    hashes = np.repeat(np.linspace(0, 2**64 - 2**12, ROWS // 200), 200)
    columns = [
        np.arange(ROWS),
        [f"{n:020}" for n in noise],
        np.arange(ROWS) * 1000,
        hashes.astype(np.uint64),
        [INSERT] * ROWS,
    ]
    rows = pa.table(columns, schema=file_schema(found))
    sink = pa.BufferOutputStream()
    pq.write_table(rows, sink, row_group_size=ROWS // GROUPS, compression="zstd")
    return bytes(sink.getvalue())


def written(store: MemoryStore) -> TimeFile:
    """The file in a store."""
    store.put(StatePath("f"), encoded())
    return TimeFile(
        epoch=Epoch(1),
        path=StatePath("f"),
        min_routing_key=0,
        max_routing_key=2**64 - 1,
        max_timestamp_micros=ROWS - 1,
        compaction_generation=1,
    )


def read(keys: KeyRange = ALL_KEYS, **options: Any) -> tuple[int, float]:
    """How many rows were read, and which share of the bytes."""
    store = MemoryStore()
    file = written(store)
    counting = Counting(store)
    (part,) = ExpiringTimeKeyTable(config(), counting).read([file], keys, **options)
    size = len(store.read(file.path))
    return part.rows.num_rows, counting.bytes_read.total() / size


def test_a_tenth_of_the_keys_is_read_from_a_tenth_of_the_row_groups() -> None:
    rows, share = read(KeyRange(0, 2**64 // 20))
    assert rows == pytest.approx(ROWS / 20, abs=200)
    assert share < 0.2


def test_what_is_read_of_a_part_is_what_the_whole_has_there() -> None:
    store = MemoryStore()
    file = written(store)
    table = ExpiringTimeKeyTable(config(), store)
    keys, cutoff = range_for_server(3, 7), 200_000
    (whole,) = table.read([file], ALL_KEYS)
    stored, _ = decode_file(store.read(file.path), file.path)
    hashes = stored.column("_key_hash").to_numpy()
    wanted = (hashes >= keys.start) & (hashes <= keys.end) & (np.arange(ROWS) >= cutoff)
    expected = whole.rows.filter(pa.array(wanted))
    assert table.load([file], keys, cutoff_micros=cutoff).equals(expected)
    for columns in ([0], [1], [2], [0, 2]):
        found = table.load([file], keys, cutoff_micros=cutoff, columns=columns)
        assert found.equals(expected.select(columns))


def test_record_batches_are_counted_before_rows_of_other_keys_are_left_out() -> None:
    store = MemoryStore()
    file = written(store)
    keys = range_for_server(1, 3)
    (part,) = ExpiringTimeKeyTable(config(), store).read([file], keys, columns=[0], batches=True)
    places = part.rows.column(0).to_numpy()
    assert part.batches is not None
    # Each row's column k is its place in the file; row groups are of whole and a last batch.
    group, within = places // (ROWS // GROUPS), places % (ROWS // GROUPS) // 1024
    expected = group * -(-(ROWS // GROUPS) // 1024) + within
    assert np.array_equal(part.batches - part.batches[0], expected - expected[0])
