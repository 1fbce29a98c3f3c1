"""Keyed state as operators use it: one value, a list or a map for each key.

Many keys at once take and return Arrow; one key takes and returns Python values. A key of several
columns is a struct array, a record batch or a table with columns of their names; for one key, a
tuple. Values of several columns likewise; they are returned as structs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.engine.keyed.cells import Slots, grown
from arroyo_dagster.engine.keyed.rows import KeyedRows, Keys
from arroyo_dagster.engine.keyed.view import Given, KeyedView, arrays_of, joined
from arroyo_dagster.errors import InputError
from arroyo_dagster.state.tables.keyed_forms import KeyedForm


class ValueState(KeyedView):
    """One value for each key that is routed to this subtask."""

    forms = frozenset({KeyedForm.VALUE})

    def __len__(self) -> int:
        return self._live

    def get_many(self, keys: Given) -> pa.Array:
        """Return the value of each key, in order; null where there is none.

        Raises:
            InputError: the keys are not of the registered types.
        """
        slots = self._find(self._keys(self._given_keys(keys)))
        columns = self._rows.take_values(np.maximum(slots, 0)) if self._rows.slots else None
        if columns is None:
            kind = joined([pa.array([], f.type) for f in self.definition.values], self._values).type
            return pa.nulls(len(slots), kind)
        values = joined(columns, self._values)
        if (slots >= 0).all():
            return values
        places = pa.array(np.arange(len(slots)), mask=slots < 0)
        return values.take(places)

    def contains_many(self, keys: Given) -> pa.BooleanArray:
        """Return for each key whether it has a value. Errors as `get_many`."""
        return pa.array(self._find(self._keys(self._given_keys(keys))) >= 0)

    def put_many(self, keys: Given, values: Given) -> None:
        """Set the value of each key; of equal keys the last wins.

        Raises:
            InputError: keys or values are not of the registered types, or their numbers differ;
                nothing changed.
        """
        columns = self._given_keys(keys)
        value_columns = arrays_of(values, self._values, self._name)
        _same_length(self._name, columns, value_columns)
        self._write(self._keys(columns), value_columns)

    def remove_many(self, keys: Given) -> None:
        """Remove the values of some keys, where there are any. Errors as `get_many`."""
        self._remove(self._find(self._keys(self._given_keys(keys))))

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the value of one key as a Python value, or `default`."""
        slots = self._find(self._keys(self._given_keys([key])))
        if slots[0] < 0:
            return default
        return joined(self._rows.take_values(slots), self._values)[0].as_py()

    def put(self, key: Any, value: Any) -> None:
        """Set the value of one key. Errors as `put_many`."""
        self.put_many([key], [value])

    def remove(self, key: Any) -> None:
        """Remove the value of one key, if it has one."""
        self.remove_many([key])

    @property
    def _values(self) -> tuple[pa.Field, ...]:
        return self.definition.values


class OwnedRows(KeyedView):
    """Rows of which each key owns several: items of lists, entries of maps."""

    _chains: OwnerChains

    def _begin(self) -> None:
        super()._begin()
        self._chains = OwnerChains(self.definition.keys)

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self._chains)

    def _joined(self, slots: Slots) -> None:
        columns = self._rows.take_keys(slots)
        self._chains.join(slots, columns[: len(self.definition.keys)], self._ends(columns))

    def _ends(self, columns: Sequence[pa.Array]) -> Slots | None:
        """Return for each row the position behind it, if rows have positions."""
        return None

    def _left(self, slots: Slots) -> None:
        self._chains.leave(slots)

    def _of_keys(self, keys: Given) -> tuple[Slots, Slots]:
        """Return the slots of the rows of each key, by key and entry, and the number of each."""
        columns = self._given_keys(keys)
        slots, counts = self._chains.rows_of(columns)
        entries = self._rows.take_keys(slots)[len(columns) :]
        owners = pa.array(np.repeat(np.arange(len(counts)), counts))
        table = pa.Table.from_arrays(
            [owners, *entries], names=[str(place) for place in range(1 + len(entries))]
        )
        order = pc.sort_indices(table, [(name, "ascending") for name in table.column_names])
        return slots[order.to_numpy()], counts

    def remove_many(self, keys: Given) -> None:
        """Remove everything that some keys have.

        Raises:
            InputError: the keys are not of the registered types.
        """
        self._remove(self._chains.rows_of(self._given_keys(keys))[0])

    def remove(self, key: Any) -> None:
        """Remove everything that one key has."""
        self.remove_many([key])

    def _offsets(self, counts: Slots) -> pa.Array:
        return pa.array(np.concatenate([[0], np.cumsum(counts)]), pa.int32())


class ListState(OwnedRows):
    """A list for each key that is routed to this subtask. An item costs one row, where it is."""

    forms = frozenset({KeyedForm.LIST})

    def _ends(self, columns: Sequence[pa.Array]) -> Slots | None:
        positions: Slots = columns[-1].to_numpy()
        return positions + 1

    def get_many(self, keys: Given) -> pa.ListArray:
        """Return the list of each key, in order; empty where there is none.

        Raises:
            InputError: the keys are not of the registered types.
        """
        slots, counts = self._of_keys(keys)
        items = joined(self._rows.take_values(slots), self.definition.values)
        return pa.ListArray.from_arrays(self._offsets(counts), items)

    def append_many(self, keys: Given, items: Given) -> None:
        """Append one item to the list of each key; a key may be given several times.

        Raises:
            InputError: keys or items are not of the registered types, or their numbers differ;
                nothing changed.
        """
        columns = self._given_keys(keys)
        item_columns = arrays_of(items, self.definition.values, self._name)
        _same_length(self._name, columns, item_columns)
        positions = pa.array(self._chains.next_positions(columns))
        self._write(self._keys([*columns, positions]), item_columns)

    def put_many(self, keys: Given, lists: pa.ListArray) -> None:
        """Replace the list of each key.

        Raises:
            InputError: as `append_many`, or a key is given twice; nothing changed.
        """
        columns = self._given_keys(keys)
        _same_length(self._name, columns, [lists])
        if len(self._chains.keys_of(columns).last_rows()) < len(lists):
            raise InputError("a key is given twice, with a list each", table=self._name)
        lists = lists.combine_chunks() if isinstance(lists, pa.ChunkedArray) else lists
        owners = pc.list_parent_indices(lists)
        item_columns = arrays_of(lists.flatten(), self.definition.values, self._name)
        self.remove_many(keys)
        if len(owners):
            key_columns = joined([column.take(owners) for column in columns], self.definition.keys)
            self.append_many(key_columns, joined(item_columns, self.definition.values))

    def get(self, key: Any) -> list[Any]:
        """Return the list of one key as Python values; empty if it has none."""
        values: list[Any] = self.get_many([key])[0].as_py()
        return values

    def append(self, key: Any, item: Any) -> None:
        """Append one item to the list of a key. Errors as `append_many`."""
        self.append_many([key], [item])

    def put(self, key: Any, items: Sequence[Any]) -> None:
        """Replace the list of one key. Errors as `append_many`."""
        self.remove(key)
        if items:
            self.append_many([key] * len(items), list(items))


class MapState(OwnedRows):
    """A map for each key that is routed to this subtask. An entry costs one row, where it is."""

    forms = frozenset({KeyedForm.MAP})

    def get_many(self, keys: Given) -> pa.MapArray:
        """Return the map of each key, in order, its entries by their keys; empty where there is
        none.

        Raises:
            InputError: the keys are not of the registered types.
        """
        slots, counts = self._of_keys(keys)
        entries = self._rows.take_keys(slots)[len(self.definition.keys) :]
        items = joined(self._rows.take_values(slots), self.definition.values)
        return pa.MapArray.from_arrays(
            self._offsets(counts), joined(entries, self.definition.entry), items
        )

    def get_entries(self, keys: Given, map_keys: Given) -> pa.Array:
        """Return one entry of the map of each key, in order; null where there is none. Errors as
        `get_many`.
        """
        slots = self._find(self._entry_keys(keys, map_keys))
        if not self._rows.slots:
            return pa.nulls(len(slots), self._item_type)
        values = joined(self._rows.take_values(np.maximum(slots, 0)), self.definition.values)
        return values.take(pa.array(np.arange(len(slots)), mask=slots < 0))

    @property
    def _item_type(self) -> pa.DataType:
        empty = [pa.array([], field.type) for field in self.definition.values]
        return joined(empty, self.definition.values).type

    def put_many(self, keys: Given, map_keys: Given, values: Given) -> None:
        """Set one entry of the map of each key; of equal entries the last wins.

        Raises:
            InputError: as `get_many`, or the numbers differ; nothing changed.
        """
        value_columns = arrays_of(values, self.definition.values, self._name)
        entry_keys = self._entry_keys(keys, map_keys)
        _same_length(self._name, entry_keys.columns, value_columns)
        self._write(entry_keys, value_columns)

    def remove_entries(self, keys: Given, map_keys: Given) -> None:
        """Remove one entry of the map of each key, if it is there. Errors as `get_many`."""
        self._remove(self._find(self._entry_keys(keys, map_keys)))

    def _entry_keys(self, keys: Given, map_keys: Given) -> Any:
        columns = self._given_keys(keys)
        entries = arrays_of(map_keys, self.definition.entry, self._name)
        _same_length(self._name, columns, entries)
        return self._keys([*columns, *entries])

    def get(self, key: Any) -> dict[Any, Any]:
        """Return the map of one key as Python values; empty if it has none."""
        return dict(self.get_many([key])[0].as_py())

    def get_entry(self, key: Any, map_key: Any, default: Any = None) -> Any:
        """Return one entry of the map of one key as a Python value, or `default`."""
        slots = self._find(self._entry_keys([key], [map_key]))
        if slots[0] < 0:
            return default
        return joined(self._rows.take_values(slots), self.definition.values)[0].as_py()

    def put_entry(self, key: Any, map_key: Any, value: Any) -> None:
        """Set one entry of the map of one key. Errors as `put_many`."""
        self.put_many([key], [map_key], [value])

    def put(self, key: Any, entries: Mapping[Any, Any]) -> None:
        """Replace the map of one key. Errors as `put_many`."""
        self.remove(key)
        if entries:
            self.put_many([key] * len(entries), list(entries), list(entries.values()))

    def remove_entry(self, key: Any, map_key: Any) -> None:
        """Remove one entry of the map of one key, if it is there."""
        self.remove_entries([key], [map_key])


def _same_length(table: str, keys: Sequence[pa.Array], others: Sequence[Any]) -> None:
    if any(len(other) != len(keys[0]) for other in others):
        raise InputError(
            f"{len(keys[0])} keys were given, and {len(others[0])} values", table=table
        )


# ---- which rows each key owns: a chain of slots for each key, changed at any place at once -------

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
