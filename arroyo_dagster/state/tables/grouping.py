"""Grouping of rows by equal values in some columns: vectorised, and exact."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Codes = npt.NDArray[np.int64]
_BITS = {16: pa.int16(), 32: pa.int32(), 64: pa.int64()}


def group_codes(columns: Sequence[pa.ChunkedArray | pa.Array], rows: int) -> Codes:
    """Number the rows so that two have the same number iff they are equal in all `columns`.

    Values are compared bit by bit, as in the row format by which Arroyo compares keys: a null
    equals a null, a NaN equals one with the same bits, and 0.0 is not -0.0. Nested values are
    compared as a whole.

    Args:
        rows: their number; without columns all rows are equal.
    """
    if len(columns) == 1:
        return _codes(_one_chunk(columns[0]))
    return _folded([_codes(_one_chunk(column)) for column in columns], rows)


def _one_chunk(column: pa.ChunkedArray | pa.Array) -> Any:
    if isinstance(column, pa.ChunkedArray):
        return pa.concat_arrays(column.chunks) if column.num_chunks else column.combine_chunks()
    return column


def _combined(first: Codes, second: Codes) -> Codes:
    """Assign one small number to each pair of numbers."""
    if not len(first):
        return first
    return _codes(pa.array(first * (int(second.max()) + 1) + second))


def _codes(array: Any) -> Codes:
    kind, types = array.type, pa.types
    if isinstance(array, pa.ExtensionArray):
        return _codes(array.storage)
    if types.is_null(kind):
        return np.zeros(len(array), np.int64)
    if types.is_dictionary(kind):
        return _codes(array.cast(kind.value_type))
    if types.is_floating(kind):
        return _codes(array.view(_BITS[kind.bit_width]))
    if types.is_struct(kind):
        parts = [_valid(array), *(_codes(array.field(i)) for i in range(kind.num_fields))]
        return _masked(_folded(parts, len(array)), array)
    if types.is_fixed_size_list(kind):
        return _codes(array.cast(pa.list_(kind.value_type)))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind):
        return _masked(_list_codes(array), array)
    encoded = array.dictionary_encode(null_encoding="encode")
    codes: Codes = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    return codes


def _valid(array: Any) -> Codes:
    return array.is_valid().to_numpy(zero_copy_only=False).astype(np.int64)  # type: ignore[no-any-return]


def _folded(parts: Sequence[Codes], rows: int) -> Codes:
    codes = np.zeros(rows, np.int64)
    for part in parts:
        codes = _combined(codes, part)
    return codes


def _masked(codes: Codes, array: Any) -> Codes:
    # The values below a null are arbitrary.
    return np.where(_valid(array) == 1, codes + 1, 0)


def _list_codes(array: Any) -> Codes:
    """Number lists by the numbers of their elements, in order."""
    elements = _codes(array.values)
    offsets = array.offsets.to_numpy(zero_copy_only=False)
    code_of: dict[bytes, int] = {}
    return np.fromiter(
        (
            code_of.setdefault(elements[start:end].tobytes(), len(code_of))
            for start, end in itertools.pairwise(offsets)
        ),
        np.int64,
        len(array),
    )
