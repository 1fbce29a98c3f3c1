"""A table of a table format: data files first, then one commit that lists them, with a token.

No reader sees a data file before the table's metadata lists it. Together with the files a commit
writes a token: who wrote them, the epoch, and when it was finished. A repeated commit finds it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

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
class CommitToken:
    """What a table keeps of the newest commit of a writer.

    Attributes:
        writer: who writes.
        finished_at_micros: when the epoch was finished: tells apart what was written as the same
            epoch.
    """

    writer: str
    epoch: int
    finished_at_micros: int


class OvertakenError(Exception):
    """Another writer committed to a table first; its cause is the library's error."""


class OpenTable(ABC):
    """A table as its metadata describes it at one moment.

    Attributes:
        files_url: where data files are written.
        columns: as the library has them.
        partitioned_by: the partition columns; with a transform of the format as `day(at)`.
        properties: the table's own settings.
    """

    files_url: str
    columns: pa.Schema
    partitioned_by: Sequence[str]
    properties: Mapping[str, str]

    @abstractmethod
    def check_writable(self) -> None:
        """Refuse a table with settings that cannot be obeyed here.

        Raises:
            InputError: it has some.
        """

    @abstractmethod
    def token(self, writer: str) -> CommitToken | None:
        """Return the token of a writer's newest commit; None = it never wrote to the table."""

    @abstractmethod
    def partition_files(self, column: str, value: int) -> tuple[int, int, int]:
        """Return the number of files, rows and bytes whose partition column has a value."""

    @abstractmethod
    def append(
        self,
        files: Sequence[AddedFile],
        token: CommitToken,
        epoch: int,
        added_columns: Sequence[pa.Field] = (),
    ) -> None:
        """Add files and a token in one commit.

        Args:
            epoch: of the files, for the history of the table.
            added_columns: new columns of the table, nullable. Formats whose transactions cannot add
                columns add them in a commit before.

        Raises:
            OvertakenError: another writer has committed in between.
            StorageError: the library could not write the table.
        """


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
