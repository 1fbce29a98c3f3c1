"""Whether a job's checkpoints take longer while it is maintained."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from arroyo_dagster.state.model.ids import Epoch

LEAST_BEFORE = 3
LEAST_DURING = 2
"""The minimum number of epochs on each side; with fewer, nothing is concluded."""

LEAST_MICROS = 1_000_000
"""Checkpoints that take less than a second longer are not slower: below that, times are noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochTime:
    """When one epoch began and ended, in microseconds since 1970 by its writer's clock."""

    epoch: Epoch
    start_micros: int
    finish_micros: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """Checkpoints that took longer during maintenance.

    Attributes:
        before_micros, during_micros: the median duration of a checkpoint.
        first, last: the epochs during the maintenance.
    """

    before_micros: float
    during_micros: float
    first: Epoch
    last: Epoch

    @property
    def ratio(self) -> float:
        """How many times as long checkpoints took."""
        return self.during_micros / max(1.0, self.before_micros)

    def __str__(self) -> str:
        return (
            f"checkpoints took {self.during_micros / 1e6:.1f} s in place of "
            f"{self.before_micros / 1e6:.1f} s ({self.ratio:.1f} times) at epochs {self.first} to "
            f"{self.last}"
        )


def slowdown_since(
    times: Sequence[EpochTime], newest_before: Epoch, most: float
) -> Slowdown | None:
    """Compare the epochs after one with those up to it.

    Args:
        times: of epochs, in any order.
        newest_before: the newest epoch when the maintenance began.
        most: the ratio that is accepted.

    Returns:
        The slowdown; None if checkpoints are as fast as before, or if there are too few.
    """
    before = [epoch for epoch in times if epoch.epoch <= newest_before]
    during = [epoch for epoch in times if epoch.epoch > newest_before]
    return _slowdown(before, during, most)


def slowdown_between(
    times: Sequence[EpochTime], start_micros: int, end_micros: int, most: float
) -> Slowdown | None:
    """Compare the epochs that were written during a time with those before; see `slowdown_since`.

    Args:
        start_micros, end_micros: of the maintenance; the clocks of writer and store may differ by
            a little.
    """
    before = [epoch for epoch in times if epoch.finish_micros < start_micros]
    during = [
        one for one in times if one.finish_micros >= start_micros and one.start_micros <= end_micros
    ]
    return _slowdown(before, during, most)


def _slowdown(
    before: Sequence[EpochTime], during: Sequence[EpochTime], most: float
) -> Slowdown | None:
    if len(before) < LEAST_BEFORE or len(during) < LEAST_DURING:
        return None
    epochs = [epoch.epoch for epoch in during]
    slowdown = Slowdown(
        before_micros=_median(before),
        during_micros=_median(during),
        first=min(epochs),
        last=max(epochs),
    )
    slower = slowdown.during_micros - slowdown.before_micros >= LEAST_MICROS
    return slowdown if slower and slowdown.ratio > most else None


def _median(times: Iterable[EpochTime]) -> float:
    return median(max(0, epoch.finish_micros - epoch.start_micros) for epoch in times)
