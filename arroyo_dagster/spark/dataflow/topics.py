"""Topics bound to what Spark can read and write: `words=spark:kafka?subscribe=words&…`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa

from arroyo_dagster.dataflow.topics.bindings import TopicBinding
from arroyo_dagster.dataflow.topics.cells import Shape, typed_table
from arroyo_dagster.errors import InputError, NotFoundError, ProtocolError, StorageError
from arroyo_dagster.redaction import redact_text, redacted_cause
from arroyo_dagster.spark.dataflow.states import for_spark
from arroyo_dagster.spark.session import default_location
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
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

SCHEMA = "schema"
"""The option of a binding that is not the format's own: columns in Spark's DDL."""

_SOURCE_NODE = "topics"


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
        store: where the states lie: what Spark reads lands there.
        checkpoint_location: where Spark keeps the offsets of its sources; below the jobs unless
            given, when those lie on local disk.
    """

    store: ObjectStore
    checkpoint_location: str | None = None
    _bound: dict[str, _Bound] = field(default_factory=dict)
    _taken: dict[tuple[str, str], int] = field(default_factory=dict)

    # ---- binding ---------------------------------------------------------------------------------

    def source(
        self, binding: TopicBinding, shape: Shape, directory: StatePath, readers: tuple[str, ...]
    ) -> Source:
        """What a topic is read from.

        Args:
            directory: where its records land.
            readers: the services that read it.

        Raises:
            InputError: Spark has no place for its offsets.
        """
        options = {name: str(value) for name, value in binding.options.items() if name != SCHEMA}
        schema = binding.options.get(SCHEMA)
        given = self.checkpoint_location
        location = (
            default_location(self.store, directory) if given is None else f"{given}/{directory}"
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
        """What a topic is written to."""
        options = {name: str(value) for name, value in binding.options.items()}
        return SparkSink(self.store.url, binding.topic, binding.target, options, shape)

    # ---- running ---------------------------------------------------------------------------------

    def stage_all(self, session: SparkSession) -> None:
        """Let land what the sources have now, and wait for it.

        Raises:
            InputError: Spark cannot read a source.
            StreamingQueryException: reading failed.
        """
        for query in self.start(session, follow=False):
            query.awaitTermination()

    def start(self, session: SparkSession, *, follow: bool = True) -> list[StreamingQuery]:
        """Begin to let land what comes. Errors as `stage_all`."""
        return [
            one.staging.start(one.topic.frame(session), follow=follow)
            for one in self._bound.values()
        ]

    def note(self, pipeline: Pipeline, checkpoint: Checkpoint) -> None:
        """An epoch of a service is ready: what all readers of a topic have taken is removed."""
        if checkpoint.progress is None:
            return
        offsets = json.loads(checkpoint.progress.offsets).get(_SOURCE_NODE, {}).get("topics", {})
        for name, bound in self._bound.items():
            if pipeline.job not in bound.readers or name not in offsets:
                continue
            self._taken[name, pipeline.job] = int(offsets[name]["batch"])
            known = [self._taken.get((name, reader), -1) for reader in bound.readers]
            if min(known) >= 0:
                # The epoch exists; what stays is removed behind a later one.
                with contextlib.suppress(StorageError):
                    bound.source.forget({"batch": min(known)})


class SparkSink(FolderSink):
    """Records into a batch sink of Spark, an epoch at a time.

    They are staged in the job until the epoch is ready, then written by the driver. Twice only if
    the run dies between the end of that write and the note of it: what the format does not take
    once, it then has twice.

    Args:
        url: the checkpoint URL.
        kind, options: the format and its options, as `DataFrameWriter` takes them.
        shape: what the values look like: the columns.
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
        """A Parquet file of the values, columns typed as declared."""
        return encode_rows(typed_table(rows.column("value").to_pylist(), self._shape))

    def folder(self, task: TaskInfo) -> str:
        """Where records are staged: below the job, with what else is ours."""
        return f"{JobPaths(task.job, task.pipeline).spark_sink(self._topic)}/"

    def commit(self, epoch: Epoch, data: Mapping[TableName, Mapping[int, bytes]]) -> None:
        """Write what an epoch has staged, unless that is done.

        Raises:
            ProtocolError: staged records are gone, and nothing says that they were written.
            InputError: Spark cannot write to the sink.
        """
        store = self._store
        staged = staged_paths(data.get(self.pre_commit, {}))
        if not staged:
            return
        folder = StatePath(staged[0].rpartition("/")[0])
        done = folder / f"{epoch:07}.done"
        if store.head(done) is None:
            try:
                parts = concurrently(lambda path: decode_file(store.read(path), path)[0], staged)
            except NotFoundError as error:
                raise ProtocolError(
                    "records that a checkpoint must commit are neither staged nor written",
                    topic=self._topic,
                    epoch=epoch,
                    path=error.facts.get("path"),
                    next_step="look for them in backups of the job; the checkpoint stays in "
                    "state committing",
                ) from error
            self._write(pa.concat_tables(parts))
            store.put(done, b"")
        # It is committed; what stays is removed behind a later epoch.
        with contextlib.suppress(StorageError):
            store.delete_many(staged)
            older = [
                one.path
                for one in store.list(folder)
                if one.path.name.endswith(".done") and one.path < done
            ]
            store.delete_many(older)

    def _write(self, rows: pa.Table) -> None:
        from pyspark.errors import PySparkException
        from pyspark.sql import SparkSession

        frame = SparkSession.builder.getOrCreate().createDataFrame(for_spark(rows))
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
