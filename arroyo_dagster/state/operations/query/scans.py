"""What a scan of a table is asked for, and the columns that raw scans add.

The restored view has the rows that a restore at the epoch loads, over all subtasks: the retention
and removals are applied, and of generational tables each key has its newest row. The raw view has
every stored row, with the file that holds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.keys import KeyRange
from arroyo_dagster.state.planning.restore.reads import ALL_KEYS
from arroyo_dagster.state.tables.comparisons import ColumnFilter
from arroyo_dagster.state.tables.key_index import KeySet

FILE, WRITTEN_EPOCH = "_file", "_epoch"
COMPACTION_GENERATION, STATE_VERSION = "_compaction_generation", "_state_version"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanRequest:
    """What a scan returns.

    Attributes:
        columns: indices in the schema of the scan.
        filters: rows that do not match all of them are left out.
        keys: rows with a routing key outside are left out, both ends inclusive; other than all keys
            only if the scan is divisible by key.
        files: only rows of these files; None = of all. Only if the scan is divisible by file.
        key_set: rows of other keys may be left out; None = all keys. Only if the scan is divisible
            by key set.
    """

    columns: tuple[int, ...]
    filters: tuple[ColumnFilter, ...] = ()
    keys: KeyRange = ALL_KEYS
    files: frozenset[StatePath] | None = None
    key_set: KeySet | None = None


class Scan(Protocol):
    """Reads the rows of one table at one epoch."""

    @property
    def schema(self) -> pa.Schema:
        """The columns; their names are unique, and dictionaries are replaced by their values."""

    @property
    def paths(self) -> tuple[StatePath, ...]:
        """The files that a complete scan reads, in replay order."""

    @property
    def divisible_by_file(self) -> bool:
        """Whether each file can be scanned on its own: its rows affect no rows of others."""

    @property
    def divisible_by_key(self) -> bool:
        """Whether each range of routing keys can be scanned on its own."""

    def rows(self, request: ScanRequest) -> Iterator[pa.Table]:
        """Yield the rows, in pieces of any size, in no order.

        Raises:
            FormatError: a file is broken.
            NotFoundError: a file does not exist.
        """


def value_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of a column's values: of a dictionary, that of its entries."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def conform(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return rows with the names and types of a schema: dictionaries become their values."""
    columns = [
        column if column.type.equals(field.type) else column.cast(field.type)
        for column, field in zip(rows.columns, schema, strict=True)
    ]
    return pa.Table.from_arrays(columns, schema=schema)
