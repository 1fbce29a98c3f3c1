"""Which row of a key counts, against a plain dictionary."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arroyo_dagster.state.tables import generational
from arroyo_dagster.state.tables.generational import (
    RowLayout,
    accumulators,
    first_of_batches,
    newest,
    newest_of,
    tuples,
)

TIME = pa.field("_timestamp", pa.timestamp("ns"))
GENERATION = pa.field("_generation", pa.uint64(), nullable=False)
A = pa.schema([pa.field("k", pa.string()), pa.field("n", pa.int64()), TIME, GENERATION])
B = pa.schema(
    [
        pa.field("k", pa.string()),
        pa.field("accumulator", pa.uint32(), nullable=False),
        pa.field("args_row", pa.binary(), nullable=False),
        pa.field("count", pa.uint64(), nullable=False),
        TIME,
        GENERATION,
    ]
)
OF_A = RowLayout(keys=(0,), routing=(0,), timestamp=2, generation=3)
OF_B = RowLayout(keys=(0, 1, 2), routing=(0,), timestamp=4, generation=5, count=3)


def a(*rows: tuple[str | None, int, int | None, int]) -> pa.Table:
    return pa.Table.from_pylist([dict(zip(A.names, row, strict=True)) for row in rows], A)


def b(*rows: tuple[str | None, bytes, int, int]) -> pa.Table:
    """Rows (key, arguments, count, generation) of the first aggregate."""
    full = [(key, 0, args, count, 1, generation) for key, args, count, generation in rows]
    return pa.Table.from_pylist([dict(zip(B.names, row, strict=True)) for row in full], B)


def values(table: pa.Table, column: int = 1) -> list[Any]:
    return list(table.column(column).to_pylist())


# ---- table a -------------------------------------------------------------------------------------


def test_the_largest_generation_of_a_key_counts_wherever_it_stands() -> None:
    rows = a(("x", 1, 1, 5), ("y", 2, 1, 1), ("x", 3, 1, 9), ("x", 4, 1, 7), (None, 5, 1, 0))
    assert values(newest(rows, OF_A)) == [2, 3, 5]


def test_of_equal_generations_the_first_read_counts() -> None:
    assert values(newest(a(("x", 1, 1, 3), ("x", 2, 1, 3), ("x", 3, 1, 3)), OF_A)) == [1]


def test_generations_are_unsigned_to_the_last_bit() -> None:
    rows = a(("x", 1, 1, 2**63 - 1), ("x", 2, 1, 2**64 - 1), ("x", 3, 1, 2**63), ("x", 4, 1, 0))
    assert values(newest(rows, OF_A)) == [2]


def test_a_tombstone_hides_its_key_and_is_itself_not_restored() -> None:
    rows = a(("x", 1, 1, 1), ("x", 0, None, 2), ("y", 2, 1, 1))
    assert values(newest(rows, OF_A)) == [0, 2]
    assert values(accumulators(rows, OF_A)) == [2]
    assert values(accumulators(a(("x", 0, None, 2), ("x", 7, 1, 3)), OF_A)) == [7]


def test_a_key_that_came_down_to_zero_is_restored() -> None:
    assert values(accumulators(a(("x", 1, 1, 1), ("x", 0, 1, 2)), OF_A)) == [0]


# ---- table b -------------------------------------------------------------------------------------


def test_a_tuple_whose_count_is_zero_is_gone() -> None:
    rows = b(("x", b"1", 2, 1), ("x", b"2", 1, 1), ("x", b"1", 0, 2))
    assert values(newest(rows, OF_B), 2) == [b"2", b"1"]
    assert values(tuples(rows, OF_B), 2) == [b"2"]


def test_a_key_that_came_back_after_a_restart_loses_to_its_own_deleted_row() -> None:
    """Arroyo starts such a row at generation 0; `arroyo-state.md` 5.7 derives the loss."""
    rows = b(("x", b"1", 0, 7), ("x", b"1", 3, 0))
    assert tuples(rows, OF_B).num_rows == 0


# ---- without GROUP BY ----------------------------------------------------------------------------


def test_upstream_sees_the_first_row_of_each_batch() -> None:
    rows = a(("", 1, 1, 1), ("", 2, 1, 2), ("", 3, 1, 3), ("", 4, 1, 4))
    assert values(first_of_batches(rows, np.array([0, 0, 1, 1]))) == [1, 3]
    assert values(first_of_batches(rows, np.array([0, 0, 0, 0]))) == [1]
    assert first_of_batches(rows.slice(0, 0), np.array([], np.int64)).num_rows == 0


# ---- any history ---------------------------------------------------------------------------------

_KEYS = st.sampled_from(["x", "y", None])
_A_ROWS = st.lists(
    st.tuples(_KEYS, st.integers(0, 9), st.sampled_from([1, 1, None]), st.integers(0, 4)),
    max_size=25,
)
_B_ROWS = st.lists(
    st.tuples(_KEYS, st.sampled_from([b"1", b"2"]), st.integers(0, 2), st.integers(0, 4)),
    max_size=25,
)


def model(rows: list[tuple[Any, ...]], keys: int) -> dict[Any, tuple[Any, ...]]:
    """As Arroyo reads: a row wins if its generation is strictly larger."""
    known: dict[Any, tuple[Any, ...]] = {}
    for row in rows:
        key = row[:keys]
        if key not in known or row[-1] > known[key][-1]:
            known[key] = row
    return known


@given(rows=_A_ROWS)
def test_table_a_is_that_of_a_dictionary(rows: list[tuple[Any, ...]]) -> None:
    expected = [row for row in model(rows, 1).values() if row[2] is not None]
    found = accumulators(a(*rows), OF_A)
    shown = list(zip(values(found, 0), values(found, 1), values(found, 3), strict=True))
    assert sorted(shown, key=repr) == sorted(((k, n, g) for k, n, _, g in expected), key=repr)


@given(rows=_B_ROWS, of_a=_A_ROWS)
def test_table_b_is_that_of_a_dictionary(
    rows: list[tuple[Any, ...]], of_a: list[tuple[Any, ...]]
) -> None:
    kept = accumulators(a(*of_a), OF_A)
    keys = set(values(kept, 0))
    expected = [row for row in model(rows, 2).values() if row[2] and row[0] in keys]
    found = tuples(b(*rows), OF_B, [kept.column(0)])
    shown = list(zip(*(values(found, at) for at in (0, 2, 3, 5)), strict=True))
    assert sorted(shown, key=repr) == sorted(expected, key=repr)


@given(
    rows=_A_ROWS,
    cuts=st.lists(st.integers(0, 20), max_size=5),
    waiting=st.integers(0, 5),
)
def test_rows_in_pieces_come_to_what_they_come_to_at_once(
    rows: list[tuple[Any, ...]], cuts: list[int], waiting: int
) -> None:
    table = a(*rows)
    bounds = [0, *sorted(min(cut, len(rows)) for cut in cuts), len(rows)]
    pieces = [table.slice(start, end - start) for start, end in itertools.pairwise(bounds)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generational, "_WAITING_ROWS", waiting)
        assert newest_of(pieces, OF_A).equals(newest(table, OF_A))


@given(rows=_B_ROWS, start=st.integers(0, 25), end=st.integers(0, 25))
def test_merging_any_neighbours_changes_nothing_that_is_restored(
    rows: list[tuple[Any, ...]], start: int, end: int
) -> None:
    """A merge of some files keeps the newest rows of its run, those with count 0 among them."""
    whole = b(*rows)
    merged = pa.concat_tables(
        [
            whole.slice(0, start),
            newest(whole.slice(start, max(0, end - start)), OF_B),
            whole.slice(max(start, end)),
        ]
    )
    assert tuples(merged, OF_B).equals(tuples(whole, OF_B))
