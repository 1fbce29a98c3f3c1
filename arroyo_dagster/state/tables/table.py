"""The interface common to both kinds of table, and the identity of the subtask that holds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from arroyo_dagster.state.model.checkpoints import TableReport
from arroyo_dagster.state.model.ids import Epoch, JobId, OperatorId, PipelineId, StatePath
from arroyo_dagster.state.model.keys import KeyRange, range_for_server
from arroyo_dagster.state.model.tables import TimeFile
from arroyo_dagster.state.tables.messages import TableData


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochFiles:
    """The files that one subtask writes for one table in one epoch.

    Attributes:
        keys: the routing keys that the subtask owns.
        name_file: returns a new unique path; its argument is the suffix of the name.
    """

    epoch: Epoch
    keys: KeyRange
    name_file: Callable[[str], StatePath]


class Checkpointer(Protocol):
    """Collects the changes of a table between two barriers, then writes them."""

    def apply(self, data: TableData) -> None:
        """Keep a change until the barrier.

        Raises:
            InputError: this kind of table does not support the change.
        """

    def prepare(self, watermark_micros: int | None) -> None:
        """Serialise. Every refusal happens here, before any table writes an object.

        Raises:
            InputError: rows that cannot be stored.
        """

    def finish(
        self, watermark_micros: int | None, listed: Sequence[TimeFile]
    ) -> tuple[TableReport | None, int]:
        """Write the changes; a repeated call writes the same again.

        Args:
            listed: the files of an expiring table that the subtask listed in the previous epoch.

        Returns:
            The report (None = the table is empty), and the bytes written.
        """


class Table(Protocol):
    """The stored side of a table: opens a checkpointer for each epoch."""

    def checkpoint(self, files: EpochFiles) -> Checkpointer:
        """Open a checkpointer for the changes until the barrier of `files.epoch`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskInfo:
    """The identity of a subtask: its job, its operator and its index.

    Source: crates/arroyo-types/src/lib.rs, `TaskInfo`.
    """

    pipeline: PipelineId | None
    job: JobId
    operator: OperatorId
    task_index: int
    parallelism: int

    @property
    def key_range(self) -> KeyRange:
        """The routing keys that this subtask owns, both ends inclusive."""
        return range_for_server(self.task_index, self.parallelism)
