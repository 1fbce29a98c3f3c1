"""An evolve of jobs with like windows, with the graphs of both pipelines from Arroyo's API: only
windows in equal places match by themselves; for others the place decides what is suggested."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from arroyo_dagster import ParquetBackend, WriteProtected
from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.surgery.plans import EditPlan
from arroyo_dagster.state.planning.surgery.places import operator_number
from tests.arroyo_jobs import stopped
from tests.evolved_jobs import SUGGESTED, loaded
from tests.internals import (
    EditOptions,
    JobDirectory,
    open_directory,
    parse_overrides,
    plan_evolve,
    run_evolve,
)
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
SINKS = {"tumbling_4": "sink_y_5", "tumbling_14": "sink_x_15"}


def jobs_of(now: Mapping[str, str], sinks: Mapping[str, str] = {}) -> Jobs:
    """A with windows of the views `paid` before sink x and `open` before sink y; B with others."""
    new = {name: f"sink_new_{(operator_number(name)[1] or 0) + 1}" for name in now}
    pairs = [(name, sinks.get(name, new[name])) for name in now]
    source, job, _ = two_windows(pairs, source=SOURCE, **VIEWS)
    return source, job


@contextlib.contextmanager
def api(jobs: Jobs, graphs: Sequence[dict[str, Any]]) -> Iterator[JobDirectory]:
    """Arroyo's API of the pipelines of both jobs, with such graphs."""
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
        yield open_directory(api=server.url)


def plan(jobs: Jobs, directory: JobDirectory | None = None, overrides: Any = None) -> EditPlan:
    source, job = jobs
    at = directory or stopped(job.paths)
    chosen = parse_overrides(overrides)
    return plan_evolve(taken(source), WriteProtected(job.store), job.paths, at, chosen)


def suggested(jobs: Jobs, now: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """The pairs that a refusal suggests if the graphs are known, and its text."""
    source, job = jobs
    with (
        api(jobs, [graph_of(source, WAS), graph_of(job, now)]) as directory,
        pytest.raises(InputError, match="do not match for certain") as refused,
    ):
        plan(jobs, directory)
    pairs = SUGGESTED.search(refused.value.next_step or "")
    assert pairs is not None
    return json.loads(pairs[1]), str(refused.value)


def test_like_windows_in_equal_places_match_by_themselves() -> None:
    now = {"tumbling_4": "open", "tumbling_14": "paid"}
    source, job = jobs = jobs_of(now, SINKS)
    with pytest.raises(InputError, match="do not match for certain") as refused:
        plan(jobs)
    assert "pass --arroyo-api or --arroyo-db" in str(refused.value)
    with api(jobs, [graph_of(source, WAS), graph_of(job, now)]) as directory:
        found = plan(jobs, directory)
    pairs = {str(one.operator): str(one.source) for one in found.matches}
    assert (pairs["tumbling_4"], pairs["tumbling_14"]) == ("tumbling_14", "tumbling_4")
    assert not [one for one in found.unknown if "graphs" in one]
    (evidence,) = (one.evidence for one in found.preconditions if "graphs" in one.name)
    assert "pipeline pl_job_a at" in evidence


def test_like_windows_with_other_targets_are_suggested_by_their_views() -> None:
    source, job = jobs = jobs_of(NOW)
    pairs, text = suggested(jobs, NOW)
    assert {"tumbling_14": "tumbling_7", "tumbling_4": "tumbling_17"}.items() <= pairs.items()
    assert "nothing shows which takes which" not in text
    was = loaded(source.store, source.paths)
    options = EditOptions(quiet_seconds=0)
    chosen = parse_overrides({"map": pairs})
    with api(jobs, [graph_of(source, WAS), graph_of(job, NOW)]) as directory:
        run_evolve(taken(source), job.store, job.paths, directory, chosen, options)
    found = loaded(job.store, job.paths)
    assert found["tumbling_7", "t"] == was["tumbling_14", "t"]
    assert found["tumbling_17", "t"] == was["tumbling_4", "t"]
