"""The state of one Arroyo job in another, as an asset: a plan observes, an execution materializes,
and whatever is refused changes nothing."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import Any

import dagster as dg
import pytest

from arroyo_dagster.errors import InputError, StorageError
from arroyo_dagster.orchestration.catalog.checks import kept_verdict
from arroyo_dagster.orchestration.directory import ArroyoDirectory
from arroyo_dagster.orchestration.skips import SKIPPED_TAG
from arroyo_dagster.orchestration.surgery import state_change
from arroyo_dagster.orchestration.surgery.forked_state import ForkConfig, build_forked_state
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.metadata.lease import lease
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.layout import JobPaths, Layout
from arroyo_dagster.state.operations.compaction import controlled_job
from arroyo_dagster.state.operations.compaction.rewrite_undo import run_undo
from arroyo_dagster.state.storage import MemoryStore
from arroyo_dagster.state.storage.wrappers import WriteProtected
from tests.arroyo_jobs import stopped
from tests.arroyo_server import ModelArroyo, arroyo
from tests.faulty_stores import FaultInjecting
from tests.jobs import listing
from tests.orchestration.conftest import Deployment
from tests.orchestration.results import configured, event_metadata, failure, materialized, passed
from tests.surgery_jobs import SurgeryJob, held_rows, surgery_job

KEY = dg.AssetKey(["arroyo", "forked_state"])
STOPPED = {"pl_x/job_b": "stopped"}
NIGHT = dt.datetime(2026, 11, 26, 3, 41)


class Forking:
    """Job A with four epochs, B with two, and the definitions that fork A into B.

    Args:
        theirs: the store of A; None = that of B.
    """

    def __init__(self, deployed: Deployment, theirs: MemoryStore | None = None) -> None:
        self.deployed = deployed
        store = deployed.store if theirs is None else theirs
        self.source = surgery_job(Layout.PROTOCOL, epochs=4, name="job_a", store=store)
        self.job = surgery_job(Layout.PROTOCOL, epochs=2, name="job_b", store=deployed.store)
        self.build()

    def build(self, status: Mapping[str, str] = STOPPED, **options: Any) -> None:
        self.deployed.build(directory=ArroyoDirectory(assume=dict(status)))
        self.deployed.defs = dg.Definitions.merge(self.deployed.defs, build_forked_state(**options))

    def config(self, **more: Any) -> dict[str, Any]:
        return {"source": "job_a", "job": "job_b", "quiet_seconds": 0.0, **more}

    def run(self, **more: Any) -> Any:
        config = configured("arroyo_forked_state", **self.config(**more))
        return self.deployed.run("arroyo_fork", run_config=config)

    def resources(self, status: Mapping[str, str]) -> dict[str, Any]:
        directory = ArroyoDirectory(assume=dict(status))
        return {"arroyo_store": self.deployed.resource, "arroyo_directory": directory}

    def tick(self, status: Mapping[str, str], **more: Any) -> Any:
        self.build(status, nightly=ForkConfig(**self.config(**more)))
        schedule = self.deployed.defs.resolve_schedule_def("arroyo_fork_schedule")
        with dg.build_schedule_context(
            instance=self.deployed.instance,
            scheduled_execution_time=NIGHT,
            resources=self.resources(status),
        ) as context:
            return schedule(context)


@pytest.fixture
def forking(deployed: Deployment) -> Forking:
    return Forking(deployed)


def observed(result: Any) -> Any:
    (event,) = [one for one in result.all_events if one.event_type_value == "ASSET_OBSERVATION"]
    return event.event_specific_data.asset_observation


def records(event: Any, name: str) -> list[dict[str, Any]]:
    return [one.data for one in event.metadata[name].records]


def rows(job: SurgeryJob) -> Any:
    return held_rows(job.store, job.paths)


# ---- plans ---------------------------------------------------------------------------------------


def test_a_plan_only_observes_what_would_become_of_each_table(forking: Forking) -> None:
    before = listing(forking.job.store)
    forking.deployed.wrap(WriteProtected)
    result = forking.run()
    assert result.success
    assert materialized(result) == []
    assert passed(result) == {}
    assert listing(forking.job.store) == before
    event = observed(result)
    assert event.partition is None
    digest = event_metadata(event)["arroyo/plan"]
    assert f"plan {digest} changes" in event.description
    tables = {(one["operator"], one["table"]): one["action"] for one in records(event, "tables")}
    assert tables["window_3", "t"] == "carried"
    assert tables["sink_6", "f"] == "kept"
    assert any("processed by both jobs" in one["what"] for one in records(event, "seen twice"))
    assert any("never emitted" in one["what"] for one in records(event, "never seen"))
    assert "why not" not in event.metadata


def test_a_plan_for_a_job_that_runs_says_why_not_now(forking: Forking) -> None:
    forking.build({"pl_x/job_b": "running"})
    result = forking.run()
    assert result.success
    event = observed(result)
    assert event_metadata(event)["why not"].startswith("the job runs")
    assert "not now: the job runs" in event.description


def test_an_approval_without_execution_is_refused(forking: Forking) -> None:
    result = forking.run(approve="0815")
    assert not result.success
    assert "set `execute: true`" in failure(result).description


# ---- execution -----------------------------------------------------------------------------------


def test_the_approved_plan_is_executed_and_can_be_undone(forking: Forking) -> None:
    job, before = forking.job, rows(forking.job)
    assert before != rows(forking.source)
    digest = event_metadata(observed(forking.run()))["arroyo/plan"]
    result = forking.run(execute=True, approve=digest)
    assert result.success
    (event,) = materialized(result)
    assert event.asset_key == KEY
    assert event_metadata(event)["arroyo/plan"] == digest
    assert job.store.read(StatePath(event_metadata(event)["arroyo/record"]))
    assert event_metadata(event)["undo"] == "arroyo-state undo pl_x/job_b --yes"
    assert passed(result) == {"restorable": True}
    assert rows(job) == rows(forking.source)
    run_undo(job.store, job.paths, stopped(job.paths))
    assert rows(job) == before


def test_dagster_materializes_it_with_a_source_at_another_url(deployed: Deployment) -> None:
    forking = Forking(deployed, MemoryStore("forked-from"))
    was = listing(forking.source.store)
    config = ForkConfig(**forking.config(source_url=forking.source.store.url, execute=True))
    result = dg.materialize(
        list(build_forked_state().assets or []),  # type: ignore[arg-type]
        instance=deployed.instance,
        run_config=dg.RunConfig({"arroyo_forked_state": config}),
        resources=forking.resources(STOPPED),
    )
    assert result.success
    assert len(result.asset_materializations_for_node("arroyo_forked_state")) == 1
    assert rows(forking.job) == rows(forking.source)
    assert listing(forking.source.store) == was


@pytest.mark.parametrize(
    "more",
    [{"evolve": True}, {"overrides": {"start_empty": ["window_3"], "drop": ["window_3"]}}],
    ids=["evolve", "overrides"],
)
def test_with_overrides_the_state_is_evolved(forking: Forking, more: dict[str, Any]) -> None:
    result = forking.run(execute=True, **more)
    assert result.success, failure(result).description
    (event,) = materialized(result)
    assert event_metadata(event)["operation"] == "evolve"
    found, theirs = rows(forking.job), rows(forking.source)
    assert found["join_4", "left"] == theirs["join_4", "left"]
    assert (("window_3", "t") in found) == ("overrides" not in more)


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "more", "why", "step"),
    [
        (STOPPED, {"approve": "0815"}, "plan 0815 was approved", "review the new plan"),
        ({"pl_x/job_b": "running"}, {}, "the job runs", "stop it with a checkpoint"),
        ({}, {}, "the status of the job is unknown", "`assume` of the resource"),
        (STOPPED, {"source": "job_b"}, "forked into itself", "name another job"),
        (STOPPED, {"source": "job_c"}, "job_c", "Next: "),
        (STOPPED, {"epoch": 9}, "9", "Next: "),
        (STOPPED, {"overrides": {"mapp": {}}}, "have no 'mapp'", "use map, drop"),
        (STOPPED, {"overrides": {"drop": ["no_9"]}}, "no_9", "Next: "),
        (STOPPED, {"source_url": "s3://me:secret@bucket/x"}, "checkpoint_url", "Next: "),
    ],
)
def test_what_is_refused_fails_with_a_next_step_and_changes_nothing(
    forking: Forking, status: dict[str, str], more: dict[str, Any], why: str, step: str
) -> None:
    forking.build(status)
    before = listing(forking.job.store)
    result = forking.run(execute=True, **more)
    assert not result.success
    assert materialized(result) == []
    assert passed(result) == {}
    description = failure(result).description
    assert why in description
    assert step in description
    assert "secret@" not in description
    assert listing(forking.job.store) == before


def test_a_plan_of_a_source_that_went_on_is_not_executed(forking: Forking) -> None:
    digest = event_metadata(observed(forking.run()))["arroyo/plan"]
    before = rows(forking.job)
    forking.source.write({})
    result = forking.run(execute=True, approve=digest)
    assert not result.success
    assert f"plan {digest} was approved" in failure(result).description
    assert rows(forking.job) == before


def test_a_job_that_another_process_maintains_is_skipped(forking: Forking) -> None:
    before = rows(forking.job)
    with lease(forking.job.store, forking.job.paths, "arroyo-state compact"):
        result = forking.run(execute=True, lease_wait_seconds=0.0)
    assert result.success
    assert materialized(result) == []
    assert "arroyo-state compact" in event_metadata(observed(result))["arroyo/skipped"]
    run = forking.deployed.instance.get_run_by_id(result.run_id)
    assert run is not None
    assert SKIPPED_TAG in run.tags
    assert rows(forking.job) == before


@pytest.mark.parametrize("down", [False, True], ids=["a file is lost", "the store fails"])
def test_the_check_fails_if_the_state_cannot_be_restored_and_the_fork_is_not_repeated(
    forking: Forking, down: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = forking.job

    def broken(name: str, resource: Any, paths: JobPaths) -> Any:
        if down:
            raise StorageError("the store does not answer")
        newest = ParquetBackend(job.store, job.paths).load()
        job.store.delete_many([next(path for path in newest.paths if "window_3" in path)])
        return kept_verdict(name, resource, paths)

    monkeypatch.setattr(state_change, "kept_verdict", broken)
    result = forking.run(execute=True)
    assert not result.success
    assert not any(one.is_step_up_for_retry for one in result.all_events)
    (event,) = materialized(result)
    assert event_metadata(event)["arroyo/record"]
    assert passed(result) == {"restorable": False}
    assert "check restorable failed: " in failure(result).description
    assert ("window_3" in failure(result).description) is not down


@pytest.mark.parametrize("from_end", [0, 1, 2, 9])
@pytest.mark.parametrize("mode", ["before", "after"])
def test_a_store_that_fails_leaves_the_old_state_or_the_new_one_and_nothing_is_retried(
    forking: Forking, from_end: int, mode: Any, instance: dg.DagsterInstance
) -> None:
    counted = Forking(Deployment(instance))
    counting = counted.deployed.wrap(FaultInjecting)
    assert counted.run(execute=True).success
    before = rows(forking.job)
    fail_at = counting.changes - from_end
    assert fail_at > 0
    forking.deployed.wrap(lambda store: FaultInjecting(store, fail_at=fail_at, mode=mode))
    result = forking.run(execute=True)
    assert not any(one.is_step_up_for_retry for one in result.all_events)
    assert rows(forking.job) in (before, rows(forking.source))
    if materialized(result):
        assert rows(forking.job) == rows(forking.source)


# ---- the schedule --------------------------------------------------------------------------------


def test_each_night_the_schedule_forks_into_the_stopped_job(forking: Forking) -> None:
    for _ in range(2):
        request = forking.tick(STOPPED)
        assert isinstance(request, dg.RunRequest)
        assert request.tags["arroyo/job_id"] == "pl_x/job_b"
        result = forking.deployed.run("arroyo_fork", run_config=request.run_config)
        assert result.success
        assert len(materialized(result)) == 1
        assert rows(forking.job) == rows(forking.source)
        forking.source.write({})


@pytest.mark.parametrize(
    ("status", "why"),
    [
        ({"pl_x/job_b": "running"}, "the job runs"),
        ({"pl_x/job_b": "changing"}, "the job is changing"),
        ({}, "the status of the job is unknown"),
    ],
)
def test_a_tick_is_skipped_while_the_job_is_not_stopped(
    forking: Forking, status: dict[str, str], why: str
) -> None:
    before = listing(forking.job.store)
    skipped = forking.tick(status)
    assert isinstance(skipped, dg.SkipReason)
    assert skipped.skip_message is not None
    assert f"pl_x/job_b: {why}" in skipped.skip_message
    assert listing(forking.job.store) == before


def test_a_schedule_cannot_approve_a_plan(forking: Forking) -> None:
    with pytest.raises(InputError, match="cannot approve"):
        build_forked_state(ForkConfig(**forking.config(approve="0815")))


# ---- in a window ---------------------------------------------------------------------------------


@pytest.fixture
def model(forking: Forking, monkeypatch: pytest.MonkeyPatch) -> ModelArroyo:
    monkeypatch.setattr(controlled_job, "POLL_SECONDS", 0.01)
    return ModelArroyo(forking.job, seconds_a_request=2.0)


def in_window(forking: Forking, url: str, **more: Any) -> Any:
    forking.deployed.build(directory=ArroyoDirectory(api_url=url))
    forking.deployed.defs = dg.Definitions.merge(forking.deployed.defs, build_forked_state())
    return forking.run(execute=True, window=True, **more)


def test_a_running_job_takes_the_state_in_a_window(forking: Forking, model: ModelArroyo) -> None:
    theirs = rows(forking.source)
    loaded: list[Any] = []
    model.will_not_restore = lambda job: loaded.append(held_rows(job.store, job.paths)) is not None
    with arroyo(model) as server:
        result = in_window(forking, server.url)
    assert result.success
    (event,) = materialized(result)
    assert event_metadata(event)["arroyo/window"] == "rewritten, runs again"
    assert passed(result)["restorable"]
    assert loaded == [theirs]
    assert model.state == "Running"


def test_a_window_that_fails_fails_the_run_and_the_job_runs(
    forking: Forking, model: ModelArroyo
) -> None:
    ours = rows(forking.job)
    model.fails = {"CheckpointStopping"}
    with arroyo(model) as server:
        result = in_window(forking, server.url)
    assert not result.success
    assert materialized(result) == []
    assert "did not stop, its status is Failed" in failure(result).description
    assert (rows(forking.job), model.state) == (ours, "Running")
