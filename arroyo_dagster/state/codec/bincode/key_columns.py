"""Encoding of storage keys by columns: the bytes of `codec.operations.encode_key` for many rows.

Source: bincode 2, `config::standard()`: little-endian, variable-length integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.state.codec.bincode.arrow_buffers import words_of

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
