"""What all keyed state has in common: rows by key, their changes in an epoch, restore and ttl.

The work of each call depends on the number of keys it is given, not on the number of keys there
are. A barrier writes one row for each key that changed, whatever happened to it since the last.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arroyo_dagster.engine.keyed.cells import Mask, Slots, grown
from arroyo_dagster.engine.keyed.definition import KeyedDefinition
from arroyo_dagster.engine.keyed.rows import KeyedRows, Keys
from arroyo_dagster.errors import FormatError, InputError
from arroyo_dagster.state.codec.operations import (
    INSERT,
    OperationKind,
    delete_keys_of,
    operation_kinds,
)
from arroyo_dagster.state.codec.schema import TIMESTAMP_TYPE
from arroyo_dagster.state.model.ids import Epoch
from arroyo_dagster.state.tables.expiring_time_key import ExpiringTimeKeyTable
from arroyo_dagster.state.tables.keyed_forms import KeyedForm
from arroyo_dagster.state.tables.live_rows import NANOS_PER_MICRO, StoredRows
from arroyo_dagster.state.tables.messages import RecordBatch

_LIVE, _CHANGED, _STORED = np.uint8(1), np.uint8(2), np.uint8(4)
_SLICE_ROWS = 1 << 16
_SLICE_BYTES = 1 << 30
"""Texts of one batch have 32-bit offsets."""
_SPARE_EXPIRIES = 1 << 10


class KeyedView:
    """The rows of this subtask's keys, in memory.

    Attributes:
        clock_micros: the engine's clock at the epoch being written.
        forms: as of `OpenKeyedState`.
        stopped: whether no further checkpoint follows, so that changes are refused.
    """

    forms: ClassVar[frozenset[KeyedForm]]

    def __init__(self, table: ExpiringTimeKeyTable) -> None:
        self.definition = KeyedDefinition.of(table.config)
        self.clock_micros = 0
        self.stopped = False
        self._table = table
        self._name = table.config.table
        self._begin()

    def _begin(self) -> None:
        """Start without rows."""
        self._rows = KeyedRows(self.definition.storage_key, self.definition.values)
        self._state: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._generation: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        self._updated: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._changed: list[Slots] = []
        self._expiries = ExpiryQueue()
        self._live = 0

    @property
    def _ttl(self) -> int | None:
        return self.definition.ttl_micros

    # ---- rows by key -----------------------------------------------------------------------------

    def _keys(self, columns: Sequence[pa.Array]) -> Keys:
        return self._rows.keys_of(columns)

    def _given_keys(self, given: Given) -> list[pa.Array]:
        return arrays_of(given, self.definition.keys, self._name)

    def _find(self, keys: Keys) -> Slots:
        """Return the slots of the keys that have a row, or -1."""
        slots = self._rows.find(keys)
        exists = slots >= 0
        slots[exists] = np.where(self._is_live(slots[exists]), slots[exists], -1)
        return slots

    def _write(self, keys: Keys, values: Sequence[pa.Array]) -> None:
        """Write one row for each key; of equal keys the last wins."""
        if not len(keys):
            return
        last = keys.last_rows()
        if len(last) < len(keys):
            places = pa.array(last)
            keys, values = keys.take(last), [column.take(places) for column in values]
        slots = self._slots_for(keys)
        self._rows.put(slots, values)
        self._mark(slots)
        self._make_live(slots)

    def _slots_for(self, keys: Keys) -> Slots:
        slots = self._rows.find(keys)
        fresh = np.flatnonzero(slots < 0)
        if len(fresh):
            slots[fresh] = self._rows.add(keys.take(fresh))
            self._state = grown(self._state, self._rows.slots)
            self._generation = grown(self._generation, self._rows.slots)
            if self._ttl is not None:
                self._updated = grown(self._updated, self._rows.slots)
        return slots

    def _mark(self, slots: Slots) -> None:
        if self.stopped:
            raise InputError("keyed state was changed after the last checkpoint", table=self._name)
        fresh = slots[(self._state[slots] & _CHANGED) == 0]
        if len(fresh):
            self._state[fresh] |= _CHANGED
            self._changed.append(fresh)

    def _make_live(self, slots: Slots) -> None:
        came = slots[~self._is_live(slots)]
        if len(came):
            self._state[came] |= _LIVE
            self._live += len(came)
            self._joined(came)

    def _remove(self, slots: Slots) -> None:
        """Remove rows by their slots, some of which may be -1, or the same."""
        slots = np.unique(slots[slots >= 0])
        if not len(slots):
            return
        self._left(slots)
        self._live -= len(slots)
        self._state[slots] &= ~_LIVE
        stored = (self._state[slots] & _STORED) != 0
        kept, unstored = slots[stored], slots[~stored]
        # The barrier writes what was stored as deleted, so its key stays until then.
        self._mark(kept)
        self._rows.clear_values(kept)
        self._forget_slots(unstored)

    def _forget_slots(self, slots: Slots) -> None:
        self._state[slots] = 0
        self._rows.drop(slots)

    def _joined(self, slots: Slots) -> None:
        """Handle rows that came to be; their keys and values are written."""

    def _left(self, slots: Slots) -> None:
        """Handle rows that are about to be removed."""

    def _is_live(self, slots: Slots) -> Mask:
        live: Mask = (self._state[slots] & _LIVE) != 0
        return live

    def _live_slots(self) -> Slots:
        return np.flatnonzero(self._state[: self._rows.slots] & _LIVE)

    # ---- the barrier -----------------------------------------------------------------------------

    def changes(self, epoch: Epoch) -> list[RecordBatch]:
        """Return the changes since the last barrier, in the table's columns: deletes, then rows.

        Calling it again returns the same.
        """
        slots = self._changed_slots()
        live = self._is_live(slots)
        deleted = slots[~live]
        batches = [
            RecordBatch(self._batch(part, epoch), self._deletes(part))
            for part in self._slices(deleted)
        ]
        batches += [
            RecordBatch(self._batch(part, epoch), INSERT) for part in self._slices(slots[live])
        ]
        return batches

    def _changed_slots(self) -> Slots:
        slots: Slots = np.unique(np.concatenate([np.zeros(0, np.int64), *self._changed]))
        changed: Mask = (self._state[slots] & _CHANGED) != 0
        return slots if changed.all() else slots.compress(changed)

    def _slices(self, slots: Slots) -> list[Slots]:
        """Split slots into runs whose rows fit into a batch."""
        if not len(slots):
            return []
        sizes = self._rows.sizes(slots)
        place = np.arange(len(slots)) // _SLICE_ROWS + np.cumsum(sizes) // _SLICE_BYTES
        return np.split(slots, np.flatnonzero(np.diff(place)) + 1)

    def _batch(self, slots: Slots, epoch: Epoch) -> pa.RecordBatch:
        schema, count = self._table.memory_schema, len(slots)
        nanos = pa.scalar(self.clock_micros * NANOS_PER_MICRO, TIMESTAMP_TYPE)
        columns = [
            *self._rows.take_keys(slots),
            *self._rows.take_values(slots),
            pa.repeat(nanos, count),
            pa.repeat(pa.scalar(epoch, pa.uint64()), count),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    def _deletes(self, slots: Slots) -> pa.Array:
        return delete_keys_of(self.definition.storage_key, self._rows.take_keys(slots))

    def written(self, epoch: Epoch, *, then_stop: bool) -> None:
        """Handle the end of a barrier: the changes are in the files of `epoch`."""
        self.stopped = then_stop
        slots = self._changed_slots()
        live = self._is_live(slots)
        self._forget_slots(slots[~live])
        slots = slots[live]
        self._state[slots] = _LIVE | _STORED
        self._generation[slots] = epoch
        self._changed.clear()
        if self._ttl is not None and len(slots):
            self._updated[slots] = self.clock_micros
            self._expire_later(self._updated[slots], slots)

    # ---- ttl -------------------------------------------------------------------------------------

    def begin_epoch(self, clock_micros: int) -> None:
        """Handle the begin of an epoch: remove what has reached its ttl by the engine's clock."""
        self.clock_micros = max(self.clock_micros, clock_micros)
        if self._ttl is None:
            return
        for written, slots in self._expiries.take(self.clock_micros - self._ttl):
            unchanged = (self._state[slots] & (_LIVE | _CHANGED)) == _LIVE
            self._remove(slots[(self._updated[slots] == written) & unchanged])

    def _expire_later(self, times: Times, slots: Slots) -> None:
        """Note when rows were written; they are usually no older than all others."""
        fits = self._expiries.takes(times)
        if fits:
            self._expiries.add(times, slots)
        if not fits or len(self._expiries) > 2 * self._live + _SPARE_EXPIRIES:
            slots = self._live_slots()
            self._expiries = ExpiryQueue()
            self._expiries.add(self._updated[slots], slots)

    # ---- following the files ---------------------------------------------------------------------

    def replay(self, stored: Iterable[StoredRows]) -> None:
        """Apply the rows of files, in replay order, to the present rows.

        Raises:
            FormatError: an operation that keyed state does not use.
        """
        came: list[tuple[Times, Slots]] = []
        for part in stored:
            if part.rows.num_rows:
                rows = self._replay(part)
                if self._ttl is not None:
                    came.append(rows)
        if came:
            times, slots = (np.concatenate(parts) for parts in zip(*came, strict=True))
            self._expire_later(times, slots)

    def _replay(self, part: StoredRows) -> tuple[Times, Slots]:
        """Apply a part of a file; return when its rows were written, and their slots."""
        rows = part.rows.combine_chunks()
        count = len(self.definition.storage_key)
        columns = [_one_array(column) for column in rows.columns]
        generations = columns[-1].to_numpy()
        nanos = columns[self._table.timestamp_index].cast(pa.int64()).to_numpy()
        times: Times = nanos // NANOS_PER_MICRO
        keys = self._keys(columns[:count])
        kept = self._after_deletes(keys, operation_kinds(part.operations))
        kept = kept[_newest_rows(keys, generations, kept)]
        slots = self._rows.find(keys.take(kept))
        # Of equal generations the first row wins, as in `tables.generational`.
        existing = np.flatnonzero(slots >= 0)
        newer = generations[kept[existing]] > self._generation[slots[existing]]
        kept = np.sort(np.concatenate([kept[slots < 0], kept[existing[newer]]]))
        places = pa.array(kept)
        slots = self._slots_for(keys.take(kept))
        values = columns[count : count + len(self.definition.values)]
        self._rows.put(slots, [column.take(places) for column in values])
        self._state[slots] |= _STORED
        self._generation[slots] = generations[kept]
        if self._ttl is not None:
            self._updated[slots] = times[kept]
        self._make_live(slots)
        # Not behind the rows, whichever machine wrote them.
        self.clock_micros = max(self.clock_micros, int(times.max()))
        return times[kept], slots

    def _after_deletes(self, keys: Keys, kinds: npt.NDArray[np.uint8]) -> Slots:
        """Remove the rows that deletes name; return the inserts that no later one deletes."""
        if not kinds.any():
            return np.arange(len(keys))
        if not np.isin(kinds, (OperationKind.INSERT, OperationKind.DELETE_KEY)).all():
            raise FormatError(
                "keyed state contains an operation other than inserts and deletes by key",
                table=self._name,
                next_step="keep the files and report them",
            )
        deletes = np.flatnonzero(kinds)
        slots = self._rows.find(keys.take(deletes))
        gone = np.unique(slots[slots >= 0])
        self._left(gone)
        self._live -= len(gone)
        self._forget_slots(gone)
        numbers = keys.groups()
        latest = np.full(len(keys), -1)
        np.maximum.at(latest, numbers[deletes], deletes)
        rows = np.arange(len(keys))
        kept: Slots = rows[(kinds == 0) & (rows > latest[numbers])]
        return kept

    def forget(self) -> None:
        """Drop every row from memory, before a replay of all files."""
        self._begin()

    # ---- reading all -----------------------------------------------------------------------------

    def rows(self) -> Iterable[pa.Table]:
        """Yield all rows, some ten thousand at a time: the columns of keys, entries and values.

        The view must not be changed meanwhile.
        """
        fields = [*self.definition.storage_key, *self.definition.values]
        schema = pa.schema(fields)
        for part in self._slices(self._live_slots()):
            columns = [*self._rows.take_keys(part), *self._rows.take_values(part)]
            yield pa.Table.from_arrays(columns, schema=schema)


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def _newest_rows(keys: Keys, generations: npt.NDArray[np.uint64], rows: Slots) -> Slots:
    """Return, of each key, the place in `rows` of its first row of the largest generation."""
    among = keys.take(rows)
    shared = among.shared_codes()
    if not len(shared):
        return np.arange(len(rows))
    numbers = among.groups()
    order = np.lexsort((np.arange(len(rows)), ~generations[rows].astype(np.uint64), numbers))
    first = np.ones(len(order), bool)
    first[1:] = numbers[order][1:] != numbers[order][:-1]
    return np.sort(order[first])


# ---- expiries ------------------------------------------------------------------------------------
# Slots in the order in which their rows were written: those that reach a ttl are at the front.

Times = npt.NDArray[np.int64]


class ExpiryQueue:
    """Slots by the time of their last write, in microseconds.

    A slot that was written again is in the queue twice; the caller knows its last time.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, Slots]] = deque()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def takes(self, times: Times) -> bool:
        """Whether rows with these times can be added: none is older than the last in the queue."""
        return not self._waiting or not len(times) or times.min() >= self._waiting[-1][0]

    def add(self, times: Times, slots: Slots) -> None:
        """Append slots in the order of their times; `takes` accepts these."""
        order = np.argsort(times, kind="stable")
        times, slots = times[order], slots[order]
        starts = np.flatnonzero(np.diff(times, prepend=times[:1] - 1))
        for start, end in itertools.pairwise([*starts.tolist(), len(slots)]):
            self._waiting.append((int(times[start]), slots[start:end]))
        self._count += len(slots)

    def take(self, until_micros: int) -> Iterator[tuple[int, Slots]]:
        """Remove and yield, time by time, the slots written at or before a time."""
        while self._waiting and self._waiting[0][0] <= until_micros:
            written, slots = self._waiting.popleft()
            self._count -= len(slots)
            yield written, slots


# ---- columns as operators give and receive them: one array, a struct of several, or rows ---------

Given: TypeAlias = "pa.Array | pa.ChunkedArray | pa.RecordBatch | pa.Table | Sequence[Any]"
"""Values: an array; for several columns a struct array, or rows with columns of their names."""

Fields = Sequence[pa.Field]


def arrays_of(given: Given, fields: Fields, table: str) -> list[pa.Array]:
    """Return the columns that were given, as arrays of the fields' types.

    Raises:
        InputError: other columns or types, or a null where none is allowed.
    """
    try:
        columns = [
            _array(column, field)
            for column, field in zip(_split(given, fields), fields, strict=True)
        ]
    except (pa.ArrowException, ValueError, TypeError, KeyError, OverflowError) as error:
        raise InputError(
            f"the columns do not fit their table ({error})",
            table=table,
            expected=[f"{field.name}: {field.type}" for field in fields],
        ) from error
    if len({len(column) for column in columns}) > 1:
        raise InputError("the columns have different lengths", table=table)
    for column, field in zip(columns, fields, strict=True):
        if column.null_count and not field.nullable:
            raise InputError(
                "a column without nulls contains a null",
                table=table,
                column=field.name,
                nulls=column.null_count,
            )
    return columns


def _split(given: Given, fields: Fields) -> Sequence[Any]:
    if isinstance(given, pa.RecordBatch | pa.Table):
        if len(fields) == 1 and given.num_columns == 1:
            return [given.column(0)]
        return [_column(given, field.name) for field in fields]
    if len(fields) == 1:
        return [given]
    if isinstance(given, pa.ChunkedArray):
        given = given.combine_chunks()
    if isinstance(given, pa.StructArray):
        if given.null_count:
            raise ValueError("a row is null")
        return [_column(given, field.name) for field in fields]
    if isinstance(given, pa.Array):
        raise TypeError(f"{len(fields)} columns are expected, not one of type {given.type}")
    return list(zip(*given, strict=True)) or [[] for _ in fields]


def _column(given: pa.RecordBatch | pa.Table | pa.StructArray, name: str) -> Any:
    if isinstance(given, pa.StructArray):
        return given.field(name)
    if given.schema.names.count(name) != 1:
        raise KeyError(name)
    return given.column(name)


def _array(column: Any, field: pa.Field) -> pa.Array:
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
        if isinstance(column, pa.ChunkedArray):
            column = pa.concat_arrays([pa.array([], column.type), *column.chunks])
    if not isinstance(column, pa.Array):
        return pa.array(column, field.type)
    return column if column.type.equals(field.type) else column.cast(field.type)


def joined(columns: Sequence[pa.Array], fields: Fields) -> pa.Array:
    """Return one array: the only column, or a struct of several."""
    if len(columns) == 1:
        return columns[0]
    return pa.StructArray.from_arrays(columns, fields=list(fields))
