"""The hashes Arroyo routes rows and keys by.

`key_hashes` is the column `_key_hash` of whole Arrow arrays at once; `hash_key` is the hash the
state crate gives for one key.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import is_dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.codec.bincode import pick_variant, struct_values
from arroyo_dagster.state.model.keys import key_range_size
from arroyo_dagster.state.model.types import (
    ArrayOf,
    EnumOf,
    ListOf,
    OptionOf,
    Primitive,
    StructOf,
    TupleOf,
    Type,
    describe,
)

__all__ = ["hash_key", "key_hashes", "subtasks_for_hashes"]

_U64: TypeAlias = npt.NDArray[np.uint64]
_Column: TypeAlias = "pa.Array | pa.ChunkedArray"

# ahash 0.8.7, fallback variant, with Arroyo's HASH_SEEDS exclusive-or PI2.
_K0 = np.uint64(0x0398DE1C8C83F7FD)
_K1 = np.uint64(0xA7C36364ED09B486)
_K2 = np.uint64(0xAF18AC566EFEA448)
_K3 = np.uint64(0xC77B0AD1D14D0FE1)
_MULTIPLE = np.uint64(6364136223846793005)
_END_OF_TEXT = np.uint64(0xFF)

_MASK64 = 2**64 - 1
_LOW_HALF = np.uint64(2**32 - 1)
_HALF = np.uint64(32)
# A block's temporaries stay in the processor's cache; larger ones are twice as slow.
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


def key_hashes(columns: Sequence[_Column], rows: int | None = None) -> pa.Array:
    """Compute the routing key of every row, as Arroyo's official builds do.

    Args:
        columns: the routing-key columns in index order, all of one length.
        rows: how many rows there are; needed when there are no columns, whose hash is 0.

    Returns:
        `_key_hash`, one uint64 per row, never null.

    Raises:
        InputError: columns of different lengths, or of a type Arroyo cannot hash.

    Source: crates/arroyo-types/src/lib.rs, `HASH_SEEDS`; DataFusion, `create_hashes`; ahash 0.8.7,
        `AHasher` of `fallback_hash.rs`.

    Differs: builds of Arroyo for Apple silicon, or for CPUs with AES by choice, hash otherwise.
    """
    for place, column in enumerate(columns):
        if not isinstance(column, pa.Array | pa.ChunkedArray):
            raise InputError(
                "a column of a key must be an Arrow array",
                column=place,
                found=column.__class__.__name__,
            )
    if rows is None:
        if not columns:
            raise InputError("without columns the number of rows must be given")
        rows = len(columns[0])
    for place, column in enumerate(columns):
        if len(column) != rows:
            raise InputError(
                "the columns of a key have different lengths",
                column=place,
                rows=len(column),
                expected=rows,
            )
    return pa.array(_row_hashes(columns, rows), type=pa.uint64())


def subtasks_for_hashes(
    hashes: pa.Array | pa.ChunkedArray | npt.NDArray[np.uint64], parallelism: int
) -> npt.NDArray[np.int32]:
    """Give the subtask that owns each routing key.

    Args:
        hashes: uint64, without nulls.
        parallelism: how many subtasks share all routing keys.

    Returns:
        Numbers from 0 to `parallelism - 1`, one per hash.

    Raises:
        InputError: the hashes are not uint64 or have nulls; `parallelism` is no count of subtasks.

    Source: crates/arroyo-rpc/src/df.rs, `server_for_hash_array`.
    """
    size = key_range_size(parallelism)
    values = hashes if isinstance(hashes, np.ndarray) else _u64_values(hashes)
    if values.dtype != np.uint64:
        raise InputError("routing keys must be uint64", found=str(values.dtype))
    if parallelism == 1:
        return np.zeros(len(values), dtype=np.int32)
    return (values // np.uint64(size)).astype(np.int32)


def _u64_values(hashes: _Column) -> _U64:
    if not isinstance(hashes, pa.Array | pa.ChunkedArray):
        raise InputError("routing keys must be an Arrow or numpy array of uint64")
    if hashes.type != pa.uint64() or hashes.null_count:
        raise InputError(
            "routing keys must be uint64 without nulls",
            found=str(hashes.type),
            nulls=hashes.null_count,
        )
    values: _U64 = hashes.to_numpy(zero_copy_only=False)
    return values.astype(np.uint64, copy=False)


# --- rows: columns and nulls ---------------------------------------------------------------------


def _row_hashes(columns: Sequence[_Column], rows: int) -> _U64:
    hashes = np.zeros(rows, dtype=np.uint64)
    for place, column in enumerate(columns):
        start = 0
        for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else (column,):
            _feed(chunk, hashes[start : start + len(chunk)], first=place == 0)
            start += len(chunk)
    return hashes


def _feed(array: pa.Array, hashes: _U64, *, first: bool) -> None:
    """Bring one column into the hashes of its rows, in place."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        _feed(array.storage, hashes, first=first)
    elif len(array) == 0:
        _check_type(kind)
    elif pa.types.is_struct(kind):
        children = [array.field(place) for place in range(kind.num_fields)]
        _mix(hashes, _combine(hashes, _row_hashes(children, len(array))), _valid(array))
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_map(kind):
        _feed_lists(array, hashes)
    elif pa.types.is_fixed_size_list(kind):
        _feed_fixed_lists(array, hashes)
    else:
        values, valid = _value_hashes(array)
        _mix(hashes, values if first else _combine(values, hashes), valid)


def _mix(hashes: _U64, updated: _U64, valid: npt.NDArray[np.bool_] | None) -> None:
    if valid is None:
        hashes[:] = updated
    else:
        np.copyto(hashes, updated, where=valid)


def _combine(left: _U64, right: _U64) -> _U64:
    # DataFusion's `combine_hashes`.
    return (left + np.uint64(629)) * np.uint64(37) + right


def _feed_lists(array: pa.Array, hashes: _U64) -> None:
    wide = pa.types.is_large_list(array.type)
    offsets = _fixed(array.buffers()[1], "<i8" if wide else "<i4", array.offset, len(array) + 1)
    offsets = offsets.astype(np.int64)
    valid = _valid(array)
    lengths = np.diff(offsets) if valid is None else np.where(valid, np.diff(offsets), 0)
    first, last = int(offsets[0]), int(offsets[-1])
    if pa.types.is_map(array.type):
        entries = pa.StructArray.from_arrays([array.keys, array.items], names=["key", "value"])
    else:
        entries = array.values
    items = _row_hashes([entries.slice(first, last - first)], last - first)
    _fold(hashes, items, offsets[:-1] - first, lengths)


def _feed_fixed_lists(array: pa.Array, hashes: _U64) -> None:
    size = array.type.list_size
    items = _row_hashes(
        [array.values.slice(array.offset * size, len(array) * size)], len(array) * size
    )
    starts = np.arange(len(array), dtype=np.int64) * size
    valid = _valid(array)
    lengths = np.full(len(array), size) if valid is None else np.where(valid, size, 0)
    _fold(hashes, items, starts, lengths)


def _fold(
    hashes: _U64, items: _U64, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> None:
    """Combine each row with its items in order: all first items, then all second ones, …"""
    # The other way round than columns: what was before is on the left, as for structs.
    rows = np.flatnonzero(lengths)
    place = 0
    while len(rows):
        hashes[rows] = _combine(hashes[rows], items[starts[rows] + place])
        place += 1
        rows = rows[lengths[rows] > place]


# --- values by Arrow type ------------------------------------------------------------------------


def _check_type(kind: pa.DataType) -> None:
    """Refuse a type that cannot be hashed even where no row asks for it."""
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


def _value_hashes(array: pa.Array) -> tuple[_U64, npt.NDArray[np.bool_] | None]:
    """Hash each value alone; what stands at null rows means nothing."""
    if pa.types.is_null(array.type):
        return _hash_words(np.full(len(array), 1, dtype=np.uint64)), None
    if pa.types.is_dictionary(array.type):
        return _dictionary_hashes(array)
    return _hasher(array.type)(array), _valid(array)


def _hasher(kind: pa.DataType) -> Callable[[pa.Array], _U64]:
    types = pa.types
    if types.is_boolean(kind):
        return lambda array: _hash_words(_bits(array.buffers()[1], array.offset, len(array)))
    word = _word_of(kind)
    if word is not None:
        return lambda array: _hash_words(_fixed(array.buffers()[1], word, array.offset, len(array)))
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
        return lambda array: _text_hashes(array.cast(pa.large_string()), prefixed=False)
    if types.is_binary_view(kind):
        return lambda array: _text_hashes(array.cast(pa.large_binary()), prefixed=True)
    raise InputError(f"a column of the Arrow type {kind} cannot be part of a routing key")


def _word_of(kind: pa.DataType) -> str | None:
    if pa.types.is_time32(kind):
        return "<u4"
    if pa.types.is_time64(kind) or pa.types.is_timestamp(kind) or pa.types.is_duration(kind):
        return "<u8"
    return _WORDS.get(kind)


def _dictionary_hashes(array: pa.DictionaryArray) -> tuple[_U64, npt.NDArray[np.bool_] | None]:
    known = _row_hashes([array.dictionary], len(array.dictionary))
    valid = _valid(array)
    if not len(known):
        return np.zeros(len(array), dtype=np.uint64), np.zeros(len(array), dtype=np.bool_)
    word = f"<{'i' if pa.types.is_signed_integer(array.type.index_type) else 'u'}"
    word += str(array.type.index_type.bit_width // 8)
    indices = _fixed(array.indices.buffers()[1], word, array.indices.offset, len(array))
    if valid is not None:
        indices = np.where(valid, indices, 0)
    return known[indices], valid


def _hash_words(words: npt.NDArray[Any]) -> _U64:
    hashes = np.empty(len(words), dtype=np.uint64)
    for part in _blocks(len(words)):
        hashes[part] = _finish(_update(words[part].astype(np.uint64), _K0))
    return hashes


def _decimal_hashes(array: pa.Array) -> _U64:
    halves = array.type.byte_width // 8
    words = _fixed(array.buffers()[1], "<u8", array.offset * halves, len(array) * halves)
    words = words.reshape(-1, halves)
    hashes = np.empty(len(array), dtype=np.uint64)
    for part in _blocks(len(array)):
        state = np.full(part.stop - part.start, _K0)
        for place in range(0, halves, 2):
            state = _large(state, words[part, place], words[part, place + 1])
        hashes[part] = _finish(state)
    return hashes


def _interval_hashes(array: pa.Array) -> _U64:
    words = _fixed(array.buffers()[1], "<u4", array.offset * 4, len(array) * 4).reshape(-1, 4)
    months, days = words[:, 0].astype(np.uint64), words[:, 1].astype(np.uint64)
    nanos = words[:, 2].astype(np.uint64) | (words[:, 3].astype(np.uint64) << _HALF)
    return _finish(_update(nanos, _update(days, _update(months, _K0))))


def _fixed_binary_hashes(array: pa.Array) -> _U64:
    width = array.type.byte_width
    starts = (np.arange(len(array), dtype=np.int64) + array.offset) * width
    lengths = np.full(len(array), width, dtype=np.int64)
    return _byte_hashes(array.buffers()[1], starts, lengths, prefixed=True)


def _text_hashes(array: pa.Array, *, prefixed: bool) -> _U64:
    wide = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    _, offsets, data = array.buffers()
    bounds = _fixed(offsets, "<i8" if wide else "<i4", array.offset, len(array) + 1)
    starts = bounds[:-1].astype(np.int64)
    lengths = bounds[1:] - starts
    valid = _valid(array)
    if valid is not None:
        # The bytes below a null may be anything, even very many.
        lengths[~valid] = 0
    return _byte_hashes(data, starts, lengths, prefixed=prefixed)


# --- buffers -------------------------------------------------------------------------------------


def _fixed(buffer: pa.Buffer | None, word: str, offset: int, count: int) -> npt.NDArray[Any]:
    kind = np.dtype(word)
    # Arrow leaves buffers out where no row needs them.
    if buffer is None or buffer.size == 0:
        return np.zeros(count, dtype=kind)
    return np.frombuffer(buffer, dtype=kind, count=count, offset=offset * kind.itemsize)


def _bits(buffer: pa.Buffer | None, offset: int, count: int) -> npt.NDArray[np.uint8]:
    start = offset // 8
    raw = _fixed(buffer, "<u1", start, (offset + count + 7) // 8 - start)
    return np.unpackbits(raw, bitorder="little")[offset % 8 : offset % 8 + count]


def _valid(array: pa.Array) -> npt.NDArray[np.bool_] | None:
    """Say which rows are not null; None when none is."""
    if array.null_count == 0:
        return None
    if pa.types.is_dictionary(array.type):
        array = array.indices
    return _bits(array.buffers()[0], array.offset, len(array)).view(np.bool_)


def _blocks(count: int) -> Iterator[slice]:
    for start in range(0, count, _BLOCK):
        yield slice(start, min(start + _BLOCK, count))


# --- ahash 0.8.7, fallback -----------------------------------------------------------------------


def _byte_hashes(
    data: pa.Buffer | None,
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    *,
    prefixed: bool,
) -> _U64:
    """Hash runs of bytes, with their length before them (binary) or 0xFF after them (text)."""
    raw = np.frombuffer(data, dtype=np.uint8) if data is not None else np.zeros(0, np.uint8)
    hashes = np.empty(len(starts), dtype=np.uint64)
    for part in _blocks(len(starts)):
        sizes = lengths[part].astype(np.uint64)
        state = _write(raw, starts[part], lengths[part], _update(sizes, _K0) if prefixed else _K0)
        hashes[part] = _finish(state if prefixed else _update(_END_OF_TEXT, state))
    return hashes


def _write(
    raw: npt.NDArray[np.uint8],
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    state: _U64 | np.uint64,
) -> _U64:
    low = np.zeros(len(starts), dtype=np.uint64)
    high = np.zeros(len(starts), dtype=np.uint64)
    for shortest, longest, width in ((1, 1, 1), (2, 3, 2), (4, 8, 4), (9, _MASK64 >> 1, 8)):
        rows = _rows_between(lengths, shortest, longest)
        if rows is None:
            continue
        begins, ends = starts[rows], starts[rows] + lengths[rows]
        tail = 1 if width == 2 else width
        # Longer than 16: the last 16 bytes come first, and the blocks from the start follow.
        begins = np.where(lengths[rows] > 16, ends - 16, begins) if width == 8 else begins
        low[rows] = _words_at(raw, begins, width)
        high[rows] = _words_at(raw, ends - tail, tail)
    state = _large((lengths.astype(np.uint64) + state) * _MULTIPLE, low, high)
    rows = np.flatnonzero(lengths > 16)
    done = 0
    while len(rows):
        begins = starts[rows] + done
        low, high = _words_at(raw, begins, 8), _words_at(raw, begins + 8, 8)
        state[rows] = _large(state[rows], low, high)
        done += 16
        rows = rows[lengths[rows] - done > 16]
    return state


def _rows_between(
    lengths: npt.NDArray[np.int64], shortest: int, longest: int
) -> npt.NDArray[np.int64] | slice | None:
    found = (lengths >= shortest) & (lengths <= longest)
    count = np.count_nonzero(found)
    if count == len(lengths):
        return slice(None)
    return np.flatnonzero(found) if count else None


def _words_at(raw: npt.NDArray[np.uint8], at: npt.NDArray[np.int64], width: int) -> _U64:
    """Read a little-endian word of `width` bytes at any byte of `raw`."""
    # One word starts at every byte, so neighbours overlap: a view, not a copy.
    words = np.ndarray((len(raw) - width + 1,), f"<u{width}", raw, strides=(1,))
    return words[at].astype(np.uint64)


def _update(words: _U64 | np.uint64, state: _U64 | np.uint64) -> _U64:
    mixed: _U64 = np.bitwise_xor(words, state)
    return _folded_multiply(mixed, _MULTIPLE)


def _large(state: _U64, low: _U64, high: _U64) -> _U64:
    mixed = _folded_multiply(low ^ _K2, high ^ _K3)
    mixed ^= state + _K1
    return (mixed << np.uint64(23)) | (mixed >> np.uint64(41))


def _finish(state: _U64) -> _U64:
    mixed = _folded_multiply(state, _K1)
    left = state & np.uint64(63)
    right = (np.uint64(64) - left) & np.uint64(63)
    turned: _U64 = np.bitwise_or(mixed << left, mixed >> right)
    return turned


def _folded_multiply(left: _U64, right: _U64 | np.uint64) -> _U64:
    """Exclusive-or of the two halves of the 128-bit product."""
    left_low, left_high = left & _LOW_HALF, left >> _HALF
    right_low, right_high = right & _LOW_HALF, right >> _HALF
    low_low = left_low * right_low
    low_high = left_low * right_high
    middle = left_high * right_low
    # At most 2^64 - 1: the product of two 32-bit numbers leaves room for two more of them.
    middle += low_low >> _HALF
    middle += low_high & _LOW_HALF
    high = left_high * right_high
    high += low_high >> _HALF
    high += middle >> _HALF
    high ^= left * right
    return high


# --- std DefaultHasher ---------------------------------------------------------------------------

_WIDTHS = {
    "u8": 1,
    "u16": 2,
    "u32": 4,
    "u64": 8,
    "u128": 16,
    "usize": 8,
    "i8": 1,
    "i16": 2,
    "i32": 4,
    "i64": 8,
    "i128": 16,
    "isize": 8,
}


def hash_key(value: object, type: Any = None) -> int:  # noqa: A002 - the word users know
    """Hash one key as the state crate does: SipHash-1-3 with keys 0 and 0.

    Args:
        value: the key.
        type: how the key looks in Rust, as a Python type or a description; without it an int has
            64 bits, and a list or tuple is one of what it holds.

    Raises:
        InputError: the value does not fit the type, or Rust cannot hash the type: floats, sets
            and maps; times are left out because their layout is not Rust's promise.

    Source: crates/arroyo-state/src/lib.rs, `hash_key`; Rust's std, `DefaultHasher`.
    """
    fed = bytearray()
    if type is None and is_dataclass(value):
        type = value.__class__  # noqa: A001
    if type is None:
        _feed_untyped(value, fed)
    else:
        _feed_typed(value, describe(type), fed)
    return _siphash13(bytes(fed))


def _feed_untyped(value: object, fed: bytearray) -> None:
    if isinstance(value, bool):
        fed.append(value)
    elif isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise InputError("an int without a type is hashed as 64 bits", value=value)
        fed += (value & _MASK64).to_bytes(8, "little")
    elif isinstance(value, str):
        fed += _utf8(value) + b"\xff"
    elif isinstance(value, bytes | bytearray | memoryview):
        fed += _counted_bytes(value)
    elif isinstance(value, list | tuple):
        if isinstance(value, list):
            fed += struct.pack("<Q", len(value))
        for item in value:
            _feed_untyped(item, fed)
    else:
        raise InputError(
            f"a {value.__class__.__name__} cannot be hashed without its type",
            next_step="hash_key(value, type), for example hash_key(None, int | None)",
        )


def _feed_typed(value: Any, kind: Type, fed: bytearray) -> None:
    match kind:
        case Primitive():
            fed += _primitive_bytes(value, kind.name)
        case OptionOf(item=item):
            fed += struct.pack("<Q", value is not None)
            if value is not None:
                _feed_typed(value, item, fed)
        case ListOf(item=item) | ArrayOf(item=item):
            _expect(isinstance(value, list | tuple), value, "a list")
            if isinstance(kind, ArrayOf):
                _expect(len(value) == kind.length, value, f"{kind.length} items")
            fed += struct.pack("<Q", len(value))
            for part in value:
                _feed_typed(part, item, fed)
        case TupleOf(items=items):
            _expect(isinstance(value, list | tuple), value, "a tuple")
            _expect(len(value) == len(items), value, f"{len(items)} items")
            for part, item in zip(value, items, strict=True):
                _feed_typed(part, item, fed)
        case StructOf(fields=fields):
            for part, field in zip(struct_values(value, kind), fields, strict=True):
                _feed_typed(part, field.type, fed)
        case EnumOf(variants=variants):
            index, payload = pick_variant(value, kind)
            fed += struct.pack("<Q", index)
            _feed_typed(payload, variants[index].payload, fed)
        case _:
            raise InputError(f"a value of the type {kind} cannot be hashed")


def _primitive_bytes(value: Any, name: str) -> bytes:
    if name in _WIDTHS:
        width, signed = _WIDTHS[name], name.startswith("i")
        _expect(isinstance(value, int) and not isinstance(value, bool), value, f"an int for {name}")
        bits = width * 8 - signed
        _expect(-(2**bits) * signed <= value < 2**bits, value, f"a number that fits {name}")
        return int(value).to_bytes(width, "little", signed=signed)
    if name == "bool":
        _expect(isinstance(value, bool), value, "a bool")
        return bytes([value])
    if name == "char":
        _expect(isinstance(value, str) and len(value) == 1, value, "one character")
        return struct.pack("<I", ord(value))
    if name == "string":
        _expect(isinstance(value, str), value, "a str")
        return _utf8(value) + b"\xff"
    if name == "bytes":
        _expect(isinstance(value, bytes | bytearray | memoryview), value, "bytes")
        return _counted_bytes(value)
    if name == "unit":
        _expect(value is None, value, "None")
        return b""
    raise InputError(f"Rust cannot hash the type {name}", type=name)


def _counted_bytes(value: bytes | bytearray | memoryview) -> bytes:
    data = bytes(value)
    return struct.pack("<Q", len(data)) + data


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InputError("the text is not Unicode: it holds half a surrogate pair") from error


def _expect(right: bool, value: object, expected: str) -> None:
    if not right:
        raise InputError(f"cannot hash {value!r:.200}: expected {expected}")


def _siphash13(data: bytes) -> int:
    v0, v1 = 0x736F6D6570736575, 0x646F72616E646F6D
    v2, v3 = 0x6C7967656E657261, 0x7465646279746573
    whole = len(data) & ~7
    last = int.from_bytes(data[whole:], "little") | (len(data) & 0xFF) << 56
    for (word,) in (*struct.iter_unpack("<Q", data[:whole]), (last,)):
        v0, v1, v2, v3 = _sip_round(v0, v1, v2, v3 ^ word)
        v0 ^= word
    v2 ^= 0xFF
    for _ in range(3):
        v0, v1, v2, v3 = _sip_round(v0, v1, v2, v3)
    return v0 ^ v1 ^ v2 ^ v3


def _sip_round(v0: int, v1: int, v2: int, v3: int) -> tuple[int, int, int, int]:
    v0 = (v0 + v1) & _MASK64
    v1 = ((v1 << 13 | v1 >> 51) & _MASK64) ^ v0
    v0 = (v0 << 32 | v0 >> 32) & _MASK64
    v2 = (v2 + v3) & _MASK64
    v3 = ((v3 << 16 | v3 >> 48) & _MASK64) ^ v2
    v0 = (v0 + v3) & _MASK64
    v3 = ((v3 << 21 | v3 >> 43) & _MASK64) ^ v0
    v2 = (v2 + v1) & _MASK64
    v1 = ((v1 << 17 | v1 >> 47) & _MASK64) ^ v2
    v2 = (v2 << 32 | v2 >> 32) & _MASK64
    return v0, v1, v2, v3
