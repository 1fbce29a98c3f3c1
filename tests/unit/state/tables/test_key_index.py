"""Rows by their keys, whatever hashes do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arroyo_dagster.state.tables import key_index
from arroyo_dagster.state.tables.generational import RowLayout, newest
from arroyo_dagster.state.tables.key_index import KeyIndex, can_index, hashes_of

LAYOUT = RowLayout(keys=(0, 1), routing=(0,), timestamp=3, generation=3)
ROW = st.tuples(st.none() | st.text(max_size=2), st.none() | st.integers(-2, 2), st.integers(0, 3))


def few(columns: Any) -> Any:
    """As `hashes_of`, but hardly any two keys have another hash."""
    return hashes_of(columns) % np.uint64(3) << np.uint64(62)


def plain(rows: list[tuple[Any, ...]]) -> list[int]:
    """The place of the newest row of each key: of the largest generation the first."""
    best: dict[tuple[Any, ...], int] = {}
    for at, (text, number, generation) in enumerate(rows):
        known = best.get((text, number))
        if known is None or generation > rows[known][2]:
            best[text, number] = at
    return sorted(best.values())


def table(rows: list[tuple[Any, ...]]) -> pa.Table:
    texts, numbers, generations = zip(*rows, strict=True) if rows else ((), (), ())
    return pa.table(
        {
            "text": pa.chunked_array([pa.array(texts, pa.string())]),
            "number": pa.array(numbers, pa.int64()),
            "place": pa.array(range(len(rows)), pa.int64()),
            "_generation": pa.array(generations, pa.uint64()),
        }
    )


@pytest.mark.parametrize("hashes", [hashes_of, few])
@given(rows=st.lists(ROW, max_size=40))
def test_the_newest_row_of_each_key_counts(
    hashes: Callable[..., Any], rows: list[tuple[Any, ...]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("arroyo_dagster.state.tables.generational.hashes_of", hashes)
        found = newest(table(rows), LAYOUT)
    assert found.column("place").to_pylist() == plain(rows)


@pytest.mark.parametrize("hashes", [hashes_of, few])
@given(known=st.lists(st.text(max_size=2), max_size=30), wanted=st.lists(st.text(max_size=2)))
def test_a_key_is_found_where_it_counts_and_nowhere_else(
    hashes: Callable[..., Any], known: list[str], wanted: list[str]
) -> None:
    keys, asked = pa.chunked_array([known], pa.string()), pa.array(wanted, pa.string())
    newest_first = np.arange(len(known))[::-1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_index, "hashes_of", hashes)
        index = KeyIndex([keys], hashes([keys]), newest_first)
        found = index.find([asked])
    last = {key: at for at, key in enumerate(known)}
    assert found.tolist() == [last.get(key, -1) for key in wanted]


def test_keys_whose_equality_is_not_that_of_their_bits_are_left_to_others() -> None:
    assert can_index([pa.string(), pa.uint64()])
    assert not can_index([pa.float64()])
    assert not can_index([pa.list_(pa.string())])
    assert not can_index([])
