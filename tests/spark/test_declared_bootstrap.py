"""A bootstrap as it is declared: computed from the flights that a real Arroyo has read, it gives
the state that this Arroyo had."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from deltalake import write_deltalake
from pyiceberg.catalog.sql import SqlCatalog

from arroyo_dagster import cli
from arroyo_dagster.errors import InputError, NotFoundError, StorageError
from arroyo_dagster.orchestration.directory import ArroyoDirectory
from arroyo_dagster.orchestration.resources import ArroyoStateStore, SparkSessionResource
from arroyo_dagster.orchestration.surgery.bootstrapped_state import (
    BootstrapConfig,
    build_bootstrapped_state,
)
from arroyo_dagster.spark.jobs import fetch_rows
from arroyo_dagster.spark.surgery.declared import declared_bootstrap
from arroyo_dagster.spark.surgery.lakes import lake_frame
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.operations.catalog.jobs import find_job
from arroyo_dagster.state.operations.compaction.rewrite_undo import run_undo
from arroyo_dagster.state.operations.query.operator_state import SessionRow, sessions
from arroyo_dagster.state.operations.query.state import open_state
from arroyo_dagster.state.operations.surgery.declared import parse_declared_bootstrap
from arroyo_dagster.state.operations.surgery.execute import EditOptions
from arroyo_dagster.state.runtime.lakes.delta import delta_snapshot
from arroyo_dagster.state.storage import ObjectStore, open_store
from tests import surgery_demo
from tests.arroyo_jobs import stopped
from tests.compat.arroyo import unpack
from tests.compat.test_generational import FLIGHTS, lines_read
from tests.contract import servers
from tests.evolved_jobs import Rows, in_order, loaded
from tests.journeys.test_surgery import errors_of
from tests.lakes import catalog_of
from tests.s3_servers import KEYS

FILE = "/data/in/flights.json"
WATERMARK = "2013-01-05T02:30:00Z"
OLDEST = 1357353000 - 24 * 3600
"""The oldest event time that a join keeps, in seconds: a day before the watermark."""
MARK, GAP = 1357353000 * 10**9, 6 * 3600 * 10**9
"""The watermark, and the gap of sessions, in nanoseconds."""


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
                "select": {"file": f"'{FILE}'", "timestamp": "scheduled"},
                "partition": "file",
                "offset": "seq",
            },
            "positions": {FILE: lines},
            "watermark": WATERMARK,
            "tables": tables,
            **more,
        }


@pytest.fixture(scope="module")
def flights(session: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flights]:
    folder = tmp_path_factory.mktemp("flights")
    rows = pq.ParquetFile(FLIGHTS).read().slice(0, 8_000)
    rows = rows.append_column("seq", pa.array(range(rows.num_rows), pa.int64()))
    pq.write_table(rows, folder / "events.parquet")
    # 200 partitions of a few rows each would take most of the time.
    session.conf.set("spark.sql.shuffle.partitions", "3")
    yield Flights(session, folder, folder / "events.parquet")
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
    return [row for row in rows if row["_timestamp"] >= OLDEST * 10**9]


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


Shape = Callable[[Rows], Rows]
JOBS: dict[str, tuple[dict[str, Any], dict[str, Shape]]] = {
    "carrier_totals": (
        {"updating_aggregate_4": {"a": {}, "b": {"distinct": {1: "tailnum"}}}},
        {"a": as_is, "b": tuples},
    ),
    "hourly_departures": ({"tumbling_4": {"t": None}}, {"t": as_is}),
    "busiest_routes": ({"sliding_window_4": {"t": {"every_seconds": 1800}}}, {"t": as_is}),
    "aircraft_sessions": (
        {"SessionWindow<21600s>": {"s": {"where": "tailnum is not null"}}},
        {"s": open_ones},
    ),
    "grand_total": ({"updating_aggregate_4": {"a": {}}}, {"a": without_generation}),
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


def open_sessions(store: ObjectStore, name: str) -> list[SessionRow]:
    """What a restore rebuilds of the rows of sessions, and of their earliest start."""
    return list(sessions(open_state(store).job(name).epoch()))


@pytest.mark.parametrize("name", JOBS)
def test_the_state_of_the_same_events_is_that_of_a_real_arroyo(flights: Flights, name: str) -> None:
    tables, shapes = JOBS[name]
    store, paths = flights.job(name)
    before, waiting = loaded(store, paths), open_sessions(store, name)
    assert bool(waiting) == (name == "aircraft_sessions")
    epoch = ParquetBackend(store, paths).epochs()[-1]
    declared = parse_declared_bootstrap(flights.declared(lines_read(store, paths, epoch), tables))
    with declared_bootstrap(flights.session, store, paths, stopped(paths), declared) as bootstrap:
        plan = bootstrap.plan()
        assert bootstrap.run(plan, EditOptions(quiet_seconds=0)).published
    after = loaded(store, paths)
    assert after.keys() == before.keys()
    assert open_sessions(store, name) == waiting
    for key, shape in shapes.items():
        (at,) = [one for one in before if one[1] == key]
        assert in_order(shape(after[at])) == in_order(shape(before[at])), at
    assert errors_of(store, paths) == set()


@pytest.mark.usefixtures("flights")
def test_the_demo_shows_fork_evolve_and_bootstrap(
    session: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    surgery_demo.main(session)
    shown = capsys.readouterr().out
    for text in (
        *("1. Fork", "2. Evolve", "tumbling_17, after: a restore loads 15", "3. Bootstrap"),
        *("lateness_seconds: 5", "computed rows replace its rows", "join_11.left, after: a rest"),
        "each operation was undone",
    ):
        assert text in shown


# ---- on the command line -------------------------------------------------------------------------


def command(store: ObjectStore, file: Path, *args: str) -> Result:
    line = ["bootstrap", "carrier_totals", str(file), "--assume", "carrier_totals=stopped", *args]
    return CliRunner().invoke(cli.main, [*line, "--url", store.url], catch_exceptions=False)


def test_a_plan_is_printed_approved_executed_and_undone(flights: Flights, tmp_path: Path) -> None:
    store, paths = flights.job("carrier_totals")
    before = loaded(store, paths)
    tables = {"updating_aggregate_4": {"a": {}}}
    file = tmp_path / "history.yaml"
    file.write_text(json.dumps(flights.declared(7_000, tables, watermark="2013-01-06T00:00:00Z")))
    shown = command(store, file)
    assert shown.exit_code == 0, shown.output
    assert "computed rows replace its rows" in shown.stdout
    assert "b starts empty beside computed rows" in shown.stdout
    assert f'entry "{FILE}"' in shown.stdout
    assert loaded(store, paths) == before
    digest = shown.stdout.rpartition("plan ")[2].split()[0]
    wrong = command(store, file, "--yes", "--approve", "0815", "--quiet", "0")
    assert (wrong.exit_code, loaded(store, paths)) == (1, before)
    done = command(store, file, "--yes", "--approve", digest, "--quiet", "0")
    assert "bootstrap done at epoch 8" in done.stdout, done.output
    after = loaded(store, paths)
    counts = [row["count(Int64(1))[count]"] for row in after["updating_aggregate_4", "a"]]
    assert sum(counts) == 7_000
    assert errors_of(store, paths) == set()
    run_undo(store, paths, stopped(paths))
    assert loaded(store, paths) == before


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a format": ({"format": "hudi", "path": "x", "time": "at"}, "cannot read the format"),
    "a folder": ({"format": "delta", "path": "x", "time": "at"}, "`path` is no absolute path"),
    "a path": ({"format": "parquet", "path": "/no", "time": "at"}, "the events 'events': Spark"),
    "no time": ({"time": "seq"}, "the events 'events': `time` is bigint, and no timestamp"),
    "a time": ({"time": "sheduled"}, "the events 'events': Spark refuses it"),
    "a filter": ({"where": "carrier >"}, "the events 'events': Spark refuses it"),
    "an offset": ({"offset": "line"}, "the events 'events': Spark refuses it"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_spark_refuses_is_named_with_its_place(
    flights: Flights, tmp_path: Path, name: str
) -> None:
    store, _ = flights.job("carrier_totals")
    changes, expected = WRONG[name]
    declared = flights.declared(7_000, {"updating_aggregate_4": {"a": {}}})
    declared["events"] = changes if "format" in changes else {**declared["events"], **changes}
    file = tmp_path / "history.yaml"
    file.write_text(json.dumps(declared))
    refused = command(store, file)
    assert refused.exit_code == 1
    assert expected in refused.stderr


def test_an_expression_and_a_table_that_are_wrong_are_named(
    flights: Flights, tmp_path: Path
) -> None:
    store, _ = flights.job("carrier_totals")
    file = tmp_path / "history.yaml"
    for tables, expected in (
        (
            {"updating_aggregate_4": {"a": {"where": "nothing > 1"}}},
            "tables.updating_aggregate_4.a",
        ),
        ({"updating_aggregate_5": {"a": {}}}, "has no such table of rows"),
        ({"updating_aggregate_4": {"c": {}}}, "has no such table of rows"),
    ):
        file.write_text(json.dumps(flights.declared(7_000, tables)))
        refused = command(store, file)
        assert (refused.exit_code, expected in refused.stderr) == (1, True), refused.stderr
    file.write_text("tables: [")
    assert "no YAML: line 1" in command(store, file).stderr


MISTAKES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "what Spark refuses": (
        "carrier_totals",
        {
            "updating_aggregate_4": {
                "a": {
                    "columns": {
                        "sum(flights.distance)[sum]": "sum(distances)",
                        "max(flights.dep_delay)[value]": "dep_delay",
                    },
                    "where": "nothing > 1",
                },
                "b": {"distinct": {1: "flight"}},
            },
            "updating_aggregate_5": {"a": {}},
        },
        [
            "updating_aggregate_4.a.columns.sum(flights.distance)[sum]: Spark refuses it: [UNRES",
            "updating_aggregate_4.a.columns.max(flights.dep_delay)[value]: Spark refuses it: [MISS",
            "updating_aggregate_4.a.where: Spark refuses it: [UNRESOLVED_COLUMN",
            "updating_aggregate_4.b.distinct.1: the arguments have the type int32, and in the job "
            "text",
            "has no such table of rows",
        ],
    ),
    "types": (
        "same_aircraft",
        {
            "join_5": {
                "left": {"columns": {"_key_0": "flight", "seq": "cast(seq as double)"}},
                "right": {"columns": {"_key_0": "tailnum", "tail": "tailnum"}},
            }
        },
        [
            "join_5.left: column '_key_0' does not fit the type string of the job: it is int32",
            "join_5.left: column 'seq' does not fit the type int64 of the job: it is double",
            "join_5.right.columns: the job's table has no column 'tail'",
        ],
    ),
    "an aggregate that is another one": (
        "hourly_departures",
        {"tumbling_4": {"t": {"columns": {"max(flights.arr_delay)[value]": "avg(arr_delay)"}}}},
        ["column 'max(flights.arr_delay)[value]' does not fit the type int32 of the job: it is do"],
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_all_errors_are_found_together_before_spark_computes_anything(
    flights: Flights, name: str
) -> None:
    job, tables, expected = MISTAKES[name]
    store, paths = flights.job(job)
    flights.session.read.parquet(str(flights.events)).createOrReplaceTempView("flights_read")
    given = flights.declared(7_000, tables, lateness_seconds=5)
    del given["watermark"]
    events = {**given["events"], "table": "flights_read"}
    given["events"] = {k: v for k, v in events.items() if k not in ("format", "path")}
    declared = parse_declared_bootstrap(given)
    tracker = flights.session.sparkContext.statusTracker()
    ran = tracker.getJobIdsForGroup()
    with (
        pytest.raises(InputError) as caught,
        declared_bootstrap(flights.session, store, paths, stopped(paths), declared),
    ):
        pass
    assert tracker.getJobIdsForGroup() == ran
    lines = str(caught.value).splitlines()[-len(expected) :]
    assert len(str(caught.value).splitlines()) == len(expected) + (len(expected) > 1)
    for line, part in zip(lines, expected, strict=True):
        assert part in line


def test_times_without_a_zone_are_read_in_utc_or_not_at_all(flights: Flights) -> None:
    store, paths = flights.job("hourly_departures")
    declared = parse_declared_bootstrap(flights.declared(7_000, {"tumbling_4": {"t": {}}}))
    zone = "spark.sql.session.timeZone"
    flights.session.conf.set(zone, "Europe/Berlin")
    try:
        with (
            pytest.raises(InputError, match="is Europe/Berlin: times without a zone"),
            declared_bootstrap(flights.session, store, paths, stopped(paths), declared),
        ):
            pass
    finally:
        flights.session.conf.set(zone, "UTC")


def test_the_watermark_may_follow_from_the_events(flights: Flights) -> None:
    store, paths = flights.job("hourly_departures")
    given = flights.declared(7_000, {"tumbling_4": {"t": {}}}, lateness_seconds=60)
    del given["watermark"]
    declared = parse_declared_bootstrap(given)
    with declared_bootstrap(flights.session, store, paths, stopped(paths), declared) as found:
        newest = pq.read_table(flights.events, columns=["scheduled"]).slice(0, 7_000)
        latest = max(newest.column("scheduled").cast(pa.int64()).to_pylist())
        assert found.watermark_micros == latest - 60_000_000
        assert not found.events.unknown
    given["events"]["select"]["later"] = "scheduled + interval 100 years"
    given["events"]["time"] = "later"
    declared = parse_declared_bootstrap(given)
    with declared_bootstrap(flights.session, store, paths, stopped(paths), declared) as found:
        (text,) = found.events.unknown
        assert text.startswith("whether the event times are right: the watermark")
    del given["events"]["partition"], given["events"]["offset"]
    given |= {"watermark": WATERMARK, "lateness_seconds": None}
    declared = parse_declared_bootstrap(given)
    with declared_bootstrap(flights.session, store, paths, stopped(paths), declared) as found:
        (text,) = found.events.unknown
        assert text.startswith("events: whether they end at the positions")


# ---- in a lake -----------------------------------------------------------------------------------


def in_lake(flights: Flights, kind: str, folder: Path) -> dict[str, Any]:
    """Write the events as a table with two versions, partitions and a column that was renamed."""
    rows = pq.read_table(flights.events)
    parts = rows.slice(0, 4_000), rows.slice(4_000)
    if kind == "delta":
        for one in parts:
            write_deltalake(str(folder / "t"), one, mode="append", partition_by=["origin"])
        return {"format": "delta", "path": str(folder / "t")}
    catalog = SqlCatalog("lake", **catalog_of(folder))
    catalog.create_namespace("db")
    first = parts[0].rename_columns(["before" if n == "seq" else n for n in rows.column_names])
    table = catalog.create_table("db.t", first.schema)
    with table.update_spec() as spec:
        spec.add_identity("origin")
    table.append(first)
    with table.update_schema() as change:
        change.rename_column("before", "seq")
    table.append(parts[1])
    return {"format": "iceberg", "path": f"{folder}/warehouse/db/t"}


AGGREGATE = {"updating_aggregate_4": {"a": {}, "b": {"distinct": {1: "tailnum"}}}}


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_events_in_a_lake_give_the_state_of_the_same_events_in_parquet(
    flights: Flights, tmp_path: Path, kind: str
) -> None:
    store, paths = flights.job("carrier_totals")
    given = flights.declared(7_000, AGGREGATE, lateness_seconds=60)
    del given["watermark"]
    lake = in_lake(flights, kind, tmp_path)
    plans = []
    for place in ({}, lake):
        declared = parse_declared_bootstrap({**given, "events": {**given["events"], **place}})
        with declared_bootstrap(flights.session, store, paths, stopped(paths), declared) as found:
            plans.append(found.plan())
    assert plans[0].edit.tables == plans[1].edit.tables  # type: ignore[union-attr]
    assert plans[0].watermarks == plans[1].watermarks
    assert plans[0].digest != plans[1].digest
    (evidence,) = [one.evidence for one in plans[1].preconditions if "version" in one.name]
    assert ("version 1" if kind == "delta" else "snapshot ") in evidence


def test_a_plan_is_of_one_version_of_the_table(flights: Flights, tmp_path: Path) -> None:
    store, paths = flights.job("carrier_totals")
    before = loaded(store, paths)
    lake = in_lake(flights, "delta", tmp_path)
    given = flights.declared(7_000, {"updating_aggregate_4": {"a": {}}})
    file = tmp_path / "history.yaml"

    def plan(**more: Any) -> str:
        events = {**given["events"], **lake, **more}
        file.write_text(json.dumps({**given, "events": events}))
        shown = command(store, file)
        assert shown.exit_code == 0, shown.output
        return shown.stdout

    newest = plan()
    assert "events: version 1 (table " in newest
    assert "the newest, `version: 1` keeps to it" in newest
    pinned = plan(version=1)
    write_deltalake(lake["path"], pq.read_table(flights.events).slice(0, 10), mode="append")
    digests = [one.rpartition("plan ")[2].split()[0] for one in (newest, pinned)]
    again = plan()
    assert "events: version 2 (table " in again
    moved = command(store, file, "--yes", "--approve", digests[0], "--quiet", "0")
    assert (moved.exit_code, loaded(store, paths)) == (1, before)
    assert "was approved, but the current plan is" in moved.stderr
    assert digests[1] in plan(version=1)
    done = command(store, file, "--yes", "--approve", digests[1], "--quiet", "0")
    assert "bootstrap done at epoch 8" in done.stdout, done.output
    counts = [
        row["count(Int64(1))[count]"] for row in loaded(store, paths)["updating_aggregate_4", "a"]
    ]
    assert sum(counts) == 7_000
    run_undo(store, paths, stopped(paths))


def test_what_a_worker_finds_wrong_in_a_file_is_told_as_it_is(
    flights: Flights, tmp_path: Path
) -> None:
    store, paths = flights.job("carrier_totals")
    lake = in_lake(flights, "delta", tmp_path)
    given = flights.declared(7_000, {"updating_aggregate_4": {"a": {}}})
    events = {**given["events"], **lake}
    declared = parse_declared_bootstrap({**given, "events": events})
    for gone in tmp_path.glob("t/origin=JFK/*.parquet"):
        gone.unlink()
    with (
        pytest.raises(NotFoundError, match="a data file of this version does not exist") as caught,
        declared_bootstrap(flights.session, store, paths, stopped(paths), declared) as found,
    ):
        found.plan()
    assert "VACUUM" in (caught.value.next_step or "")


def test_columns_that_no_expression_names_are_not_read(flights: Flights, tmp_path: Path) -> None:
    snapshot = delta_snapshot(in_lake(flights, "delta", tmp_path)["path"])
    whole = lake_frame(flights.session, snapshot)
    some = lake_frame(flights.session, snapshot, ["sum(`Distance`) / count(*)", "max(seq) * 2"])
    assert some.columns == ["distance", "seq"]
    assert lake_frame(flights.session, snapshot, ["hash(*)"]).columns == whole.columns
    assert len(lake_frame(flights.session, snapshot, ["1"]).columns) == 1


def test_workers_read_a_table_on_s3_with_the_options_of_the_declaration(flights: Flights) -> None:
    rows = pq.read_table(flights.events).slice(0, 1_000)
    with servers.moto_server() as host:
        servers.make_moto_bucket("flights-lake")
        options = {**KEYS, "endpoint": f"http://{host}"}
        given = {f"aws_{name}": value for name, value in options.items()}
        write_deltalake(
            "s3://flights-lake/flights", rows, storage_options={**given, "aws_allow_http": "true"}
        )
        snapshot = delta_snapshot("s3://flights-lake/flights", None, options)
        frame = lake_frame(flights.session, snapshot, ["seq"])
        assert frame.selectExpr("sum(seq)").first()[0] == 999 * 500
    away = replace(snapshot, options={**options, "max_retries": 0, "request_timeout_seconds": 1})
    with pytest.raises(StorageError, match="the store cannot be reached") as caught:
        fetch_rows(flights.session, lake_frame(flights.session, away, ["seq"]))
    assert KEYS["secret_access_key"] not in str(caught.value)


# ---- in Dagster ----------------------------------------------------------------------------------


def materialize(url: str, home: Path, **config: Any) -> Any:
    with dg.DagsterInstance.local_temp(str(home)) as instance:
        return dg.materialize(
            list(build_bootstrapped_state().assets or []),  # type: ignore[arg-type]
            instance=instance,
            run_config=dg.RunConfig(
                {
                    "arroyo_bootstrapped_state": BootstrapConfig(
                        job="carrier_totals", quiet_seconds=0, **config
                    )
                }
            ),
            resources={
                "arroyo_store": ArroyoStateStore(
                    checkpoint_url=url, catalogue_url=str(home / "catalogue")
                ),
                "arroyo_directory": ArroyoDirectory(assume={"carrier_totals": "stopped"}),
                "arroyo_spark": SparkSessionResource(),
            },
            raise_on_error=False,
        )


def test_the_asset_plans_then_executes_what_was_approved(flights: Flights, tmp_path: Path) -> None:
    store, paths = flights.job("carrier_totals")
    before = loaded(store, paths)
    declared = flights.declared(7_000, {"updating_aggregate_4": {"a": {}}})
    planned = materialize(store.url, tmp_path, bootstrap=declared)
    assert planned.success
    (event,) = planned.get_asset_observation_events()
    digest = event.asset_observation_data.asset_observation.metadata["arroyo/plan"].value
    assert loaded(store, paths) == before
    done = materialize(store.url, tmp_path, bootstrap=declared, execute=True, approve=digest)
    assert done.success
    (event,) = done.get_asset_materialization_events()
    assert event.materialization.metadata["operation"].value == "bootstrap"
    assert [one.passed for one in done.get_asset_check_evaluations()] == [True]
    assert loaded(store, paths) != before
    run_undo(store, paths, stopped(paths))
    assert loaded(store, paths) == before


def test_a_declaration_that_is_wrong_fails_the_run_with_its_place(
    flights: Flights, tmp_path: Path
) -> None:
    store, _ = flights.job("carrier_totals")
    result = materialize(store.url, tmp_path, bootstrap={"evens": {}})
    assert not result.success
    (failed,) = [one for one in result.all_events if one.is_step_failure]
    assert "the bootstrap has no 'evens'" in failed.step_failure_data.user_failure_data.description
