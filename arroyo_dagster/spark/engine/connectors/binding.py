"""Binds the sources and sinks of a pipeline that need Spark to one run of it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from arroyo_dagster.engine.coordinator import JobRun
from arroyo_dagster.engine.operators import Offset, Source
from arroyo_dagster.engine.pipeline import Pipeline, SourceNode
from arroyo_dagster.engine.pipeline_run import OnEpoch
from arroyo_dagster.errors import InputError
from arroyo_dagster.redaction import register_settings
from arroyo_dagster.spark.columns import listed_columns
from arroyo_dagster.spark.engine.connectors.queries import SparkStream, StagedStream, StagingQueries
from arroyo_dagster.spark.engine.connectors.sink import SinkBinding, SparkSink
from arroyo_dagster.spark.engine.staging import (
    BATCHES_PER_EPOCH,
    StagedFile,
    StagedSource,
    Staging,
    query_location,
)
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.ids import OperatorId
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.storage.store import ObjectStore


@contextlib.contextmanager
def bound_to_run(pipeline: Pipeline, store: ObjectStore) -> Iterator[StagingQueries]:
    """Bind sources and sinks within the context; the pipeline is to be packed inside it.

    Args:
        store: the object store of the state.

    Raises:
        InputError: Spark cannot store the offsets of a source; or a sink lacks a column.
    """
    sources = {
        name: node.source
        for name, node in pipeline.sources.items()
        if isinstance(node.source, SparkSource)
    }
    sinks = {name: sink for name, sink in pipeline.sinks().items() if isinstance(sink, SparkSink)}
    try:
        queries = StagingQueries(
            {
                name: source.bind(store, pipeline.paths, pipeline.sources[name])
                for name, source in sources.items()
            }
        )
        for source in sources.values():
            source.watch(queries)
        for name, sink in sinks.items():
            sink.bind(SinkBinding(store, name, _columns(pipeline, name), pipeline.paths.root))
        yield queries
    finally:
        for source in sources.values():
            source.watch(None)
        for sink in sinks.values():
            sink.bind(None)


def _columns(pipeline: Pipeline, sink: OperatorId) -> pa.Schema:
    first, *others = [pipeline.edge_schema(edge) for edge in pipeline.operators[sink].inputs]
    for other in others:
        if not other.equals(first):
            raise InputError(
                "the streams that a sink of Spark writes have different columns",
                operator=sink,
                columns=[listed_columns(first), listed_columns(other)],
                next_step="write each to a sink of its own, or give them the same output_schema",
            )
    return first


def noting(queries: StagingQueries, job: JobRun, on_epoch: OnEpoch | None) -> OnEpoch:
    """Return a function for `PipelineRun.run` that removes staged rows which an epoch has taken.

    Those of the epoch that the run continues are removed at once: the run that wrote it may have
    died before.

    Args:
        on_epoch: called with every epoch, too.
    """

    def note(checkpoint: Checkpoint) -> None:
        if checkpoint.progress is not None:
            queries.note(job.pipeline.paths.root, json.loads(checkpoint.progress.offsets))

    def note_and_pass_on(checkpoint: Checkpoint) -> None:
        note(checkpoint)
        if on_epoch is not None:
            on_epoch(checkpoint)

    if job.base is not None:
        note(job.base)
    return note_and_pass_on


# ---- a streaming source of Spark as the source of a pipeline -------------------------------------

_TIME = pa.timestamp("us", "UTC")
_HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
_KAFKA = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", _TIME),
        ("timestampType", pa.int32()),
    ]
)
_RATE = pa.schema([("timestamp", _TIME), ("value", pa.int64())])
_FIXED = {"kafka": _KAFKA, "rate": _RATE, "rate-micro-batch": _RATE}
"""Formats whose columns Spark fixes."""

_FILES = frozenset({"avro", "csv", "json", "orc", "parquet", "text", "xml"})
"""Formats that Spark cannot stream without being given their columns."""


class SparkSource(Source):
    """Any streaming source of Spark that can read again from its offsets, each row exactly once.

    A run on Spark (`spark.engine.pipeline.run_pipeline`) starts a streaming query, which
    writes the source's micro-batches to files in the job's directory. The job reads these files,
    and deletes them when a ready epoch has taken them. Without `follow` the run stages what the
    source has when it starts, and ends when it has read that. A run in process refuses the source.

    Args:
        format: the format for `spark.readStream.format`; what Spark does not include must be on its
            class path (`SparkSettings.packages`).
        options: its options, such as `subscribe` and `kafka.bootstrap.servers`.
        schema: the columns to take, of the same names as Spark's. None = all columns, for the
            formats with fixed ones: `kafka` (key, value, topic, partition, offset, timestamp,
            timestampType, and headers with the option `includeHeaders`), `rate` and
            `rate-micro-batch` (timestamp, value). Other formats need it: the schema of a source is
            known before a session has started. Spark's timestamps are `timestamp("us", "UTC")`;
            they are cast to other units if nothing is lost.
        where: the rows to take, as a condition of Spark SQL, such as `at IS NOT NULL`; None = all.
            A row without event time fails the run before it is staged.
        checkpoint_location: where Spark stores the offsets of the source; it must outlive the job.
            None = beside the staged files, if the checkpoint URL is on local disk.
        batches_per_epoch: the maximum number of Spark's micro-batches in one epoch; how large a
            micro-batch is, the options say (`maxOffsetsPerTrigger`, `maxFilesPerTrigger`).

    Raises:
        InputError: the format needs a schema, or has no such column.
    """

    def __init__(
        self,
        format: str,  # noqa: A002 - Spark's own word
        options: Mapping[str, str] | None = None,
        *,
        schema: pa.Schema | None = None,
        where: str | None = None,
        checkpoint_location: str | None = None,
        batches_per_epoch: int = BATCHES_PER_EPOCH,
    ) -> None:
        if batches_per_epoch < 1:
            raise InputError("batches_per_epoch is at least 1", given=batches_per_epoch)
        self._format = format
        self._options = {name: str(value) for name, value in (options or {}).items()}
        register_settings(self._options)
        self.schema = _chosen(format, _columns_of(format, self._options), schema)
        self._where = where
        self._location = checkpoint_location
        self._batches_per_epoch = batches_per_epoch
        self._staged: StagedSource | None = None
        self._queries: StagingQueries | None = None

    renamable = False

    # ---- the run ---------------------------------------------------------------------------------

    def bind(self, store: ObjectStore, paths: JobPaths, node: SourceNode) -> StagedStream:
        """Choose where a job stages the rows. Errors as in `query_location`."""
        operator = node.operator_id
        directory = paths.spark_source(operator)
        location = query_location(store, directory, self._location)
        self._staged = StagedSource(
            operator, store, directory, self.schema, batches_per_epoch=self._batches_per_epoch
        )
        return StagedStream(
            stream=SparkStream(
                name=operator,
                format=self._format,
                options=self._options,
                schema=self.schema if self._format in _FILES else None,
                columns=self.schema,
                where=self._where,
            ),
            staging=Staging(
                operator, store, directory, OwnColumns(self.schema, node.timestamp), location
            ),
            source=self._staged,
            readers=(paths.root,),
        )

    def watch(self, queries: StagingQueries | None) -> None:
        """Let `latest_offset` raise the errors of queries; None = of none any more."""
        self._queries = queries
        if queries is None:
            self._staged = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_queries": None}  # they stay with the driver

    # ---- as a source -----------------------------------------------------------------------------

    def check(self) -> None:
        """Refuse a run that is not on Spark."""
        if self._staged is None:
            raise InputError(
                "the pipeline reads a streaming source of Spark, so only Spark can run it",
                format=self._format,
                next_step="run it with --spark, or with run_pipeline of "
                "arroyo_dagster.spark.engine.pipeline",
            )

    @property
    def _reader(self) -> StagedSource:
        self.check()
        assert self._staged is not None
        return self._staged

    def initial_offset(self) -> Offset:
        """Return the offset before the first batch."""
        return self._reader.initial_offset()

    def latest_offset(self, start: Offset) -> Offset:
        """Return the offset after at most `batches_per_epoch` more batches.

        Raises:
            ArroyoStateError: the query that stages the rows has failed.
        """
        if self._queries is not None:
            self._queries.check()
        return self._reader.latest_offset(start)

    def partitions(self, start: Offset, end: Offset) -> Sequence[StagedFile]:
        """Return one split per staged file."""
        return self._reader.partitions(start, end)

    def read(self, partition: StagedFile) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one staged file."""
        return self._reader.read(partition)


@dataclass(frozen=True, slots=True)
class OwnColumns:
    """Converts Spark's rows to the columns of a source: the conversion of a `Staging`.

    Attributes:
        timestamp: the column of event time.
    """

    schema: pa.Schema
    timestamp: str

    def __call__(self, rows: pa.Table, batch: int, number: int) -> pa.Table:
        """Return the rows.

        Raises:
            InputError: a row has no event time, or a value does not fit into the type of its
                column.
        """
        if missing := rows.column(self.timestamp).null_count:
            # Once staged, such a row would fail every epoch.
            raise InputError(
                f"{missing} rows have no event time",
                column=self.timestamp,
                next_step=f'leave them out with where="{self.timestamp} IS NOT NULL"',
            )
        try:
            return rows.select(self.schema.names).cast(self.schema)
        except (pa.ArrowInvalid, ValueError) as error:
            raise InputError(
                f"a value of the source does not fit into its column ({error})",
                columns=listed_columns(self.schema),
                next_step="declare the column with the type that Spark delivers",
            ) from error


def _columns_of(form: str, options: Mapping[str, str]) -> pa.Schema | None:
    headers = {name.lower(): value for name, value in options.items()}.get("includeheaders", "")
    if form == "kafka" and headers.lower() == "true":
        return _KAFKA.append(pa.field("headers", _HEADERS))
    return _FIXED.get(form)


def _chosen(form: str, fixed: pa.Schema | None, given: pa.Schema | None) -> pa.Schema:
    if given is None:
        if fixed is None:
            raise InputError(
                "the columns of this source are not known before Spark reads it",
                format=form,
                next_step="pass them as schema=pa.schema([…])",
            )
        return fixed
    missing = [] if fixed is None else [name for name in given.names if name not in fixed.names]
    if missing or not given.names:
        raise InputError(
            f"the source has no column {missing[0]!r}" if missing else "the schema has no column",
            format=form,
            columns=listed_columns(fixed if fixed is not None else given),
        )
    return given
