"""The graphs of the pipelines of two jobs: from Arroyo's API or database."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any, Protocol, runtime_checkable

from arroyo_dagster.errors import ArroyoStateError, FormatError, InputError
from arroyo_dagster.state.codec.wire import fields_of_message
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.ids import OperatorId, PipelineId
from arroyo_dagster.state.model.json_fields import MAX_I64, Fields
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.surgery.graphs import (
    GraphEdge,
    GraphNode,
    PipelineGraph,
    StoredGraph,
)
from arroyo_dagster.state.model.surgery.plans import EditPrecondition
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
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


# ---- decoding ------------------------------------------------------------------------------------
# The graph of a pipeline, from the program in Arroyo's database and from answers of its REST API.
#
# Source: crates/arroyo-rpc/proto/api.proto, `ArrowProgram` (read from the programs that a real
# Arroyo stored); crates/arroyo-rpc/src/api_types/pipelines.rs (arroyo-state.md 10.3 and 10.4).

MAX_OPERATORS = 1_000
"""The maximum number of operators of a graph that is read."""
_CHAINED = " -> "
_SLIDING = "SlidingWindowAggregate"
_NEXT = "check that this is the API of Arroyo; if it is, report its version"
_KINDS = {1: "forward", 2: "shuffle", 3: "left join", 4: "right join"}
_REST_KINDS = {
    "Forward": "forward",
    "Shuffle": "shuffle",
    "LeftJoin": "left join",
    "RightJoin": "right join",
}


def decode_graph(stored: StoredGraph, origin: str) -> PipelineGraph:
    """Decode a graph, and check it.

    Args:
        origin: where it was read.

    Raises:
        FormatError: it has no nodes, or more than `MAX_OPERATORS` operators; a node twice; an edge
            of a node that it does not have; a cycle; or another form.
    """
    if isinstance(stored, Mapping):
        nodes, edges = _from_rest(stored, origin)
    else:
        nodes, edges = _from_program(stored, origin)
    _check(nodes, edges, origin)
    return PipelineGraph(origin=origin, nodes=nodes, edges=edges)


def _check(nodes: Sequence[GraphNode], edges: Sequence[GraphEdge], origin: str) -> None:
    numbers = Counter(node.number for node in nodes)
    named = Counter(operator for node in nodes for operator in node.operators)
    unknown = [end for edge in edges for end in (edge.source, edge.target) if end not in numbers]
    twice = [key for counts in (numbers, named) for key, times in counts.items() if times > 1]
    problem = None
    if not nodes:
        problem = "it has no nodes"
    elif (count := sum(len(node.parts) for node in nodes)) > MAX_OPERATORS:
        problem = f"it has {count} operators, more than {MAX_OPERATORS}"
    elif not all(node.parts for node in nodes):
        problem = "a node has no operators"
    elif twice:
        problem = f"it has {twice[0]} twice"
    elif unknown:
        problem = f"an edge names the node {unknown[0]}, which it does not have"
    else:
        before: dict[int, set[int]] = {node.number: set() for node in nodes}
        for edge in edges:
            before[edge.target].add(edge.source)
        try:
            TopologicalSorter(before).prepare()
        except CycleError:
            problem = "it has a cycle"
    if problem is not None:
        raise FormatError(
            f"this is no graph of a pipeline: {problem}", path=origin, next_step=_NEXT
        )


# ---- REST ----------------------------------------------------------------------------------------


def _from_rest(
    answer: Mapping[str, Any], origin: str
) -> tuple[tuple[GraphNode, ...], tuple[GraphEdge, ...]]:
    graph = Fields(answer, next_step=_NEXT, path=origin).object("graph")
    nodes = tuple(_rest_node(node) for node in graph.objects("nodes"))
    return nodes, tuple(_rest_edge(edge) for edge in graph.objects("edges"))


def _rest_node(node: Fields) -> GraphNode:
    number = node.number("node_id", largest=MAX_I64)
    parts = tuple(node.text("description").split(_CHAINED))
    return GraphNode(number=number, first=number, parts=parts)


def _rest_edge(edge: Fields) -> GraphEdge:
    kind = edge.text("edge_type")
    return GraphEdge(
        source=edge.number("src_id", largest=MAX_I64),
        target=edge.number("dest_id", largest=MAX_I64),
        kind=_REST_KINDS.get(kind, kind),
    )


# ---- the program ---------------------------------------------------------------------------------


def _from_program(data: bytes, origin: str) -> tuple[tuple[GraphNode, ...], tuple[GraphEdge, ...]]:
    try:
        program = _Message(data)
        nodes = tuple(_program_node(_Message(message)) for message in program.all_bytes(1))
        edges = tuple(_program_edge(_Message(message)) for message in program.all_bytes(2))
    except (FormatError, UnicodeDecodeError) as error:
        raise FormatError(
            "this is no program of a pipeline",
            path=origin,
            next_step="check that this is the database of Arroyo's controller; if it is, report "
            "its version",
        ) from error
    return nodes, edges


def _program_node(node: _Message) -> GraphNode:
    first = node.number(2)
    operators = [_Message(data) for data in node.all_bytes(5)]
    parts = tuple(node.text(4).split(_CHAINED))
    if len(parts) != len(operators):
        parts = ("",) * len(operators)
    return GraphNode(
        number=node.number(1),
        first=first,
        parts=parts,
        operators=tuple(OperatorId(operator.text(1)) for operator in operators),
        configs=tuple(_config(operator, first + index) for index, operator in enumerate(operators)),
        kinds=tuple(operator.text(2) for operator in operators),
        slides=tuple(map(_slide, operators)),
    )


def _slide(operator: _Message) -> int | None:
    if operator.text(2) != _SLIDING:
        return None
    return _Message(operator.bytes(3)).number(3)


def _config(operator: _Message, number: int) -> str | None:
    config = operator.bytes(3)
    if re.search(rb"_%d(?!\d)" % number, config) is not None:
        return None
    name = operator.text(2).encode()
    return hashlib.blake2b(name + b"\0" + config, digest_size=16).hexdigest()


def _program_edge(edge: _Message) -> GraphEdge:
    kind = edge.number(5)
    return GraphEdge(source=edge.number(1), target=edge.number(2), kind=_KINDS.get(kind, str(kind)))


class _Message:
    """The fields of a protobuf message by their numbers; absent ones have proto3's defaults."""

    def __init__(self, data: bytes) -> None:
        self._fields = fields_of_message(data)

    def _all(self, field: int, kind: type) -> Iterator[Any]:
        for number, value in self._fields:
            if number == field:
                if not isinstance(value, kind):
                    raise FormatError(f"field {field} is no {kind.__name__}")
                yield value

    def all_bytes(self, field: int) -> list[bytes]:
        return list(self._all(field, bytes))

    def bytes(self, field: int) -> bytes:
        return next(reversed(self.all_bytes(field)), b"")

    def text(self, field: int) -> str:
        return self.bytes(field).decode()

    def number(self, field: int) -> int:
        return next(reversed(list(self._all(field, int))), 0)
