"""The sensor: every newly ready epoch told once, whatever dies when, and requests what has an
automation condition below it."""

from __future__ import annotations

import json
from typing import Any

import dagster as dg
import pytest

from arroyo_dagster import ArroyoStateStore, find_job, list_epochs
from arroyo_dagster.errors import InputError, StorageError
from arroyo_dagster.orchestration import SensorOptions
from arroyo_dagster.orchestration.sensor import decode_cursor, decode_poll, encode_cursor
from arroyo_dagster.state import Epoch, JobPaths, WorkerGeneration
from arroyo_dagster.state.operations.catalog.job_changes import JobPosition
from arroyo_dagster.state.planning.polling import Requests, poll_interval_seconds, quiet_poll
from tests.fleets import Written, legacy_job, protocol_job
from tests.internals import FleetCursor
from tests.jobs import listing, run_word_job
from tests.orchestration.conftest import told
from tests.stores import Counting

ONE = protocol_job("words")
OLD = legacy_job("old")
BOTH = pytest.mark.parametrize("paths", [ONE, OLD], ids=["protocol", "legacy"])


def version(job: JobPaths, epoch: int) -> dict[str, str]:
    return {job.root: f"g{1 if job.pipeline else 0}:e{epoch}"}


# ---- what is told --------------------------------------------------------------------------------


@BOTH
def test_a_tick_reports_one_event_for_all_new_epochs_of_a_pipeline(
    deployed: Any, paths: JobPaths
) -> None:
    job = Written(deployed.store, paths)
    job.epochs(3)
    assert deployed.tick() == version(paths, 3)
    assert deployed.tick() == {}
    job.epochs(2)
    deployed.build()
    result = deployed.evaluate()
    assert told(result) == version(paths, 5)
    assert result.asset_events[0].metadata["arroyo/new_epochs"].value == 2


def test_an_event_says_what_the_epoch_holds_in_numbers_that_dagster_plots(deployed: Any) -> None:
    run_word_job(deployed.store, sinks=0)
    deployed.tick()
    run_word_job(deployed.store, sinks=0, rows=48)
    deployed.build()
    (event,) = deployed.evaluate().asset_events
    values = {name: one.value for name, one in event.metadata.items()}
    assert values["arroyo/epoch"] == 12
    assert values["arroyo/new_epochs"] == 6
    numbers = ("rows", "files", "bytes", "checkpoint_seconds", "watermark_lag_seconds")
    for name in numbers:
        assert type(event.metadata[f"arroyo/{name}"]) in (
            dg.IntMetadataValue,
            dg.FloatMetadataValue,
        )
    assert values["arroyo/path"].endswith("checkpoint-0000012/checkpoint-manifest.pb")
    operators = [row.data["operator"] for row in event.metadata["operators"].records]
    assert len(set(operators)) == 4


def test_looking_writes_nothing_to_the_checkpoint_url(deployed: Any) -> None:
    run_word_job(deployed.store, sinks=0)
    before = listing(deployed.store)
    deployed.tick()
    deployed.run("arroyo_verify")
    deployed.run("arroyo_fleet")
    assert listing(deployed.store) == before


# ---- at least once, told once --------------------------------------------------------------------


@pytest.mark.parametrize("stored", range(3))
def test_a_daemon_killed_between_events_and_cursor_loses_and_doubles_nothing(
    deployed: Any, stored: int
) -> None:
    jobs = [Written(deployed.store, paths) for paths in (ONE, OLD)]
    for job in jobs:
        job.epochs(1)
    deployed.tick()
    for job in jobs:
        job.epochs(4)
    deployed.keep(deployed.evaluate(), events=stored)  # and the cursor does not move
    jobs[0].epochs(1)
    deployed.tick()
    assert deployed.tick() == {}
    assert _stored(deployed, OLD) == [1, 5]
    assert _stored(deployed, ONE)[-1] == 6
    assert len(_stored(deployed, ONE)) == len(set(_stored(deployed, ONE)))


def _stored(deployed: Any, paths: JobPaths) -> list[int]:
    key = dg.AssetKey(["arroyo", *paths.root.split("/"), "checkpoint"])
    records = deployed.instance.fetch_materializations(key, limit=100).records
    events = [record.asset_materialization for record in records]
    return [event.metadata["arroyo/epoch"].value for event in reversed(events) if event]


@pytest.mark.parametrize("cursor", [None, "", "{", "[]", '{"v":9}', '{"v":1,"s":{"a":[1,2,3]}}'])
def test_a_cursor_that_is_lost_or_unreadable_starts_over_and_doubles_nothing(
    deployed: Any, cursor: str | None
) -> None:
    job = Written(deployed.store, ONE)
    job.epochs(3)
    deployed.tick()
    deployed.cursor = cursor
    assert deployed.tick() == {}
    job.epochs(1)
    assert deployed.tick() == version(ONE, 4)


# ---- jobs that come, go, or cannot be read -------------------------------------------------------


def test_a_vanished_pipeline_leaves_the_cursor_and_stays_an_asset(deployed: Any) -> None:
    first, second = Written(deployed.store, ONE), Written(deployed.store, OLD)
    first.epochs(1)
    second.epochs(1)
    deployed.tick()
    second.vanish()
    deployed.build()
    result = deployed.evaluate()
    deployed.keep(result)
    assert result.skip_message == (
        "new epochs of 0 of 1 job; vanished: old; requests: 2 LIST, 5 GET"
    )
    assert json.loads(result.cursor)["s"].keys() == {ONE.root}
    assert dg.AssetKey(["arroyo", "old", "checkpoint"]) in keys_of(deployed)


def keys_of(deployed: Any) -> set[dg.AssetKey]:
    return set(deployed.repository.asset_graph.get_all_asset_keys())


def test_an_unreadable_job_is_told_by_name_and_stops_nobody(deployed: Any) -> None:
    job = Written(deployed.store, ONE)
    job.epochs(1)
    deployed.tick()
    job.epochs(2)
    job.damage(3)
    Written(deployed.store, OLD).epochs(1)
    deployed.build()
    result = deployed.evaluate()
    deployed.keep(result)
    assert told(result) == version(OLD, 1)
    assert "unreadable: words/main" in result.skip_message
    assert "unreadable" not in deployed.evaluate().skip_message


def test_a_store_that_fails_fails_the_tick_and_keeps_the_cursor(deployed: Any) -> None:
    job = Written(deployed.store, ONE)
    job.epochs(1)
    deployed.tick()
    job.vanish()
    with pytest.raises(StorageError, match="indicates a failure"):
        deployed.evaluate()


@pytest.mark.parametrize("name", ["a...b", "a|b", "a\nb", "für alle"])
def test_any_name_is_an_asset_and_the_cursor_holds_its_position(deployed: Any, name: str) -> None:
    Written(deployed.store, protocol_job(name)).epochs(1)
    job = Written(deployed.store, ONE)
    job.epochs(1)
    assert sorted(deployed.tick().values()) == ["g1:e1", "g1:e1"]
    job.epochs(2)
    assert deployed.tick() == version(ONE, 3)


def test_a_pipeline_that_the_definitions_do_not_know_is_told_in_words(deployed: Any) -> None:
    Written(deployed.store, ONE).epochs(1)
    deployed.tick()
    Written(deployed.store, OLD).epochs(1)
    result = deployed.evaluate()
    assert result.asset_events == []
    assert "unknown to the definitions, which a reload finds: old" in result.skip_message


# ---- bounds --------------------------------------------------------------------------------------


def test_jobs_beyond_the_events_of_a_tick_come_first_in_the_next(deployed: Any) -> None:
    jobs = [Written(deployed.store, protocol_job(f"p{at}")) for at in range(5)]
    for job in jobs:
        job.epochs(1)
    deployed.build(sensor=SensorOptions(events=4))
    first = deployed.tick()
    assert len(first) == 4
    (left,) = {job.paths.root for job in jobs} - first.keys()
    assert deployed.tick() == {left: "g1:e1"}
    for job in jobs:
        job.epochs(3)
    seen: list[str] = []
    for _ in range(5):
        result = deployed.evaluate()
        assert len(result.asset_events) <= 4
        seen.extend(told(result))
        deployed.keep(result)
    assert sorted(seen) == [f"p{at}/main" for at in range(5)]
    assert deployed.tick() == {}


def test_the_requests_of_a_quiet_tick_are_those_that_the_plan_says(deployed: Any) -> None:
    for at in range(100):
        job = Written(deployed.store, protocol_job(f"p{at:03}"), files=False)
        job.skip(8)
        job.epochs(2)
    assert len(deployed.tick()) == 100
    before = deployed.cursor
    result = deployed.evaluate()
    assert result.asset_events == []
    assert decode_cursor(result.cursor).positions == decode_cursor(before).positions
    expected = quiet_poll(100, poll_interval_seconds(100))
    assert expected == Requests(5, 200)
    assert result.skip_message == f"new epochs of 0 of 100 jobs; requests: {expected}"


def test_many_jobs_are_polled_less_often_by_default(
    deployed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1_700_000_000_000_000]
    monkeypatch.setattr("arroyo_dagster.orchestration.sensor.wall_clock", lambda: now[0])
    jobs = [Written(deployed.store, protocol_job(f"p{at:03}"), files=False) for at in range(120)]
    for job in jobs:
        job.epochs(1)
    deployed.build(sensor=SensorOptions(events=100))
    assert len(deployed.tick()) == 100
    assert len(deployed.tick()) == 20  # those that were left do not wait
    counting = deployed.wrap(Counting)
    jobs[0].epochs(1)
    for seconds, answer in [
        (30, "120 jobs: polled every 60 s, next in 30 s; no request"),
        (28, "new epochs of 1 of 120 jobs"),
        (-3600, "new epochs of 0 of 120 jobs"),  # the clock went back
    ]:
        now[0] += seconds * 1_000_000
        counting.calls.clear()
        result = deployed.evaluate()
        deployed.keep(result)
        assert result.skip_message.startswith(answer)
        assert bool(counting.calls) == ("no request" not in answer)
    deployed.build(sensor=SensorOptions(interval_seconds=30))
    result = deployed.evaluate()
    assert result.skip_message.startswith("new epochs of 0 of 120 jobs")


# ---- the cursor ----------------------------------------------------------------------------------


def test_a_cursor_is_short_and_reads_back() -> None:
    cursor = FleetCursor(
        positions={
            ONE: JobPosition(WorkerGeneration(3), Epoch(70)),
            OLD: JobPosition(None, Epoch(8)),
        },
        unread=frozenset({protocol_job("new")}),
        start_from="words/main",
        listed_to="old",
    )
    text = encode_cursor(cursor, 1_700_000_000, 120)
    assert text == (
        '{"i":120,"n":"words/main","r":"old","s":{"old":[8],"words/main":[70,3]},'
        '"t":1700000000,"u":["new/main"],"v":1}'
    )
    assert decode_cursor(text) == cursor
    assert decode_poll(text) == (1_700_000_000, 120)
    earlier = encode_cursor(FleetCursor())  # as the release before wrote it
    assert (earlier, decode_poll(earlier)) == ('{"s":{},"v":1}', (None, None))
    assert decode_cursor(None) == FleetCursor()


@pytest.mark.parametrize("text", ['{"v":2,"s":{}}', '{"v":1,"s":[]}'])
def test_a_cursor_of_another_release_or_damaged_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="starts over"):
        decode_cursor(text)


@pytest.mark.parametrize(
    "entry", ['"../x":[1]', '"words/main":[1]', '"x":[]', '"x":"y"', '"x":null']
)
def test_an_entry_of_the_cursor_that_cannot_be_read_hides_no_other_job(entry: str) -> None:
    cursor = decode_cursor(f'{{"v":1,"s":{{{entry},"old":[8]}}}}')
    assert cursor.positions == {OLD: JobPosition(None, Epoch(8))}


def test_rates_of_sources_are_shown_where_they_are_asked_for(deployed: Any) -> None:
    run_word_job(deployed.store, sinks=0)
    deployed.build(sensor=SensorOptions(source_rates=True))
    (event,) = deployed.evaluate().asset_events
    rows = [row.data for row in event.metadata["sources"].records]
    assert [row["operator"] for row in rows] == ["lines"]
    assert rows[0]["position"] == "24"


ORDERS, PAYMENTS = protocol_job("orders"), protocol_job("payments")
REPORT = dg.AssetKey(["report"])


@dg.asset(
    deps=[dg.AssetKey(["arroyo", "payments", "main", "checkpoint"])],
    automation_condition=dg.AutomationCondition.eager(),
)
def report(arroyo_store: ArroyoStateStore) -> dg.MaterializeResult[Any]:
    epochs = list_epochs(arroyo_store.reading(), find_job(arroyo_store.reading(), PAYMENTS.root))
    return dg.MaterializeResult(metadata={"epochs": len(epochs)})


def test_a_new_epoch_requests_what_hangs_below_its_pipeline(deployed: Any) -> None:
    first, second = Written(deployed.store, ORDERS), Written(deployed.store, PAYMENTS)
    first.epochs(1)
    second.epochs(1)
    deployed.tick()
    defs = dg.Definitions.merge(deployed.defs, dg.Definitions(assets=[report]))
    result = dg.evaluate_automation_conditions(defs, deployed.instance)
    second.epochs(1)
    deployed.tick()
    result = dg.evaluate_automation_conditions(defs, deployed.instance, cursor=result.cursor)
    requested = {one.key for one in result.results if one.true_subset.size}
    assert requested == {REPORT}
    result = dg.evaluate_automation_conditions(defs, deployed.instance, cursor=result.cursor)
    assert not {one.key for one in result.results if one.true_subset.size}
