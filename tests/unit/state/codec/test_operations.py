"""Operations on rows."""

from __future__ import annotations

import pyarrow as pa
import pytest

from arroyo_dagster.errors import FormatError, InputError
from arroyo_dagster.state.codec.operations import (
    INSERT,
    DataOperation,
    DeleteKey,
    DeleteTimeKey,
    DeleteTimeRange,
    DeleteValue,
    Insert,
    decode_operation,
    encode_key,
    encode_operation,
)


@pytest.mark.parametrize(
    ("operation", "first"),
    [
        (Insert(), 0),
        (DeleteTimeKey(1_500_000_000_000_000_001, b"k"), 1),
        (DeleteKey(b""), 2),
        (DeleteValue(b"key", 7, b"value"), 3),
        (DeleteTimeRange(b"key", 0, 2**62), 4),
    ],
)
def test_an_operation_comes_back_and_begins_with_its_place_in_the_enum(
    operation: DataOperation, first: int
) -> None:
    data = encode_operation(operation)
    assert data[0] == first
    assert decode_operation(data) == operation


def test_an_insert_is_the_single_byte_that_arroyo_writes() -> None:
    assert encode_operation(Insert()) == INSERT == b"\x00"


def test_a_delete_of_a_key_has_the_bytes_of_its_parts() -> None:
    assert encode_operation(DeleteKey(b"ab")) == b"\x02\x02ab"


@pytest.mark.parametrize("data", [b"", b"\x05", b"\x02", b"\x02\x05ab"])
def test_bytes_that_are_no_operation_are_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        decode_operation(data)


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


def test_a_key_of_the_wrong_type_is_refused() -> None:
    with pytest.raises(InputError):
        encode_key([pa.field("a", pa.int64(), nullable=False)], ["text"])
    with pytest.raises(InputError, match="cannot be part of a key"):
        encode_key([pa.field("a", pa.decimal128(5, 2))], [None])
