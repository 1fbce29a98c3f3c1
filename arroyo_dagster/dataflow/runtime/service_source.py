"""All sources of a service as one source, with the engine's clock and the owners' epochs to read.

The end offset of an epoch contains all its inputs: the clock, the epoch of every other service that
is read, and whether the service is idle. Every read of the rows therefore yields the same, on any
number of machines.

Source: sdf-states.md 2.8 (T3), 3.5 (W7, W8), 8.3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from arroyo_dagster.dataflow.runtime.converters import json_bytes
from arroyo_dagster.dataflow.storage.boundary import (
    FILE_METADATA,
    VALUE,
    check_topic_schema,
    topic_schema,
)
from arroyo_dagster.dataflow.views.view import OwnerJob
from arroyo_dagster.engine.operators import Offset, Source
from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.clock import Clock, wall_clock_ms

SOURCE, CLOCK, FILE = "_source", "_clock", "_file"
TICK, IDLE = -1, -2
"""Instead of the index of a source: a row with the clock only; IDLE also marks an idle service."""


def epoch_column(owner: str) -> str:
    """Return the name of the column with the epoch of an owner to read; null = it has none yet."""
    return f"_epoch of {owner}"


@dataclass(frozen=True, slots=True)
class TopicSplit:
    """A split of one source, or a row with the clock only.

    Attributes:
        source: the index of the source; `TICK` or `IDLE` for a clock row.
        split: the split of the source; None for a clock row.
        clock_ms: the engine's clock, in epoch milliseconds.
        epochs: the epochs of the owners, in their order.
    """

    source: int
    split: Any
    clock_ms: int
    epochs: tuple[int | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowTicks:
    """The clock rows of a service with windows: each epoch begins with one.

    Attributes:
        idleness_ms: the time without records after which the service is idle; None = never.
        flush_open: whether the service becomes idle once when every source has ended.
        unflushed: returns whether the newest epoch has windows whose flush failed. The first epoch
            of a run then needs no new records: the windows are flushed again.
    """

    idleness_ms: int | None = None
    flush_open: bool = False
    unflushed: Callable[[], bool] = lambda: False


class ServiceSource(Source):
    """The sources of a service, in their order, with a clock.

    Args:
        sources: by topic, in the order of the YAML.
        owners: the jobs that own the states that the service reads.
        raw: the topics with the converter `raw`.
        ticks: the clock rows; None = the service has no windows.
        files: whether records have the file that they were read from, as `_file`.
        clock: the engine's clock, in epoch milliseconds.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        *,
        owners: Mapping[str, OwnerJob],
        raw: Set[str] = frozenset(),
        ticks: WindowTicks | None = None,
        files: bool = False,
        clock: Clock = wall_clock_ms,
    ) -> None:
        for topic, source in sources.items():
            check_topic_schema(topic, source.schema)
        self._sources = dict(sources)
        self._owners = dict(owners)
        self._raw = frozenset(raw)
        self._ticks = ticks
        self._may_retry = ticks is not None
        self._beginnings: dict[str, Offset] = {}
        self._clock = clock
        self.value_type = common_value_type(sources.values())
        value = pa.field(VALUE, self.value_type)
        self.schema = pa.schema(
            [
                *(value if field.name == VALUE else field for field in topic_schema()),
                *([pa.field(FILE, pa.string())] if files else ()),
                pa.field(SOURCE, pa.int32(), nullable=False),
                *(pa.field(epoch_column(owner), pa.int64()) for owner in owners),
                pa.field(CLOCK, pa.timestamp("ms"), nullable=False),
            ]
        )

    def initial_offset(self) -> Offset:
        """Return the offset at the beginning of every source."""
        topics = {topic: source.initial_offset() for topic, source in self._sources.items()}
        return {"topics": topics, "clock_ms": 0, "idle": False, "epochs": {}}

    def check_offset(self, offset: Offset) -> None:
        """Check the offset of every source."""
        for topic, source in self._sources.items():
            if topic in offset["topics"]:
                source.check_offset(self._start(offset, topic))

    def latest_offset(self, start: Offset) -> Offset:
        """Return the latest offset of every source with the clock; `start` if nothing is new."""
        before = {topic: self._start(start, topic) for topic in self._sources}
        # Members of other bindings of a topic, and of its dead letters, stay.
        topics = {
            topic: {**before[topic], **source.latest_offset(before[topic])}
            for topic, source in self._sources.items()
        }
        now = max(self._clock(), int(start["clock_ms"]))
        arrived = topics != before
        idle = not arrived and self._is_idle(start, now)
        retries = int(start.get("retries", 0)) + self._is_retry()
        self._may_retry = False
        if not arrived and not idle and retries == start.get("retries", 0):
            return start
        heads = {owner: job.newest() for owner, job in self._owners.items()}
        epochs = {owner: head.epoch if head else None for owner, head in heads.items()}
        end = {"topics": topics, "clock_ms": now, "idle": idle, "epochs": epochs}
        return {**end, "retries": retries} if retries else end

    def _is_retry(self) -> bool:
        return self._may_retry and self._ticks is not None and self._ticks.unflushed()

    def _start(self, offset: Offset, topic: str) -> Offset:
        stored: Offset = offset["topics"].get(topic, {})
        begin = self._beginnings.get(topic)
        if begin is None:  # once: that of a rate is a time
            begin = self._beginnings[topic] = self._sources[topic].initial_offset()
        # A source that was added to the service later, or is read again after a clean, starts at
        # its beginning; members of dead letters stay.
        return stored if begin.keys() & stored.keys() else {**begin, **stored}

    def _is_idle(self, start: Offset, now: int) -> bool:
        ticks = self._ticks
        if ticks is None or start["idle"] or not start["clock_ms"]:
            return False
        if ticks.flush_open and self._ended(start):
            return True
        return ticks.idleness_ms is not None and now - start["clock_ms"] >= ticks.idleness_ms

    def _ended(self, offset: Offset) -> bool:
        return all(
            source.exhausted(self._start(offset, topic)) for topic, source in self._sources.items()
        )

    def exhausted(self, offset: Offset) -> bool:
        """Return whether every source has ended and, with `flush_open`, open windows are closed."""
        ticks = self._ticks
        if ticks and ticks.flush_open and offset["clock_ms"] and not offset["idle"]:
            return False
        return self._ended(offset) and not self._is_retry()

    def partitions(self, start: Offset, end: Offset) -> Sequence[TopicSplit]:
        """Return the splits of every source in order; with `ticks`, a clock row first."""
        clock_ms = int(end["clock_ms"])
        epochs = tuple(end["epochs"].get(owner) for owner in self._owners)
        splits = [
            TopicSplit(index, split, clock_ms, epochs)
            for index, (topic, source) in enumerate(self._sources.items())
            if end["topics"].get(topic, self._start(start, topic)) != self._start(start, topic)
            for split in source.partitions(self._start(start, topic), end["topics"][topic])
        ]
        tick = TopicSplit(IDLE if end["idle"] else TICK, None, clock_ms, epochs)
        return [tick, *splits] if self._ticks else splits

    def read(self, partition: TopicSplit) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one split, with the clock and the owners' epochs."""
        if partition.source < 0:
            yield self._completed(self._no_record(), partition)
            return
        source = list(self._sources.values())[partition.source]
        for batch in source.read(partition.split):
            if not batch.schema.equals(source.schema):
                raise InputError(
                    "a source yields rows of another schema than it declares",
                    topic=list(self._sources)[partition.source],
                    expected=str(source.schema),
                    found=str(batch.schema),
                )
            yield self._completed(batch, partition)

    def _completed(self, batch: pa.RecordBatch, partition: TopicSplit) -> pa.RecordBatch:
        rows = batch.num_rows
        columns = {name: batch.column(index) for index, name in enumerate(batch.schema.names)}
        if columns[VALUE].type != self.value_type:
            topic = list(self._sources)[partition.source]
            columns[VALUE] = _as_records(columns[VALUE], raw=topic in self._raw)
        file = (batch.schema.metadata or {}).get(FILE_METADATA)
        columns[FILE] = _constant(None if file is None else file.decode(), pa.string(), rows)
        columns[SOURCE] = _constant(partition.source, pa.int32(), rows)
        columns[CLOCK] = _constant(partition.clock_ms, pa.timestamp("ms"), rows)
        for owner, epoch in zip(self._owners, partition.epochs, strict=True):
            columns[epoch_column(owner)] = _constant(epoch, pa.int64(), rows)
        return pa.RecordBatch.from_arrays(
            [columns[field.name] for field in self.schema], schema=self.schema
        )

    def _no_record(self) -> pa.RecordBatch:
        values: dict[str, Any] = {"partition": 0, "offset": -1}
        schema = topic_schema(self.value_type)
        return pa.RecordBatch.from_arrays(
            [pa.array([values.get(field.name)], field.type) for field in schema], schema=schema
        )


def common_value_type(sources: Iterable[Source]) -> pa.DataType:
    """Return the type of the values of all sources of a service: binary unless all have another."""
    kinds = {source.schema.field(VALUE).type for source in sources}
    return kinds.pop() if len(kinds) == 1 else pa.binary()


def _constant(value: Any, kind: pa.DataType, rows: int) -> pa.Array:
    return pa.repeat(pa.scalar(value, kind), rows)


def _as_records(values: pa.Array, *, raw: bool) -> pa.Array:
    """Encode values as bytes, as sources with binary values have them."""
    if pa.types.is_binary(values.type):
        return values
    if raw and (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
        return values.cast(pa.binary())
    return pa.array([json_bytes(value) for value in values.to_pylist()], pa.binary())
