"""A Delta table as the sink of a pipeline, through the package deltalake."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from arroyo_dagster.errors import InputError, StorageError
from arroyo_dagster.optional_packages import explained_imports
from arroyo_dagster.redaction import redact_text, redacted_cause
from arroyo_dagster.state.runtime.table_sink import (
    EpochAppend,
    OvertakenError,
    PartitionKey,
    TableSink,
    table_schema,
)
from arroyo_dagster.state.storage.urls import parse_url

if TYPE_CHECKING:
    from deltalake import DeltaTable

_NOT_CHECKED_HERE = ("delta.constraints.", "delta.columnMapping.mode")
_PARTITION_TYPES = (
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_integer,
    pa.types.is_boolean,
    pa.types.is_date,
)
_NOT_WRITTEN_HERE = ("delta.invariants", "delta.generationExpression", "delta.identity.start")


class DeltaSink(TableSink):
    """Adds rows to a Delta table, each exactly once; needs `arroyo-dagster[delta]`.

    Subtasks write data files to the table's directory; the driver commits their names, once the
    epoch is ready, with two application transactions: `pipeline/job/operator` with the epoch as its
    version, and the same with `/files` and a digest of the files. A repeated commit finds them and
    adds nothing. Files of epochs that were never published are not in the table; `VACUUM` deletes
    them.

    The first commit creates a table that does not exist. The sink never changes the columns of a
    table: rows with other columns are refused before the run writes anything. Tables with
    constraints, column mapping or generated columns are refused.

    Args:
        url: the table; any URL that the checkpoint URL may have.
        partition_by: the columns by which the table is partitioned: text, whole numbers, booleans
            or dates.
        options: for the client of a remote store, as `open_store` takes them; deltalake gets them
            as its `storage_options`.

    Raises:
        InputError: the package deltalake is not installed.
    """

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any] | None = None,
        *,
        partition_by: Sequence[str] = (),
    ) -> None:
        super().__init__(url, options)
        self.partitioned_by = tuple(PartitionKey(column) for column in partition_by)
        with explained_imports():
            import deltalake  # noqa: F401
        self.table = url
        parsed = parse_url(url)
        self._uri = parsed.directory if parsed.backend == "file" else url

    def check(self, rows: pa.Schema) -> None:
        """Refuse a table that the rows do not fit into.

        Raises:
            InputError: it has other columns or partitions, or properties that the sink cannot obey;
                or the rows have no such columns to partition by.
        """
        for key in self.partitioned_by:
            at = rows.get_field_index(key.column)
            if at < 0 or not any(fits(rows.field(at).type) for fits in _PARTITION_TYPES):
                raise InputError(
                    f"the rows have no column {key.column!r} by which Delta can partition them",
                    table=self.table,
                    columns=[f"{field.name}: {field.type}" for field in rows],
                    next_step="partition by text, whole numbers, booleans or dates",
                )
        table = self._open()
        if table is not None:
            self._check(table, rows, pending=False)

    def _check(self, table: DeltaTable, rows: pa.Schema, *, pending: bool) -> None:
        metadata, fields = table.metadata(), table.schema().fields
        names = [one for one in metadata.configuration if one.startswith(_NOT_CHECKED_HERE)]
        names += [key for field in fields for key in field.metadata if key in _NOT_WRITTEN_HERE]
        if names:
            raise InputError(
                f"the sink cannot write to a Delta table with {', '.join(names)}",
                table=self.table,
                next_step="write to a table without, and copy its rows from there",
            )
        self.check_partitions([PartitionKey(one) for one in metadata.partition_columns])
        self.check_columns(rows, pa.schema(table.schema().to_arrow()), pending=pending)

    def file_rows(self, rows: pa.Table) -> tuple[pa.Table, dict[str, str | None]]:
        """Return the rows of a file without partition columns, and the values of those."""
        names = [key.column for key in self.partitioned_by]
        values = {name: _partition_text(rows.column(name)[0].as_py(), name) for name in names}
        return rows.drop_columns(names), values

    def _open(self) -> DeltaTable | None:
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError, TableNotFoundError

        try:
            return DeltaTable(self._uri, storage_options=self._storage_options)
        except TableNotFoundError:
            return None
        except (DeltaError, OSError) as error:
            raise self._failed(error) from redacted_cause(error)

    @property
    def _storage_options(self) -> dict[str, str]:
        return {name: str(value) for name, value in self._options.items()}

    def add_files_once(self, commit: EpochAppend) -> None:
        """Add files in one transaction of the table; see `TableSink.add_files_once`."""
        from deltalake.exceptions import CommitFailedError, DeltaError

        table = self._open() or self._create(commit.schema)
        recorded = table.transaction_version(commit.writer)
        digest = table.transaction_version(f"{commit.writer}/files")
        if commit.is_done(recorded, digest, self.table):
            return
        self._check(table, commit.schema, pending=True)
        self.check_files(commit)
        try:
            self._add(table, commit)
        except CommitFailedError as error:
            raise OvertakenError from error
        except (DeltaError, OSError) as error:
            raise self._failed(error) from redacted_cause(error)

    def _add(self, table: DeltaTable, commit: EpochAppend) -> None:
        from deltalake import CommitProperties, Transaction
        from deltalake.transaction import AddAction, RemoveAction

        now_millis = time.time_ns() // 1_000_000
        actions: list[AddAction | RemoveAction] = [
            AddAction(
                path=file.path,
                size=file.size_bytes,
                partition_values=file.partition,
                modification_time=now_millis,
                data_change=True,
                stats=json.dumps({"numRecords": file.rows}),
            )
            for file in commit.files
        ]
        properties = CommitProperties(
            custom_metadata={"arroyoJob": commit.writer, "arroyoEpoch": str(int(commit.epoch))},
            app_transactions=[
                Transaction(commit.writer, int(commit.epoch)),
                Transaction(f"{commit.writer}/files", commit.digest),
            ],
        )
        schema = table.schema()
        table.create_write_transaction(
            actions,
            "append",
            schema,
            partition_by=[key.column for key in self.partitioned_by],
            commit_properties=properties,
        )

    def _create(self, schema: pa.Schema) -> DeltaTable:
        """Create the table, unless another writer has just done so."""
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError

        try:
            return DeltaTable.create(
                self._uri,
                table_schema(schema),
                mode="ignore",
                partition_by=[key.column for key in self.partitioned_by],
                storage_options=self._storage_options,
            )
        except (DeltaError, OSError) as error:
            raise self._failed(error) from redacted_cause(error)

    def _failed(self, error: Exception) -> StorageError:
        return StorageError(
            f"deltalake failed ({redact_text(str(error)).splitlines()[0]})",
            table=self.table,
            retryable=True,
            next_step="check the table and its options, then run it again; nothing is lost",
        )


def _partition_text(value: Any, column: str) -> str | None:
    """Return a partition value as Delta's log holds it.

    Raises:
        InputError: an empty text, which the log cannot tell from null.
    """
    if value == "":
        raise InputError(
            f"an empty text in {column!r} would be null in the Delta table",
            column=column,
            next_step="replace it in an operator before the sink, or partition by another column",
        )
    if isinstance(value, bool):
        return str(value).lower()
    return None if value is None else str(value)
