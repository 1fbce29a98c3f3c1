"""Feeding Arrow columns to the hash function of routing keys: types, nulls, nesting.

Source: DataFusion 48, `create_hashes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.codec.bincode.arrow_buffers import bits_of, valid_rows, words_of
from arroyo_dagster.state.codec.hashing.ahash import (
    FALLBACK,
    SEEDS,
    Engine,
    HashVariant,
    Rows,
    Runs,
    U64Array,
)

# ---- the two forms of ahash 0.8.7 that use AES rounds --------------------------------------------
# They differ in how they shuffle the second half of their state: with the SSSE3 instruction, or by
# reversing its bytes.
#
# Source: ahash 0.8.7, `AHasher` of `aes_hash.rs`; `operations.rs`.

_Lanes: TypeAlias = npt.NDArray[np.uint64]
"""A 128-bit number for each row, as two words, the lower one first."""
_Tables: TypeAlias = tuple[npt.NDArray[np.uint32], ...]

_ENC, _SUM = np.array(SEEDS, dtype=np.uint64).reshape(2, 2)
_KEY = _ENC ^ _SUM
# For each byte of the new value, the index of the byte of the old value.
_TURNED = np.arange(15, -1, -1)
_SSSE3 = np.frombuffer(0x020A0700_0C01030E_050F0D08_06090B04.to_bytes(16, "little"), np.uint8)


class _State(NamedTuple):
    enc: _Lanes
    sum: _Lanes

    def of(self, rows: Rows) -> _State:
        return _State(self.enc[rows], self.sum[rows])

    def put(self, rows: Rows, other: _State) -> None:
        self.enc[rows], self.sum[rows] = other


class _Aes:
    """The form with AES: each value is fed to an AES round and added to a shuffled sum."""

    def __init__(self, shuffle: npt.NDArray[np.integer]) -> None:
        self._shuffle = shuffle

    def start(self, rows: int) -> _State:
        return _State(np.tile(_ENC, (rows, 1)), np.tile(_SUM, (rows, 1)))

    def word(self, state: _State, words: U64Array | np.uint64) -> _State:
        lanes = np.zeros_like(state.enc)
        lanes[:, 0] = words
        return self._feed(state, lanes)

    def wide(self, state: _State, low: U64Array, high: U64Array) -> _State:
        return self._feed(state, np.stack([low, high], axis=1))

    def finish(self, state: _State) -> U64Array:
        mixed = _encrypt(state.sum, state.enc)
        return np.ascontiguousarray(_decrypt(_decrypt(mixed, _KEY), mixed)[:, 0])

    def write(self, state: _State, runs: Runs) -> _State:
        enc = state.enc.copy()
        enc[:, 0] += runs.lengths.astype(np.uint64)
        whole = _State(enc, state.sum.copy())
        for shortest, longest, feed in (
            (0, 16, self._upto_16),
            (17, 32, self._upto_32),
            (33, 64, self._upto_64),
            (65, 2**62, self._longer),
        ):
            rows = np.flatnonzero((runs.lengths >= shortest) & (runs.lengths <= longest))
            if len(rows):
                whole.put(rows, feed(whole.of(rows), runs.of(rows)))
        return whole

    def _upto_16(self, state: _State, runs: Runs) -> _State:
        return self.wide(state, *runs.edges())

    def _upto_32(self, state: _State, runs: Runs) -> _State:
        state = self._feed(state, _lanes_at(runs, runs.starts))
        return self._feed(state, _lanes_at(runs, runs.starts + runs.lengths - 16))

    def _upto_64(self, state: _State, runs: Runs) -> _State:
        ends = runs.starts + runs.lengths
        for starts in (runs.starts, runs.starts + 16, ends - 32, ends - 16):
            state = self._feed(state, _lanes_at(runs, starts))
        return state

    def _longer(self, state: _State, runs: Runs) -> _State:
        """Feed blocks of 64 bytes to four AES lanes and two separate sums."""
        tails = _block(runs, runs.starts + runs.lengths - 64)
        key = np.tile(_KEY, (len(runs.starts), 1))
        # The tail alternates encryption and decryption rounds; the blocks use decryption only.
        lanes = [_encrypt(key, tails[0]), _decrypt(key, tails[1])]
        lanes += [_encrypt(key, tails[2]), _decrypt(key, tails[3])]
        sums = [self._add(key + tails[0], tails[2]), self._add(~key + tails[1], tails[3])]
        rows, done = np.arange(len(runs.starts)), 0
        while len(rows):
            blocks = _block(runs, runs.starts[rows] + done)
            for lane, block in zip(lanes, blocks, strict=True):
                lane[rows] = _decrypt(lane[rows], block)
            for place, block in enumerate(blocks):
                sums[place % 2][rows] = self._add(sums[place % 2][rows], block)
            done += 64
            rows = rows[runs.lengths[rows] - done > 64]
        for part in (*lanes, *sums):
            state = self._feed(state, part)
        return state

    def _feed(self, state: _State, lanes: _Lanes) -> _State:
        return _State(_decrypt(state.enc, lanes), self._add(state.sum, lanes))

    def _add(self, base: _Lanes, lanes: _Lanes) -> _Lanes:
        shuffled = _bytes(base)[:, self._shuffle]
        return np.ascontiguousarray(shuffled).view(np.uint64) + lanes


AES = _Aes(_TURNED)
AES_SSSE3 = _Aes(_SSSE3)


def _lanes_at(runs: Runs, at: Rows) -> _Lanes:
    return np.stack([runs.words_at(at, 8), runs.words_at(at + 8, 8)], axis=1)


def _block(runs: Runs, at: Rows) -> list[_Lanes]:
    return [_lanes_at(runs, at + place) for place in (0, 16, 32, 48)]


def _bytes(lanes: _Lanes) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(lanes).view(np.uint8).reshape(-1, 16)


# --- AES rounds ----------------------------------------------------------------------------------


def _encrypt(lanes: _Lanes, key: _Lanes) -> _Lanes:
    """Apply one round: substitute, shift rows, mix columns; then exclusive-or with the key."""
    return _round(lanes, key, _tables()[0], 5)


def _decrypt(lanes: _Lanes, key: _Lanes) -> _Lanes:
    """Apply one inverse round, then exclusive-or with the key."""
    return _round(lanes, key, _tables()[1], -3)


def _round(lanes: _Lanes, key: _Lanes, tables: _Tables, step: int) -> _Lanes:
    # Row r of column c comes from the column r columns ahead (or behind): `step` bytes per row.
    raw = _bytes(lanes)
    mixed = np.zeros((len(raw), 4), dtype=np.uint32)
    for column in range(4):
        for row, table in enumerate(tables):
            mixed[:, column] ^= table[raw[:, (4 * column + step * row) % 16]]
    return mixed.view(np.uint64) ^ key


@lru_cache(maxsize=1)
def _tables() -> tuple[_Tables, _Tables]:
    """Return what each byte adds to its column, by row: substitution and mixing in one lookup."""
    powers = list(accumulate(range(254), lambda power, _: _times(power, 3), initial=1))
    box = [0x63]
    for byte in range(1, 256):
        inverse = powers[-powers.index(byte) % 255]  # 3 generates all bytes but 0
        value = inverse
        for turn in range(1, 5):
            value ^= (inverse << turn | inverse >> (8 - turn)) & 0xFF
        box.append(value ^ 0x63)
    substituted = np.array(box)
    back = np.empty_like(substituted)
    back[substituted] = np.arange(256)
    return _mixing(substituted, (2, 1, 1, 3)), _mixing(back, (14, 9, 13, 11))


def _mixing(substituted: npt.NDArray[np.int64], factors: tuple[int, ...]) -> _Tables:
    columns = [[_times(int(byte), factor) for factor in factors] for byte in substituted]
    first = np.array(columns, dtype=np.uint8)
    return tuple(
        np.ascontiguousarray(np.roll(first, row, axis=1)).view("<u4").ravel() for row in range(4)
    )


def _times(left: int, right: int) -> int:
    """Multiply in AES's field of 256 elements."""
    product = 0
    while right:
        if right & 1:
            product ^= left
        left = left << 1 ^ (0x11B if left & 0x80 else 0)
        right >>= 1
    return product


# ---- columns -------------------------------------------------------------------------------------


Column: TypeAlias = "pa.Array | pa.ChunkedArray"

ENGINES: dict[HashVariant, Engine[Any]] = {
    HashVariant.FALLBACK: FALLBACK,
    HashVariant.AES: AES,
    HashVariant.AES_SSSE3: AES_SSSE3,
}

_END_OF_TEXT = np.uint64(0xFF)
_HALF = np.uint64(32)
# A block's temporaries fit into the processor's cache; larger blocks are twice as slow.
_BLOCK = 1 << 14

_WORDS = {
    pa.int8(): "<u1",
    pa.int16(): "<u2",
    pa.int32(): "<u4",
    pa.int64(): "<u8",
    pa.uint8(): "<u1",
    pa.uint16(): "<u2",
    pa.uint32(): "<u4",
    pa.uint64(): "<u8",
    pa.float16(): "<u2",
    pa.float32(): "<u4",
    pa.float64(): "<u8",
    pa.date32(): "<u4",
    pa.date64(): "<u8",
}


# --- rows: columns and nulls ---------------------------------------------------------------------


def row_hashes(columns: Sequence[Column], rows: int, engine: Engine[Any]) -> U64Array:
    """Hash rows; without columns every hash is 0.

    Raises:
        InputError: a column's type cannot be hashed; also raised for empty columns.
    """
    hashes = np.zeros(rows, dtype=np.uint64)
    for place, column in enumerate(columns):
        start = 0
        for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else (column,):
            _feed(chunk, hashes[start : start + len(chunk)], engine, first=place == 0)
            start += len(chunk)
    return hashes


def _feed(array: pa.Array, hashes: U64Array, engine: Engine[Any], *, first: bool) -> None:
    """Add one column to the hashes of its rows, in place."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        _feed(array.storage, hashes, engine, first=first)
    elif len(array) == 0:
        _check_type(kind)
    elif pa.types.is_struct(kind):
        children = [array.field(place) for place in range(kind.num_fields)]
        inner = row_hashes(children, len(array), engine)
        _mix(hashes, _combine(hashes, inner), valid_rows(array))
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_map(kind):
        _feed_lists(array, hashes, engine)
    elif pa.types.is_fixed_size_list(kind):
        _feed_fixed_lists(array, hashes, engine)
    else:
        values, valid = _value_hashes(array, engine)
        _mix(hashes, values if first else _combine(values, hashes), valid)


def _mix(hashes: U64Array, updated: U64Array, valid: npt.NDArray[np.bool_] | None) -> None:
    if valid is None:
        hashes[:] = updated
    else:
        np.copyto(hashes, updated, where=valid)


def _combine(left: U64Array, right: U64Array) -> U64Array:
    # DataFusion's `combine_hashes`.
    return (left + np.uint64(629)) * np.uint64(37) + right


def _feed_lists(array: pa.Array, hashes: U64Array, engine: Engine[Any]) -> None:
    word = "<i8" if pa.types.is_large_list(array.type) else "<i4"
    offsets = words_of(array.buffers()[1], word, array.offset, len(array) + 1).astype(np.int64)
    valid = valid_rows(array)
    lengths = np.diff(offsets) if valid is None else np.where(valid, np.diff(offsets), 0)
    first, last = int(offsets[0]), int(offsets[-1])
    if pa.types.is_map(array.type):
        entries = pa.StructArray.from_arrays([array.keys, array.items], names=["key", "value"])
    else:
        entries = array.values
    items = row_hashes([entries.slice(first, last - first)], last - first, engine)
    _fold(hashes, items, offsets[:-1] - first, lengths)


def _feed_fixed_lists(array: pa.Array, hashes: U64Array, engine: Engine[Any]) -> None:
    size = array.type.list_size
    inside = array.values.slice(array.offset * size, len(array) * size)
    items = row_hashes([inside], len(inside), engine)
    starts = np.arange(len(array), dtype=np.int64) * size
    valid = valid_rows(array)
    lengths = np.full(len(array), size) if valid is None else np.where(valid, size, 0)
    _fold(hashes, items, starts, lengths)


def _fold(
    hashes: U64Array,
    items: U64Array,
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
) -> None:
    """Combine each row with its items in order: all first items, then all second ones, …"""
    # Unlike for columns, the previous hash is the left operand, as for structs.
    rows = np.flatnonzero(lengths)
    place = 0
    while len(rows):
        hashes[rows] = _combine(hashes[rows], items[starts[rows] + place])
        place += 1
        rows = rows[lengths[rows] > place]


# --- values by Arrow type ------------------------------------------------------------------------


def _check_type(kind: pa.DataType) -> None:
    """Refuse a type that cannot be hashed, even if there are no rows."""
    if isinstance(kind, pa.BaseExtensionType):
        _check_type(kind.storage_type)
    elif pa.types.is_dictionary(kind):
        _check_type(kind.value_type)
    elif _is_nested(kind):
        for place in range(kind.num_fields):
            _check_type(kind.field(place).type)
    elif not pa.types.is_null(kind):
        _hasher(kind)


def _is_nested(kind: pa.DataType) -> bool:
    types = pa.types
    tests = (types.is_struct, types.is_list, types.is_large_list, types.is_fixed_size_list)
    return types.is_map(kind) or any(test(kind) for test in tests)


def _value_hashes(
    array: pa.Array, engine: Engine[Any]
) -> tuple[U64Array, npt.NDArray[np.bool_] | None]:
    """Hash each value separately; the hashes of null rows are undefined."""
    if pa.types.is_null(array.type):
        return _hash_words([np.ones(len(array), dtype=np.uint64)], engine), None
    if pa.types.is_dictionary(array.type):
        hashes = row_hashes([array.dictionary], len(array.dictionary), engine)
        valid = valid_rows(array)
        if not len(hashes):
            return np.zeros(len(array), dtype=np.uint64), np.zeros(len(array), dtype=np.bool_)
        word = f"<{'i' if pa.types.is_signed_integer(array.type.index_type) else 'u'}"
        word += str(array.type.index_type.bit_width // 8)
        indices = words_of(array.indices.buffers()[1], word, array.indices.offset, len(array))
        if valid is not None:
            indices = np.where(valid, indices, 0)
        return hashes[indices], valid
    return _hasher(array.type)(array, engine), valid_rows(array)


def _hasher(kind: pa.DataType) -> Callable[[pa.Array, Engine[Any]], U64Array]:
    types = pa.types
    if types.is_boolean(kind):
        return _boolean_hashes
    if _word_of(kind) is not None:
        return _number_hashes
    if types.is_decimal128(kind) or types.is_decimal256(kind):
        return _decimal_hashes
    if kind == pa.month_day_nano_interval():
        return _interval_hashes
    if types.is_fixed_size_binary(kind):
        return _fixed_binary_hashes
    if types.is_string(kind) or types.is_large_string(kind):
        return partial(_text_hashes, prefixed=False)
    if types.is_binary(kind) or types.is_large_binary(kind):
        return partial(_text_hashes, prefixed=True)
    if types.is_string_view(kind):
        return lambda array, engine: _text_hashes(
            array.cast(pa.large_string()), engine, prefixed=False
        )
    if types.is_binary_view(kind):
        return lambda array, engine: _text_hashes(
            array.cast(pa.large_binary()), engine, prefixed=True
        )
    raise InputError(f"a column of the Arrow type {kind} cannot be part of a routing key")


def _word_of(kind: pa.DataType) -> str | None:
    if pa.types.is_time32(kind):
        return "<u4"
    if pa.types.is_time64(kind) or pa.types.is_timestamp(kind) or pa.types.is_duration(kind):
        return "<u8"
    return _WORDS.get(kind)


def _boolean_hashes(array: pa.Array, engine: Engine[Any]) -> U64Array:
    return _hash_words([bits_of(array.buffers()[1], array.offset, len(array))], engine)


def _number_hashes(array: pa.Array, engine: Engine[Any]) -> U64Array:
    word = _word_of(array.type)
    assert word is not None
    return _hash_words([words_of(array.buffers()[1], word, array.offset, len(array))], engine)


def _hash_words(columns: Sequence[npt.NDArray[Any]], engine: Engine[Any]) -> U64Array:
    """Hash rows of unsigned integers, feeding the columns in order."""
    rows = len(columns[0])
    hashes = np.empty(rows, dtype=np.uint64)
    for part in _blocks(rows):
        state = engine.start(part.stop - part.start)
        for words in columns:
            state = engine.word(state, words[part].astype(np.uint64))
        hashes[part] = engine.finish(state)
    return hashes


def _decimal_hashes(array: pa.Array, engine: Engine[Any]) -> U64Array:
    halves = array.type.byte_width // 8
    words = words_of(array.buffers()[1], "<u8", array.offset * halves, len(array) * halves)
    words = words.reshape(-1, halves)
    hashes = np.empty(len(array), dtype=np.uint64)
    for part in _blocks(len(array)):
        state = engine.start(part.stop - part.start)
        for place in range(0, halves, 2):
            state = engine.wide(state, words[part, place], words[part, place + 1])
        hashes[part] = engine.finish(state)
    return hashes


def _interval_hashes(array: pa.Array, engine: Engine[Any]) -> U64Array:
    words = words_of(array.buffers()[1], "<u4", array.offset * 4, len(array) * 4).reshape(-1, 4)
    nanos = words[:, 2].astype(np.uint64) | (words[:, 3].astype(np.uint64) << _HALF)
    return _hash_words([words[:, 0], words[:, 1], nanos], engine)


# --- texts and bytes -----------------------------------------------------------------------------


def _fixed_binary_hashes(array: pa.Array, engine: Engine[Any]) -> U64Array:
    width = array.type.byte_width
    starts = (np.arange(len(array), dtype=np.int64) + array.offset) * width
    lengths = np.full(len(array), width, dtype=np.int64)
    return _run_hashes(array.buffers()[1], starts, lengths, engine, prefixed=True)


def _text_hashes(array: pa.Array, engine: Engine[Any], *, prefixed: bool) -> U64Array:
    wide = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    _, offsets, data = array.buffers()
    bounds = words_of(offsets, "<i8" if wide else "<i4", array.offset, len(array) + 1)
    starts = bounds[:-1].astype(np.int64)
    lengths = bounds[1:] - starts
    valid = valid_rows(array)
    if valid is not None:
        # A null may have any number of bytes below it.
        lengths[~valid] = 0
    return _run_hashes(data, starts, lengths, engine, prefixed=prefixed)


def _run_hashes(
    data: pa.Buffer | None,
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    engine: Engine[Any],
    *,
    prefixed: bool,
) -> U64Array:
    """Hash runs of bytes, with their length before them (binary) or 0xFF after them (text)."""
    raw = np.frombuffer(data, dtype=np.uint8) if data is not None else np.zeros(0, np.uint8)
    hashes = np.empty(len(starts), dtype=np.uint64)
    for part in _blocks(len(starts)):
        state = engine.start(part.stop - part.start)
        if prefixed:
            state = engine.word(state, lengths[part].astype(np.uint64))
        state = engine.write(state, Runs(raw, starts[part], lengths[part]))
        hashes[part] = engine.finish(state if prefixed else engine.word(state, _END_OF_TEXT))
    return hashes


def _blocks(count: int) -> Iterator[slice]:
    for start in range(0, count, _BLOCK):
        yield slice(start, min(start + _BLOCK, count))
