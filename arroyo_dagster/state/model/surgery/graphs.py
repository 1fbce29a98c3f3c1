"""The graph of a pipeline: which operators there are, and which feeds which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from arroyo_dagster.state.model.ids import OperatorId

StoredGraph = bytes | Mapping[str, Any]
"""A graph as Arroyo gives it: the program of its database, or the pipeline of a REST answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphNode:
    """A task of a pipeline: one operator, or several chained ones.

    Attributes:
        number: identifies the node in its graph.
        first: the number in the id of its first operator; those of the others follow.
        parts: Arroyo's description of each operator, in order.
        operators: their ids; empty = the graph does not name them, as that of a REST answer.
        configs: a digest of what the SQL says of each, as `operators`; None = it holds the number
            of the operator, so that equal SQL gives another one.
        kinds: Arroyo's name of the kind of each, as `operators`.
        slides: of each the slide of its windows in microseconds; None = it has none.
    """

    number: int
    first: int
    parts: tuple[str, ...]
    operators: tuple[OperatorId, ...] = ()
    configs: tuple[str | None, ...] = ()
    kinds: tuple[str, ...] = ()
    slides: tuple[int | None, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphEdge:
    """Rows go from one node to another.

    Attributes:
        source, target: the numbers of the nodes.
        kind: "forward", "shuffle", "left join" or "right join".
    """

    source: int
    target: int
    kind: str


@dataclass(frozen=True, slots=True)
class ProgrammedOperator:
    """What the program of a pipeline says of one operator; see `GraphNode`."""

    kind: str
    config: str | None
    slide_micros: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineGraph:
    """The graph of a pipeline, without cycles.

    Attributes:
        origin: where it was read, for people.
    """

    origin: str
    nodes: tuple[GraphNode, ...]
    edges: tuple[GraphEdge, ...]

    def programmed(self, operator: OperatorId) -> ProgrammedOperator | None:
        """Return what the program says of an operator; None = the graph does not name it."""
        for node in self.nodes:
            if operator in node.operators:
                i = node.operators.index(operator)
                return ProgrammedOperator(node.kinds[i], node.configs[i], node.slides[i])
        return None
