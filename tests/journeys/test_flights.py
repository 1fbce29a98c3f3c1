"""The flights example in process: its tables and output equal a group-by, however it was run."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from arroyo_dagster.engine import run_pipeline
from arroyo_dagster.state import ParquetBackend, open_store
from examples.flights.pipeline import FLIGHTS, flights_pipeline
from examples.flights.verify import JOB, differences, found_totals, prove
from tests.shares import all_but

DAY = timedelta(days=1)
BEGIN = datetime(2013, 1, 1, tzinfo=UTC)
_FLIGHT_SCHEMA = pq.read_schema(FLIGHTS)


@pytest.fixture(scope="module")
def quarter() -> pa.Table:
    """Every flight from June to August: aircraft go, and some come back."""
    flights = pq.read_table(FLIGHTS)
    times = flights["scheduled"]
    return flights.filter(
        pc.and_(pc.greater_equal(times, BEGIN + 150 * DAY), pc.less(times, BEGIN + 240 * DAY))
    )


class Flights:
    """A job over some flights, below a directory of its own."""

    def __init__(self, folder: Path, flights: pa.Table) -> None:
        self.url, self.output = str(folder / "checkpoints"), str(folder / "output")
        self.flights = flights
        self._data = str(folder / "flights.parquet")
        pq.write_table(flights, self._data, row_group_size=8192)

    def run(
        self,
        *,
        rows_per_epoch: int,
        parallelism: int = 2,
        keep_epochs: int | None = None,
        max_epochs: int | None = None,
    ) -> None:
        built = flights_pipeline(
            self.output,
            data=self._data,
            rows_per_epoch=rows_per_epoch,
            parallelism=parallelism,
            keep_epochs=keep_epochs,
        )
        run_pipeline(built, open_store(self.url), max_epochs=max_epochs)

    def totals(self) -> pa.Table:
        store = open_store(self.url)
        return found_totals(store, ParquetBackend(store, JOB).load())

    def differences(self) -> tuple[str, ...]:
        return prove(self.url, self.output, self.flights).differences


def flights_of(rows: Sequence[tuple[float, str | None]]) -> pa.Table:
    """Flights of aircraft, each so many days after `BEGIN`, in order; 100 miles, 20 minutes."""
    return pa.Table.from_pylist(
        [
            {
                "scheduled": BEGIN + days * DAY,
                "dep_delay": 5,
                "arr_delay": 5,
                "carrier": "XX",
                "flight": 1,
                "tailnum": tailnum,
                "origin": "JFK",
                "dest": "LAX",
                "air_time": 20,
                "distance": 100,
            }
            for days, tailnum in sorted(rows, key=lambda row: row[0])
        ],
        schema=_FLIGHT_SCHEMA,
    )


# ---- the whole journey ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows_per_epoch", "parallelism"), all_but([(8192, 2), (3001, 3), (100_000, 1)], [(8192, 2)])
)
def test_tables_and_output_equal_a_group_by_whatever_the_batches(
    tmp_path: Path, quarter: pa.Table, rows_per_epoch: int, parallelism: int
) -> None:
    job = Flights(tmp_path, quarter)
    job.run(rows_per_epoch=rows_per_epoch, parallelism=parallelism)
    assert job.differences() == ()


def test_a_job_stopped_and_started_with_other_subtasks_and_batches_gives_the_same(
    tmp_path: Path, quarter: pa.Table
) -> None:
    job = Flights(tmp_path, quarter)
    job.run(rows_per_epoch=8192, max_epochs=3)
    job.run(rows_per_epoch=4096, parallelism=3, max_epochs=3)
    job.run(rows_per_epoch=16384, parallelism=1)
    assert job.differences() == ()


# ---- thirty days ---------------------------------------------------------------------------------

ABSENCES = [
    (0.0, "STAYS"), (29.9, "STAYS"), (59.8, "STAYS"), (89.0, "STAYS"),
    (1.0, "BACK ON TIME"), (31.0 - 1e-6, "BACK ON TIME"), (60.0, "BACK ON TIME"),
    (80.0, "BACK ON TIME"),
    (2.0, "BACK LATE"), (2.5, "BACK LATE"), (32.5, "BACK LATE"), (62.4, "BACK LATE"),
    (3.0, "TWICE AWAY"), (40.0, "TWICE AWAY"), (75.0, "TWICE AWAY"),
    (59.0, "JUST GONE"), (59.0 + 1e-6, "JUST HERE"),
    (4.0, "GONE"), (5.0, "GONE"), (5.0, None), (89.0, None),
]  # fmt: skip


@pytest.mark.parametrize("rows_per_epoch", [1, 2, 5, 7, 100])
def test_thirty_days_are_counted_by_event_time_wherever_batches_end(
    tmp_path: Path, rows_per_epoch: int
) -> None:
    job = Flights(tmp_path, flights_of(ABSENCES))
    job.run(rows_per_epoch=rows_per_epoch)
    flights = {row["tailnum"]: row["flights"] for row in job.totals().to_pylist()}
    assert flights == {
        "STAYS": 4,
        "BACK ON TIME": 4,
        "BACK LATE": 2,
        "TWICE AWAY": 1,
        "JUST HERE": 1,
    }
    assert job.differences() == ()


def test_an_aircraft_is_removed_by_its_owner_alone_also_after_a_change_of_parallelism(
    tmp_path: Path,
) -> None:
    rows = [(day, f"N{number}") for number in range(20) for day in (0.0, 1.0)]
    job = Flights(tmp_path, flights_of([*rows, (10.0, "LAST"), (40.0, "LAST")]))
    job.run(rows_per_epoch=41, parallelism=3, max_epochs=1)
    job.run(rows_per_epoch=41, parallelism=4)
    store = open_store(job.url)
    operator = ParquetBackend(store, JOB).load().operator("aircraft")
    assert operator is not None
    removed = [
        key
        for path in operator.tables["totals"].paths  # type: ignore[index]
        if path.endswith("-removed")
        for key in pq.read_table(Path(job.url) / path)["key"].to_pylist()
    ]
    assert len(removed) == len(set(removed)) == 20
    assert job.totals()["tailnum"].to_pylist() == ["LAST"]


# ---- the proof itself ----------------------------------------------------------------------------


ROWS = pa.table({"key": ["a", "b", "c"], "n": [1, 2, 3], "mean": [0.5, None, 1.5]})


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (ROWS.slice(1), "rows of a: lost"),
        (pa.concat_tables([ROWS, ROWS.slice(1, 1)]), "rows of b: 2 times instead of 1"),
        (ROWS.set_column(1, "n", pa.array([1, 2, 4])), "rows of c: (1.5, 4) instead of (1.5, 3)"),
        (
            ROWS.set_column(2, "mean", pa.array([0.5, 0.0, 1.5])),
            "rows of b: (0.0, 2) instead of (None, 2)",
        ),
        (
            pa.concat_tables([ROWS, pa.table({"key": ["d"], "n": [9], "mean": [0.0]})]),
            "rows of d: not expected, found (0.0, 9)",
        ),
        (ROWS.drop_columns(["n"]), "rows: has the columns ['key', 'mean'], not"),
    ],
)
def test_a_row_lost_doubled_changed_or_added_is_said(found: pa.Table, said: str) -> None:
    (line,) = differences("rows", ["key"], ROWS, found)
    assert line.startswith(said)


@pytest.fixture
def finished(tmp_path: Path) -> Flights:
    job = Flights(tmp_path, flights_of([(day / 4, f"N{day % 5}") for day in range(40)]))
    job.run(rows_per_epoch=10)
    assert job.differences() == ()
    return job


def test_a_lost_file_of_the_output_is_noticed(finished: Flights) -> None:
    min(Path(finished.output).glob("*.parquet")).unlink()
    lines = finished.differences()
    assert lines
    assert all("lost" in line for line in lines)


def test_a_file_of_the_output_written_twice_is_noticed(finished: Flights) -> None:
    file = min(Path(finished.output).glob("*.parquet"))
    file.with_name(f"again-{file.name}").write_bytes(file.read_bytes())
    lines = finished.differences()
    assert lines
    assert all("2 times instead of 1" in line for line in lines)


def test_flights_that_the_job_did_not_read_are_noticed(finished: Flights) -> None:
    finished.flights = pa.concat_tables([finished.flights, flights_of([(10, "NEW")])])
    lines = finished.differences()
    assert "source: read 40 of 41" in lines
    assert "totals of NEW: lost" in lines
