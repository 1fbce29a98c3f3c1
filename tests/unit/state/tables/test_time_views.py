"""The three views of an expiring table: at any parallelism they hold the whole between them."""

from __future__ import annotations

import uuid
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arroyo_dagster.errors import InputError
from arroyo_dagster.state import (
    ExpiringTimeKeyTable,
    ExpiringTimeKeyView,
    KeyTimeView,
    MemoryStore,
    StatePath,
    TableConfig,
    TableManager,
    UncachedKeyValueView,
    key_hashes,
    range_for_server,
    timestamp_table_config,
)
from arroyo_dagster.state.codec.hashing.routing import subtasks_for_hashes
from tests.fabricated import compact_rows
from tests.formats import ExpiringTimeKeyFiles
from tests.jobs import as_multiset
from tests.unit.state.tables.test_manager import Job, T, manager

TIME = pa.field("_timestamp", pa.timestamp("ns"), nullable=False)
SCHEMA = pa.schema([pa.field("k", pa.string()), pa.field("v", pa.int64()), TIME])
RETENTION = 10


def config(schema: pa.Schema = SCHEMA, **options: Any) -> TableConfig:
    options.setdefault("keys", ["k"])
    return timestamp_table_config("t", retention_micros=RETENTION, schema=schema, **options)


def rows(*values: tuple[Any, Any, int]) -> pa.Table:
    """Rows (key, value, time in microseconds)."""
    keys, numbers, times = zip(*values, strict=True) if values else ((), (), ())
    return pa.table([keys, numbers, [time * 1000 for time in times]], schema=SCHEMA)


class OneTable(Job):
    """An operator with one table, whose managers come and go."""

    def __init__(self, table: TableConfig | None = None) -> None:
        super().__init__(MemoryStore())
        self.config = table or config()

    def manager(self, index: int = 0, parallelism: int = 1) -> TableManager:
        configs = {T: self.config}
        return manager(
            self.store, self.newest, index=index, parallelism=parallelism, configs=configs
        )

    def compact(self, parallelism: int) -> None:
        """Merge all files, a new one for each subtask."""
        assert self.newest is not None
        files = self.newest.tables.get(T)
        if not isinstance(files, ExpiringTimeKeyFiles):
            return
        table = ExpiringTimeKeyTable(self.config, self.store)
        outputs = [
            output
            for index in range(parallelism)
            for output in compact_rows(
                table,
                files.files,
                lambda suffix: StatePath(f"p/j/{uuid.uuid4().hex}{suffix}"),
                range_for_server(index, parallelism),
                cutoff_micros=0,
                from_oldest=True,
            ).outputs
        ]
        self.newest.tables[T] = ExpiringTimeKeyFiles(files=tuple(outputs))  # type: ignore[index]


def held_by(manager: TableManager, kind: type[Any]) -> Counter[Any]:
    """What one subtask holds, whichever view it looks through."""
    if kind is ExpiringTimeKeyView:
        return as_multiset(manager.get_expiring_time_key_table("t").rows())
    if kind is KeyTimeView:
        view = manager.get_key_time_table("t")
        found: Counter[Any] = Counter()
        for key in view.keys().column(0).to_pylist():
            for row, count in as_multiset(view.get(key)).items():
                found[(key, *row)] += count
        return found
    uncached = manager.get_uncached_key_value_view("t")
    return sum(map(as_multiset, uncached.get_all()), Counter())


VIEWS = (ExpiringTimeKeyView, KeyTimeView, UncachedKeyValueView)
_KEYS = st.one_of(st.none(), st.sampled_from(["", "a", "b"]), st.text(max_size=3))
_ROWS = st.lists(st.tuples(_KEYS, st.integers(0, 3), st.integers(0, 30)), max_size=12)


@settings(max_examples=60)
@given(
    epochs=st.lists(st.tuples(_ROWS, st.none() | st.integers(0, 35), _KEYS), max_size=3),
    parallelisms=st.lists(st.integers(1, 5), min_size=3, max_size=3),
    restored_at=st.integers(1, 7),
    compacted=st.booleans(),
)
def test_at_any_parallelism_the_subtasks_hold_the_whole_and_nothing_twice(
    epochs: list[tuple[list[Any], int | None, Any]],
    parallelisms: list[int],
    restored_at: int,
    compacted: bool,
) -> None:
    """Written at changing parallelism, restored at yet another."""
    job, model, watermark = OneTable(), [], 0
    for (written, mark, gone), parallelism in zip(epochs, parallelisms, strict=False):
        managers = [job.manager(index, parallelism) for index in range(parallelism)]
        views = [one.get_expiring_time_key_table("t") for one in managers]
        hashes = key_hashes([pa.array([row[0] for row in written], pa.string())])
        owners = subtasks_for_hashes(hashes, parallelism)
        for row, owner in zip(written, owners, strict=True):
            views[owner].insert(rows(row))
        for view in views:
            view.delete_key(gone)
        watermark = max(watermark, mark or 0)
        job.write(*managers, watermark=watermark)
        model = [row for row in (*model, *written) if row[0] != gone]
        model = [row for row in model if row[2] >= watermark - RETENTION]
    if compacted and job.newest is not None:
        job.compact(parallelisms[0])
    whole = as_multiset(rows(*model))
    for kind in VIEWS:
        parts = [held_by(job.manager(i, restored_at), kind) for i in range(restored_at)]
        assert sum(parts, Counter()) == whole
        for index, part in enumerate(parts):
            keys = range_for_server(index, restored_at)
            hashes = key_hashes([pa.array([row[0] for row in part], pa.string())])
            assert all(keys.start <= value <= keys.end for value in hashes.to_pylist())


# ---- by key --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        (pa.int64(), [1, -1, None]),
        (pa.timestamp("ns"), [10**18 + 1, 10**18 + 2, None]),
        (pa.date32(), [1, 2, None]),
        (pa.binary(), [b"", b"\x00", None]),
        (pa.bool_(), [True, False, None]),
        (pa.list_(pa.int64()), [[1], [], None]),
        (
            pa.struct([("start", pa.timestamp("ns")), ("end", pa.timestamp("ns"))]),
            [{"start": 1, "end": 2}, {"start": 1, "end": None}, None],
        ),
    ],
    ids=str,
)
def test_keys_of_any_type_are_found(kind: pa.DataType, keys: list[Any]) -> None:
    schema = pa.schema([pa.field("k", kind), pa.field("v", pa.int64()), TIME])
    view = OneTable(config(schema)).manager().get_key_time_table("t")
    column = pa.array([*keys, keys[0]], kind)
    view.insert(pa.table([column, [0, 1, 2, 3], [1, 1, 1, 1]], schema=schema))
    assert [view.get(key).column("v").to_pylist() for key in keys] == [[0, 3], [1], [2]]
    assert view.keys().num_rows == 3


# ---- without memory ------------------------------------------------------------------------------


def test_a_view_without_memory_shows_the_epoch_it_goes_on_from() -> None:
    job = OneTable()
    manager = job.manager()
    view = manager.get_uncached_key_value_view("t")
    view.insert(rows(("a", 1, 1)))
    assert list(view.get_all()) == []
    published = job.write(manager)
    assert manager.follow(published)
    assert [part.num_rows for part in view.get_all()] == [1]
    other = job.manager()
    other.get_uncached_key_value_view("t").insert(rows(("b", 2, 30)))
    published = job.write(other, watermark=15)
    assert manager.follow(published)
    assert [part.column("k").to_pylist() for part in view.get_all()] == [["b"]]
    assert [part.schema.names for part in view.get_all(["v", "k"])] == [["k", "v"]]
    with pytest.raises(InputError, match="no column 'x'"):
        list(view.get_all(["x"]))


@pytest.mark.parametrize("view", ["get_uncached_key_value_view", "get_key_time_table"])
def test_many_keys_are_deleted_at_once_as_one_by_one(view: str) -> None:
    job = OneTable()
    tables = job.manager()
    seen = getattr(tables, view)("t")
    seen.insert(rows(*((f"k{at % 50}", at, 100 + at) for at in range(200))))
    seen.delete_keys(rows(*((f"k{at}", 0, 300) for at in range(0, 50, 2))))
    seen.delete_keys(rows())
    seen.insert(rows(("k0", 7, 301)))
    job.write(tables)
    left = job.manager().get_key_time_table("t").rows()
    kept = {f"k{at}" for at in range(1, 50, 2)}
    assert set(left["k"].to_pylist()) == kept | {"k0"}
    assert (left.num_rows, left["v"].to_pylist()[-1]) == (101, 7)
    if view == "get_key_time_table":
        assert seen.rows().num_rows == 101


def test_keys_that_are_floats_are_deleted_by_value_not_by_bits() -> None:
    schema = pa.schema([pa.field("k", pa.float64()), pa.field("v", pa.int64()), TIME])
    job = OneTable(config(schema))
    tables = job.manager()
    seen = tables.get_key_time_table("t")
    seen.insert(pa.table([[0.0, -0.0, 1.0], [1, 2, 3], [1, 1, 1]], schema=schema))
    one = job.manager().get_key_time_table("t")
    one.insert(pa.table([[0.0, -0.0, 1.0], [1, 2, 3], [1, 1, 1]], schema=schema))
    seen.delete_keys(pa.table([[-0.0], [0], [1]], schema=schema))
    one.delete_key(-0.0)
    assert seen.rows().equals(one.rows())


def test_of_a_generational_table_it_gives_the_newest_rows_or_all() -> None:
    job = OneTable(config(generational=True))
    manager = job.manager()
    view = manager.get_uncached_key_value_view("t")
    for generation, key in [(0, "a"), (2, "a"), (1, "a"), (7, "b")]:
        columns = [[key], [generation], [1000], [generation]]
        view.insert(pa.table(columns, schema=view.schema))
    job.write(manager)
    restored = job.manager().get_uncached_key_value_view("t")
    assert sum(part.num_rows for part in restored.get_all()) == 4
    assert restored.get_newest().column("v").to_pylist() == [2, 7]
    with pytest.raises(InputError, match="no generations"):
        OneTable().manager().get_uncached_key_value_view("t").get_newest()


# ---- one view a table ----------------------------------------------------------------------------


@pytest.mark.parametrize("first", range(3))
@pytest.mark.parametrize("second", range(3))
def test_a_table_has_one_view(first: int, second: int) -> None:
    manager = OneTable().manager()
    getters = [
        manager.get_expiring_time_key_table,
        manager.get_key_time_table,
        manager.get_uncached_key_value_view,
    ]
    view = getters[first]("t")
    if first == second:
        assert getters[second]("t") is view
    else:
        with pytest.raises(InputError, match="has a view"):
            getters[second]("t")
