"""The epoch from which a subtask's tables were loaded, and the files that it has read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from arroyo_dagster.state.model.checkpoints import OperatorCheckpoint
from arroyo_dagster.state.model.ids import Epoch, StatePath, TableName
from arroyo_dagster.state.model.tables import TableFiles


@dataclass(slots=True, kw_only=True)
class LoadedState:
    """The origin of the tables of one subtask, and what has changed since.

    Attributes:
        epoch: the epoch of the tables.
        followed: the last published epoch that the tables have reached: `epoch`, or the one before
            while `epoch` is not published.
        restored: the operator at that epoch; None if it started empty.
        watermark_micros: the event time reached at `epoch`; None = not all subtasks had one.
        read_files: by table, the files whose rows are, or were, in memory.
        merged: by table, those of them whose merge was announced.
        clock_micros: the engine's clock at the epoch being written; 0 = not known yet.
    """

    epoch: Epoch
    followed: Epoch
    restored: OperatorCheckpoint | None
    watermark_micros: int | None
    read_files: dict[TableName, set[StatePath]]
    merged: dict[TableName, set[StatePath]]
    clock_micros: int = 0

    @classmethod
    def of(
        cls,
        restored: OperatorCheckpoint | None,
        base_epoch: Epoch | None,
        tables: Iterable[TableName],
    ) -> LoadedState:
        """Return the state of a subtask before its first read; arguments as of `TableManager`."""
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
        """Return the files that the restored epoch lists for a table; None if it lists none."""
        return self.restored.tables.get(name) if self.restored else None
