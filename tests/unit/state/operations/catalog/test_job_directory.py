"""A directory answers for every job, whatever its sources do; asking for one gets the error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from arroyo_dagster import JobId, JobPaths, PipelineId
from arroyo_dagster.errors import InputError
from arroyo_dagster.state.operations.catalog.job_directory import read_assumed
from tests.compat.arroyo import DATA
from tests.formats import JobCondition
from tests.internals import AssumedJobs, open_directory
from tests.loopback import replaying, serving

JOINS = JobPaths(JobId("job_d14OMmRXhf"))
OTHER = JobPaths(JobId("main"), PipelineId("words"))


def test_the_server_outranks_its_database_which_outranks_the_user() -> None:
    with serving(replaying("legacy-running")) as server:
        directory = open_directory(
            api=server.url,
            database=str(DATA / "state-legacy.sqlite"),
            assumed={JOINS.job: {"condition": "failed", "run_id": 7, "name": "mine", "epoch": 3}},
        )
        answer = directory.find(JOINS)
        assert len(server.paths) == 3
        assert len(directory.look_up([JOINS])[0].disagreements) == 4
        assert len(server.paths) == 5  # asked anew, without the epochs
    assert (answer.facts.condition, answer.facts.run_id) == (JobCondition.RUNNING, 1)
    assert (answer.facts.name, answer.facts.newest_ready_epoch) == ("joins", 13)
    assert {one.fact: len(one.answers) for one in answer.disagreements} == {
        "condition": 3,
        "name": 3,
        "run_id": 3,
        "newest_ready_epoch": 3,
    }


# ---- the user's word -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "condition"),
    [
        ("stopped", JobCondition.STOPPED),
        ("Stopped", JobCondition.STOPPED),
        ("GONE", JobCondition.GONE),
        ("unknown", JobCondition.UNKNOWN),
        ("Recovering", JobCondition.CHANGING),
        ({"condition": "finished"}, JobCondition.FINISHED),
        ({"name": "orders"}, JobCondition.UNKNOWN),
        ({}, JobCondition.UNKNOWN),
    ],
)
def test_the_user_may_say_it_in_several_ways(said: Any, condition: JobCondition) -> None:
    (word,) = AssumedJobs({"words/main": said}).look_up([OTHER])
    assert word.facts is not None
    assert (word.facts.condition, word.facts.pipeline) == (condition, "words")


def test_a_whole_path_counts_before_a_job_s_id() -> None:
    said = AssumedJobs({"main": "running", "words/main": "stopped"})
    words = said.look_up([OTHER, JobPaths(JobId("main"), PipelineId("w")), JOINS])
    assert [word.facts and word.facts.condition for word in words] == [
        JobCondition.STOPPED,
        JobCondition.RUNNING,
        None,
    ]


@pytest.mark.parametrize(
    "said",
    [
        "asleep",
        "",
        7,
        ["stopped"],
        {"condition": 3},
        {"state": "stopped"},
        {"run_id": "1"},
        {"run_id": True},
        {"epoch": -1},
        {"name": 3},
    ],
)
def test_what_cannot_be_said_is_refused(said: Any) -> None:
    with pytest.raises(InputError) as caught:
        AssumedJobs({"main": said})
    assert caught.value.facts["job"] == "main"


def test_a_file_of_words(tmp_path: Path) -> None:
    path = tmp_path / "said.json"
    path.write_text(json.dumps({"main": "stopped"}))
    assert read_assumed(path) == {"main": "stopped"}
    for text in ("", "[1]", "{", "\x00"):
        path.write_text(text)
        with pytest.raises(InputError):
            read_assumed(path)
    with pytest.raises(InputError):
        read_assumed(tmp_path / "missing")
    with pytest.raises(InputError):
        read_assumed(tmp_path)
