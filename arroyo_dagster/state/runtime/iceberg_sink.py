"""An Iceberg table as the sink of a pipeline, through the package pyiceberg."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from arroyo_dagster.errors import InputError, NotFoundError, StorageError
from arroyo_dagster.optional_packages import explained_imports
from arroyo_dagster.redaction import redact_text, redacted_cause, register_settings
from arroyo_dagster.state.runtime.table_sink import (
    EpochAppend,
    OvertakenError,
    PartitionKey,
    TableSink,
)

if TYPE_CHECKING:
    from pyiceberg.table import Table

JOB, EPOCH, FILES = "arroyo.job", "arroyo.epoch", "arroyo.files"
"""Properties of the summary of each snapshot."""

_UNITS = ("year", "month", "day", "hour")


class IcebergSink(TableSink):
    """Adds rows to an Iceberg table, each exactly once; needs `arroyo-dagster[iceberg]`.

    Subtasks write data files below the table's location; the driver commits their names, once the
    epoch is ready, as one snapshot. Its summary has the properties `arroyo.job`, `arroyo.epoch` and
    `arroyo.files` (a digest). The same transaction sets a property of the table to them, which
    outlives the snapshot: a repeated commit finds it and adds nothing. Files of epochs that were
    never published are not in the table; Iceberg's removal of orphan files deletes them.

    The table must exist. The sink never changes its columns: rows with other columns are refused
    before the run writes anything. A table may be partitioned by columns, or by the year, month,
    day or hour of a time; other partitions are refused.

    Args:
        table: `namespace.table`.
        catalog: the properties of pyiceberg's catalog, such as `type`, `uri` and `name`.
        options: of the store at the table's location, as `open_store` takes them; subtasks write
            with them.

    Raises:
        InputError: the package pyiceberg is not installed, the location has another form than a
            checkpoint URL, or the table is partitioned in another way.
        NotFoundError: there is no such table.
        StorageError: the catalog does not answer.
    """

    def __init__(
        self,
        table: str,
        catalog: Mapping[str, str],
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.table = table
        self._catalog = dict(catalog)
        register_settings(self._catalog)
        found = self._open()
        super().__init__(f"{found.location().rstrip('/')}/data", options)
        self.partitioned_by = tuple(self._partitions(found))

    def check(self, rows: pa.Schema) -> None:
        """Refuse a table that the rows do not fit into.

        Raises:
            InputError: it has other columns, or partitions.
        """
        self._check(self._open(), rows, pending=False)

    def _check(self, table: Table, rows: pa.Schema, *, pending: bool) -> None:
        self.check_partitions(self._partitions(table))
        self.check_columns(rows, table.schema().as_arrow(), pending=pending)

    def _partitions(self, table: Table) -> list[PartitionKey]:
        found = []
        for field in table.spec().fields:
            transform = str(field.transform)
            if transform not in ("identity", *_UNITS):
                raise InputError(
                    f"the sink cannot write to an Iceberg table with partitions by {transform}",
                    table=self.table,
                    next_step="write to a table that is partitioned by columns, or by year, month, "
                    "day or hour",
                )
            column = table.schema().find_column_name(field.source_id)
            unit = None if transform == "identity" else transform
            found.append(PartitionKey(str(column), unit))
        return found

    def _open(self) -> Table:
        with explained_imports():
            import pyiceberg  # noqa: F401
            from pyiceberg.catalog import load_catalog
            from pyiceberg.exceptions import (
                NoSuchNamespaceError,
                NoSuchTableError,
                NotInstalledError,
            )
        try:
            return load_catalog(**self._catalog).load_table(self.table)
        except (NoSuchTableError, NoSuchNamespaceError) as error:
            raise NotFoundError(
                "the catalog has no such table",
                table=self.table,
                next_step="create the table; the sink does not",
            ) from redacted_cause(error)
        except NotInstalledError as error:
            raise InputError(
                f"this catalog needs another package ({error})", table=self.table
            ) from redacted_cause(error)
        except Exception as error:
            raise self._failed(error) from redacted_cause(error)

    def add_files_once(self, commit: EpochAppend) -> None:
        """Add files in one transaction of the table; see `TableSink.add_files_once`."""
        from pyiceberg.exceptions import CommitFailedException

        table = self._open()
        token = json.loads(table.properties.get(_property(commit), "{}"))
        if commit.is_done(token.get("epoch"), token.get("files"), self.table):
            return
        self._check(table, commit.schema, pending=True)
        self.check_files(commit)
        try:
            self._add(table, commit)
        except CommitFailedException as error:
            raise OvertakenError from error
        except Exception as error:
            raise self._failed(error) from redacted_cause(error)

    def _add(self, table: Table, commit: EpochAppend) -> None:
        epoch = int(commit.epoch)
        summary = {JOB: commit.writer, EPOCH: str(epoch), FILES: str(commit.digest)}
        token = json.dumps({"epoch": epoch, "files": commit.digest})
        # For this copy of the metadata only: pyiceberg would repeat a commit that another one has
        # overtaken, without another look at the token.
        table.properties["commit.retry.num-retries"] = "0"
        with table.transaction() as transaction:
            transaction.add_files(
                [f"{self._url}/{file.path}" for file in commit.files],
                snapshot_properties=summary,
                check_duplicate_files=False,  # it reads every manifest; the token says it
            )
            transaction.set_properties({_property(commit): token})

    def _failed(self, error: Exception) -> StorageError:
        return StorageError(
            f"pyiceberg failed ({type(error).__name__}: {redact_text(str(error)).splitlines()[0]})",
            table=self.table,
            retryable=True,
            next_step="check the catalog and its properties, then run it again; nothing is lost",
        )


def _property(commit: EpochAppend) -> str:
    return f"{JOB}.{commit.writer}"
