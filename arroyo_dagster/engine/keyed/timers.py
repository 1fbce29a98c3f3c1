"""Timers by key: registered for a time, and due in the order of their times, then of their keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.engine.keyed.cells import Slots
from arroyo_dagster.engine.keyed.rows import Keys
from arroyo_dagster.engine.keyed.view import Given, KeyedView, arrays_of
from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.ids import Epoch
from arroyo_dagster.state.tables.keyed_forms import KeyedForm
from arroyo_dagster.state.tables.live_rows import NANOS_PER_MICRO
from arroyo_dagster.state.tables.messages import RecordBatch

_SPARE = 1 << 10
_Times = npt.NDArray[np.int64]


class Timers(KeyedView):
    """The timers of the keys that are routed to this subtask.

    A key may have several timers, each at a time of its own; to register one again changes nothing.
    A timer fires once: in the first epoch that reaches its time. It is removed in the same epoch as
    the changes and the output that `Operator.on_timers` makes.
    """

    forms = frozenset(form for form in KeyedForm if form.is_timers)

    def _begin(self) -> None:
        super()._begin()
        self._queue = _TimeQueue()

    def __len__(self) -> int:
        """Return the number of timers that have not fired."""
        return self._live

    def register_many(self, keys: Given, times: Given) -> None:
        """Register a timer for each key.

        Args:
            times: in nanoseconds since 1970, as `_timestamp`, or of any timestamp type. A timer
                whose time has come fires in this epoch.

        Raises:
            InputError: the keys are not of the registered types, a time is null, or their numbers
                differ; nothing changed.
        """
        timers = self._timer_keys(keys, times)
        self._write(timers.take(np.flatnonzero(self._find(timers) < 0)), ())

    def cancel_many(self, keys: Given, times: Given) -> None:
        """Cancel timers, if they are registered. Errors as `register_many`."""
        self._remove(self._find(self._timer_keys(keys, times)))

    def register(self, key: Any, time_micros: int) -> None:
        """Register a timer for one key, at microseconds since 1970."""
        self.register_many([key], [time_micros * NANOS_PER_MICRO])

    def cancel(self, key: Any, time_micros: int) -> None:
        """Cancel a timer of one key, if it is registered."""
        self.cancel_many([key], [time_micros * NANOS_PER_MICRO])

    def _timer_keys(self, keys: Given, times: Given) -> Keys:
        columns = [
            *arrays_of(times, self.definition.entry, self._name),
            *self._given_keys(keys),
        ]
        if len({len(column) for column in columns}) > 1:
            raise InputError(
                f"{len(columns[1])} keys were given, and {len(columns[0])} times", table=self._name
            )
        return self._keys(columns)

    # ---- firing ----------------------------------------------------------------------------------

    def time_micros(self, watermark_micros: int | None) -> int | None:
        """Return the time that these timers have reached, in an epoch with this watermark."""
        if self.definition.form is KeyedForm.EVENT_TIMERS:
            return watermark_micros
        return self.clock_micros

    def next_alarm_micros(self) -> int | None:
        """Return when the engine's clock makes the next timer due, or a time before; None = never.

        A cancelled timer may count until its time has come.
        """
        if self.definition.form is KeyedForm.EVENT_TIMERS or not self._live:
            return None
        nanos = self._queue.first()
        return None if nanos is None else -(-nanos // NANOS_PER_MICRO)

    def take_due(self, time_micros: int) -> pa.RecordBatch | None:
        """Remove the timers that are due, and return them; None if there are none.

        Returns:
            The columns `at` and those of the key, in the order of time, then of the key.
        """
        slots = self._due(time_micros * NANOS_PER_MICRO)
        if not len(slots):
            return None
        fields = self.definition.storage_key
        batch = pa.RecordBatch.from_arrays(self._rows.take_keys(slots), schema=pa.schema(fields))
        self._remove(slots)
        return batch.take(pc.sort_indices(batch, [(field.name, "ascending") for field in fields]))

    def _due(self, nanos: int) -> Slots:
        times, slots = self._queue.take(nanos)
        # The queue also has timers that were cancelled, and some twice.
        kept = self._is_live(slots) & (self._times(slots) == times)
        return np.unique(slots[kept])

    def _times(self, slots: Slots) -> _Times:
        times: _Times = self._rows.keys[0].take(slots).cast(pa.int64()).to_numpy()
        return times

    def _joined(self, slots: Slots) -> None:
        self._queue.add(self._times(slots), slots)

    def changes(self, epoch: Epoch) -> list[RecordBatch]:
        """Return the changes as `KeyedView.changes`."""
        if len(self._queue) > 2 * self._live + _SPARE:
            self._queue = _TimeQueue()
            slots = self._live_slots()
            self._queue.add(self._times(slots), slots)
        return super().changes(epoch)


class _TimeQueue:
    """Slots by time, in a few runs that are sorted; a run is merged with one of its size."""

    def __init__(self) -> None:
        self._fresh: list[tuple[_Times, Slots]] = []
        self._runs: list[tuple[_Times, Slots]] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, times: _Times, slots: Slots) -> None:
        """Add slots, not sorted."""
        self._fresh.append((times, slots))
        self._count += len(slots)

    def first(self) -> int | None:
        """Return the earliest time; None if there is none."""
        self._sort_fresh()
        return min((int(times[0]) for times, _ in self._runs), default=None)

    def take(self, until: int) -> tuple[_Times, Slots]:
        """Remove and return what is at or before a time."""
        self._sort_fresh()
        due: list[tuple[_Times, Slots]] = [(np.zeros(0, np.int64), np.zeros(0, np.int64))]
        left = []
        for times, slots in self._runs:
            end = int(np.searchsorted(times, until, side="right"))
            due.append((times[:end], slots[:end]))
            if end < len(times):
                left.append((times[end:], slots[end:]))
        self._runs = left
        times, slots = (np.concatenate(parts) for parts in zip(*due, strict=True))
        self._count -= len(slots)
        return times, slots

    def _sort_fresh(self) -> None:
        if not self._fresh:
            return
        fresh, self._fresh = _sorted(self._fresh), []
        if len(fresh[0]):
            self._runs.append(fresh)
        while len(self._runs) > 1 and len(self._runs[-2][0]) <= 2 * len(self._runs[-1][0]):
            self._runs[-2:] = [_sorted(self._runs[-2:])]


def _sorted(runs: list[tuple[_Times, Slots]]) -> tuple[_Times, Slots]:
    times, slots = (np.concatenate(parts) for parts in zip(*runs, strict=True))
    order = np.argsort(times, kind="stable")
    return times[order], slots[order]
