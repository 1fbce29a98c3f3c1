"""What many pipelines cost in Dagster: to load, to report, to verify; beside the model before it.

Processor times of a process of its own, beyond one that loads an empty location.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from arroyo_dagster.orchestration import (
    ArroyoOptions,
    PipelineList,
    SensorOptions,
    VerifyOptions,
    build_arroyo_definitions,
)
from arroyo_dagster.orchestration.pipelines.model import LineageEndpoint, ListedPipeline
from arroyo_dagster.state import MemoryStore
from tests.fleets import Written, protocol_job

PIPELINES = 300
BEFORE = {"load": "0, 134 MB", "tick": "0.7 s for 100", "verify": "65 to 70 ms"}
"""Processor times of the model before, jobs as partitions, measured once on two loaded cores with
100 jobs of this root: `arroyo_refresh_fleet` in place of `arroyo_verify`.
"""
LOAD = """
import json, resource, sys, time
import dagster as dg
from arroyo_dagster.orchestration.definitions import build_arroyo_definitions
from dagster._core.remote_representation.external_data import RepositorySnap
defs = build_arroyo_definitions("memory://x", pipelines=sys.argv[1], mode="maintain")
repository = defs.get_repository_def()
repository.validate_loadable()
assert len(repository.asset_graph.asset_check_keys) == 2 * int(sys.argv[2]) + 1
RepositorySnap.from_def(repository)
usage = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps([usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024]))
"""


def listed(count: int) -> PipelineList:
    """Pipelines from a topic of their own to tables that two of them write."""
    pipelines = tuple(
        ListedPipeline(
            f"pl_{number}/job_{number}",
            (f"orders-{number}",),
            managed=bool(number % 2),
            sources=(LineageEndpoint(("kafka", f"orders-{number}"), "source_orders_0", "kafka"),),
            sinks=(
                LineageEndpoint(("lake", f"orders_{number // 2}"), "sink_lake_1", "filesystem"),
            ),
            sql="INSERT INTO lake SELECT * FROM orders",
        )
        for number in range(count)
    )
    return PipelineList("memory://x", pipelines, {one.root: one.key for one in pipelines})


def loaded(folder: Path, count: int) -> tuple[float, float]:
    """The seconds of processor and the MB of a process that loads so many pipelines."""
    file = folder / f"{count}.json"
    file.write_text(listed(count).to_json())
    command = [sys.executable, "-c", LOAD, str(file), str(count)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds, size_mb = json.loads(answer.stdout.splitlines()[-1])
    return seconds, size_mb


@pytest.mark.parametrize(("count", "bound"), [(PIPELINES, 3.0), (1_000, 8.0)])
def test_loading(tmp_path: Path, count: int, bound: float) -> None:
    empty, _ = loaded(tmp_path, 0)
    seconds, size_mb = loaded(tmp_path, count)
    print(
        f"\nload {count} pipelines: {seconds - empty:.2f} s over {empty:.2f} s of an empty "
        f"location, {size_mb:.0f} MB; before {BEFORE['load']}"
    )
    assert seconds - empty < bound
    assert size_mb < 300


# ---- the work ------------------------------------------------------------------------------------


class Fleet:
    """300 pipelines of one epoch with one small file, their definitions, and an instance."""

    def __init__(self, instance: dg.DagsterInstance) -> None:
        self.instance = instance
        self.store = MemoryStore("benchmark-of-pipelines")
        self.jobs = [Written(self.store, protocol_job(f"p{at:03}")) for at in range(PIPELINES)]
        for job in self.jobs:
            job.epochs(1)
        # At level 1: what the files hold is made up.
        options = ArroyoOptions(
            sensor=SensorOptions(interval_seconds=1),
            verify=VerifyOptions(audit_after=1e12, report_every=0.0),
        )
        self.defs = build_arroyo_definitions(self.store.url, options=options)
        self.cursor: str | None = None

    def tick(self) -> tuple[int, float]:
        """Evaluate the sensor, and keep what it reports. The events, and the seconds
        of processor."""
        begun = _processor_seconds()
        with dg.build_sensor_context(
            instance=self.instance,
            definitions=self.defs,
            cursor=self.cursor,
            resources=self.defs.resources,
        ) as context:
            result: Any = self.defs.resolve_sensor_def("arroyo_checkpoint_sensor").evaluate_tick(
                context
            )
        seconds = _processor_seconds() - begun
        for event in result.asset_events:
            self.instance.report_runless_asset_event(event)
        self.cursor = result.cursor
        return len(result.asset_events), seconds

    def verify(self) -> float:
        """Run `arroyo_verify` over what is due. The seconds of processor."""
        begun = _processor_seconds()
        job = self.defs.resolve_job_def("arroyo_verify")
        assert job.execute_in_process(instance=self.instance).success
        return _processor_seconds() - begun


def _processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with dg.instance_for_test() as instance:
        yield Fleet(instance)


def test_a_tick_with_300_new_epochs(fleet: Fleet) -> None:
    first, _ = fleet.tick()
    for job in fleet.jobs:
        job.epochs(1)
    events, seconds = fleet.tick()
    print(
        f"\na tick with {events} new epochs: {seconds:.2f} s of processor; before {BEFORE['tick']}"
    )
    assert first == events == PIPELINES
    assert seconds < 10


def test_verifying_300_pipelines_that_are_due(fleet: Fleet) -> None:
    fleet.verify()
    for job in fleet.jobs:
        job.epochs(1)
    seconds = fleet.verify() / PIPELINES
    nothing = fleet.verify()
    print(
        f"\nverify {PIPELINES} due pipelines: {seconds * 1e3:.0f} ms of processor for each, "
        f"{nothing:.2f} s if none is due; before {BEFORE['verify']}"
    )
    assert seconds < 0.07
