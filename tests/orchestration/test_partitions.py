"""Partition keys: which there may be, and how they follow the jobs there are."""

from __future__ import annotations

import datetime as dt
from typing import Any

import dagster as dg
import pytest

from arroyo_dagster.errors import InputError, ProtocolError
from arroyo_dagster.orchestration.partitions import (
    job_of,
    jobs_partitions,
    plan_sync,
)
from arroyo_dagster.orchestration.schedules import DueOptions, build_due_schedule
from arroyo_dagster.orchestration.translator import DagsterArroyoTranslator, Naming
from arroyo_dagster.state.model.ids import JobId, PipelineId
from arroyo_dagster.state.model.layout import JobPaths
from tests.fleets import Written, legacy_job, protocol_job

MANY = [f"p{at}/main" for at in range(100)]


def test_a_key_is_the_root_of_a_job_and_gives_it_back() -> None:
    for paths in (JobPaths(JobId("old")), JobPaths(JobId("main"), PipelineId("p"))):
        assert job_of(paths.root) == paths


@pytest.mark.parametrize("key", ["", "a...b", "a|b", "a\nb", "a\tb", "a/b/c", "../a", "/a", "a/"])
def test_what_is_no_key_is_refused_by_name(key: str) -> None:
    with pytest.raises(InputError, match="not the key of a job"):
        job_of(key)


# ---- in step -------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [0, 50, 89])
def test_too_many_keys_are_never_dropped_at_once(left: int) -> None:
    with pytest.raises(ProtocolError, match=f"{100 - left} of 100 partition keys"):
        plan_sync(MANY, MANY[:left])


def test_the_job_adds_and_drops_keys(deployed: Any) -> None:
    Written(deployed.store, protocol_job("p")).epochs(1)
    Written(deployed.store, legacy_job("old")).epochs(1)
    deployed.instance.add_dynamic_partitions("arroyo_jobs", ["gone", "old"])
    assert deployed.run("arroyo_sync_partitions").success
    assert deployed.keys == ["old", "p/main"]


def test_the_job_refuses_an_empty_listing(deployed: Any) -> None:
    Written(deployed.store, legacy_job("old"))
    deployed.store.put(protocol_job("p").current_generation, b"")
    deployed.instance.add_dynamic_partitions("arroyo_jobs", MANY)
    result = deployed.run("arroyo_sync_partitions")
    assert not result.success
    assert len(deployed.keys) == 100


# ---- due -----------------------------------------------------------------------------------------


def requests(deployed: Any, backlog: dict[str, int], **options: Any) -> Any:
    naming = Naming(DagsterArroyoTranslator(), jobs_partitions())
    schedule = build_due_schedule(
        "due",
        deployed.defs.resolve_job_def("arroyo_refresh"),
        "17 * * * *",
        naming=naming,
        backlog=lambda store: backlog,
        options=DueOptions(**options),
    )
    when = dt.datetime(2026, 1, 1, 5, 17, tzinfo=dt.UTC)
    with dg.build_schedule_context(
        instance=deployed.instance,
        scheduled_execution_time=when,
        repository_def=deployed.defs.get_repository_def(),
        resources={"arroyo_store": deployed.resource},
    ) as context:
        return schedule.evaluate_tick(context)


def test_the_largest_backlog_runs_first_and_no_more_than_asked_for(deployed: Any) -> None:
    deployed.instance.add_dynamic_partitions("arroyo_jobs", ["a", "b", "c", "d"])
    found = requests(deployed, {"a": 3, "b": 9, "c": 1, "d": 5}, min_backlog=2, most_runs=2)
    assert [one.run_key for one in found.run_requests] == ["b:20260101T0517", "d:20260101T0517"]
    assert found.run_requests[0].tags["arroyo/job_id"] == "b"
    assert found.run_requests[0].partition_key == "b"


def test_a_job_without_a_key_is_left_out_instead_of_failing_the_tick(deployed: Any) -> None:
    deployed.instance.add_dynamic_partitions("arroyo_jobs", ["a"])
    assert len(requests(deployed, {"a": 3, "new": 9}).run_requests) == 1
    found = requests(deployed, {"new": 9})
    assert not found.run_requests
    assert found.skip_message == "nothing due: 1 jobs, none with 1 or more"
