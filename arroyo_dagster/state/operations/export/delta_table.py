"""Tables of Delta, through the package deltalake."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.errors import InputError, StorageError
from arroyo_dagster.optional_packages import explained_imports
from arroyo_dagster.redaction import redact_text, register_settings, replaced
from arroyo_dagster.state.operations.export.lake_table import (
    AddedFile,
    CommitToken,
    LakeTable,
    OpenTable,
    OvertakenError,
)
from arroyo_dagster.state.storage.urls import parse_url

if TYPE_CHECKING:
    from deltalake import DeltaTable

_FINISHED = "finished"
_NOT_CHECKED_HERE = ("delta.constraints.", "delta.columnMapping.mode")
_NOT_WRITTEN_HERE = ("delta.invariants", "delta.generationExpression", "delta.identity.start")


class DeltaLakeTable(LakeTable):
    """A Delta table at a URL; needs `arroyo-dagster[delta]`.

    Args:
        url: any URL that the checkpoint URL may have.
        options: of the store's client; deltalake gets them as its `storage_options`.

    Raises:
        InputError: the package deltalake is not installed.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        with explained_imports():
            import deltalake  # noqa: F401
        self.name = url
        self._options = {name: str(value) for name, value in (options or {}).items()}
        register_settings(self._options)
        parsed = parse_url(url)
        self._uri = parsed.directory if parsed.backend == "file" else url

    def check_names(self, names: Sequence[str]) -> None:
        """Refuse names that differ by case only."""
        spellings: dict[str, str] = {}
        for name in names:
            other = spellings.setdefault(name.lower(), name)
            if other != name:
                raise InputError(
                    f"a Delta table cannot have the columns {other!r} and {name!r}: their names "
                    "differ by case only",
                    table=self.name,
                    next_step="write Parquet or Iceberg, or give one of them another name in the "
                    "job",
                )

    def open(self) -> OpenDeltaTable | None:
        """Read the table's metadata; see `LakeTable.open`."""
        from deltalake import DeltaTable
        from deltalake.exceptions import TableNotFoundError

        with _failures(self.name):
            try:
                table = DeltaTable(self._uri, storage_options=self._options)
            except TableNotFoundError:
                return None
        return OpenDeltaTable(self.name, table)

    def create(
        self, columns: pa.Schema, partition_by: Sequence[str], properties: Mapping[str, str]
    ) -> OpenDeltaTable:
        """Create the table, unless another writer has just done so."""
        from deltalake import DeltaTable

        with _failures(self.name):
            table = DeltaTable.create(
                self._uri,
                columns,
                mode="ignore",
                partition_by=list(partition_by),
                configuration=dict(properties),
                storage_options=self._options,
                raise_if_key_not_exists=False,
            )
        return OpenDeltaTable(self.name, table)


class OpenDeltaTable(OpenTable):
    """A Delta table at one version."""

    def __init__(self, name: str, table: DeltaTable) -> None:
        metadata = table.metadata()
        self._name = name
        self._table = table
        self.files_url = name
        self.columns = pa.schema(table.schema().to_arrow())
        self.partitioned_by = tuple(metadata.partition_columns)
        self.properties = metadata.configuration

    def check_writable(self) -> None:
        """Refuse constraints, column mapping and generated columns."""
        fields = self._table.schema().fields
        names = [name for name in self.properties if name.startswith(_NOT_CHECKED_HERE)]
        names += [key for field in fields for key in field.metadata if key in _NOT_WRITTEN_HERE]
        if names:
            raise InputError(
                f"arroyo-dagster cannot write to a Delta table with {', '.join(names)}",
                table=self._name,
                next_step="write to a table without, and copy its rows from there",
            )

    def token(self, writer: str) -> CommitToken | None:
        """Return the token, which is two application transactions."""
        epoch = self._table.transaction_version(writer)
        finished = self._table.transaction_version(f"{writer}/{_FINISHED}")
        return None if epoch is None else CommitToken(writer, epoch, finished or 0)

    def partition_files(self, column: str, value: int) -> tuple[int, int, int]:
        """Return files, rows and bytes of a partition, by the log."""
        actions = pa.table(self._table.get_add_actions(flatten=True))
        name = f"partition.{column}"
        if name not in actions.column_names:
            return 0, 0, 0
        files = actions.filter(pc.equal(actions.column(name).cast(pa.int64()), value))
        rows, sizes = (pc.sum(files.column(key)).as_py() for key in ("num_records", "size_bytes"))
        return files.num_rows, rows or 0, sizes or 0

    def append(
        self,
        files: Sequence[AddedFile],
        token: CommitToken,
        epoch: int,
        added_columns: Sequence[pa.Field] = (),
    ) -> None:
        """Add columns in one transaction, then files and the token in another."""
        from deltalake.exceptions import CommitFailedError

        with _failures(self._name):
            try:
                if added_columns:
                    from deltalake import Schema

                    fields = Schema.from_arrow(pa.schema(added_columns)).fields
                    self._table.alter.add_columns(list(fields))
                self._append(files, token, epoch)
            except CommitFailedError as error:
                raise OvertakenError from error

    def _append(self, files: Sequence[AddedFile], token: CommitToken, epoch: int) -> None:
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
            for file in files
        ]
        properties = CommitProperties(
            custom_metadata={"arroyoJob": token.writer, "arroyoEpoch": str(epoch)},
            app_transactions=[
                Transaction(token.writer, token.epoch),
                Transaction(f"{token.writer}/{_FINISHED}", token.finished_at_micros),
            ],
        )
        self._table.create_write_transaction(
            actions,
            "append",
            self._table.schema(),
            partition_by=list(self.partitioned_by),
            commit_properties=properties,
        )


def _failures(name: str) -> AbstractContextManager[None]:
    """Replace the errors of deltalake."""
    from deltalake.exceptions import DeltaError

    return replaced(
        (DeltaError, OSError),
        lambda error: StorageError(
            f"deltalake failed ({redact_text(str(error)).splitlines()[0]})",
            table=name,
            retryable=True,
            next_step="check the table and its options, then run it again; nothing is lost",
        ),
    )
