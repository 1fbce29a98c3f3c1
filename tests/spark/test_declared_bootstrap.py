"""A bootstrap as it is declared: computed from the flights that a real Arroyo has read, it gives
the state that this Arroyo had."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from arroyo_dagster.spark.declared_bootstrap import declared_bootstrap
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.operations.catalog.jobs import find_job
from arroyo_dagster.state.operations.surgery.execute import EditOptions
from arroyo_dagster.state.planning.surgery.declared import parse_declared_bootstrap
from arroyo_dagster.state.storage import ObjectStore, open_store
from tests.arroyo_jobs import stopped
from tests.compat.arroyo import unpack
from tests.compat.test_generational import FLIGHTS, lines_read
from tests.evolved_jobs import Rows, in_order, loaded
from tests.journeys.test_surgery import errors_of

FILE = "/data/in/flights.json"
WATERMARK = "2013-01-05T02:30:00Z"
OLDEST = 1357353000 - 24 * 3600
"""The oldest event time that a join keeps, in seconds: a day before the watermark."""


@dataclass(frozen=True)
class Flights:
    """The jobs that a real Arroyo wrote, and what they had read, with lines that it had not."""

    session: Any
    folder: Path
    events: Path

    def job(self, name: str) -> tuple[ObjectStore, JobPaths]:
        store = open_store(unpack("flights", self.folder / name))
        return store, find_job(store, name)

    def declared(self, lines: int, tables: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {
            "events": {
                "format": "parquet",
                "path": str(self.events),
                "time": "scheduled",
                "select": {"file": f"'{FILE}'"},
                "partition": "file",
                "offset": "seq",
            },
            "positions": {FILE: lines},
            "watermark": WATERMARK,
            "tables": tables,
            **more,
        }


@pytest.fixture(scope="module")
def flights(session: Any, tmp_path_factory: pytest.TempPathFactory) -> Flights:
    folder = tmp_path_factory.mktemp("flights")
    rows = pq.ParquetFile(FLIGHTS).read().slice(0, 8_000)
    rows = rows.append_column("seq", pa.array(range(rows.num_rows), pa.int64()))
    pq.write_table(rows, folder / "events.parquet")
    return Flights(session, folder, folder / "events.parquet")


def as_is(rows: Rows) -> Rows:
    return rows


def tuples(rows: Rows) -> Rows:
    """Without the wall clock of a flush, and the number of changes since the last restart."""
    return [
        {k: v for k, v in row.items() if k not in ("_timestamp", "_generation")} for row in rows
    ]


def fresh(rows: Rows) -> Rows:
    """Without rows that have expired, but share a batch with others."""
    return [row for row in rows if row["_timestamp"] >= OLDEST * 10**9]


Shape = Callable[[Rows], Rows]
JOBS: dict[str, tuple[dict[str, Any], dict[str, Shape]]] = {
    "carrier_totals": (
        {"updating_aggregate_4": {"a": {}, "b": {"distinct": {1: "tailnum"}}}},
        {"a": as_is, "b": tuples},
    ),
    "hourly_departures": ({"tumbling_4": {"t": None}}, {"t": as_is}),
    "busiest_routes": ({"sliding_window_4": {"t": {"every_seconds": 1800}}}, {"t": as_is}),
    "same_aircraft": (
        {
            "join_5": {
                "left": {"columns": {"_key_0": "tailnum"}, "where": "arr_delay > 60"},
                "right": {"columns": {"_key_0": "tailnum"}, "where": "dep_delay > 60"},
            }
        },
        {"left": fresh, "right": fresh},
    ),
}


@pytest.mark.parametrize("name", JOBS)
def test_the_state_of_the_same_events_is_that_of_a_real_arroyo(flights: Flights, name: str) -> None:
    tables, shapes = JOBS[name]
    store, paths = flights.job(name)
    before = loaded(store, paths)
    epoch = ParquetBackend(store, paths).epochs()[-1]
    declared = parse_declared_bootstrap(flights.declared(lines_read(store, paths, epoch), tables))
    bootstrap = declared_bootstrap(flights.session, store, paths, stopped(paths), declared)
    assert bootstrap.run(bootstrap.plan(), EditOptions(quiet_seconds=0)).published
    after = loaded(store, paths)
    assert after.keys() == before.keys()
    for key, shape in shapes.items():
        (at,) = [one for one in before if one[1] == key]
        assert in_order(shape(after[at])) == in_order(shape(before[at])), at
    assert errors_of(store, paths) == set()
