"""Sources and sinks of this package."""

from __future__ import annotations

import contextlib
import hashlib
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from arroyo_dagster.engine.operators import Collector, Offset, OperatorContext, Sink, Source
from arroyo_dagster.errors import (
    FormatError,
    InputError,
    NotFoundError,
    ProtocolError,
    StorageError,
)
from arroyo_dagster.state.codec.parquet import encode_rows
from arroyo_dagster.state.codec.plain import plain_rows
from arroyo_dagster.state.model.checkpoints import CONTENT
from arroyo_dagster.state.model.garbage import GRACE_MICROS
from arroyo_dagster.state.model.ids import Epoch, StatePath, TableName
from arroyo_dagster.state.model.layout import STAGING, parse_staged_name, staged_name
from arroyo_dagster.state.model.objects import BATCH
from arroyo_dagster.state.model.tables import TableConfig
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.remote.open import open_store
from arroyo_dagster.state.storage.store import ObjectInfo, ObjectStore
from arroyo_dagster.state.tables.global_keyed import global_table_config
from arroyo_dagster.state.tables.managed import STAGED_FILES, staged_paths
from arroyo_dagster.state.tables.table import TaskInfo

PRE_COMMIT = TableName("p")


@dataclass(frozen=True, slots=True)
class RowRange:
    """A split of a table: rows start (inclusive) to end (exclusive)."""

    start: int
    end: int


_HEAD_ROWS = 1000
"""A position has a digest of so many rows, from the beginning."""


class RowSource(Source):
    """Rows in an order, a limited number per epoch.

    The offset `{"row": n, CONTENT: …}` also has the number of rows of the source, and a digest of
    the first ones by column. A source that has fewer rows, or others at its beginning, does not
    continue.

    Args:
        schema: as the rows are stored.
        count: the number of rows.
    """

    def __init__(self, schema: pa.Schema, count: int, rows_per_epoch: int, splits: int) -> None:
        if rows_per_epoch < 1 or splits < 1:
            raise InputError("rows_per_epoch and splits are at least 1")
        self.schema = schema
        self._count = count
        self._rows_per_epoch = rows_per_epoch
        self._splits = splits
        self._digested: tuple[int, dict[str, str]] = (0, {})

    def head(self, rows: int) -> pa.Table:
        """Return the first rows."""
        raise NotImplementedError

    def initial_offset(self) -> Offset:
        """Return row 0."""
        return {"row": 0}

    def latest_offset(self, start: Offset) -> Offset:
        """Advance by at most `rows_per_epoch` rows."""
        row = min(self._count, int(start["row"]) + self._rows_per_epoch)
        if row == int(start["row"]):
            return start
        rows = min(row, _HEAD_ROWS)
        head = {"rows": rows, "columns": self._digests(rows)}
        return {"row": row, CONTENT: {"rows": self._count, "head": head}}

    def check_offset(self, offset: Offset) -> None:
        """Refuse an offset of a source that had more rows, or others at its beginning.

        Offsets of earlier releases have no digest: of them, only the number of rows is checked.
        """
        content = offset.get(CONTENT, {})
        read = max(int(offset["row"]), int(content.get("rows", 0)))
        step = "give it the rows that it had, with new ones behind them, or give the job another "
        if self._count < read:
            raise InputError(
                "the source has fewer rows than when it was read: rows would be skipped",
                rows=self._count,
                expected=f"at least {read}",
                read=offset["row"],
                next_step=f"{step}name; nothing was written",
            )
        head = content.get("head", {"rows": 0, "columns": {}})
        now = self._digests(int(head["rows"]))
        shared = {name: digest for name, digest in head["columns"].items() if name in now}
        other = sorted(name for name, digest in shared.items() if now[name] != digest)
        if other or (head["columns"] and not shared):
            raise InputError(
                f"the first {head['rows']} rows of the source are not those that were read: rows "
                "would be skipped",
                columns=other or sorted(head["columns"]),
                read=offset["row"],
                next_step=f"{step}name; nothing was written",
            )

    def _digests(self, rows: int) -> dict[str, str]:
        """Return a digest of the first rows by column; of a value, not of its type."""
        if rows != self._digested[0]:
            values = plain_rows(self.head(rows))
            columns = {name: [row[name] for row in values] for name in set(self.schema.names)}
            self._digested = rows, {name: _digest(column) for name, column in columns.items()}
        return self._digested[1]

    def partitions(self, start: Offset, end: Offset) -> Sequence[RowRange]:
        """Return ranges of about equal size."""
        # Divide the rows between two offsets `{"row": n}` into about equal ranges, in order.
        first, last = int(start["row"]), int(end["row"])
        step = -(-(last - first) // self._splits) if last > first else 1
        return [RowRange(begin, min(begin + step, last)) for begin in range(first, last, step)]

    def exhausted(self, offset: Offset) -> bool:
        """Whether the last row has been read."""
        return bool(int(offset["row"]) >= self._count)


def _digest(values: Sequence[Any]) -> str:
    return hashlib.blake2b(repr(values).encode(), digest_size=8).hexdigest()


class TableSource(RowSource):
    """The rows of an Arrow table in memory, a limited number per epoch, in order.

    A later run must have the same rows, or more behind them: see `RowSource`.

    Args:
        rows: the rows to read.
        rows_per_epoch: the maximum number of rows in one epoch.
        splits: in how many splits an epoch is read.
    """

    def __init__(self, rows: pa.Table, *, rows_per_epoch: int, splits: int = 1) -> None:
        super().__init__(rows.schema, rows.num_rows, rows_per_epoch, splits)
        self._rows = rows

    def head(self, rows: int) -> pa.Table:
        """Return the first rows."""
        return self._rows.slice(0, rows)

    def read(self, partition: RowRange) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one range."""
        yield from self._rows.slice(partition.start, partition.end - partition.start).to_batches()


class ParquetReplay(RowSource):
    """A Parquet file replayed in row order, a limited number of rows per epoch.

    A later run must have the same rows, or more behind them: see `RowSource`.

    Args:
        path: the file, on a disk that every worker can read.
        columns: the columns to read, in this order; None = all.
        rows_per_epoch: the maximum number of rows in one epoch.
        splits: in how many splits an epoch is read; each is a task on Spark.

    Raises:
        NotFoundError: there is no such file.
        FormatError: the file is not Parquet.
        InputError: the file has no such column.
    """

    def __init__(
        self,
        path: str,
        *,
        columns: Sequence[str] | None = None,
        rows_per_epoch: int = 100_000,
        splits: int = 1,
    ) -> None:
        self._path = path
        with self._open() as file:
            schema: pa.Schema = file.schema_arrow
            count = file.metadata.num_rows
        names = list(columns) if columns is not None else schema.names
        missing = [name for name in names if name not in schema.names]
        if missing:
            raise InputError(
                f"the file has no column {missing[0]!r}", path=path, columns=schema.names
            )
        self._columns = names
        fields = pa.schema([schema.field(name) for name in names])
        super().__init__(fields, count, rows_per_epoch, splits)

    def _open(self) -> pq.ParquetFile:
        try:
            return pq.ParquetFile(self._path)
        except FileNotFoundError as error:
            raise NotFoundError("no file to replay", path=self._path) from error
        except (pa.ArrowException, OSError) as error:
            raise FormatError(f"cannot be read as Parquet ({error})", path=self._path) from error

    def head(self, rows: int) -> pa.Table:
        """Return the first rows."""
        batches = []
        with self._open() as file:
            for batch in file.iter_batches(batch_size=max(rows, 1), columns=self._columns):
                batches.append(batch)
                if sum(batch.num_rows for batch in batches) >= rows:
                    break
            schema = batches[0].schema if batches else file.schema_arrow
        return pa.Table.from_batches(batches, schema).slice(0, rows).select(self._columns)

    def read(self, partition: RowRange) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one range; only the row groups that contain some are read."""
        first = 0
        with self._open() as file:
            for group in range(file.metadata.num_row_groups):
                count = file.metadata.row_group(group).num_rows
                start = max(partition.start - first, 0)
                end = min(partition.end - first, count)
                first += count
                if start < end:
                    rows = file.read_row_group(group, columns=self._columns)
                    rows = rows.select(self._columns).slice(start, end - start)
                    yield from rows.replace_schema_metadata(None).cast(self.schema).to_batches()


class BufferingSink(Sink):
    """Buffers rows until the barrier."""

    def __init__(self) -> None:
        self._batches: list[pa.RecordBatch] = []

    def on_start(self, ctx: OperatorContext) -> None:
        """Start with an empty buffer."""
        self._batches = []

    def process_batch(
        self, batch: pa.RecordBatch, ctx: OperatorContext, collector: Collector
    ) -> None:
        """Buffer rows until the barrier."""
        self._batches.append(batch)

    def drained(self) -> list[pa.RecordBatch]:
        """Return the buffered rows, and empty the buffer."""
        batches, self._batches = self._batches, []
        return batches


class FolderSink(BufferingSink):
    """Writes rows to files of a folder exactly once, in two phases.

    Before the barrier a subtask writes its rows below `_staging/`. When the checkpoint owns its
    epoch, the store copies the files to the folder itself, named
    `{epoch}-{subtask}-{unique}{suffix}`; no rows pass through the process that commits.
    Files that were staged for an epoch that was never published stay below `_staging/`, where
    readers ignore them. In the job's own directory such a file is an orphan, which `gc` deletes.
    Elsewhere the first commit of every run deletes the files that this job staged more than three
    days ago for earlier epochs.

    Args:
        url: the folder; any URL that the checkpoint URL may have.
    """

    suffix: str
    """The suffix of the files' names."""

    in_job = False
    """Whether the folder is in the job's directory, so that gc deletes leftovers there."""

    pre_commit = PRE_COMMIT
    """The table of its commit data; two sinks in one operator need two tables."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self._has_committed = False

    def encode(self, rows: pa.Table) -> bytes:
        """Return the bytes of a file that contains these rows."""
        raise NotImplementedError

    def folder(self, task: TaskInfo) -> str:
        """Return a subtask's folder below the URL, ending in `/`; empty for the URL itself."""
        return ""

    def tables(self) -> Sequence[TableConfig]:
        """Return the table of pre-commits."""
        return (
            global_table_config(
                self.pre_commit, "pre-commit data", two_phase_commit=True, key=str, value=str
            ),
        )

    @property
    def _store(self) -> ObjectStore:
        return open_store(self._url)

    def handle_checkpoint(self, ctx: OperatorContext, collector: Collector) -> None:
        """Stage the buffered rows in a file, and store its name as commit data."""
        if not (batches := self.drained()):
            return
        task = ctx.task_info
        unique = uuid.uuid4().hex[:16]
        name = staged_name(Epoch(ctx.epoch), task.task_index, unique, self.suffix)
        # Several jobs may share a folder, and each numbers its own epochs.
        job = "" if self.in_job else f"{task.pipeline or '-'}/{task.job}/"
        staged = StatePath(f"{self.folder(task)}{STAGING}/{job}{task.operator}/{name}")
        self._store.put(staged, self.encode(pa.Table.from_batches(batches)))
        ctx.table_manager.insert_committing_data(self.pre_commit, STAGED_FILES.encode([staged]))

    def commit(self, epoch: Epoch, data: Mapping[TableName, Mapping[int, bytes]]) -> None:
        """Move the staged files of an epoch to their final place.

        Raises:
            ProtocolError: a file is neither staged nor in its place.
        """
        store = self._store
        staged = staged_paths(data.get(self.pre_commit, {}))
        sweep = staged and not self._has_committed and not self.in_job
        written = store.head(staged[0]) if sweep else None
        concurrently(lambda path: _copy(store, path, _final(path)), staged)
        # Only now, so that a commit that is repeated still finds what it has not copied.
        for start in range(0, len(staged), BATCH):
            store.delete_many(staged[start : start + BATCH])
        if written is not None:
            self._has_committed = True
            remove_left_staged(store, written, epoch, parse_staged_name)


class ParquetSink(FolderSink):
    """Writes rows to Parquet files of a folder; see `FolderSink`."""

    suffix = ".parquet"

    def encode(self, rows: pa.Table) -> bytes:
        """Return a Parquet file."""
        return encode_rows(rows)


def remove_left_staged(
    store: ObjectStore,
    written: ObjectInfo,
    epoch: Epoch,
    epoch_of: Callable[[str], Epoch | None],
) -> None:
    """Delete the objects that killed runs of a job staged for epochs that are committed by now.

    Objects that cannot be deleted are left for the next run.

    Args:
        written: an object that this epoch staged. It determines the directory, and the current time
            by the store's clock: only objects more than three days older are deleted.
        epoch: a committed epoch; earlier ones are committed, too.
        epoch_of: returns the epoch in the name of a staged object; None for any other name.
    """
    if written.modified_micros is None:
        return
    old = written.modified_micros - GRACE_MICROS
    with contextlib.suppress(StorageError, NotFoundError):
        listed = store.list_dir(written.path.parent or "").objects
        left = [
            info.path
            for info in listed
            if info.addressable
            and info.modified_micros is not None
            and info.modified_micros < old
            and (staged_for := epoch_of(info.path.name)) is not None
            and staged_for < epoch
        ]
        if left:
            store.delete_many(left)


def _final(staged: StatePath) -> StatePath:
    head, _, _ = staged.rpartition(f"{STAGING}/")
    return StatePath(f"{head}{staged.name}")


def _copy(store: ObjectStore, staged: StatePath, final: StatePath) -> None:
    try:
        store.copy(staged, final)
    except NotFoundError as error:
        # An earlier attempt at this commit may have copied and deleted the file.
        if store.head(final) is None:
            raise ProtocolError(
                "a file that a checkpoint must commit is neither staged nor in its place",
                path=final,
                url=store.url,
                next_step="look for it in backups of the folder; the checkpoint stays in state "
                "committing",
            ) from error
