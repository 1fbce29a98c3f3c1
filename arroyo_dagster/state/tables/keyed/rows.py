"""Rows by key: each key has a slot, at which its cells are. Removed slots are used again."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arroyo_dagster.state.tables.grouping import group_codes
from arroyo_dagster.state.tables.keyed.cells import (
    Cells,
    Mask,
    Slots,
    Words,
    column_of,
    grown,
)
from arroyo_dagster.state.tables.keyed.slot_index import SlotIndex

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
