"""The backlog of the expiry of a job's old epochs by their number."""

from __future__ import annotations

from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.storage.store import ObjectStore


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
