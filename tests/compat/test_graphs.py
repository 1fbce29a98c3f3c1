"""The graphs that a real Arroyo stored and answered with: each operator of its epochs has a place
in them, and a graph that is damaged or of another pipeline is refused."""

from __future__ import annotations

import copy
import sqlite3
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from arroyo_dagster import JobId, JobPaths, OperatorId, ParquetBackend, open_store
from arroyo_dagster.errors import FormatError
from arroyo_dagster.state.model.surgery.graphs import StoredGraph
from arroyo_dagster.state.operations.surgery.graphs.find import (
    FoundGraph,
    decode_graph,
    find_graph,
    find_places,
)
from arroyo_dagster.state.planning.surgery.places import GraphPlace, place_operators
from tests.compat.arroyo import DATA, unpack
from tests.compat.test_directory import LEADER, LEGACY
from tests.internals import open_directory
from tests.loopback import Reply, recorded, replaying, serving
from tests.stores import ArroyoDatabase

DATABASE = str(DATA / "state-legacy.sqlite")
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
