"""The bytes of long texts, appended to chunks. A chunk that is mostly unused is written again."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

INLINE_BYTES = 12
"""Texts up to this size are in their cells."""
_CHUNK_BYTES = 1 << 24
_FIRST_BYTES = 1 << 12
_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)

Words = npt.NDArray[np.uint64]
Slots = npt.NDArray[np.int64]


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
