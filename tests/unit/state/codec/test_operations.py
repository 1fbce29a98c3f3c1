"""Operations on rows."""

from __future__ import annotations

import pyarrow as pa

from arroyo_dagster.state import DeleteKey, Insert
from arroyo_dagster.state.codec.operations import encode_key
from tests.formats import INSERT, encode_operation


def test_an_insert_is_the_single_byte_that_arroyo_writes() -> None:
    assert encode_operation(Insert()) == INSERT == b"\x00"


def test_a_delete_of_a_key_has_the_bytes_of_its_parts() -> None:
    assert encode_operation(DeleteKey(b"ab")) == b"\x02\x02ab"


def test_a_key_is_the_bincode_of_its_columns_with_options_where_they_may_be_null() -> None:
    columns = [
        pa.field("a", pa.string(), nullable=False),
        pa.field("b", pa.int64()),
        pa.field("c", pa.timestamp("us"), nullable=False),
        pa.field("d", pa.bool_(), nullable=False),
        pa.field("e", pa.uint8(), nullable=False),
    ]
    assert encode_key(columns, ["hi", None, 1, True, 9]) == b"\x02hi\x00\x02\x01\x09"
    assert encode_key(columns, ["hi", -1, 1, False, 9]) == b"\x02hi\x01\x01\x02\x00\x09"
    assert encode_key([], []) == b""
