"""Topics that are bound to sources and sinks of Spark: `words=spark:kafka?subscribe=words&…`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa

from arroyo_dagster.dataflow.topics.bindings import TopicBinding
from arroyo_dagster.dataflow.topics.cells import Shape, typed_table
from arroyo_dagster.errors import InputError, ProtocolError, StorageError
from arroyo_dagster.redaction import redact_text, redacted_cause
from arroyo_dagster.spark.dataflow.states import for_spark
from arroyo_dagster.spark.settings import target_of
from arroyo_dagster.spark.staging import SparkTopic, StagedSource, Staging
from arroyo_dagster.state.codec.parquet import decode_file, encode_rows
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.ids import Epoch, StatePath, TableName
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.runtime.connectors import FolderSink, staged_paths
from arroyo_dagster.state.runtime.operators import Sink, Source
from arroyo_dagster.state.runtime.pipeline import Pipeline
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.table import TaskInfo

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

SCHEMA = "schema"
"""The option of a binding with the columns in Spark's DDL; it is not an option of the format."""

_SOURCE_NODE = "topics"
_BATCH_ROWS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bound:
    topic: SparkTopic
    source: StagedSource
    staging: Staging
    readers: tuple[str, ...]


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
    _bound: dict[str, _Bound] = field(default_factory=dict)
    _taken: dict[tuple[str, str], int] = field(default_factory=dict)

    # ---- binding ---------------------------------------------------------------------------------

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
        given = self.checkpoint_location
        location = (
            _default_location(self.store, directory) if given is None else f"{given}/{directory}"
        )
        staging = Staging(binding.topic, self.store, directory, shape.from_row, location)
        source = StagedSource(binding.topic, self.store, directory)
        self._bound[binding.topic] = _Bound(
            topic=SparkTopic(
                topic=binding.topic,
                format=binding.target,
                options=options,
                schema=None if schema is None else str(schema),
            ),
            source=source,
            staging=staging,
            readers=readers,
        )
        return source

    def sink(self, binding: TopicBinding, shape: Shape) -> Sink:
        """Open the sink of a topic."""
        options = {name: str(value) for name, value in binding.options.items()}
        return SparkSink(self.store.url, binding.topic, binding.target, options, shape)

    # ---- running ---------------------------------------------------------------------------------

    def stage_all(self, session: SparkSession) -> None:
        """Stage the records that the sources have now, and wait until this is done.

        Raises:
            InputError: Spark cannot read a source.
            StreamingQueryException: a query failed.
        """
        for query in self.start(session, follow=False):
            query.awaitTermination()

    def start(self, session: SparkSession, *, follow: bool = True) -> list[StreamingQuery]:
        """Start to stage records, and return the queries. Errors as in `stage_all`.

        Args:
            session: the session.
            follow: whether to continue with new records; else the queries end after those of now.

        Raises:
            InputError: the session is one of Spark Connect, whose queries keep their log elsewhere.
        """
        if self._bound and target_of(session).startswith("sc://"):
            raise InputError(
                "topics that are bound to sources of Spark cannot be staged over Spark Connect",
                topics=", ".join(sorted(self._bound)),
                next_step="run it with --master, or bind these topics to files",
            )
        return [
            one.staging.start(one.topic.frame(session), follow=follow)
            for one in self._bound.values()
        ]

    def note(self, pipeline: Pipeline, checkpoint: Checkpoint) -> None:
        """Note a ready epoch of a service, and remove staged batches that all readers have read."""
        if checkpoint.progress is None:
            return
        offsets = json.loads(checkpoint.progress.offsets).get(_SOURCE_NODE, {}).get("topics", {})
        for name, bound in self._bound.items():
            if pipeline.job not in bound.readers or name not in offsets:
                continue
            self._taken[name, pipeline.job] = int(offsets[name]["batch"])
            known = [self._taken.get((name, reader), -1) for reader in bound.readers]
            if min(known) >= 0:
                # The epoch is ready, so a failure here is harmless: a later call removes the rest.
                with contextlib.suppress(StorageError):
                    bound.source.forget({"batch": min(known)})


def _default_location(store: ObjectStore, directory: str) -> str:
    """Return where Spark keeps the log of a source by default: in the store, beside the state.

    Args:
        store: the object store of the state.
        directory: the directory in the store.

    Raises:
        InputError: the store is not on local disk.
    """
    if not store.url.startswith("file:"):
        raise InputError(
            "Spark writes a log of its own, and cannot write it below this URL",
            url=store.url,
            next_step="set --spark-checkpoint to a path that Spark can write to",
        )
    return f"{store.url}/{directory}/spark"


class SparkSink(FolderSink):
    """Writes records to a batch sink of Spark, one epoch at a time, at least once.

    Records are staged in the job until the epoch is ready. Then Spark's workers read and write
    them; no rows pass through the driver. If the run dies after that write and before it is
    recorded, the next run writes the epoch again: unless the format is idempotent, it then has the
    records twice.

    Args:
        url: the checkpoint URL.
        topic: the topic.
        kind, options: the format and its options for `DataFrameWriter`.
        shape: the shape of the values, which determines the columns.
    """

    suffix = ".parquet"
    in_job = True

    def __init__(
        self, url: str, topic: str, kind: str, options: Mapping[str, str], shape: Shape
    ) -> None:
        super().__init__(url)
        self._topic = topic
        self._format = kind
        self._options = dict(options)
        self._shape = shape

    def encode(self, rows: pa.Table) -> bytes:
        """Return a Parquet file of the values, with the declared types."""
        return encode_rows(typed_table(rows.column("value").to_pylist(), self._shape))

    def folder(self, task: TaskInfo) -> str:
        """Return the directory in which records are staged, inside the job."""
        return f"{JobPaths(task.job, task.pipeline).spark_sink(self._topic)}/"

    def commit(self, epoch: Epoch, data: Mapping[TableName, Mapping[int, bytes]]) -> None:
        """Write the staged records of an epoch, unless they are already recorded as written.

        Raises:
            ProtocolError: staged records are missing, and they are not recorded as written.
            InputError: Spark cannot write to the sink.
        """
        store = self._store
        staged = staged_paths(data.get(self.pre_commit, {}))
        if not staged:
            return
        folder = StatePath(staged[0].rpartition("/")[0])
        done = folder / f"{epoch:07}.done"
        if store.head(done) is None:
            infos = concurrently(store.head, staged)
            missing = [path for path, info in zip(staged, infos, strict=True) if info is None]
            if missing:
                raise ProtocolError(
                    "records that a checkpoint must commit are neither staged nor written",
                    topic=self._topic,
                    epoch=epoch,
                    path=missing[0],
                    next_step="look for them in backups of the job; the checkpoint stays in "
                    "state committing",
                )
            self._write(store, staged)
            store.put(done, b"")
        # The epoch is committed, so a failure here is harmless.
        with contextlib.suppress(StorageError):
            store.delete_many(staged)
            older = [
                one.path
                for one in store.list(folder)
                if one.path.name.endswith(".done") and one.path < done
            ]
            store.delete_many(older)

    def _write(self, store: ObjectStore, staged: Sequence[StatePath]) -> None:
        from pyspark.errors import PySparkException
        from pyspark.sql import SparkSession

        schema = for_spark(typed_table([], self._shape)).schema
        frame = staged_frame(SparkSession.builder.getOrCreate(), store, staged, schema)
        writer = frame.write.format(self._format).options(**self._options).mode("append")
        try:
            writer.save()
        except PySparkException as error:
            raise InputError(
                f"Spark cannot write to this sink ({redact_text(str(error)).splitlines()[0]})",
                topic=self._topic,
                format=self._format,
                next_step="check its options; the records are kept, and written by the next run",
            ) from redacted_cause(error)


def staged_frame(
    session: SparkSession, store: ObjectStore, staged: Sequence[StatePath], schema: pa.Schema
) -> DataFrame:
    """Return the rows of staged Parquet files, which workers read, one file per task.

    Args:
        schema: the columns of the files, in types that Spark has.
    """
    from pyspark.sql.pandas.types import from_arrow_schema

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for name in batch.column(1).to_pylist():
                path = StatePath(name)
                rows, _ = decode_file(store.read(path), path)
                yield from for_spark(rows).cast(schema).to_batches(max_chunksize=_BATCH_ROWS)

    columns = [pa.array(range(len(staged)), pa.int32()), pa.array(staged, pa.string())]
    files = session.createDataFrame(pa.table(columns, names=["task", "name"]))
    files = files.repartitionById(len(staged), "task")
    return files.mapInArrow(read, from_arrow_schema(schema))
