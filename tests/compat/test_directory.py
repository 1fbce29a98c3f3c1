"""What a real Arroyo's REST API and database said of the jobs whose state lies beside them, their
graphs included; what is damaged or of another pipeline is refused."""

from __future__ import annotations

import copy
import sqlite3
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from arroyo_dagster import OperatorId, ParquetBackend
from arroyo_dagster.errors import FormatError
from arroyo_dagster.state import JobId, JobPaths, PipelineId, list_jobs, open_store
from arroyo_dagster.state.model.surgery.graphs import StoredGraph
from arroyo_dagster.state.operations.surgery.graphs.find import (
    FoundGraph,
    decode_graph,
    find_graph,
    find_places,
)
from arroyo_dagster.state.planning.surgery.places import GraphPlace, place_operators
from arroyo_dagster.state.storage.arroyo.api import ArroyoApi
from tests.compat.arroyo import DATA, description, unpack
from tests.formats import JobCondition
from tests.internals import JobDirectory, open_directory
from tests.loopback import Reply, recorded, replaying, serving
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


TUMBLE = "/api/v1/pipelines/pl_TMQwrwDW3K"
OPERATORS = ("source_impulse_0", "value_1", "watermark_2", "key_3", "tumbling_4", "value_5")
OF_TUMBLE = [OperatorId(one) for one in (*OPERATORS, "sink_out_t_6")]


def rest(path: str = TUMBLE) -> dict[str, Any]:
    answer: dict[str, Any] = copy.deepcopy(recorded("legacy-stopped")[path])
    return answer


def programs() -> dict[str, bytes]:
    with sqlite3.connect(f"file:{DATABASE}?mode=ro&immutable=1", uri=True) as database:
        return dict(database.execute("SELECT pub_id, program FROM pipelines"))


def placed(
    stored: StoredGraph, operators: list[OperatorId]
) -> Mapping[OperatorId, GraphPlace] | str:
    return place_operators(decode_graph(stored, "test"), operators)


@pytest.mark.parametrize("cluster", ["legacy", "leader"])
def test_every_operator_of_an_epoch_has_a_place(cluster: str, tmp_path: Path) -> None:
    store = open_store(unpack(cluster, tmp_path))
    answers = recorded(f"{cluster}-stopped")
    for job, pipeline, *_ in LEGACY if cluster == "legacy" else LEADER:
        paths = JobPaths(JobId(job), None if cluster == "legacy" else pipeline)  # type: ignore[arg-type]
        operators = [one.operator for one in ParquetBackend(store, paths).load().operators]
        found = placed(answers[f"/api/v1/pipelines/{pipeline}"], operators)
        assert not isinstance(found, str), found
        assert set(found) == set(operators)
        if cluster == "legacy":
            program = placed(programs()[pipeline], operators)
            assert not isinstance(program, str)
            assert {name: one.ends for name, one in program.items()} == {
                name: one.ends for name, one in found.items()
            }


def test_a_join_is_known_by_its_views() -> None:
    found = decode_graph(programs()["pl_zbN4vGHGrP"], "test")
    operators = [one for node in found.nodes for one in node.operators]
    places = place_operators(found, operators)
    assert not isinstance(places, str)
    join = places[OperatorId("join_7")]
    assert {"the source nexmark", "'auctions'", "'bids'"} <= join.before
    assert join.ends == (frozenset({"the source nexmark"}), frozenset({"the sink out_j"}))


def test_the_program_of_the_database_is_preferred_to_the_answer_of_the_api() -> None:
    paths = JobPaths(JobId("job_mSLGII6lDN"), None)
    with serving(replaying("legacy-stopped")) as server:
        both = open_directory(api=server.url, database=DATABASE)
        program = find_graph(both, paths).graph
        assert program is not None
        assert program.nodes[0].operators == ("source_impulse_0",)
        answer = find_graph(open_directory(api=server.url), paths).graph
        assert answer is not None
        assert (answer.nodes[0].operators, server.url in answer.origin) == ((), True)
    assert find_graph(open_directory(), paths).graph is None
    other = JobPaths(JobId("job_gone"), None)
    assert find_graph(open_directory(database=DATABASE), other).graph is None


def test_a_source_that_has_no_graph_or_fails_is_no_error() -> None:
    paths = JobPaths(JobId("job_mSLGII6lDN"), None)
    without = {key: one for key, one in rest().items() if key != "graph"}
    for reply, text in (
        (Reply(body=without), "no source names its graph"),
        (Reply(503, {"error": "busy"}), "503"),
        (Reply(body={"graph": {"nodes": [], "edges": []}}), "it has no nodes"),
    ):
        changed = {"/pipelines/pl_TMQwrwDW3K": reply}
        with serving(replaying("legacy-stopped", changed)) as server:
            found = find_graph(open_directory(api=server.url), paths)
        assert found.graph is None
        assert text in found.why_not
    database = ArroyoDatabase(DATABASE)
    assert database.pipeline_graph("pl_none") is None  # type: ignore[arg-type]


# ---- graphs that are damaged, or of another pipeline ---------------------------------------------


def with_edge(source: Any, target: Any) -> Callable[[dict[str, Any]], None]:
    def change(graph: dict[str, Any]) -> None:
        graph["edges"].append({**graph["edges"][0], "src_id": source, "dest_id": target})

    return change


def hostile(graph: dict[str, Any]) -> None:
    graph["nodes"][0]["description"] = " -> ".join(["x"] * 1001)


DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "no nodes": (lambda graph: graph["nodes"].clear(), "it has no nodes"),
    "a node twice": (lambda graph: graph["nodes"].append(graph["nodes"][1]), "it has 1 twice"),
    "a cycle": (with_edge(4, 1), "it has a cycle"),
    "a node that feeds itself": (with_edge(4, 4), "it has a cycle"),
    "an edge to nowhere": (with_edge(4, 99), "the node 99, which it does not have"),
    "an edge of text": (with_edge("4", 1), "should be a whole number"),
    "no edges": (lambda graph: graph.pop("edges"), "field edges should be a list"),
    "too many operators": (hostile, "it has 1007 operators, more than 1000"),
    "a negative number": (lambda graph: graph["nodes"][0].update(node_id=-1), "whole number"),
    "no description": (lambda graph: graph["nodes"][0].pop("description"), "should be a string"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_graph_is_refused(name: str) -> None:
    damage, message = DAMAGES[name]
    answer = rest()
    damage(answer["graph"])
    with pytest.raises(FormatError, match=message) as refused:
        decode_graph(answer, "the API")
    assert refused.value.facts["path"] == "the API"


def test_a_damaged_program_is_refused() -> None:
    whole = programs()["pl_TMQwrwDW3K"]
    refused = 0
    for end in range(0, len(whole), 97):
        try:
            found = placed(whole[:end], OF_TUMBLE)
        except FormatError:
            refused += 1
        else:
            assert isinstance(found, str)
    assert refused > 0
    with pytest.raises(FormatError):
        decode_graph(whole + whole, "test")  # every node twice
    with pytest.raises(FormatError):
        decode_graph(b"\xff" * 40, "test")


def test_the_graph_of_another_pipeline_does_not_fit() -> None:
    """Also of one of the same shape, whose operators are of other kinds."""
    answers = [one for path, one in recorded("legacy-stopped").items() if "graph" in one]
    fits = [one["name"] for one in answers if not isinstance(placed(one, OF_TUMBLE), str)]
    assert fits == ["tumble"]
    for changed, message in (
        ([*OF_TUMBLE, OperatorId("join_9")], "join_9 of the epoch is not in it"),
        ([*OF_TUMBLE, OperatorId("SessionWindow<4s>")], "SessionWindow<4s> of the epoch is not"),
        (OF_TUMBLE[:-1], "the epoch has no operator for FileSystemSinkV1"),
        ([*OF_TUMBLE[1:], OperatorId("sink_x_0")], "sink_x_0 of the epoch is no end there"),
        ([*OF_TUMBLE[:-1], OperatorId("source_x_6")], "source_x_6 of the epoch gets rows there"),
    ):
        assert message in str(placed(rest(), changed))
    program = programs()["pl_TMQwrwDW3K"]
    assert "the epoch has no operator for sink_out_t_6" in str(placed(program, OF_TUMBLE[:-1]))


def test_a_graph_of_another_pipeline_is_left_out(tmp_path: Path) -> None:
    store = open_store(unpack("legacy", tmp_path))
    paths = JobPaths(JobId("job_mSLGII6lDN"), None)
    epoch = ParquetBackend(store, paths).load()
    mine = FoundGraph(paths, decode_graph(rest(), "mine"))
    other = FoundGraph(paths, decode_graph(rest("/api/v1/pipelines/pl_zbN4vGHGrP"), "other"))
    assert not isinstance(find_places((mine, mine), (epoch, epoch)), str)
    text = find_places((mine, other), (epoch, epoch))
    assert "the graph of other is not that of epoch 13" in str(text)
