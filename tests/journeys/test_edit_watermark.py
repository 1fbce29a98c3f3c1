"""An edited watermark of an Arroyo job: the plan says which windows are never emitted, and which
are emitted again; a watermark at which a join of windows fails is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from arroyo_dagster import Layout, MemoryStore, cli, configure
from tests.arroyo_jobs import EVENTS, SECOND, join_config, table_rows, window_config
from tests.compat.arroyo import unpack
from tests.formats import iso_micros
from tests.internals import ExpressionWatermarkState
from tests.jobs import listing
from tests.programs import program_database
from tests.surgery_jobs import BEGAN, GENERATOR, NANOS, WATERMARK, SurgeryJob


@pytest.fixture(scope="module")
def flights(tmp_path_factory: pytest.TempPathFactory) -> str:
    return unpack("flights", tmp_path_factory.mktemp("flights"))


def edit(url: str, job: str, at: str, *more: str) -> Result:
    words = ["edit", "watermark", job, at, "--assume", f"{job}=stopped", "--url", url, *more]
    return CliRunner().invoke(cli.main, words)


LATE, EARLY = "2013-01-05T04:00:00Z", "2013-01-04T20:00:00Z"


@pytest.mark.parametrize(
    ("job", "at", "expected"),
    [
        # Of the windows from 2 and 3 o'clock that of 3 o'clock is emitted: a restore loads it.
        ("hourly_departures", LATE, "never seen: tumbling_4: 1 of 2 open windows are never"),
        # Of those that end from 3:00 to 5:30 the ones until 4:00 are skipped.
        ("busiest_routes", LATE, "never seen: sliding_window_4: 3 of 6 open windows, by the slide"),
        ("aircraft_sessions", LATE, "never seen: SessionWindow<21600s>: 93 of 352 open windows"),
        ("aircraft_sessions", LATE, "93 of 352 open windows are never emitted\n"),
        ("busiest_routes", EARLY, "seen twice: sliding_window_4: 13 windows that were emitted are"),
        ("busiest_routes", EARLY, "emitted once more, without new rows"),
        ("aircraft_sessions", EARLY, "seen twice: SessionWindow<21600s>: 262 windows that were"),
    ],
)
def test_the_plan_counts_windows_by_operator(
    flights: str, job: str, at: str, expected: str
) -> None:
    found = edit(flights, job, at)
    assert found.exit_code == 0, found.stderr
    assert expected in found.stdout


def windowed(name: str, *, waiting: bool) -> SurgeryJob:
    """A job whose windows, which end 70 to 86 s after `BEGAN`, are joined.

    Args:
        waiting: the join holds a row of a window that the other side has not emitted.
    """
    job = SurgeryJob(
        Layout.LEGACY,
        parallelism=1,
        store=MemoryStore(name),
        watermark_micros=WATERMARK,
        job="job_x",
        early=("watermark_2",),
        stateless=("tumbling_3", "join_4"),
    )
    reached = ExpressionWatermarkState(WATERMARK * 1000, WATERMARK * 1000)
    job.keep("watermark_2", GENERATOR, {0: reached})
    times = [BEGAN * 1000 + (30 + 4 * n) * NANOS for n in range(5)]
    rows = table_rows(EVENTS, [[f"k{n}" for n in range(5)], list(range(5)), times])
    tables = {("tumbling_3", window_config(EVENTS, ["k"], retention=40)): rows}
    if waiting:
        late = table_rows(EVENTS, [["k1"], [1], [BEGAN * 1000 + 64 * NANOS]])
        tables["join_4", join_config(EVENTS, ["k"], retention=0)] = late
    job.write(tables)
    return job


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (70, "passes the end of 1 open windows, and join_4 joins windows"),
        (66, "passes 1 waiting rows, and join_4 joins windows"),
        (63, None),
        (40, None),
    ],
)
def test_a_watermark_at_which_a_join_of_windows_fails_is_refused(
    seconds: int, expected: str | None
) -> None:
    job = windowed("joined-windows", waiting=True)
    was = listing(job.store)
    found = edit(job.store.url, "job_x", iso_micros(BEGAN + seconds * SECOND), "--yes")
    configure(None)
    if expected is None:
        assert "watermark done" in found.stdout, found.stderr
    else:
        assert (found.exit_code, listing(job.store)) == (1, was)
        assert expected in found.stderr


@pytest.mark.parametrize(
    ("kind", "code"), [(None, 1), ("InstantJoin", 1), ("Join", 0)], ids=["unknown", "windows", "no"]
)
def test_a_join_without_rows_is_known_from_the_program(
    kind: str | None, code: int, tmp_path: Path
) -> None:
    job = windowed("join-without-rows", waiting=False)
    more = []
    if kind is not None:
        nodes = [("watermark_2", "ExpressionWatermark"), ("tumbling_3", "TumblingWindowAggregate")]
        program_database(tmp_path / "db.sqlite", {"job_x": [*nodes, ("join_4", kind)]})
        more = ["--arroyo-db", str(tmp_path / "db.sqlite")]
    found = edit(job.store.url, "job_x", iso_micros(BEGAN + 70 * SECOND), *more)
    configure(None)
    assert found.exit_code == code, found.stderr
    if kind is None:
        assert "pass --arroyo-db" in found.stderr
