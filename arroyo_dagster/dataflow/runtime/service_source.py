"""All sources of a service as one, with the engine's clock and the epochs its readers see.

What decides an epoch is settled once, where its end is: the clock, which epoch of every other
service is read, whether the service is idle. It lies in the offset, so that whoever reads the rows,
on however many machines and however often, finds the same.

Source: sdf-states.md 2.8 (T3), 3.5 (W7, W8), 8.3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from arroyo_dagster.dataflow.runtime.converters import json_bytes
from arroyo_dagster.dataflow.storage.boundary import VALUE, check_topic_schema, topic_schema
from arroyo_dagster.dataflow.views.view import OwnerJob
from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.clock import Clock, wall_clock_ms
from arroyo_dagster.state.runtime.operators import Offset, Source

SOURCE, CLOCK = "_source", "_clock"
TICK, IDLE = -1, -2
"""In place of a source: a row that says what time it is; and that the service is idle."""


def epoch_column(owner: str) -> str:
    """The column that holds which epoch of an owner is read; null = it has none yet."""
    return f"_epoch of {owner}"


@dataclass(frozen=True, slots=True)
class TopicSplit:
    """A split of one source, or a row that only says what time it is.

    Attributes:
        source: which one; `TICK` or `IDLE` for none.
        epochs: of the owners, in their order.
    """

    source: int
    split: Any
    clock_ms: int
    epochs: tuple[int | None, ...]


class ServiceSource(Source):
    """The sources of a service, in their order, with a clock.

    Args:
        sources: by topic, in the order of the YAML.
        owners: the jobs whose states the service reads.
        raw: the topics whose converter is `raw`.
        ticks: whether a row of its own says the time of each epoch, for windows.
        idleness_ms: how long without records makes the service idle; None = never.
        flush_open: be idle once, when every source has ended.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        *,
        owners: Mapping[str, OwnerJob],
        raw: Set[str] = frozenset(),
        ticks: bool = False,
        idleness_ms: int | None = None,
        flush_open: bool = False,
        clock: Clock = wall_clock_ms,
    ) -> None:
        for topic, source in sources.items():
            check_topic_schema(topic, source.schema)
        self._sources = dict(sources)
        self._owners = dict(owners)
        self._raw = frozenset(raw)
        self._ticks = ticks
        self._idleness_ms = idleness_ms
        self._flush_open = flush_open
        self._clock = clock
        kinds = {source.schema.field(VALUE).type for source in sources.values()}
        self.value_type: pa.DataType = kinds.pop() if len(kinds) == 1 else pa.binary()
        value = pa.field(VALUE, self.value_type)
        self.schema = pa.schema(
            [
                *(value if one.name == VALUE else one for one in topic_schema()),
                pa.field(SOURCE, pa.int32(), nullable=False),
                *(pa.field(epoch_column(owner), pa.int64()) for owner in owners),
                pa.field(CLOCK, pa.timestamp("ms"), nullable=False),
            ]
        )

    def initial_offset(self) -> Offset:
        """Every source at its beginning."""
        topics = {topic: source.initial_offset() for topic, source in self._sources.items()}
        return {"topics": topics, "clock_ms": 0, "idle": False, "epochs": {}}

    def latest_offset(self, start: Offset) -> Offset:
        """As far as each source goes, and what time it is; `start` where nothing happened."""
        topics = {
            topic: source.latest_offset(self._start(start, topic))
            for topic, source in self._sources.items()
        }
        before = {topic: self._start(start, topic) for topic in topics}
        now = max(self._clock(), int(start["clock_ms"]))
        arrived = topics != before
        idle = not arrived and self._is_idle(start, now)
        if not arrived and not idle:
            return start
        heads = {owner: job.newest() for owner, job in self._owners.items()}
        epochs = {owner: head.epoch if head else None for owner, head in heads.items()}
        return {"topics": topics, "clock_ms": now, "idle": idle, "epochs": epochs}

    def _start(self, offset: Offset, topic: str) -> Offset:
        # A source that was added to the service since begins at its beginning.
        known: Offset | None = offset["topics"].get(topic)
        return self._sources[topic].initial_offset() if known is None else known

    def _is_idle(self, start: Offset, now: int) -> bool:
        if not self._ticks or start["idle"] or not start["clock_ms"]:
            return False
        if self._flush_open and self._ended(start):
            return True
        return self._idleness_ms is not None and now - start["clock_ms"] >= self._idleness_ms

    def _ended(self, offset: Offset) -> bool:
        return all(
            source.exhausted(self._start(offset, topic)) for topic, source in self._sources.items()
        )

    def exhausted(self, offset: Offset) -> bool:
        """Whether every source has ended, and open windows are closed where that was asked."""
        if self._ticks and self._flush_open and offset["clock_ms"] and not offset["idle"]:
            return False
        return self._ended(offset)

    def partitions(self, start: Offset, end: Offset) -> Sequence[TopicSplit]:
        """The splits of every source, in the order of the sources."""
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
        """The rows of one split, with the clock of their epoch."""
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
        columns = {name: batch.column(at) for at, name in enumerate(batch.schema.names)}
        if columns[VALUE].type != self.value_type:
            topic = list(self._sources)[partition.source]
            columns[VALUE] = _as_records(columns[VALUE], raw=topic in self._raw)
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


def _constant(value: Any, kind: pa.DataType, rows: int) -> pa.Array:
    return pa.repeat(pa.scalar(value, kind), rows)


def _as_records(values: pa.Array, *, raw: bool) -> pa.Array:
    """Values that were read already, as records such as another source has."""
    if pa.types.is_binary(values.type):
        return values
    if raw and (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
        return values.cast(pa.binary())
    return pa.array([json_bytes(one) for one in values.to_pylist()], pa.binary())
