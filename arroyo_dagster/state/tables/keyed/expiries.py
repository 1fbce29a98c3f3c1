"""Slots in the order in which their rows were written: those that reach a ttl are at the front."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from arroyo_dagster.state.tables.keyed.cells import Slots

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
