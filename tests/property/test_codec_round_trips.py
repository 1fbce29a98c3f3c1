"""What is written is read again as it was: operations, schemas, data files."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from arroyo_dagster.state import GLOBAL_KEY_VALUE_SCHEMA
from arroyo_dagster.state.codec import operations as ops
from arroyo_dagster.state.codec.row_groups import DataFile
from tests.formats import (
    decode_file,
    encode_pairs,
    encode_rows,
    read_facts,
    schema_from_json,
    schema_to_json,
)
from tests.unit.state.codec.test_schema import NAMED, WITH_PARTS

U64 = st.integers(min_value=0, max_value=2**64 - 1)

# ---- operations ----------------------------------------------------------------------------------

NANOS = st.integers(0, 2**63 - 1)
KEYS = st.binary(max_size=300)
OPERATIONS = st.one_of(
    st.just(ops.Insert()),
    st.builds(ops.DeleteTimeKey, NANOS, KEYS),
    st.builds(ops.DeleteKey, KEYS),
    st.builds(ops.DeleteValue, KEYS, NANOS, st.integers(0, 2**64 - 1).map(ops.encode_count)),
    st.builds(ops.DeleteTimeRange, KEYS, NANOS, NANOS),
)


@given(operation=OPERATIONS)
def test_an_operation_survives(operation: ops.DataOperation) -> None:
    raw = ops.encode_operation(operation)
    assert ops.decode_operation(raw) == operation
    if isinstance(operation, ops.DeleteValue):
        count = ops.decode_count(operation.value)
        assert count is not None
        assert ops.encode_count(count) == operation.value


# ---- schemas -------------------------------------------------------------------------------------


def fields_of(kinds: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.Field]:
    metadata = st.none() | st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2)
    names = st.sampled_from(["", "a", "item", 'x["1"].y', "é"]) | st.text(max_size=4)

    def field(name: str, kind: pa.DataType, nullable: bool, more: Any) -> pa.Field:
        return pa.field(name, kind, nullable or pa.types.is_null(kind), more)

    return st.builds(field, names, kinds, st.booleans(), metadata)


def nested(kinds: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
    fields = fields_of(kinds)
    keys = st.sampled_from([pa.string(), pa.int64()])
    return st.one_of(
        st.builds(pa.list_, fields),
        st.builds(pa.large_list, fields),
        st.builds(pa.list_, fields, st.integers(0, 4)),
        st.builds(pa.struct, st.lists(fields, max_size=3)),
        st.builds(pa.map_, keys, kinds),
    )


KINDS = st.recursive(st.sampled_from([*NAMED.values(), *WITH_PARTS]), nested, max_leaves=6)


@given(fields=st.lists(fields_of(KINDS), max_size=4))
def test_a_schema_of_any_depth_survives(fields: list[pa.Field]) -> None:
    schema = pa.schema(fields)
    text = schema_to_json(schema)
    again = schema_from_json(text)
    assert again.equals(schema, check_metadata=True)
    assert schema_to_json(again) == text


# ---- data files ----------------------------------------------------------------------------------

STORED = pa.schema(
    [
        pa.field("k", pa.string()),
        pa.field("k", pa.int64(), nullable=False),
        pa.field("in", pa.struct([("at", pa.timestamp("ns")), ("l", pa.list_(pa.uint64()))])),
        pa.field("_key_hash", pa.uint64(), nullable=False),
        pa.field("_operation", pa.binary(), nullable=False),
    ]
)
INSIDE = st.none() | st.fixed_dictionaries(
    {
        "at": st.none() | st.integers(-(2**63), 2**63 - 1),
        "l": st.none() | st.lists(st.none() | U64, max_size=2),
    }
)
ROWS = st.lists(
    st.tuples(
        st.none() | st.text(max_size=3),
        st.integers(-(2**63), 2**63 - 1),
        INSIDE,
        U64,
        st.binary(max_size=3),
    ),
    max_size=6,
)


@settings(max_examples=25)
@given(rows=ROWS, chosen=st.lists(st.integers(0, 4), unique=True, min_size=1))
def test_rows_survive_whole_and_in_pieces(rows: list[Any], chosen: list[int]) -> None:
    columns = [pa.array([row[at] for row in rows], field.type) for at, field in enumerate(STORED)]
    table = pa.Table.from_arrays(columns, schema=STORED)
    raw = encode_rows(table)
    again, version = decode_file(raw, "p")
    assert (again.schema, version) == (STORED, 0)
    assert again.equals(table)
    assert read_facts(raw, "p").rows == len(rows)
    file = DataFile(raw, "p")
    pieces = [
        piece for group in range(len(file.row_groups)) for piece in file.slices(chosen, group, 1024)
    ]
    expected = pa.Table.from_arrays(
        [columns[at] for at in chosen], schema=pa.schema([STORED.field(at) for at in chosen])
    )
    assert pa.concat_tables([expected.slice(0, 0), *pieces]).equals(expected)


@given(
    pairs=st.dictionaries(st.binary(max_size=4), st.binary(max_size=300), max_size=5),
    version=st.integers(0, 2**32 - 1),
)
def test_pairs_survive_in_the_order_of_their_keys(pairs: dict[bytes, bytes], version: int) -> None:
    raw = encode_pairs(pairs, pairs.values(), GLOBAL_KEY_VALUE_SCHEMA, version=version)
    again, found = decode_file(raw, "p")
    assert found == version
    assert again.column("key").to_pylist() == sorted(pairs)
    assert dict(zip(*(column.to_pylist() for column in again.columns), strict=True)) == pairs
