"""A table of a table format: data files first, then one commit that lists them, with a token.

No reader sees a data file before the table's metadata lists it. Together with the files a commit
writes a token: who wrote them, the epoch, and a second number. A repeated commit finds the token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.state.codec.common_types import TypeOptions
from arroyo_dagster.state.model.ids import StatePath

COMMIT_ATTEMPTS = 8
"""How often a commit is tried while other writers commit to the table."""

TABLE_TYPES = TypeOptions(durations="long")
"""The types of table formats."""


@dataclass(frozen=True, slots=True)
class AddedFile:
    """A data file of a table.

    Attributes:
        path: relative to the table's `files_url`.
        partition: the values of the table's partition columns, if the file does not hold them.
    """

    path: StatePath
    size_bytes: int
    rows: int
    partition: Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class PartitionKey:
    """A column by which a table is partitioned.

    Attributes:
        unit: `year`, `month`, `day` or `hour`, to which its times are rounded down; None = the
            values as they are.
    """

    column: str
    unit: str | None = None

    def of(self, rows: pa.Table) -> pa.ChunkedArray:
        """Return the key of each row."""
        values = rows.column(self.column)
        return values if self.unit is None else pc.floor_temporal(values, unit=self.unit)


@dataclass(frozen=True, slots=True)
class CommitToken:
    """What a table keeps of the newest commit of a writer.

    Attributes:
        writer: who writes, such as `pipeline/job/operator`.
        mark: tells apart what was written as the same epoch; its meaning is the writer's.
        mark_name: what the mark is called in the table.
    """

    writer: str
    epoch: int
    mark: int
    mark_name: str


class OvertakenError(Exception):
    """Another writer committed to a table first; its cause is the library's error."""


class OpenTable(ABC):
    """A table as its metadata describes it at one moment.

    Attributes:
        files_url: where data files are written.
        columns: as the library has them.
        partitioned_by: the partition columns.
        properties: the table's own settings.
    """

    files_url: str
    columns: pa.Schema
    partitioned_by: Sequence[PartitionKey]
    properties: Mapping[str, str]

    @abstractmethod
    def check_writable(self) -> None:
        """Refuse a table with settings that cannot be obeyed here.

        Raises:
            InputError: it has some.
        """

    @abstractmethod
    def token(self, writer: str, mark_name: str) -> CommitToken | None:
        """Return the token of a writer's newest commit; None = it never wrote to the table."""

    @abstractmethod
    def partition_files(self, column: str, value: int) -> tuple[int, int, int]:
        """Return the number of files, rows and bytes whose partition column has a value."""

    def append(
        self,
        files: Sequence[AddedFile],
        token: CommitToken,
        *,
        epoch: int | None = None,
        added_columns: Sequence[pa.Field] = (),
    ) -> None:
        """Add files and a token in one commit.

        Args:
            epoch: of the files, for the history of the table; None = the token's.
            added_columns: new columns of the table, nullable. Formats whose transactions cannot add
                columns add them in a commit before.

        Raises:
            OvertakenError: another writer has committed in between.
            StorageError: the library could not write the table.
        """
        self._commit(files, token, token.epoch if epoch is None else epoch, added_columns)

    @abstractmethod
    def _commit(
        self,
        files: Sequence[AddedFile],
        token: CommitToken,
        epoch: int,
        added_columns: Sequence[pa.Field],
    ) -> None:
        """Commit for `append`; errors as there."""


class LakeTable(ABC):
    """Where a table is, and how it is opened; it can be sent to other processes.

    Attributes:
        name: what messages call the table.
    """

    name: str

    def check_names(self, names: Sequence[str]) -> None:  # noqa: B027, most formats have any
        """Refuse names of columns that the format cannot tell apart.

        Raises:
            InputError: there are such names.
        """

    @abstractmethod
    def open(self) -> OpenTable | None:
        """Read the table's metadata; None = it does not exist.

        Raises:
            InputError: it is of a kind that cannot be written.
            StorageError: the library could not read it.
        """

    @abstractmethod
    def create(
        self, columns: pa.Schema, partition_by: Sequence[str], properties: Mapping[str, str]
    ) -> OpenTable:
        """Create the table, unless another writer has just done so; errors as `open`."""
