"""The effect of a stored row: the bytes of the column `_operation`.

Source: crates/arroyo-types, `DataOperation`: bincode of an enum. Arroyo writes `Insert` only.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.errors import FormatError, InputError
from arroyo_dagster.state.codec.bincode.codec import Codec, codec_for
from arroyo_dagster.state.codec.bincode.key_columns import encode_key_columns, with_length
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
