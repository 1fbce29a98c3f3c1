"""Keys encoded by columns are byte for byte those encoded one by one."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from arroyo_dagster.state import DeleteKey
from arroyo_dagster.state.codec.operations import decode_operation, delete_keys_of, encode_key
from tests.formats import encode_operation

_EDGES = [0, 1, 125, 126, 250, 251, 255, 2**15, 2**16 - 1, 2**16, 2**31, 2**32 - 1, 2**32]
VALUES: list[tuple[pa.DataType, list[Any]]] = [
    (pa.int64(), [*_EDGES, *(-edge for edge in _EDGES), 2**63 - 1, -(2**63)]),
    (pa.uint64(), [*_EDGES, 2**64 - 1]),
    (pa.uint32(), _EDGES[:-1]),
    (pa.int16(), [-(2**15), 300, 0]),
    (pa.uint16(), [0, 250, 251, 2**16 - 1]),
    (pa.int8(), [-128, 0, 127]),
    (pa.uint8(), [0, 250, 251, 255]),
    (pa.bool_(), [True, False]),
    (pa.float64(), [0.5, -0.0]),
    (pa.float32(), [1.5]),
    (pa.string(), ["", "a", "é" * 200, "x" * 70_000]),
    (pa.large_string(), ["q"]),
    (pa.binary(), [b"", b"\0"]),
    (pa.large_binary(), [b"1"]),
    (pa.binary(3), [b"abc"]),
    (pa.timestamp("ns"), [0, -5, 10**18]),
    (pa.date32(), [1, -1]),
    (pa.time32("s"), [77]),
    (pa.duration("s"), [-4]),
]


@pytest.mark.parametrize("nullable", [False, True])
@pytest.mark.parametrize(("kind", "values"), VALUES, ids=lambda one: str(one)[:20])
def test_deletes_by_columns_are_those_of_single_keys(
    kind: pa.DataType, values: list[Any], nullable: bool
) -> None:
    fields = [pa.field("a", kind, nullable), pa.field("b", pa.string())]
    whole = pa.array([*values, None] if nullable else values, kind)
    for column in (whole, pa.concat_arrays([whole, whole]).slice(1, len(whole))):
        plain = column
        if pa.types.is_temporal(kind):
            plain = column.cast(pa.int64() if kind.bit_width == 64 else pa.int32())
        found = delete_keys_of(fields, [column, pa.array(["z"] * len(column))])
        expected = [DeleteKey(encode_key(fields, [value, "z"])) for value in plain.to_pylist()]
        assert [decode_operation(one) for one in found.to_pylist()] == expected
        assert found.to_pylist() == [encode_operation(one) for one in expected]
