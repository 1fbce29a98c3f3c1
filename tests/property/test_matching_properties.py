"""Random pipelines whose SQL changes at random: an operator that matches by itself has its own
counterpart, with the graphs of both pipelines and without; all others are left to a person."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from arroyo_dagster import (
    Checkpoint,
    CheckpointState,
    Epoch,
    JobId,
    OperatorCheckpoint,
    OperatorId,
    StatePath,
    timestamp_table_config,
)
from arroyo_dagster.state.model.surgery.graphs import GraphEdge, GraphNode, PipelineGraph
from arroyo_dagster.state.planning.surgery.matching import Matching, match_operators, shapes_of
from arroyo_dagster.state.planning.surgery.places import GraphPlace, place_operators
from tests.formats import Overrides

KINDS = ("tumbling", "join", "updating_aggregate")
PARTS = {"tumbling": "TumblingWindow<w>", "join": "join", "updating_aggregate": "UpdatingAggregate"}
CLASSES = [
    timestamp_table_config(
        "t",
        "state",
        keys=["k"],
        retention_micros=60_000_000,
        schema=pa.schema(
            [
                ("k", pa.string()),
                *((f"c{at}", pa.int64()) for at in range(columns)),
                pa.field("_timestamp", pa.timestamp("ns"), nullable=False),
            ]
        ),
    )
    for columns in (2, 4)
]


@dataclass(frozen=True)
class Step:
    """A source, or an operator with state, in the SQL.

    Attributes:
        inputs: names of steps.
        view: the name of the view that its rows come through; None = an unnamed projection.
        sink: the name of the sink that its rows go to.
    """

    name: str
    kind: str
    inputs: tuple[str, ...] = ()
    config: int = 0
    view: str | None = None
    sink: str | None = None


@dataclass
class Built:
    """A pipeline: its operators by step, in order, and its graph."""

    operators: list[OperatorCheckpoint] = field(default_factory=list)
    ids: dict[str, OperatorId] = field(default_factory=dict)
    nodes: list[GraphNode] = field(default_factory=list)
    edges: list[GraphEdge] = field(default_factory=list)

    @property
    def checkpoint(self) -> Checkpoint:
        return Checkpoint(
            job=JobId("j"),
            pipeline=None,
            worker_generation=None,
            start_time_micros=1,
            finish_time_micros=2,
            epoch=Epoch(1),
            min_epoch=Epoch(0),
            ref=StatePath("j/x"),
            state=CheckpointState.READY,
            operators=tuple(self.operators),
        )

    def add(
        self, names: Sequence[tuple[str, str, str]], inputs: Sequence[tuple[int, str]], named: bool
    ) -> tuple[int, list[OperatorId]]:
        """Add a chain: kind, description and expression of each operator."""
        first = len(self.operators)
        ids = [OperatorId(f"{kind}_{first + at}") for at, (kind, _, _) in enumerate(names)]
        for one in ids:
            self.operators.append(
                OperatorCheckpoint(job=JobId("j"), operator=one, epoch=Epoch(1), parallelism=1)
            )
        node = GraphNode(
            number=first,
            first=first,
            parts=tuple(part for _, part, _ in names),
            operators=tuple(ids) if named else (),
            configs=tuple(config for _, _, config in names) if named else (),
        )
        self.nodes.append(node)
        self.edges += [GraphEdge(source=one, target=first, kind=kind) for one, kind in inputs]
        return first, ids


def built(steps: Sequence[Step], *, named: bool) -> Built:
    """The pipeline of a SQL, as Arroyo numbers it: step by step."""
    found = Built()
    ends: dict[str, int] = {}
    for one in steps:
        if one.kind == "source":
            source, (operator,) = found.add(
                [(f"source_{one.name}", "Connector", one.name)], (), named
            )
            ends[one.name], _ = found.add(
                [("value", one.name, f"read {one.name}"), ("watermark", "watermark", "w")],
                [(source, "forward")],
                named,
            )
            found.ids[one.name] = operator
            continue
        inputs = []
        for at, name in enumerate(one.inputs):
            view = one.view or "projection"
            key = f"ArrowKey<{('left', 'right')[at] if one.kind == 'join' else '_'}>"
            # A view that is renamed has the same expression; one that is new has another.
            changed = view if view.startswith("w") else ""
            chain = [("value", view, f"{changed} of {one.name}"), ("key", key, "k")]
            number, _ = found.add(chain, [(ends[name], "forward")], named)
            side = ("left join", "right join")[at] if one.kind == "join" else "shuffle"
            inputs.append((number, side))
        chain = [
            (one.kind, PARTS[one.kind], f"{one.kind} {one.config}"),
            ("value", "sink projection", "p"),
        ]
        ends[one.name], (operator, _) = found.add(chain, inputs, named)
        found.ids[one.name] = operator
        if one.sink is not None:
            sink = [(f"sink_{one.sink}", "Single File", one.sink)]
            found.add(sink, [(ends[one.name], "forward")], named)
    configs = {found.ids[one.name]: CLASSES[one.config] for one in steps if one.kind != "source"}
    found.operators = [
        replace(one, configs={configs[one.operator].table: configs[one.operator]})
        if one.operator in configs
        else one
        for one in found.operators
    ]
    return found


def placed(pipeline: Built) -> Mapping[OperatorId, GraphPlace]:
    graph = PipelineGraph(origin="test", nodes=tuple(pipeline.nodes), edges=tuple(pipeline.edges))
    found = place_operators(graph, [one.operator for one in pipeline.operators])
    assert not isinstance(found, str), found
    return found


def ordered(draw: st.DrawFn, steps: Mapping[str, Step]) -> list[Step]:
    """The steps in any order in which inputs come first."""
    found: list[Step] = []
    for one in draw(st.permutations(sorted(steps))):
        _after_inputs(steps, one, found)
    return found


def _after_inputs(steps: Mapping[str, Step], name: str, found: list[Step]) -> None:
    if all(one.name != name for one in found):
        for other in steps[name].inputs:
            _after_inputs(steps, other, found)
        found.append(steps[name])


@st.composite
def steps_of(draw: st.DrawFn) -> dict[str, Step]:
    found = {f"s{at}": Step(f"s{at}", "source") for at in range(draw(st.integers(1, 3)))}
    for at in range(draw(st.integers(2, 6))):
        kind = draw(st.sampled_from(KINDS))
        inputs = st.sampled_from(sorted(found))
        taken = (draw(inputs), draw(inputs)) if kind == "join" else (draw(inputs),)
        view = f"v{at}" if draw(st.booleans()) else None
        config = draw(st.integers(0, 1))
        found[f"o{at}"] = Step(f"o{at}", kind, taken, config, view, f"out{at}")
    return found


@dataclass(frozen=True)
class Change:
    """Two pipelines, and which step of the one is which of the other: by name."""

    was: list[Step]
    now: list[Step]
    named: tuple[bool, bool]


@st.composite
def changes(draw: st.DrawFn, *, renamed: bool = True, added: bool = True) -> Change:
    was = draw(steps_of())
    now = dict(was)
    for name, one in was.items():
        used = any(name in other.inputs for other in now.values())
        if added and one.kind != "source" and not used and draw(st.integers(0, 5)) == 0:
            del now[name]
        elif renamed and one.kind != "source":
            view = draw(st.sampled_from([one.view, None, f"w{name}"]))
            sink = draw(st.sampled_from([one.sink, one.sink, f"other_{name}"]))
            now[name] = replace(one, view=view, sink=sink)
    if added and draw(st.booleans()):
        source = draw(st.sampled_from(sorted(now)))
        kind = draw(st.sampled_from(KINDS))
        inputs = (source,) * (2 if kind == "join" else 1)
        now["new"] = Step("new", kind, inputs, draw(st.integers(0, 1)), "vnew", "outnew")
    named = draw(st.booleans()), draw(st.booleans())
    return Change(ordered(draw, was), ordered(draw, now), named)


def matched(change: Change, *, graphs: bool) -> tuple[Matching, set[tuple[str, str]]]:
    """The matching, and the pairs that are right."""
    a = built(change.was, named=change.named[0])
    b = built(change.now, named=change.named[1])
    theirs = shapes_of(a.checkpoint, placed(a) if graphs else None)
    ours = shapes_of(b.checkpoint, placed(b) if graphs else None)
    right = {
        (str(a.ids[one.name]), str(b.ids[one.name]))
        for one in change.now
        if one.kind != "source" and one.name in a.ids
    }
    return match_operators(theirs, ours, Overrides()), right


def pairs_of(matching: Matching) -> set[tuple[str, str]]:
    return {(str(one.source), str(one.operator)) for one in matching.matches}


@given(changes(), st.booleans())
def test_what_matches_by_itself_is_right_and_the_rest_is_suggested(
    change: Change, graphs: bool
) -> None:
    found, right = matched(change, graphs=graphs)
    assert pairs_of(found) <= right
    suggested = [(one.source, one.operator) for one in found.suggestions]
    assert len({a for a, _ in suggested}) == len({b for _, b in suggested}) == len(suggested)
    decided = Overrides(matches=tuple(suggested))
    a, b = (built(steps, named=True) for steps in (change.was, change.now))
    left = match_operators(shapes_of(a.checkpoint), shapes_of(b.checkpoint), decided)
    assert {(one.source, one.operator) for one in left.matches} >= set(suggested)


@given(changes(renamed=False, added=False))
def test_statements_in_another_order_match_by_themselves_with_the_graphs(change: Change) -> None:
    found, right = matched(change, graphs=True)
    assert (pairs_of(found), found.suggestions) == (right, ())
