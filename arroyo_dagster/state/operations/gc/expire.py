"""Expiry of a job's old epochs by their number: the request, and the backlog."""

from __future__ import annotations

from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.model.garbage import PlanKind, Retention
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.operations.gc.plan import GcRequest
from arroyo_dagster.state.storage.store import ObjectStore


def to_keep(keep_epochs: int) -> GcRequest:
    """Return the request of an expiry that keeps this many of the newest epochs.

    Raises:
        InputError: none is to be kept.
    """
    return GcRequest(kind=PlanKind.EXPIRE, retention=Retention(keep_epochs=keep_epochs))


def expiry_backlog(store: ObjectStore, paths: JobPaths, keep_epochs: int) -> int:
    """Return how many unpinned epochs are older than the newest `keep_epochs`; Arroyo jobs: 0."""
    backend = ParquetBackend(store, paths)
    epochs = backend.epochs()
    if len(epochs) <= keep_epochs:
        return 0
    newest = backend.load_checkpoint_metadata(epochs[-1])
    if newest.progress is None:
        return 0
    pinned = backend.job_pins().pinned
    return sum(epoch not in pinned for epoch in epochs[: len(epochs) - keep_epochs])
