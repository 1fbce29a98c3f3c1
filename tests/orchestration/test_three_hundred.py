"""One broken pipeline among 300 is red on its own page, alone, and alerts once."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.remote_origin import InProcessCodeLocationOrigin
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._core.workspace.load_target import InProcessWorkspaceLoadTarget
from dagster._daemon.sensor import execute_sensor_iteration

from arroyo_dagster.state import ParquetBackend, open_store
from tests.fleets import Written, protocol_job
from tests.orchestration.launching import LOCATION, Webserver

PIPELINES = 300
BROKEN = protocol_job("p123")
DEFINITIONS = """
from pathlib import Path
import dagster as dg
from arroyo_dagster import ArroyoOptions, SensorOptions, VerifyOptions, build_arroyo_definitions

@dg.run_failure_sensor(default_status=dg.DefaultSensorStatus.RUNNING, minimum_interval_seconds=1)
def pager(context: dg.RunFailureSensorContext):
    with Path({pages!r}).open("a") as file:
        message = context.get_step_failure_events()[0].step_failure_data.error_display_string
        file.write(context.dagster_run.job_name + ": " + message.splitlines()[0] + chr(10))

ours = build_arroyo_definitions(
    {url!r},
    running=True,
    options=ArroyoOptions(
        sensor=SensorOptions(interval_seconds=1),
        verify=VerifyOptions(audit_after=1e12),  # level 1: what the files hold is made up
    ),
)
defs = dg.Definitions.merge(ours, dg.Definitions(sensors=[pager]))
"""
INSTANCE = {
    "run_coordinator": {
        "module": "dagster._core.run_coordinator",
        "class": "DefaultRunCoordinator",
    },
    "run_launcher": {
        "module": "dagster._core.launcher.sync_in_memory_run_launcher",
        "class": "SyncInMemoryRunLauncher",
    },
}
CHECKS = """query ($key: AssetKeyInput!) { assetNodeOrError(assetKey: $key) {
  ... on AssetNode { assetMaterializations(limit: 1) { timestamp }
    assetChecksOrError { ... on AssetChecks { checks { name
      executionForLatestMaterialization { status runId evaluation { severity description } } } } }
} } }"""


class Fleet(Webserver):
    """The webserver, and the daemon's part."""

    @property
    def pages(self) -> list[str]:
        """What the pager was told."""
        file = self.folder / "pages"
        return file.read_text().splitlines() if file.exists() else []

    def tick(self) -> None:
        """Evaluate the sensors, as the daemon does."""
        time.sleep(1.1)  # their interval
        logger = logging.getLogger("ticks")
        assert not any(execute_sensor_iteration(self._process, logger, None, None))

    def verify(self) -> dg.DagsterRunStatus:
        """Run `arroyo_verify` over what is due."""
        run = self.instance.get_run_by_id(self.launch("arroyo_verify", {}))
        assert run is not None
        return run.status

    def checks(self, root: str) -> tuple[str, dict[str, tuple[str, str]]]:
        """The time of the newest event of a pipeline; the status and severity of its checks, as
        its page shows them.
        """
        key = {"path": ["arroyo", *root.split("/"), "checkpoint"]}
        node = self.ask(CHECKS, key=key)
        shown: dict[str, tuple[str, str]] = {}
        for check in node["assetChecksOrError"]["checks"]:
            execution = check["executionForLatestMaterialization"]
            severity = execution["evaluation"]["severity"]
            shown[check["name"]] = execution["status"], severity
        return node["assetMaterializations"][0]["timestamp"], shown


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[tuple[Fleet, list[Written]]]:
    store = open_store(str(tmp_path / "checkpoints"))
    jobs = [Written(store, protocol_job(f"p{number:03}")) for number in range(PIPELINES)]
    for job in jobs:
        job.epochs(1)
    file = tmp_path / "location.py"
    pages, url = str(tmp_path / "pages"), str(tmp_path / "checkpoints")
    file.write_text(DEFINITIONS.format(pages=pages, url=url))
    target = LoadableTargetOrigin(
        executable_path=sys.executable, python_file=str(file), attribute="defs"
    )
    origin = InProcessCodeLocationOrigin(loadable_target_origin=target, location_name=LOCATION)
    with (
        dg.instance_for_test(overrides=INSTANCE) as instance,
        WorkspaceProcessContext(instance, InProcessWorkspaceLoadTarget([origin])) as process,
    ):
        yield Fleet(instance, process, tmp_path), jobs


def test_a_broken_pipeline_is_red_on_its_own_page_and_alerts_once(
    fleet: tuple[Fleet, list[Written]],
) -> None:
    server, jobs = fleet
    server.tick()
    assert server.verify() is dg.DagsterRunStatus.SUCCESS
    store = open_store(str(server.folder / "checkpoints"))
    store.delete_many([ParquetBackend(store, BROKEN).load().paths[0]])
    assert server.verify() is dg.DagsterRunStatus.FAILURE
    reported, red = server.checks(str(BROKEN.root))
    assert red["restorable"] == ("FAILED", "ERROR")
    server.tick()
    server.tick()
    (page,) = server.pages
    assert page.startswith("arroyo_verify: ")
    assert f"1 of 1 pipeline failed: {BROKEN.root}: " in page
    # The verdict stays when the sensor reports a newer epoch, and until the next verdict.
    jobs[123].epochs(1)
    server.tick()
    newer, still = server.checks(str(BROKEN.root))
    assert newer > reported
    assert still == red
    green: Any = server.checks("p000/main")[1]
    assert green == {"restorable": ("SUCCEEDED", "ERROR"), "healthy": ("SUCCEEDED", "WARN")}
    # What is known to be broken does not alert again today.
    assert server.verify() is dg.DagsterRunStatus.SUCCESS
    server.tick()
    assert len(server.pages) == 1
    assert server.checks(str(BROKEN.root))[1]["restorable"] == ("FAILED", "ERROR")
