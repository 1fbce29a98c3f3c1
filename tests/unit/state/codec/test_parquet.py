"""Bytes of data files."""

from __future__ import annotations

import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from arroyo_dagster.errors import FormatError
from arroyo_dagster.state.codec.parquet import (
    GLOBAL_KEY_VALUE_SCHEMA,
    decode_file,
    encode_pairs,
    encode_rows,
)


def test_a_file_of_pairs_looks_like_one_of_arroyo() -> None:
    data = encode_pairs([b"b", b"a"], [b"2", b"1"], GLOBAL_KEY_VALUE_SCHEMA, version=3)
    file = pq.ParquetFile(io.BytesIO(data))
    column = file.metadata.row_group(0).column(0)
    assert column.compression == "ZSTD"
    assert column.statistics is None
    assert file.metadata.metadata[b"version"] == b"3"
    assert file.schema.column(0).physical_type == "BYTE_ARRAY"
    assert file.schema.column(0).max_definition_level == 0
    rows, version = decode_file(data, "p")
    assert version == 3
    assert rows.to_pylist() == [{"key": b"a", "value": b"1"}, {"key": b"b", "value": b"2"}]


def test_rows_come_back_exactly_whatever_their_types_and_names() -> None:
    schema = pa.schema(
        [
            pa.field("0", pa.list_(pa.field("item", pa.int64(), nullable=False))),
            pa.field("0", pa.list_(pa.field("item", pa.float64(), nullable=False))),
            pa.field("s", pa.struct([pa.field("x", pa.timestamp("ns"), nullable=False)])),
            pa.field("u", pa.uint64(), nullable=False, metadata={"k": "v"}),
            pa.field("_timestamp", pa.timestamp("ns"), nullable=False),
        ]
    )
    columns = [
        pa.array([[1, 2], None], schema.field(0).type),
        pa.array([[0.5], []], schema.field(1).type),
        pa.array([{"x": 2**62 + 1}, None], schema.field(2).type),
        pa.array([2**64 - 1, 0], pa.uint64()),
        pa.array([1, 2**62 + 3], pa.timestamp("ns")),
    ]
    rows = pa.Table.from_arrays(columns, schema=schema)
    back, version = decode_file(encode_rows(rows), "p")
    assert version == 0
    assert back.equals(rows)
    assert back.schema.equals(schema, check_metadata=True)


def test_files_of_rows_have_statistics_and_say_nothing_but_their_schema() -> None:
    rows = pa.table({"a": pa.array([3, 1], pa.int64())})
    metadata = pq.ParquetFile(io.BytesIO(encode_rows(rows))).metadata
    statistics = metadata.row_group(0).column(0).statistics
    assert (statistics.min, statistics.max) == (1, 3)
    assert set(metadata.metadata) == {b"ARROW:schema"}


def test_a_damaged_page_is_refused_though_it_may_decompress() -> None:
    data = bytearray(encode_rows(pa.table({"a": pa.array(range(100_000), pa.int64())})))
    data[1000:1400] = b"\xff" * 400
    with pytest.raises(FormatError):
        decode_file(bytes(data), "p")
