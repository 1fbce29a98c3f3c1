"""The place of each operator in the graph of its pipeline: by which names before and after it a
person recognizes it. Which operators match is decided in `matching`.

Source: docs/spec/arroyo-state.md 10.3 and 10.4; docs/spec/state-surgery.md, `Rules`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter

from arroyo_dagster.state.model.ids import OperatorId
from arroyo_dagster.state.model.surgery.graphs import PipelineGraph

_ID = re.compile(r"(?s)(.+?)_(\d+)(?:_1)?")
_PARTS = {
    "watermark": "watermark",
    "key": "ArrowKey",
    "join": "join",
    "tumbling": "TumblingWindow",
    "updating_aggregate": "UpdatingAggregate",
}
"""How Arroyo begins the description of operators of these kinds."""
_UNNAMED = "projection"
"""The end of descriptions that the SQL has given no name to."""
_MAX_CHARS = 60


@dataclass(frozen=True, slots=True)
class GraphPlace:
    """The place of one operator.

    Attributes:
        before: "the source X", and Arroyo's descriptions of operators (a view keeps its name
            there), of what comes before it and of itself.
        after: "the sink X" and descriptions of what comes after it.
        in_graph: whether a graph shows it; else the names are those that the numbers of the
            operators show.
    """

    before: frozenset[str] = frozenset()
    after: frozenset[str] = frozenset()
    in_graph: bool = False

    @property
    def ends(self) -> tuple[frozenset[str], frozenset[str]]:
        """The sources before it, and the sinks after it."""
        return (
            frozenset(name for name in self.before if name.startswith("the source ")),
            frozenset(name for name in self.after if name.startswith("the sink ")),
        )


NOWHERE = GraphPlace()
"""The place of an operator of which neither its number nor a graph shows one."""


def operator_number(operator: str) -> tuple[str, int | None]:
    """Return the kind of an operator and its number in the plan; None = its id has none."""
    parts = _ID.fullmatch(operator)
    return (operator, None) if parts is None else (parts[1], int(parts[2]))


# ---- operators in nodes --------------------------------------------------------------------------


def place_operators(
    graph: PipelineGraph, operators: Sequence[OperatorId]
) -> Mapping[OperatorId, GraphPlace] | str:
    """Find the place of each operator of an epoch, but for those that the graph does not show.

    Returns:
        The places; or why the graph is not that of the epoch's pipeline.
    """
    named = any(node.operators for node in graph.nodes)
    chains = _by_name(graph, operators) if named else _by_number(graph, operators)
    if isinstance(chains, str):
        return chains
    problem = next(_wrong_ends(graph, chains), None)
    return _places(graph, chains) if problem is None else problem


_Chains = Mapping[int, Sequence["_Link"]]


@dataclass(frozen=True, slots=True)
class _Link:
    """One operator of a chain; `operator` None = the graph does not show which."""

    operator: OperatorId | None
    part: str


def _by_name(graph: PipelineGraph, operators: Sequence[OperatorId]) -> _Chains | str:
    named = {operator for node in graph.nodes for operator in node.operators}
    mismatch = _not_equal(set(operators) - named, named - set(operators))
    if mismatch is not None:
        return mismatch
    return {
        node.number: [_Link(*link) for link in zip(node.operators, node.parts, strict=True)]
        for node in graph.nodes
    }


def _by_number(graph: PipelineGraph, operators: Sequence[OperatorId]) -> _Chains | str:
    """Chained operators have consecutive numbers, of which the first is that of the node."""
    numbered = {operator_number(operator)[1]: operator for operator in operators}
    free = [operator for operator in operators if operator_number(operator)[1] is None]
    chains = {
        node.number: [
            _Link(numbered.get(node.first + index), part) for index, part in enumerate(node.parts)
        ]
        for node in graph.nodes
    }
    links = [link for chain in chains.values() for link in chain]
    lacking = [link.part for link in links if link.operator is None]
    shown = {link.operator for link in links}
    missing = {operator for operator in operators if operator not in shown and operator not in free}
    # Only the ids of session windows have no number, and no two of them can be told apart here.
    unnamed = set(lacking[len(free) :]) if len(lacking) > len(free) else set()
    mismatch = _not_equal(missing, unnamed)
    if mismatch is not None:
        return mismatch
    if len(free) > len(lacking):
        return f"{free[-1]} of the epoch is not in it"
    problem = next(filter(None, map(_why_other_kind, links)), None)
    if problem is not None:
        return problem
    if len(free) == 1:
        for number, chain in chains.items():
            chains[number] = [
                _Link(free[0], link.part) if link.operator is None else link for link in chain
            ]
    return chains


def _not_equal(missing: set[OperatorId], surplus: set[OperatorId] | set[str]) -> str | None:
    if missing:
        return f"{_listed(missing)} of the epoch is not in it"
    if surplus:
        return f"the epoch has no operator for {_listed(surplus)} of it"
    return None


def _listed(names: set[OperatorId] | set[str]) -> str:
    return ", ".join(_printable(name) for name in sorted(names)[:5])


def _why_other_kind(one: _Link) -> str | None:
    if one.operator is None:
        return None
    part = _PARTS.get(operator_number(one.operator)[0])
    if part is None or one.part.startswith(part):
        return None
    return f"{one.operator} of the epoch is called {_printable(one.part)!r} there"


def _wrong_ends(graph: PipelineGraph, chains: _Chains) -> Iterator[str]:
    """Yield which sources get rows, and which sinks have rows go on."""
    fed = {edge.target for edge in graph.edges}
    feeding = {edge.source for edge in graph.edges}
    for number, chain in chains.items():
        for index, link in enumerate(chain):
            first, last = index == 0 and number not in fed, index == len(chain) - 1
            name = str(link.operator)
            if name.startswith("source_") and not first:
                yield f"{name} of the epoch gets rows there"
            if name.startswith("sink_") and not (last and number not in feeding):
                yield f"{name} of the epoch is no end there"


# ---- names ---------------------------------------------------------------------------------------

_At = tuple[int, int]
"""The number of a node, and the position in its chain."""


def _places(graph: PipelineGraph, chains: _Chains) -> dict[OperatorId, GraphPlace]:
    inputs = _inputs(graph, chains)
    outputs: dict[_At, list[_At]] = defaultdict(list)
    for target, sources in inputs.items():
        for source in sources:
            outputs[source].append(target)
    order = list(TopologicalSorter(inputs).static_order())
    before, after = _reached(order, inputs), _reached(order[::-1], outputs)
    links = {(node, i): link for node, chain in chains.items() for i, link in enumerate(chain)}
    names = {place: frozenset(_names_of(link)) for place, link in links.items()}
    return {
        link.operator: GraphPlace(
            names[place].union(*(names[near] for near in before[place])),
            frozenset[str]().union(*(names[near] for near in after[place])),
            in_graph=True,
        )
        for place, link in links.items()
        if link.operator is not None
    }


def _inputs(graph: PipelineGraph, chains: _Chains) -> dict[_At, list[_At]]:
    inputs: dict[_At, list[_At]] = {
        (number, index): [(number, index - 1)] if index else []
        for number, chain in chains.items()
        for index in range(len(chain))
    }
    for edge in graph.edges:
        if chains[edge.source] and chains[edge.target]:
            inputs[edge.target, 0].append((edge.source, len(chains[edge.source]) - 1))
    return inputs


def _reached(order: Sequence[_At], steps: Mapping[_At, Sequence[_At]]) -> dict[_At, frozenset[_At]]:
    reached: dict[_At, frozenset[_At]] = {}
    for place in order:
        near = steps.get(place, ())
        reached[place] = frozenset(near).union(*(reached[neighbor] for neighbor in near))
    return reached


def _names_of(link: _Link) -> Iterator[str]:
    kind = "" if link.operator is None else operator_number(link.operator)[0]
    for end in ("source", "sink"):
        if kind.startswith(f"{end}_"):
            yield f"the {end} {_printable(kind.removeprefix(f'{end}_'))}"
    part = re.sub(r"_\d+$", "", link.part)
    if part and not part.endswith(_UNNAMED):
        yield repr(_printable(part))


def _printable(text: str) -> str:
    """Return a text of a graph as it may be printed."""
    printable = "".join(char if char.isprintable() else "?" for char in text)
    return printable if len(printable) <= _MAX_CHARS else f"{printable[:_MAX_CHARS]}…"
