"""What one call exports, and what is known of it afterwards; the same for every target."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow as pa

from arroyo_dagster.errors import ConflictError, InputError
from arroyo_dagster.state.model.ids import Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportUnit:
    """One epoch of one source.

    Attributes:
        source: what is exported: job, operator and table.
        finished_at_micros: of the epoch, by the writer's clock. It tells the epoch from one of the
            same number that another run of a job of this name wrote.
    """

    source: str
    epoch: Epoch
    finished_at_micros: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedEpoch:
    """The export of one epoch.

    Attributes:
        files, rows, size_bytes: what it has.
        new: whether it was written now; else an earlier call had.
    """

    epoch: Epoch
    files: int
    rows: int
    size_bytes: int
    new: bool


class ExportTarget(ABC):
    """Takes exported epochs, each exactly once."""

    @abstractmethod
    def exported(self, unit: ExportUnit) -> ExportedEpoch | None:
        """Return the export of an epoch; None = there is none, or it is not complete.

        Raises:
            ConflictError: the target has this epoch of another source, or of another state of the
                job.
            StorageError: the target could not be read.
        """

    @abstractmethod
    def newest(self, source: str) -> Epoch | None:
        """Return the newest epoch of a source that the target has; None = it has none.

        Raises:
            StorageError: the target could not be read.
        """

    @abstractmethod
    def write(self, unit: ExportUnit, rows: Iterable[pa.Table], schema: pa.Schema) -> ExportedEpoch:
        """Write the rows of an epoch that is not exported.

        Raises:
            InputError: a value has no form there, or the columns do not fit.
            ConflictError, StorageError: as `exported`.
        """


def check_names(columns: pa.Schema, reserved: str, target: str, next_step: str) -> None:
    """Refuse rows with a column of a name that the export itself writes.

    Readers take `Epoch` for `epoch`: names are compared without regard to case.

    Raises:
        InputError: there is such a column.
    """
    taken = [name for name in columns.names if name.casefold() == reserved.casefold()]
    if taken:
        raise InputError(
            f"the rows have a column {taken[0]!r} already, and the export adds {reserved!r}",
            target=target,
            next_step=next_step,
        )


def other_source(target: str, unit: ExportUnit, found: str) -> ConflictError:
    """Return the error of a target that has another table."""
    return ConflictError(
        f"the target has epochs of {found}",
        target=target,
        source=unit.source,
        next_step="export each table to a target of its own",
    )


def other_state(target: str, unit: ExportUnit) -> ConflictError:
    """Return the error of a target that has the epoch as another run of the job wrote it."""
    return ConflictError(
        f"the target has epoch {unit.epoch} of another state of the job: the job was started anew, "
        "or restored",
        target=target,
        source=unit.source,
        epoch=unit.epoch,
        next_step="export to another target; this one stays as it is",
    )
