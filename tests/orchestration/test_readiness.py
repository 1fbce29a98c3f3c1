"""The verdict of `doctor` about a Dagster instance: what is on, and what to do."""

from __future__ import annotations

import time
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.remote_origin import (
    InProcessCodeLocationOrigin,
    RemoteInstigatorOrigin,
    RemoteRepositoryOrigin,
)
from dagster._core.scheduler.instigation import (
    InstigatorState,
    InstigatorStatus,
    SensorInstigatorData,
)
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin
from dagster._daemon.types import DaemonHeartbeat
from dagster._utils.error import SerializableErrorInfo

from arroyo_dagster.orchestration.readiness import check_instance
from arroyo_dagster.orchestration.sensor import encode_cursor
from arroyo_dagster.state import Epoch, WorkerGeneration
from arroyo_dagster.state.operations.catalog.job_changes import JobPosition
from arroyo_dagster.state.operations.verify.store import CheckStatus
from tests.fleets import protocol_job
from tests.internals import FleetCursor


@pytest.mark.usefixtures("home")
def test_schedules_and_sensors_are_counted() -> None:
    found, daemons, sensor = check_instance()
    assert found.status is CheckStatus.WARNING
    assert found.detail == f"{dg.__version__}; 0 schedules on, 0 off; 0 sensors on, 0 off"
    assert "Automation" in str(found.next_step)
    assert daemons.status is CheckStatus.WARNING  # nothing is on that needs them
    assert "sensor never ran" in daemons.detail
    assert (sensor.status, sensor.next_step) == (CheckStatus.NOT_CHECKED, None)


def test_no_dagster_home_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    (found,) = check_instance()
    assert found.status is CheckStatus.NOT_CHECKED
    assert "DAGSTER_HOME" in found.detail


def test_an_instance_that_cannot_be_opened_is_an_error(home: Path) -> None:
    (home / "dagster.yaml").write_text("storage: {sqlite: {base_dir: /proc/nowhere}}\n")
    (found,) = check_instance()
    assert found.status is CheckStatus.ERROR


# ---- daemons and the sensor ----------------------------------------------------------------------


def _switch_on(instance: dg.DagsterInstance, name: str, cursor: str | None) -> None:
    """Store a sensor as switched on, as the UI and the daemon do."""
    origin = RemoteInstigatorOrigin(
        RemoteRepositoryOrigin(InProcessCodeLocationOrigin(_LOADABLE, location_name="here"), "r"),
        name,
    )
    data = SensorInstigatorData(min_interval=30, cursor=cursor)
    state = InstigatorState(origin, InstigatorType.SENSOR, InstigatorStatus.RUNNING, data)
    instance.add_instigator_state(state)


_LOADABLE = LoadableTargetOrigin(python_file="definitions.py")


def _cursor(jobs: int, interval_seconds: int | None) -> str:
    positions = {
        protocol_job(f"p{at}"): JobPosition(WorkerGeneration(1), Epoch(1)) for at in range(jobs)
    }
    polled_at = None if interval_seconds is None else 1
    return encode_cursor(FleetCursor(positions=positions), polled_at, interval_seconds)


def _beat(instance: dg.DagsterInstance, age_seconds: float, error: str | None = None) -> None:
    errors = [SerializableErrorInfo(error, [], None)] if error else []
    for kind in instance.get_required_daemon_types():
        instance.add_daemon_heartbeat(
            DaemonHeartbeat(time.time() - age_seconds, kind, "one", errors)
        )


@pytest.mark.parametrize(
    ("age_seconds", "error", "status", "detail"),
    [
        (20, None, CheckStatus.OK, "running: "),
        (3600, None, CheckStatus.ERROR, "sensor was last heard of 60 minutes ago"),
        (20, "Boom: at s3://user:secret@bucket", CheckStatus.WARNING, "sensor fails: Boom"),
    ],
)
def test_a_daemon_that_is_silent_while_a_sensor_is_on_is_an_error(
    home: Path, age_seconds: float, error: str | None, status: CheckStatus, detail: str
) -> None:
    with dg.DagsterInstance.get() as instance:
        _switch_on(instance, "arroyo_checkpoint_sensor", None)
        _beat(instance, age_seconds, error)
    _, daemons, sensor = check_instance()
    assert (daemons.status, detail in daemons.detail) == (status, True), daemons
    assert "secret" not in daemons.detail
    assert sensor.detail == "arroyo_checkpoint_sensor has not polled yet"


@pytest.mark.parametrize(
    ("jobs", "interval_seconds", "status"),
    [
        (500, 120, CheckStatus.OK),
        (500, 30, CheckStatus.WARNING),
        (500, None, CheckStatus.WARNING),  # the cursor of an earlier release: Dagster's interval
        (50, 30, CheckStatus.OK),
    ],
)
def test_a_sensor_that_polls_too_often_is_a_warning_with_its_requests(
    home: Path, jobs: int, interval_seconds: int | None, status: CheckStatus
) -> None:
    with dg.DagsterInstance.get() as instance:
        _switch_on(instance, "arroyo_blue_checkpoint_sensor", _cursor(jobs, interval_seconds))
        _switch_on(instance, "another_checkpoint_sensor", None)
    _, _, sensor = check_instance()
    assert sensor.status is status
    assert " LIST, " in sensor.detail
    assert "another" not in sensor.detail
    if status is CheckStatus.WARNING:
        assert "arroyo_blue_checkpoint_sensor: 120" in str(sensor.next_step)
