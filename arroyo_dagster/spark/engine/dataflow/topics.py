"""Topics that are bound to sources and sinks of Spark: `words=spark:kafka?subscribe=words&…`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.dataflow.storage.boundary import VALUE
from arroyo_dagster.dataflow.topics.bindings import TopicBinding
from arroyo_dagster.dataflow.topics.cells import Shape, typed_table
from arroyo_dagster.dataflow.topics.records import RECORDS
from arroyo_dagster.dataflow.topics.rows import plain_rows
from arroyo_dagster.engine.operators import Offset, Sink, Source
from arroyo_dagster.spark.engine.connectors.queries import SparkStream, StagedStream, StagingQueries
from arroyo_dagster.spark.engine.connectors.sink import SinkBinding, SparkSink
from arroyo_dagster.spark.engine.staging import StagedSource, Staging, query_location
from arroyo_dagster.state.codec.parquet import encode_rows
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.storage.store import ObjectStore

SCHEMA = "schema"
"""The option of a binding with the columns in Spark's DDL; it is not an option of the format."""

_SOURCE_NODE = "topics"


@dataclass(slots=True)
class SparkTopics:
    """The topics of one dataflow that are bound to Spark's sources and sinks.

    Args:
        store: the object store of the states, in which records of sources are staged.
        checkpoint_location: where Spark stores the offsets of its sources; None = below the jobs,
            which must then be on local disk.
    """

    store: ObjectStore
    checkpoint_location: str | None = None
    _streams: dict[str, StagedStream] = field(default_factory=dict)

    def source(
        self, binding: TopicBinding, shape: Shape, directory: StatePath, readers: tuple[str, ...]
    ) -> Source:
        """Open the source of a topic.

        Args:
            binding: the binding of the topic.
            shape: the shape of its values.
            directory: where its records are staged.
            readers: the services that read it.

        Raises:
            InputError: no checkpoint location is given, and the store is not on local disk.
        """
        options = {name: str(value) for name, value in binding.options.items() if name != SCHEMA}
        schema = binding.options.get(SCHEMA)
        location = query_location(self.store, directory, self.checkpoint_location)
        convert = TopicRecords(shape.from_row)
        source = StagedSource(binding.topic, self.store, directory, RECORDS)
        self._streams[binding.topic] = StagedStream(
            stream=SparkStream(
                name=binding.topic,
                format=binding.target,
                options=options,
                schema=None if schema is None else str(schema),
            ),
            staging=Staging(binding.topic, self.store, directory, convert, location),
            source=source,
            readers=readers,
        )
        return source

    def sink(self, binding: TopicBinding, shape: Shape) -> Sink:
        """Open the sink of a topic."""
        options = {name: str(value) for name, value in binding.options.items()}
        return TopicSink(self.store, binding.topic, binding.target, options, shape)

    def queries(self) -> StagingQueries:
        """Return the queries of a run, which stage the records of the sources."""
        return StagingQueries(self._streams)


def topic_offsets(checkpoint: Checkpoint) -> Mapping[str, Offset]:
    """Return the offsets of the topics that an epoch of a service has read."""
    if checkpoint.progress is None:
        return {}
    offsets: Mapping[str, Any] = json.loads(checkpoint.progress.offsets)
    topics: Mapping[str, Offset] = offsets.get(_SOURCE_NODE, {}).get("topics", {})
    return topics


class TopicSink(SparkSink):
    """Writes records of a topic to a batch sink of Spark; see `SparkSink`.

    Args:
        store: the object store of the states.
        topic: the topic.
        kind, options: the format and its options for `DataFrameWriter`.
        shape: the shape of the values, which determines the columns.
    """

    def __init__(
        self,
        store: ObjectStore,
        topic: str,
        kind: str,
        options: Mapping[str, str],
        shape: Shape,
    ) -> None:
        super().__init__(kind, options)
        self._shape = shape
        self.bind(SinkBinding(store, topic, typed_table([], shape).schema))

    def encode(self, rows: pa.Table) -> bytes:
        """Return a Parquet file of the values, with the declared types."""
        return encode_rows(typed_table(rows.column("value").to_pylist(), self._shape))


# ---- rows of Spark's streaming sources as records of topics --------------------------------------

_BATCH_BITS, _PARTITION_BITS = 36, 24  # rows of a partition, partitions of a batch, batches
_RAW = (pa.types.is_binary, pa.types.is_string, pa.types.is_large_binary, pa.types.is_large_string)
_OF_KAFKA = frozenset({"key", VALUE, "partition", "offset", "timestamp"})


@dataclass(frozen=True, slots=True)
class TopicRecords:
    """Converts Spark's rows to records of a topic.

    Attributes:
        encode: returns the value of a row from its cells, as `plain_rows` returns them. It is not
            used if rows have a column `value` of text or bytes (`kafka`, `text`), which then is
            the value.
    """

    encode: Callable[[dict[str, Any]], bytes]

    def __call__(self, rows: pa.Table, batch: int, number: int) -> pa.Table:
        """Return the records of some rows, in their order.

        Args:
            rows: the rows.
            batch, number: their batch and partition in Spark, which determine the offsets of
                records from sources without offsets.
        """
        count, kafka = rows.num_rows, _OF_KAFKA <= set(rows.column_names)
        first = (batch << _BATCH_BITS) + (number << _PARTITION_BITS)
        columns: dict[str, Any] = {
            "key": rows.column("key") if kafka else pa.nulls(count, pa.binary()),
            VALUE: self._values(rows),
            "partition": rows.column("partition") if kafka else pa.array([number] * count),
            "offset": rows.column("offset") if kafka else pa.array(range(first, first + count)),
            "timestamp": _times(rows),
        }
        return pa.table([_as(columns[field.name], field) for field in RECORDS], RECORDS)

    def _values(self, rows: pa.Table) -> pa.ChunkedArray | pa.Array:
        names = rows.column_names
        if VALUE in names and any(is_raw(rows.column(VALUE).type) for is_raw in _RAW):
            return rows.column(VALUE)
        if set(names) == {"timestamp", VALUE}:  # `rate`
            rows = rows.select([VALUE])
        return pa.array([self.encode(row) for row in plain_rows(rows)], pa.binary())


def _times(rows: pa.Table) -> pa.ChunkedArray | pa.Array:
    """Return the timestamps of records; nulls if the source has none."""
    if "timestamp" in rows.column_names and pa.types.is_timestamp(
        rows.schema.field("timestamp").type
    ):
        return rows.column("timestamp")
    return pa.nulls(rows.num_rows, pa.timestamp("ms"))


def _as(values: pa.ChunkedArray | pa.Array, field: pa.Field) -> pa.ChunkedArray | pa.Array:
    if pa.types.is_timestamp(field.type):
        # Spark's timestamps are in microseconds, those of records in milliseconds.
        return pc.floor_temporal(values, unit="millisecond").cast(field.type)
    return values if values.type.equals(field.type) else values.cast(field.type)
