"""Arroyo's own jobs in Dagster: the asset rewrites stopped ones, the window running ones."""

from __future__ import annotations

from typing import Any

import dagster as dg
import pendulum
import pytest

from arroyo_dagster.errors import InputError
from arroyo_dagster.orchestration import ArroyoDirectory, MaintenanceWindow
from arroyo_dagster.orchestration.compaction.daily_window import DailyWindow, micros_of
from arroyo_dagster.orchestration.serving import WAITING
from arroyo_dagster.state import Layout, ParquetBackend, WriteProtected
from arroyo_dagster.state.operations.compaction import job_window
from tests.arroyo_jobs import EVENTS, SECOND, ArroyoJob, content, table_rows, window_config
from tests.arroyo_server import Faults, ModelArroyo, arroyo
from tests.formats import is_rewritten
from tests.internals import controlled_job, lease
from tests.journeys.test_maintenance_window import dies
from tests.orchestration.conftest import Deployment
from tests.orchestration.results import configured, event_metadata, failure, materialized

KEY = dg.AssetKey(["arroyo", "pl_x", "job_x", "compacted_state"])
NAMED = dg.AssetKey(["arroyo", "orders", "compacted_state"])
"""The key where Arroyo's API says what the pipeline is called."""
WINDOW = window_config(EVENTS, ["k"], retention=600)
QUICK: dict[str, Any] = {"quiet_seconds": 0.0, "stop_seconds": 20.0, "start_seconds": 20.0}


def written(deployed: Deployment) -> ArroyoJob:
    """A job of Arroyo's in the deployment's store."""
    job = ArroyoJob(Layout.PROTOCOL, watermark_micros=30 * SECOND, store=deployed.store)
    for at in range(4):
        times = [(20 + at + n) * SECOND * 1000 for n in range(4)]
        job.write({("tumbling_1", WINDOW): table_rows(EVENTS, [list("abcd"), [at] * 4, times])})
    return job


def known(deployed: Deployment, **said: Any) -> Deployment:
    window = MaintenanceWindow(jobs=["job_x"], between="02:00-04:00", time_zone="Asia/Tokyo")
    deployed.build(**{"window": window, **said})
    return deployed


def compacted(deployed: Deployment, **config: Any) -> Any:
    config = {"policy": "full", "quiet_seconds": 0.0, **config}
    run_config = configured("arroyo_compacted_state", **config)
    return deployed.run("arroyo_compaction", run_config=run_config)


def waiting(result: Any, key: dg.AssetKey) -> str:
    """Why the only pipeline of a run waits, as its asset says."""
    (event,) = result.get_asset_observation_events()
    observation = event.event_specific_data.asset_observation
    assert observation.asset_key == key
    return str(event_metadata(observation)[WAITING])


# ---- stopped jobs: the asset ---------------------------------------------------------------------


def test_a_stopped_job_is_rewritten_and_its_asset_says_how(deployed: Deployment) -> None:
    job = written(deployed)
    known(deployed, directory=ArroyoDirectory(assume={"job_x": "stopped"}))
    before = content(job.store, job.paths)
    result = compacted(deployed)
    assert result.success
    (event,) = materialized(result)
    facts = event_metadata(event)
    assert facts["arroyo/published_as"] == "in place"
    assert facts["files"] == "9 → 3"
    assert facts["forecast"].startswith("3 files, ")
    assert content(job.store, job.paths) == before
    assert materialized(compacted(deployed)) == []


@pytest.mark.parametrize(
    ("said", "why", "step"),
    [
        ({"job_x": "running"}, "the job runs", "the component's `window`"),
        ({"job_x": "changing"}, "the job is changing", "wait until the job is at rest"),
        ({}, "the status of the job is unknown", "`arroyo_api_url` or `arroyo_database`"),
        ({"other": "stopped"}, "the status of the job is unknown", "name the cluster"),
    ],
)
def test_a_job_that_nobody_may_rewrite_waits_with_the_forecast_and_what_is_missing(
    deployed: Deployment, said: dict[str, str], why: str, step: str
) -> None:
    written(deployed)
    known(deployed, directory=ArroyoDirectory(assume=said))
    deployed.wrap(WriteProtected)
    result = compacted(deployed)
    assert result.success
    assert materialized(result) == []
    reason = waiting(result, KEY)
    assert why in reason
    assert "9 files would become 3" in reason
    assert step in reason
    assert "--" not in reason


@pytest.mark.usefixtures("retries_at_once")
def test_a_source_that_does_not_answer_is_asked_again(deployed: Deployment) -> None:
    written(deployed)
    known(deployed, api_url="http://127.0.0.1:9")
    result = compacted(deployed)
    assert not result.success
    assert "127.0.0.1:9" in failure(result).description


# ---- running jobs: the window --------------------------------------------------------------------


@pytest.fixture
def model(deployed: Deployment, monkeypatch: pytest.MonkeyPatch) -> ModelArroyo:
    monkeypatch.setattr(controlled_job, "POLL_SECONDS", 0.01)
    return ModelArroyo(written(deployed), seconds_a_request=2.0)


def open_window(deployed: Deployment, **config: Any) -> Any:
    config = {"jobs": ["job_x"], **QUICK, **config}
    return deployed.run("arroyo_windows", run_config=configured("arroyo_window", **config))


def test_a_window_stops_rewrites_and_starts_a_job_and_tells_of_it(
    deployed: Deployment, model: ModelArroyo
) -> None:
    before = content(model.job.store, model.job.paths)
    with arroyo(model) as server:
        known(deployed, api_url=server.url)
        result = open_window(deployed)
    assert result.success
    assert model.state == "Running"
    (event,) = materialized(result)
    assert event.asset_key == NAMED
    assert event.metadata["arroyo/window"].value == "rewritten, runs again"
    newest = ParquetBackend(model.job.store, model.job.paths).load()
    assert any(map(is_rewritten, newest.paths))
    assert content(model.job.store, model.job.paths) == before


def test_a_window_that_names_no_job_touches_none_and_is_not_green(
    deployed: Deployment, model: ModelArroyo
) -> None:
    with arroyo(model) as server:
        known(deployed, api_url=server.url)
        server.asked.clear()
        result = open_window(deployed, jobs=[])
        assert server.asked == []
    assert not result.success
    assert "no job is named" in failure(result).description


def test_a_window_without_an_api_fails_before_anything_is_touched(
    deployed: Deployment, model: ModelArroyo
) -> None:
    known(deployed, directory=ArroyoDirectory(assume={"job_x": "stopped"}))
    assert not open_window(deployed).success
    assert model.log == []


def test_what_a_window_left_stopped_the_sensor_starts(
    deployed: Deployment, model: ModelArroyo, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = content(model.job.store, model.job.paths)
    with arroyo(model) as server:
        known(deployed, api_url=server.url)
        sensor = deployed.defs.resolve_sensor_def("arroyo_window_recovery")
        assert sensor.default_status is dg.DefaultSensorStatus.RUNNING
        assert not deployed.evaluate("arroyo_window_recovery").run_requests
        with monkeypatch.context() as past:  # its lease ran out long ago
            past.setattr(model.job.store, "_clock", lambda: 1_000_000_000_000_000)
            dies(model, change=8)
        assert model.state == "Stopped"
        (request,) = deployed.evaluate("arroyo_window_recovery").run_requests
        assert request.run_config["ops"]["arroyo_window"]["config"]["recover_only"] is True
        result = deployed.run("arroyo_windows", run_config=request.run_config)
        assert result.success
        assert model.state == "Running"
        assert not deployed.evaluate("arroyo_window_recovery").run_requests
    assert content(model.job.store, model.job.paths) == before


def test_a_job_that_is_not_started_again_fails_the_run_loudly(
    deployed: Deployment, model: ModelArroyo
) -> None:
    with arroyo(model, Faults(at=12, until=10**9)) as server:
        known(deployed, api_url=server.url)
        result = open_window(deployed, stop_seconds=2.0, start_seconds=1.0)
    assert not result.success
    assert "NOT STARTED AGAIN: job_x" in failure(result).description


def test_a_held_lease_lets_a_window_wait_and_its_other_jobs_go_on(
    deployed: Deployment, model: ModelArroyo
) -> None:
    with arroyo(model) as server:
        known(deployed, api_url=server.url)
        with lease(model.job.store, model.job.paths, "somebody"):
            result = open_window(deployed, lease_wait_seconds=0.0)
            assert result.success
            assert "somebody" in waiting(result, NAMED)
            assert (model.state, model.starts) == ("Running", 0)
            result = open_window(deployed, jobs=["job_x", "job_y"], lease_wait_seconds=0.0)
    assert "1 of 2 pipelines failed: job_y: " in failure(result).description


def test_an_interrupt_records_what_a_window_published(
    deployed: Deployment, model: ModelArroyo, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Any, change: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(job_window.JobWindow, "_verify", interrupted)
    with arroyo(model) as server:
        known(deployed, api_url=server.url)
        result = open_window(deployed)
        assert not result.success
        assert model.state == "Running"
    (event,) = materialized(result)
    assert event.metadata["arroyo/window"].value == "interrupted"


def test_the_schedule_opens_with_the_window_in_its_time_zone(deployed: Deployment) -> None:
    window = MaintenanceWindow(jobs=["job_x"], between="23:30-01:15", time_zone="Europe/Berlin")
    known(deployed, window=window)
    schedule = deployed.defs.resolve_schedule_def("arroyo_window_schedule")
    assert schedule.cron_schedule == "30 23 * * *"
    assert schedule.execution_timezone == "Europe/Berlin"
    assert schedule.default_status is dg.DefaultScheduleStatus.STOPPED


# ---- times ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("between", "now", "closes"),
    [
        ("02:00-04:00", "2026-11-21T02:00:00+01:00", "2026-11-21T04:00:00+01:00"),
        ("02:00-04:00", "2026-11-21T03:59:59+01:00", "2026-11-21T04:00:00+01:00"),
        ("02:00-04:00", "2026-11-21T04:00:00+01:00", None),
        ("02:00-04:00", "2026-11-21T02:30:00+00:00", "2026-11-21T04:00:00+01:00"),
        ("23:00-01:30", "2026-11-21T23:10:00+01:00", "2026-11-22T01:30:00+01:00"),
        ("23:00-01:30", "2026-11-22T01:10:00+01:00", "2026-11-22T01:30:00+01:00"),
        ("23:00-01:30", "2026-11-22T01:40:00+01:00", None),
        # Clocks go forward at 02:00: half past two is half past three.
        ("02:30-04:00", "2026-03-29T01:45:00+00:00", "2026-03-29T02:00:00+00:00"),
        ("02:30-04:00", "2026-03-29T01:15:00+00:00", None),
        # Clocks go back at 03:00: the window is an hour longer.
        ("02:30-04:00", "2026-10-25T00:40:00+00:00", "2026-10-25T03:00:00+00:00"),
        ("02:30-04:00", "2026-10-25T02:40:00+00:00", "2026-10-25T03:00:00+00:00"),
    ],
)
def test_a_window_is_open_by_the_clocks_of_its_time_zone(
    between: str, now: str, closes: str | None
) -> None:
    window = DailyWindow.parse(between, "Europe/Berlin")
    found = window.closes_at(pendulum.parse(now))  # type: ignore[arg-type]
    expected = None if closes is None else micros_of(pendulum.parse(closes))  # type: ignore[arg-type]
    assert (None if found is None else micros_of(found)) == expected
    assert window.opens_next(pendulum.parse(now)) > pendulum.parse(now)  # type: ignore[arg-type,operator]


@pytest.mark.parametrize(
    ("between", "zone"),
    [
        ("", "UTC"),
        ("2-4", "UTC"),
        ("25:00-26:00", "UTC"),
        ("02:00-02:60", "UTC"),
        ("02:00-02:00", "UTC"),
        ("02:00-04:00", "Mars/Olympus"),
        ("02:00-04:00", ""),
    ],
)
def test_what_is_no_window_is_refused_with_a_next_step(between: str, zone: str) -> None:
    with pytest.raises(InputError):
        DailyWindow.parse(between, zone)
