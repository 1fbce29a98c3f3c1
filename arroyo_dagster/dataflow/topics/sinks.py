"""Where a service puts records out: files of a folder, one file that grows, the terminal."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Mapping, Sequence
from typing import Protocol

import pyarrow as pa

from arroyo_dagster.dataflow.topics.cells import Shape, typed_table
from arroyo_dagster.errors import InputError, NotFoundError, ProtocolError, StorageError
from arroyo_dagster.state.codec.bincode.codec import codec_for
from arroyo_dagster.state.codec.parquet import encode_rows
from arroyo_dagster.state.model.ids import Epoch, JobId, StatePath, TableName
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.numbers import parse_number
from arroyo_dagster.state.model.tables import TableConfig
from arroyo_dagster.state.runtime.connectors import (
    PRE_COMMIT,
    BufferingSink,
    FolderSink,
    remove_left_staged,
)
from arroyo_dagster.state.runtime.operators import Collector, OperatorContext, Sink
from arroyo_dagster.state.storage.remote.open import get_storage_provider, open_store
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.global_keyed import global_table_config
from arroyo_dagster.state.tables.table import TaskInfo

POSITION = TableName("position")
_APPENDED = codec_for(tuple[str, int, int, str])
_PRINTED = codec_for(bytes)


class Writer(Protocol):
    """How values become bytes of a file: `JsonLines`, `CsvLines`."""

    @property
    def suffix(self) -> str:
        """How the names of the files end."""

    @property
    def header(self) -> bytes:
        """What every file begins with."""

    def rows(self, values: Sequence[bytes]) -> bytes:
        """The values behind each other."""


APPENDED, PRINTED, KEPT = TableName("appended"), TableName("printed"), TableName("kept")
_TABLES = (
    *(
        global_table_config(name, "pre-commit data", two_phase_commit=True, key=str, value=str)
        for name in (PRE_COMMIT, APPENDED, PRINTED, KEPT)
    ),
    global_table_config(POSITION, "how long a sink has made each file", key=str, value=int),
)
"""The tables of every sink of a topic, so that it can be bound to another kind at any time."""


def check_own(
    topic: str, own: Sequence[TableName], data: Mapping[TableName, Mapping[int, bytes]]
) -> None:
    """Refuse to commit what was prepared for a sink of another kind.

    Raises:
        InputError: a run was killed within an epoch, and the topic was bound to something else.
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
    """The values of records."""
    return [value for batch in batches for value in batch.column("value").to_pylist()]


class TopicFolderSink(FolderSink):
    """A folder as the sink of a topic; see `FolderSink`."""

    topic: str

    def tables(self) -> Sequence[TableConfig]:
        """Those of every sink."""
        return _TABLES

    def commit(self, epoch: Epoch, data: Mapping[TableName, Mapping[int, bytes]]) -> None:
        """Move the staged files of an epoch to where readers look. Errors as `check_own`."""
        check_own(self.topic, (self.pre_commit,), data)
        super().commit(epoch, data)


class LinesFolderSink(TopicFolderSink):
    """Records into text files of a folder, exactly once."""

    def __init__(self, topic: str, url: str, writer: Writer) -> None:
        super().__init__(url)
        self.topic = topic
        self._writer = writer
        self.suffix = writer.suffix

    def encode(self, rows: pa.Table) -> bytes:
        """The header, then the records."""
        return self._writer.header + self._writer.rows(values_in(rows.to_batches()))


class ParquetFolderSink(TopicFolderSink):
    """Records into Parquet files of a folder, columns typed as declared, exactly once."""

    suffix = ".parquet"

    def __init__(self, topic: str, url: str, shape: Shape) -> None:
        super().__init__(url)
        self.topic = topic
        self._shape = shape

    def encode(self, rows: pa.Table) -> bytes:
        """A Parquet file of the values."""
        return encode_rows(typed_table(values_in(rows.to_batches()), self._shape))


class KeptSink(TopicFolderSink):
    """Records for other services of the dataflow, in the job of the service that wrote them.

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
        """A Parquet file of the records as they are."""
        return encode_rows(rows)

    @property
    def _store(self) -> ObjectStore:
        return get_storage_provider(self._url)

    def folder(self, task: TaskInfo) -> str:
        """Where `SegmentSource` looks."""
        return f"{JobPaths(JobId(task.job), task.pipeline).topic(self.topic)}/"


class BothSinks(Sink):
    """A sink that is bound, and `KeptSink`: each has commit data of its own."""

    def __init__(self, bound: Sink, kept: KeptSink) -> None:
        self._sinks = (bound, kept)

    def tables(self) -> Sequence[TableConfig]:
        """Those of both; what both have, once."""
        found = {config.table: config for sink in self._sinks for config in sink.tables()}
        return list(found.values())

    def on_start(self, ctx: OperatorContext) -> None:
        """Both begin."""
        for sink in self._sinks:
            sink.on_start(ctx)

    def process_batch(
        self, batch: pa.RecordBatch, ctx: OperatorContext, collector: Collector
    ) -> None:
        """Both take every record."""
        for sink in self._sinks:
            sink.process_batch(batch, ctx, collector)

    def handle_checkpoint(self, ctx: OperatorContext, collector: Collector) -> None:
        """Both prepare."""
        for sink in self._sinks:
            sink.handle_checkpoint(ctx, collector)

    def commit(self, epoch: Epoch, data: Mapping[TableName, Mapping[int, bytes]]) -> None:
        """Both commit, each what it has prepared. Errors as `check_own`."""
        bound, kept = self._sinks
        bound.commit(epoch, {name: parts for name, parts in data.items() if name != KEPT})
        kept.commit(epoch, {name: parts for name, parts in data.items() if name == KEPT})


class _RecordSink(BufferingSink):
    """Keeps records until the barrier, and what each epoch prepared until it is committed."""

    def tables(self) -> Sequence[TableConfig]:
        """Those of every sink."""
        return _TABLES


class AppendSink(_RecordSink):
    """Records behind each other in one file of this machine, exactly once.

    An epoch is staged in a file beside it; its commit writes it at the very position where the
    epoch before ended, so that committing twice changes nothing. Nobody else may write the file.

    Args:
        topic: for messages.
        path: the file; it must not exist, or be empty, when the job begins.
        writer: how values become lines.

    Raises:
        InputError: the path is a directory, or in one that is not there.
    """

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
        """Begin with nothing buffered.

        Raises:
            InputError: there are several subtasks; one file has one end.
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
        """Stage what has come, and leave its place as commit data.

        Raises:
            InputError: the job begins, and the file holds something already.
        """
        values = values_in(self.drained())
        if not values:
            return
        positions = ctx.table_manager.get_global_keyed_state(POSITION, str, int)
        start = positions.get(self._path)
        if start is None:
            start = self._empty()
        data = (b"" if start else self._writer.header) + self._writer.rows(values)
        staged = StatePath(f"{ctx.task_info.operator}-{ctx.epoch:07}-{uuid.uuid4().hex[:16]}")
        self._staging.put(staged, data)
        positions.insert(self._path, start + len(data))
        commit = _APPENDED.encode((self._path, start, len(data), staged))
        ctx.table_manager.insert_committing_data(APPENDED, commit)

    def _empty(self) -> int:
        if os.path.exists(self._path) and os.path.getsize(self._path):
            raise InputError(
                "the file of a sink is not empty, and this job wrote none of it",
                topic=self._topic,
                path=self._path,
                next_step="remove it, or give another path",
            )
        return 0

    def commit(self, epoch: Epoch, data: Mapping[TableName, Mapping[int, bytes]]) -> None:
        """Write the epoch's records where they belong.

        Raises:
            ProtocolError: the file is not what the epochs before have left.
            InputError: it was prepared for another file, or another kind of sink.
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
                    continue  # an earlier attempt at this commit came to its end
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
                there = file.read(size - start)
                if not content.startswith(there):
                    raise self._contradicted("another program wrote behind them", start)
                file.write(content[len(there) :])
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
    """Records to the terminal when their epoch is ready.

    What is printed cannot be taken back: a run that is killed between printing an epoch and
    noting so prints it again. Nothing is left out.

    """

    def __init__(self, topic: str, writer: Writer) -> None:
        super().__init__()
        self._topic = topic
        self._writer = writer

    def handle_checkpoint(self, ctx: OperatorContext, collector: Collector) -> None:
        """Leave the lines as commit data."""
        if values := values_in(self.drained()):
            lines = _PRINTED.encode(self._writer.rows(values))
            ctx.table_manager.insert_committing_data(PRINTED, lines)

    def commit(self, epoch: Epoch, data: Mapping[TableName, Mapping[int, bytes]]) -> None:
        """Print the epoch's records. Errors as `check_own`."""
        check_own(self._topic, (PRINTED,), data)
        for _, lines in sorted(data.get(PRINTED, {}).items()):
            sys.stdout.write(_PRINTED.decode(lines).decode(errors="replace"))
        sys.stdout.flush()
