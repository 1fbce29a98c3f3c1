"""Watch a job's checkpoints during its maintenance, which backs off when they become slower."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from arroyo_dagster.errors import ArroyoStateError, FormatError, NotFoundError
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.metadata.lease import last_released_lease
from arroyo_dagster.state.model.ids import Epoch
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.planning.slowdown import (
    EpochTime,
    Slowdown,
    slowdown_between,
    slowdown_since,
)
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore

_EPOCHS = 16
EVERY_SECONDS = 5.0
"""Maintenance that is shorter slows nothing down."""


class CheckpointWatch:
    """The checkpoints of one job since its maintenance began.

    It reads nothing in the first seconds: short maintenance costs no request more.

    Args:
        newest: the newest epoch when the maintenance began.
        most: the accepted ratio of the durations of checkpoints; None = nothing is read.
        ticks: seconds since an arbitrary start.
    """

    def __init__(
        self,
        store: ObjectStore,
        paths: JobPaths,
        newest: Epoch | None,
        most: float | None,
        *,
        every_seconds: float = EVERY_SECONDS,
        ticks: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = ParquetBackend(store, paths)
        self._newest = newest
        self._most = most
        self._every_seconds = every_seconds
        self._ticks = ticks
        self._read_at = ticks()
        self._times: dict[Epoch, EpochTime] = {}
        self._found: Slowdown | None = None

    def slowdown(self) -> Slowdown | None:
        """Return whether checkpoints are slower than before; reads at most every few seconds."""
        if self._most is None or self._newest is None:
            return None
        if self._ticks() - self._read_at < self._every_seconds:
            return self._found
        self._read_at = self._ticks()
        with suppress(ArroyoStateError):  # the watch is a courtesy, and never a failure
            epochs = [epoch for epoch in self._backend.epochs() if epoch not in self._times]
            for times in epoch_times(self._backend, epochs[-2 * _EPOCHS :]):
                self._times[times.epoch] = times
        recent = sorted(self._times.values(), key=lambda times: times.epoch)[-2 * _EPOCHS :]
        self._found = slowdown_since(recent, self._newest, self._most)
        return self._found


def epoch_times(backend: ParquetBackend, epochs: Iterable[Epoch]) -> list[EpochTime]:
    """Return the times of epochs; those that expired meanwhile are left out."""

    def time_of(epoch: Epoch) -> EpochTime | None:
        try:
            checkpoint = backend.load_checkpoint_metadata(epoch)
        except (NotFoundError, FormatError):
            return None
        return EpochTime(
            epoch=epoch,
            start_micros=checkpoint.start_time_micros,
            finish_micros=checkpoint.finish_time_micros,
        )

    return [times for times in concurrently(time_of, epochs) if times is not None]


def last_slowdown(store: ObjectStore, paths: JobPaths, most: float | None) -> Slowdown | None:
    """Return whether the last maintenance of a job made its checkpoints slower. Reads only.

    None: it did not, it is not known, or `most` is None.
    """
    if most is None:
        return None
    try:
        released = last_released_lease(store, paths.leases)
        if released is None or released.renewed_at_micros is None:
            return None
        if released.renewed_at_micros - released.acquired_at_micros < EVERY_SECONDS * 1e6:
            return None
        backend = ParquetBackend(store, paths)
        times = epoch_times(backend, backend.epochs()[-2 * _EPOCHS :])
    except ArroyoStateError:
        return None
    return slowdown_between(times, released.acquired_at_micros, released.renewed_at_micros, most)
