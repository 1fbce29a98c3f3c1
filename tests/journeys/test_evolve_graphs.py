"""An evolve of jobs with like windows, with the graphs of both pipelines: each window takes the
state of the one with its place, from files or Arroyo's API; without them the plan says so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.model.surgery.plans import EditPlan, TableAction
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory, open_directory
from arroyo_dagster.state.operations.surgery.evolve import plan_evolve, run_evolve
from arroyo_dagster.state.operations.surgery.execute import EditOptions
from arroyo_dagster.state.operations.surgery.graphs.decoding import decode_graph
from arroyo_dagster.state.operations.surgery.graphs.find import GivenGraphs
from arroyo_dagster.state.planning.surgery.places import operator_number
from arroyo_dagster.state.storage.wrappers import WriteProtected
from tests.arroyo_jobs import stopped
from tests.evolved_jobs import loaded
from tests.journeys.test_evolve import taken, two_windows
from tests.loopback import Reply, serving
from tests.surgery_jobs import SurgeryJob

pytestmark = pytest.mark.usefixtures("one_at_a_time")

SOURCE = "source_orders_40"
VIEWS = {f"view{at}": f"value_{at}" for at in (104, 114, 107, 117, 119)}
PARTS = {"tumbling": "TumblingWindow<w>", "join": "join", "watermark": "watermark"}
Jobs = tuple[SurgeryJob, SurgeryJob]


def graph_of(job: SurgeryJob, views: Mapping[str, str]) -> dict[str, Any]:
    """The pipeline of a job as a REST answer has it.

    Args:
        views: by operator the view that it reads; a sink with the next number comes after it, and
            every other operator directly after the source.
    """
    names = [str(one.operator) for one in ParquetBackend(job.store, job.paths).load().operators]
    numbers = {name: operator_number(name)[1] or (90 if "<" in name else 0) for name in names}
    called = {f"value_{100 + numbers[name]}": view for name, view in views.items()}
    nodes, edges = [], []
    for name, number in numbers.items():
        kind, _ = operator_number(name)
        part = "session_window_90" if number == 90 else PARTS.get(kind, kind)
        nodes.append({"node_id": number, "description": called.get(name, part)})
        before = numbers[SOURCE]
        if name in views:
            before = 100 + number
        elif number - 1 in [numbers[one] for one in views]:
            before = number - 1
        if not kind.startswith("source"):
            edges.append({"src_id": before, "dest_id": number, "edge_type": "Forward"})
    return {"id": f"pl_{job.job}", "graph": {"nodes": nodes, "edges": edges}}


WAS = {"tumbling_4": "paid", "tumbling_14": "open"}
NOW = {"tumbling_7": "open", "tumbling_17": "paid"}


def jobs_of(now: Mapping[str, str]) -> Jobs:
    """A with windows of the views `paid` and `open`; B with others."""
    sinks = [(name, f"sink_new_{(operator_number(name)[1] or 0) + 1}") for name in now]
    source, job, _ = two_windows(sinks, source=SOURCE, **VIEWS)
    return source, job


def given(source: SurgeryJob, job: SurgeryJob, now: Mapping[str, str]) -> GivenGraphs:
    return GivenGraphs(
        source=decode_graph(graph_of(source, WAS), "a.json"),
        job=decode_graph(graph_of(job, now), "b.json"),
    )


def plan(jobs: Jobs, graphs: GivenGraphs | None, directory: JobDirectory | None = None) -> EditPlan:
    source, job = jobs
    at = directory or stopped(job.paths)
    store = WriteProtected(job.store)
    return plan_evolve(taken(source), store, job.paths, at, graphs=graphs)


def windows(plan: EditPlan) -> dict[str, str]:
    pairs = {one.operator: one.source for one in plan.matches}
    return {str(b): str(a) for b, a in pairs.items() if b.startswith("tumbling")}


def test_like_windows_that_swapped_places_take_their_own_state() -> None:
    source, job = jobs = jobs_of(NOW)
    with pytest.raises(InputError, match="nothing shows which takes which") as refused:
        plan(jobs, None)
    assert "pass --arroyo-api or --arroyo-db" in str(refused.value)
    was = loaded(source.store, source.paths)
    graphs, options = given(source, job, NOW), EditOptions(quiet_seconds=0)
    shown = plan(jobs, graphs)
    outcome = run_evolve(
        taken(source), job.store, job.paths, stopped(job.paths), None, options, graphs
    )
    assert outcome.plan == shown
    assert windows(shown) == {"tumbling_7": "tumbling_14", "tumbling_17": "tumbling_4"}
    assert not [one for one in shown.unknown if "graphs" in one or "alike" in one]
    found = loaded(job.store, job.paths)
    assert found["tumbling_7", "t"] == was["tumbling_14", "t"]
    assert found["tumbling_17", "t"] == was["tumbling_4", "t"]
    (match,) = (one for one in shown.matches if one.operator == "tumbling_17")
    assert (
        "before it in the graph, with the source orders and 'source_orders' and 'paid' (20)"
        in match.why
    )
    assert match.score == sum(one.points for one in match.reasons)
    assert [one.evidence for one in shown.preconditions if "graphs" in one.name] == [
        "from a.json, b.json"
    ]


def test_a_window_that_was_added_or_removed_decides_nothing_about_the_others() -> None:
    more = {"tumbling_7": "new", "tumbling_17": "paid", "tumbling_19": "open"}
    source, job = jobs = jobs_of(more)
    with pytest.raises(InputError, match="nothing shows which takes which") as refused:
        plan(jobs, None)
    assert "no source names its graph" in str(refused.value)
    found = plan(jobs, given(source, job, more))
    assert windows(found) == {"tumbling_17": "tumbling_4", "tumbling_19": "tumbling_14"}
    emptied = [one.operator for one in found.tables if one.action is TableAction.EMPTIED]
    assert emptied == ["tumbling_7"]
    fewer = {"tumbling_7": "open"}
    source, job = jobs = jobs_of(fewer)
    found = plan(jobs, given(source, job, fewer))
    assert windows(found) == {"tumbling_7": "tumbling_14"}
    dropped = [one.operator for one in found.tables if one.action is TableAction.DROPPED]
    assert dropped == ["tumbling_4"]


def test_graphs_that_show_no_difference_leave_it_to_a_person() -> None:
    same = {"tumbling_7": "x", "tumbling_17": "y"}
    for now in (same, {**same, "tumbling_19": "z"}):
        source, job = jobs = jobs_of(now)
        with pytest.raises(InputError, match="nothing shows which takes which") as refused:
            plan(jobs, given(source, job, now))
        assert "graphs=known" in str(refused.value)


def test_the_graph_of_another_job_is_refused_and_changes_nothing() -> None:
    source, job = jobs = jobs_of(NOW)
    right = given(source, job, NOW)
    for graphs, text in (
        (GivenGraphs(source=right.job, job=right.source), "the graph of b.json is not that of"),
        (GivenGraphs(source=right.source, job=right.source), "the graph of a.json is not that of"),
        (GivenGraphs(job=right.source), "the graph of a.json is not that of"),
    ):
        with pytest.raises(InputError, match=text):
            plan(jobs, graphs)
    with pytest.raises(InputError, match="nothing shows which takes which") as refused:
        plan(jobs, GivenGraphs(source=right.source))
    assert "job_b: no source names its graph" in str(refused.value)


@pytest.fixture
def api(request: pytest.FixtureRequest) -> Iterator[tuple[Jobs, JobDirectory]]:
    """Arroyo's API of both pipelines, of which one may have the graph of another."""
    source, job = jobs = jobs_of(NOW)
    other = graph_of(source, WAS) if request.param else graph_of(job, NOW)
    graphs = [graph_of(source, WAS), other]
    pipelines = [
        {**graph, "id": f"pl_{one.job}", "name": "p", "stop": "none", "created_at": 1}
        for graph, one in zip(graphs, jobs, strict=True)
    ]
    listed = [
        {"id": one.job, "pipeline_id": f"pl_{one.job}", "state": "Stopped", "run_id": 1}
        for one in jobs
    ]
    answers = {f"/api/v1/pipelines/{one['id']}": one for one in pipelines}

    def answer(path: str, query: dict[str, str]) -> Reply:
        if path == "/api/v1/jobs":
            return Reply(body={"data": listed})
        if path == "/api/v1/pipelines":
            return Reply(body={"data": pipelines, "hasMore": False})
        if path.endswith("/checkpoints"):
            return Reply(body={"data": []})
        return Reply(body=answers[path])

    with serving(answer) as server:
        yield jobs, open_directory(api=server.url)


@pytest.mark.parametrize("api", [False, True], indirect=True, ids=["fits", "of-another"])
def test_arroyos_api_has_the_graphs(
    api: tuple[Jobs, JobDirectory], request: pytest.FixtureRequest
) -> None:
    jobs, directory = api
    if request.node.callspec.id == "fits":
        found = plan(jobs, None, directory)
        assert windows(found) == {"tumbling_7": "tumbling_14", "tumbling_17": "tumbling_4"}
        return
    with pytest.raises(InputError, match="nothing shows which takes which") as refused:
        plan(jobs, None, directory)
    assert "is not that of epoch" in str(refused.value)
