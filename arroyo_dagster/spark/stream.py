"""Expose the sources of a pipeline as streaming data sources of Spark, read in Python workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from arroyo_dagster.spark.worker import CHUNK_DDL, PackedPipeline, read_source
from arroyo_dagster.state.model.ids import OperatorId
from arroyo_dagster.state.runtime.operators import Offset


class SplitPartition(InputPartition):
    """One split of a source, and its index among the splits of its batch."""

    def __init__(self, index: int, split: Any) -> None:
        super().__init__((index, split))


@dataclass(frozen=True)
class PipelineReader(DataSourceStreamReader):
    """Reads one source of a pipeline, as chunks of rows that are routed to subtasks.

    An instance is sent with every task, so workers must be able to import its class by name.
    """

    packed: PackedPipeline
    source: OperatorId
    start: Offset

    def initialOffset(self) -> Offset:  # noqa: N802
        """Return the offset at which the run starts."""
        return self.start

    def latestOffset(self, start: Offset, limit: Any) -> Offset:  # noqa: N802
        """Return the end offset of the next batch; the source itself limits its size."""
        return self.packed.unpack().sources[self.source].source.latest_offset(start)

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """Return the splits of one batch."""
        splits = self.packed.unpack().sources[self.source].source.partitions(start, end)
        return [SplitPartition(index, split) for index, split in enumerate(splits)]

    def read(self, partition: Any) -> Iterator[pa.RecordBatch]:
        """Return the chunks of one split."""
        index, split = partition.value
        return read_source(self.packed, self.source, index, split)


class PipelineSource(DataSource):
    """The data source of a reader. Each source has a subclass with its reader."""

    reader_of: PipelineReader

    @classmethod
    def name(cls) -> str:
        """Return the name of the format.

        It is unique per pipeline and source, since concurrent pipelines in a session share formats.
        """
        reader = cls.reader_of
        return f"arroyo_source_{reader.packed.digest[:32]}_{reader.source}"

    def schema(self) -> str:
        """Return the schema of chunks."""
        return CHUNK_DDL

    def streamReader(self, schema: Any) -> DataSourceStreamReader:  # noqa: N802
        """Return the reader."""
        return self.reader_of


def open_streams(
    session: SparkSession, packed: PackedPipeline, starts: dict[OperatorId, Offset]
) -> DataFrame:
    """Return all sources of a pipeline as one stream of chunks, in the order of `starts`.

    Args:
        session: the session.
        packed: the pipeline.
        starts: the offset at which each source starts if the query has no log yet.
    """
    frames = []
    for name, start in starts.items():
        reader = PipelineReader(packed, name, start)
        source: type[PipelineSource] = type(
            "SourceOfPipeline", (PipelineSource,), {"reader_of": reader}
        )
        session.dataSource.register(source)
        frames.append(session.readStream.format(source.name()).load())
    whole = frames[0]
    for frame in frames[1:]:
        whole = whole.union(frame)
    return whole
