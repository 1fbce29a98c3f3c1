"""Use any streaming source of Spark as the source of a job: its rows are staged in files.

A streaming query reads the source (Kafka, files, any format on the class path) and writes each of
its micro-batches once: Parquet files of rows, then a list of these files. The creation of the list
publishes the batch. `StagedSource` reads such batches from any offset, with the same rows in the
same order. The exactly-once processing of a job therefore does not depend on whether the source can
be read again. See `docs/decisions/sdf-on-spark.md`.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from arroyo_dagster.engine.operators import Offset, Source
from arroyo_dagster.errors import (
    ConflictError,
    FormatError,
    InputError,
    NotFoundError,
    ProtocolError,
)
from arroyo_dagster.state.codec.parquet import decode_file, encode_rows
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.numbers import number_pattern, parse_numbered
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

BATCHES_PER_EPOCH = 16
Convert = Callable[[pa.Table, int, int], pa.Table]
"""Returns the rows to stage. Arguments: Spark's rows, their batch, their partition in Spark."""

_ROWS = re.compile(rf"({number_pattern(12)})-{number_pattern(5)}-[0-9a-f]{{16}}\.parquet")
_PARTITION_DDL = "partition int, name string"


# ---- reading staged batches ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, order=True)
class StagedFile:
    """A file of one batch. `number`: the partition of Spark that wrote it."""

    batch: int
    number: int
    path: StatePath


class StagedSource(Source):
    """Reads the staged batches of a stream.

    Args:
        name: the topic or the operator, for messages.
        store: the object store of the batches.
        directory: the directory of the batches.
        schema: the columns of the staged rows.
        batches_per_epoch: the maximum number of Spark's batches per epoch.

    Raises:
        InputError: `batches_per_epoch` is below 1.
    """

    def __init__(
        self,
        name: str,
        store: ObjectStore,
        directory: StatePath,
        schema: pa.Schema,
        *,
        batches_per_epoch: int = BATCHES_PER_EPOCH,
    ) -> None:
        if batches_per_epoch < 1:
            raise InputError("batches_per_epoch is at least 1", source=name)
        self.schema = schema
        self._name = name
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
        batches = staged_batches(self._store, self._directory, after=int(start["batch"]))
        return {"batch": batches[: self._batches_per_epoch][-1]} if batches else dict(start)

    def partitions(self, start: Offset, end: Offset) -> Sequence[StagedFile]:
        """Return one split per file.

        Raises:
            ProtocolError: a batch between the offsets is missing.
        """
        batches = range(int(start["batch"]) + 1, int(end["batch"]) + 1)
        return [file for files in concurrently(self._files, batches) for file in files]

    def _files(self, batch: int) -> list[StagedFile]:
        path = list_path(self._directory, batch)
        try:
            names, _ = _parse_list(self._store.read(path), path)
        except NotFoundError as error:
            raise self._missing(path) from error
        return [StagedFile(batch, number, self._directory / name) for number, name in names]

    def _missing(self, path: StatePath) -> ProtocolError:
        return ProtocolError(
            "records that an epoch of this run reads are missing",
            source=self._name,
            path=path,
            next_step="look for them in backups of the folder",
        )

    def read(self, partition: StagedFile) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one file.

        Raises:
            InputError: they were staged with other columns.
            ProtocolError: the file is missing.
        """
        try:
            data = self._store.read(partition.path)
        except NotFoundError as error:
            raise self._missing(partition.path) from error
        rows, _ = decode_file(data, partition.path)
        if not rows.schema.equals(self.schema):
            raise InputError(
                "rows were staged with other columns than the source has now",
                source=self._name,
                path=partition.path,
                staged=[f"{field.name}: {field.type}" for field in rows.schema],
                expected=[f"{field.name}: {field.type}" for field in self.schema],
                next_step="run the job with the former schema until it has taken them",
            )
        yield from rows.to_batches()

    def forget(self, done: Offset) -> None:
        """Remove the rows up to an offset (inclusive) that a ready epoch has read.

        Rows of attempts that were never published go as well. What cannot be deleted remains. The
        list of the newest batch remains: it shows `Staging` how far Spark's log must be.
        """
        before = int(done["batch"])
        rows = [
            info.path
            for info in self._store.list(self._directory)
            if (match := _ROWS.fullmatch(info.path.name)) and int(match[1]) <= before
        ]
        older = staged_batches(self._store, self._directory)[:-1]
        lists = [list_path(self._directory, batch) for batch in older if batch <= before]
        if not self._store.delete_many(rows).failed:
            self._store.delete_many(lists)


def list_path(directory: StatePath, batch: int) -> StatePath:
    """Return the path of the list of a batch's files; its creation publishes the batch."""
    return directory / f"{batch:012}.json"


def _parse_list(data: bytes, path: StatePath) -> tuple[list[tuple[int, str]], str | None]:
    """Return the files of a list, by number and name, and the digest of its batch.

    Lists that were written before 2026-11-24 have no digest.
    """
    try:
        parsed = json.loads(data)
        files, digest = (
            (parsed["files"], parsed["batch"]) if isinstance(parsed, dict) else (parsed, None)
        )
        return [(int(number), str(name)) for number, name in files], digest
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError("not a file list written by this package", path=path) from error


def staged_batches(store: ObjectStore, directory: StatePath, *, after: int = -1) -> list[int]:
    """Return the published batches after `after` (exclusive), in order."""
    start = list_path(directory, after) if after >= 0 else None
    try:
        listed = store.list(directory, start_after=start)
        names = [info.path.name for info in listed if info.path.parent == directory]
    except NotFoundError:
        return []
    numbers = (parse_numbered(name, 12) for name in names)
    return sorted(batch for batch in numbers if batch is not None)


# ---- staging -------------------------------------------------------------------------------------


def query_location(store: ObjectStore, directory: StatePath, given: str | None) -> str:
    """Return where Spark stores the offsets of the source whose rows are staged in a directory.

    Args:
        store: the object store of the batches.
        directory: the directory in the store.
        given: a path or URL that Spark can write to; None = beside the batches.

    Raises:
        InputError: none is given, and the store is not on local disk.
    """
    if given is not None:
        return f"{given}/{directory}"
    if not store.url.startswith("file:"):
        raise InputError(
            "Spark stores the offsets of its sources, and cannot do so below this URL",
            url=store.url,
            next_step="set --spark-checkpoint of `sdf run`, or checkpoint_location of a "
            "SparkSource, to a path that Spark can write to",
        )
    return f"{store.url}/{directory}/spark"


@dataclass(frozen=True, slots=True)
class Staging:
    """Stages the batches of one stream.

    Attributes:
        name: the topic or the operator, for messages.
        store: the object store of the batches.
        directory: the directory of the batches.
        convert: returns the rows to stage; called in workers.
        location: where Spark stores the offsets of the source; it must not be deleted.
    """

    name: str
    store: ObjectStore
    directory: StatePath
    convert: Convert
    location: str

    def start(
        self,
        frame: DataFrame,
        stage: Callable[[DataFrame, int], None] | None = None,
        *,
        follow: bool,
    ) -> StreamingQuery:
        """Start to stage a stream, and return its query.

        Args:
            frame: the stream.
            stage: called with each micro-batch and its number; None = the method `stage`.
            follow: whether to continue with new rows; else the query ends after those of now.
        """
        writer = frame.writeStream.foreachBatch(stage or self.stage)
        writer = writer.option("checkpointLocation", self.location)
        if not follow:
            writer = writer.trigger(availableNow=True)
        return writer.start()

    def stage(self, frame: DataFrame, batch: int) -> None:
        """Write one micro-batch, unless it is already published.

        Spark repeats a batch whose end it has not recorded. The first attempt that creates the list
        wins.

        Raises:
            StorageError: the store failed; the batch is not published.
            ConflictError: another query has staged batches in the directory, or later ones than
                Spark's log knows of.
        """
        self._check_query(query_id(frame.sparkSession, self.location))
        path = list_path(self.directory, batch)
        # A digest of the offsets of a batch; the batch has others if another log planned it.
        planned = _read_text(frame.sparkSession, f"{self.location}/offsets/{batch}")
        digest = hashlib.sha256(planned.encode()).hexdigest()[:16]
        published = staged_batches(self.store, self.directory, after=batch - 1)
        if published:
            self._check_batch(batch, digest, published)
            return
        parts = frame.mapInArrow(self._writer(batch), _PARTITION_DDL).collect()
        names = sorted((int(row.partition), str(row.name)) for row in parts)
        self.store.create(path, json.dumps({"files": names, "batch": digest}).encode())

    def _check_batch(self, batch: int, digest: str, published: Sequence[int]) -> None:
        """Check that a batch is published, and with the same rows.

        Jobs have read beyond its number: other rows under this number would never be read.
        """
        path = list_path(self.directory, batch)
        recorded = _parse_list(self.store.read(path), path)[1] if batch in published else ""
        if recorded not in (None, digest):
            raise ConflictError(
                "Spark's log of this source is older than the rows that were staged with it",
                source=self.name,
                batch=batch,
                staged=published[-1],
                location=self.location,
                next_step="restore the newest copy of Spark's checkpoint of the source",
            )

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
            data = encode_rows(staging.convert(rows, batch, number))
            staging.store.put(staging.directory / name, data)
            columns = [pa.array([number], pa.int32()), pa.array([name])]
            yield pa.RecordBatch.from_arrays(columns, names=["partition", "name"])

        return write

    def _check_query(self, query: str) -> None:
        """Check that the query is the one that staged the first batch.

        A new query counts its batches from 0 again, so that they would be mistaken for published
        ones.
        """
        path = self.directory / "query"
        if self.store.create(path, query.encode()):
            return
        recorded = self.store.read(path).decode()
        if recorded != query:
            raise ConflictError(
                "Spark's log of this source is not the log that its records were staged with",
                source=self.name,
                path=path,
                recorded_query=recorded,
                query=query,
                next_step="restore Spark's checkpoint of the source; or, to start anew with what "
                "the source still has, delete this object and the objects beside it",
            )


# ---- query log -----------------------------------------------------------------------------------
# The identity of a streaming query and of its batches, from the log at its checkpoint location.


def query_id(session: SparkSession, location: str) -> str:
    """Return the id of the query at a checkpoint location; it is the same after restarts."""
    return str(json.loads(_read_text(session, f"{location}/metadata"))["id"])


def _read_text(session: SparkSession, path: str) -> str:
    jvm: Any = session.sparkContext._jvm
    hadoop = jvm.org.apache.hadoop.fs.Path(path)
    files = hadoop.getFileSystem(session.sparkContext._jsc.hadoopConfiguration())
    stream = files.open(hadoop)
    try:
        return str(jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
    finally:
        stream.close()
