"""Rows of a state as columns: written, taken back, stored and expired as those of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arroyo_dagster.dataflow.definition.definition import Dataflow, StateDef
from arroyo_dagster.dataflow.definition.reading import parse_document
from arroyo_dagster.dataflow.definition.windows import GLOBAL_WINDOW
from arroyo_dagster.dataflow.storage.column_rows import BatchKeys, ColumnRows, Undo
from arroyo_dagster.dataflow.storage.columns import KEY
from arroyo_dagster.dataflow.storage.state_tables import entries_of, rows_of
from tests.dataflows import builder, definition, row_of

TTL_MS = 10_000
LONG = "a text that no cell holds"
COLUMNS = {"at": "timestamp", "last": "string", "mean": "f32", "n": "u32", "odd": "bool"}
DEFAULTS = (0, "", 0.0, 0, False)
ASKED = ["a", LONG, "nobody", "", f"{LONG}!", "b", "ü"]
Entry = tuple[Any, ...]


def state_of(value: str) -> StateDef:
    document = parse_document(definition(builder("pass", value=value)))
    assert isinstance(document, Dataflow)
    return document.services["build"].states["counts"]


KEPT = state_of(row_of(**COLUMNS))
EXPIRING = state_of(row_of(**COLUMNS)[:-1] + ", ttl: 10s}")


def row_values(number: int) -> Entry:
    return number * 1000, LONG[: number % len(LONG)], number / 2, number, number % 2 == 1


def keys_of(keys: Sequence[str]) -> BatchKeys:
    return BatchKeys(pl.Series(KEY, keys, pl.String))


def columns_of(rows: Sequence[Entry]) -> list[pa.Array]:
    entries = {str(at): (*row, 0) for at, row in enumerate(rows)}
    (table,) = rows_of(KEPT, {GLOBAL_WINDOW: entries}, 0)
    return [table.column(name).combine_chunks() for name in COLUMNS]


class Model:
    """The same rows in dictionaries: what there is, and what a table has stored of it."""

    def __init__(self, state: StateDef) -> None:
        self.state = state
        self.rows = ColumnRows(state)
        self.entries: dict[str, Entry] = {}
        self.changed: set[str] = set()
        self.table: dict[str, Entry] = {}
        self.now_ms = 0

    def write(self, keys: Sequence[str], number: int | None) -> Undo:
        """Write a row for each key, or delete them; return what takes both writes back."""
        before = {**self.entries}, {*self.changed}
        rows = None if number is None else [row_values(number + at) for at in range(len(keys))]
        undo = self.rows.replace(
            keys_of(keys), None if rows is None else columns_of(rows), self.now_ms
        )
        for at, key in enumerate(keys):
            self.entries.pop(key, None)
            if rows is not None:
                self.entries[key] = (*rows[at], self.now_ms)
        self.changed |= {*keys}

        def undo_both() -> None:
            undo()
            self.entries, self.changed = before

        return undo_both

    def fail(self, writes: Sequence[tuple[Sequence[str], int | None]]) -> None:
        for undo in reversed([self.write(keys, number) for keys, number in writes]):
            undo()

    def wait(self, milliseconds: int) -> None:
        self.now_ms += milliseconds

    def barrier(self) -> None:
        written, gone = self.rows.take_changes(self.now_ms, 1)
        found = {} if written is None else entries_of(self.state, written)[GLOBAL_WINDOW]
        deleted = [] if gone is None else gone.column(KEY).to_pylist()
        assert found == {key: self.entries[key] for key in self.changed & {*self.entries}}
        assert sorted(deleted) == sorted(self.changed - {*self.entries})
        self.table.update(found)
        for key in deleted:
            self.table.pop(key, None)
        self.changed = set()
        expired = [key for key in self.entries if self.is_expired(key)]
        assert self.rows.expire(self.now_ms) == len(expired)
        for key in expired:
            del self.entries[key]

    def is_expired(self, key: str) -> bool:
        return self.state.ttl_ms is not None and self.now_ms - self.entries[key][-1] >= TTL_MS

    def restart(self) -> None:
        """Restore from the table."""
        self.barrier()
        self.rows = ColumnRows(self.state)
        stored = {key: self.table[key] for key in self.entries}
        for table in rows_of(self.state, {GLOBAL_WINDOW: stored}, 1):
            self.rows.load(table)

    def check(self) -> None:
        columns = [
            column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column
            for column in self.rows.values_of(keys_of(ASKED), self.now_ms)
        ]
        for at, key in enumerate(ASKED):
            is_there = key in self.entries and not self.is_expired(key)
            expected = self.entries[key][:-1] if is_there else DEFAULTS
            assert tuple(column[at].as_py() for column in columns) == expected


KEYS = st.lists(st.sampled_from(["", "a", "b", "ü", LONG, LONG + "!"]), unique=True, min_size=1)
NUMBER = st.integers(0, 1000)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), KEYS, st.none() | NUMBER),
        st.tuples(st.just("fail"), st.lists(st.tuples(KEYS, st.none() | NUMBER), max_size=3)),
        st.tuples(st.just("wait"), st.integers(1, TTL_MS)),
        st.tuples(st.just("barrier")),
        st.tuples(st.just("restart")),
    ),
    max_size=25,
)


@pytest.mark.parametrize("state", [KEPT, EXPIRING], ids=["kept", "expiring"])
@given(STEPS)
def test_rows_are_those_of_a_model(state: StateDef, steps: list[Any]) -> None:
    model = Model(state)
    for step, *arguments in steps:
        getattr(model, step)(*arguments)
        model.check()


def test_rows_that_were_taken_back_leave_no_slot() -> None:
    rows = ColumnRows(KEPT)
    for turn in range(50):
        keys = keys_of([f"{turn}-{at}" for at in range(20)])
        rows.replace(keys, columns_of([row_values(1)] * 20), 0)()
        assert rows.take_changes(0, 1) == (None, None)
    assert rows._rows.slots == 20
