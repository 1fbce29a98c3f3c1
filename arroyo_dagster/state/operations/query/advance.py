"""How sources and watermarks of a job advanced over its last epochs, and what stands still."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.operations.query.positions import SourcePosition, source_positions
from arroyo_dagster.state.operations.query.state import StateEpoch, StateJob
from arroyo_dagster.state.storage.concurrency import concurrently

EPOCHS = 10
"""The number of the newest epochs that are compared by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionAdvance:
    """How one partition of a source advanced.

    Attributes:
        newest: its position at the newest epoch that has it.
        advanced_at_micros: when the last epoch was finished that found it further than the one
            before; None = it did not advance over these epochs.
        rate: positions a second from the first to the last of the epochs; None = no number, or one
            epoch only.
        lag: how far it is behind the high-water mark; None = none was given.
        positions: `(finished_at_micros, position)` at each epoch, oldest first.
    """

    newest: SourcePosition
    advanced_at_micros: int | None
    rate: float | None
    lag: int | None
    positions: tuple[tuple[int, int | None], ...]

    @property
    def stands_still(self) -> bool:
        """Whether several epochs found it at one position, and it is not read to its end."""
        return (
            self.advanced_at_micros is None
            and len(self.positions) > 1
            and self.newest.finished is not True
        )

    @property
    def status(self) -> str:
        """What the epochs say: `finished`, `one epoch only`, `stands still` or `advances`."""
        if self.newest.finished:
            return "finished"
        if len(self.positions) < 2:
            return "one epoch only"
        return "stands still" if self.stands_still else "advances"


def source_advance(
    job: StateJob, epochs: int = EPOCHS, high_water: Mapping[str, int] | None = None
) -> list[PartitionAdvance]:
    """Return how each partition of each source advanced, from source to sink.

    Args:
        epochs: the number of the newest visible epochs to compare; 1 or more.
        high_water: by partition, the end of the source; for the lag.

    Raises:
        NotFoundError: the job has no epoch.
        InputError: fewer than one epoch; or a high-water mark is of no partition.
        FormatError: a file is broken.
    """
    found: dict[tuple[str, str, str], list[SourcePosition]] = defaultdict(list)
    for positions in concurrently(source_positions, newest_epochs(job, epochs)):
        for one in positions:
            found[one.operator, one.table, one.partition].append(one)
    ends = dict(high_water or {})
    unknown = sorted(ends.keys() - {partition for _, _, partition in found})
    if unknown:
        raise InputError(
            f"no source has a partition {unknown[0]!r}",
            job=job.name,
            partitions=", ".join(sorted({partition for _, _, partition in found})[:20]),
        )
    return [_advance(ones, ends.get(ones[-1].partition)) for ones in found.values()]


def newest_epochs(job: StateJob, epochs: int) -> list[StateEpoch]:
    """Return the newest visible epochs, oldest first; errors as `source_advance`."""
    if epochs < 1:
        raise InputError("compare one epoch or more", job=job.name, epochs=epochs)
    return job.newest_epochs(epochs)


def _advance(ones: Sequence[SourcePosition], high_water: int | None) -> PartitionAdvance:
    newest = ones[-1]
    moved = [
        later.finished_at_micros
        for earlier, later in itertools.pairwise(ones)
        if later.state != earlier.state
    ]
    seconds = (newest.finished_at_micros - ones[0].finished_at_micros) / 1e6
    ends = (ones[0].position, newest.position)
    rate = None
    if seconds > 0 and ends[0] is not None and ends[1] is not None:
        rate = (ends[1] - ends[0]) / seconds
    lag = None
    if high_water is not None and newest.position is not None:
        lag = max(0, high_water - newest.position)
    return PartitionAdvance(
        newest=newest,
        advanced_at_micros=moved[-1] if moved else None,
        rate=rate,
        lag=lag,
        positions=tuple((one.finished_at_micros, one.position) for one in ones),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WatermarkAdvance:
    """How the watermark of one operator advanced.

    Attributes:
        watermark_micros: at the newest epoch, of the slowest subtask; None = not all have one.
        ahead_micros: how far the fastest subtask is ahead of it.
        lag_micros: how far it is behind the end of the newest epoch, by the writer's clock.
        rate: seconds of event time a second over the epochs; 1 = it keeps up. None = unknown.
        watermarks: `(finished_at_micros, watermark_micros)` at each epoch, oldest first.
    """

    operator: str
    watermark_micros: int | None
    ahead_micros: int | None
    lag_micros: int | None
    rate: float | None
    watermarks: tuple[tuple[int, int | None], ...]


def watermark_advance(job: StateJob, epochs: int = EPOCHS) -> list[WatermarkAdvance]:
    """Return how the watermark of each operator advanced; arguments as `source_advance`."""
    by_operator: dict[str, list[tuple[int, int | None]]] = defaultdict(list)
    found = newest_epochs(job, epochs)
    for epoch in found:
        for one in epoch.operators:
            finished = epoch.checkpoint.finish_time_micros
            by_operator[one.operator].append((finished, one.min_watermark_micros))
    return [
        _watermark(one.operator, one.max_watermark_micros, tuple(by_operator[one.operator]))
        for one in found[-1].operators
    ]


def _watermark(
    operator: str, most: int | None, found: tuple[tuple[int, int | None], ...]
) -> WatermarkAdvance:
    finished, watermark = found[-1]
    known = [(at, reached) for at, reached in found if reached is not None]
    rate = None
    if len(known) > 1 and known[-1][0] > known[0][0]:
        rate = (known[-1][1] - known[0][1]) / (known[-1][0] - known[0][0])
    return WatermarkAdvance(
        operator=operator,
        watermark_micros=watermark,
        ahead_micros=None if watermark is None or most is None else most - watermark,
        lag_micros=None if watermark is None else finished - watermark,
        rate=rate,
        watermarks=found,
    )
