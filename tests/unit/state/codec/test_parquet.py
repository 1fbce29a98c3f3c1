"""Bytes of data files."""

from __future__ import annotations

import io

import pyarrow.parquet as pq

from arroyo_dagster.state import GLOBAL_KEY_VALUE_SCHEMA
from tests.formats import decode_file, encode_pairs


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
