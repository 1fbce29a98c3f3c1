"""A digest of rows in their order, for rewrites that move rows and keep their order.

Each column of a chunk of rows is hashed as bytes, with Python's hash of bytes: SipHash with a key
of the process. So digests are compared within one process only.

Source: docs/decisions/encodings-and-proof.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arroyo_dagster.state.codec.digest import is_list, is_text, list_elements, value_codes
from arroyo_dagster.state.model.compaction import RowsDigest

CHUNK_ROWS = 1 << 13
"""Rows are hashed together until there are so many."""


class SequenceDigest:
    """Digests a sequence of rows: the same values, bit by bit, in the same order.

    Args:
        sequence: the number of the sequence among others of the same rewrite.
        texts: the columns of text that are hashed value by value, so that dictionaries are hashed
            once per value. Others are hashed as bytes, and dictionaries of them are decoded first.
        chunks: where the chunks of the other digest end, as returned by `chunk_rows`; None = this
            is the first of both.
    """

    def __init__(
        self, sequence: int, texts: frozenset[int], chunks: Sequence[int] | None = None
    ) -> None:
        self._sequence = sequence
        self.texts = texts
        self._planned = None if chunks is None else iter(chunks)
        self._next_rows = self._planned_rows()
        self._waiting: list[pa.Table] = []
        self._waiting_rows = 0
        self._total = RowsDigest()
        self.chunk_rows: list[int] = []

    def add(self, rows: pa.Table) -> None:
        """Add rows behind those added before; columns of text may be dictionaries."""
        while rows.num_rows:
            part = rows if self._planned is None else rows.slice(0, self._missing_rows)
            rows = rows.slice(part.num_rows)
            self._waiting.append(part)
            self._waiting_rows += part.num_rows
            if self._waiting_rows >= self._next_rows:
                self._close()

    def finish(self) -> RowsDigest:
        """Return the digest of all rows."""
        if self._waiting:
            self._close()
        return self._total

    @property
    def _missing_rows(self) -> int:
        return self._next_rows - self._waiting_rows

    def _planned_rows(self) -> int:
        return CHUNK_ROWS if self._planned is None else next(self._planned, CHUNK_ROWS)

    def _close(self) -> None:
        hashes = [self._sequence, len(self.chunk_rows), self._waiting_rows]
        for index in range(self._waiting[0].num_columns):
            chunks = [chunk for rows in self._waiting for chunk in rows.column(index).chunks]
            hashes += _hashes(chunks, by_value=index in self.texts)
        self._total += RowsDigest(self._waiting_rows, _hash(np.array(hashes, np.int64)) % 2**64)
        self.chunk_rows.append(self._waiting_rows)
        self._waiting, self._waiting_rows = [], 0
        self._next_rows = self._planned_rows()


def _hash(data: Any) -> int:
    """Return the hash of a buffer."""
    return hash(memoryview(data).tobytes())  # only bytes have a hash


def _hashes(chunks: Sequence[pa.Array], *, by_value: bool) -> Iterator[int]:
    """Yield what identifies the values of a column."""
    if by_value:
        yield from _hashes_of_codes([_without_views(chunk) for chunk in chunks])
        return
    plain = [_without_views(_plain(chunk)) for chunk in chunks]
    yield from _hashes_of(plain[0] if len(plain) == 1 else pa.concat_arrays(plain))


def _plain(chunk: pa.Array) -> pa.Array:
    if not isinstance(chunk, pa.DictionaryArray):
        return chunk
    return _without_views(chunk.dictionary).take(chunk.indices)


def _without_views(array: pa.Array) -> pa.Array:
    """Return an array whose values are next to each other: Arrow cannot filter views."""
    kind = _storage_type(array.type)
    return array if kind.equals(array.type) else array.cast(kind)


def _storage_type(kind: pa.DataType) -> pa.DataType:
    types = pa.types
    if types.is_string_view(kind):
        return pa.large_string()
    if types.is_binary_view(kind):
        return pa.large_binary()
    if types.is_struct(kind):
        fields = [kind.field(i) for i in range(kind.num_fields)]
        return pa.struct([field.with_type(_storage_type(field.type)) for field in fields])
    if types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_storage_type(kind.value_type)))
    return kind


def _hashes_of_codes(chunks: Sequence[pa.Array]) -> Iterator[int]:
    if any(chunk.null_count for chunk in chunks):
        valid = [chunk.is_valid().to_numpy(zero_copy_only=False) for chunk in chunks]
        yield from _hashes_of_nulls(np.concatenate(valid))
        chunks = [chunk.drop_null() for chunk in chunks]
    else:
        yield 0
    chunks = [chunk for chunk in chunks if len(chunk)]
    codes = [_codes(chunk) for chunk in chunks]
    if codes and all((part == codes[0][0]).all() for part in codes):
        yield _hash(codes[0][:1])  # the same value in all rows
        return
    of_rows = [np.broadcast_to(part, len(chunk)) for part, chunk in zip(codes, chunks, strict=True)]
    yield _hash(np.concatenate([np.zeros(0, np.uint64), *of_rows]))


def _codes(chunk: pa.Array) -> npt.NDArray[np.uint64]:
    """Return the hash of each value; or of one, if all are the same by their dictionary."""
    if not isinstance(chunk, pa.DictionaryArray):
        return value_codes(chunk)
    codes = value_codes(chunk.dictionary)
    return codes if len(codes) == 1 else codes[chunk.indices.to_numpy()]


def _hashes_of_nulls(valid: npt.NDArray[np.bool_]) -> Iterator[int]:
    nulls = np.flatnonzero(~valid)
    yield len(nulls)
    if len(nulls):
        yield _hash(nulls)


def _hashes_of(array: pa.Array) -> Iterator[int]:
    """Yield hashes of the values of an array: where nulls are, then of the other values."""
    array = _without_views(array)
    yield len(array)
    if not array.null_count or pa.types.is_null(array.type):
        yield 0
        yield from _hashes_of_valid(array)
        return
    valid = array.is_valid()
    yield from _hashes_of_nulls(valid.to_numpy(zero_copy_only=False))
    yield from _hashes_of_valid(array.filter(valid))


def _hashes_of_valid(array: pa.Array) -> Iterator[int]:
    kind = array.type
    if isinstance(array, pa.ExtensionArray):
        yield from _hashes_of(array.storage)
    elif pa.types.is_null(kind) or not len(array):
        return
    elif pa.types.is_dictionary(kind):
        yield from _hashes_of(_plain(array))
    elif pa.types.is_struct(kind):
        for index in range(kind.num_fields):
            yield from _hashes_of(array.field(index))
    elif is_list(kind):
        lengths, values = list_elements(array)
        yield _hash(lengths)
        yield from _hashes_of(values)
    elif pa.types.is_boolean(kind):
        yield from _hashes_of_valid(array.cast(pa.uint8()))
    elif is_text(kind):
        yield from _hashes_of_bytes(array)
    else:
        width = kind.bit_width // 8
        yield _hash(array.buffers()[1].slice(array.offset * width, len(array) * width))


def _hashes_of_bytes(array: pa.Array) -> Iterator[int]:
    """Yield the hash of the lengths, then that of the bytes of all values."""
    large = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    width, of_offsets = (8, np.int64) if large else (4, np.int32)
    _, places, data = array.buffers()
    offsets = np.frombuffer(places, of_offsets, len(array) + 1, array.offset * width)
    yield _hash(np.diff(offsets))
    if data is not None:
        yield _hash(data.slice(int(offsets[0]), int(offsets[-1] - offsets[0])))
