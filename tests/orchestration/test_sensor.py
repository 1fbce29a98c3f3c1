"""The sensor: every newly ready epoch told once, whatever dies when."""

from __future__ import annotations

import json
import re
from typing import Any

import dagster as dg
import pytest

from arroyo_dagster.errors import InputError, StorageError
from arroyo_dagster.orchestration.catalog.sensor import (
    SensorOptions,
    decode_cursor,
    decode_poll,
    encode_cursor,
)
from arroyo_dagster.state.model.ids import Epoch, WorkerGeneration
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.operations.catalog.changes import FleetCursor
from arroyo_dagster.state.operations.catalog.job_changes import JobPosition
from arroyo_dagster.state.planning.polling import Requests, poll_interval_seconds, quiet_poll
from arroyo_dagster.state.storage import Counting
from tests.fleets import Written, legacy_job, protocol_job
from tests.jobs import listing, run_word_job

ONE = protocol_job("words")
OLD = legacy_job("old")
BOTH = pytest.mark.parametrize("paths", [ONE, OLD], ids=["protocol", "legacy"])


def versions(job: JobPaths, *epochs: int) -> dict[str, list[str]]:
    generation = 1 if job.pipeline else 0
    return {job.root: [f"g{generation}:e{epoch}" for epoch in epochs]}


# ---- what is told --------------------------------------------------------------------------------


@BOTH
def test_each_new_epoch_is_an_event_and_the_first_tick_tells_the_newest(
    deployed: Any, paths: JobPaths
) -> None:
    job = Written(deployed.store, paths)
    job.epochs(3)
    assert deployed.tick() == versions(paths, 3)
    assert deployed.tick() == {}
    job.epochs(2)
    assert deployed.tick() == versions(paths, 4, 5)
    assert deployed.keys == [paths.root]


def test_an_event_says_what_the_epoch_holds(deployed: Any) -> None:
    run_word_job(deployed.store, sinks=0)
    (first,) = deployed.evaluate().asset_events
    assert "new" not in first.metadata  # the epoch before it is not read
    deployed.tick()
    run_word_job(deployed.store, sinks=0, rows=48)
    (*_, event) = deployed.evaluate().asset_events
    found = {name: value.value for name, value in event.metadata.items()}
    assert found["arroyo/epoch"] == 12
    assert found["arroyo/operators"] == 4
    assert re.fullmatch(r"[\d.]+ kB \([\d,]+ bytes\) in \d+ files, \d+ rows", found["size"])
    assert re.fullmatch(r"[\d.]+ kB \([\d,]+ bytes\) in \d+ files", found["new"])
    assert re.fullmatch(r"\d+ (µs|ms|s)", found["duration"])
    assert found["arroyo/path"].endswith("checkpoint-0000012/checkpoint-manifest.pb")
    kinds = {type(event.metadata[f"arroyo/{name}"]) for name in ("finished_at", "watermark")}
    assert kinds == {dg.TimestampMetadataValue}


def test_looking_writes_nothing_to_the_checkpoint_url(deployed: Any) -> None:
    run_word_job(deployed.store, sinks=0)
    before = listing(deployed.store)
    deployed.tick()
    deployed.run("arroyo_refresh", "words/main")
    deployed.run("arroyo_fleet")
    deployed.run("arroyo_sync_partitions")
    assert listing(deployed.store) == before


def test_of_many_new_epochs_the_first_told_stands_for_the_older(deployed: Any) -> None:
    job = Written(deployed.store, ONE)
    job.epochs(1)
    deployed.tick()
    job.epochs(14)
    result = deployed.evaluate()
    assert [event.metadata["arroyo/epoch"].value for event in result.asset_events] == [
        *range(6, 16)
    ]
    assert result.asset_events[0].metadata["arroyo/older_epochs"].value == 4
    assert "arroyo/older_epochs" not in result.asset_events[1].metadata


# ---- at least once, told once --------------------------------------------------------------------


@pytest.mark.parametrize("stored", range(5))
def test_a_daemon_killed_between_events_and_cursor_loses_and_doubles_nothing(
    deployed: Any, stored: int
) -> None:
    job = Written(deployed.store, ONE)
    job.epochs(1)
    deployed.tick()
    job.epochs(4)
    deployed.keep(deployed.evaluate(), events=stored)  # and the cursor does not move
    job.epochs(1)
    deployed.tick()
    assert deployed.tick() == {}
    assert _stored(deployed, ONE) == [1, 2, 3, 4, 5, 6]


def _stored(deployed: Any, paths: JobPaths) -> list[int]:
    key = dg.AssetKey(["arroyo", "checkpoint"])
    filter_ = dg.AssetRecordsFilter(key, asset_partitions=[paths.root])
    records = deployed.instance.fetch_materializations(filter_, limit=100).records
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
    assert deployed.tick() == versions(ONE, 4)


# ---- jobs that come, go, or cannot be read -------------------------------------------------------


def test_a_vanished_job_leaves_the_cursor_and_keeps_its_key(deployed: Any) -> None:
    first, second = Written(deployed.store, ONE), Written(deployed.store, OLD)
    first.epochs(1)
    second.epochs(1)
    deployed.tick()
    second.vanish()
    result = deployed.evaluate()
    deployed.keep(result)
    assert result.skip_message == (
        "0 new epochs of 0 of 1 job; vanished: old; requests: 2 LIST, 5 GET"
    )
    assert json.loads(result.cursor)["s"].keys() == {ONE.root}
    assert deployed.keys == [OLD.root, ONE.root]


def test_an_unreadable_job_is_told_by_name_and_stops_nobody(deployed: Any) -> None:
    job = Written(deployed.store, ONE)
    job.epochs(1)
    deployed.tick()
    job.epochs(2)
    job.damage(2)
    Written(deployed.store, OLD).epochs(1)
    result = deployed.evaluate()
    deployed.keep(result)
    assert told_of(result) == {ONE.root: [3], OLD.root: [1]}
    assert "unreadable: words/main" in result.skip_message
    assert "unreadable" not in deployed.evaluate().skip_message


def told_of(result: Any) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for event in result.asset_events:
        found.setdefault(event.partition, []).append(event.metadata["arroyo/epoch"].value)
    return found


def test_a_store_that_fails_fails_the_tick_and_keeps_the_cursor(deployed: Any) -> None:
    job = Written(deployed.store, ONE)
    job.epochs(1)
    deployed.tick()
    job.vanish()
    with pytest.raises(StorageError, match="indicates a failure"):
        deployed.evaluate()


@pytest.mark.parametrize("name", ["a...b", "a|b", "a\nb"])
def test_a_name_that_is_no_partition_key_is_told_and_skipped(deployed: Any, name: str) -> None:
    Written(deployed.store, protocol_job(name)).epochs(1)
    job = Written(deployed.store, ONE)
    job.epochs(1)
    result = deployed.evaluate()
    deployed.keep(result)
    assert told_of(result) == {ONE.root: [1]}
    assert "no partition: " in result.skip_message
    assert deployed.keys == [ONE.root]
    # The cursor holds its position: no epoch of another job is missed in the next tick.
    job.epochs(2)
    assert told_of(deployed.evaluate()) == {ONE.root: [2, 3]}


# ---- bounds --------------------------------------------------------------------------------------


def test_jobs_beyond_the_events_of_a_tick_come_first_in_the_next(deployed: Any) -> None:
    jobs = [Written(deployed.store, protocol_job(f"p{at}")) for at in range(5)]
    for job in jobs:
        job.epochs(1)
    options = SensorOptions(events=4)
    first = deployed.tick(options)
    assert len(first) == 4
    (left,) = {job.paths.root for job in jobs} - first.keys()
    assert deployed.tick() == {left: ["g1:e1"]}
    for job in jobs:
        job.epochs(3)
    seen: list[str] = []
    for _ in range(5):
        result = deployed.evaluate()
        assert len(result.asset_events) <= 4
        seen.extend(told_of(result))
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
    assert result.skip_message == f"0 new epochs of 0 of 100 jobs; requests: {expected}"


def test_many_jobs_are_polled_less_often_by_default(
    deployed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1_700_000_000_000_000]
    monkeypatch.setattr("arroyo_dagster.orchestration.catalog.sensor.wall_clock", lambda: now[0])
    jobs = [Written(deployed.store, protocol_job(f"p{at:03}"), files=False) for at in range(120)]
    for job in jobs:
        job.epochs(1)
    assert len(deployed.tick(SensorOptions(events=100))) == 100
    assert len(deployed.tick()) == 20  # those that were left do not wait
    counting = deployed.wrap(Counting)
    jobs[0].epochs(1)
    for seconds, answer in [
        (30, "120 jobs: polled every 60 s, next in 30 s; no request"),
        (28, "1 new epoch of 1 of 120 jobs"),
        (-3600, "0 new epochs of 0 of 120 jobs"),  # the clock went back
    ]:
        now[0] += seconds * 1_000_000
        counting.calls.clear()
        result = deployed.evaluate()
        deployed.keep(result)
        assert result.skip_message.startswith(answer)
        assert bool(counting.calls) == ("no request" not in answer)
    result = deployed.evaluate(SensorOptions(interval_seconds=30))
    assert result.skip_message.startswith("0 new epochs of 0 of 120 jobs")


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
