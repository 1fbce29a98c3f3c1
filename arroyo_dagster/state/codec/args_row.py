"""`args_row` of table `b` of an updating aggregate: arguments of a call, in Arrow's row format.

Source: docs/spec/arroyo-state.md 5.7. Ascending, NULL first.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.errors import InputError

_SMALL, _LARGE, _SMALL_BLOCKS = 8, 32, 4
_NULL, _VALID, _EMPTY, _NON_EMPTY, _MORE = b"\0", b"\1", b"\1", b"\2", b"\xff"


def encode_argument(values: pa.Array) -> pa.BinaryArray:
    """Return the row of each value, as the engine stores a call with one argument.

    Args:
        values: booleans, numbers, dates, timestamps, strings or bytes.

    Raises:
        InputError: values of another type.
    """
    kind = values.type
    if pa.types.is_dictionary(kind):
        return encode_argument(values.dictionary_decode())
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return _blocks(values.cast(pa.large_binary()))
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return _blocks(values)
    return pa.array(_fixed(values), pa.binary())


def _fixed(values: pa.Array) -> list[bytes]:
    kind = values.type
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind) or pa.types.is_time(kind):
        if pa.types.is_timestamp(kind):
            values = values.cast(pa.timestamp("ns"))  # as every time of Arroyo's
        values = values.cast(pa.int32() if kind.bit_width == 32 else pa.int64())
    elif pa.types.is_boolean(kind):
        values = values.cast(pa.uint8())
    elif not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise InputError(
            f"arguments of the type {kind} are not encoded",
            next_step="leave table `b` out: it starts empty",
        )
    valid = values.is_valid().to_numpy(zero_copy_only=False)
    numbers = pc.fill_null(values, pa.scalar(0, values.type)).to_numpy(zero_copy_only=False)
    width = numbers.dtype.itemsize
    bits = numbers.view(f"u{width}")
    sign = bits.dtype.type(1 << (8 * width - 1))
    if numbers.dtype.kind == "i":
        bits = bits ^ sign
    elif numbers.dtype.kind == "f":
        bits = np.where(bits & sign, ~bits, bits | sign)
    data = bits.astype(f">u{width}").tobytes()
    null = _NULL + bytes(width)
    return [
        _VALID + data[i * width : (i + 1) * width] if is_valid else null
        for i, is_valid in enumerate(valid.tolist())
    ]


def _blocks(values: pa.Array) -> pa.BinaryArray:
    """Return the rows of values of any length: blocks, each followed by how much of it counts."""
    return pa.array(
        [_NULL if value is None else _row(value) for value in values.to_pylist()], pa.binary()
    )


def _row(value: bytes) -> bytes:
    if not value:
        return _EMPTY
    blocks = [_NON_EMPTY]
    start = 0
    while start < len(value):
        size = _SMALL if start < _SMALL * _SMALL_BLOCKS else _LARGE
        block = value[start : start + size]
        start += size
        blocks += [block.ljust(size, b"\0"), _MORE if start < len(value) else bytes([len(block)])]
    return b"".join(blocks)
