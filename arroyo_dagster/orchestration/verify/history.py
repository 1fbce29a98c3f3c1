"""The figures of epochs that the sensor reported, for what the store no longer has."""

import json
from collections.abc import Sequence
from typing import Any

import dagster as dg

from arroyo_dagster.state.model.health import EpochFigures, TableFigures

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

TABLES = "arroyo/tables"
"""Metadata: operator, table, files, bytes and rows of each table, as JSON."""


def tables_metadata(figures: EpochFigures) -> str:
    """Return the figures of the tables of an epoch as metadata."""
    return json.dumps(
        [[t.operator, t.table, t.files, t.size_bytes, t.rows] for t in figures.tables],
        separators=(",", ":"),
    )


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
        tables = event.metadata.get(TABLES)
        rows = json.loads(str(tables.value)) if tables is not None else ()
        figures.append(EpochFigures(**values, tables=tuple(_table(*row) for row in rows)))
    return figures


def _table(
    operator: str, table: str, files: int, size_bytes: int, rows: int | None
) -> TableFigures:
    return TableFigures(
        operator=operator, table=table, files=files, size_bytes=size_bytes, rows=rows
    )
