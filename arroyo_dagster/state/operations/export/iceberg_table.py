"""Tables of Iceberg, through the package pyiceberg."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import pyarrow as pa

from arroyo_dagster.errors import ArroyoStateError, InputError, StorageError
from arroyo_dagster.optional_packages import explained_imports
from arroyo_dagster.redaction import redact_text, register_settings, replaced
from arroyo_dagster.state.operations.export.lake_table import (
    AddedFile,
    CommitToken,
    LakeTable,
    OpenTable,
    OvertakenError,
)

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table

JOB, EPOCH = "arroyo.job", "arroyo.epoch"
"""Properties of the summary of each snapshot, with `arroyo.finished`."""
_FINISHED = "finished"


class IcebergLakeTable(LakeTable):
    """An Iceberg table of a catalog; needs `arroyo-dagster[iceberg]`.

    Args:
        name: `namespace.table`.
        catalog: the properties of pyiceberg's catalog, such as `type`, `uri` and `name`.
    """

    def __init__(self, name: str, catalog: Mapping[str, str]) -> None:
        self.name = name
        self._catalog = dict(catalog)
        register_settings(self._catalog)

    def open(self) -> OpenIcebergTable | None:
        """Read the table's metadata; see `LakeTable.open`."""
        catalog = self._load()
        from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

        with _failures(self.name):
            try:
                table = catalog.load_table(self.name)
            except (NoSuchTableError, NoSuchNamespaceError):
                return None
        return OpenIcebergTable(self.name, table)

    def create(
        self, columns: pa.Schema, partition_by: Sequence[str], properties: Mapping[str, str]
    ) -> OpenIcebergTable:
        """Create the table and its namespace, unless another writer has just done so."""
        catalog = self._load()
        from pyiceberg.exceptions import CommitFailedException, TableAlreadyExistsError

        # Where another writer was faster, the caller checks what it has created.
        overtaken = contextlib.suppress(TableAlreadyExistsError, CommitFailedException)
        with _failures(self.name), overtaken:
            catalog.create_namespace_if_not_exists(catalog.namespace_from(self.name))
            with (
                catalog.create_table_transaction(
                    self.name, columns, properties=dict(properties)
                ) as transaction,
                transaction.update_spec() as spec,
            ):
                for column in partition_by:
                    spec.add_identity(column)
        table = self.open()
        if table is None:
            raise StorageError(
                "the catalog does not list the table that was just created",
                table=self.name,
                retryable=True,
                next_step="check the catalog and its properties, then run it again",
            )
        return table

    def _load(self) -> Catalog:
        with explained_imports():
            import pyiceberg  # noqa: F401
            from pyiceberg.catalog import load_catalog
        with _failures(self.name):
            return load_catalog(**self._catalog)


class OpenIcebergTable(OpenTable):
    """An Iceberg table at one version of its metadata."""

    def __init__(self, name: str, table: Table) -> None:
        self._name = name
        self._table = table
        self.files_url = f"{table.location().rstrip('/')}/data"
        self.columns = table.schema().as_arrow()
        self.partitioned_by = tuple(self._partitions())
        self.properties = table.properties

    def _partitions(self) -> Iterator[str]:
        for field in self._table.spec().fields:
            column = self._table.schema().find_column_name(field.source_id)
            transform = str(field.transform)
            yield str(column) if transform == "identity" else f"{transform}({column})"

    def check_writable(self) -> None:
        """Refuse nothing."""

    def token(self, writer: str) -> CommitToken | None:
        """Return the token: a property of the table, which outlives snapshots."""
        token = json.loads(self._table.properties.get(_property(writer), "{}"))
        if "epoch" not in token:
            return None
        return CommitToken(writer, token["epoch"], token[_FINISHED])

    def partition_files(self, column: str, value: int) -> tuple[int, int, int]:
        """Return files, rows and bytes of a partition, by the manifests."""
        with _failures(self._name):
            tasks = list(self._table.scan(row_filter=f'"{column}" = {value}').plan_files())
        files = [task.file for task in tasks]
        return (
            len(files),
            sum(file.record_count for file in files),
            sum(file.file_size_in_bytes for file in files),
        )

    def append(
        self,
        files: Sequence[AddedFile],
        token: CommitToken,
        epoch: int,
        added_columns: Sequence[pa.Field] = (),
    ) -> None:
        """Add columns, files and the token in one transaction."""
        from pyiceberg.exceptions import CommitFailedException

        with _failures(self._name):
            try:
                return self._append(files, token, epoch, added_columns)
            except CommitFailedException as error:
                overtaken = error
        raise OvertakenError from overtaken

    def _append(
        self,
        files: Sequence[AddedFile],
        token: CommitToken,
        epoch: int,
        added_columns: Sequence[pa.Field],
    ) -> None:
        summary = {
            JOB: token.writer,
            EPOCH: str(epoch),
            f"arroyo.{_FINISHED}": str(token.finished_at_micros),
        }
        text = json.dumps({"epoch": token.epoch, _FINISHED: token.finished_at_micros})
        # For this copy of the metadata only: pyiceberg would repeat a commit that another one has
        # overtaken, without another look at the token.
        self._table.properties["commit.retry.num-retries"] = "0"
        with self._table.transaction() as transaction:
            if added_columns:
                with transaction.update_schema() as update:
                    update.union_by_name(pa.schema(added_columns))
            if files:
                transaction.add_files(
                    [f"{self.files_url}/{file.path}" for file in files],
                    snapshot_properties=summary,
                    check_duplicate_files=False,  # it reads every manifest; the token says it
                )
            transaction.set_properties({_property(token.writer): text})


def _property(writer: str) -> str:
    return f"{JOB}.{writer}"


def _failures(name: str) -> AbstractContextManager[None]:
    """Replace the errors of pyiceberg, and of what it is built on."""
    from pyiceberg.exceptions import NotInstalledError

    def replacement(error: Exception) -> ArroyoStateError:
        if isinstance(error, NotInstalledError):
            return InputError(f"this catalog needs another package ({error})", table=name)
        return StorageError(
            f"pyiceberg failed ({type(error).__name__}: {redact_text(str(error)).splitlines()[0]})",
            table=name,
            retryable=True,
            next_step="check the catalog and its properties, then run it again; nothing is lost",
        )

    return replaced(Exception, replacement)
