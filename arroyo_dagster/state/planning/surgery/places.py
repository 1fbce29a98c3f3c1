"""The place of each operator in the graph of its pipeline: what comes before it, and what after it.

What comes before an operator determines its state, so that is looked at first. Traits are compared
between two pipelines: names of sources and sinks, Arroyo's descriptions, digests of expressions,
kinds of operators and their number, sides of joins. Numbers of operators are none.

Source: docs/spec/arroyo-state.md 10.3 and 10.4; docs/spec/state-surgery.md, `Rules`.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter

from arroyo_dagster.state.model.ids import OperatorId
from arroyo_dagster.state.model.surgery.graphs import PipelineGraph

ABOVE, BELOW = "after", "before"
_ID = re.compile(r"(?s)(.+?)_(\d+)(?:_1)?")
_PARTS = {
    "watermark": "watermark",
    "key": "ArrowKey",
    "join": "join",
    "tumbling": "TumblingWindow",
    "updating_aggregate": "UpdatingAggregate",
}
"""How Arroyo begins the description of operators of these kinds."""
_WEIGHTS = {"named": 4, "equal": 4, "called": 2, "counts": 3, "side": 2}
_UNNAMED = "projection"
"""The end of descriptions that the SQL has given no name to."""
_MAX_CHARS = 60


@dataclass(frozen=True, slots=True)
class PlaceTrait:
    """Something that an operator, or one before or after it, is recognized by.

    Attributes:
        what: "named" = a source or sink; "called" = the description; "equal" = the digest of an
            expression; "counts" = so many of a kind; "side" = an input of a join.
        text: for people, after "after" or "before".
    """

    what: str
    value: str
    text: str

    @property
    def weight(self) -> int:
        return _WEIGHTS[self.what]


@dataclass(frozen=True, slots=True)
class GraphPlace:
    """The place of one operator.

    Attributes:
        above, below: the traits of the operators before it, itself included, and of those after it,
            by what they are compared by.
        before, after: those operators.
    """

    above: Mapping[tuple[str, str], PlaceTrait]
    below: Mapping[tuple[str, str], PlaceTrait]
    before: frozenset[OperatorId]
    after: frozenset[OperatorId]


@dataclass(frozen=True, slots=True)
class PlacedOperators:
    """The operators of an epoch in the graph of their pipeline.

    Attributes:
        places: by operator; those whose place the graph does not show are missing.
        traits: all that the graph has.
        has_expressions: whether it shows which expressions are equal.
    """

    origin: str
    places: Mapping[OperatorId, GraphPlace]
    traits: frozenset[tuple[str, str]]
    has_expressions: bool


def operator_number(operator: str) -> tuple[str, int | None]:
    """Return the kind of an operator and its number in the plan; None = its id has none."""
    parts = _ID.fullmatch(operator)
    return (operator, None) if parts is None else (parts[1], int(parts[2]))


# ---- operators in nodes --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GraphMismatch:
    """Why a graph is not that of the epoch's pipeline."""

    reason: str

    def __str__(self) -> str:
        return self.reason


def place_operators(
    graph: PipelineGraph, operators: Sequence[OperatorId]
) -> PlacedOperators | GraphMismatch:
    """Find the place of each operator of an epoch."""
    found = _by_name(graph, operators) if _names(graph) else _by_number(graph, operators)
    if isinstance(found, GraphMismatch):
        return found
    problem = next(_wrong_ends(graph, found), None)
    if problem is not None:
        return GraphMismatch(problem)
    return _placed(graph, found)


_Chains = Mapping[int, Sequence["_Link"]]


@dataclass(frozen=True, slots=True)
class _Link:
    """One operator of a chain; `operator` None = the graph does not show which."""

    operator: OperatorId | None
    part: str
    config: str | None


def _names(graph: PipelineGraph) -> bool:
    return any(one.operators for one in graph.nodes)


def _by_name(graph: PipelineGraph, operators: Sequence[OperatorId]) -> _Chains | GraphMismatch:
    named = {operator for one in graph.nodes for operator in one.operators}
    mismatch = _not_equal(set(operators) - named, named - set(operators))
    if mismatch is not None:
        return mismatch
    return {
        one.number: [
            _Link(*link) for link in zip(one.operators, one.parts, one.configs, strict=True)
        ]
        for one in graph.nodes
    }


def _by_number(graph: PipelineGraph, operators: Sequence[OperatorId]) -> _Chains | GraphMismatch:
    """Chained operators have consecutive numbers, of which the first is that of the node."""
    numbered = {operator_number(one)[1]: one for one in operators}
    free = [one for one in operators if operator_number(one)[1] is None]
    chains: dict[int, list[_Link]] = {}
    lacking: list[str] = []
    for node in graph.nodes:
        numbers = range(node.first, node.first + len(node.parts))
        chains[node.number] = [
            _Link(numbered.get(at), part, None)
            for at, part in zip(numbers, node.parts, strict=True)
        ]
        lacking += [
            part for at, part in zip(numbers, node.parts, strict=True) if at not in numbered
        ]
    shown = {one.operator for chain in chains.values() for one in chain}
    missing = {one for one in operators if one not in shown and one not in free}
    # Only the ids of session windows have no number, and no two of them can be told apart here.
    unnamed = set(lacking[len(free) :]) if len(lacking) > len(free) else set()
    mismatch = _not_equal(missing, unnamed)
    if mismatch is not None:
        return mismatch
    if len(free) > len(lacking):
        return GraphMismatch(f"{free[-1]} of the epoch is not in it")
    for chain in chains.values():
        for one in chain:
            problem = _why_other_kind(one)
            if problem is not None:
                return GraphMismatch(problem)
    if len(free) == 1:
        for number, chain in chains.items():
            chains[number] = [
                _Link(free[0], one.part, None) if one.operator is None else one for one in chain
            ]
    return chains


def _not_equal(
    missing: set[OperatorId], surplus: set[OperatorId] | set[str]
) -> GraphMismatch | None:
    if missing:
        return GraphMismatch(f"{_listed(missing)} of the epoch is not in it")
    if surplus:
        return GraphMismatch(f"the epoch has no operator for {_listed(surplus)} of it")
    return None


def _listed(names: set[OperatorId] | set[str]) -> str:
    return ", ".join(_printable(one) for one in sorted(names)[:5])


def _why_other_kind(one: _Link) -> str | None:
    if one.operator is None:
        return None
    part = _PARTS.get(operator_number(one.operator)[0])
    if part is None or one.part.startswith(part):
        return None
    return f"{one.operator} of the epoch is called {_printable(one.part)!r} there"


def _wrong_ends(graph: PipelineGraph, chains: _Chains) -> Iterator[str]:
    """Yield which sources get rows, and which sinks have rows go on."""
    fed = {one.target for one in graph.edges}
    feeding = {one.source for one in graph.edges}
    for number, chain in chains.items():
        for at, one in enumerate(chain):
            first, last = at == 0 and number not in fed, at == len(chain) - 1
            name = str(one.operator)
            if name.startswith("source_") and not first:
                yield f"{name} of the epoch gets rows there"
            if name.startswith("sink_") and not (last and number not in feeding):
                yield f"{name} of the epoch is no end there"


# ---- traits --------------------------------------------------------------------------------------

_Traits = dict[tuple[str, str], PlaceTrait]


def _placed(graph: PipelineGraph, chains: _Chains) -> PlacedOperators:
    inputs = _inputs(graph, chains)
    links = {(number, at): one for number, chain in chains.items() for at, one in enumerate(chain)}
    order = list(
        TopologicalSorter({at: [it for it, _ in inputs[at]] for at in links}).static_order()
    )
    outputs: dict[_At, list[tuple[_At, str]]] = defaultdict(list)
    for target, found in inputs.items():
        for source, kind in found:
            outputs[source].append((target, kind))
    up = _reached(order, inputs)
    down = _reached(order[::-1], outputs)
    own = _own_traits_of(links)
    places = {}
    for at, one in links.items():
        if one.operator is None:
            continue
        above = {**_traits(links, own, up[at]), **own[at]}
        below = {**_traits(links, own, down[at]), **_sides(links, at, down[at], outputs)}
        before, after = (
            frozenset(op for it in reached if (op := links[it].operator) is not None)
            for reached in (up[at], down[at])
        )
        places[one.operator] = GraphPlace(above, below, before, after)
    every = frozenset(key for one in places.values() for key in (*one.above, *one.below))
    return PlacedOperators(graph.origin, places, every, _names(graph))


_At = tuple[int, int]
"""The number of a node, and the position in its chain."""


def _inputs(graph: PipelineGraph, chains: _Chains) -> dict[_At, list[tuple[_At, str]]]:
    found: dict[_At, list[tuple[_At, str]]] = {
        (number, at): [((number, at - 1), "forward")] if at else []
        for number, chain in chains.items()
        for at in range(len(chain))
    }
    for edge in graph.edges:
        if chains[edge.source] and chains[edge.target]:
            source = (edge.source, len(chains[edge.source]) - 1)
            found[edge.target, 0].append((source, edge.kind))
    return found


def _reached(
    order: Sequence[_At], steps: Mapping[_At, Sequence[tuple[_At, str]]]
) -> dict[_At, frozenset[_At]]:
    found: dict[_At, frozenset[_At]] = {}
    for at in order:
        near = [it for it, _ in steps.get(at, ())]
        found[at] = frozenset(near).union(*(found[it] for it in near))
    return found


def _own_traits_of(links: Mapping[_At, _Link]) -> Mapping[_At, _Traits]:
    """Return the traits of each operator that no other one of the graph has."""
    found = {at: _own_traits(one) for at, one in links.items()}
    times = Counter(key for traits in found.values() for key in traits)
    return {
        at: {key: trait for key, trait in traits.items() if times[key] == 1}
        for at, traits in found.items()
    }


def _traits(
    links: Mapping[_At, _Link], own: Mapping[_At, _Traits], reached: frozenset[_At]
) -> _Traits:
    traits: _Traits = {}
    kinds: Counter[str] = Counter()
    for at in sorted(reached):
        one = links[at]
        traits |= own[at]
        if one.operator is not None:
            kinds[operator_number(one.operator)[0].partition("<")[0]] += 1
    for kind, count in kinds.items():
        if not kind.startswith(("source_", "sink_", "value", "key")):
            text = f"{count} {kind}" if count > 1 else f"one {kind}"
            _add(traits, PlaceTrait("counts", f"{kind} {count}", text))
    return traits


def _own_traits(one: _Link) -> _Traits:
    traits: _Traits = {}
    kind = None if one.operator is None else operator_number(one.operator)[0]
    for end in ("source", "sink"):
        if kind is not None and kind.startswith(f"{end}_"):
            name = kind.removeprefix(f"{end}_")
            _add(traits, PlaceTrait("named", f"{end} {name}", f"the {end} {_printable(name)}"))
    part = re.sub(r"_\d+$", "", one.part)
    if part and not part.endswith(_UNNAMED):
        _add(traits, PlaceTrait("called", part, f"{_printable(part)!r}"))
    if one.config is not None:
        text = f"an expression equal to that of {_printable(str(one.operator))}"
        _add(traits, PlaceTrait("equal", one.config, text))
    return traits


def _sides(
    links: Mapping[_At, _Link],
    start: _At,
    reached: frozenset[_At],
    outputs: Mapping[_At, Sequence[tuple[_At, str]]],
) -> _Traits:
    """Return the inputs of joins by which its rows arrive."""
    traits: _Traits = {}
    for at in (start, *reached):
        for target, kind in outputs.get(at, ()):
            if kind.endswith("join"):
                part = _printable(links[target].part)
                _add(traits, PlaceTrait("side", f"{kind} {part}", f"the {kind} side of {part!r}"))
    return traits


def _add(traits: _Traits, trait: PlaceTrait) -> None:
    traits[trait.what, trait.value] = trait


def _printable(text: str) -> str:
    """Return a text of a graph as it may be printed."""
    shown = "".join(char if char.isprintable() else "?" for char in text)
    return shown if len(shown) <= _MAX_CHARS else f"{shown[:_MAX_CHARS]}…"
