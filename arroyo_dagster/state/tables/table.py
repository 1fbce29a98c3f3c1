"""What the two kinds of table have in common, and who the subtask is that holds them."""

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
    """Where one subtask's files of one table go in one epoch.

    Attributes:
        keys: the routing keys that the subtask owns.
        name_file: gives a fresh unique path; its argument ends the name.
    """

    epoch: Epoch
    keys: KeyRange
    name_file: Callable[[str], StatePath]


class Checkpointer(Protocol):
    """Collects what changes in a table between two barriers, then writes it."""

    def apply(self, data: TableData) -> None:
        """Remember a change until the barrier.

        Raises:
            InputError: a change that this kind of table does not know.
        """

    def prepare(self, watermark_micros: int | None) -> None:
        """Serialise. Whatever can be refused is refused here, before any table writes an object.

        Raises:
            InputError: rows that cannot be kept.
        """

    def finish(
        self, watermark_micros: int | None, listed: Sequence[TimeFile]
    ) -> tuple[TableReport | None, int]:
        """Write what changed; the same again if it is called again.

        Args:
            listed: the files of an expiring table that the subtask listed in the epoch before.

        Returns:
            What to report (None = the table has nothing), and the bytes written.
        """


class Table(Protocol):
    """The stored side of a table: opens a checkpointer for each epoch."""

    def checkpoint(self, files: EpochFiles) -> Checkpointer:
        """Open a checkpointer for what changes until the barrier of `files.epoch`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskInfo:
    """Which subtask of which operator of which job.

    Source: crates/arroyo-types/src/lib.rs, `TaskInfo`.
    """

    pipeline: PipelineId | None
    job: JobId
    operator: OperatorId
    task_index: int
    parallelism: int

    @property
    def key_range(self) -> KeyRange:
        """The routing keys this subtask owns, both ends included."""
        return range_for_server(self.task_index, self.parallelism)
