"""Runs of maintenance in the journal of one job, written without a collection."""

from __future__ import annotations

import gzip
import json
from typing import Any

from arroyo_dagster.state import ObjectStore
from arroyo_dagster.state.codec.journal import RunHeader
from arroyo_dagster.state.operations.gc.journal import Journal
from tests.fleets import protocol_job
from tests.formats import StoredObject

PATHS = protocol_job("p")
BEGAN = 1_700_000_000_000_000


def begin_run(store: ObjectStore, number: int, **header: Any) -> Journal:
    """Begin the run of a number; `header` overrides its facts."""
    facts: dict[str, Any] = {
        "kind": "expire",
        "plan": f"{number:032x}"[::-1],
        "owner": f"run {number}",
        "begun_at_micros": BEGAN + number,
        "objects": 2,
        "size_bytes": 1,
    }
    return Journal.begin(store, PATHS, RunHeader(**facts | header))


def write_run(store: ObjectStore, number: int) -> str:
    """Write a run that deleted two objects, and return its name."""
    run = begin_run(store, number)
    objects = [StoredObject(PATHS.root / f"{number}-{name}", 7, None, "etag") for name in "ab"]
    run.write([(1, objects)], {})
    run.write([(1, objects)], dict.fromkeys((one.path for one in objects), "deleted"))
    run.end({"deleted": 2})
    return run.name


def lines_of(data: bytes) -> list[dict[str, Any]]:
    """The parts of a run that has ended."""
    return [json.loads(line) for line in gzip.decompress(data).splitlines()]


def of_lines(lines: list[dict[str, Any]]) -> bytes:
    """A run that has ended, of such parts."""
    return gzip.compress(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
