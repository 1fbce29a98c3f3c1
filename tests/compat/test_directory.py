"""What a real Arroyo's REST API and database said of the jobs whose state lies beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from arroyo_dagster.state import JobId, JobPaths, PipelineId, list_jobs, open_store
from arroyo_dagster.state.storage.arroyo.api import ArroyoApi
from tests.compat.arroyo import DATA, description, unpack
from tests.formats import JobCondition
from tests.internals import JobDirectory, open_directory
from tests.loopback import recorded, replaying, serving
from tests.stores import ArroyoDatabase

DATABASE = str(DATA / "state-legacy.sqlite")

# job, pipeline, name, run id once stopped, newest ready epoch while running and once stopped
LEGACY = [
    ("job_TgS34gutlY", "pl_lvWSl81851", "auctions", 1, 13, 15),
    ("job_VwPGEOb3ML", "pl_E7CTfIx9QV", "sessions", 1, 13, 15),
    ("job_d14OMmRXhf", "pl_zbN4vGHGrP", "joins", 1, 13, 14),
    ("job_mSLGII6lDN", "pl_TMQwrwDW3K", "tumble", 1, 11, 13),
]
LEADER = [
    ("job_REpArXOlRQ", "pl_hk4uTqEFVZ", "sessions", 1, 9, None),
    ("job_U5O5jKZxJg", "pl_4BjSq2rVmU", "tumble", 2, 9, None),
    ("job_kv98EQxj80", "pl_EkDb8RNAgx", "joins", 1, 8, None),
    ("job_oYFrrHarjc", "pl_j0nlvQZC9h", "auctions", 2, 10, None),
]
JOBS = {"legacy": LEGACY, "leader": LEADER}


@pytest.mark.parametrize("moment", ["running", "stopped"])
@pytest.mark.parametrize("cluster", ["legacy", "leader"])
def test_the_server_tells_name_state_run_and_epoch_of_every_job(cluster: str, moment: str) -> None:
    running = moment == "running"
    paths = [
        JobPaths(JobId(job), None if cluster == "legacy" else PipelineId(pipeline))
        for job, pipeline, *_ in JOBS[cluster]
    ]
    with serving(replaying(f"{cluster}-{moment}")) as server:
        answers = open_directory(api=server.url).look_up(paths, checkpoints=True)
        assert len(server.paths) == 2 + len(paths)
    for answer, (_, pipeline, name, run, early, late) in zip(answers, JOBS[cluster], strict=True):
        facts = answer.facts
        assert (facts.pipeline, facts.name) == (pipeline, name)
        assert facts.condition is (JobCondition.RUNNING if running else JobCondition.STOPPED)
        assert facts.state == ("Running" if running else "Stopped")
        assert facts.run_id == (1 if running else run)
        assert facts.newest_ready_epoch == (early if running else late)
        assert facts.action == ("checkpoint" if running else "none")
        assert facts.stop_requested == ("none" if running else "checkpoint")
        assert facts.action_in_progress is False
        assert facts.running_desired is running
        assert (facts.finish_time_micros is None) is running
        assert facts.failure is None
        assert facts.checkpoints is not None
        assert [one.epoch for one in facts.checkpoints if one.final] == (
            [late] if late and not running else []
        )
        assert answer.reason is None
        assert answer.disagreements == ()


def test_a_checkpoint_that_is_not_finished_is_listed_and_not_ready() -> None:
    with serving(replaying("leader-running")) as server:
        found = ArroyoApi(server.url).checkpoints(
            PipelineId("pl_EkDb8RNAgx"), JobId("job_kv98EQxj80")
        )
    assert [one.ready for one in found] == [True] * 8 + [False]


def test_the_database_tells_what_the_server_tells() -> None:
    with serving(replaying("legacy-stopped")) as server:
        paths = [JobPaths(JobId(job)) for job, *_ in LEGACY]
        both = open_directory(api=server.url, database=DATABASE).look_up(paths, checkpoints=True)
    for answer in both:
        api, database = (word.facts for word in answer.answers)
        assert api is not None
        assert database is not None
        assert answer.disagreements == ()
        same = (
            *(
                "job",
                "pipeline",
                "name",
                "sql",
                "condition",
                "state",
                "run_id",
                "newest_ready_epoch",
            ),
            *("stop_requested", "failure", "start_time_micros", "finish_time_micros"),
        )
        for name in same:
            assert getattr(api, name) == getattr(database, name), name
        assert api.checkpoints is not None
        assert database.checkpoints is not None
        for one, other in zip(api.checkpoints, database.checkpoints, strict=True):
            for name in ("epoch", "ready", "final", "start_time_micros", "finish_time_micros"):
                assert getattr(one, name) == getattr(other, name), name
            assert other.state == "ready"


def test_every_job_of_the_database_is_found_with_its_newest_epoch() -> None:
    jobs = ArroyoDatabase(DATABASE).jobs()
    assert len(jobs) == len(LEGACY)
    for job, pipeline, name, run, _, newest in LEGACY:
        facts = jobs[JobId(job)]
        assert (facts.pipeline, facts.name, facts.run_id) == (pipeline, name, run)
        assert (facts.condition, facts.state) == (JobCondition.STOPPED, "Stopped")
        assert facts.newest_ready_epoch == newest
        assert facts.checkpoints is not None
        assert facts.checkpoints[0].epoch == facts.checkpoints[-1].min_epoch
        assert facts.ignore_state_before_epoch is None


@pytest.mark.parametrize("cluster", ["legacy", "leader"])
def test_every_job_whose_state_there_is_has_a_name(cluster: str, tmp_path: Path) -> None:
    paths = list_jobs(open_store(unpack(cluster, tmp_path)))
    with serving(replaying(f"{cluster}-stopped")) as server:
        answers = open_directory(api=server.url).look_up(paths, checkpoints=True)
    names = {str(answer.paths.root): answer.facts.name for answer in answers}
    described = description(cluster)
    assert names.keys() == described.keys()
    assert sorted(filter(None, names.values())) == ["auctions", "joins", "sessions", "tumble"]
    for answer in answers:
        newest = max(one["epoch"] for one in described[str(answer.paths.root)]["epochs"])
        # In leader mode a server forgets the epochs of a job that stopped; its state knows.
        assert answer.facts.newest_ready_epoch == (newest if cluster == "legacy" else None)


def test_the_jobs_of_another_cluster_are_unknown_here() -> None:
    paths = [JobPaths(JobId(job), PipelineId(pipeline)) for job, pipeline, *_ in LEADER]
    with serving(replaying("legacy-stopped")) as server:
        directory = open_directory(api=server.url, database=DATABASE)
        answers = directory.look_up(paths)
        alone = directory.find(paths[0])
    for answer in (*answers, alone):
        assert answer.facts.condition is JobCondition.UNKNOWN
        assert answer.reason is not None
        assert answer.reason.count("no such pipeline") == 2
        assert answer.problems == ()


def test_the_recorded_answer_to_an_unknown_pipeline_is_what_the_client_waits_for() -> None:
    said = recorded("legacy-stopped")["/api/v1/pipelines/pl_unknown"]
    assert said == {"error": 404, "body": '{"error":"Pipeline not found"}'}


def test_a_directory_without_sources_knows_nothing() -> None:
    (answer,) = JobDirectory().look_up([JobPaths(JobId("x"))])
    assert (answer.facts.condition, answer.reason) == (
        JobCondition.UNKNOWN,
        "no job-status source is configured",
    )
