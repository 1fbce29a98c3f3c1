"""One broken pipeline among 300 is red on its own page, alone, and alerts once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from arroyo_dagster.state import ParquetBackend, open_store
from tests.fleets import Written, protocol_job
from tests.orchestration.launching import InProcess, in_process

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


class Fleet(InProcess):
    """The webserver, and the daemon's part."""

    @property
    def pages(self) -> list[str]:
        """What the pager was told."""
        file = self.folder / "pages"
        return file.read_text().splitlines() if file.exists() else []

    def verify(self) -> dg.DagsterRunStatus:
        """Run `arroyo_verify` over what is due."""
        run = self.instance.get_run_by_id(self.launch("arroyo_verify", {}))
        assert run is not None
        return run.status

    def page(self, root: str) -> tuple[str, Any]:
        """What the page of a pipeline shows."""
        return self.checks(["arroyo", *root.split("/"), "checkpoint"])


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[tuple[Fleet, list[Written]]]:
    store = open_store(str(tmp_path / "checkpoints"))
    jobs = [Written(store, protocol_job(f"p{number:03}")) for number in range(PIPELINES)]
    for job in jobs:
        job.epochs(1)
    pages, url = str(tmp_path / "pages"), str(tmp_path / "checkpoints")
    with in_process(tmp_path, DEFINITIONS.format(pages=pages, url=url), Fleet) as server:
        yield server, jobs


def test_a_broken_pipeline_is_red_on_its_own_page_and_alerts_once(
    fleet: tuple[Fleet, list[Written]],
) -> None:
    server, jobs = fleet
    server.tick()
    assert server.verify() is dg.DagsterRunStatus.SUCCESS
    store = open_store(str(server.folder / "checkpoints"))
    store.delete_many([ParquetBackend(store, BROKEN).load().paths[0]])
    assert server.verify() is dg.DagsterRunStatus.FAILURE
    reported, red = server.page(str(BROKEN.root))
    assert red["restorable"] == ("FAILED", "ERROR")
    server.tick()
    server.tick()
    (page,) = server.pages
    assert page.startswith("arroyo_verify: ")
    assert f"1 of 1 pipeline failed: {BROKEN.root}: " in page
    # The verdict stays when the sensor reports a newer epoch, and until the next verdict.
    jobs[123].epochs(1)
    server.tick()
    newer, still = server.page(str(BROKEN.root))
    assert newer > reported
    assert still == red
    green = server.page("p000/main")[1]
    assert green == {"restorable": ("SUCCEEDED", "ERROR"), "healthy": ("SUCCEEDED", "WARN")}
    # What is known to be broken does not alert again today.
    assert server.verify() is dg.DagsterRunStatus.SUCCESS
    server.tick()
    assert len(server.pages) == 1
    assert server.page(str(BROKEN.root))[1]["restorable"] == ("FAILED", "ERROR")
