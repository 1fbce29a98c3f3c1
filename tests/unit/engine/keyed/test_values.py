"""One value for each key: what is put is there, in memory and after a restore, and nothing else."""

from __future__ import annotations

import datetime as dt
import decimal
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from arroyo_dagster.engine import ListState, MapState, Timers, ValueState, keyed_state
from arroyo_dagster.engine.keyed import cells
from arroyo_dagster.engine.keyed.rows import KeyedRows, Keys
from arroyo_dagster.errors import FormatError, InputError
from arroyo_dagster.state import DeleteTimeKey
from arroyo_dagster.state.tables.live_rows import StoredRows
from tests.formats import INSERT, encode_operation
from tests.keyed_subtasks import Subtasks

_D = decimal.Decimal
KEYS: dict[str, tuple[Any, list[Any]]] = {
    "text": (str, ["", "a", "twelve bytes", "thirteen byte", "thirteen bytf", "é" * 300]),
    "large": (pa.large_string(), ["", "a" * 13, "b" * 13]),
    "bytes": (bytes, [b"", b"\0", b"\0\0", b"x" * 40]),
    "fixed": (pa.binary(20), [b"a" * 20, b"b" * 20]),
    "number": (int, [0, 1, -1, 2**63 - 1, -(2**63)]),
    "u64": (pa.uint64(), [0, 2**64 - 1, 2**32]),
    "i8": (pa.int8(), [-128, 0, 127]),
    "flag": (bool, [True, False]),
    "time": (pa.timestamp("ns"), [0, 1, -1, 2**62]),
    "date": (pa.date32(), [dt.date(1970, 1, 1), dt.date(2026, 11, 24)]),
}
VALUES: dict[str, tuple[Any, list[Any]]] = {
    "number": (int, [1, -(2**63), 2**63 - 1]),
    "float": (float, [0.5, float("inf"), -0.0]),
    "text": (str, ["", "short", "longer than twelve bytes"]),
    "perhaps": (str | None, ["", None, "longer than twelve bytes"]),
    "flag": (pa.bool_(), [True, None, False]),
    "decimal": (pa.decimal128(38, 10), [_D("1.5"), None, _D(-(10**20))]),
    "wide": (pa.decimal256(60, 2), [_D("1.50"), None]),
    "time": (pa.timestamp("us", tz="UTC"), [dt.datetime(2026, 1, 1, tzinfo=dt.UTC), None]),
    "half": (pa.float16(), [None, None]),
}


def opened(tasks: Subtasks) -> ValueState:
    return tasks.open().get_keyed_state("t", ValueState)


@pytest.mark.parametrize("kind", KEYS)
def test_keys_of_any_type_are_found_again_after_a_restore(kind: str) -> None:
    declared, keys = KEYS[kind]
    tasks = Subtasks(keyed_state("t", declared, int))
    manager = tasks.open()
    state = manager.get_keyed_state("t", ValueState)
    column = pa.array(keys, state.definition.keys[0].type)
    state.put_many(column, list(range(len(keys))))
    gone = column.slice(0, 1)
    tasks.write(manager)
    state.remove_many(gone)
    tasks.write(manager)
    for one in (state, opened(tasks)):
        assert one.get_many(column).to_pylist() == [None, *range(1, len(keys))]
        assert one.contains_many(column).to_pylist() == [False, *[True] * (len(keys) - 1)]
        assert len(one) == len(keys) - 1


@pytest.mark.parametrize("kind", VALUES)
def test_values_of_any_type_come_back_bit_by_bit(kind: str) -> None:
    declared, values = VALUES[kind]
    tasks = Subtasks(keyed_state("t", int, declared))
    manager = tasks.open()
    state = manager.get_keyed_state("t", ValueState)
    column = pa.array(values, state.definition.values[0].type)
    keys = pa.array(range(len(values)), pa.int64())
    assert state.get_many(keys).null_count == len(values)
    assert state.get_many(keys).type == column.type
    state.put_many(keys, column)
    tasks.write(manager)
    for one in (state, opened(tasks)):
        assert one.get_many(keys).equals(column)
        assert one.get(0, "?") == column[0].as_py()
        assert one.get(77, "?") == "?"


def test_keys_and_values_may_have_several_columns() -> None:
    key = pa.schema([("city", pa.string()), ("day", pa.int32())])
    value = pa.struct([("low", pa.float64()), ("high", pa.float64())])
    tasks = Subtasks(keyed_state("t", key, value))
    manager = tasks.open()
    state = manager.get_keyed_state("t", ValueState)
    keys = pa.table({"city": ["a", "a", "b"], "day": pa.array([1, 2, 1], pa.int32())})
    state.put_many(keys, pa.table({"low": [1.0, None, 3.0], "high": [2.0, 3.0, None]}))
    state.put(("c", 9), (0.0, 1.0))
    tasks.write(manager)
    for one in (state, opened(tasks)):
        assert one.get(("a", 2)) == {"low": None, "high": 3.0}
        assert one.get(("c", 9)) == {"low": 0.0, "high": 1.0}
        struct = one.get_many(keys.to_struct_array())
        assert struct.field("high").to_pylist() == [2.0, 3.0, None]
        assert one.get_many(keys.to_batches()[0]).equals(struct)
        one.remove(("a", 1))
        assert one.contains_many(keys).to_pylist() == [False, True, True]


def test_keys_that_share_a_hash_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hash only narrows the search."""
    plain = KeyedRows.keys_of

    def all_alike(rows: KeyedRows, columns: Any) -> Keys:
        return replace(plain(rows, columns), codes=np.zeros(len(columns[0]), np.uint64))

    monkeypatch.setattr(KeyedRows, "keys_of", all_alike)
    tasks = Subtasks(keyed_state("t", str, int))
    manager = tasks.open()
    state = manager.get_keyed_state("t", ValueState)
    keys = [f"{'the same beginning' * (at % 2)}{at:03}" for at in range(40)]
    state.put_many([*keys, keys[0]], list(range(41)))
    state.remove_many(keys[10:20])
    tasks.write(manager)
    expected = [40, *range(1, 10), *[None] * 10, *range(20, 40)]
    for one in (state, opened(tasks)):
        assert one.get_many(keys).to_pylist() == expected
        assert one.get("the same beginning999") is None


def test_values_that_are_overwritten_leave_no_bytes_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "_CHUNK_BYTES", 1 << 12)
    state = opened(Subtasks(keyed_state("t", int, str)))
    keys = list(range(100))
    for turn in range(200):
        state.put_many(keys, [f"{turn:050}"] * len(keys))
    (column,) = state._rows.values
    held = sum(len(buffer) for buffer in column._chunks.buffers)  # type: ignore[attr-defined]
    assert held < 8 * len(keys) * 50


# ---- ttl -----------------------------------------------------------------------------------------


def test_rows_of_files_that_come_late_expire_in_their_time() -> None:
    """After a merge, older rows may be read after newer ones."""
    state = opened(Subtasks(keyed_state("t", str, int, ttl=dt.timedelta(microseconds=10))))
    state.replay([stored([("new", 1, 20)], [INSERT])])
    state.replay([stored([("old", 1, 13), ("older", 1, 12)], [INSERT] * 2)])
    state.begin_epoch(22)
    assert state.contains_many(["new", "old", "older"]).to_pylist() == [True, True, False]
    state.begin_epoch(29)
    assert state.contains_many(["new", "old"]).to_pylist() == [True, False]
    state.begin_epoch(30)
    assert not len(state)


# ---- files ---------------------------------------------------------------------------------------


def stored(rows: list[tuple[str, int, int]], operations: list[bytes]) -> StoredRows:
    """Rows (key, value, row generation) as files have them."""
    keys, values, generations = zip(*rows, strict=True)
    schema = pa.schema(
        [
            pa.field("key", pa.string(), nullable=False),
            pa.field("value", pa.int64(), nullable=False),
            pa.field("_timestamp", pa.timestamp("ns"), nullable=False),
            pa.field("_generation", pa.uint64(), nullable=False),
        ]
    )
    times = [generation * 1000 for generation in generations]
    table = pa.table([keys, values, times, generations], schema=schema)
    return StoredRows(table, pa.chunked_array([operations], pa.binary()))


def test_the_newest_row_generation_counts_wherever_it_lies() -> None:
    """A merge may write rows in the order of keys, or of time."""
    state = opened(Subtasks(keyed_state("t", str, int)))
    state.replay(
        [
            stored([("a", 3, 3), ("a", 1, 1), ("b", 1, 1), ("b", 2, 2)], [INSERT] * 4),
            stored([("a", 2, 2), ("b", 9, 2), ("c", 1, 1)], [INSERT] * 3),
        ]
    )
    assert state.get_many(["a", "b", "c"]).to_pylist() == [3, 2, 1]


@pytest.mark.parametrize("operation", [encode_operation(DeleteTimeKey(1, b"")), b"", b"\x09"])
def test_other_operations_are_refused(operation: bytes) -> None:
    state = opened(Subtasks(keyed_state("t", str, int)))
    with pytest.raises(FormatError):
        state.replay([stored([("a", 1, 1)], [operation])])


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        ([1], [1]),
        (["a"], ["b"]),
        (["a", "b"], [1]),
        ([None], [1]),
        (["a"], [None]),
        (pa.table({"x": ["a"], "y": ["b"]}), [1]),
        (["a"], pa.table({"x": [1], "y": [2]})),
        (pa.array([{"key": "a"}]), [1]),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_and_nothing_changes(keys: Any, values: Any) -> None:
    state = opened(Subtasks(keyed_state("t", str, int)))
    with pytest.raises(InputError):
        state.put_many(keys, values)
    assert not len(state)


def test_a_table_is_opened_as_what_it_is() -> None:
    manager = Subtasks(keyed_state("t", str, int), keyed_state("l", str, list[int])).open()
    for form in (ListState, MapState, Timers):
        with pytest.raises(InputError, match="form"):
            manager.get_keyed_state("t", form)
    with pytest.raises(InputError, match="form"):
        manager.get_keyed_state("l", ValueState)
    for old in (manager.get_key_time_table, manager.get_uncached_key_value_view):
        with pytest.raises(InputError, match="keyed state"):
            old("t")
    assert manager.get_keyed_state("t", ValueState) is manager.get_keyed_state("t", ValueState)
