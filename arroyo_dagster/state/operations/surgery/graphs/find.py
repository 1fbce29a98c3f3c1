"""The graphs of the pipelines of two jobs: from Arroyo's API or database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from arroyo_dagster.errors import ArroyoStateError, InputError
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.ids import OperatorId, PipelineId
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.surgery.graphs import PipelineGraph, StoredGraph
from arroyo_dagster.state.model.surgery.plans import EditPrecondition
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
from arroyo_dagster.state.operations.surgery.graphs.decoding import decode_graph
from arroyo_dagster.state.planning.surgery.places import GraphPlace, place_operators

HOW = "pass --arroyo-api or --arroyo-db"


@runtime_checkable
class GraphSource(Protocol):
    """A source of job status that also has the graphs of pipelines."""

    source: str

    def pipeline_graph(self, pipeline: PipelineId) -> StoredGraph | None:
        """Return the graph of a pipeline; None = it has none."""


@dataclass(frozen=True, slots=True)
class FoundGraph:
    """The graph of one job's pipeline, or why it is not known."""

    paths: JobPaths
    graph: PipelineGraph | None = None
    why_not: str = "no source names its graph"


def find_graph(directory: JobDirectory, paths: JobPaths) -> FoundGraph:
    """Return the graph of a job's pipeline: the program of Arroyo's database, which names the
    operators, else that of its API. No problem of a source is an error here.
    """
    sources = [source for source in directory.sources if isinstance(source, GraphSource)]
    if not sources:
        return FoundGraph(paths)
    pipeline = directory.look_up([paths])[0].facts.pipeline
    if pipeline is None:
        return FoundGraph(paths, why_not="no source names its pipeline")
    problems: list[str] = []
    graphs: list[tuple[StoredGraph, str]] = []
    for source in sources:
        try:
            stored = source.pipeline_graph(pipeline)
        except ArroyoStateError as error:
            problems.append(str(error))
            continue
        if stored is not None:
            graphs.append((stored, f"pipeline {pipeline} at {source.source}"))
    for stored, origin in sorted(graphs, key=lambda graph: not isinstance(graph[0], bytes)):
        try:
            return FoundGraph(paths, decode_graph(stored, origin))
        except ArroyoStateError as error:
            problems.append(str(error))
    return FoundGraph(paths, why_not="; ".join(problems) or "no source names its graph")


def find_places(
    found: Sequence[FoundGraph], epochs: Sequence[Checkpoint]
) -> list[Mapping[OperatorId, GraphPlace]] | str:
    """Return the places of the operators of epochs in the graphs of their pipelines; a text = they
    are not known.

    Args:
        found: the graph of the pipeline of each epoch.
    """
    places: list[Mapping[OperatorId, GraphPlace]] = []
    missing: list[str] = []
    for job, checkpoint in zip(found, epochs, strict=True):
        if job.graph is None:
            missing.append(f"{job.paths.root}: {job.why_not}")
            continue
        placed = place_operators(job.graph, [state.operator for state in checkpoint.operators])
        if isinstance(placed, str):
            missing.append(
                f"{job.paths.root}: the graph of {job.graph.origin} is not that of epoch "
                f"{checkpoint.epoch}: {placed}"
            )
        else:
            places.append(placed)
    return "; ".join(missing) if missing else places


def check_same_graphs(
    found: Sequence[FoundGraph], taken: Checkpoint, job: JobPaths
) -> EditPrecondition | str:
    """Check that the pipelines of two jobs are of the same SQL, but for their sources and sinks.

    Args:
        found: the graphs of the source and of the job, whose epoch may not exist.
        taken: the epoch of the source.

    Returns:
        The evidence; a text = the graph of the job is not known.

    Raises:
        InputError: they differ; names the difference.
    """
    theirs, ours = (side.graph for side in found)
    if ours is None:
        return found[1].why_not
    difference = _difference(theirs, ours, [operator.operator for operator in taken.operators])
    if difference is not None:
        raise InputError(
            f"the jobs are not of the same SQL: {difference}",
            job=job.root,
            graph=ours.origin,
            next_step="create the job from the source's SQL; or, once the job has finished a "
            "checkpoint of its own, use `arroyo-state evolve`",
        )
    both = theirs is not None
    return EditPrecondition(
        name="the pipelines have the same graph" if both else "the pipeline has the operators",
        met=True,
        evidence=f"{len(taken.operators)} operators, from {ours.origin}",
    )


def _difference(
    theirs: PipelineGraph | None, ours: PipelineGraph, operators: Sequence[OperatorId]
) -> str | None:
    """Return how a graph differs from the operators of an epoch, or from the graph of another
    pipeline; None = it does not.
    """
    placed = place_operators(ours, operators)
    if isinstance(placed, str):
        return f"against the source's epoch, {placed} in the graph of the job"
    if theirs is None or isinstance(place_operators(theirs, operators), str):
        return None  # the source's pipeline was changed since
    for operator in operators:
        programs = [graph.programmed(operator) for graph in (theirs, ours)]
        configs = [None if program is None else program.config for program in programs]
        if not _is_end(operator) and None not in configs and configs[0] != configs[1]:
            return f"{operator} computes something else"
    edges = [
        {(_first(graph, e.source), _first(graph, e.target), e.kind) for e in graph.edges}
        for graph in (theirs, ours)
    ]
    if edges[0] != edges[1]:
        return "operators get their rows from other operators"
    parts = [_descriptions_between_ends(graph) for graph in (theirs, ours)]
    for number in sorted(parts[0].keys() & parts[1].keys()):
        there, here = parts[0][number], parts[1][number]
        if there and here and there != here:
            return f"operator {number} is called {here!r}, and {there!r} in the source"
    return None


def _is_end(operator: OperatorId) -> bool:
    return operator.startswith(("source_", "sink_"))


def _first(graph: PipelineGraph, number: int) -> int:
    return next(node.first for node in graph.nodes if node.number == number)


def _descriptions_between_ends(graph: PipelineGraph) -> dict[int, str]:
    """Return the descriptions of operators by their number, but for those of sources and sinks."""
    fed = {edge.target for edge in graph.edges}
    feeding = {edge.source for edge in graph.edges}
    descriptions: dict[int, str] = {}
    for node in graph.nodes:
        start = 0 if node.number in fed else 1
        end = len(node.parts) - (node.number not in feeding)
        descriptions |= {node.first + index: node.parts[index] for index in range(start, end)}
    return descriptions
