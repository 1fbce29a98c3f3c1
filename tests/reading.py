"""Drive a source as a run does, and as one does that is killed."""

from __future__ import annotations

import json
from typing import Any

from arroyo_dagster.engine import Source
from tests.internals import Offset


def records(source: Source, start: Offset, end: Offset) -> list[dict[str, Any]]:
    """The records of one epoch, in the order the engine takes them."""
    batches = [batch for split in source.partitions(start, end) for batch in source.read(split)]
    for batch in batches:
        assert batch.schema.equals(source.schema)
    rows = [row for batch in batches for row in batch.to_pylist()]
    assert rows == sorted(rows, key=lambda row: (row["partition"], row["offset"]))
    return rows


def values(source: Source, start: Offset, end: Offset) -> list[bytes]:
    """The values of one epoch."""
    return [row["value"] for row in records(source, start, end)]


def stored(offset: Offset) -> Offset:
    """An offset as a checkpoint gives it back."""
    kept: Offset = json.loads(json.dumps(offset, sort_keys=True))
    return kept


def read_on(source: Source, offset: Offset) -> tuple[list[bytes], Offset]:
    """Read epoch after epoch until nothing is new."""
    found: list[bytes] = []
    while (end := source.latest_offset(offset)) != offset:
        end = stored(end)
        found += values(source, offset, end)
        offset = end
    return found, offset
