"""Which of the files that epochs list exist. This module writes nothing."""

from __future__ import annotations

from collections.abc import Iterable

from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore


def stored_sizes(store: ObjectStore, paths: Iterable[StatePath]) -> dict[StatePath, int]:
    """Return the sizes in bytes of the files that exist, with one listing per directory."""
    unique = set(paths)
    parents = sorted({parent for path in unique if (parent := path.parent) is not None})
    listings = concurrently(store.list_dir, parents)
    return {
        info.path: info.size_bytes
        for listing in listings
        for info in listing.objects
        if info.path in unique
    }
