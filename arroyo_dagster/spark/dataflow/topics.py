"""Topics that are bound to sources and sinks of Spark: `words=spark:kafka?subscribe=words&…`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from arroyo_dagster.dataflow.topics.bindings import TopicBinding
from arroyo_dagster.dataflow.topics.cells import Shape, typed_table
from arroyo_dagster.dataflow.topics.records import RECORDS
from arroyo_dagster.spark.connectors.queries import StagedStream, StagingQueries
from arroyo_dagster.spark.connectors.sink import SinkBinding, SparkSink
from arroyo_dagster.spark.connectors.streams import SparkStream
from arroyo_dagster.spark.dataflow.records import TopicRecords
from arroyo_dagster.spark.staging import StagedSource, Staging, query_location
from arroyo_dagster.state.codec.parquet import encode_rows
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.runtime.operators import Offset, Sink, Source
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
