"""Export a table, or its changes: one epoch, or epoch after epoch, each exactly once."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from arroyo_dagster.errors import ConflictError
from arroyo_dagster.state.model.ids import Epoch
from arroyo_dagster.state.operations.export.targets import (
    ExportedEpoch,
    ExportTarget,
    ExportUnit,
    check_names,
)
from arroyo_dagster.state.operations.query.diff import CHANGE, TableDiff, diff_epochs
from arroyo_dagster.state.operations.query.state import StateEpoch, StateJob
from arroyo_dagster.state.operations.query.table import EpochTable


def export_epochs(
    job: StateJob,
    operator: str,
    table: str,
    target: ExportTarget,
    epochs: Iterable[Epoch],
) -> Iterator[ExportedEpoch]:
    """Export a table at some epochs, in this order; yield each as it is complete.

    Raises:
        NotFoundError: an epoch is not there any more, or has no such table.
        ConflictError: the target has one of the epochs of another table.
        FormatError, StorageError: as reading and writing.
    """
    for number in epochs:
        epoch = job.epoch(number)
        unit = unit_of(epoch, operator, table)
        exported = target.exported(unit)
        if exported is None:
            epoch_table = epoch.table(operator, table)
            exported = target.write(unit, _all_rows(epoch_table), epoch_table.schema)
        yield exported


def unit_of(epoch: StateEpoch, operator: str, table: str, *, changes: bool = False) -> ExportUnit:
    """Return what an epoch of a table, or its changes, is called in targets."""
    return ExportUnit(
        source=f"{epoch.job.name} {operator} {table}{' changes' if changes else ''}",
        epoch=epoch.number,
        finished_at_micros=epoch.checkpoint.finish_time_micros,
    )


def _all_rows(table: EpochTable) -> Iterator[pa.Table]:
    for split in table.splits(1):
        yield from table.read(split)


def export_changes(
    job: StateJob,
    operator: str,
    table: str,
    target: ExportTarget,
    first: Epoch,
    last: Epoch | None = None,
) -> Iterator[ExportedEpoch]:
    """Export what changed from each visible epoch to the next, as `change_feed` yields it.

    The rows of an epoch have the additional column `_change`; see `Change`. Errors as of
    `change_feed` and `export_epochs`, and:

    Raises:
        ConflictError: the target ends at another epoch than the changes begin at: some would be
            missing.
    """
    newest: Epoch | None = None
    for before, number in _pairs(job, first, last):
        unit = unit_of(job.epoch(number), operator, table, changes=True)
        exported = target.exported(unit)
        if exported is None:
            newest = newest or target.newest(unit.source)
            changes = _changes(job, operator, table, before, number).diff.changes
            check_names(
                pa.schema(list(changes.schema)[:-1]),
                CHANGE,
                unit.source,
                "export the table itself, without --changes",
            )
            # An earlier epoch without changes has left nothing by which it is found.
            empty = newest is not None and number <= newest and not changes.num_rows
            if newest not in (None, before) and not empty:
                raise _gap(unit.source, before, number, newest)
            exported = target.write(unit, [changes], changes.schema)
            newest = number if newest is None else max(newest, number)
        yield exported


def _gap(source: str, before: Epoch, epoch: Epoch, newest: Epoch | None) -> ConflictError:
    return ConflictError(
        f"the changes from epoch {before} to {epoch} do not follow those of the target, which end "
        f"at epoch {newest}",
        source=source,
        next_step=f"if epoch {newest} was collected, the changes up to epoch {before} are lost: "
        "export to another target, and more often or with more epochs kept",
    )


# ---- changes -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochChanges:
    """The changes of a table from one visible epoch to the next."""

    before: Epoch
    epoch: Epoch
    diff: TableDiff


def change_feed(
    job: StateJob, operator: str, table: str, first: Epoch, last: Epoch | None = None
) -> Iterator[EpochChanges]:
    """Yield what changed in a table from each visible epoch to the next.

    Args:
        first: the epoch before the first changes.
        last: the epoch of the last ones; None = the newest visible one.

    Raises:
        NotFoundError: no such epoch or table; or an epoch was collected meanwhile.
        InputError: the columns of the table changed in between.
    """
    for before, epoch in _pairs(job, first, last):
        yield _changes(job, operator, table, before, epoch)


def _pairs(job: StateJob, first: Epoch, last: Epoch | None) -> Iterator[tuple[Epoch, Epoch]]:
    job.epoch(first)  # raises if it is not there
    epochs = [epoch for epoch in job.epochs() if epoch >= first and (last is None or epoch <= last)]
    yield from itertools.pairwise(epochs)


def _changes(job: StateJob, operator: str, table: str, before: Epoch, epoch: Epoch) -> EpochChanges:
    (diff,) = diff_epochs(job.epoch(before), job.epoch(epoch), operator, table)
    return EpochChanges(before=before, epoch=epoch, diff=diff)
