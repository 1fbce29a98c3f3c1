"""Sinks of topics: files in a folder, one growing file, other services, the terminal."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Mapping, Sequence
from typing import Protocol

import pyarrow as pa

from arroyo_dagster.dataflow.topics.cells import Shape, typed_table
from arroyo_dagster.engine.connectors import (
    PRE_COMMIT,
    BufferingSink,
    FolderSink,
    remove_left_staged,
)
from arroyo_dagster.engine.operators import Collector, OperatorContext, Sink
from arroyo_dagster.errors import InputError, NotFoundError, ProtocolError, StorageError
from arroyo_dagster.state.codec.bincode.codec import codec_for
from arroyo_dagster.state.codec.parquet import encode_rows
from arroyo_dagster.state.model.ids import Epoch, JobId, StatePath, TableName
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.numbers import parse_number
from arroyo_dagster.state.model.tables import TableConfig
from arroyo_dagster.state.storage.remote.open import get_storage_provider, open_store
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.global_keyed import global_table_config
from arroyo_dagster.state.tables.table import TaskInfo

POSITION = TableName("position")
_APPENDED = codec_for(tuple[str, int, int, str])
_PRINTED = codec_for(bytes)


class Writer(Protocol):
    """Encodes values as the content of a file: `JsonLines`, `CsvLines`."""

    @property
    def suffix(self) -> str:
        """The suffix of file names."""

    @property
    def header(self) -> bytes:
        """The first bytes of every file."""

    def rows(self, values: Sequence[bytes]) -> bytes:
        """Return the values, encoded one after the other."""


APPENDED, PRINTED, KEPT = TableName("appended"), TableName("printed"), TableName("kept")
_TABLES = (
    *(
        global_table_config(name, "pre-commit data", two_phase_commit=True, key=str, value=str)
        for name in (PRE_COMMIT, APPENDED, PRINTED, KEPT)
    ),
    global_table_config(POSITION, "how long a sink has made each file", key=str, value=int),
)
"""The tables of every topic sink; all kinds have the same, so that a topic's binding can change."""


def check_own(
    topic: str, own: Sequence[TableName], data: Mapping[TableName, Mapping[int, bytes]]
) -> None:
    """Check that the data to commit was prepared by a sink of the same kind.

    Args:
        topic: the topic, for the error.
        own: the commit tables of this kind of sink.
        data: the commit data by table and subtask.

    Raises:
        InputError: a run was killed before a commit, and the topic was then bound to another kind.
    """
    others = sorted(table for table, parts in data.items() if parts and table not in own)
    if others:
        raise InputError(
            "the job's last epoch is not committed yet, and was prepared for a sink of another "
            "kind",
            topic=topic,
            prepared=", ".join(others),
            next_step="run once with the old binding of the topic; then bind it anew",
        )


def values_in(batches: Sequence[pa.RecordBatch]) -> list[bytes]:
    """Return the values of records."""
    return [value for batch in batches for value in batch.column("value").to_pylist()]


def takes_one_subtask(sink: Sink) -> bool:
    """Return whether a sink takes the records of one subtask only."""
    return bool(getattr(sink, "one_subtask", False))


class TopicFolderSink(FolderSink):
    """A folder as the sink of a topic; see `FolderSink`."""

    topic: str

    def tables(self) -> Sequence[TableConfig]:
        """Return the tables of every topic sink."""
        return _TABLES

    def commit(self, epoch: Epoch, data: Mapping[TableName, Mapping[int, bytes]]) -> None:
        """Move the staged files of an epoch to their final paths. Errors as in `check_own`."""
        check_own(self.topic, (self.pre_commit,), data)
        super().commit(epoch, data)


class LinesFolderSink(TopicFolderSink):
    """Writes records into text files of a folder, exactly once."""

    def __init__(self, topic: str, url: str, writer: Writer) -> None:
        super().__init__(url)
        self.topic = topic
        self._writer = writer
        self.suffix = writer.suffix

    def encode(self, rows: pa.Table) -> bytes:
        """Return the header, then the records."""
        return self._writer.header + self._writer.rows(values_in(rows.to_batches()))


class ParquetFolderSink(TopicFolderSink):
    """Writes records into Parquet files of a folder with the declared types, exactly once."""

    suffix = ".parquet"

    def __init__(self, topic: str, url: str, shape: Shape) -> None:
        super().__init__(url)
        self.topic = topic
        self._shape = shape

    def encode(self, rows: pa.Table) -> bytes:
        """Return a Parquet file of the values."""
        return encode_rows(typed_table(values_in(rows.to_batches()), self._shape))


class KeptSink(TopicFolderSink):
    """Writes records for other services of the dataflow, into the job of the writing service.

    Args:
        url: the checkpoint URL.
        topic: the topic.
    """

    suffix = ".parquet"
    in_job = True
    pre_commit = KEPT

    def __init__(self, url: str, topic: str) -> None:
        super().__init__(url)
        self.topic = topic

    def encode(self, rows: pa.Table) -> bytes:
        """Return a Parquet file of the records, unchanged."""
        return encode_rows(rows)

    @property
    def _store(self) -> ObjectStore:
        return get_storage_provider(self._url)

    def folder(self, task: TaskInfo) -> str:
        """Return the directory that `SegmentSource` reads."""
        return f"{JobPaths(JobId(task.job), task.pipeline).topic(self.topic)}/"


class BothSinks(Sink):
    """A bound sink and a `KeptSink`, each with its own commit data."""

    def __init__(self, bound: Sink, kept: KeptSink) -> None:
        self._sinks = (bound, kept)
        self.one_subtask = takes_one_subtask(bound)

    def tables(self) -> Sequence[TableConfig]:
        """Return the tables of both sinks, without duplicates."""
        tables = {config.table: config for sink in self._sinks for config in sink.tables()}
        return list(tables.values())

    def on_start(self, ctx: OperatorContext) -> None:
        """Start both."""
        for sink in self._sinks:
            sink.on_start(ctx)

    def process_batch(
        self, batch: pa.RecordBatch, ctx: OperatorContext, collector: Collector
    ) -> None:
        """Pass the batch to both."""
        for sink in self._sinks:
            sink.process_batch(batch, ctx, collector)

    def handle_checkpoint(self, ctx: OperatorContext, collector: Collector) -> None:
        """Prepare both."""
        for sink in self._sinks:
            sink.handle_checkpoint(ctx, collector)

    def commit(self, epoch: Epoch, data: Mapping[TableName, Mapping[int, bytes]]) -> None:
        """Commit both, each with its own data. Errors as in `check_own`."""
        bound, kept = self._sinks
        bound.commit(epoch, {name: parts for name, parts in data.items() if name != KEPT})
        kept.commit(epoch, {name: parts for name, parts in data.items() if name == KEPT})


class _RecordSink(BufferingSink):
    """Buffers records until the barrier; the epoch's commit data is in tables until the commit."""

    def tables(self) -> Sequence[TableConfig]:
        """Return the tables of every topic sink."""
        return _TABLES


class AppendSink(_RecordSink):
    """Appends records to one local file, exactly once.

    An epoch is staged in a directory beside the file. Its commit writes it at the position where
    the previous epoch ended, so that a second commit changes nothing. No other program may write
    the file.

    Args:
        topic: the topic, for messages.
        path: the file; when the job starts, it must be empty or absent.
        writer: encodes values as lines.

    Raises:
        InputError: the folder of the file does not exist.
    """

    one_subtask = True

    def __init__(self, topic: str, path: str, writer: Writer) -> None:
        super().__init__()
        self._topic = topic
        self._path = os.path.abspath(path)
        self._writer = writer
        self._has_committed = False
        if not os.path.isdir(os.path.dirname(self._path)):
            raise InputError(
                "the folder of a sink's file does not exist",
                topic=topic,
                path=path,
                next_step="create it, or give another path",
            )

    def on_start(self, ctx: OperatorContext) -> None:
        """Start with an empty buffer.

        Raises:
            InputError: there are several subtasks, which cannot append to one file.
        """
        super().on_start(ctx)
        if ctx.task_info.parallelism > 1:
            raise InputError(
                "one file takes the records of one subtask",
                topic=self._topic,
                path=self._path,
                next_step="bind the sink to a directory: a path that ends with '/'",
            )

    @property
    def _staging(self) -> ObjectStore:
        folder, name = os.path.split(self._path)
        return open_store(f"file://{folder}/.{name}.staging")

    def handle_checkpoint(self, ctx: OperatorContext, collector: Collector) -> None:
        """Stage the buffered records, and store their position as commit data.

        Raises:
            InputError: the job has not written the file yet, and the file is not empty.
        """
        values = values_in(self.drained())
        if not values:
            return
        positions = ctx.table_manager.get_global_keyed_state(POSITION, str, int)
        start = positions.get(self._path)
        if start is None:
            if os.path.exists(self._path) and os.path.getsize(self._path):
                raise InputError(
                    "the file of a sink is not empty, and this job wrote none of it",
                    topic=self._topic,
                    path=self._path,
                    next_step="remove it, or give another path",
                )
            start = 0
        data = (b"" if start else self._writer.header) + self._writer.rows(values)
        staged = StatePath(f"{ctx.task_info.operator}-{ctx.epoch:07}-{uuid.uuid4().hex[:16]}")
        self._staging.put(staged, data)
        positions.insert(self._path, start + len(data))
        commit = _APPENDED.encode((self._path, start, len(data), staged))
        ctx.table_manager.insert_committing_data(APPENDED, commit)

    def commit(self, epoch: Epoch, data: Mapping[TableName, Mapping[int, bytes]]) -> None:
        """Write the epoch's records at their position.

        Raises:
            ProtocolError: the staged records are missing, or the file has other content than the
                previous epochs wrote.
            InputError: the epoch was prepared for another file, or another kind of sink.
            StorageError: the file cannot be written.
        """
        check_own(self._topic, (APPENDED,), data)
        for encoded in data.get(APPENDED, {}).values():
            path, start, length, staged = _APPENDED.decode(encoded)
            if path != self._path:
                raise InputError(
                    "the job's last epoch is not committed yet, and was prepared for another file",
                    topic=self._topic,
                    prepared=path,
                    given=self._path,
                    next_step="run once with the old binding of the topic; then bind it anew",
                )
            written = None if self._has_committed else self._staging.head(StatePath(staged))
            try:
                content = self._staging.read(StatePath(staged))
            except NotFoundError as error:
                if os.path.exists(self._path) and os.path.getsize(self._path) >= start + length:
                    continue  # an earlier attempt completed this commit
                raise self._contradicted(
                    "records that an epoch must commit are missing", start
                ) from error
            self._write(start, content)
            self._staging.delete_many([StatePath(staged)])
            if written is not None:
                self._has_committed = True
                remove_left_staged(self._staging, written, epoch, _epoch_staged)

    def _write(self, start: int, content: bytes) -> None:
        try:
            with open(self._path, "r+b" if os.path.exists(self._path) else "x+b") as file:
                size = file.seek(0, os.SEEK_END)
                if size < start:
                    raise self._contradicted(f"the file has {size} bytes", start)
                file.seek(start)
                tail = file.read(size - start)
                if not content.startswith(tail):
                    raise self._contradicted("another program wrote behind them", start)
                file.write(content[len(tail) :])
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise StorageError(
                f"a sink's file cannot be written ({error.strerror})",
                topic=self._topic,
                path=self._path,
            ) from error

    def _contradicted(self, found: str, start: int) -> ProtocolError:
        return ProtocolError(
            f"the job has written {start} bytes to a sink's file; {found}",
            topic=self._topic,
            path=self._path,
            next_step="restore the file; nothing was written, the epoch is kept",
        )


def _epoch_staged(name: str) -> Epoch | None:
    number = parse_number("".join(name.split("-")[-2:-1]), 7)
    return None if number is None else Epoch(number)


class PrintSink(_RecordSink):
    """Prints records when their epoch is ready, at least once.

    A run that is killed after it printed an epoch and before it stored that fact prints the epoch
    again.
    """

    def __init__(self, topic: str, writer: Writer) -> None:
        super().__init__()
        self._topic = topic
        self._writer = writer

    def handle_checkpoint(self, ctx: OperatorContext, collector: Collector) -> None:
        """Store the lines as commit data."""
        if values := values_in(self.drained()):
            lines = _PRINTED.encode(self._writer.rows(values))
            ctx.table_manager.insert_committing_data(PRINTED, lines)

    def commit(self, epoch: Epoch, data: Mapping[TableName, Mapping[int, bytes]]) -> None:
        """Print the epoch's records. Errors as in `check_own`."""
        check_own(self._topic, (PRINTED,), data)
        for _, lines in sorted(data.get(PRINTED, {}).items()):
            sys.stdout.write(_PRINTED.decode(lines).decode(errors="replace"))
        sys.stdout.flush()
