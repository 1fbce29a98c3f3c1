"""A topic of numbers at a steady pace, to try a dataflow with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from arroyo_dagster.dataflow.topics.records import RECORDS, Found, record_batches
from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.clock import Clock, wall_clock_ms
from arroyo_dagster.state.runtime.operators import Offset, Source


@dataclass(frozen=True, slots=True)
class RateSplit:
    """Numbers from `start` (included) to `end` (excluded). `origin_millis`: the time of 0."""

    start: int
    end: int
    origin_millis: int


class RateSource(Source):
    """The numbers 0, 1, 2… as records `{"value": n, "time": milliseconds}`, some a second.

    The time of a number is the job's first start plus its share of a second, so that reading it
    again gives the same record; behind a pause the source catches up.

    Args:
        topic: for messages.
        per_second: how many.
        limit: where it ends; None = never.
        rows_per_epoch: how many one epoch takes at most.

    Raises:
        InputError: a number is not positive.
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
        """The number 0, now."""
        return {"next": 0, "origin_millis": self._clock_millis()}

    def latest_offset(self, start: Offset) -> Offset:
        """The numbers whose time has come, at most `rows_per_epoch` of them."""
        if "next" not in start:  # of what the topic was bound to before
            return {**start, **self.initial_offset()}
        passed = self._clock_millis() - int(start["origin_millis"])
        due = int(passed * self._per_second / 1000)
        due = due if self._limit is None else min(due, self._limit)
        first = int(start["next"])
        return {**start, "next": max(first, min(due, first + self._rows_per_epoch))}

    def partitions(self, start: Offset, end: Offset) -> Sequence[RateSplit]:
        """One split."""
        first, last = int(start.get("next", 0)), int(end.get("next", 0))
        return [RateSplit(first, last, int(end["origin_millis"]))] if first < last else []

    def read(self, partition: RateSplit) -> Iterator[pa.RecordBatch]:
        """The numbers of one split."""
        origin = partition.origin_millis
        numbers = range(partition.start, partition.end)
        yield from record_batches((self._found(number, origin) for number in numbers), 0)

    def _found(self, number: int, origin_millis: int) -> Found:
        at = origin_millis + int(number * 1000 / self._per_second)
        return Found(number, b'{"value":%d,"time":%d}' % (number, at), time_millis=at)

    def exhausted(self, offset: Offset) -> bool:
        """Whether the limit is reached."""
        return self._limit is not None and int(offset.get("next", 0)) >= self._limit
