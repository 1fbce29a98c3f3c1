"""Columns of cells of a fixed size, one cell for each slot: read and written at any slots at once.

A cell of a number is the number. A cell of a text is that of Arrow's view types: its length and up
to 12 bytes, or where the bytes are. Writing a cell never moves another one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.codec.bincode.arrow_buffers import valid_rows

# ---- text chunks ---------------------------------------------------------------------------------
# The bytes of long texts, appended to chunks. A chunk that is mostly unused is written again.

INLINE_BYTES = 12
"""Texts up to this size are in their cells."""
_CHUNK_BYTES = 1 << 24
_FIRST_BYTES = 1 << 12
_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)


@dataclass(slots=True)
class _TextChunk:
    """A chunk: its bytes, how many are used and still needed, and whose they are."""

    data: npt.NDArray[np.uint8]
    used: int = 0
    live: int = 0
    owners: list[npt.NDArray[np.int32]] = field(default_factory=list)
    places: list[Words] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SparseChunk:
    """A mostly unused chunk: the slots and places of all texts that were ever added to it."""

    number: int
    slots: npt.NDArray[np.int32]
    places: Words


class TextChunks:
    """Bytes of long texts. A text's place is the number of its chunk, then its offset << 32."""

    def __init__(self) -> None:
        self._chunks: list[_TextChunk] = []
        self._free: list[int] = []
        self._current = -1
        self._sparse: set[int] = set()
        self.buffers: list[pa.Buffer] = []
        """The chunks, as the data buffers of an Arrow view array."""

    def add(self, slots: Slots, texts: pa.Array) -> Words:
        """Append texts (large binary, from the beginning of its buffers); return their places."""
        _, offsets, data = texts.buffers()
        ends = np.frombuffer(offsets, np.int64, len(texts) + 1, texts.offset * 8)
        raw = np.frombuffer(data, np.uint8)
        places = np.zeros(len(texts), np.uint64)
        first = 0
        while first < len(texts):
            # As many as fit into a chunk, and at least one.
            last = int(np.searchsorted(ends, ends[first] + _CHUNK_BYTES, side="right")) - 1
            last = min(max(last, first + 1), len(texts))
            part = slice(first, last)
            places[part] = self._append(
                slots[part], ends[first : last + 1], raw[ends[first] : ends[last]]
            )
            first = last
        return places

    def _append(
        self, slots: Slots, ends: npt.NDArray[np.int64], raw: npt.NDArray[np.uint8]
    ) -> Words:
        number = self._room(len(raw))
        chunk = self._chunks[number]
        start = chunk.used
        chunk.data[start : start + len(raw)] = raw
        chunk.used += len(raw)
        chunk.live += len(raw)
        offsets = (ends[:-1] - ends[0] + start).astype(np.uint64)
        places: Words = np.uint64(number) | (offsets << _HALF)
        chunk.owners.append(slots.astype(np.int32))
        chunk.places.append(places)
        return places

    def _room(self, size: int) -> int:
        """Return the number of a chunk with room for `size` bytes."""
        if self._current >= 0:
            chunk = self._chunks[self._current]
            if chunk.used + size <= len(chunk.data):
                return self._current
            if chunk.used + size <= _CHUNK_BYTES:
                self._replace(self._current, max(2 * len(chunk.data), chunk.used + size))
                return self._current
        number = self._free.pop() if self._free else len(self._chunks)
        if number == len(self._chunks):
            self._chunks.append(_TextChunk(np.zeros(0, np.uint8)))
            self.buffers.append(pa.py_buffer(b""))
        first = _FIRST_BYTES if self._current < 0 else _CHUNK_BYTES
        full, self._current = self._current, number
        self._replace(number, max(first, size))
        self._consider(full)
        return number

    def _replace(self, number: int, size: int) -> None:
        chunk = self._chunks[number]
        data = np.empty(size, np.uint8)
        data[: chunk.used] = chunk.data[: chunk.used]
        chunk.data = data
        self.buffers[number] = pa.py_buffer(data)

    def release(self, cells: Words) -> None:
        """Give back the bytes of some texts, by their cells."""
        numbers = (cells[:, 1] & _LOW).astype(np.int64)
        sizes = np.bincount(numbers, (cells[:, 0] & _LOW).astype(np.float64))
        for number in np.flatnonzero(sizes).tolist():
            self._chunks[number].live -= int(sizes[number])
            self._consider(number)

    def _consider(self, number: int) -> None:
        if number < 0 or number == self._current:
            return
        chunk = self._chunks[number]
        if chunk.used and 2 * chunk.live < chunk.used:
            self._sparse.add(number)

    def take_sparse(self) -> list[SparseChunk]:
        """Return the chunks that are mostly unused, once."""
        numbers, self._sparse = sorted(self._sparse), set()
        return [
            SparseChunk(
                number,
                np.concatenate(self._chunks[number].owners),
                np.concatenate(self._chunks[number].places),
            )
            for number in numbers
        ]

    def drop(self, sparse: SparseChunk) -> None:
        """Drop a chunk, after what was still needed of it was added again."""
        self._chunks[sparse.number] = _TextChunk(np.zeros(0, np.uint8))
        self.buffers[sparse.number] = pa.py_buffer(b"")
        self._free.append(sparse.number)


# ---- columns of cells ----------------------------------------------------------------------------

Slots: TypeAlias = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]
Cells = npt.NDArray[Any]

_WORDS: dict[int, Any] = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_BITS_OF_LENGTH = np.uint64(0xFFFFFFFF)
_GROWTH = 1.5


class CellColumn(Protocol):
    """The cells of one column, by slot."""

    kind: pa.DataType

    def grow(self, slots: int) -> None:
        """Make room for this many slots."""

    def put(self, slots: Slots, values: pa.Array) -> None:
        """Write one value to each slot; the slots differ from each other."""

    def take(self, slots: Slots) -> pa.Array:
        """Return the values at some slots; at a cleared slot, null or the empty value."""

    def clear(self, slots: Slots) -> None:
        """Empty some slots."""

    def sizes(self, slots: Slots) -> Slots:
        """Return the bytes of the text in each slot; 0 if cells hold no texts."""

    def cells_of(self, values: pa.Array) -> Cells:
        """Return the values as cells; those of nulls are arbitrary."""

    def words(self, values: pa.Array, cells: Cells) -> Words:
        """Return one word for each value, equal for equal values.

        Args:
            values: without nulls.
            cells: as `cells_of` returns them.
        """

    def equal(self, slots: Slots, values: pa.Array, cells: Cells, rows: Slots) -> Mask:
        """Return which slots hold the values at `rows`, bit by bit; arguments as of `words`."""


def column_of(field: pa.Field) -> CellColumn:
    """Return an empty column of the type and nullability of a field.

    Raises:
        InputError: its type has no cells of a fixed size.
    """
    kind, types = field.type, pa.types
    if _is_text(kind):
        return _TextColumn(kind, nullable=field.nullable)
    is_fixed = types.is_boolean(kind) or types.is_primitive(kind) or types.is_decimal(kind)
    if not is_fixed or types.is_null(kind):
        raise InputError(
            f"a column of type {kind} cannot be part of keyed state",
            column=field.name,
            next_step="use numbers, texts, bytes, truth values, times or decimals; a list or a map "
            "as the whole value; a column for each field of a struct",
        )
    return _FixedColumn(kind, nullable=field.nullable)


def _is_text(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_fixed_size_binary(kind)
    )


def can_be_key(kind: pa.DataType) -> bool:
    """Whether two values of a type are equal exactly if their bits are, and a delete names them."""
    types = pa.types
    if types.is_interval(kind):
        return False
    return (
        _is_text(kind)
        or types.is_integer(kind)
        or types.is_boolean(kind)
        or types.is_temporal(kind)
    )


def grown(cells: npt.NDArray[Any], slots: int) -> npt.NDArray[Any]:
    """Return the same cells with room for at least `slots`; new cells are 0."""
    if slots <= len(cells):
        return cells
    larger = np.zeros((max(slots, int(len(cells) * _GROWTH), 64), *cells.shape[1:]), cells.dtype)
    larger[: len(cells)] = cells
    return larger


class _Validity:
    """Which slots of a nullable column hold a value."""

    def __init__(self, nullable: bool) -> None:
        self._valid = np.zeros(0, np.uint8) if nullable else None

    def grow(self, slots: int) -> None:
        if self._valid is not None:
            self._valid = grown(self._valid, slots)

    def put(self, slots: Slots, values: pa.Array) -> None:
        if self._valid is not None:
            valid = valid_rows(values)
            self._valid[slots] = 1 if valid is None else valid

    def clear(self, slots: Slots) -> None:
        if self._valid is not None:
            self._valid[slots] = 0

    def bitmap(self, slots: Slots) -> pa.Buffer | None:
        if self._valid is None:
            return None
        valid = self._valid[slots]
        return None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))


class _FixedColumn:
    """Numbers, truth values, times and decimals."""

    def __init__(self, kind: pa.DataType, *, nullable: bool) -> None:
        self.kind = kind
        self._boolean = pa.types.is_boolean(kind)
        bits = 8 if self._boolean else kind.bit_width
        shape = (0,) if bits <= 64 else (0, bits // 64)
        self._cells: npt.NDArray[Any] = np.zeros(shape, _WORDS[min(bits, 64)])
        self._validity = _Validity(nullable)

    def grow(self, slots: int) -> None:
        self._cells = grown(self._cells, slots)
        self._validity.grow(slots)

    def put(self, slots: Slots, values: pa.Array) -> None:
        self._cells[slots] = self.cells_of(values)
        self._validity.put(slots, values)

    def cells_of(self, values: pa.Array) -> Cells:
        if self._boolean:
            values = values.cast(pa.uint8())
        shape = (len(values), *self._cells.shape[1:])
        buffer = values.buffers()[1]
        if buffer is None or not len(values):
            return np.zeros(shape, self._cells.dtype)
        width = self._cells.dtype.itemsize * int(np.prod(shape[1:]))
        count = int(np.prod(shape))
        return np.frombuffer(buffer, self._cells.dtype, count, values.offset * width).reshape(shape)

    def words(self, values: pa.Array, cells: Cells) -> Words:
        return cells.astype(np.uint64)

    def take(self, slots: Slots) -> pa.Array:
        cells = self._cells[slots]
        kind = pa.uint8() if self._boolean else self.kind
        bitmap = self._validity.bitmap(slots)
        array = pa.Array.from_buffers(kind, len(slots), [bitmap, pa.py_buffer(cells)])
        return array.cast(self.kind) if self._boolean else array

    def clear(self, slots: Slots) -> None:
        self._cells[slots] = 0
        self._validity.clear(slots)

    def sizes(self, slots: Slots) -> Slots:
        return np.zeros(len(slots), np.int64)

    def equal(self, slots: Slots, values: pa.Array, cells: Cells, rows: Slots) -> Mask:
        same: Mask = self._cells[slots] == cells[rows]
        return same


class _TextColumn:
    """Texts and bytes: short ones in their cells, longer ones in chunks."""

    def __init__(self, kind: pa.DataType, *, nullable: bool) -> None:
        self.kind = kind
        texts = pa.types.is_string(kind) or pa.types.is_large_string(kind)
        self._view = pa.string_view() if texts else pa.binary_view()
        self._cells: Words = np.zeros((0, 2), np.uint64)
        self._chunks = TextChunks()
        self._validity = _Validity(nullable)

    def grow(self, slots: int) -> None:
        self._cells = grown(self._cells, slots)
        self._validity.grow(slots)

    def put(self, slots: Slots, values: pa.Array) -> None:
        self._release(slots)
        cells = self.cells_of(values)
        long = np.flatnonzero(_lengths(cells) > INLINE_BYTES)
        if len(long):
            cells = cells.copy()
            cells[long, 1] = self._chunks.add(slots[long], _bytes_of(values, long))
        self._cells[slots] = cells
        self._validity.put(slots, values)
        self._clean()

    def cells_of(self, values: pa.Array) -> Words:
        # Of long ones, the second words say where they are in the array.
        plain = values.cast(pa.binary()) if pa.types.is_fixed_size_binary(self.kind) else values
        seen = plain.cast(self._view)
        buffer = seen.buffers()[1]
        if not len(seen) or buffer is None:
            return np.zeros((len(seen), 2), np.uint64)
        cells = np.frombuffer(buffer, np.uint64, 2 * len(seen), 16 * seen.offset).reshape(-1, 2)
        valid = valid_rows(values) if values.null_count else None
        return cells if valid is None else np.where(valid[:, None], cells, np.uint64(0))

    def words(self, values: pa.Array, cells: Cells) -> Words:
        second = cells[:, 1]
        long = np.flatnonzero(_lengths(cells) > INLINE_BYTES)
        if len(long):
            import polars as pl  # takes a tenth of a second, which short keys avoid

            series = pl.from_arrow(_bytes_of(values, long))
            assert isinstance(series, pl.Series)
            second = second.copy()
            second[long] = series.hash().to_numpy()
        words: Words = cells[:, 0] ^ (second * np.uint64(0xD6E8FEB86659FD93))
        return words

    def take(self, slots: Slots) -> pa.Array:
        buffers = [self._validity.bitmap(slots), pa.py_buffer(self._cells[slots])]
        seen = pa.Array.from_buffers(self._view, len(slots), [*buffers, *self._chunks.buffers])
        if pa.types.is_fixed_size_binary(self.kind):
            return seen.cast(pa.binary()).cast(self.kind)
        return seen.cast(self.kind)

    def clear(self, slots: Slots) -> None:
        self._release(slots)
        self._cells[slots] = 0
        self._validity.clear(slots)
        self._clean()

    def sizes(self, slots: Slots) -> Slots:
        return _lengths(self._cells[slots]).astype(np.int64)

    def equal(self, slots: Slots, values: pa.Array, cells: Cells, rows: Slots) -> Mask:
        mine, theirs = self._cells[slots], cells[rows]
        same: Mask = mine[:, 0] == theirs[:, 0]
        short = _lengths(mine) <= INLINE_BYTES
        same &= ~short | (mine[:, 1] == theirs[:, 1])
        long = np.flatnonzero(same & ~short)
        if len(long):
            equal = pc.equal(self.take(slots[long]), values.take(pa.array(rows[long])))
            same[long] = equal.to_numpy(zero_copy_only=False)
        return same

    def _release(self, slots: Slots) -> None:
        cells = self._cells[slots]
        long = _lengths(cells) > INLINE_BYTES
        if long.any():
            self._chunks.release(cells[long])

    def _clean(self) -> None:
        """Move what is left of chunks of which most is unused."""
        for sparse in self._chunks.take_sparse():
            slots, first = np.unique(sparse.slots[::-1], return_index=True)
            cells, places = self._cells[slots], sparse.places[::-1][first]
            kept = (cells[:, 1] == places) & (_lengths(cells) > INLINE_BYTES)
            owners = slots[kept].astype(np.int64)
            if len(owners):
                buffers = [None, pa.py_buffer(self._cells[owners]), *self._chunks.buffers]
                seen = pa.Array.from_buffers(pa.binary_view(), len(owners), buffers)
                self._cells[owners, 1] = self._chunks.add(owners, seen.cast(pa.large_binary()))
            self._chunks.drop(sparse)


def _lengths(cells: Words) -> Words:
    lengths: Words = cells[:, 0] & _BITS_OF_LENGTH
    return lengths


def _bytes_of(values: pa.Array, rows: Slots) -> pa.Array:
    """Return some values as large binary, from the beginning of their buffers."""
    selected = values.take(pa.array(rows))
    if pa.types.is_fixed_size_binary(selected.type):
        selected = selected.cast(pa.binary())
    return selected.cast(pa.large_binary())
