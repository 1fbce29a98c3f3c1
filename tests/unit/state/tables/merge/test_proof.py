"""A merge is never taken for good if its files hold other rows than its inputs."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from arroyo_dagster.errors import FormatError
from arroyo_dagster.state import (
    Epoch,
    ExpiringTimeKeyTable,
    MemoryStore,
    StatePath,
    TableConfig,
    global_table_config,
    range_for_server,
    timestamp_table_config,
)
from arroyo_dagster.state.codec.parquet import encode_pair_columns
from arroyo_dagster.state.model.compaction import OutputForm, PairsMerge, RowsMerge
from arroyo_dagster.state.planning.restore.schema_evolution import noted
from arroyo_dagster.state.tables.merge.pairs import merge_pairs
from arroyo_dagster.state.tables.merge.rows import merge_rows
from arroyo_dagster.state.tables.time_files import write_time_file
from tests.fabricated import OPERATOR, pair_files, stored_rows, time_files
from tests.formats import ExpiringTimeKeyConfig, MergeOutcome, SortOrder, decode_file, encode_rows

SCHEMA = pa.schema(
    [
        pa.field("name", pa.string()),
        pa.field("x", pa.int64()),
        pa.field("y", pa.int64()),
        pa.field("0", pa.string()),
        pa.field("0", pa.string()),
        pa.field("s", pa.struct([pa.field("at", pa.timestamp("ns")), pa.field("w", pa.string())])),
        pa.field("u", pa.uint64(), nullable=False),
        pa.field("_timestamp", pa.timestamp("ns"), nullable=False),
    ]
)
CONFIG: TableConfig = timestamp_table_config("t", retention_micros=1, schema=SCHEMA, keys=["name"])
NAME, X, Y, FIRST, SECOND, STRUCT, UNSIGNED, TIME = range(8)
OPERATION = 9
FILES, ROWS = 4, 6000


def rows_of(seed: int) -> pa.Table:
    chance = np.random.default_rng(seed)
    numbers = chance.integers(0, 2**62, ROWS)
    times = pa.array(np.sort(numbers % 10**15) + 2**60 + 1, pa.int64()).view(pa.timestamp("ns"))
    texts = pa.array([f"text {number % 10**9}" for number in numbers.tolist()])
    columns = [
        pa.array([f"name {number % 50}" for number in numbers.tolist()]),
        pa.array(numbers % 1000),
        pa.array(numbers, mask=numbers % 11 == 0),
        texts,
        texts.take(pa.array(np.arange(ROWS)[::-1])),
        pa.StructArray.from_arrays([times, texts], fields=list(SCHEMA.field(STRUCT).type)),
        pa.array(numbers.astype(np.uint64) * 4 + 3),
        times,
    ]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


@functools.cache
def batches() -> list[pa.Table]:
    return [stored_rows(CONFIG, rows_of(seed)) for seed in range(FILES)]


class Corrupting(MemoryStore):
    """Stores other bytes than given, once `corrupt` is set."""

    corrupt: Callable[[pa.Table], pa.Table] | None = None

    def put(self, path: StatePath, data: bytes) -> None:
        if self.corrupt is not None:
            data = encode_rows(self.corrupt(decode_file(data, path)[0]))
        super().put(path, data)


def merged(sort: SortOrder, corrupt: Callable[[pa.Table], pa.Table] | None) -> MergeOutcome:
    store = Corrupting()
    inputs = time_files(store, CONFIG, batches(), 1)
    store.corrupt = corrupt
    merge = RowsMerge(
        operator=OPERATOR,
        table=CONFIG.table,
        inputs=inputs,
        ranges=(range_for_server(0, 1),),
        cutoff_micros=0,
        size_bytes=sum(len(store.read(file.path)) for file in inputs),
        from_oldest=True,
        form=OutputForm(sort=sort, row_group_rows=10_000),
    )
    table = ExpiringTimeKeyTable(CONFIG, store)
    return merge_rows(table, store, merge, lambda _, suffix: StatePath(f"new{suffix}"))


def changed(column: int, change: Callable[[list[Any]], None]) -> Callable[[pa.Table], pa.Table]:
    """A corruption of one column's values."""

    def corrupt(rows: pa.Table) -> pa.Table:
        values = rows.column(column)
        if pa.types.is_timestamp(values.type) or pa.types.is_struct(values.type):
            items = [value if value.is_valid else None for value in values.combine_chunks()]
        else:
            items = values.to_pylist()
        change(items)
        field = rows.schema.field(column)
        return rows.set_column(column, field, pa.array(items, field.type))

    return corrupt


def put(at: int, value: Any) -> Callable[[list[Any]], None]:
    def change(items: list[Any]) -> None:
        assert items[at] != value
        items[at] = value

    return change


def exchange(items: list[Any]) -> None:
    """The first value, and the last that is another."""
    other = max(at for at, value in enumerate(items) if value != items[0])
    items[0], items[other] = items[other], items[0]


def exchange_columns(one: int, other: int, at: int) -> Callable[[pa.Table], pa.Table]:
    """The values of two columns in one row."""

    def corrupt(rows: pa.Table) -> pa.Table:
        left, right = rows.column(one).to_pylist(), rows.column(other).to_pylist()
        assert left[at] != right[at]
        left[at], right[at] = right[at], left[at]
        for column, items in ((one, left), (other, right)):
            field = rows.schema.field(column)
            rows = rows.set_column(column, field, pa.array(items, field.type))
        return rows

    return corrupt


def in_micros(rows: pa.Table) -> pa.Table:
    """Times inside a struct, rounded as by a type of microseconds."""
    times = pa.chunked_array(
        [chunk.field(0).cast("timestamp[us]", safe=False) for chunk in rows.column(STRUCT).chunks]
    ).cast("timestamp[ns]")
    words = [chunk.field(1) for chunk in rows.column(STRUCT).chunks]
    field = rows.schema.field(STRUCT)
    parts = pa.StructArray.from_arrays(
        [times.combine_chunks(), pa.concat_arrays(words)], fields=list(field.type)
    )
    return rows.set_column(STRUCT, field, parts)


def in_other_type(column: int, kind: pa.DataType) -> Callable[[pa.Table], pa.Table]:
    def corrupt(rows: pa.Table) -> pa.Table:
        field = rows.schema.field(column).with_type(kind)
        return rows.set_column(column, field, rows.column(column).cast(kind, safe=False))

    return corrupt


def required(column: int, value: bool) -> Callable[[pa.Table], pa.Table]:
    def corrupt(rows: pa.Table) -> pa.Table:
        field = rows.schema.field(column).with_nullable(not value)
        return rows.set_column(column, field, rows.column(column))

    return corrupt


def concatenated(*bounds: tuple[int, int]) -> Callable[[pa.Table], pa.Table]:
    return lambda rows: pa.concat_tables(
        [rows.slice(start, end - start) for start, end in bounds]
    ).combine_chunks()


LAST = FILES * ROWS
CORRUPTIONS: dict[str, Callable[[pa.Table], pa.Table]] = {
    "a number": changed(X, put(17_000, 1000)),
    "a bit of an unsigned number": changed(UNSIGNED, lambda items: put(3, items[3] ^ 2**63)(items)),
    "a text": changed(FIRST, put(LAST - 1, "text")),
    "a text of a dictionary": changed(NAME, put(9_999, "name 51")),
    "a null instead of a number": changed(X, put(0, None)),
    "a number instead of a null": changed(Y, lambda items: put(items.index(None), 0)(items)),
    "a null instead of a text": changed(NAME, put(0, None)),
    "an empty text instead of a text": changed(SECOND, put(0, "")),
    "two rows' texts exchanged": changed(NAME, exchange),
    "two rows' structs exchanged": changed(STRUCT, exchange),
    "two columns exchanged in a row": exchange_columns(X, Y, 12_345),
    "two columns of one name exchanged in a row": exchange_columns(FIRST, SECOND, 12_345),
    "a lost row": concatenated((0, 20_000), (20_001, LAST)),
    "the last row lost": concatenated((0, LAST - 1)),
    "a row twice": concatenated((0, 20_001), (20_000, LAST)),
    "a row twice and another lost": concatenated((0, 5), (4, LAST - 1)),
    "an operation": changed(OPERATION, put(100, b"\x01")),
    "times in microseconds inside a struct": in_micros,
    "another type": in_other_type(UNSIGNED, pa.int64()),
    "another type of time": in_other_type(TIME, pa.timestamp("us")),
    "nullable instead of required": required(UNSIGNED, False),
}
IN_ORDER_ONLY = {
    "two rows exchanged": concatenated((0, 7), (8, 9), (7, 8), (9, LAST)),
    "halves exchanged": concatenated((LAST // 2, LAST), (0, LAST // 2)),
}


@pytest.mark.parametrize("sort", SortOrder)
def test_the_rows_as_they_are_pass(sort: SortOrder) -> None:
    for corrupt in (None, lambda rows: rows):
        outcome = merged(sort, corrupt)
        assert outcome.same
        assert outcome.rows_out == LAST


@pytest.mark.parametrize("sort", SortOrder)
def test_files_of_older_columns_merge_with_those_of_today(sort: SortOrder) -> None:
    """Texts that repeat in the oldest file are wider today, or have only begun to exist."""
    times = pa.array(range(ROWS), pa.timestamp("ns"))
    names = pa.array([f"name {row % 5}" for row in range(ROWS)])
    time = pa.field("_timestamp", pa.timestamp("ns"), nullable=False)
    key = pa.field("key", pa.int64())
    old = pa.schema([key, pa.field("name", pa.string()), time])
    new = pa.schema([key, pa.field("name", pa.large_string()), pa.field("b", pa.string()), time])
    before, now = (
        timestamp_table_config("t", retention_micros=1, schema=schema, keys=["key"])
        for schema in (old, new)
    )
    assert isinstance(before.config, ExpiringTimeKeyConfig)
    assert isinstance(now.config, ExpiringTimeKeyConfig)
    numbers = pa.array(range(ROWS))
    store, files = MemoryStore(), []
    for config, columns in (
        (before, [numbers, names, times]),
        (now, [numbers, names.cast(pa.large_string()), names, times]),
    ):
        schema = old if config is before else new
        rows = stored_rows(config, pa.Table.from_arrays(columns, schema=schema))
        path = StatePath(f"file {len(files)}")
        file, _ = write_time_file(
            store, rows, path, epoch=Epoch(1 + len(files)), timestamp_index=len(schema) - 1
        )
        files.append(file)
    since = noted(before.config, now.config, Epoch(2))
    merge = RowsMerge(
        operator=OPERATOR,
        table=now.table,
        inputs=tuple(files),
        ranges=(range_for_server(0, 1),),
        cutoff_micros=0,
        size_bytes=0,
        from_oldest=True,
        form=OutputForm(sort=sort),
    )
    table = ExpiringTimeKeyTable(replace(now, config=since), store)
    outcome = merge_rows(table, store, merge, lambda _, suffix: StatePath(f"new{suffix}"))
    assert outcome.same
    assert outcome.rows_out == 2 * ROWS
    (written,) = outcome.merged.output_paths
    found, _ = decode_file(store.read(written), written)
    assert Counter(found.column("name").to_pylist()) == Counter(names.to_pylist() * 2)
    assert Counter(found.column("b").to_pylist()) == Counter([*names.to_pylist(), *[None] * ROWS])


@pytest.mark.parametrize("sort", [SortOrder.REPLAY, SortOrder.TIME])
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_both_forms_of_the_proof_find(name: str, sort: SortOrder) -> None:
    try:
        outcome = merged(sort, CORRUPTIONS[name])
    except FormatError:
        return  # the schema, or the bounds of the file
    assert not outcome.same


@pytest.mark.parametrize("name", IN_ORDER_ONLY)
def test_the_order_of_rows_is_proved_where_it_is_kept(name: str) -> None:
    assert not merged(SortOrder.REPLAY, IN_ORDER_ONLY[name]).same
    assert merged(SortOrder.TIME, IN_ORDER_ONLY[name]).same


# ---- global tables -------------------------------------------------------------------------------

PAIRS = global_table_config("g", key=bytes, value=bytes)
Pairs = list[tuple[bytes, bytes]]


class CorruptingPairs(MemoryStore):
    """Stores other pairs than given, once `corrupt` is set."""

    corrupt: Callable[[Pairs], Pairs] | None = None

    def put(self, path: StatePath, data: bytes) -> None:
        if self.corrupt is not None:
            rows, version = decode_file(data, path)
            pairs = self.corrupt(list(zip(*(c.to_pylist() for c in rows.columns), strict=True)))
            columns = [pa.array(list(column), pa.binary()) for column in zip(*pairs, strict=True)]
            data = encode_pair_columns(*columns, rows.schema, version=version)
        super().put(path, data)


def merged_pairs(corrupt: Callable[[Pairs], Pairs] | None) -> MergeOutcome:
    store = CorruptingPairs()
    writes: list[tuple[dict[bytes, bytes | None], int]] = [
        ({b"key %05d" % key: b"%d" % (key * number) for key in range(0, 3000, number)}, 0)
        for number in (1, 2, 3)
    ]
    inputs = pair_files(store, PAIRS, writes)
    store.corrupt = corrupt
    merge = PairsMerge(
        operator=OPERATOR, table=PAIRS.table, inputs=inputs, size_bytes=0, from_oldest=True
    )
    return merge_pairs(PAIRS, store, merge, lambda suffix: StatePath(f"new{suffix}"))


PAIR_CORRUPTIONS: dict[str, Callable[[Pairs], Pairs]] = {
    "a value": lambda pairs: [(pairs[0][0], b"other"), *pairs[1:]],
    "an older value of the key": lambda pairs: [*pairs[:6], (pairs[6][0], b"6"), *pairs[7:]],
    "a key": lambda pairs: [*pairs[:-1], (b"other", pairs[-1][1])],
    "two values exchanged": lambda pairs: [
        (pairs[1][0], pairs[2][1]) if at == 1 else (pairs[2][0], pairs[1][1]) if at == 2 else pair
        for at, pair in enumerate(pairs)
    ],
    "a key and its value exchanged": lambda pairs: [(pairs[0][1], pairs[0][0]), *pairs[1:]],
    "a lost pair": lambda pairs: [*pairs[:2000], *pairs[2001:]],
    "a pair twice": lambda pairs: [*pairs[:2000], *pairs[1999:]],
    "two pairs out of order": lambda pairs: [pairs[1], pairs[0], *pairs[2:]],
}


def test_the_pairs_as_they_are_pass() -> None:
    outcome = merged_pairs(lambda pairs: pairs)
    assert outcome.same
    assert outcome.rows_out == 3000


@pytest.mark.parametrize("name", PAIR_CORRUPTIONS)
def test_other_pairs_are_found(name: str) -> None:
    try:
        outcome = merged_pairs(PAIR_CORRUPTIONS[name])
    except FormatError:
        return  # a key twice, or out of order
    assert not outcome.same
