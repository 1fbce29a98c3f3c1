"""The effect of a stored row: the bytes of the column `_operation`.

Source: crates/arroyo-types, `DataOperation`: bincode of an enum. Arroyo writes `Insert` only.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.errors import FormatError, InputError
from arroyo_dagster.state.codec.bincode.arrow_buffers import words_of
from arroyo_dagster.state.codec.bincode.codec import Codec, codec_for
from arroyo_dagster.state.model.types import (
    BOOL,
    BYTES,
    STRING,
    EnumOf,
    OptionOf,
    Primitive,
    SystemTimeNanos,
    TupleOf,
    Type,
    Variant,
    describe,
)

INSERT = b"\x00"


@dataclass(frozen=True, slots=True)
class Insert:
    """Insert the row."""


@dataclass(frozen=True, slots=True)
class DeleteTimeKey:
    """Delete earlier rows of this key at this time."""

    timestamp_nanos: SystemTimeNanos
    key: bytes


@dataclass(frozen=True, slots=True)
class DeleteKey:
    """Delete earlier rows of this key."""

    key: bytes


@dataclass(frozen=True, slots=True)
class DeleteValue:
    """Delete earlier rows equal to this one in all user columns.

    `value` is their number (`encode_count`). Rows that differed may become equal when the column
    in which they differ is dropped: then only this number of them is deleted.
    """

    key: bytes
    timestamp_nanos: SystemTimeNanos
    value: bytes


@dataclass(frozen=True, slots=True)
class DeleteTimeRange:
    """Delete earlier rows of this key with start <= `_timestamp` < end."""

    key: bytes
    start_nanos: SystemTimeNanos
    end_nanos: SystemTimeNanos


DataOperation = Insert | DeleteTimeKey | DeleteKey | DeleteValue | DeleteTimeRange

_COUNT: Codec[int] = codec_for(Primitive("u64"))
_KINDS = (Insert, DeleteTimeKey, DeleteKey, DeleteValue, DeleteTimeRange)
_CODEC = codec_for(
    EnumOf("DataOperation", tuple(Variant(kind.__name__, describe(kind)) for kind in _KINDS))
)


def encode_operation(operation: DataOperation) -> bytes:
    """Return the bytes of `_operation`; an insert is the single byte 0."""
    return _CODEC.encode(operation)


def decode_operation(data: bytes) -> DataOperation:
    """Decode `_operation`. Raises FormatError: the bytes are not exactly one operation."""
    decoded = _CODEC.decode(data)
    if not isinstance(decoded, _KINDS):
        raise FormatError("not an operation on a row", operation=data.hex())
    return decoded


class OperationKind(enum.IntEnum):
    """The first byte of an operation: its variant."""

    INSERT = 0
    DELETE_TIME_KEY = 1
    DELETE_KEY = 2
    DELETE_VALUE = 3
    DELETE_TIME_RANGE = 4


def operation_names(operations: pa.ChunkedArray) -> pa.Array:
    """Return the name of each operation, such as `insert` and `delete_key`.

    Raises:
        FormatError: as `operation_kinds`.
    """
    names = pa.array([kind.name.lower() for kind in OperationKind])
    return names.take(pa.array(operation_kinds(operations)))


def operation_kinds(operations: pa.ChunkedArray) -> npt.NDArray[np.uint8]:
    """Return the `OperationKind` of each row, without decoding the rest of its operation.

    Raises:
        FormatError: an operation is of no kind.
    """
    kinds = [np.zeros(0, np.uint8)]
    for chunk in operations.chunks:
        if pa.types.is_dictionary(chunk.type):
            by_code = _kinds(chunk.dictionary)
            kinds.append(by_code[chunk.indices.to_numpy()])
        else:
            kinds.append(_kinds(chunk))
    return np.concatenate(kinds)


def _kinds(operations: pa.Array) -> npt.NDArray[np.uint8]:
    plain = operations.cast(pa.large_binary())
    _, offsets, data = plain.buffers()
    bounds = np.frombuffer(offsets, np.int64, len(plain) + 1, plain.offset * 8)
    starts, empty = bounds[:-1], bounds[:-1] == bounds[1:]
    if plain.null_count or empty.any():
        raise FormatError("a row has no operation")
    raw = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    kinds: npt.NDArray[np.uint8] = raw[starts]
    if (kinds > max(OperationKind)).any():
        raise FormatError("not an operation on a row", operation=int(kinds.max()))
    return kinds


def delete_keys_of(fields: Sequence[pa.Field], columns: Sequence[Any]) -> pa.BinaryArray:
    """Return the operation `DeleteKey` of each row, as `encode_operation` and `encode_key` do.

    Args:
        fields: the key columns of the table's schema.
        columns: their values, as Arrow arrays of equal length.

    Raises:
        InputError: a type cannot be a key.
    """
    for field in fields:
        _type_of(field)
    keys = encode_key_columns(fields, columns)
    kind = bytes([OperationKind.DELETE_KEY])
    return pc.binary_join_element_wise(kind, with_length(keys), b"")


def encode_count(rows: int) -> bytes:
    """Return the `value` of a `DeleteValue`: the number of rows it deletes."""
    return _COUNT.encode(rows)


def decode_count(value: bytes) -> int | None:
    """Return how many rows a `DeleteValue` deletes; None = all that are equal.

    Raises:
        FormatError: the bytes are no number.
    """
    return _COUNT.decode(value) if value else None


def encode_key(columns: list[pa.Field], values: list[object]) -> bytes:
    """Return the bytes of a storage key: bincode of its columns in order, options where nullable.

    Args:
        columns: the key columns of the table's schema.
        values: one Python value each; times as an int in the unit of the column.

    Raises:
        InputError: a value is not of its column's type, or a type cannot be a key.
    """
    return codec_for(TupleOf(tuple(_type_of(column) for column in columns))).encode(tuple(values))


def _type_of(column: pa.Field) -> Type:
    kind, types = column.type, pa.types
    described: Type
    if types.is_boolean(kind):
        described = BOOL
    elif types.is_integer(kind):
        described = Primitive(f"{'u' if types.is_unsigned_integer(kind) else 'i'}{kind.bit_width}")
    elif types.is_floating(kind) and kind.bit_width > 16:
        described = Primitive(f"f{kind.bit_width}")
    elif types.is_string(kind) or types.is_large_string(kind):
        described = STRING
    elif types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        described = BYTES
    elif types.is_temporal(kind) and kind.bit_width in (32, 64):
        described = Primitive(f"i{kind.bit_width}")
    else:
        raise InputError(
            f"a column of type {kind} cannot be part of a key that is deleted by",
            column=column.name,
            next_step="key the table by numbers, texts, bytes, truth values or times",
        )
    return OptionOf(described) if column.nullable else described


# ---- key columns ---------------------------------------------------------------------------------
# Encoding of storage keys by columns: the bytes of `codec.operations.encode_key` for many rows.
#
# Source: bincode 2, `config::standard()`: little-endian, variable-length integers.

Column: TypeAlias = "pa.Array | pa.ChunkedArray"
_NOTHING = b""
_SINGLE_BYTES = 250
"""The largest number that is one byte; a marker precedes longer ones."""
_MARKED = ((251, 2, 0xFFFF), (252, 4, 0xFFFFFFFF), (253, 8, 0xFFFFFFFFFFFFFFFF))


def encode_key_columns(fields: Sequence[pa.Field], columns: Sequence[Column]) -> pa.BinaryArray:
    """Return the bytes of each row's key: its columns in order, options where nullable.

    Args:
        fields: of the columns; types that can be keys.
        columns: at least one, of equal length.
    """
    encoded = [
        _encode_column(field, _whole(column)) for field, column in zip(fields, columns, strict=True)
    ]
    if len(encoded) == 1:
        return encoded[0]
    return pc.binary_join_element_wise(*encoded, _NOTHING)


def with_length(values: pa.BinaryArray) -> pa.BinaryArray:
    """Return each value preceded by its length, as bincode writes bytes and texts."""
    lengths = pc.binary_length(values).to_numpy(zero_copy_only=False).astype(np.uint64)
    return pc.binary_join_element_wise(_varints(lengths), values, _NOTHING)


def _whole(column: Column) -> pa.Array:
    if isinstance(column, pa.ChunkedArray):
        return pa.concat_arrays([pa.array([], column.type), *column.chunks])
    return column


def _encode_column(field: pa.Field, values: pa.Array) -> pa.BinaryArray:
    if not field.nullable:
        return _encode_values(values)
    if not values.null_count:
        return pc.binary_join_element_wise(b"\1", _encode_values(values), _NOTHING)
    present = values.drop_null()
    some = pc.binary_join_element_wise(b"\1", _encode_values(present), _NOTHING)
    return pc.replace_with_mask(
        pa.array([b"\0"] * len(values), pa.binary()), values.is_valid(), some
    )


def _encode_values(values: pa.Array) -> pa.BinaryArray:
    kind, types = values.type, pa.types
    if types.is_boolean(kind):
        return _raw(values.cast(pa.uint8()), 1)
    if types.is_floating(kind) or (types.is_integer(kind) and kind.bit_width == 8):
        return _raw(values, kind.bit_width // 8)
    if types.is_unsigned_integer(kind):
        return _varints(_words(values, "u").astype(np.uint64))
    if types.is_integer(kind) or types.is_temporal(kind):
        return _varints(_zigzag(_words(values, "i").astype(np.int64)))
    return with_length(_binary(values))


def _binary(values: pa.Array) -> pa.BinaryArray:
    if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        values = values.cast(pa.large_binary())
    return values.cast(pa.binary())


def _words(values: pa.Array, sign: str) -> npt.NDArray[Any]:
    word = f"<{sign}{values.type.bit_width // 8}"
    return words_of(values.buffers()[1], word, values.offset, len(values))


def _raw(values: pa.Array, width: int) -> pa.BinaryArray:
    """Return the bytes of fixed-width values, little-endian."""
    raw = words_of(values.buffers()[1], f"<u{width}", values.offset, len(values))
    return _cut(np.ascontiguousarray(raw).view(np.uint8), np.full(len(values), width, np.int64))


def _zigzag(values: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    return ((values << 1) ^ (values >> 63)).view(np.uint64)


def _varints(values: npt.NDArray[np.uint64]) -> pa.BinaryArray:
    """Return each number as a variable-length integer."""
    cells = np.zeros((len(values), 9), np.uint8)
    lengths = np.ones(len(values), np.int64)
    cells[:, 0] = np.minimum(values, np.uint64(_SINGLE_BYTES))
    above = _SINGLE_BYTES
    for marker, width, most in _MARKED:
        rows = np.flatnonzero((values > np.uint64(above)) & (values <= np.uint64(most)))
        cells[rows, 0] = marker
        lengths[rows] = 1 + width
        raw = values[rows].astype("<u8").view(np.uint8).reshape(-1, 8)
        cells[rows, 1 : 1 + width] = raw[:, :width]
        above = most
    used = np.arange(9) < lengths[:, None]
    return _cut(cells[used], lengths)


def _cut(data: npt.NDArray[np.uint8], lengths: npt.NDArray[np.int64]) -> pa.BinaryArray:
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.Array.from_buffers(
        pa.binary(), len(lengths), [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    )
