"""Use any streaming source of Spark as the source of a topic: its records are staged in files.

A streaming query reads the source (Kafka, files, any format on the class path) and writes each of
its micro-batches once: Parquet files of records, then a list of these files. The creation of the
list publishes the batch. `StagedSource` reads such batches from any offset, with the same rows in
the same order, in process or on Spark. The exactly-once processing of a job therefore does not
depend on whether the source can be read again. See `docs/decisions/sdf-on-spark.md`.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.dataflow.storage.boundary import VALUE
from arroyo_dagster.dataflow.topics.records import RECORDS
from arroyo_dagster.dataflow.topics.rows import plain_rows
from arroyo_dagster.errors import (
    ConflictError,
    FormatError,
    InputError,
    NotFoundError,
    ProtocolError,
)
from arroyo_dagster.redaction import redact_text, redacted_cause
from arroyo_dagster.spark.query_log import query_id
from arroyo_dagster.state.codec.parquet import decode_file, encode_rows
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.numbers import parse_numbered
from arroyo_dagster.state.runtime.operators import Offset, Source
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

BATCHES_PER_EPOCH = 16
_BATCH_BITS, _PARTITION_BITS = 36, 24  # rows of a partition, partitions of a batch, batches
_RAW = (pa.types.is_binary, pa.types.is_string, pa.types.is_large_binary, pa.types.is_large_string)
_OF_KAFKA = frozenset({"key", VALUE, "partition", "offset", "timestamp"})
_PARTITION_DDL = "partition int, name string"


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkTopic:
    """A streaming source of Spark that a topic is bound to.

    Attributes:
        topic: the topic of the dataflow.
        format: the format for `spark.readStream.format`; `kafka` needs its connector on the class
            path.
        options: the options for `.options`.
        schema: the columns in Spark's DDL, for formats that need it (`json`, `csv`, `parquet`).
    """

    topic: str
    format: str
    options: Mapping[str, str] = field(repr=False)
    schema: str | None = None

    def frame(self, session: SparkSession) -> DataFrame:
        """Return the stream.

        Raises:
            InputError: Spark does not know the format, or rejects the options.
        """
        from pyspark.errors import PySparkException

        reader = session.readStream.format(self.format).options(**dict(self.options))
        if self.schema is not None:
            reader = reader.schema(self.schema)
        try:
            return reader.load()
        except PySparkException as error:
            raise InputError(
                f"Spark cannot read this source ({redact_text(str(error)).splitlines()[0]})",
                topic=self.topic,
                format=self.format,
                next_step="check its options; add a format that Spark does not include to the "
                "class path with --conf spark.jars.packages=…",
            ) from redacted_cause(error)


# ---- reading staged batches ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, order=True)
class StagedFile:
    """A file of one batch. `number`: the partition of Spark that wrote it."""

    batch: int
    number: int
    path: StatePath


class StagedSource(Source):
    """Reads the staged batches of a topic.

    Args:
        topic: the topic, for messages.
        store: the object store of the batches.
        directory: the directory of the topic.
        batches_per_epoch: the maximum number of Spark's batches per epoch.

    Raises:
        InputError: `batches_per_epoch` is below 1.
    """

    schema = RECORDS

    def __init__(
        self,
        topic: str,
        store: ObjectStore,
        directory: StatePath,
        *,
        batches_per_epoch: int = BATCHES_PER_EPOCH,
    ) -> None:
        if batches_per_epoch < 1:
            raise InputError("batches_per_epoch is at least 1", topic=topic)
        self._topic = topic
        self._store = store
        self._directory = directory
        self._batches_per_epoch = batches_per_epoch

    def initial_offset(self) -> Offset:
        """Return the offset before the first batch."""
        return {"batch": -1}

    def latest_offset(self, start: Offset) -> Offset:
        """Return the offset after at most `batches_per_epoch` more batches.

        Batches are published in order, so that none is skipped.
        """
        there = staged_batches(self._store, self._directory, after=int(start["batch"]))
        return {"batch": there[: self._batches_per_epoch][-1]} if there else dict(start)

    def partitions(self, start: Offset, end: Offset) -> Sequence[StagedFile]:
        """Return one split per file.

        Raises:
            ProtocolError: a batch between the offsets is missing.
        """
        batches = range(int(start["batch"]) + 1, int(end["batch"]) + 1)
        return [file for found in concurrently(self._files, batches) for file in found]

    def _files(self, batch: int) -> list[StagedFile]:
        path = list_path(self._directory, batch)
        try:
            names = json.loads(self._store.read(path))
        except NotFoundError as error:
            raise ProtocolError(
                "records that an epoch of this run reads are missing",
                topic=self._topic,
                path=path,
                next_step="look for them in backups of the folder",
            ) from error
        except ValueError as error:
            raise FormatError("not a file list written by this package", path=path) from error
        return [StagedFile(batch, number, self._directory / name) for number, name in names]

    def read(self, partition: StagedFile) -> Iterator[pa.RecordBatch]:
        """Yield the records of one file."""
        rows, _ = decode_file(self._store.read(partition.path), partition.path)
        if not rows.schema.equals(RECORDS):
            raise FormatError(
                "the staged records have other columns than the source", path=partition.path
            )
        yield from rows.to_batches()

    def forget(self, done: Offset) -> None:
        """Remove the batches up to an offset (inclusive) that a ready epoch has read.

        Batches that cannot be deleted remain.
        """
        before = int(done["batch"])
        there = [one for one in staged_batches(self._store, self._directory) if one <= before]
        for batch in there:
            files = [file.path for file in self._files(batch)]
            # Delete the list last, so that a partly deleted batch can still be found and deleted.
            if not self._store.delete_many(files).failed:
                self._store.delete_many([list_path(self._directory, batch)])


def list_path(directory: StatePath, batch: int) -> StatePath:
    """Return the path of the list of a batch's files; its creation publishes the batch."""
    return directory / f"{batch:012}.json"


def staged_batches(store: ObjectStore, directory: StatePath, *, after: int = -1) -> list[int]:
    """Return the published batches after `after` (exclusive), in order."""
    start = list_path(directory, after) if after >= 0 else None
    try:
        listed = store.list(directory, start_after=start)
        names = [one.path.name for one in listed if one.path.parent == directory]
    except NotFoundError:
        return []
    found = (parse_numbered(name, 12) for name in names)
    return sorted(batch for batch in found if batch is not None)


# ---- staging -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Staging:
    """Stages the batches of one topic.

    Attributes:
        topic: the topic, for messages.
        store: the object store of the batches.
        directory: the directory of the topic.
        encode: returns the value of a row from its cells, as `plain_rows` returns them. It is not
            used if rows have a column `value` of text or bytes (`kafka`, `text`), which then is
            the value.
        location: where Spark stores the offsets of the source; it must not be deleted.
    """

    topic: str
    store: ObjectStore
    directory: StatePath
    encode: Callable[[dict[str, Any]], bytes]
    location: str

    def start(self, frame: DataFrame, *, follow: bool, seconds: float = 0.0) -> StreamingQuery:
        """Start to stage a stream, and return its query.

        Args:
            frame: the stream.
            follow: whether to continue with new records; else the query ends after those of now.
            seconds: the minimum time between two batches; ignored without `follow`.
        """
        writer = frame.writeStream.foreachBatch(self.stage)
        writer = writer.option("checkpointLocation", self.location)
        if not follow:
            writer = writer.trigger(availableNow=True)
        elif seconds > 0:
            writer = writer.trigger(processingTime=f"{seconds} seconds")
        return writer.start()

    def stage(self, frame: DataFrame, batch: int) -> None:
        """Write one micro-batch, unless it is already published.

        Spark repeats a batch whose end it has not recorded. The first attempt that creates the list
        wins.

        Raises:
            StorageError: the store failed; the batch is not published.
            ConflictError: another query has staged batches of the topic.
        """
        self._check_query(query_id(frame.sparkSession, self.location))
        path = list_path(self.directory, batch)
        if self.store.head(path) is not None:
            return
        parts = frame.mapInArrow(self._writer(batch), _PARTITION_DDL).collect()
        names = sorted((int(row.partition), str(row.name)) for row in parts)
        self.store.create(path, json.dumps(names).encode())

    def _writer(self, batch: int) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
        staging = self

        def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            from pyspark import TaskContext

            context = TaskContext.get()
            number = context.partitionId() if context is not None else 0
            rows = pa.Table.from_batches(parts) if (parts := list(batches)) else None
            if rows is None or not rows.num_rows:
                return
            name = f"{batch:012}-{number:05}-{uuid.uuid4().hex[:16]}.parquet"
            data = encode_rows(staging.records(rows, batch, number))
            staging.store.put(staging.directory / name, data)
            columns = [pa.array([number], pa.int32()), pa.array([name])]
            yield pa.RecordBatch.from_arrays(columns, names=["partition", "name"])

        return write

    def records(self, rows: pa.Table, batch: int, number: int) -> pa.Table:
        """Convert Spark's rows to records of the topic, in their order.

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

    def _check_query(self, query: str) -> None:
        """Check that the query is the one that staged the topic's first batch.

        A new query counts its batches from 0 again, so that they would be mistaken for published
        ones.
        """
        path = self.directory / "query"
        if self.store.create(path, query.encode()):
            return
        known = self.store.read(path).decode()
        if known != query:
            raise ConflictError(
                "Spark's log of this source is not the log that its records were staged with",
                topic=self.topic,
                path=path,
                recorded_query=known,
                query=query,
                next_step="restore Spark's checkpoint of the source; or, to start anew with what "
                "the source still has, delete this object and the objects beside it",
            )


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
