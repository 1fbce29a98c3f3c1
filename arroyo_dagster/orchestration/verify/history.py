"""The figures of epochs that the sensor reported, for what the store no longer has."""

from collections.abc import Sequence
from typing import Any

import dagster as dg

from arroyo_dagster.state.model.health import EpochFigures

REPORTED = 200
"""So many of the newest materializations are read."""

FIGURES = {
    "epoch": "arroyo/epoch",
    "worker_generation": "arroyo/generation",
    "finished_micros": "arroyo/finished_micros",
    "started_micros": "arroyo/started_micros",
    "watermark_micros": "arroyo/watermark_micros",
    "files": "arroyo/files",
    "size_bytes": "arroyo/bytes",
    "rows": "arroyo/rows",
    "new_files": "arroyo/new_files",
    "new_size_bytes": "arroyo/new_bytes",
}
"""The fields of an epoch's figures, and their metadata in the events of the sensor."""


def reported_epochs(instance: dg.DagsterInstance, key: dg.AssetKey) -> Sequence[EpochFigures]:
    """Return the figures of the epochs that were reported last, oldest first."""
    records = instance.fetch_materializations(key, limit=REPORTED).records
    figures = []
    for record in reversed(records):
        event = record.asset_materialization
        if event is None or FIGURES["epoch"] not in event.metadata:
            continue
        values: dict[str, Any] = {
            field: event.metadata[name].value
            for field, name in FIGURES.items()
            if name in event.metadata
        }
        figures.append(EpochFigures(**values))
    return figures
