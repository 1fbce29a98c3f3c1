"""The digest of a multiset of rows: equal exactly where the rows are, in whatever order."""

from __future__ import annotations

import decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.formats import digest_rows

VALUES: dict[str, pa.Array] = {
    "integers": pa.array([1, None, 0, -1, 2**62]),
    "small": pa.array([1, None, 0, -1, 127], pa.int8()),
    "unsigned": pa.array([1, None, 0, 2**64 - 1, 5], pa.uint64()),
    "floats": pa.array([1.0, None, float("nan"), -0.0, 0.0], pa.float32()),
    "flags": pa.array([True, None, False, True, False]),
    "text": pa.array(["a", None, "", "ab", "a\0"]),
    "views": pa.array(["a", None, "", "ab", "a\0"], pa.string_view()),
    "long": pa.array(["x" * 70_000, None, "x" * 70_001, "y", ""]),
    "bytes": pa.array([b"\0", None, b"", b"\0\0", b"\1"], pa.large_binary()),
    "fixed": pa.array([b"ab", None, b"ba", b"aa", b"bb"], pa.binary(2)),
    "times": pa.array([1, None, 0, -1, 2**62], pa.timestamp("ns")),
    "decimals": pa.array(
        [decimal.Decimal(n) if n is not None else None for n in (1, None, 0, -1, 10**30)],
        pa.decimal256(50, 2),
    ),
    "lists": pa.array([[1, 2], None, [], [2, 1], [1]]),
    "nested": pa.array([[["a"], []], None, [], [[], ["a"]], [["a"]]]),
    "pairs": pa.array([[1, 2], None, [3, 4], [2, 1], [1, 1]], pa.list_(pa.int8(), 2)),
    "list views": pa.array([[1, 2], None, [], [2, 1], [1]], pa.list_view(pa.int64())),
    "maps": pa.array(
        [[("a", 1)], None, [], [("a", 2)], [("b", 1)]], pa.map_(pa.string(), pa.int64())
    ),
    "structs": pa.array(
        [{"x": 1, "y": "a"}, None, {"x": None, "y": "a"}, {"x": 1, "y": None}, {"x": 1, "y": "b"}]
    ),
    "words": pa.array(["a", None, "", "ab", "b"]).dictionary_encode(),
}


@pytest.mark.parametrize("name", VALUES)
def test_equal_values_digest_equally_and_others_do_not(name: str) -> None:
    column = VALUES[name]
    digests = [digest_rows(pa.table([column.slice(at, 1)], ["c"])) for at in range(5)]
    assert len({one.hash_sum for one in digests}) == (3 if name == "flags" else 5)
    whole = pa.table([column], ["c"])
    total = digests[0]
    for one in digests[1:]:
        total += one
    assert digest_rows(whole) == total
    mixed = pa.concat_tables([whole.slice(at, 1) for at in (4, 2, 0, 3, 1)])
    assert digest_rows(mixed) == total
    if name != "views":
        assert digest_rows(mixed.combine_chunks()) == total


ROWS = st.lists(st.tuples(st.integers(-3, 3) | st.none(), st.text(max_size=3)), max_size=12)


@given(rows=ROWS, other=ROWS, data=st.data())
def test_the_digest_is_that_of_the_multiset(rows: Any, other: Any, data: st.DataObject) -> None:
    def table(given_rows: Any) -> pa.Table:
        columns = list(zip(*given_rows, strict=True)) or [[], []]
        arrays = [pa.array(columns[0], pa.int64()), pa.array(columns[1], pa.string())]
        return pa.table(arrays, names=["n", "s"])

    same = sorted(map(repr, rows)) == sorted(map(repr, other))
    assert (digest_rows(table(rows)) == digest_rows(table(other))) == same
    cut = data.draw(st.integers(0, len(rows)))
    parts = digest_rows(table(rows[:cut])) + digest_rows(table(rows[cut:]))
    assert parts == digest_rows(table(rows))
