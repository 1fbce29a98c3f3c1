"""The common part of the sinks of table formats: data files by subtasks, one commit per epoch.

A subtask writes its rows to a data file in the directory of the table; the commit of the epoch adds
the files to the table (`lake_table`). The token has a digest of the files.
"""

from __future__ import annotations

import base64
import hashlib
import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from arroyo_dagster.errors import ConflictError, FormatError, InputError, ProtocolError
from arroyo_dagster.redaction import register_settings
from arroyo_dagster.state.codec.parquet import encode_rows
from arroyo_dagster.state.model.ids import Epoch, StatePath, TableName
from arroyo_dagster.state.model.layout import JobPaths, staged_name
from arroyo_dagster.state.model.tables import TableConfig
from arroyo_dagster.state.runtime.connectors import PRE_COMMIT, BufferingSink
from arroyo_dagster.state.runtime.lake_table import (
    COMMIT_ATTEMPTS,
    TABLE_TYPES,
    AddedFile,
    CommitToken,
    LakeTable,
    OpenTable,
    OvertakenError,
    PartitionKey,
)
from arroyo_dagster.state.runtime.operators import Collector, OperatorContext
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.remote.open import open_store
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.global_keyed import global_table_config

FILES = "files"
"""The mark of a sink's token: the digest of the files."""


@dataclass(frozen=True, slots=True)
class EpochAppend:
    """What one epoch adds to a table.

    Attributes:
        writer: the operator that writes: `pipeline/job/operator`.
        schema: the columns of the files.
    """

    writer: str
    epoch: Epoch
    files: tuple[AddedFile, ...]
    schema: pa.Schema

    @property
    def digest(self) -> int:
        """The digest of the files' names, which are unique to an attempt: 63 bits."""
        names = "\n".join(sorted(file.path for file in self.files))
        return int.from_bytes(hashlib.sha256(names.encode()).digest()[:8], "big") >> 1

    @property
    def token(self) -> CommitToken:
        """What the table keeps of the commit."""
        return CommitToken(self.writer, int(self.epoch), self.digest, FILES)

    def is_done(self, token: CommitToken | None, table: str) -> bool:
        """Return whether the table has these files, by the token of the writer's newest commit.

        Args:
            token: None = there is none.
            table: for messages.

        Raises:
            ProtocolError: the token is of a later epoch, or of other files of this epoch: the job's
                state is not the one that wrote them.
        """
        if token is None or token.epoch < self.epoch:
            return False
        if token == self.token:
            return True
        raise ProtocolError(
            f"the table already has epoch {token.epoch} of this job, written from another state",
            table=table,
            job=self.writer,
            epoch=self.epoch,
            next_step="if the job's state was deleted or restored from a backup, give the job "
            "another name, or restore the table as well; nothing was added",
        )


class TableSink(BufferingSink):
    """Adds the rows of each epoch to a table exactly once; see the module.

    Args:
        lake: the table.
        url: the directory in which subtasks write data files.
        options: as `open_store` takes them.
    """

    pre_commit = PRE_COMMIT
    partitioned_by: tuple[PartitionKey, ...] = ()
    """How the table is partitioned; a subtask writes a file for each key of an epoch."""

    def __init__(self, lake: LakeTable, url: str, options: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self._lake = lake
        self._url = url
        self._options = dict(options or {})
        register_settings(self._options)

    @property
    def table(self) -> str:
        """What messages call the table."""
        return self._lake.name

    @property
    def _store(self) -> ObjectStore:
        return open_store(self._url, options=self._options)

    def tables(self) -> Sequence[TableConfig]:
        """Return the table of pre-commits."""
        return (
            global_table_config(
                self.pre_commit, "pre-commit data", two_phase_commit=True, key=str, value=str
            ),
        )

    def handle_checkpoint(self, ctx: OperatorContext, collector: Collector) -> None:
        """Write the buffered rows to data files, and store their names as commit data."""
        if not (batches := self.drained()):
            return
        task, epoch = ctx.task_info, Epoch(ctx.epoch)
        rows = table_rows(pa.Table.from_batches(batches))
        found = {
            "writer": f"{JobPaths(task.job, task.pipeline).root}/{task.operator}",
            "schema": base64.b64encode(rows.schema.serialize()).decode(),
            "files": [
                self._write(part, staged_name(epoch, task.task_index, unique, ".parquet"))
                for part in self._parts(rows)
                for unique in [uuid.uuid4().hex[:16]]
            ],
        }
        ctx.table_manager.insert_committing_data(self.pre_commit, json.dumps(found).encode())

    def _parts(self, rows: pa.Table) -> Iterator[pa.Table]:
        """Divide rows by partition, each part in the order of the rows."""
        if not self.partitioned_by:
            yield rows
            return
        keys = pa.table({f"{at}": key.of(rows) for at, key in enumerate(self.partitioned_by)})
        numbered = keys.append_column("row", pa.array(range(rows.num_rows), pa.int64()))
        grouped = numbered.group_by(keys.column_names, use_threads=False)
        for numbers in grouped.aggregate([("row", "list")]).column("row_list"):
            yield rows.take(numbers.values)

    def _write(self, rows: pa.Table, name: str) -> list[Any]:
        kept, partition = self.file_rows(rows)
        data = encode_rows(kept)
        self._store.put(StatePath(name), data)
        return [name, len(data), rows.num_rows, partition]

    def file_rows(self, rows: pa.Table) -> tuple[pa.Table, dict[str, str | None]]:
        """Return what a file holds of the rows of one partition, and the values of the others."""
        return rows, {}

    def commit(self, epoch: Epoch, data: Mapping[TableName, Mapping[int, bytes]]) -> None:
        """Add the files of an epoch to the table, unless it has them.

        Raises:
            InputError: the table's columns are not those of the rows any more.
            ProtocolError: a file is missing; or the table has files of another state of the job.
            ConflictError: other writers always came first.
            StorageError: the library could not read or write the table.
        """
        found = _commit_of(epoch, data.get(self.pre_commit, {}))
        if found is not None:
            self.add_files(found)

    def add_files(self, commit: EpochAppend) -> None:
        """Add files and the token in one commit of the table. Errors as in `commit`."""
        failed: BaseException | None = None
        for _ in range(COMMIT_ATTEMPTS):
            try:
                self.add_files_once(commit)
            except OvertakenError as error:
                failed = error.__cause__
            else:
                return
        raise ConflictError(
            f"other writers committed to the table during {COMMIT_ATTEMPTS} attempts",
            table=self.table,
            epoch=commit.epoch,
            retryable=True,
            next_step="run it again: the epoch is ready and will be added then",
        ) from failed

    def add_files_once(self, commit: EpochAppend) -> None:
        """Read the table, and add files and the token unless it has them. Errors as in `commit`.

        Raises:
            OvertakenError: another writer, or another run of this job, has just committed.
        """
        table = self._lake.open() or self.created(commit.schema)
        if commit.is_done(table.token(commit.writer, FILES), self.table):
            return
        self.check_table(table, commit.schema, pending=True)
        self.check_files(commit)
        table.append(commit.files, commit.token)

    def created(self, rows: pa.Schema) -> OpenTable:
        """Create the table, which does not exist.

        Raises:
            NotFoundError: the sink creates none.
            StorageError: the library could not write it.
        """
        names = [key.column for key in self.partitioned_by]
        return self._lake.create(TABLE_TYPES.schema_of(rows), names, {})

    def check_table(self, table: OpenTable, rows: pa.Schema, *, pending: bool) -> None:
        """Check that rows fit into a table; arguments as of `check_columns`.

        Raises:
            InputError: the table has other columns or partitions, or settings that the sink cannot
                obey.
        """
        table.check_writable()
        self.check_partitions(table.partitioned_by)
        self.check_columns(rows, table.columns, pending=pending)

    def check_files(self, commit: EpochAppend) -> None:
        """Check that the files are there: the cleaning of a table deletes what it does not list.

        Raises:
            ProtocolError: one is missing.
        """
        paths = [file.path for file in commit.files]
        infos = concurrently(self._store.head, paths)
        for path, info in zip(paths, infos, strict=True):
            if info is None:
                raise ProtocolError(
                    "a data file that a checkpoint must commit is missing",
                    table=self.table,
                    epoch=commit.epoch,
                    path=path,
                    url=self._url,
                    next_step="look for it in backups of the table; the checkpoint stays in state "
                    "committing",
                )

    def check_partitions(self, found: Sequence[PartitionKey]) -> None:
        """Check that the table is partitioned as the subtasks divide their rows.

        Raises:
            InputError: it is not.
        """
        if tuple(found) != self.partitioned_by:
            raise InputError(
                "the table is partitioned in another way than the sink writes it",
                table=self.table,
                table_by=[_named(key) for key in found],
                sink_by=[_named(key) for key in self.partitioned_by],
                next_step="build the sink with the partitions of the table; files of a pending "
                "epoch need those that they were written with",
            )

    def check_columns(self, rows: pa.Schema, table: pa.Schema, *, pending: bool = False) -> None:
        """Check that a table has exactly the columns of the rows: its schema is never changed.

        Args:
            rows: the columns of the rows.
            table: the columns of the table.
            pending: whether the rows are already written. Then the table may have more columns, if
                they are nullable.

        Raises:
            InputError: it has not, with every difference.
        """
        wanted = {field.name: field for field in TABLE_TYPES.schema_of(table)}
        found = {field.name: field for field in TABLE_TYPES.schema_of(rows)}
        wrong = [f"{name} is not in the table" for name in found if name not in wanted]
        for name, column in wanted.items():
            own = found.get(name)
            if own is None:
                if not (pending and column.nullable):
                    wrong.append(f"{name} is not in the rows")
            elif own.type != column.type:
                wrong.append(f"{name} is {own.type} in the rows, {column.type} in the table")
            elif own.nullable and not column.nullable:
                wrong.append(f"{name} is required in the table, and nullable in the rows")
        if wrong:
            raise InputError(
                f"the rows do not have the columns of the table: {'; '.join(wrong)}",
                table=self.table,
                next_step="undo the change of the table, so that the epoch can be committed"
                if pending
                else "change the operator's output_schema, or alter the table first: a sink never "
                "changes the columns of a table",
            )


def _named(key: PartitionKey) -> str:
    return key.column if key.unit is None else f"{key.unit}({key.column})"


def _commit_of(epoch: Epoch, data: Mapping[int, bytes]) -> EpochAppend | None:
    """Return the commit of an epoch from the commit data of all subtasks; None = nothing to add."""
    try:
        found = [json.loads(one) for one in data.values()]
        files = [AddedFile(StatePath(path), *rest) for one in found for path, *rest in one["files"]]
        if not files:
            return None
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(found[0]["schema"])))
        return EpochAppend(str(found[0]["writer"]), epoch, tuple(files), schema)
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(
            "the commit data are not of this sink",
            epoch=epoch,
            next_step="run the pipeline once with the former sink, then change it",
        ) from error


def table_rows(rows: pa.Table) -> pa.Table:
    """Convert rows to the types that table formats have.

    Raises:
        InputError: a time has nanoseconds that would be lost.
    """
    try:
        return TABLE_TYPES.convert(rows)
    except InputError as error:
        raise InputError(
            f"a value does not fit into the microseconds of a table ({error.message})",
            column=error.facts.get("column"),
            next_step="round the times in an operator before the sink",
        ) from error
