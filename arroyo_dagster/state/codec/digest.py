"""A digest of a multiset of rows: the same rows in any order and any files give the same.

For telling whether a rewrite lost, changed or doubled a row; not against an adversary.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arroyo_dagster.state.model.compaction import RowsDigest

_Hashes = npt.NDArray[np.uint64]
_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_BASE = np.uint64(0xD6E8FEB86659FD93)
_NULL = np.uint64(0xA0761D6478BD642F)
_SLICE_ROWS = 1 << 17
_SLICE_BYTES = 1 << 23
_LONG = 1 << 16


def digest_rows(table: pa.Table) -> RowsDigest:
    """Digest rows: columns by position (names may repeat), values bit by bit, nulls apart.

    Nested values, dictionaries and every width count; a NaN equals a NaN of the same bits.
    """
    total = RowsDigest(table.num_rows if table.num_columns == 0 else 0)
    for batch in table.to_batches(max_chunksize=_SLICE_ROWS):
        hashes = np.zeros(batch.num_rows, np.uint64)
        for column in batch.columns:
            hashes = _mixed(hashes * _STEP + _hashed(column))
        total += RowsDigest(batch.num_rows, int(hashes.sum(dtype=np.uint64)))
    return total


def _mixed(values: _Hashes) -> _Hashes:
    """Spread every bit over all others (the finaliser of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * _FIRST
    values = (values ^ (values >> np.uint64(27))) * _SECOND
    return values ^ (values >> np.uint64(31))


def _hashed(array: pa.Array) -> _Hashes:
    """One hash a value; nulls have one of their own."""
    hashes = _of_values(array)
    if array.null_count:
        valid = array.is_valid().to_numpy(zero_copy_only=False)
        hashes = np.where(valid, hashes, _NULL)
    return hashes


def _of_values(array: pa.Array) -> _Hashes:
    kind = array.type
    if isinstance(array, pa.ExtensionArray):
        return _hashed(array.storage)
    if pa.types.is_dictionary(kind):
        if not len(array.dictionary):
            return np.zeros(len(array), np.uint64)
        indices = array.indices.fill_null(0).to_numpy(zero_copy_only=False)
        of_dictionary: _Hashes = _hashed(array.dictionary)[indices]
        return of_dictionary
    if pa.types.is_null(kind):
        return np.full(len(array), _NULL)
    if pa.types.is_struct(kind):
        hashes = np.full(len(array), np.uint64(kind.num_fields))
        for index in range(kind.num_fields):
            hashes = _mixed(hashes * _STEP + _hashed(array.field(index)))
        return hashes
    if pa.types.is_fixed_size_list(kind):
        return _of_values(array.cast(pa.list_(kind.value_type)))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_map(kind):
        return _of_lists(array)
    if pa.types.is_boolean(kind):
        return _mixed(array.fill_null(False).to_numpy(zero_copy_only=False).astype(np.uint64))
    if _is_text(kind):
        return _of_bytes(array)
    return _of_fixed_width(array)


def _is_text(kind: pa.DataType) -> bool:
    return any(
        of_kind(kind)
        for of_kind in (
            pa.types.is_string,
            pa.types.is_large_string,
            pa.types.is_binary,
            pa.types.is_large_binary,
            pa.types.is_string_view,
            pa.types.is_binary_view,
        )
    )


def _of_fixed_width(array: pa.Array) -> _Hashes:
    """Numbers, times, decimals and fixed-size binary, by their bytes."""
    width = array.type.bit_width // 8
    data = array.buffers()[1]
    if data is None or not len(array):
        return np.zeros(len(array), np.uint64)
    raw = np.frombuffer(data, np.uint8, len(array) * width, array.offset * width)
    words = -(-width // 8)
    padded = np.zeros((len(array), words * 8), np.uint8)
    padded[:, :width] = raw.reshape(len(array), width)
    parts = padded.view(np.uint64)
    hashes = np.full(len(array), np.uint64(width))
    for index in range(words):
        hashes = _mixed(hashes * _STEP + parts[:, index])
    return hashes


def _of_bytes(array: pa.Array) -> _Hashes:
    large = array.cast(pa.large_binary())
    offsets = np.frombuffer(large.buffers()[1], np.int64, len(large) + 1, large.offset * 8)
    data = large.buffers()[2]
    raw = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    hashes = np.empty(len(large), np.uint64)
    for start, end in _slices(offsets):
        hashes[start:end] = _of_slice(raw, offsets[start : end + 1])
    return hashes


def _slices(offsets: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Rows in slices of a few million bytes, since the arithmetic takes eight bytes for each; a
    long value comes alone."""
    long = np.flatnonzero(np.diff(offsets) > _LONG)
    edges = np.unique(np.concatenate([[0], long, long + 1, [len(offsets) - 1]]))
    for first, last in itertools.pairwise(edges.tolist()):
        start = first
        while start < last:
            end = int(np.searchsorted(offsets, offsets[start] + _SLICE_BYTES, side="right")) - 1
            end = min(last, max(start + 1, end))
            yield start, end
            start = end


def _of_slice(raw: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]) -> _Hashes:
    lengths = np.diff(offsets)
    longest = int(lengths.max(initial=0))
    if longest > _LONG:
        return np.array([_of_long(raw[offsets[0] : offsets[1]])])
    data = raw[offsets[0] : offsets[-1]].astype(np.uint64)
    places = np.arange(len(data)) - np.repeat(offsets[:-1] - offsets[0], lengths)
    powers = np.multiply.accumulate(np.full(longest + 1, _BASE))
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum((data + _STEP) * powers[places])])
    local = offsets - offsets[0]
    return _mixed((sums[local[1:]] - sums[local[:-1]]) ^ (lengths.astype(np.uint64) * _STEP))


def _of_long(value: npt.NDArray[np.uint8]) -> np.uint64:
    digest = hashlib.blake2b(value.tobytes(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


def _of_lists(array: Any) -> _Hashes:
    """A list is its length and its elements in order; a map is a list of pairs."""
    offsets = array.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    lengths = np.where(valid, np.diff(offsets), 0)  # a null may still span elements
    places = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    inner = _hashed(array.values)[np.repeat(offsets[:-1], lengths) + places]
    powers = np.multiply.accumulate(np.full(int(lengths.max(initial=0)) + 1, _BASE))
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(_mixed(inner) * powers[places])])
    ends = np.cumsum(lengths)
    return _mixed((sums[ends] - sums[ends - lengths]) ^ (lengths.astype(np.uint64) * _STEP))
