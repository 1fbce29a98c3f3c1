"""Decoding of many values of one type at once, field by field, into Arrow columns.

Values of a fixed shape are decoded without a Python loop over rows: every row has a read position,
and each step advances all positions by one field. A shape is fixed if each value has the same
fields: numbers, texts, bytes, times, options and enums without payload, alone or in structs and
tuples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.codec.bincode.arrow_buffers import words_of
from arroyo_dagster.state.model.types import (
    UNIT,
    EnumOf,
    OptionOf,
    Primitive,
    StructOf,
    TimeOf,
    TupleOf,
    Type,
)

_Rows: TypeAlias = npt.NDArray[np.int64]
_Words: TypeAlias = npt.NDArray[np.uint64]
_Reader: TypeAlias = "Callable[[_Cursor], pa.Array]"

# The maximum rows and bytes of a block, so that its temporaries stay in the processor's cache.
_BLOCK_ROWS = 1 << 14
_BLOCK_BYTES = 1 << 26
# Words are also read at the end of a row, so the last row needs padding.
_PADDING = 16
_NANOS = np.uint64(10**9)
_MAX_NANOS = np.uint64(2**63 - 1)
_CLOSE_SECONDS = np.uint64((2**63 - 2**32) // 10**9)

_PRIMITIVES: dict[str, pa.DataType] = {
    "u8": pa.uint8(),
    "u16": pa.uint16(),
    "u32": pa.uint32(),
    "u64": pa.uint64(),
    "usize": pa.uint64(),
    "i8": pa.int8(),
    "i16": pa.int16(),
    "i32": pa.int32(),
    "i64": pa.int64(),
    "isize": pa.int64(),
    "f32": pa.float32(),
    "f64": pa.float64(),
    "bool": pa.bool_(),
    "char": pa.string(),
    "string": pa.string(),
    "bytes": pa.binary(),
    "unit": pa.null(),
}
_TIMES = {"duration": pa.duration("ns"), "system_time": pa.timestamp("ns", tz="UTC")}


def column_type(described: Type) -> pa.DataType | None:
    """Return the Arrow type of a column of values; None if their shape is not fixed.

    Times are nanoseconds, a tuple is a struct with the fields `0`, `1`…, an enum a dictionary of
    the names of its variants.
    """
    match described:
        case Primitive(name=name):
            return _PRIMITIVES.get(name)
        case TimeOf(name=name):
            return _TIMES[name]
        case OptionOf(item=item):
            return column_type(item)
        case TupleOf() | StructOf():
            return _struct_type(_fields(described))
        case EnumOf(variants=variants) if all(variant.payload == UNIT for variant in variants):
            return pa.dictionary(pa.int32(), pa.string())
        case _:
            return None


def _fields(described: TupleOf | StructOf) -> list[tuple[str, Type]]:
    if isinstance(described, StructOf):
        return [(field.name, field.type) for field in described.fields]
    return [(str(place), item) for place, item in enumerate(described.items)]


def _struct_type(fields: list[tuple[str, Type]]) -> pa.DataType | None:
    kinds = [(name, column_type(item), item) for name, item in fields]
    if any(kind is None for _, kind, _ in kinds):
        return None
    return pa.struct(
        [pa.field(n, kind, isinstance(item, OptionOf) or item == UNIT) for n, kind, item in kinds]
    )


class RowBroken(Exception):
    """The bytes of a row are no value of the type."""

    def __init__(self, row: int) -> None:
        super().__init__(row)
        self.row = row


def decode_column(data: pa.Array, described: Type, *, strict: bool) -> pa.Array:
    """Decode a column.

    Args:
        data: of type binary, without nulls.
        described: a type that `column_type` supports.
        strict: whether bytes after a value are an error.

    Raises:
        RowBroken: a row is no value of the type. Its number is that of the first such row, or of an
            earlier one.
        InputError: a time is after the year 2262, the limit of a column of nanoseconds.
    """
    read = _reader(described)
    blocks = []
    for cursor in _cursors(data):
        try:
            blocks.append(read(cursor))
        except pa.ArrowInvalid as error:
            # Some text is not UTF-8; decoding row by row from here on finds it.
            raise RowBroken(int(cursor.rows[0])) from error
        if strict:
            cursor.check(cursor.at == cursor.ends)
    return pa.concat_arrays(blocks) if blocks else pa.array([], column_type(described))


# --- read positions ------------------------------------------------------------------------------


@dataclass(slots=True)
class _Cursor:
    """The read positions of a block of rows; `rows` are their indices in the column."""

    raw: npt.NDArray[np.uint8]
    at: _Rows
    ends: _Rows
    rows: _Rows

    def check(self, right: npt.NDArray[np.bool_]) -> None:
        """Raise RowBroken for the first row that is not right."""
        if not right.all():
            raise RowBroken(int(self.rows[int(np.argmin(right))]))

    def move(self, size: int | npt.NDArray[Any]) -> _Rows:
        """Advance by `size` bytes, which must exist, and return the positions before."""
        begins = self.at
        self.at = begins + size
        self.check(self.at <= self.ends)
        return begins

    def words(self, at: _Rows, kind: str) -> npt.NDArray[Any]:
        """Read a number of a numpy type at any byte positions."""
        # A word begins at every byte, so the words overlap: a view, not a copy.
        size = np.dtype(kind).itemsize
        words = np.ndarray((len(self.raw) - size + 1,), kind, self.raw, strides=(1,))
        values: npt.NDArray[Any] = words[at]
        return values

    def some(self, chosen: npt.NDArray[np.bool_]) -> _Cursor:
        return _Cursor(self.raw, self.at[chosen], self.ends[chosen], self.rows[chosen])


def _cursors(data: pa.Array) -> Iterator[_Cursor]:
    _, offsets, buffer = data.buffers()
    bounds = words_of(offsets, "<i4", data.offset, len(data) + 1).astype(np.int64)
    raw = np.frombuffer(buffer, dtype=np.uint8) if buffer else np.zeros(0, dtype=np.uint8)
    start = 0
    while start < len(data):
        stop = int(np.searchsorted(bounds, bounds[start] + _BLOCK_BYTES, side="right")) - 1
        stop = min(max(stop, start + 1), start + _BLOCK_ROWS, len(data))
        first, last = int(bounds[start]), int(bounds[stop])
        part = np.zeros(last - first + _PADDING, dtype=np.uint8)
        part[: last - first] = raw[first:last]
        edges = bounds[start : stop + 1] - first
        yield _Cursor(part, edges[:-1], edges[1:], np.arange(start, stop))
        start = stop


# --- readers by type -----------------------------------------------------------------------------


def _reader(described: Type) -> _Reader:
    match described:
        case Primitive(name=name):
            return _primitive_reader(name)
        case TimeOf(name=name):
            return _time_reader(name)
        case OptionOf(item=item):
            return _option_reader(item)
        case TupleOf() | StructOf():
            return _struct_reader(described)
        case EnumOf():
            return _enum_reader(described)
        case _:
            raise InputError(f"values of the type {described} have no fixed shape")


def _primitive_reader(name: str) -> _Reader:
    readers: dict[str, _Reader] = {
        "u8": lambda cursor: pa.array(cursor.raw[cursor.move(1)]),
        "i8": lambda cursor: pa.array(cursor.raw.view(np.int8)[cursor.move(1)]),
        "f32": lambda cursor: pa.array(cursor.words(cursor.move(4), "<f4")),
        "f64": lambda cursor: pa.array(cursor.words(cursor.move(8), "<f8")),
        "bool": _read_bools,
        "char": lambda cursor: _texts(cursor, _CHAR_BYTES[cursor.raw[cursor.at]], pa.string()),
        "string": lambda cursor: _texts(cursor, _read_sizes(cursor), pa.string()),
        "bytes": lambda cursor: _texts(cursor, _read_sizes(cursor), pa.binary()),
        "unit": lambda cursor: pa.nulls(len(cursor.at)),
    }
    return readers.get(name) or _number_reader(name)


def _number_reader(name: str) -> _Reader:
    kind = _PRIMITIVES[name]
    bits = kind.bit_width
    if name.startswith("u"):
        return lambda cursor: pa.array(_varints(cursor, bits).astype(f"<u{bits // 8}", copy=False))

    def read(cursor: _Cursor) -> pa.Array:
        words = _varints(cursor, bits)
        signed = ((words >> np.uint64(1)) ^ -(words & np.uint64(1))).view(np.int64)
        return pa.array(signed.astype(f"<i{bits // 8}", copy=False))

    return read


def _read_bools(cursor: _Cursor) -> pa.Array:
    bits = cursor.raw[cursor.move(1)]
    cursor.check(bits <= 1)
    return pa.array(bits.view(np.bool_))


def _time_reader(name: str) -> _Reader:
    kind = _TIMES[name]

    def read(cursor: _Cursor) -> pa.Array:
        seconds, nanos = _varints(cursor, 64), _varints(cursor, 32)
        # Checked exactly only for late times: a division costs more than everything else.
        close = seconds.max(initial=0) >= _CLOSE_SECONDS
        if close and (seconds > (_MAX_NANOS - nanos) // _NANOS).any():
            raise InputError(
                f"a {name} is too late or too long for a column of nanoseconds",
                next_step="decode these values one by one",
            )
        return pa.array((seconds * _NANOS + nanos).view(np.int64)).view(kind)

    return read


def _option_reader(item: Type) -> _Reader:
    read_item, kind = _reader(item), column_type(item)

    def read(cursor: _Cursor) -> pa.Array:
        tags = cursor.raw[cursor.move(1)]
        cursor.check(tags <= 1)
        present = tags.view(np.bool_)
        if present.all():
            return read_item(cursor)
        some = cursor.some(present)
        items = read_item(some) if len(some.at) else pa.array([], kind)
        cursor.at[present] = some.at
        return items.take(pa.array(np.cumsum(present) - 1, mask=~present))

    return read


def _struct_reader(described: TupleOf | StructOf) -> _Reader:
    fields = _fields(described)
    kind = _struct_type(fields)
    assert kind is not None
    readers = [_reader(item) for _, item in fields]

    def read(cursor: _Cursor) -> pa.Array:
        if not readers:
            return pa.Array.from_buffers(kind, len(cursor.at), [None])
        return pa.StructArray.from_arrays([reader(cursor) for reader in readers], fields=list(kind))

    return read


def _enum_reader(described: EnumOf) -> _Reader:
    names = pa.array([variant.name for variant in described.variants])

    def read(cursor: _Cursor) -> pa.Array:
        places = _varints(cursor, 32)
        cursor.check(places < len(names))
        return pa.DictionaryArray.from_arrays(pa.array(places.astype(np.int32)), names)

    return read


# --- numbers and texts ---------------------------------------------------------------------------


def _tables(bits: int) -> tuple[npt.NDArray[np.uint8], _Words, _Words]:
    """By first byte: how many bytes follow, the mask of their bits, and the byte's own value."""
    sizes = np.zeros(256, dtype=np.uint8)
    masks = np.zeros(256, dtype=np.uint64)
    small = np.arange(256, dtype=np.uint64)
    small[251:] = 0
    # A first byte that no number of this width has is marked by an impossible size.
    sizes[251:] = 255
    for first, size in ((251, 2), (252, 4), (253, 8)):
        if size * 8 <= bits:
            sizes[first], masks[first] = size, 2 ** (8 * size) - 1
    return sizes, masks, small


_WORDS = {2: "<u2", 4: "<u4", 8: "<u8"}
_BY_BITS = {bits: _tables(bits) for bits in (16, 32, 64)}
_FIRST_BYTES = np.arange(256)
_CHAR_BYTES = np.where(
    _FIRST_BYTES < 0x80, 1, np.where(_FIRST_BYTES < 0xE0, 2, np.where(_FIRST_BYTES < 0xF0, 3, 4))
)


def _varints(cursor: _Cursor, bits: int) -> _Words:
    begins = cursor.move(1)
    first = cursor.raw[begins]
    if first.max(initial=0) < 251:
        return first.astype(np.uint64)
    sizes, masks, small = _BY_BITS[bits]
    size = int(sizes[first[0]])
    if size in _WORDS and (first == first[0]).all():
        # Numbers of equal width, such as the seconds of a time: no lookup per row.
        return cursor.words(cursor.move(size), _WORDS[size]).astype(np.uint64, copy=False)
    more = sizes[first]
    cursor.check(more != 255)
    words: _Words = cursor.words(begins + 1, "<u8") & masks[first]
    words |= small[first]
    cursor.move(more)
    return words


def _read_sizes(cursor: _Cursor) -> _Rows:
    sizes = _varints(cursor, 64)
    # Compared as unsigned numbers: a length of 2^64 - 1 must not become -1.
    cursor.check(sizes <= (cursor.ends - cursor.at).view(np.uint64))
    return sizes.view(np.int64)


def _texts(cursor: _Cursor, sizes: npt.NDArray[Any], kind: pa.DataType) -> pa.Array:
    begins = cursor.move(sizes)
    if not len(begins):
        return pa.array([], kind)
    # The bytes between two texts form a text as well, which `take` then drops.
    bounds = np.stack([begins, cursor.at], axis=1).astype(np.int32).ravel()
    count = len(bounds) - 1
    all_of_them = pa.Array.from_buffers(
        pa.binary(), count, [None, pa.py_buffer(bounds), pa.py_buffer(cursor.raw)]
    )
    return all_of_them.take(pa.array(np.arange(0, count, 2))).cast(kind)
