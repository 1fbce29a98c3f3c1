"""Runs of maintenance in the journal of one job, written without a collection."""

from __future__ import annotations

from typing import Any

from arroyo_dagster.state import ObjectStore
from arroyo_dagster.state.operations.gc.journal import Journal, RunHeader
from tests.fleets import protocol_job

PATHS = protocol_job("p")
BEGAN = 1_700_000_000_000_000


def begin_run(store: ObjectStore, number: int, *, batches: int = 2, **header: Any) -> Journal:
    """Begin the run of a number, of so many batches; `header` overrides its facts."""
    facts: dict[str, Any] = {
        "kind": "expire",
        "plan": f"{number:032x}"[::-1],
        "owner": f"run {number}",
        "begun_at_micros": BEGAN + number,
        "objects": 2 * batches,
        "size_bytes": batches,
    }
    return Journal.begin(store, PATHS, RunHeader(**facts | header))
