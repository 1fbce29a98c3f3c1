"""Arguments as the engine stores them: what real checkpoints hold, and an order that bytes keep."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.codec.args_row import encode_argument

LONG = "Dennis Torres DVM"

REAL: list[tuple[Any, pa.DataType, str]] = [
    (162, pa.int64(), "01 80000000000000a2"),
    (0, pa.uint64(), "01 0000000000000000"),
    (True, pa.bool_(), "01 01"),
    (0.5, pa.float64(), "01 bfe0000000000000"),
    ("N169UW", pa.string(), "02 4e31363955570000 06"),
    (LONG, pa.string(), "02 44656e6e69732054 ff 6f72726573204456 ff 4d00000000000000 01"),
    ("", pa.string(), "01"),
    (None, pa.string(), "00"),
    (None, pa.int32(), "00 00000000"),
]
"""From arroyo-state.md 5.7."""


@pytest.mark.parametrize(("value", "kind", "expected"), REAL)
def test_value_is_encoded_as_by_arroyo(value: Any, kind: pa.DataType, expected: str) -> None:
    (found,) = encode_argument(pa.array([value], kind)).to_pylist()
    assert found.hex() == expected.replace(" ", "")


def test_a_time_is_encoded_in_nanoseconds_whatever_its_unit() -> None:
    micros = pa.array([1_795_225_382_000_001], pa.timestamp("us", "UTC"))
    nanos = pa.array([1_795_225_382_000_001_000], pa.timestamp("ns"))
    assert encode_argument(micros) == encode_argument(nanos)
    assert encode_argument(nanos) == encode_argument(nanos.cast(pa.int64()))


KINDS: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.int8(): st.integers(-(2**7), 2**7 - 1),
    pa.int32(): st.integers(-(2**31), 2**31 - 1),
    pa.uint16(): st.integers(0, 2**16 - 1),
    pa.uint64(): st.integers(0, 2**64 - 1),
    pa.float32(): st.floats(width=32, allow_nan=False).filter(bool),
    pa.float64(): st.floats(allow_nan=False).filter(bool),
    pa.date32(): st.dates(),
    pa.binary(): st.binary(max_size=90),
    pa.string(): st.text(max_size=90),
    pa.bool_(): st.booleans(),
}


@given(data=st.data(), kind=st.sampled_from(list(KINDS)))
def test_bytes_order_as_values_do_null_first(data: st.DataObject, kind: pa.DataType) -> None:
    values = data.draw(st.lists(st.none() | KINDS[kind], max_size=6))
    array = pa.array(values, kind)
    found = encode_argument(array).to_pylist()
    order = [
        one for _, one in sorted(zip(found, array.to_pylist(), strict=True), key=lambda p: p[0])
    ]
    key = str.encode if kind == pa.string() else lambda one: one
    known = sorted((one for one in array.to_pylist() if one is not None), key=key)
    assert order == [None] * array.null_count + known
    assert len(set(found)) == len(set(array.to_pylist()))


def test_a_type_that_nobody_has_seen_is_refused() -> None:
    with pytest.raises(InputError, match=r"arguments of the type list<item: int64>"):
        encode_argument(pa.array([[1]]))
