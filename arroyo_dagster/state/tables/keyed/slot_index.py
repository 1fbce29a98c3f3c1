"""A hash table from the codes of keys to slots: open addressing, probed for many keys at once.

The table does not hold keys. Two keys may have one code, so the caller compares the keys.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from arroyo_dagster.state.tables.keyed.cells import Mask, Slots, Words, grown

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
            self._rebuild(codes, slots)
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

    def _rebuild(self, codes: Words, slots: Slots) -> None:
        """Rebuild the table without removed entries, with room for as many more."""
        old = self._table[self._table >= 0].astype(np.int64)
        entries = np.concatenate([old, slots])
        bits = max(_FIRST_BITS, int(3 * len(entries)).bit_length())
        self._table = np.full(1 << bits, _EMPTY, np.int32)
        self._used = 0
        self._place(self._codes[entries], entries)

    def _home(self, codes: Words) -> Slots:
        bits = (len(self._table) - 1).bit_length()
        return ((codes * _FIBONACCI) >> np.uint64(_HASH_BITS - bits)).astype(np.int64)

    def _next(self, at: Slots) -> Slots:
        return (at + 1) & (len(self._table) - 1)
