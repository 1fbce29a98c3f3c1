"""The streaming queries that stage rows for the jobs of one run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa

from arroyo_dagster.engine.operators import Offset
from arroyo_dagster.errors import ArroyoStateError, InputError, StorageError
from arroyo_dagster.redaction import redacted_cause, replaced
from arroyo_dagster.spark.columns import can_deliver, struct_type
from arroyo_dagster.spark.engine.staging import StagedSource, Staging
from arroyo_dagster.spark.jobs import failure_reason
from arroyo_dagster.spark.settings import target_of
from arroyo_dagster.state.metadata.interrupts import check_interrupt

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_POLL_SECONDS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedStream:
    """A stream of Spark, and where its rows are staged.

    Attributes:
        readers: the jobs that read it.
    """

    stream: SparkStream
    staging: Staging
    source: StagedSource
    readers: tuple[str, ...]


class StagingQueries:
    """Starts, watches and stops the queries of one run, and removes what all readers have taken.

    Args:
        streams: the streams by name.
    """

    def __init__(self, streams: Mapping[str, StagedStream]) -> None:
        self.streams = streams
        self._queries: dict[str, StreamingQuery] = {}
        self._failed: dict[str, ArroyoStateError] = {}
        self._taken: dict[tuple[str, str], int] = {}

    @contextlib.contextmanager
    def running(self, session: SparkSession, *, follow: bool) -> Iterator[None]:
        """Stage rows within the context.

        Args:
            session: the session.
            follow: whether to continue with new rows until the end of the context; else stage those
                of now, and enter the context when this is done.

        Raises:
            InputError: Spark cannot read a source; or the session is one of Spark Connect, whose
                queries keep their log elsewhere.
            ArroyoStateError: see `check`.
        """
        if self.streams and target_of(session).startswith("sc://"):
            raise InputError(
                "sources of Spark cannot be staged over Spark Connect",
                sources=", ".join(sorted(self.streams)),
                next_step="run it with --spark master=…, or use other sources",
            )
        try:
            for name, entry in self.streams.items():
                self._start(name, entry, entry.stream.frame(session), follow)
            if not follow:
                self._wait()
            yield
        finally:
            for query in self._queries.values():
                with contextlib.suppress(Exception):  # the lists alone say what is staged
                    query.stop()
            self._queries = {}

    def _start(self, name: str, one: StagedStream, frame: DataFrame, follow: bool) -> None:
        def stage(batch: DataFrame, number: int) -> None:
            try:
                one.staging.stage(batch, number)
            except ArroyoStateError as error:
                self._failed[name] = error  # the query's own error has only its text
                raise

        self._queries[name] = one.staging.start(frame, stage, follow=follow)

    def _wait(self) -> None:
        for query in self._queries.values():
            while query.isActive:
                # It raises the error of a failed query, without the name of the source.
                with contextlib.suppress(Exception):
                    query.awaitTermination(_POLL_SECONDS)
                check_interrupt()
        self.check()

    @property
    def active(self) -> bool:
        """Whether no query has ended."""
        return all(query.isActive for query in self._queries.values())

    def check(self) -> None:
        """Raise the error of a query that has failed.

        Raises:
            ArroyoStateError: of the query's own class where it is an error of this package.
            StorageError: any other error of Spark or of the source.
        """
        for name, query in self._queries.items():
            failed = query.exception()
            if failed is None:
                continue
            if name in self._failed:
                raise self._failed[name]
            raise StorageError(
                f"Spark could not read this source, and the query that stages it has ended "
                f"({failure_reason(failed)})",
                source=name,
                format=self.streams[name].stream.format,
                retryable=True,
                next_step="check the source and Spark's log, then run it again: it continues "
                "behind the last staged batch",
            ) from redacted_cause(failed)

    def note(self, job: str, offsets: Mapping[str, Offset]) -> None:
        """Note a ready epoch of a job, and remove staged batches that all readers have taken.

        Args:
            offsets: the offsets of the epoch by stream; others are ignored.
        """
        for name, entry in self.streams.items():
            if job not in entry.readers or name not in offsets:
                continue
            self._taken[name, job] = int(offsets[name]["batch"])
            taken = [self._taken.get((name, reader), -1) for reader in entry.readers]
            if min(taken) >= 0:
                # The epoch is ready, so a failure here is harmless: a later call removes the rest.
                with contextlib.suppress(StorageError):
                    entry.source.forget({"batch": min(taken)})


# ---- streaming sources of Spark by format and options --------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkStream:
    """A streaming source of Spark.

    Attributes:
        name: the topic of a dataflow, or the operator of a pipeline, for messages.
        format: the format for `spark.readStream.format`; `kafka` needs its connector on the class
            path.
        options: the options for `.options`.
        schema: the columns, in Arrow or in Spark's DDL, for formats that need it (`json`, `csv`,
            `parquet`).
        columns: the columns to take; None = all.
        where: the rows to take, as a condition of Spark SQL; None = all.
    """

    name: str
    format: str
    options: Mapping[str, str] = field(repr=False)
    schema: pa.Schema | str | None = None
    columns: pa.Schema | None = None
    where: str | None = None

    def frame(self, session: SparkSession) -> DataFrame:
        """Return the stream.

        Raises:
            InputError: Spark does not know the format, or rejects the options or the condition; or
                the stream has no such column, or one of another type.
        """
        from py4j.protocol import Py4JError
        from pyspark.errors import PySparkException

        reader = session.readStream.format(self.format).options(**dict(self.options))
        if self.schema is not None:
            schema = self.schema if isinstance(self.schema, str) else struct_type(self.schema)
            reader = reader.schema(schema)
        with replaced(
            (PySparkException, Py4JError),
            lambda error: InputError(
                f"Spark cannot read this source ({failure_reason(error)})",
                source=self.name,
                format=self.format,
                next_step="check its options; add a format that Spark does not include to the "
                "class path with --spark packages=…",
            ),
        ):
            frame = reader.load()
            frame = frame if self.where is None else frame.where(self.where)
        return frame if self.columns is None else self._chosen(frame, self.columns)

    def _chosen(self, frame: DataFrame, columns: pa.Schema) -> DataFrame:
        types = {field.name: field.dataType for field in frame.schema}
        for column in struct_type(columns):
            if column.name not in types or not can_deliver(types[column.name], column.dataType):
                raise InputError(
                    f"the source has no column {column.name!r} of type "
                    f"{column.dataType.simpleString()}",
                    source=self.name,
                    format=self.format,
                    found=[f"{name}: {kind.simpleString()}" for name, kind in types.items()],
                    next_step="correct its schema",
                )
        return frame.select(*[f"`{name}`" for name in columns.names])
