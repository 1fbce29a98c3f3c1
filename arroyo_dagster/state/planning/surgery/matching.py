"""Which operator of a job takes the state of which operator of another one.

Operator ids carry no meaning: they shift when SQL changes. Operators match by themselves only if
name, tables and place are equal and no other one is like them. For the rest it suggests pairs, with
a score by name, tables and place; a person decides. It does not compare SQL.

Source: docs/spec/state-surgery.md, `Rules`; docs/spec/arroyo-state.md 1.4.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from arroyo_dagster.state.model.checkpoints import Checkpoint, OperatorCheckpoint
from arroyo_dagster.state.model.ids import OperatorId, TableName
from arroyo_dagster.state.model.surgery.evolve import OperatorMatch, Overrides
from arroyo_dagster.state.model.tables import ExpiringTimeKeyConfig, TableConfig
from arroyo_dagster.state.planning.surgery.columns import columns_of, keys_of
from arroyo_dagster.state.planning.surgery.places import NOWHERE, GraphPlace, operator_number

MARGIN = 5
"""Scores that differ by less are taken for equal."""
_BEFORE, _AFTER = 20, 10
"""Points for the place. What comes before an operator determines its state."""
_SOURCE, _SINK = "source", "sink"
_SESSION = "SessionWindow<"


@dataclass(frozen=True, slots=True)
class OperatorShape:
    """What an operator is compared by.

    Attributes:
        kind: the first part of its id.
        index: its number in the plan; None = its id has none.
        name: of a source or sink the table in the SQL.
        configs: its tables.
        place: the nearest source before it and sink after it, by the plan's numbers; or the place
            in the graph of its pipeline.
    """

    operator: OperatorId
    kind: str
    index: int | None
    name: str | None
    configs: Mapping[TableName, TableConfig]
    place: GraphPlace = NOWHERE


def shapes_of(
    checkpoint: Checkpoint, places: Mapping[OperatorId, GraphPlace] | None = None
) -> tuple[OperatorShape, ...]:
    """Return the operators of an epoch, in the order of the plan.

    Args:
        places: of the operators in the graph of their pipeline; None = not known.
    """
    shapes = sorted(
        map(_shape, checkpoint.operators), key=lambda shape: (shape.index or 0, shape.operator)
    )
    if places is not None:
        return tuple(replace(shape, place=places.get(shape.operator, NOWHERE)) for shape in shapes)
    return tuple(replace(shape, place=_by_number(shape, shapes)) for shape in shapes)


def _shape(operator: OperatorCheckpoint) -> OperatorShape:
    name = str(operator.operator)
    if name.startswith(_SESSION):
        return OperatorShape(operator.operator, "session window", None, None, operator.configs)
    kind, index = operator_number(name)
    for end in (_SOURCE, _SINK):
        if kind.startswith(f"{end}_"):
            table = kind.removeprefix(f"{end}_")
            return OperatorShape(operator.operator, end, index, table, operator.configs)
    return OperatorShape(operator.operator, kind, index, None, operator.configs)


def _by_number(shape: OperatorShape, shapes: Sequence[OperatorShape]) -> GraphPlace:
    if shape.index is None:
        return NOWHERE
    before = [x for x in shapes if x.kind == _SOURCE and (x.index or 0) < (shape.index or 0)]
    after = [x for x in shapes if x.kind == _SINK and (x.index or 0) > (shape.index or 0)]
    return GraphPlace(
        frozenset(f"the source {source.name}" for source in before[-1:]),
        frozenset(f"the sink {sink.name}" for sink in after[:1]),
    )


# ---- matching ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A pair that may be right. A person decides.

    Attributes:
        score: from 0 to 100, how alike they are.
        why: what the score consists of, for people.
        rivals: other operators of both jobs that one of the two is as like.
    """

    source: OperatorId
    operator: OperatorId
    score: int
    why: str
    rivals: tuple[OperatorId, ...] = ()

    def __str__(self) -> str:
        text = f"{self.operator} may take the state of {self.source} (score {self.score}: "
        rivals = ""
        if self.rivals:
            rivals = f"; {', '.join(self.rivals)} is as like, and nothing shows which takes which"
        return f"{text}{self.why}{rivals})"


@dataclass(frozen=True, slots=True)
class Matching:
    """Which operator takes the state of which.

    Attributes:
        matches: in the order of the job's plan.
        suggestions: what a person must decide, likewise.
    """

    matches: tuple[OperatorMatch, ...]
    suggestions: tuple[Suggestion, ...] = ()

    @property
    def decision(self) -> str:
        """The options, and the override, that accept the suggestions."""
        options = " ".join(map_option(pair.source, pair.operator) for pair in self.suggestions)
        pairs = {pair.source: pair.operator for pair in self.suggestions}
        return f"{options} (in a file of overrides: `map: {json.dumps(pairs)}`)"


def map_option(source: OperatorId, operator: OperatorId) -> str:
    """Return the option that lets an operator take the state of one of the source, for a shell."""
    return f"--map {shlex.quote(f'{source}={operator}')}"


_Pair = tuple[OperatorShape, OperatorShape]


def match_operators(
    theirs: Sequence[OperatorShape], ours: Sequence[OperatorShape], overrides: Overrides
) -> Matching:
    """Match the operators of the source with those of the job.

    Sinks are left out, and operators of a kind that has no tables. The overrides must name
    operators that exist.

    Args:
        theirs, ours: as `shapes_of` returns them, either both with their graphs or none.
    """
    matches = {
        operator: OperatorMatch(source=source, operator=operator, why="you named them")
        for source, operator in overrides.matches
    }
    kinds = {shape.kind for shape in (*theirs, *ours) if shape.configs} - {_SINK}
    decided = {source for source, _ in overrides.matches} | set(overrides.drop)
    left = [shape for shape in theirs if shape.kind in kinds and shape.operator not in decided]
    decided = {*matches, *overrides.start_empty}
    right = [shape for shape in ours if shape.kind in kinds and shape.operator not in decided]
    alike = [(a, b) for a in left for b in right if _alike(a, b)]
    certain = [pair for pair in alike if _is_certain(pair, alike)]
    for a, b in certain:
        why = "equal tables and place, and no other operator is like it"
        matches[b.operator] = OperatorMatch(source=a.operator, operator=b.operator, why=why)
    suggestions = _suggested(
        [shape for shape in left if shape.operator not in {a.operator for a, _ in certain}],
        [shape for shape in right if shape.operator not in matches],
    )
    order = [shape.operator for shape in ours]
    return Matching(
        tuple(sorted(matches.values(), key=lambda match: order.index(match.operator))),
        tuple(sorted(suggestions, key=lambda suggestion: order.index(suggestion.operator))),
    )


def _alike(theirs: OperatorShape, ours: OperatorShape) -> bool:
    """Whether kind, name and tables are equal; an operator without tables is like any other."""
    return (theirs.kind, theirs.name) == (ours.kind, ours.name) and (
        theirs.configs == ours.configs or not theirs.configs or not ours.configs
    )


def _is_certain(pair: _Pair, alike: Sequence[_Pair]) -> bool:
    """Whether a pair that is alike has equal places, and no rival.

    Rivals are told apart only by all the names around them: the target of a statement alone may
    have been changed.
    """
    theirs, ours = pair
    rivals = [(a, b) for a, b in alike if (a is theirs) != (b is ours)]
    if not rivals:
        return theirs.kind == _SOURCE or theirs.place.ends == ours.place.ends
    return (
        theirs.place.in_graph
        and theirs.place == ours.place
        and all(a.place != b.place for a, b in rivals)
    )


# ---- suggestions ---------------------------------------------------------------------------------


def _suggested(
    theirs: Sequence[OperatorShape], ours: Sequence[OperatorShape]
) -> Iterator[Suggestion]:
    """Yield pairs, the most alike first; of equal ones those that come first in the plans."""
    scores = {
        (a.operator, b.operator): dict(_reasons(a, b))
        for a in theirs
        for b in ours
        if a.kind == b.kind and _same_tables(a, b)
    }
    points = {pair: sum(reasons.values()) for pair, reasons in scores.items()}
    left = sorted(points, key=lambda pair: -points[pair])
    while left:
        pair = left[0]
        rivals = [
            other
            for other in left[1:]
            if points[other] > points[pair] - MARGIN and set(other) & set(pair)
        ]
        why = ", ".join(f"{text} ({number})" for text, number in scores[pair].items())
        names = (name for other in rivals for name in other if name not in pair)
        yield Suggestion(*pair, points[pair], why, tuple(dict.fromkeys(names)))
        left = [(a, b) for a, b in left if a != pair[0] and b != pair[1]]


def _same_tables(theirs: OperatorShape, ours: OperatorShape) -> bool:
    """Whether no table that both have is of another kind."""
    both = theirs.configs.keys() & ours.configs.keys()
    equal = all(
        theirs.configs[name].kind is ours.configs[name].kind
        and theirs.configs[name].config.description == ours.configs[name].config.description
        for name in both
    )
    return equal and bool(both or not theirs.configs or not ours.configs)


def _reasons(theirs: OperatorShape, ours: OperatorShape) -> Iterator[tuple[str, int]]:
    """Yield the parts of a score."""
    both = sorted(theirs.configs.keys() & ours.configs.keys())
    if theirs.kind == _SOURCE:
        yield ("the same connector", 60) if both else ("a source without tables", 30)
        same = theirs.name == ours.name
        yield (f"both read {ours.name}", 40) if same else (f"reads {theirs.name}", 0)
        return
    if both:
        yield from _table_reasons([(theirs.configs[table], ours.configs[table]) for table in both])
    else:
        yield "one of both has not written its tables", 20
    for most, where, a, b in (
        (_BEFORE, "before", theirs.place.before, ours.place.before),
        (_AFTER, "after", theirs.place.after, ours.place.after),
    ):
        shared = ", ".join(sorted(a & b)[:3])
        text = f"{shared} {where} both" if shared else f"nothing in common {where} them"
        yield text, most * len(a & b) // max(len(a | b), 1)


def _table_reasons(pairs: Sequence[tuple[TableConfig, TableConfig]]) -> Iterator[tuple[str, int]]:
    rows = [
        (source.config, target.config)
        for source, target in pairs
        if isinstance(source.config, ExpiringTimeKeyConfig)
        and isinstance(target.config, ExpiringTimeKeyConfig)
    ]
    if not rows:
        yield "tables of the same kind", 70
        return
    keys = all(keys_of(source) == keys_of(target) for source, target in rows)
    yield ("equal keys", 30) if keys else ("other keys", 0)
    kept = all(source.retention_micros == target.retention_micros for source, target in rows)
    yield ("equal retention", 10) if kept else ("another retention", 0)
    columns = [
        [{(column.name, column.kind) for column in columns_of(config)} for config in pair]
        for pair in rows
    ]
    shared = sum(len(a & b) for a, b in columns)
    every = sum(len(a | b) for a, b in columns)
    yield f"{shared} of {every} columns in common", 30 * shared // max(every, 1)
