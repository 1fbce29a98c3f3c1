"""Arroyo's REST API as a loopback server plays it: old ones, large ones, odd ones, broken ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from arroyo_dagster.errors import (
    ArroyoStateError,
    FormatError,
    InputError,
    NotFoundError,
    StorageError,
)
from arroyo_dagster.state import JobId, JobPaths, PipelineId
from arroyo_dagster.state.storage.arroyo import api as arroyo_api
from arroyo_dagster.state.storage.arroyo.api import ArroyoApi
from tests.formats import Absence, JobCondition
from tests.loopback import Reply, recorded, replaying, serving

JOINS = JobPaths(JobId("job_d14OMmRXhf"))
JOINS_PIPELINE = PipelineId("pl_zbN4vGHGrP")
NAMES = {"joins", "tumble", "auctions", "sessions"}


def listed(edit: Callable[[dict[str, Any]], None], path: str = "/jobs") -> dict[str, Reply]:
    """The recorded answer at `path`, its items edited."""
    answer = copy.deepcopy(recorded("legacy-stopped")[f"/api/v1{path}"])
    for one in answer["data"]:
        edit(one)
    return {path: Reply(body=answer)}


def test_names_survive_pages_that_lose_pipelines(monkeypatch: pytest.MonkeyPatch) -> None:
    # tumble and auctions were created in the same second, so a page of one loses one of them.
    monkeypatch.setattr(arroyo_api, "_PAGE", 1)
    with serving(replaying("legacy-stopped")) as server:
        api = ArroyoApi(server.url)
        jobs = api.jobs()
        assert None in {facts.name for facts in jobs.values()}
        words = api.look_up([JobPaths(job) for job in jobs])
    assert {word.facts.name for word in words if word.facts} == NAMES


def test_pages_that_go_round_come_to_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    same = recorded("legacy-stopped")["/api/v1/pipelines"] | {"hasMore": True}
    for body in (same, {"data": [], "hasMore": True}):
        with serving(_pages(body)) as server:
            with pytest.raises(FormatError, match="does not end: a page repeats an earlier"):
                ArroyoApi(server.url).jobs()
            assert len(server.paths) < 5
    monkeypatch.setattr(arroyo_api, "_MAX_PAGES", 7)
    with serving(_endless_pages) as server:
        with pytest.raises(FormatError, match="more than 7 pages"):
            ArroyoApi(server.url).jobs()
        assert len(server.paths) == 8


def _pages(body: Any) -> Callable[[str, dict[str, str]], Reply]:
    def answer(path: str, query: dict[str, str]) -> Reply:
        return Reply(body=body if path.endswith("/pipelines") else {"data": []})

    return answer


def _endless_pages(path: str, query: dict[str, str]) -> Reply:
    if path.endswith("/jobs"):
        return Reply(body={"data": []})
    name = query.get("starting_after", "p") + "x"
    return Reply(body={"data": [{"id": name, "name": name}], "hasMore": True})


def test_a_server_before_0_16_does_not_say_whose_a_job_is() -> None:
    def older(one: dict[str, Any]) -> None:
        del one["pipeline_id"], one["failure_reason"]
        one["failure_message"] = "out of memory"

    changed = listed(older)
    for path in recorded("legacy-stopped"):
        short = path.removeprefix("/api/v1")
        if short.endswith("/jobs") and short != "/jobs":
            changed |= listed(older, short)
    with serving(replaying("legacy-stopped", changed)) as server:
        (word,) = ArroyoApi(server.url).look_up([JOINS], checkpoints=True)
    assert word.facts is not None
    assert (word.facts.name, word.facts.pipeline) == ("joins", JOINS_PIPELINE)
    assert (word.facts.failure, word.facts.newest_ready_epoch) == ("out of memory", 14)


def test_a_job_that_is_not_listed_is_asked_for_through_its_pipeline() -> None:
    preview = recorded("legacy-stopped")["/api/v1/jobs"]["data"][0] | {"id": "job_preview"}
    changed = {
        "/pipelines/pl_preview/jobs": Reply(body={"data": [preview]}),
        "/pipelines/pl_preview": Reply(body={"name": "preview", "preview": True}),
        "/pipelines/pl_proxy/jobs": Reply(404, b"<html>gateway</html>"),
    }
    asked = [
        JobPaths(JobId("job_preview"), PipelineId("pl_preview")),
        JobPaths(JobId("job_replaced"), JOINS_PIPELINE),
        JobPaths(JobId("job_x"), PipelineId("pl_deleted")),
        JobPaths(JobId("job_x")),
        JobPaths(JobId("job_x"), PipelineId("pl_proxy")),
        JobPaths(JOINS.job, PipelineId("pl_another")),
        JobPaths(JobId("a/../b"), PipelineId("..%2F..")),
    ]
    with serving(replaying("legacy-stopped", changed)) as server:
        words = ArroyoApi(server.url).look_up(asked)
        assert all(path.startswith("/api/v1/") for path in server.paths)
    assert words[0].facts is not None
    assert words[0].facts.name == "preview"
    assert [word.absence for word in words[1:]] == [
        Absence.NO_JOB,
        Absence.NO_PIPELINE,
        Absence.NOT_LISTED,
        None,
        Absence.NO_PIPELINE,
        Absence.NO_PIPELINE,
    ]
    # A gateway's 404 is no proof that a pipeline is gone.
    assert isinstance(words[4].problem, NotFoundError)


def test_what_fails_for_one_job_leaves_the_others_and_what_is_known_of_it() -> None:
    path = f"/pipelines/{JOINS_PIPELINE}/jobs/{JOINS.job}/checkpoints"
    with serving(replaying("legacy-stopped", {path: Reply(500, {})})) as server:
        api = ArroyoApi(server.url)
        words = api.look_up([JobPaths(job) for job in api.jobs()], checkpoints=True)
    (broken,) = [word for word in words if word.problem is not None]
    assert broken.facts is not None
    assert (broken.facts.job, broken.facts.condition) == (JOINS.job, JobCondition.STOPPED)
    assert broken.facts.newest_ready_epoch is None
    assert all(word.facts and word.facts.newest_ready_epoch for word in words if not word.problem)


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (Reply(401, {"error": "no"}), InputError),
        (Reply(403, {}), InputError),
        (Reply(404, {"error": "Route not found"}), InputError),
        (Reply(500, {}), StorageError),
        (Reply(body=b"{"), StorageError),
        (Reply(body=[]), FormatError),
        (Reply(body={}), FormatError),
        (Reply(body={"data": None}), FormatError),
        (Reply(body={"data": {}}), FormatError),
        (Reply(body={"data": [3]}), FormatError),
        (Reply(body={"data": [{"id": "x"}]}), FormatError),
        (Reply(body={"data": [{"id": 3, "state": "Running"}]}), FormatError),
        (Reply(body={"data": [{"id": "", "state": "Running"}]}), FormatError),
    ],
)
@pytest.mark.parametrize("path", ["/jobs", "/pipelines"])
def test_a_list_that_cannot_be_had_is_a_typed_error(path: str, reply: Reply, kind: type) -> None:
    answer = replaying("legacy-stopped")

    def changed(asked: str, query: dict[str, str]) -> Reply:
        return reply if asked == f"/api/v1{path}" else answer(asked, query)

    with serving(changed) as server, pytest.raises(ArroyoStateError) as caught:
        ArroyoApi(server.url).jobs()
    expected = NotFoundError if path == "/pipelines" and reply.status == 404 else kind
    assert type(caught.value) is expected
    assert str(caught.value.facts["url"]).startswith(server.url)


@pytest.mark.parametrize(
    "wrong",
    [
        {"run_id": "1"},
        {"run_id": -1},
        {"run_id": True},
        {"run_id": 1.0},
        {"run_id": 1 << 63},
        {"state": None},
        {"start_time": "today"},
        {"running_desired": "yes"},
        {"pipeline_id": 7},
    ],
)
def test_a_field_of_another_type_is_a_format_error(wrong: dict[str, Any]) -> None:
    changed = listed(lambda one: one.update(wrong))
    name = next(iter(wrong))
    with (
        serving(replaying("legacy-stopped", changed)) as server,
        pytest.raises(FormatError, match=name) as caught,
    ):
        ArroyoApi(server.url).jobs()
    assert caught.value.facts["url"] == f"{server.url}/api/v1/jobs"
