"""Where a subtask stands: the epoch that its tables are of, and the files that it knows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from arroyo_dagster.state.model.checkpoints import OperatorCheckpoint
from arroyo_dagster.state.model.ids import Epoch, StatePath, TableName
from arroyo_dagster.state.model.tables import TableFiles


@dataclass(slots=True, kw_only=True)
class LoadedState:
    """What the tables of one subtask were loaded from, and what has become of it.

    Attributes:
        epoch: the epoch that the tables are of.
        followed: the last epoch of the job that they have come to: `epoch`, or the one before while
            it is not published.
        restored: the operator at that epoch; None if it started empty.
        watermark_micros: the event time reached at `epoch`; None = not all subtasks had one.
        read_files: of each table the files whose rows are, or were, in memory.
        merged: of each table those of them of which a merge was announced.
    """

    epoch: Epoch
    followed: Epoch
    restored: OperatorCheckpoint | None
    watermark_micros: int | None
    read_files: dict[TableName, set[StatePath]]
    merged: dict[TableName, set[StatePath]]

    @classmethod
    def of(
        cls,
        restored: OperatorCheckpoint | None,
        base_epoch: Epoch | None,
        tables: Iterable[TableName],
    ) -> LoadedState:
        """The state of a subtask that has read nothing yet; arguments as of `TableManager`."""
        names = list(tables)
        epoch = restored.epoch if restored else Epoch(base_epoch or 0)
        return cls(
            epoch=epoch,
            followed=epoch,
            restored=restored,
            watermark_micros=restored.min_watermark_micros if restored else None,
            read_files={name: set() for name in names},
            merged={name: set() for name in names},
        )

    def files(self, name: TableName) -> TableFiles | None:
        """The files that the restored epoch lists of a table."""
        return self.restored.tables.get(name) if self.restored else None
