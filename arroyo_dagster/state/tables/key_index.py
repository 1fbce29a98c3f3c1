"""Index of rows by key, and selection of the current row of each key: by hashes, but exact.

The hashes are valid in this process only and are never stored. They only narrow the search: keys
are compared themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.state.tables.grouping import group_codes

Column: TypeAlias = "pa.Array | pa.ChunkedArray"
RowPlaces = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

_TEXTS = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())
_FIRST_BITS = 22
_FEW = 10_000
"""Rows that are compared without further threads."""
_MIX = np.uint64(0x9E3779B97F4A7C15)


def can_index(kinds: Sequence[pa.DataType]) -> bool:
    """Whether keys of these column types can be indexed: texts, bytes and whole numbers."""
    return bool(kinds) and all(kind in _TEXTS or pa.types.is_integer(kind) for kind in kinds)


def hashes_of(columns: Sequence[Column]) -> Hashes:
    """Return a hash of each row; rows that are equal in all columns have the same hash."""
    import polars as pl  # takes a tenth of a second, which commands without such a table avoid

    hashes: Hashes | None = None
    for column in columns:
        series = pl.from_arrow(column)
        assert isinstance(series, pl.Series)
        mine = series.hash().to_numpy()
        hashes = mine if hashes is None else hashes * _MIX + mine
    assert hashes is not None
    return hashes


class KeySet:
    """A set of keys that holds some others as well: a hash is all that it has of each.

    Args:
        hashes: as `hashes_of` returns them.
    """

    def __init__(self, hashes: Iterable[Hashes]) -> None:
        self._hashes = np.unique(np.concatenate([np.zeros(0, np.uint64), *hashes]))
        # Most of the keys that are not in a small set have no hash with the same first bits there.
        self._begins = np.zeros(1 << _FIRST_BITS, bool)
        self._begins[self._first(self._hashes)] = True

    def __len__(self) -> int:
        return len(self._hashes)

    def contains(self, columns: Sequence[Column]) -> npt.NDArray[np.bool_]:
        """Return which rows may have a key of the set; false only for those that have none."""
        hashes = hashes_of(columns)
        mask = self._begins[self._first(hashes)]
        near = np.flatnonzero(mask)
        if len(near):
            near_hashes = hashes[near]
            places = np.searchsorted(self._hashes, near_hashes)
            mask[near] = self._hashes[np.minimum(places, len(self._hashes) - 1)] == near_hashes
        return mask

    @staticmethod
    def _first(hashes: Hashes) -> Hashes:
        return hashes >> np.uint64(64 - _FIRST_BITS)


class KeyIndex:
    """The rows of some columns by their keys.

    Args:
        columns: of the key, of types that `can_index` accepts, all of one length.
        hashes: as `hashes_of` returns them.
        newest_first: the rows in order of precedence: the first row of a key is its current one.
    """

    def __init__(self, columns: Sequence[Column], hashes: Hashes, newest_first: RowPlaces) -> None:
        self._columns = columns
        self._order = newest_first
        # One word per row: as many bits of the hash as fit, then the row's place in the order.
        # Sorting words is several times as fast as sorting places by their hashes.
        self._bits = np.uint64(max(1, len(hashes)).bit_length())
        places = np.arange(len(hashes), dtype=np.uint64)
        self._words: Hashes = self._cut(hashes[newest_first]) | places
        self._words.sort()

    def _cut(self, hashes: Hashes) -> Hashes:
        return hashes >> self._bits << self._bits

    def _rank_of(self, words: Hashes) -> RowPlaces:
        within = (np.uint64(1) << self._bits) - np.uint64(1)
        return (words & within).astype(np.int64)

    def _row_of(self, words: Hashes) -> RowPlaces:
        return self._order[self._rank_of(words)]

    # ---- looking up ------------------------------------------------------------------------------

    def find(self, wanted: Sequence[Column]) -> RowPlaces:
        """Return the current row of each key; -1 where there is none."""
        words, rows = self._words, len(wanted[0])
        current = np.full(rows, -1, np.int64)
        if not len(words) or not rows:
            return current
        hashes = self._cut(hashes_of(wanted))
        ranks = np.searchsorted(words, hashes)
        left = np.arange(rows)
        while len(left):
            ranks = np.minimum(ranks, len(words) - 1)
            same_hash = self._cut(words[ranks]) == hashes[left]
            ranks, left = ranks[same_hash], left[same_hash]
            places = self._row_of(words[ranks])
            same = self._equal(places, [column.take(pa.array(left)) for column in wanted])
            current[left[same]] = places[same]
            # Another key has the same hash: the wanted one may follow it.
            ranks, left = ranks[~same] + 1, left[~same]
            inside = ranks < len(words)
            ranks, left = ranks[inside], left[inside]
        return current

    def _equal(self, places: RowPlaces, wanted: Sequence[Column]) -> npt.NDArray[np.bool_]:
        rows = pa.array(places)
        return _all_equal([column.take(rows) for column in self._columns], wanted)

    # ---- current rows ----------------------------------------------------------------------------

    def newest(self) -> RowPlaces:
        """Return the current row of each key, ascending."""
        words = self._words
        cut = words >> self._bits
        begins = np.ones(len(words), bool)
        begins[1:] = cut[1:] != cut[:-1]
        rows = self._row_of(words)
        is_newest = np.zeros(len(words), bool)
        is_newest[rows[begins]] = True
        followers = np.flatnonzero(~begins)
        strangers = followers[~self._pairs_equal(rows[followers - 1], rows[followers])]
        if len(strangers):
            # Several keys share all hash bits that fit.
            groups = np.cumsum(begins)
            mixed = np.flatnonzero(np.isin(groups, groups[strangers]))
            is_newest[rows[mixed]] = False
            is_newest[self._firsts(rows[mixed], mixed)] = True
        return np.flatnonzero(is_newest)

    def _pairs_equal(self, first: RowPlaces, second: RowPlaces) -> npt.NDArray[np.bool_]:
        def taken(at: RowPlaces) -> list[Column]:
            return [column.take(pa.array(at)) for column in self._columns]

        if len(first) < _FEW:  # threads would take longer to start
            return _all_equal(taken(first), taken(second))
        with ThreadPoolExecutor(2) as pool:
            return _all_equal(*pool.map(taken, (first, second)))

    def _firsts(self, rows: RowPlaces, words: RowPlaces) -> RowPlaces:
        """Return the current row of each key among some rows, which are at these words."""
        by_rank = np.argsort(self._rank_of(self._words[words]))
        rows = rows[by_rank]
        codes = group_codes([column.take(pa.array(rows)) for column in self._columns], len(rows))
        return rows[np.unique(codes, return_index=True)[1]]


def _all_equal(first: Sequence[Column], second: Sequence[Column]) -> npt.NDArray[np.bool_]:
    """Return which rows are equal in all columns; a null equals nothing."""
    same = np.ones(len(first[0]), bool)
    for column, other in zip(first, second, strict=True):
        equal = pc.fill_null(pc.equal(column, other.cast(column.type)), False)
        whole = equal.combine_chunks() if isinstance(equal, pa.ChunkedArray) else equal
        same &= whole.to_numpy(zero_copy_only=False)
    return same
