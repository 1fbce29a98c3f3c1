"""Rows with equal values told apart from the others."""

from __future__ import annotations

import struct
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arroyo_dagster.state.tables.grouping import group_codes

NAN = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000001))[0]
DICTIONARY = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2, None], pa.int8()), ["x", "x", "y"])
COLUMNS: list[tuple[pa.Array, list[int]]] = [
    (pa.array([2, 1, 2, None, None]), [0, 1, 0, 2, 2]),
    (pa.array([2**64 - 1, 2**63, 2**64 - 1], pa.uint64()), [0, 1, 0]),
    (pa.array(["a", "", None, "a"]), [0, 1, 2, 0]),
    (pa.array([b"", b"\x00", b""]), [0, 1, 0]),
    (pa.array([True, None, True, False]), [0, 1, 0, 2]),
    (pa.array([1, 10**18 + 1, 1], pa.timestamp("ns")), [0, 1, 0]),
    (pa.array([0.0, -0.0, float("nan"), float("nan"), NAN, None]), [0, 1, 2, 2, 3, 4]),
    (pa.array([0.0, -0.0, 0.0], pa.float16()), [0, 1, 0]),
    (pa.nulls(3), [0, 0, 0]),
    (DICTIONARY, [0, 0, 1, 2]),
    (pa.array([[1, 2], [1], None, [], [1, 2], [None]]), [0, 1, 2, 3, 0, 4]),
    (pa.array([[1, 2], [2, 1], [1, 2], None], pa.list_(pa.int8(), 2)), [0, 1, 0, 2]),
    (
        pa.array([{"a": 1}, {"a": None}, None, {"a": 1}], pa.struct([("a", pa.int64())])),
        [0, 1, 2, 0],
    ),
    (
        pa.array([[("k", 1)], [("k", 2)], [("k", 1)]], pa.map_(pa.string(), pa.int64())),
        [0, 1, 0],
    ),
    (pa.array([[["a"], []], [["a"]], [["a"], []]]), [0, 1, 0]),
]


def first_seen(codes: Any) -> list[int]:
    """The codes, numbered by when each first comes."""
    known: dict[int, int] = {}
    return [known.setdefault(int(code), len(known)) for code in codes]


@pytest.mark.parametrize(("column", "expected"), COLUMNS, ids=[str(c.type) for c, _ in COLUMNS])
def test_equal_values_have_one_number_and_others_another(
    column: pa.Array, expected: list[int]
) -> None:
    assert first_seen(group_codes([column], len(column))) == expected
    halves = pa.chunked_array([column.slice(0, 1), column.slice(1)])
    assert first_seen(group_codes([halves], len(column))) == expected


def test_what_lies_below_a_null_does_not_count() -> None:
    values = pa.array([1, 2], pa.int64())
    column = pa.StructArray.from_arrays([values], ["a"], mask=pa.array([True, True]))
    assert first_seen(group_codes([column], 2)) == [0, 0]


_VALUES = st.one_of(st.none(), st.integers(0, 3))


@given(rows=st.lists(st.tuples(_VALUES, _VALUES, _VALUES), max_size=30))
def test_several_columns_are_equal_together(rows: list[tuple[Any, ...]]) -> None:
    columns = [pa.array([row[at] for row in rows], pa.int8()) for at in range(3)]
    known: dict[Any, int] = {}
    expected = [known.setdefault(row, len(known)) for row in rows]
    assert first_seen(group_codes(columns, len(rows))) == expected
