"""Tables that a user's function computes with Spark: of the flights that a real Arroyo has read,
they are the state that this Arroyo had."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from arroyo_dagster import cli
from arroyo_dagster.errors import InputError
from arroyo_dagster.orchestration import (
    ArroyoDirectory,
    ArroyoOptions,
    BootstrapConfig,
    InProcessRunner,
    build_arroyo_definitions,
)
from arroyo_dagster.spark.surgery.bootstrap import Bootstrap, computed_bootstrap
from arroyo_dagster.state import (
    JobPaths,
    ObjectStore,
    ParquetBackend,
    find_job,
    open_state,
    open_store,
    run_undo,
)
from arroyo_dagster.state.operations.query.operator_state import SessionRow, sessions
from tests import surgery_demo
from tests.arroyo_jobs import stopped
from tests.compat.arroyo import unpack
from tests.compat.test_operator_state import FLIGHTS, lines_read
from tests.evolved_jobs import Rows, in_order, loaded
from tests.internals import EditOptions
from tests.journeys.test_surgery import errors_of

PAGE = Path(__file__).parents[2] / "docs" / "change-sql.md"
FILE = "/data/in/flights.json"
MARK, GAP = 1357353000 * 10**9, 6 * 3600 * 10**9
"""The watermark, and the gap of sessions, in nanoseconds."""
OLDEST = MARK - 24 * 3600 * 10**9
"""The oldest event time that a join keeps."""


@dataclass(frozen=True)
class Flights:
    """The jobs that a real Arroyo wrote, and what they had read, with lines that it had not."""

    session: Any
    folder: Path
    events: Path

    def job(self, name: str) -> tuple[ObjectStore, JobPaths]:
        store = open_store(unpack("flights", self.folder / name))
        return store, find_job(store, name)


@pytest.fixture(scope="module")
def flights(session: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flights]:
    folder = tmp_path_factory.mktemp("flights")
    rows = pq.ParquetFile(FLIGHTS).read().slice(0, 8_000)
    rows = rows.append_column("seq", pa.array(range(rows.num_rows), pa.int64()))
    pq.write_table(rows, folder / "flights.parquet")
    # 200 partitions of a few rows each would take most of the time.
    session.conf.set("spark.sql.shuffle.partitions", "3")
    yield Flights(session, folder, folder / "flights.parquet")
    session.conf.unset("spark.sql.shuffle.partitions")


def as_is(rows: Rows) -> Rows:
    return rows


def tuples(rows: Rows) -> Rows:
    """Without the wall clock of a flush, and the number of changes since the last restart."""
    return [
        {k: v for k, v in row.items() if k not in ("_timestamp", "_generation")} for row in rows
    ]


def fresh(rows: Rows) -> Rows:
    """Without rows that have expired, but share a batch with others."""
    return [row for row in rows if row["_timestamp"] >= OLDEST]


def without_generation(rows: Rows) -> Rows:
    """Without GROUP BY it is the number of batches, which depends on how the events came."""
    return [{k: v for k, v in row.items() if k != "_generation"} for row in rows]


def open_ones(rows: Rows) -> Rows:
    """Rows of sessions that the watermark has not closed; a real Arroyo keeps others as well."""
    kept: Rows = []
    for _, group in itertools.groupby(
        sorted(rows, key=lambda row: (row["tailnum"], row["_timestamp"])), lambda r: r["tailnum"]
    ):
        run: Rows = []
        for row in group:
            if run and row["_timestamp"] - run[-1]["_timestamp"] > GAP:
                run = []
            run.append(row)
        if run[-1]["_timestamp"] + GAP >= MARK:
            kept += run
    return kept


BIN = "timestamp_micros(unix_micros(scheduled) div {0} * {0})"
SESSIONS = """
    select tailnum as _key_tailnum, scheduled as timestamp, seq, carrier, flight, tailnum, origin,
        dest, dep_delay, arr_delay, air_time, distance, scheduled as _timestamp
    from (
        select *, max(case when (next is null or next - at > {gap}) and at + {gap} < {mark}
                           then at end) over (partition by tailnum) as closed
        from (select *, unix_micros(scheduled) as at, lead(unix_micros(scheduled))
                  over (partition by tailnum order by scheduled) as next
              from events where tailnum is not null))
    where closed is null or at > closed
""".format(gap=GAP // 1000, mark=MARK // 1000)
"""The events of sessions that the watermark has not closed."""
SIDE = """
    select tailnum as _key_0, tailnum, seq, {0}, scheduled as _timestamp from events
    where {1} > 60 and scheduled >= timestamp_seconds({2})
"""
Shape = Callable[[Rows], Rows]
JOBS: dict[str, dict[str, tuple[str, Shape]]] = {
    "hourly_departures": {
        "tumbling_4.t": (
            "select origin, count(*) as `count(Int64(1))[count]`, "
            "count(dep_delay) as `avg(flights.dep_delay)[count]`, "
            "sum(dep_delay) as `avg(flights.dep_delay)[sum]`, "
            "max(arr_delay) as `max(flights.arr_delay)[value]`, at as _timestamp "
            f"from (select *, {BIN.format(3_600_000_000)} as at from events) "
            f"where at >= timestamp_seconds({MARK // 10**9 - 3600}) group by origin, at",
            as_is,
        )
    },
    "busiest_routes": {
        "sliding_window_4.t": (
            "select dest, count(*) as `count(Int64(1))[count]`, at as _timestamp "
            f"from (select *, {BIN.format(1_800_000_000)} as at from events) "
            f"where at >= timestamp_seconds({MARK // 10**9 - 7200}) group by dest, at",
            as_is,
        )
    },
    "aircraft_sessions": {"SessionWindow<21600s>.s": (SESSIONS, open_ones)},
    "grand_total": {
        "updating_aggregate_4.a": (
            "select count(*) as `count(Int64(1))[count]`, "
            "sum(distance) as `sum(flights.distance)[sum]`, "
            "count(distance) as `sum(flights.distance)[count]`, "
            "max(dep_delay) as `max(flights.dep_delay)[value]`, "
            "max(scheduled) as _timestamp, count(*) as _generation from events",
            without_generation,
        )
    },
    "same_aircraft": {
        "join_5.left": (SIDE.format("arr_delay", "arr_delay", OLDEST // 10**9), fresh),
        "join_5.right": (SIDE.format("origin", "dep_delay", OLDEST // 10**9), fresh),
    },
}


def open_sessions(store: ObjectStore, name: str) -> list[SessionRow]:
    """What a restore rebuilds of the rows of sessions, and of their earliest start."""
    return list(sessions(open_state(store).job(name).epoch()))


def computed(session: Any, events: Path, cut: int, tables: dict[str, str]) -> Bootstrap:
    """Compute tables from the lines before a cut."""
    session.read.parquet(str(events)).where(f"seq < {cut}").createOrReplaceTempView("events")
    return Bootstrap(
        tables={name: session.sql(text) for name, text in tables.items()},
        watermark_micros=MARK // 1000,
        positions={FILE: cut},
    )


def same_rows(before: Any, after: Any, shapes: dict[str, Shape]) -> None:
    assert after.keys() == before.keys()
    for name, shape in shapes.items():
        at = tuple(name.rsplit(".", 1))
        assert in_order(shape(after[at])) == in_order(shape(before[at])), at


@pytest.mark.parametrize("name", JOBS)
def test_the_state_of_the_same_events_is_that_of_a_real_arroyo(flights: Flights, name: str) -> None:
    store, paths = flights.job(name)
    before, waiting = loaded(store, paths), open_sessions(store, name)
    assert bool(waiting) == (name == "aircraft_sessions")
    lines = lines_read(store, paths, ParquetBackend(store, paths).epochs()[-1])
    tables = {table: text for table, (text, _) in JOBS[name].items()}
    function = partial(computed, events=flights.events, cut=lines, tables=tables)
    with computed_bootstrap(flights.session, function, "history") as found:
        job = found.job(paths, stopped(paths))
        plan = job.plan(store)
        assert job.run(store, EditOptions(quiet_seconds=0), plan=plan).published
    shapes = {table: shape for table, (_, shape) in JOBS[name].items()}
    same_rows(before, loaded(store, paths), shapes)
    assert open_sessions(store, name) == waiting
    assert errors_of(store, paths) == set()


@pytest.mark.usefixtures("flights")
def test_the_demo_shows_fork_evolve_and_bootstrap(
    session: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    surgery_demo.main(session)
    shown = capsys.readouterr().out
    for text in (
        *("1. Fork", "2. Evolve", "tumbling_17, after: a restore loads 15", "3. Bootstrap"),
        *("def history(", "computed rows replace its rows", "join_11.left, after: a rest"),
        "each operation was undone",
    ):
        assert text in shown


# ---- on the command line -------------------------------------------------------------------------


def command(store: ObjectStore, function: str, *args: str) -> Result:
    line = ["bootstrap", "carrier_totals", function, "--assume", "carrier_totals=stopped", *args]
    return CliRunner().invoke(cli.main, [*line, "--url", store.url], catch_exceptions=False)


@pytest.fixture
def history(flights: Flights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The recipe of the page, over the flights."""
    (code,) = re.findall(r"```python\n(# history\.py\n.*?)```", PAGE.read_text(), re.DOTALL)
    assert "s3://lake/flights.parquet" in code
    file = tmp_path / "history.py"
    file.write_text(code.replace("s3://lake/flights.parquet", str(flights.events)))
    monkeypatch.delitem(sys.modules, "history", raising=False)
    return file


def test_the_recipe_of_the_page_is_planned_approved_executed_and_undone(
    flights: Flights, history: Path
) -> None:
    store, paths = flights.job("carrier_totals")
    before = loaded(store, paths)
    target = f"{history}:carriers"
    shown = command(store, target)
    assert shown.exit_code == 0, shown.output
    assert "computed rows replace its rows" in shown.stdout
    assert loaded(store, paths) == before
    digest = shown.stdout.rpartition("plan ")[2].split()[0]
    wrong = command(store, target, "--yes", "--approve", "0815", "--quiet", "0")
    assert (wrong.exit_code, loaded(store, paths)) == (1, before)
    done = command(store, target, "--yes", "--approve", digest, "--quiet", "0")
    assert "bootstrap done at epoch 8" in done.stdout, done.output
    shapes = {"updating_aggregate_4.a": as_is, "updating_aggregate_4.b": tuples}
    same_rows(before, loaded(store, paths), shapes)
    assert errors_of(store, paths) == set()
    run_undo(store, paths, stopped(paths))
    assert loaded(store, paths) == before


WRONG: dict[str, tuple[str, list[str]]] = {
    "no module": ("nothing.py:history", ["there is no such file"]),
    "no function": ("{file}:nothing", ["there is no 'nothing' in it"]),
    "no name": ("{file}", ["a function is named MODULE:FUNCTION"]),
    "a value": ("{file}:value", ["it is of type int, not a function"]),
    "an error": ("{file}:refused", ["the function failed (AnalysisException: ", "history.py:7"]),
    "another result": ("{file}:other", ["the function returned DataFrame, not a Bootstrap"]),
    "no frame": ("{file}:no_frame", ["'a.b' is of type int, not a DataFrame"]),
    "no table": ("{file}:no_table", ["'a' names no table"]),
    "another table": ("{file}:absent", ["has no such table of rows"]),
    "a position": ("{file}:position", ["expected a position of '0'"]),
    "a watermark": ("{file}:watermark", ["expected microseconds since 1970"]),
    "types": (
        "{file}:types",
        [
            "the bootstrap has 2 errors",
            "updating_aggregate_4.a: computed rows have other columns",
            "updating_aggregate_4.b: column 'args_row' does not fit the type binary",
        ],
    ),
}
MODULE = """\
from arroyo_dagster.spark.surgery.bootstrap import Bootstrap

value = 1

def refused(spark):
    frame = spark.range(1)
    return frame.select("nothing")

def other(spark):
    return spark.range(1)

def some(tables, **more):
    return Bootstrap(**{"watermark_micros": 1357353000000000, "tables": tables, **more})

def no_frame(spark):
    return some({"a.b": 1})

def no_table(spark):
    return some({"a": spark.range(1)})

def absent(spark):
    return some({"updating_aggregate_5.a": spark.range(1)})

def position(spark):
    return some({}, positions={"0": 1.5})

def watermark(spark):
    return some({}, watermark_micros=1.5)

def types(spark):
    b = "'UA' as _key_carrier, 0 as accumulator, 5 as args_row, 1L as count"
    b += ", timestamp_seconds(1) as _timestamp, 1L as _generation"
    a, b = spark.range(1), spark.sql("select " + b)
    return some({"updating_aggregate_4.a": a, "updating_aggregate_4.b": b})

def own_code(spark):
    from pyspark.sql.functions import udf
    frame = spark.range(5).select(udf(twice)("id").alias("twice"))
    assert [row.twice for row in frame.collect()] == ["0", "2", "4", "6", "8"]
    return some({})

def twice(number):
    return str(2 * number)
"""


@pytest.mark.usefixtures("session")
def test_what_is_wrong_in_a_function_is_named_and_nothing_changes(
    flights: Flights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "history", raising=False)
    store, paths = flights.job("carrier_totals")
    before = loaded(store, paths)
    file = tmp_path / "history.py"
    file.write_text(MODULE)
    for name, (target, expected) in WRONG.items():
        refused = command(store, target.format(file=file), "--yes", "--quiet", "0")
        assert refused.exit_code == 1, name
        for text in expected:
            assert text in refused.stderr, name
    assert loaded(store, paths) == before
    assert command(store, f"{file}:own_code").exit_code == 0


def test_times_without_a_zone_are_read_in_utc_or_not_at_all(flights: Flights) -> None:
    zone = "spark.sql.session.timeZone"
    flights.session.conf.set(zone, "Europe/Berlin")
    try:
        with (
            pytest.raises(InputError, match="is Europe/Berlin: times without a zone"),
            computed_bootstrap(flights.session, lambda _: None, "history"),
        ):
            pass
    finally:
        flights.session.conf.set(zone, "UTC")


# ---- in Dagster ----------------------------------------------------------------------------------


def materialize(url: str, home: Path, function: str, **config: Any) -> Any:
    key = dg.AssetKey(["arroyo", "carrier_totals", "bootstrapped_state"])
    defs = build_arroyo_definitions(
        url,
        options=ArroyoOptions(
            runner=InProcessRunner(),
            directory=ArroyoDirectory(assume={"carrier_totals": "stopped"}),
            bootstrapped_state=function,
        ),
    )
    given = {"arroyo_bootstrapped_state": BootstrapConfig(quiet_seconds=0, **config)}
    with dg.DagsterInstance.local_temp(str(home)) as instance:
        return defs.resolve_job_def("arroyo_bootstrap").execute_in_process(
            instance=instance,
            asset_selection=[key],
            run_config=dg.RunConfig(given),  # type: ignore[arg-type]
            raise_on_error=False,
        )


def test_the_asset_plans_then_executes_what_was_approved(
    flights: Flights, history: Path, tmp_path: Path
) -> None:
    store, paths = flights.job("carrier_totals")
    before = loaded(store, paths)
    failed = materialize(store.url, tmp_path, f"{history}:nothing")
    (event,) = [one for one in failed.all_events if one.is_step_failure]
    assert "there is no 'nothing' in it" in event.step_failure_data.user_failure_data.description
    target = f"{history}:carriers"
    planned = materialize(store.url, tmp_path, target)
    assert planned.success
    (event,) = planned.get_asset_observation_events()
    digest = event.asset_observation_data.asset_observation.metadata["arroyo/plan"].value
    assert loaded(store, paths) == before
    done = materialize(store.url, tmp_path, target, execute=True, approve=digest)
    assert done.success
    (event,) = done.get_asset_materialization_events()
    assert event.materialization.metadata["operation"].value == "bootstrap"
    assert loaded(store, paths) != before
    run_undo(store, paths, stopped(paths))
    assert loaded(store, paths) == before
