"""Rows by key against rows without an index: the same rows in the same order after any change."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from arroyo_dagster.state import (
    ExpiringTimeKeyTable,
    ExpiringTimeKeyView,
    KeyTimeView,
    timestamp_table_config,
)
from arroyo_dagster.state.tables.rows_by_key import RowsByKey

SCHEMA = pa.schema(
    [
        pa.field("k", pa.string()),
        pa.field("f", pa.float64()),
        pa.field("v", pa.int64()),
        pa.field("_timestamp", pa.timestamp("ns"), nullable=False),
    ]
)
KEYS = st.tuples(st.sampled_from(["a", "b", None]), st.sampled_from([0.0, -0.0, 1.5]))
TIMES = st.integers(1, 30)
ROWS = st.lists(st.tuples(KEYS, st.integers(0, 2), TIMES), min_size=1, max_size=8)
CHANGES = st.one_of(
    st.tuples(st.just("insert"), ROWS),
    st.tuples(st.just("delete_key"), KEYS),
    st.tuples(st.just("delete_keys"), ROWS),
    st.tuples(st.just("delete_time_key"), st.tuples(TIMES, KEYS)),
    st.tuples(st.just("delete_time_range"), st.tuples(TIMES, TIMES, KEYS)),
    st.tuples(st.just("delete_value"), ROWS),
    st.tuples(st.just("evict"), TIMES),
    st.tuples(st.just("get"), KEYS),
)


def _table(rows: list[Any]) -> pa.Table:
    keys, values, times = zip(*rows, strict=True)
    columns = [*map(list, zip(*keys, strict=True)), values, [time * 1000 for time in times]]
    return pa.table(columns, schema=SCHEMA)


def _apply(view: ExpiringTimeKeyView, verb: str, given: Any) -> Any:
    if verb == "delete_value":
        return view.delete_value(_table(given).slice(0, 1))
    if verb in ("insert", "delete_keys"):
        return getattr(view, verb)(_table(given))
    if verb == "evict":
        return view.evict(given)
    if verb == "delete_key":
        return view.delete_key(*given)
    *times, key = given
    return getattr(view, verb)(*times, *key)


@given(st.lists(CHANGES, max_size=12))
def test_any_changes_leave_the_same_rows_and_send_the_same_messages(changes: list[Any]) -> None:
    config = timestamp_table_config("t", retention_micros=1, schema=SCHEMA, keys=["k", "f"])
    table = ExpiringTimeKeyTable(config, None)  # type: ignore[arg-type]
    sent: tuple[list[Any], list[Any]] = ([], [])
    plain = ExpiringTimeKeyView(table, sent[0].append)
    keyed = KeyTimeView(table, sent[1].append)
    assert isinstance(keyed._live, RowsByKey)
    for verb, given_to in changes:
        if verb == "get":
            rows = plain.rows()
            wanted = [row for row in rows.to_pylist() if (row["k"], row["f"]) == given_to]
            found = keyed.get(*given_to)
            assert found["v"].to_pylist() == [row["v"] for row in wanted]
        else:
            assert _apply(keyed, verb, given_to) == _apply(plain, verb, given_to)
        assert keyed.rows().equals(plain.rows())
        assert len(keyed) == len(plain)
    operations = [
        [(one.data.rows.to_pydict(), _listed(one.data.operation)) for one in messages]
        for messages in sent
    ]
    assert operations[0] == operations[1]


def _listed(operation: Any) -> Any:
    return operation.to_pylist() if isinstance(operation, pa.Array) else operation


def test_a_row_that_is_removed_from_between_others_is_gone_from_its_key() -> None:
    config = timestamp_table_config("t", retention_micros=1, schema=SCHEMA, keys=["k", "f"])
    view = KeyTimeView(ExpiringTimeKeyTable(config, None), lambda message: None)  # type: ignore[arg-type]
    view.insert(_table([(("a", 1.5), value, value + 1) for value in range(4)]))
    view.get("a", 1.5)  # from now on there is an index
    assert view.delete_time_key(2, "a", 1.5) == 1
    view.evict(2)
    assert view.get("a", 1.5)["v"].to_pylist() == [2, 3]
    view.insert(_table([(("a", 1.5), 9, 9)]))
    assert view.get("a", 1.5)["v"].to_pylist() == [2, 3, 9]
