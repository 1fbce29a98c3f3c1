"""An Iceberg table as the sink of a pipeline, through the package pyiceberg."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from arroyo_dagster.errors import NotFoundError
from arroyo_dagster.state.runtime.iceberg_table import IcebergLakeTable
from arroyo_dagster.state.runtime.lake_table import OpenTable
from arroyo_dagster.state.runtime.table_sink import TableSink


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
        lake = IcebergLakeTable(table, catalog)
        found = lake.open() or _no_table(table)
        super().__init__(lake, found.files_url, options)
        self.partitioned_by = tuple(found.partitioned_by)

    def check(self, rows: pa.Schema) -> None:
        """Refuse a table that the rows do not fit into.

        Raises:
            InputError: it has other columns, or partitions.
        """
        table = self._lake.open() or _no_table(self.table)
        self.check_table(table, rows, pending=False)

    def created(self, rows: pa.Schema) -> OpenTable:
        """Refuse to create a table; see `TableSink.created`."""
        return _no_table(self.table)


def _no_table(name: str) -> OpenTable:
    raise NotFoundError(
        "the catalog has no such table",
        table=name,
        next_step="create the table; the sink does not",
    )
