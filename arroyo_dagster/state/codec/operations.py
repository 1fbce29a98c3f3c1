"""What one stored row does: the bytes of the column `_operation`.

Source: crates/arroyo-types, `DataOperation`: bincode of an enum. Arroyo writes `Insert` only.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from arroyo_dagster.errors import FormatError, InputError
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
    """The row is there from now on."""


@dataclass(frozen=True, slots=True)
class DeleteTimeKey:
    """Earlier rows of this key at this time are gone."""

    timestamp_nanos: SystemTimeNanos
    key: bytes


@dataclass(frozen=True, slots=True)
class DeleteKey:
    """Earlier rows of this key are gone."""

    key: bytes


@dataclass(frozen=True, slots=True)
class DeleteValue:
    """Earlier rows equal to this one in all user columns are gone.

    `value` says how many those are (`encode_count`). Rows that differed may be equal later, when
    the column in which they did has been dropped: then so many of them go, and no more.
    """

    key: bytes
    timestamp_nanos: SystemTimeNanos
    value: bytes


@dataclass(frozen=True, slots=True)
class DeleteTimeRange:
    """Earlier rows of this key with start <= `_timestamp` < end are gone."""

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
    """The bytes of `_operation`; an insert is the single byte 0."""
    return _CODEC.encode(operation)


def decode_operation(data: bytes) -> DataOperation:
    """Raises FormatError when the bytes are no operation, or more than one."""
    decoded = _CODEC.decode(data)
    if not isinstance(decoded, _KINDS):
        raise FormatError("not an operation on a row", operation=data.hex())
    return decoded


def encode_count(rows: int) -> bytes:
    """The `value` of a `DeleteValue`: how many rows it deletes."""
    return _COUNT.encode(rows)


def decode_count(value: bytes) -> int | None:
    """How many rows a `DeleteValue` deletes; None = all that are equal.

    Raises:
        FormatError: the bytes are no number.
    """
    return _COUNT.decode(value) if value else None


def encode_key(columns: list[pa.Field], values: list[object]) -> bytes:
    """The bytes of a storage key: bincode of its columns in order, options where nullable.

    Args:
        columns: the key columns of the table's schema.
        values: one Python value each; times as an int in the unit of the column.

    Raises:
        InputError: a value that is not of its column's type, or a type that cannot be a key.
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
