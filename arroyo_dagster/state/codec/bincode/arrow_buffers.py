"""The buffers of an Arrow array as numpy arrays, without a copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa


def words_of(buffer: pa.Buffer | None, word: str, offset: int, count: int) -> npt.NDArray[Any]:
    """Read `count` words of the numpy type `word`, beginning with the word at index `offset`."""
    kind = np.dtype(word)
    # Arrow omits buffers that no row needs.
    if buffer is None or buffer.size == 0:
        return np.zeros(count, dtype=kind)
    return np.frombuffer(buffer, dtype=kind, count=count, offset=offset * kind.itemsize)


def bits_of(buffer: pa.Buffer | None, offset: int, count: int) -> npt.NDArray[np.uint8]:
    """Read `count` bits, each as a byte of 0 or 1, beginning with the bit at index `offset`."""
    start = offset // 8
    raw = words_of(buffer, "<u1", start, (offset + count + 7) // 8 - start)
    return np.unpackbits(raw, bitorder="little")[offset % 8 : offset % 8 + count]


def valid_rows(array: pa.Array) -> npt.NDArray[np.bool_] | None:
    """Return which rows are not null; None if no row is null."""
    if array.null_count == 0:
        return None
    if pa.types.is_dictionary(array.type):
        array = array.indices
    return bits_of(array.buffers()[0], array.offset, len(array)).view(np.bool_)
