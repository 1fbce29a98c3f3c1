"""Which rows each key owns: a chain of slots for each key, changed at any place at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arroyo_dagster.state.tables.keyed.cells import Slots, grown
from arroyo_dagster.state.tables.keyed.rows import KeyedRows, Keys

_NONE = -1
_SHORT_CHAIN = 32
_Links = npt.NDArray[np.int32]


class OwnerChains:
    """The slots of the rows of each key.

    Args:
        keys: the columns of the key.
    """

    def __init__(self, keys: Sequence[pa.Field]) -> None:
        self._owners = KeyedRows(keys, ())
        self._head: _Links = np.zeros(0, np.int32)
        self._count: _Links = np.zeros(0, np.int32)
        self._end: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._owner: _Links = np.zeros(0, np.int32)
        self._next: _Links = np.zeros(0, np.int32)
        self._previous: _Links = np.zeros(0, np.int32)

    def __len__(self) -> int:
        return len(self._owners)

    def keys_of(self, columns: Sequence[pa.Array]) -> Keys:
        """Return keys as they are looked up."""
        return self._owners.keys_of(columns)

    def join(self, slots: Slots, keys: Sequence[pa.Array], ends: Slots | None) -> None:
        """Add rows, each once.

        Args:
            slots: of the rows.
            keys: their keys.
            ends: the position behind each row, if rows have positions.
        """
        self._grow(int(slots.max()) + 1)
        owners = self._owners_of(self._owners.keys_of(keys))
        order = np.argsort(owners, kind="stable")
        rows, of = slots[order].astype(np.int32), owners[order]
        first = np.ones(len(rows), bool)
        first[1:] = of[1:] != of[:-1]
        last = np.append(first[1:], True)
        self._next[rows[:-1]] = rows[1:]
        self._previous[rows[1:]] = rows[:-1]
        self._previous[rows[first]] = _NONE
        heads = self._head[of[last]]
        self._next[rows[last]] = heads
        self._previous[heads[heads >= 0]] = rows[last][heads >= 0]
        self._head[of[first]] = rows[first]
        self._owner[rows] = of
        starts = np.flatnonzero(first)
        self._count[of[first]] += np.diff(np.append(starts, len(rows))).astype(np.int32)
        if ends is not None:
            np.maximum.at(self._end, owners, ends)

    def _owners_of(self, keys: Keys) -> Slots:
        owners = self._owners.find(keys)
        absent = np.flatnonzero(owners < 0)
        if len(absent):
            fresh = keys.take(absent)
            last = fresh.last_rows()
            added = self._owners.add(fresh.take(last))
            self._head = grown(self._head, self._owners.slots)
            self._count = grown(self._count, self._owners.slots)
            self._end = grown(self._end, self._owners.slots)
            self._head[added], self._count[added], self._end[added] = _NONE, 0, 0
            owners[absent] = self._owners.find(fresh)
        return owners

    def _grow(self, slots: int) -> None:
        self._owner = grown(self._owner, slots)
        self._next = grown(self._next, slots)
        self._previous = grown(self._previous, slots)

    def leave(self, slots: Slots) -> None:
        """Remove rows, by slots that differ from each other."""
        if not len(slots):
            return
        removed = np.sort(slots)
        before, _ = _past(removed, self._previous[removed])
        after, _ = _past(removed, self._next[removed])
        _, runs_on = _past(removed, self._previous[removed], jump=False)
        starts = ~runs_on
        owners = self._owner[removed]
        left, right, of = before[starts], after[starts], owners[starts]
        self._next[left[left >= 0]] = right[left >= 0]
        self._head[of[left < 0]] = right[left < 0]
        self._previous[right[right >= 0]] = left[right >= 0]
        touched, counts = np.unique(owners, return_counts=True)
        self._count[touched] -= counts.astype(np.int32)
        self._owners.drop(touched[self._count[touched] == 0].astype(np.int64))

    def rows_of(self, keys: Sequence[pa.Array]) -> tuple[Slots, Slots]:
        """Return the slots of the rows of each key, in order of the keys, and how many each has."""
        owners = self._owners.find(self._owners.keys_of(keys))
        exists = owners >= 0
        counts = np.zeros(len(owners), np.int64)
        counts[exists] = self._count[owners[exists]]
        starts = np.cumsum(counts) - counts
        slots = np.zeros(int(counts.sum()), np.int64)
        long = np.flatnonzero(counts > _SHORT_CHAIN)
        links = memoryview(self._next)  # type: ignore[arg-type]
        for place in long.tolist():
            slot, start = int(self._head[owners[place]]), int(starts[place])
            for offset in range(int(counts[place])):
                slots[start + offset] = slot
                slot = links[slot]
        short = np.flatnonzero((counts > 0) & (counts <= _SHORT_CHAIN))
        at_all = self._head[owners[short]]
        step = 0
        while len(short):
            slots[starts[short] + step] = at_all
            step += 1
            more = counts[short] > step
            short, at_all = short[more], self._next[at_all[more]]
        return slots, counts

    def next_positions(self, keys: Sequence[pa.Array]) -> Slots:
        """Return the position at which each row is appended; rows of one key follow each other."""
        owner_keys = self._owners.keys_of(keys)
        owners = self._owners.find(owner_keys)
        exists = owners >= 0
        ends = np.zeros(len(owners), np.int64)
        ends[exists] = self._end[owners[exists]]
        numbers = owner_keys.groups()
        order = np.argsort(numbers, kind="stable")
        grouped = numbers[order]
        first = np.ones(len(order), bool)
        first[1:] = grouped[1:] != grouped[:-1]
        begins = np.flatnonzero(first)
        ranks = np.arange(len(order)) - np.repeat(begins, np.diff(np.append(begins, len(order))))
        positions = np.empty(len(order), np.int64)
        positions[order] = ends[order] + ranks
        return positions


def _past(gone: Slots, links: _Links, *, jump: bool = True) -> tuple[_Links, npt.NDArray[np.bool_]]:
    """Follow links until they leave `gone`, which is sorted.

    Returns:
        Where each link leads, and which led into `gone` at first.
    """
    targets = links.copy()
    places = np.minimum(np.searchsorted(gone, targets), len(gone) - 1)
    inside = gone[places] == targets
    if jump:
        # Each round doubles how far a link leads.
        into = np.where(inside, places, _NONE)
        while (left := np.flatnonzero(into >= 0)).size:
            over = into[left]
            targets[left], into[left] = targets[over], into[over]
    return targets, inside
