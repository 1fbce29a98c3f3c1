"""A batch sink of Spark as the sink of a pipeline or a dataflow."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from arroyo_dagster.engine.connectors import FolderSink
from arroyo_dagster.errors import InputError, ProtocolError, StorageError
from arroyo_dagster.redaction import register_settings, replaced
from arroyo_dagster.spark.columns import for_spark, spark_schema, struct_type
from arroyo_dagster.spark.jobs import failure_reason
from arroyo_dagster.spark.versions import frame_of_rows, in_partitions
from arroyo_dagster.state.codec.parquet import decode_file, encode_rows
from arroyo_dagster.state.model.ids import Epoch, StatePath, TableName
from arroyo_dagster.state.model.layout import JobPaths, parse_staged_subtask
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.managed import staged_paths
from arroyo_dagster.state.tables.table import TaskInfo

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

INDEX = "_arroyo_index"
"""The column that `staged_frame` adds: the subtask and the number of the row in it."""

_BATCH_ROWS = 1 << 16


@dataclass(frozen=True, slots=True)
class SinkBinding:
    """The job that a sink stages its rows in.

    Attributes:
        store: the object store of the state.
        name: the name of the sink's directory: the operator of a pipeline, the topic of a dataflow.
        schema: the columns of the staged rows.
        job: the root of the job; None for a topic, which several services may write.
    """

    store: ObjectStore
    name: str
    schema: pa.Schema
    job: StatePath | None = None


class SparkSink(FolderSink):
    """Writes rows to a batch sink of Spark, one epoch at a time, at least once.

    Rows are staged in the job until the epoch is ready. Then Spark's workers read and write them;
    no rows pass through the driver. If the run dies after that write and before it is recorded, the
    next run writes the epoch again: unless the format is idempotent, it then has the rows of that
    epoch twice. A run in process refuses the sink.

    Args:
        format: the format for `DataFrameWriter.format`.
        options: its options.
    """

    suffix = ".parquet"
    in_job = True

    def __init__(
        self,
        format: str,  # noqa: A002 - Spark's own word
        options: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__("")
        self._format = format
        self._options = {name: str(value) for name, value in (options or {}).items()}
        register_settings(self._options)
        self._bound: SinkBinding | None = None

    # ---- the run ---------------------------------------------------------------------------------

    def bind(self, to: SinkBinding | None) -> None:
        """Set the job that the sink stages its rows in; None = its run has ended."""
        self._bound = to

    @property
    def bound(self) -> SinkBinding:
        """The job.

        Raises:
            InputError: there is none: the run is not on Spark.
        """
        if self._bound is None:
            raise InputError(
                "the pipeline writes to a sink of Spark, so only Spark can run it",
                format=self._format,
                next_step="run it with --spark, or with run_pipeline of "
                "arroyo_dagster.spark.engine.pipeline",
            )
        return self._bound

    def check(self, rows: pa.Schema) -> None:
        """Refuse a run that is not on Spark."""
        _ = self.bound

    @property
    def _store(self) -> ObjectStore:
        return self.bound.store

    # ---- staging ---------------------------------------------------------------------------------

    def encode(self, rows: pa.Table) -> bytes:
        """Return a Parquet file."""
        return encode_rows(rows)

    def folder(self, task: TaskInfo) -> str:
        """Return the directory in which rows are staged, inside the job."""
        return f"{JobPaths(task.job, task.pipeline).spark_sink(self.bound.name)}/"

    # ---- the second phase ------------------------------------------------------------------------

    def commit(self, epoch: Epoch, data: Mapping[TableName, Mapping[int, bytes]]) -> None:
        """Write the staged rows of an epoch, unless they are already recorded as written.

        Raises:
            ProtocolError: staged rows are missing, and they are not recorded as written.
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
                    format=self._format,
                    epoch=epoch,
                    path=missing[0],
                    next_step="look for them in backups of the job; the checkpoint stays in "
                    "state committing",
                )
            self._write(store, epoch, staged)
            store.put(done, b"")
        # The epoch is committed, so a failure here is harmless.
        with contextlib.suppress(StorageError):
            store.delete_many(staged)
            older = [
                info.path
                for info in store.list(folder)
                if info.path.name.endswith(".done") and info.path < done
            ]
            store.delete_many(older)

    def _write(self, store: ObjectStore, epoch: Epoch, staged: Sequence[StatePath]) -> None:
        from py4j.protocol import Py4JError
        from pyspark.errors import PySparkException
        from pyspark.sql import SparkSession

        session = SparkSession.builder.getOrCreate()
        frame = self.written(epoch, staged_frame(session, store, staged, self.bound.schema))
        writer = frame.write.format(self._format).options(**self._options).mode("append")
        with replaced(
            (PySparkException, Py4JError),
            lambda error: InputError(
                f"Spark cannot write to this sink ({failure_reason(error)})",
                format=self._format,
                epoch=epoch,
                next_step="check its options; the records are kept, and written by the next run",
            ),
        ):
            writer.save()

    def written(self, epoch: Epoch, rows: DataFrame) -> DataFrame:
        """Return what to write of an epoch's rows; they have the column `INDEX` besides theirs."""
        return rows.drop(INDEX)


def staged_frame(
    session: SparkSession, store: ObjectStore, staged: Sequence[StatePath], schema: pa.Schema
) -> DataFrame:
    """Return the rows of staged Parquet files, which workers read, one file per task.

    Args:
        schema: the columns of the files. The frame has them, in types that Spark has, and `INDEX`.
    """
    columns = spark_schema(schema)
    with_index = columns.append(pa.field(INDEX, pa.string()))

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for name in batch.column(1).to_pylist():
                path = StatePath(name)
                rows, _ = decode_file(store.read(path), path)
                rows = for_spark(rows).cast(columns)
                subtask = parse_staged_subtask(path.name)
                index = pa.array([f"{subtask}-{row}" for row in range(rows.num_rows)], pa.string())
                rows = rows.append_column(with_index.field(INDEX), index)
                yield from rows.to_batches(max_chunksize=_BATCH_ROWS)

    names = [pa.array(range(len(staged)), pa.int32()), pa.array(staged, pa.string())]
    files = frame_of_rows(session, pa.table(names, names=["task", "name"]))
    files = in_partitions(files, len(staged), "task")
    return files.mapInArrow(read, struct_type(with_index))
