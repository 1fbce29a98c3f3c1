"""Add the times at which a job's epochs were written, by the store's clock; ages depend on them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from arroyo_dagster.state.model.garbage import EpochRoot, Roots
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.layout import JobPaths, Layout
from arroyo_dagster.state.model.objects import StoredObject
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore


def with_store_times(
    store: ObjectStore, roots: Roots, listed: Iterable[StoredObject] | None = None
) -> Roots:
    """Return the same roots, each epoch with the time of the object that makes it exist.

    Objects that the listing does not contain are read by name: a listing may be incomplete.

    Args:
        listed: the objects of the job's metadata, as listed; None = list one level here, or nothing
            in the legacy layout, where each epoch has its own directory.
    """
    paths, head = roots.paths, roots.head
    names = {epoch.epoch: _existence(paths, epoch) for epoch in roots.epochs}
    of_head = {names[head.epoch], *(root.path for root in head.roots)}
    all_paths = {*names.values(), *of_head}
    times = _listed(store, paths, all_paths) if listed is None else _times(listed, all_paths)
    missing = [path for path in all_paths if path not in times]
    for path, info in zip(missing, concurrently(store.head, missing), strict=True):
        times[path] = None if info is None else info.modified_micros
    head_times = [times[path] for path in of_head]
    oldest = min((micros for micros in head_times if micros), default=None)
    epochs = [replace(epoch, written_at_micros=times[names[epoch.epoch]]) for epoch in roots.epochs]
    epochs[0] = replace(epochs[0], oldest_object_micros=oldest)
    return replace(roots, epochs=tuple(epochs))


def _existence(paths: JobPaths, one: EpochRoot) -> StatePath:
    """Return the object that makes an epoch exist, while it is present."""
    if paths.layout is Layout.LEGACY:
        return one.ref
    # Created once and never overwritten, unlike the manifest, which a rewrite replaces.
    record = paths.epoch_record(one.epoch)
    return one.ref if record in one.gone else record


def _listed(
    store: ObjectStore, paths: JobPaths, wanted: set[StatePath]
) -> dict[StatePath, int | None]:
    if paths.layout is Layout.LEGACY:
        return {}
    objects = store.list_dir(paths.epochs).objects
    return {info.path: info.modified_micros for info in objects if info.path in wanted}


def _times(listed: Iterable[StoredObject], wanted: set[StatePath]) -> dict[StatePath, int | None]:
    return {file.path: file.modified_micros for file in listed if file.path in wanted}
