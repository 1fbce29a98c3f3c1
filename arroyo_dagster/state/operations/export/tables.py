"""Tables that are exported again and again: open the target, find what is due, export it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.codec.common_types import TypeOptions
from arroyo_dagster.state.operations.export.epochs import export_changes, export_epochs, unit_of
from arroyo_dagster.state.operations.export.lake import DeltaTarget, IcebergTarget
from arroyo_dagster.state.operations.export.parquet import ParquetTarget
from arroyo_dagster.state.operations.export.targets import ExportedEpoch, ExportTarget
from arroyo_dagster.state.operations.query.state import StateJob
from arroyo_dagster.state.planning.exports import CHANGES, EVERY, TableExport, TargetOptions
from arroyo_dagster.state.runtime.lake_table import TABLE_TYPES
from arroyo_dagster.state.storage.remote.open import open_store


def open_target(target: str, to: TargetOptions, state_url: str) -> ExportTarget:
    """Open the target of an export; nothing is written yet.

    Args:
        target: a folder, a URL, or `namespace.table` of Iceberg.
        state_url: the checkpoint URL, which is refused as a target.

    Raises:
        InputError: not a target, or the checkpoint URL; or a package is not installed.
    """
    if to.format == "iceberg":
        return IcebergTarget(
            table=target,
            catalog=to.catalog,
            options=to.options,
            types=_types(to, TABLE_TYPES),
            epoch_column=to.epoch_column,
        )
    url = target if "://" in target else f"file://{Path(target).absolute()}"
    store = open_store(url, options=to.options)
    if store.url.rstrip("/") == state_url.rstrip("/"):
        raise InputError(
            "the target is the checkpoint URL itself",
            target=target,
            next_step="export to another folder",
        )
    if to.format == "delta":
        types = _types(to, TABLE_TYPES)
        return DeltaTarget(url=url, options=to.options, types=types, epoch_column=to.epoch_column)
    plain = to.nanos is None and to.unsigned is None
    return ParquetTarget(store=store, types=None if plain else _types(to, TypeOptions()))


def _types(to: TargetOptions, types: TypeOptions) -> TypeOptions:
    return replace(types, nanos=to.nanos or types.nanos, unsigned=to.unsigned or types.unsigned)


def run_export(export: TableExport, job: StateJob) -> Iterator[ExportedEpoch]:
    """Export what a job has of a table and the target has not; yield each epoch as it is complete.

    Raises:
        NotFoundError: the job has no such operator or table, or an epoch was collected meanwhile.
        InputError, ConflictError, StorageError: as of the target.
    """
    target = _target(export, job)
    numbers = job.epochs()
    if export.epochs == CHANGES:
        if numbers:
            yield from export_changes(job, export.operator, export.table, target, numbers[0])
        return
    epochs = numbers if export.epochs == EVERY else numbers[-1:]
    yield from export_epochs(job, export.operator, export.table, target, epochs)


def export_is_due(export: TableExport, job: StateJob) -> bool:
    """Return whether the target lacks the newest epoch of a job; errors as of `run_export`."""
    numbers = job.epochs()
    if not numbers or (export.epochs == CHANGES and len(numbers) < 2):
        return False
    changes = export.epochs == CHANGES
    unit = unit_of(job.epoch(numbers[-1]), export.operator, export.table, changes=changes)
    return _target(export, job).exported(unit) is None


def _target(export: TableExport, job: StateJob) -> ExportTarget:
    return open_target(export.target_of(job.paths), export.to, job.catalog.store.url)
