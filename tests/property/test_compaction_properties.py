"""Whatever a table holds, and however it is compacted: a restore afterwards is the one before."""

from __future__ import annotations

import decimal
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from arroyo_dagster.state import (
    CompactionPolicy,
    CompactionSettings,
    DeleteKey,
    DeleteTimeKey,
    DeleteTimeRange,
    DeleteValue,
    ExpiringTimeKeyTable,
    GlobalKeyedTable,
    MemoryStore,
    ObjectStore,
    ParquetBackend,
    TableConfig,
    global_table_config,
    plan_compaction,
    range_for_server,
    run_compaction,
    timestamp_table_config,
)
from arroyo_dagster.state.tables.generational import RowLayout, newest
from tests.fabricated import PATHS, pair_files, publish, stored_rows, time_files
from tests.formats import (
    INSERT,
    ExpiringTimeKeyConfig,
    ExpiringTimeKeyFiles,
    GlobalKeyedFiles,
    SortOrder,
    TimeFile,
    encode_operation,
    memory_schema,
)
from tests.shares import fewer_examples

WATERMARK = 1_000_000
RETENTION = 400_000
CUTOFF_NANOS = (WATERMARK - RETENTION) * 1000
_WORDS = ["", "a", "b", "ab", "é", "x" * 600, None]
_D = decimal.Decimal
TYPES: dict[str, tuple[pa.DataType, list[Any]]] = {
    "u64": (pa.uint64(), [0, 1, 2**63, 2**64 - 1, None]),
    "i8": (pa.int8(), [-128, 0, 127, None]),
    "f64": (pa.float64(), [0.0, -0.0, float("nan"), float("inf"), 1.5, None]),
    "flag": (pa.bool_(), [True, False, None]),
    "text": (pa.string(), _WORDS),
    "large": (pa.large_string(), _WORDS),
    "bytes": (pa.binary(), [b"", b"\0", b"\0\0", b"\xff" * 9, None]),
    "fixed": (pa.binary(3), [b"abc", b"\0\0\0", None]),
    "ns": (pa.timestamp("ns"), [0, 1, -1, 2**62, None]),
    "zoned": (pa.timestamp("us", tz="UTC"), [0, 5, None]),
    "date": (pa.date32(), [0, 19000, None]),
    "decimal": (pa.decimal128(38, 10), [_D("1.5"), _D(-(10**20)), None]),
    "list": (pa.list_(pa.field("item", pa.int64())), [[], [1], [1, None, 3], None]),
    "nested": (
        pa.struct([("start", pa.timestamp("ns")), ("tags", pa.list_(pa.string()))]),
        [{"start": 1, "tags": ["a"]}, {"start": None, "tags": None}, None],
    ),
    "dictionary": (pa.dictionary(pa.int32(), pa.string()), ["a", "b", "", None]),
    "nothing": (pa.null(), [None]),
}


@st.composite
def tables(draw: st.DrawFn) -> tuple[TableConfig, list[tuple[pa.Table, pa.Array]], int]:
    """A table, what each epoch wrote with the operation of each row, and who wrote it."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kinds = draw(st.lists(st.sampled_from(sorted(TYPES)), max_size=4))
    generational = draw(st.booleans())
    deletes = draw(st.booleans())
    keyed_by = draw(st.sampled_from([("k",), ("k", "k2"), ()]))
    routed_by = draw(st.sampled_from([None, keyed_by[:1]]))
    # Names repeat: columns of one type all have the same.
    fields = [pa.field("k", pa.int64()), pa.field("k2", pa.string())]
    fields += [pa.field(kind, TYPES[kind][0]) for kind in kinds]
    fields.insert(
        int(rng.integers(0, len(fields) + 1)), pa.field("_timestamp", pa.timestamp("ns"), False)
    )
    config = timestamp_table_config(
        "t",
        retention_micros=RETENTION,
        schema=pa.schema(fields, metadata={"note": "kept"}),
        keys=keyed_by,
        routing_keys=routed_by,
        generational=generational,
    )
    schema = memory_schema(config.config)  # type: ignore[arg-type]
    epochs = []
    for _ in range(draw(st.integers(1, 7))):
        count = int(rng.integers(1, 30))
        rows = pa.Table.from_arrays([_column(field, count, rng) for field in schema], schema=schema)
        twice = rng.integers(0, count, int(rng.integers(0, 4)))
        rows = rows.take(np.concatenate([np.arange(count), twice]))
        epochs.append(_with_deletes(rows, rng, 0.1 if deletes else 0.0, generational))
    return config, epochs, draw(st.integers(1, 3))


def _column(field: pa.Field, count: int, rng: np.random.Generator) -> pa.Array:
    if field.name == "_timestamp":
        near = CUTOFF_NANOS + rng.integers(-2, 3, count)
        later = CUTOFF_NANOS + rng.integers(-(10**8), 10**9, count)
        return pa.array(np.where(rng.random(count) < 0.4, near, later), field.type)
    if field.name == "_generation":
        return pa.array(rng.integers(0, 6, count).astype(np.uint64))
    if field.name == "k":
        # Skewed: half of all rows have one key.
        return pa.array(np.where(rng.random(count) < 0.5, 7, rng.integers(0, 9, count)))
    values = ["a", "b", None] if field.name == "k2" else TYPES[field.name][1]
    if pa.types.is_dictionary(field.type):
        plain = pa.array([values[at] for at in rng.integers(0, len(values), count)], pa.string())
        return plain.dictionary_encode().cast(field.type)
    return pa.array([values[at] for at in rng.integers(0, len(values), count)], field.type)


def _with_deletes(
    rows: pa.Table, rng: np.random.Generator, share: float, generational: bool
) -> tuple[pa.Table, pa.Array]:
    """Some rows made deletes. A row that carries one is no older than any that it deletes, and
    rows of generational tables are deleted by key."""
    at = rows.schema.get_field_index("_timestamp")
    times = rows.column(at).cast(pa.int64()).to_pylist()
    operations = []
    for row, time in enumerate(times):
        kinds = [
            (DeleteKey(b""), CUTOFF_NANOS + 10**9),
            (DeleteTimeKey(time, b""), time),
            (DeleteTimeRange(b"", time - 2, time + 10**8), time + 10**8),
            (DeleteValue(b"", time, b""), time),
        ]
        if rng.random() >= share:
            operations.append(INSERT)
            continue
        operation, times[row] = kinds[0 if generational else int(rng.integers(0, 4))]
        operations.append(encode_operation(operation))
    changed = pa.array(times, pa.int64()).cast(pa.timestamp("ns"))
    return rows.set_column(at, rows.schema.field(at), changed), pa.array(operations, pa.binary())


@st.composite
def ways(draw: st.DrawFn) -> CompactionSettings:
    """Every policy, order and number of subtasks, with so little memory that it never lasts."""
    return CompactionSettings(
        policy=draw(st.sampled_from(CompactionPolicy)),
        target_bytes=draw(st.sampled_from([4_000, 64 << 20])),
        min_files=draw(st.integers(2, 4)),
        level_files=draw(st.integers(2, 3)),
        window_micros=draw(st.sampled_from([None, 1, 100_000])),
        parallelism=draw(st.sampled_from([None, None, 1, 2, 3])),
        sort=draw(st.sampled_from(SortOrder)),
        deduplicate=draw(st.booleans()),
        memory_bytes=draw(st.sampled_from([2_000, 64 << 20])),
        part_bytes=draw(st.sampled_from([5_000, 256 << 20])),
    )


# ---- what a restore loads ------------------------------------------------------------------------


def _plain(column: Any) -> list[Any]:
    """Values that compare bit by bit: what Python cannot hold as it is stored in Arrow."""
    kind = column.type
    if pa.types.is_struct(kind):
        parts = [_plain(column.field(at)) for at in range(kind.num_fields)]
        valid = column.is_valid().to_pylist()
        rows = zip(*parts, strict=True)
        return [row if ok else None for row, ok in zip(rows, valid, strict=True)]
    if pa.types.is_timestamp(kind):
        return column.cast(pa.int64()).to_pylist()  # type: ignore[no-any-return]
    return [repr(value) for value in column.to_pylist()]


def multiset(rows: pa.Table) -> Counter[Any]:
    """Rows as tuples, columns by position."""
    columns = [_plain(pa.concat_arrays(column.chunks)) for column in rows.columns if column.chunks]
    return Counter(zip(*columns, strict=True))


def restored(
    store: ObjectStore,
    config: TableConfig,
    files: Sequence[TimeFile],
    parallelism: int,
    cutoff_micros: int,
) -> Counter[Any]:
    """The rows that the subtasks of a job load, together."""
    table = ExpiringTimeKeyTable(config, store)
    assert isinstance(config.config, ExpiringTimeKeyConfig)
    layout = RowLayout.of(config.config, table.memory_schema, managed=True)
    found: Counter[Any] = Counter()
    for at in range(parallelism):
        keys = range_for_server(at, parallelism)
        rows = table.load(files, keys, cutoff_micros=cutoff_micros)
        found += multiset(newest(rows, layout) if config.config.generational else rows)
    return found


def _restores(
    store: ObjectStore, config: TableConfig, files: Sequence[TimeFile]
) -> Iterator[Counter[Any]]:
    for parallelism, later in itertools.product((1, 2, 3), (0, 1, 100_000, RETENTION)):
        cutoff = WATERMARK - RETENTION + later
        yield restored(store, config, files, parallelism, cutoff)


def _listed(store: ObjectStore) -> tuple[TimeFile, ...]:
    (operator,) = ParquetBackend(store, PATHS).load().operators
    (files,) = operator.tables.values()
    assert isinstance(files, ExpiringTimeKeyFiles)
    return files.files


@settings(fewer_examples(2), suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(tables(), ways())
def test_a_restore_loads_the_same_at_any_parallelism_and_any_later_watermark(
    made: tuple[TableConfig, list[tuple[pa.Table, pa.Array]], int], way: CompactionSettings
) -> None:
    config, epochs, parallelism = made
    store = MemoryStore()
    batches = [stored_rows(config, rows, operations) for rows, operations in epochs]
    files = time_files(store, config, batches, parallelism)
    publish(
        store,
        [(config, ExpiringTimeKeyFiles(files=files))],
        parallelism=parallelism,
        watermark_micros=WATERMARK,
    )
    before = list(_restores(store, config, files))
    outcome = run_compaction(store, PATHS, way)
    assert list(_restores(store, config, _listed(store))) == before
    for merge in outcome.merges:
        assert merge.same
        assert merge.rows_in == merge.rows_out + sum(merge.dropped.values())
    _goes_on_to_an_end(store, way)
    assert list(_restores(store, config, _listed(store))) == before
    # A file is in the outcome of one merge, or left out for a reason that is told.
    told = {path for one in outcome.plan.left_out for path in one.files}
    taken = {path for merge in outcome.plan.merges for path in merge.paths}
    assert told | taken == {file.path for file in files}


def _goes_on_to_an_end(store: ObjectStore, way: CompactionSettings) -> None:
    """Run again until there is nothing to do: files that became smaller than was forecast may go
    together with others, and each run leaves fewer of them."""
    count = _file_count(store)
    while plan_compaction(store, PATHS, way).merges:
        assert run_compaction(store, PATHS, way).changed
        count, before = _file_count(store), count
        assert count < before
    assert not run_compaction(store, PATHS, way).changed


def _file_count(store: ObjectStore) -> int:
    return len(ParquetBackend(store, PATHS).load().paths)


_KEYS = st.binary(max_size=3)
_WRITES = st.dictionaries(_KEYS, st.none() | st.binary(max_size=4), max_size=6)


@settings(deadline=None)
@given(st.lists(st.tuples(_WRITES, st.sampled_from([0, 0, 1])), min_size=1, max_size=9), ways())
def test_of_a_global_table_the_last_write_of_each_key_is_left(
    epochs: list[tuple[dict[bytes, bytes | None], int]], way: CompactionSettings
) -> None:
    store = MemoryStore()
    config = global_table_config("g", key=bytes, value=bytes)
    files = pair_files(store, config, epochs)
    publish(store, [(config, GlobalKeyedFiles(files=files))])
    last: dict[bytes, tuple[int, bytes] | None] = {}
    for writes, version in epochs:
        for key, value in writes.items():
            last[key] = None if value is None else (version, value)
    expected = {key: value for key, value in last.items() if value is not None}
    table = GlobalKeyedTable(config, store)
    assert table.load_with_version(files) == expected
    run_compaction(store, PATHS, way)
    (operator,) = ParquetBackend(store, PATHS).load().operators
    (listed,) = operator.tables.values()
    assert table.load_with_version(listed.paths) == expected
    if way.policy is CompactionPolicy.FULL and len(files) > 1:
        assert not any("-removed" in path for path in listed.paths)
    _goes_on_to_an_end(store, way)
    (operator,) = ParquetBackend(store, PATHS).load().operators
    (listed,) = operator.tables.values()
    assert table.load_with_version(listed.paths) == expected
