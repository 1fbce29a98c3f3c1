"""A topic of numbers at a constant rate, to test a dataflow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from arroyo_dagster.dataflow.topics.records import RECORDS, Found, record_batches
from arroyo_dagster.engine.operators import Offset, Source
from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.clock import Clock, wall_clock_ms


@dataclass(frozen=True, slots=True)
class RateSplit:
    """Numbers from `start` (inclusive) to `end` (exclusive). `origin_millis`: the time of 0."""

    start: int
    end: int
    origin_millis: int


class RateSource(Source):
    """The numbers 0, 1, 2… at a constant rate, as records `{"value": n, "time": milliseconds}`.

    The time of a number is the first start of the job plus n / `per_second`, so that a second read
    returns the same record. After a pause, the source catches up.

    Args:
        topic: the topic, for messages.
        per_second: the number of records per second.
        limit: the total number of records; None = unlimited.
        rows_per_epoch: the maximum number of records per epoch.
        clock_millis: the clock, in epoch milliseconds.

    Raises:
        InputError: `per_second` or `rows_per_epoch` is not positive.
    """

    schema = RECORDS

    def __init__(
        self,
        topic: str,
        per_second: float,
        *,
        limit: int | None = None,
        rows_per_epoch: int,
        clock_millis: Clock = wall_clock_ms,
    ) -> None:
        for name, value in (("per_second", per_second), ("rows_per_epoch", rows_per_epoch)):
            if not value > 0:
                raise InputError(f"{name} is above 0", topic=topic, given=value)
        self._per_second = per_second
        self._limit = limit
        self._rows_per_epoch = rows_per_epoch
        self._clock_millis = clock_millis

    def initial_offset(self) -> Offset:
        """Return the offset of the number 0, which is due now."""
        return {"next": 0, "origin_millis": self._clock_millis()}

    def latest_offset(self, start: Offset) -> Offset:
        """Return the offset after the numbers that are due, at most `rows_per_epoch` of them."""
        if "next" not in start:  # the offset is of an earlier binding of the topic
            return {**start, **self.initial_offset()}
        passed = self._clock_millis() - int(start["origin_millis"])
        due = int(passed * self._per_second / 1000)
        due = due if self._limit is None else min(due, self._limit)
        first = int(start["next"])
        return {**start, "next": max(first, min(due, first + self._rows_per_epoch))}

    def partitions(self, start: Offset, end: Offset) -> Sequence[RateSplit]:
        """Return one split, or none without new numbers."""
        first, last = int(start.get("next", 0)), int(end.get("next", 0))
        return [RateSplit(first, last, int(end["origin_millis"]))] if first < last else []

    def read(self, partition: RateSplit) -> Iterator[pa.RecordBatch]:
        """Yield the numbers of one split."""
        origin = partition.origin_millis
        numbers = range(partition.start, partition.end)
        yield from record_batches((self._found(number, origin) for number in numbers), 0)

    def _found(self, number: int, origin_millis: int) -> Found:
        millis = origin_millis + int(number * 1000 / self._per_second)
        return Found(number, b'{"value":%d,"time":%d}' % (number, millis), time_millis=millis)

    def exhausted(self, offset: Offset) -> bool:
        """Return whether the limit is reached."""
        return self._limit is not None and int(offset.get("next", 0)) >= self._limit
