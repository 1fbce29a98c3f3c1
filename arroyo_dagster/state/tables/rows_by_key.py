"""Rows in replay order with an index by storage key: a change costs what it changes.

Rows lie in chunks, each with the numbers of its rows. Small chunks are merged as they come, and
rows that were removed are left out then, so that each row is copied a few times at most.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.state.tables.live_rows import NANOS_PER_MICRO, LiveRows, RowForm, Selection

_Numbers = npt.NDArray[np.int64]
_Key = tuple[object, ...]
_NEVER = 2**63 - 1


@dataclass(slots=True)
class _RowChunk:
    """Neighbouring rows.

    Attributes:
        numbers: ascending; a row keeps its number.
        alive: which of the rows are not removed.
        by_age: the rows in order of event time, and these times, when they were needed.
        expired: how many of the oldest rows have expired.
    """

    numbers: _Numbers
    rows: pa.Table
    alive: npt.NDArray[np.bool_]
    live: int
    by_age: tuple[_Numbers, _Numbers] | None = None
    expired: int = 0

    def kept(self) -> tuple[_Numbers, pa.Table]:
        """Return the rows that are not removed, and their numbers."""
        if self.live == len(self.numbers):
            return self.numbers, self.rows
        return self.numbers[self.alive], self.rows.filter(pa.array(self.alive))

    def without_removed(self) -> _RowChunk:
        """Return a chunk of the rows that are not removed."""
        numbers, rows = self.kept()
        return _RowChunk(numbers, rows.combine_chunks(), np.ones(len(numbers), bool), len(numbers))


class RowsByKey(LiveRows):
    """Rows as `LiveRows`, whose storage key has no nested column, with lookups by key."""

    def __init__(self, form: RowForm) -> None:
        super().__init__(form)
        self._chunks: list[_RowChunk] = []
        self._next = 0
        self._live = 0
        self._whole: pa.Table | None = None
        self._index: dict[_Key, list[int]] | None = None

    def __len__(self) -> int:
        return self._live

    def rows(self) -> pa.Table:
        """Return all rows; after a change, all are put together again."""
        if self._whole is None:
            parts = [chunk.kept()[1] for chunk in self._chunks]
            self._whole = pa.concat_tables([self._form.schema.empty_table(), *parts])
        return self._whole

    # ---- adding ----------------------------------------------------------------------------------

    def append(self, *rows: pa.Table) -> None:
        """Append rows."""
        for part in rows:
            if part.num_rows:
                count = part.num_rows
                numbers = np.arange(self._next, self._next + count)
                self._next += count
                self._live += count
                self._whole = None
                if self._index is not None:
                    _add(self._index, self._keys_of(part), numbers)
                self._chunks.append(_RowChunk(numbers, part, np.ones(count, bool), count))
                chunks = self._chunks
                while len(chunks) > 1 and chunks[-2].live <= 2 * chunks[-1].live:
                    (first, older), (second, newer) = (chunk.kept() for chunk in chunks[-2:])
                    order = np.concatenate([first, second])
                    merged = pa.concat_tables([older, newer]).combine_chunks()
                    chunks[-2:] = [_RowChunk(order, merged, np.ones(len(order), bool), len(order))]

    # ---- by key ----------------------------------------------------------------------------------

    def select(self, scalars: Sequence[pa.Scalar]) -> Selection:
        """Return the rows of a storage key, and no others."""
        places = self._by_key().get(tuple(map(plain, scalars)), [])
        numbers = np.array(places, np.int64)
        everyone = pa.chunked_array([pa.repeat(pa.scalar(True), len(numbers))])
        return Selection(self._take(numbers), everyone, numbers)

    def _take(self, numbers: _Numbers) -> pa.Table:
        """Return rows by their numbers, which ascend."""
        parts = [self._form.schema.empty_table()]
        for chunk, numbers_in in self._in_chunks(numbers):
            parts.append(chunk.rows.take(pa.array(numbers_in)))
        return pa.concat_tables(parts)

    def _in_chunks(self, numbers: _Numbers) -> Iterable[tuple[_RowChunk, _Numbers]]:
        """Yield each chunk with some of these rows, and their places in it."""
        firsts = [int(chunk.numbers[0]) for chunk in self._chunks]
        of = np.searchsorted(firsts, numbers, side="right") - 1
        for place in np.unique(of).tolist():
            chunk = self._chunks[place]
            yield chunk, np.searchsorted(chunk.numbers, numbers[of == place])

    def _by_key(self) -> dict[_Key, list[int]]:
        if self._index is None:
            self._index = {}
            for chunk in self._chunks:
                numbers, rows = chunk.kept()
                _add(self._index, self._keys_of(rows), numbers)
        return self._index

    def _keys_of(self, rows: pa.Table) -> list[_Key]:
        columns = [plain_column(rows.column(index)) for index in self._form.key_indices]
        return list(zip(*columns, strict=True)) if columns else [()] * rows.num_rows

    # ---- removing --------------------------------------------------------------------------------

    def remove(self, mask: pa.ChunkedArray) -> None:
        """Remove the rows where `mask`, one value for each of `rows()`, is true."""
        removed = mask.to_numpy()
        numbers = np.concatenate([[], *(chunk.kept()[0] for chunk in self._chunks)])
        self._remove(numbers[removed].astype(np.int64))

    def remove_selected(self, selection: Selection, mask: pa.ChunkedArray) -> None:
        """Remove the selected rows where `mask` is true."""
        assert selection.numbers is not None
        self._remove(selection.numbers[mask.to_numpy()])

    def remove_keys(self, keys: pa.Table) -> None:
        """Remove the rows that have the storage key of one of `keys`, rows of the same form."""
        index = self._by_key()
        removed = [number for key in self._keys_of(keys) for number in index.pop(key, ())]
        self._drop(np.sort(np.array(removed, np.int64)))

    def evict(self, cutoff_micros: int) -> None:
        """Drop the rows older than the cutoff; a row at the cutoff is kept."""
        if cutoff_micros <= 0:
            return
        expired = [self._expired(chunk, cutoff_micros * NANOS_PER_MICRO) for chunk in self._chunks]
        self._remove(np.concatenate([np.zeros(0, np.int64), *expired]))

    def _expired(self, chunk: _RowChunk, cutoff_nanos: int) -> _Numbers:
        """Return the rows of a chunk that have expired since the last time."""
        if chunk.by_age is None:
            times = chunk.rows.column(self._form.timestamp_index).cast(pa.int64())
            nanos = pc.fill_null(times, _NEVER).to_numpy()  # a null never expires
            order = np.argsort(nanos, kind="stable")
            chunk.by_age = (order, nanos[order])
        order, times_nanos = chunk.by_age
        first, chunk.expired = chunk.expired, int(np.searchsorted(times_nanos, cutoff_nanos))
        places = order[first : chunk.expired]
        return np.sort(chunk.numbers[places[chunk.alive[places]]])

    def _remove(self, numbers: _Numbers) -> None:
        """Remove rows by their numbers, which ascend."""
        if self._index is not None and len(numbers):
            for key, number in zip(self._keys_of(self._take(numbers)), numbers, strict=True):
                rows = self._index[key]
                del rows[bisect.bisect_left(rows, number)]
                if not rows:
                    del self._index[key]
        self._drop(numbers)

    def _drop(self, numbers: _Numbers) -> None:
        if not len(numbers):
            return
        self._whole = None
        self._live -= len(numbers)
        sparse = False
        for chunk, places in self._in_chunks(numbers):
            chunk.alive[places] = False
            chunk.live -= len(places)
            sparse = sparse or 2 * chunk.live < len(chunk.numbers)
        if sparse:
            self._chunks = [
                chunk if 2 * chunk.live >= len(chunk.numbers) else chunk.without_removed()
                for chunk in self._chunks
                if chunk.live
            ]


def _add(index: dict[_Key, list[int]], keys: Sequence[_Key], numbers: _Numbers) -> None:
    for key, number in zip(keys, numbers.tolist(), strict=True):
        index.setdefault(key, []).append(number)


def plain_column(column: pa.ChunkedArray) -> list[object]:
    """Return every value as `plain` does."""
    kind = column.type
    if pa.types.is_temporal(kind) and not pa.types.is_interval(kind):
        column = column.cast(pa.int64() if kind.bit_width == 64 else pa.int32())
    return column.to_pylist()  # type: ignore[no-any-return]


def plain(scalar: pa.Scalar) -> object:
    """Return a value as Python compares it; times as whole numbers of their unit."""
    if not scalar.is_valid:
        return None
    return scalar.value if pa.types.is_temporal(scalar.type) else scalar.as_py()
