"""The state of one Arroyo job in another, as an asset: a plan observes, an execution materializes,
and whatever is refused changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dagster as dg
import pytest

from arroyo_dagster.errors import InputError, StorageError
from arroyo_dagster.orchestration import ArroyoDirectory, ForkConfig, StateFork
from arroyo_dagster.orchestration.serving import WAITING
from arroyo_dagster.state import (
    JobPaths,
    Layout,
    MemoryStore,
    ParquetBackend,
    StatePath,
    WriteProtected,
    run_undo,
)
from arroyo_dagster.state.operations.catalog import footers
from tests.arroyo_jobs import stopped
from tests.arroyo_server import ModelArroyo, arroyo
from tests.internals import controlled_job, lease
from tests.jobs import listing, run_word_job
from tests.orchestration.conftest import Deployment
from tests.orchestration.results import configured, event_metadata, failure, materialized, observed
from tests.surgery_jobs import SurgeryJob, held_rows, surgery_job

TABLE = "pl_x/job_b/forked_state"
KEY = dg.AssetKey(["arroyo", *TABLE.split("/")])
STOPPED = {"pl_x/job_b": "stopped"}


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

    def build(self, status: Mapping[str, str] = STOPPED, nightly: Any = None) -> None:
        directory = ArroyoDirectory(assume=dict(status))
        self.deployed.build(directory=directory, fork=StateFork(nightly=nightly, job="pl_x/job_b"))

    def config(self, **more: Any) -> dict[str, Any]:
        return {"source": "job_a", "quiet_seconds": 0.0, **more}

    def run(self, *tables: str, **more: Any) -> Any:
        config = configured("arroyo_forked_state", **self.config(**more))
        return self.deployed.run("arroyo_fork", *(tables or (self.table,)), run_config=config)

    @property
    def table(self) -> str:
        """The key of job B's asset; with Arroyo's API the name that this gives it is in it."""
        (key,) = (
            spec.key.path
            for spec in self.deployed.defs.resolve_all_asset_specs()
            if spec.key.path[-1] == "forked_state" and spec.metadata["arroyo/job"] == "pl_x/job_b"
        )
        return "/".join(key[1:])

    def tick(self, status: Mapping[str, str], **more: Any) -> Any:
        self.build(status, ForkConfig(**self.config(**more)))
        return self.deployed.due("arroyo_fork_schedule")


@pytest.fixture
def forking(deployed: Deployment) -> Forking:
    return Forking(deployed)


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
    assert listing(forking.job.store) == before
    (event,) = observed(result)
    assert event.asset_key == KEY
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
    (event,) = observed(result)
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
    digest = event_metadata(observed(forking.run())[0])["arroyo/plan"]
    result = forking.run(execute=True, approve=digest)
    assert result.success
    (event,) = materialized(result)
    assert event.asset_key == KEY
    assert event_metadata(event)["arroyo/plan"] == digest
    assert job.store.read(StatePath(event_metadata(event)["arroyo/record"]))
    assert event_metadata(event)["undo"] == "arroyo-state undo pl_x/job_b --yes"
    assert rows(job) == rows(forking.source)
    run_undo(job.store, job.paths, stopped(job.paths))
    assert rows(job) == before


def test_the_source_may_be_at_another_url(deployed: Deployment) -> None:
    forking = Forking(deployed, MemoryStore("forked-from"))
    was = listing(forking.source.store)
    result = forking.run(source_url=forking.source.store.url, execute=True)
    assert result.success
    assert len(materialized(result)) == 1
    assert rows(forking.job) == rows(forking.source)
    assert listing(forking.source.store) == was


def test_a_run_changes_one_pipeline(forking: Forking) -> None:
    before = listing(forking.job.store)
    result = forking.run(TABLE, "pl_x/job_a/forked_state", execute=True)
    assert not result.success
    assert "2 pipelines are selected; a run changes one" in failure(result).description
    assert listing(forking.job.store) == before


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
    description = failure(result).description
    assert why in description
    assert step in description
    assert "secret@" not in description
    assert listing(forking.job.store) == before


def test_a_job_that_another_process_maintains_waits(forking: Forking) -> None:
    before = rows(forking.job)
    with lease(forking.job.store, forking.job.paths, "arroyo-state compact"):
        result = forking.run(execute=True, lease_wait_seconds=0.0)
    assert result.success
    assert materialized(result) == []
    assert "arroyo-state compact" in event_metadata(observed(result)[0])[WAITING]
    assert rows(forking.job) == before


@pytest.mark.parametrize("down", [False, True], ids=["a file is lost", "the store fails"])
def test_the_check_fails_if_the_state_cannot_be_restored_and_the_fork_is_not_repeated(
    forking: Forking, down: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = forking.job

    def broken(store: Any, paths: JobPaths, check: Any) -> Any:
        if down:
            raise StorageError("the store does not answer")
        newest = ParquetBackend(job.store, job.paths).load()
        job.store.delete_many([next(path for path in newest.paths if "window_3" in path)])
        return check_newest(store, paths, check)

    check_newest = footers.check_newest
    monkeypatch.setattr(footers, "check_newest", broken)
    result = forking.run(execute=True)
    assert not result.success
    (event,) = materialized(result)
    assert event_metadata(event)["arroyo/record"]
    said = failure(result).description
    assert ("the store does not answer" if down else "cannot be restored after the change") in said
    assert ("window_3" in said) is not down


# ---- the schedule --------------------------------------------------------------------------------


def test_each_night_the_schedule_forks_into_the_stopped_job(forking: Forking) -> None:
    for _ in range(2):
        forking.build(nightly=ForkConfig(**forking.config()))
        result = forking.deployed.launch_due("arroyo_fork_schedule")
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
    assert not skipped.run_requests
    assert f"pl_x/job_b: {why}" in skipped.skip_message
    assert listing(forking.job.store) == before


def test_a_schedule_that_could_do_nothing_is_refused(forking: Forking) -> None:
    with pytest.raises(InputError, match="cannot approve"):
        forking.tick(STOPPED, approve="0815")
    nightly = ForkConfig(**forking.config())
    with pytest.raises(InputError, match="names no job"):
        forking.deployed.build(fork=StateFork(nightly=nightly))


@pytest.mark.parametrize(("job", "why"), [("words/main", "managed job"), ("no/job", "not know")])
def test_a_tick_into_a_job_that_takes_no_state_says_why(
    forking: Forking, job: str, why: str
) -> None:
    run_word_job(forking.job.store)
    nightly = ForkConfig(**forking.config())
    forking.deployed.build(fork=StateFork(nightly=nightly, job=job))
    with pytest.raises(dg.DagsterError) as raised:
        forking.deployed.due("arroyo_fork_schedule")
    assert why in str(raised.value.__cause__)


# ---- in a window ---------------------------------------------------------------------------------


@pytest.fixture
def model(forking: Forking, monkeypatch: pytest.MonkeyPatch) -> ModelArroyo:
    monkeypatch.setattr(controlled_job, "POLL_SECONDS", 0.01)
    return ModelArroyo(forking.job, seconds_a_request=2.0)


def in_window(forking: Forking, url: str, **more: Any) -> Any:
    forking.deployed.build(api_url=url)
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
