"""A Delta table as the sink of a pipeline, through the package deltalake."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.runtime.delta_table import DeltaLakeTable
from arroyo_dagster.state.runtime.lake_table import PartitionKey
from arroyo_dagster.state.runtime.table_sink import TableSink

_PARTITION_TYPES = (
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_integer,
    pa.types.is_boolean,
    pa.types.is_date,
)


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
        super().__init__(DeltaLakeTable(url, options), url, options)
        self.partitioned_by = tuple(PartitionKey(column) for column in partition_by)

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
        self._lake.check_names(rows.names)
        table = self._lake.open()
        if table is not None:
            self.check_table(table, rows, pending=False)

    def file_rows(self, rows: pa.Table) -> tuple[pa.Table, dict[str, str | None]]:
        """Return the rows of a file without partition columns, and the values of those."""
        names = [key.column for key in self.partitioned_by]
        values = {name: _partition_text(rows.column(name)[0].as_py(), name) for name in names}
        return rows.drop_columns(names), values


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
