"""Rows by key: each key has a slot, at which its cells are. Removed slots are used again."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arroyo_dagster.engine.keyed.cells import Cells, Mask, Slots, Words, column_of, grown
from arroyo_dagster.state.tables.grouping import group_codes

_SHIFT = np.uint64(32)
_MIX = np.uint64(0xFF51AFD7ED558CCD)


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys to look up: for each column its values and their cells; the code of each row."""

    columns: tuple[pa.Array, ...]
    cells: tuple[Cells, ...]
    codes: Words

    def __len__(self) -> int:
        return len(self.codes)

    def take(self, rows: Slots) -> Keys:
        """Return the keys of some rows."""
        if len(rows) == len(self) and (rows == np.arange(len(rows))).all():
            return self
        places = pa.array(rows)
        return Keys(
            tuple(column.take(places) for column in self.columns),
            tuple(cells[rows] for cells in self.cells),
            self.codes[rows],
        )

    def shared_codes(self) -> Slots:
        """Return the rows whose code is that of another row."""
        if len(self) < 2:
            return np.zeros(0, np.int64)
        order = np.argsort(self.codes, kind="stable")
        ordered = self.codes[order]
        same = ordered[1:] == ordered[:-1]
        if not same.any():
            return np.zeros(0, np.int64)
        among = np.zeros(len(self), bool)
        among[1:] |= same
        among[:-1] |= same
        return np.sort(order[among])

    def groups(self) -> npt.NDArray[np.int64]:
        """Number the keys: equal ones have equal numbers, below the number of rows."""
        numbers = np.arange(len(self))
        shared = self.shared_codes()
        if len(shared):
            places = pa.array(shared)
            codes = group_codes([column.take(places) for column in self.columns], len(shared))
            _, first, of = np.unique(codes, return_index=True, return_inverse=True)
            numbers[shared] = shared[first][of]
        return numbers

    def last_rows(self) -> Slots:
        """Return the last row of each key, ascending."""
        if not len(self.shared_codes()):
            return np.arange(len(self))
        numbers = self.groups()[::-1]
        return np.sort(len(self) - 1 - np.unique(numbers, return_index=True)[1])


class KeyedRows:
    """The cells of keys and values by slot, and the slot of each key.

    Args:
        keys: the columns of the key, none of which is null.
        values: the other columns.
    """

    def __init__(self, keys: Sequence[pa.Field], values: Sequence[pa.Field]) -> None:
        self.keys = [column_of(field) for field in keys]
        self.values = [column_of(field) for field in values]
        self.index = SlotIndex()
        self.slots = 0
        """The number of slots that were ever in use."""
        self._free: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self._free_count = 0
        self._seed = np.uint64(secrets.randbits(64) | 1)  # keys that collide cannot be made up

    def __len__(self) -> int:
        return len(self.index)

    def keys_of(self, columns: Sequence[pa.Array]) -> Keys:
        """Return keys of the columns' types as they are looked up."""
        codes: Words | None = None
        cells = [column.cells_of(array) for column, array in zip(self.keys, columns, strict=True)]
        for column, array, mine in zip(self.keys, columns, cells, strict=True):
            words = column.words(array, mine)
            codes = words if codes is None else codes * _MIX + words
        assert codes is not None
        codes = codes * self._seed
        codes ^= codes >> _SHIFT
        return Keys(tuple(columns), tuple(cells), codes * _MIX)

    def find(self, keys: Keys) -> Slots:
        """Return the slot of each key, or -1."""
        return self.index.find(keys.codes, lambda slots, rows: self._equal(slots, keys, rows))

    def _equal(self, slots: Slots, keys: Keys, rows: Slots) -> Mask:
        """Return which slots hold the keys at `rows`."""
        same: Mask = np.ones(len(slots), bool)
        for column, values, cells in zip(self.keys, keys.columns, keys.cells, strict=True):
            same &= column.equal(slots, values, cells, rows)
        return same

    def add(self, keys: Keys) -> Slots:
        """Add keys that are absent, each once; return their slots. Their values are empty."""
        slots = self._take_slots(len(keys))
        for column, array in zip(self.keys, keys.columns, strict=True):
            column.put(slots, array)
        self.index.insert(keys.codes, slots)
        return slots

    def _take_slots(self, count: int) -> Slots:
        used = min(count, self._free_count)
        self._free_count -= used
        reused = self._free[self._free_count : self._free_count + used][::-1].astype(np.int64)
        fresh = np.arange(self.slots, self.slots + count - used)
        if len(fresh):
            self.slots += len(fresh)
            self.index.grow(self.slots)
            for column in (*self.keys, *self.values):
                column.grow(self.slots)
        return np.concatenate([reused, fresh]) if used else fresh

    def put(self, slots: Slots, values: Sequence[pa.Array]) -> None:
        """Write values; the slots differ from each other."""
        for column, array in zip(self.values, values, strict=True):
            column.put(slots, array)

    def take_keys(self, slots: Slots) -> list[pa.Array]:
        """Return the columns of the keys at some slots."""
        return [column.take(slots) for column in self.keys]

    def take_values(self, slots: Slots) -> list[pa.Array]:
        """Return the other columns at some slots."""
        return [column.take(slots) for column in self.values]

    def clear_values(self, slots: Slots) -> None:
        """Empty the values at some slots."""
        for column in self.values:
            column.clear(slots)

    def sizes(self, slots: Slots) -> Slots:
        """Return the bytes of the texts of each row."""
        sizes = np.zeros(len(slots), np.int64)
        for column in (*self.keys, *self.values):
            sizes += column.sizes(slots)
        return sizes

    def drop(self, slots: Slots) -> None:
        """Remove keys, by slots that differ from each other."""
        if not len(slots):
            return
        self.index.remove(slots)
        for column in (*self.keys, *self.values):
            column.clear(slots)
        after = self._free_count + len(slots)
        self._free = grown(self._free, after)
        self._free[self._free_count : after] = slots
        self._free_count = after


# ---- slot index ----------------------------------------------------------------------------------
# A hash table from the codes of keys to slots: open addressing, probed for many keys at once.
#
# The table does not hold keys. Two keys may have one code, so the caller compares the keys.

ABSENT = -1
_EMPTY, _REMOVED = -1, -2
_FIRST_BITS = 8
_FIBONACCI = np.uint64(0x9E3779B97F4A7C15)
_HASH_BITS = 64

Same = Callable[[Slots, Slots], Mask]
"""Takes slots, and as many rows of the wanted keys: which of the slots hold the key of the row."""


class SlotIndex:
    """Slots by the code of their key. At most half of the table is in use.

    Linear probing; a removed entry keeps its place until the table is rebuilt, which costs a
    constant time for each change, spread over the changes since the last time.
    """

    def __init__(self) -> None:
        self._table: npt.NDArray[np.int32] = np.full(1 << _FIRST_BITS, _EMPTY, np.int32)
        self._codes: Words = np.zeros(0, np.uint64)
        self._used = 0
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def grow(self, slots: int) -> None:
        """Make room for this many slots."""
        self._codes = grown(self._codes, slots)

    def find(self, codes: Words, same: Same) -> Slots:
        """Return the slot of each key, or `ABSENT`."""
        found_slots: Slots = np.full(len(codes), ABSENT, np.int64)
        rows, cells = np.arange(len(codes)), self._home(codes)
        while len(rows):
            slots = self._table[cells]
            if (slots == _EMPTY).any():
                left = slots != _EMPTY
                rows, cells, slots = rows[left], cells[left], slots[left]
                if not len(rows):
                    break
            hits = np.flatnonzero((self._codes[slots] == codes[rows]) & (slots >= 0))
            if len(hits):
                hits = hits[same(slots[hits].astype(np.int64), rows[hits])]
                found_slots[rows[hits]] = slots[hits]
                left = np.ones(len(rows), bool)
                left[hits] = False
                rows, cells = rows[left], cells[left]
            cells = self._next(cells)
        return found_slots

    def insert(self, codes: Words, slots: Slots) -> None:
        """Add keys that are not in the table, each once."""
        self._codes[slots] = codes
        self._live += len(slots)
        if 2 * (self._used + len(slots)) > len(self._table):
            # Rebuild the table without removed entries, with room for as many more.
            old = self._table[self._table >= 0].astype(np.int64)
            entries = np.concatenate([old, slots])
            bits = max(_FIRST_BITS, int(3 * len(entries)).bit_length())
            self._table = np.full(1 << bits, _EMPTY, np.int32)
            self._used = 0
            self._place(self._codes[entries], entries)
        else:
            self._place(codes, slots)

    def _place(self, codes: Words, slots: Slots) -> None:
        cells, left = self._home(codes), slots.astype(np.int32)
        while len(left):
            before = self._table[cells]
            free = before < 0
            self._table[cells[free]] = left[free]
            won = self._table[cells] == left
            self._used += int(np.count_nonzero(won & (before == _EMPTY)))
            cells, left = self._next(cells[~won]), left[~won]

    def remove(self, slots: Slots) -> None:
        """Remove entries, each once."""
        cells, left = self._home(self._codes[slots]), slots.astype(np.int32)
        self._live -= len(slots)
        while len(left):
            match = self._table[cells] == left
            self._table[cells[match]] = _REMOVED
            cells, left = self._next(cells[~match]), left[~match]

    def _home(self, codes: Words) -> Slots:
        bits = (len(self._table) - 1).bit_length()
        return ((codes * _FIBONACCI) >> np.uint64(_HASH_BITS - bits)).astype(np.int64)

    def _next(self, at: Slots) -> Slots:
        return (at + 1) & (len(self._table) - 1)
