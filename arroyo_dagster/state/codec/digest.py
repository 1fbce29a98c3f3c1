"""A digest of a multiset of rows, independent of their order and their distribution over files.

It shows whether a rewrite lost, changed or duplicated a row. It does not resist an adversary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.state.model.compaction import RowsDigest

_Hashes = npt.NDArray[np.uint64]
_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_BASE = np.uint64(0xD6E8FEB86659FD93)
_NULL = np.uint64(0xA0761D6478BD642F)
_SHIFTS = (np.uint64(32), np.uint64(29))
_MIXING = (np.uint64(30), np.uint64(27), np.uint64(31))
_BLOCK_ROWS = 1 << 13
"""Rows hashed at a time, so that their hashes stay in the cache of a core."""
_LONG = 512
"""Values with more bytes than this are hashed one by one."""
_WORD = 8
_MASKS = np.array([2 ** (8 * count) - 1 for count in range(_WORD + 1)], np.uint64)


def digest_rows(table: pa.Table) -> RowsDigest:
    """Digest rows: columns by position (names may repeat), values bit by bit, nulls as themselves.

    Nested values, dictionaries and every width are supported; NaNs are equal if their bits are.
    """
    if not table.num_columns:
        return RowsDigest(table.num_rows, 0)
    total = 0
    for batch in table.to_batches():
        # All blocks of a batch share a dictionary, so it is hashed only once.
        shared = {
            column_index: _hashed(column)
            for column_index, column in enumerate(batch.columns)
            if pa.types.is_dictionary(column.type)
        }
        for start in range(0, batch.num_rows, _BLOCK_ROWS):
            block = batch.slice(start, _BLOCK_ROWS)
            hashes = np.zeros(block.num_rows, np.uint64)
            for column_index, column in enumerate(block.columns):
                hashes *= _STEP
                hashed = shared.get(column_index)
                hashes += _hashed(column) if hashed is None else hashed[start : start + len(column)]
            total += int(_mixed(hashes).sum(dtype=np.uint64))
    return RowsDigest(table.num_rows, total % 2**64)


def value_codes(values: pa.Array, rows: npt.NDArray[np.int64] | None = None) -> _Hashes:
    """Hash every value, or those in some rows. Equal values have equal hashes; different values
    almost never do."""
    if rows is not None and is_text(values.type) and not values.null_count:
        return _mixed(_of_bytes(values, rows))
    blocks = [
        _mixed(_hashed(values.slice(start, _BLOCK_ROWS)))
        for start in range(0, len(values), _BLOCK_ROWS)
    ]
    codes = np.concatenate([np.zeros(0, np.uint64), *blocks])
    return codes if rows is None else codes[rows]


def combined_codes(columns: Sequence[_Hashes]) -> _Hashes:
    """Hash every row from the hashes of its values; a column of one row applies to all rows."""
    hashes = columns[0].copy()
    for codes in columns[1:]:
        hashes *= _STEP
        hashes += codes
    return _mixed(hashes)


def _mixed(values: _Hashes) -> _Hashes:
    """Mix every bit into all others (the finaliser of splitmix64), in place."""
    shifted = values >> _MIXING[0]
    values ^= shifted
    values *= _FIRST
    np.right_shift(values, _MIXING[1], out=shifted)
    values ^= shifted
    values *= _SECOND
    np.right_shift(values, _MIXING[2], out=shifted)
    values ^= shifted
    return values


def _spread(values: _Hashes) -> _Hashes:
    """Mix half as thoroughly as `_mixed`, into a new array: for values that are mixed again."""
    spread = values >> _SHIFTS[0]
    spread ^= values
    spread *= _FIRST
    spread ^= spread >> _SHIFTS[1]
    return spread


def _hashed(array: pa.Array) -> _Hashes:
    """Return one hash per value; all nulls have the same hash."""
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
    if is_list(kind):
        # Hash a list by its length and its elements in order; a map is a list of pairs.
        lengths, values = list_elements(array)
        ends = np.cumsum(lengths)
        places = np.arange(int(lengths.sum())) - np.repeat(ends - lengths, lengths)
        inner = _hashed(values)
        powers = np.multiply.accumulate(np.full(int(lengths.max(initial=0)) + 1, _BASE))
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(_mixed(inner) * powers[places])])
        return _mixed((sums[ends] - sums[ends - lengths]) ^ (lengths.astype(np.uint64) * _STEP))
    if pa.types.is_boolean(kind):
        return _spread(array.fill_null(False).to_numpy(zero_copy_only=False).astype(np.uint64))
    if is_text(kind):
        return _of_bytes(array)
    # Hash numbers, times, decimals and fixed-size binary by their bytes.
    width = array.type.bit_width // 8
    data = array.buffers()[1]
    if data is None or not len(array):
        return np.zeros(len(array), np.uint64)
    if width in (1, 2, 4, 8):
        of_width = np.dtype(f"<u{width}")
        numbers = np.frombuffer(data, of_width, len(array), array.offset * width)
        return _spread(numbers.astype(np.uint64, copy=False))
    raw = np.frombuffer(data, np.uint8, len(array) * width, array.offset * width)
    words = -(-width // _WORD)
    padded = np.zeros((len(array), words * _WORD), np.uint8)
    padded[:, :width] = raw.reshape(len(array), width)
    parts = padded.view(np.uint64)
    hashes = np.full(len(array), np.uint64(width))
    for index in range(words):
        hashes *= _STEP
        hashes += _spread(parts[:, index])
    return _spread(hashes)


def is_list(kind: pa.DataType) -> bool:
    """Whether values are lists of any form, or maps."""
    return any(
        of_kind(kind)
        for of_kind in (
            pa.types.is_list,
            pa.types.is_large_list,
            pa.types.is_fixed_size_list,
            pa.types.is_list_view,
            pa.types.is_large_list_view,
            pa.types.is_map,
        )
    )


def list_elements(array: Any) -> tuple[npt.NDArray[np.int64], pa.Array]:
    """Return the length of each list, 0 for nulls, and the elements of all lists."""
    kind = array.type
    if pa.types.is_map(kind):
        array = array.cast(pa.list_(pa.struct([kind.key_field, kind.item_field])))
    lengths = pc.list_value_length(array).fill_null(0).to_numpy().astype(np.int64)
    return lengths, array.flatten()  # without the elements that a null may span


def is_text(kind: pa.DataType) -> bool:
    """Whether values are text or bytes of any length."""
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


def _of_bytes(array: pa.Array, rows: npt.NDArray[np.int64] | None = None) -> _Hashes:
    if not (len(array) if rows is None else len(rows)):
        return np.zeros(0, np.uint64)
    raw, offsets = _bytes_of(array)
    starts, lengths = offsets[:-1], np.diff(offsets)
    if rows is not None:
        starts, lengths = starts[rows], lengths[rows]
    else:
        width = int(lengths[0])
        if width <= _LONG and (lengths == width).all():
            return _of_one_length(raw, len(lengths), width)
    long = np.flatnonzero(lengths > _LONG)
    if not len(long):
        return _of_words(raw, starts, lengths)
    short = np.flatnonzero(lengths <= _LONG)
    hashes = np.empty(len(lengths), np.uint64)
    hashes[short] = _of_words(raw, starts[short], lengths[short])
    for row in long:
        value = raw[starts[row] : starts[row] + lengths[row]]
        digest = hashlib.blake2b(value.tobytes(), digest_size=_WORD).digest()
        hashes[row] = int.from_bytes(digest, "little")
    return hashes


def _bytes_of(array: pa.Array) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Return the bytes of all values, followed by 8 zero bytes, and where each value begins."""
    kind = array.type
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        _, places, data = array.buffers()
        offsets = np.frombuffer(places, np.int32, len(array) + 1, array.offset * 4)
    else:
        large = array.cast(pa.large_binary())
        _, places, data = large.buffers()
        offsets = np.frombuffer(places, np.int64, len(large) + 1, large.offset * 8)
    raw = np.zeros(int(offsets[-1] - offsets[0]) + _WORD, np.uint8)
    if data is not None:
        raw[:-_WORD] = np.frombuffer(data, np.uint8)[offsets[0] : offsets[-1]]
    return raw, offsets.astype(np.int64) - int(offsets[0])


def _of_one_length(raw: npt.NDArray[np.uint8], count: int, length: int) -> _Hashes:
    """Hash values of equal length as `_of_words` does, without index lookups."""
    hashes = np.full(count, np.uint64(length)) * _STEP
    for offset in range(0, length, _WORD):
        word: _Hashes = np.ndarray((count,), np.dtype("<u8"), raw, offset=offset, strides=(length,))
        if length - offset < _WORD:
            word = word & _MASKS[length - offset]
        hashes *= _STEP
        hashes += _spread(word)
    return _spread(hashes)


def _of_words(
    raw: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> _Hashes:
    """Hash values word by word: the first word of all values, then the second of longer ones."""
    words: _Hashes = np.ndarray((len(raw) - _WORD + 1,), np.dtype("<u8"), raw, strides=(1,))
    hashes = lengths.astype(np.uint64)
    hashes *= _STEP
    rows: npt.NDArray[np.intp] | None = None  # None = all of them
    offset = 0
    while True:
        if rows is None and (more := lengths > offset).all():
            longer_hashes, of_them, left = hashes, starts, lengths
        else:
            rows = np.flatnonzero(more) if rows is None else rows[lengths[rows] > offset]
            longer_hashes, of_them, left = hashes[rows], starts[rows], lengths[rows]
        if not len(longer_hashes):
            return _spread(hashes)
        word = words[of_them + offset]
        if int(left.min()) < offset + _WORD:
            word &= _MASKS[np.minimum(left - offset, _WORD)]
        longer_hashes *= _STEP
        longer_hashes += _spread(word)
        if rows is not None:
            hashes[rows] = longer_hashes
        offset += _WORD
