"""Which operator of a job takes the state of which operator of another one.

Operator ids carry no meaning: they shift when SQL changes. So operators are compared by their kind,
tables, keys and columns, and by their place: the source before them and the sink after them in the
order of the plan. What stays alike is matched in the order of the plan, or refused.

Source: docs/spec/state-surgery.md, `Rules`; docs/spec/arroyo-state.md 1.4.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from arroyo_dagster.state.model.checkpoints import Checkpoint, OperatorCheckpoint
from arroyo_dagster.state.model.ids import OperatorId, TableName
from arroyo_dagster.state.model.surgery.evolve import OperatorMatch, Overrides
from arroyo_dagster.state.model.tables import ExpiringTimeKeyConfig, TableConfig
from arroyo_dagster.state.planning.surgery.columns import StateColumn, columns_of, keys_of

MARGIN = 5
"""Scores that differ by less are taken for equal."""
_PLACE = 5
_SOURCE, _SINK = "source", "sink"
_ID = re.compile(r"(?s)(.+?)_(\d+)(?:_1)?")
_SESSION = "SessionWindow<"


@dataclass(frozen=True, slots=True)
class OperatorShape:
    """What an operator is compared by.

    Attributes:
        kind: the first part of its id.
        index: its number in the plan; None = its id has none.
        name: of a source or sink the table in the SQL.
        configs: its tables.
        before, after: the nearest source before it and sink after it, by the plan's numbers.
    """

    operator: OperatorId
    kind: str
    index: int | None
    name: str | None
    configs: Mapping[TableName, TableConfig]
    before: str | None = None
    after: str | None = None


def shapes_of(checkpoint: Checkpoint) -> tuple[OperatorShape, ...]:
    """Return the operators of an epoch, in the order of the plan."""
    found = sorted(
        map(_shape, checkpoint.operators), key=lambda one: (one.index or 0, one.operator)
    )
    return tuple(_placed(one, found) for one in found)


def _shape(operator: OperatorCheckpoint) -> OperatorShape:
    name = str(operator.operator)
    if name.startswith(_SESSION):
        return OperatorShape(operator.operator, "session window", None, None, operator.configs)
    parts = _ID.fullmatch(name)
    kind, index = (name, None) if parts is None else (parts[1], int(parts[2]))
    for one in (_SOURCE, _SINK):
        if kind.startswith(f"{one}_"):
            rest = kind.removeprefix(f"{one}_")
            return OperatorShape(operator.operator, one, index, rest, operator.configs)
    return OperatorShape(operator.operator, kind, index, None, operator.configs)


def _placed(one: OperatorShape, every: Sequence[OperatorShape]) -> OperatorShape:
    if one.index is None:
        return one
    before = [x for x in every if x.kind == _SOURCE and (x.index or 0) < one.index]
    after = [x for x in every if x.kind == _SINK and (x.index or 0) > one.index]
    return OperatorShape(
        one.operator,
        one.kind,
        one.index,
        one.name,
        one.configs,
        before[-1].name if before else None,
        after[0].name if after else None,
    )


# ---- scores --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Score:
    """How alike two operators are: from 0 to 100, and what that consists of."""

    points: int
    why: str


def score(theirs: OperatorShape, ours: OperatorShape) -> Score | None:
    """Compare an operator of the source with one of the job; None = they are of other kinds."""
    if theirs.kind != ours.kind or not _same_tables(theirs, ours):
        return None
    found: list[tuple[int, str]] = []
    both = theirs.configs.keys() & ours.configs.keys()
    if theirs.kind == _SOURCE:
        same = theirs.name == ours.name
        found.append((60, "the same connector") if both else (30, "a source without tables"))
        found.append(
            (40, f"both read {ours.name or 'one table'}") if same else (0, f"reads {theirs.name}")
        )
    elif both:
        found += _alike_tables(theirs, ours, sorted(both))
        found += _alike_place(theirs, ours)
    else:
        found.append((20, "the job has written none of its tables yet"))
        found += _alike_place(theirs, ours)
    return Score(sum(points for points, _ in found), ", ".join(text for _, text in found))


def _same_tables(theirs: OperatorShape, ours: OperatorShape) -> bool:
    """Whether no table that both have is of another kind."""
    both = theirs.configs.keys() & ours.configs.keys()
    equal = all(
        theirs.configs[name].kind is ours.configs[name].kind
        and theirs.configs[name].config.description == ours.configs[name].config.description
        for name in both
    )
    return equal and bool(both or not theirs.configs or not ours.configs)


def _alike_tables(
    theirs: OperatorShape, ours: OperatorShape, names: Sequence[TableName]
) -> Iterator[tuple[int, str]]:
    pairs = [(theirs.configs[name].config, ours.configs[name].config) for name in names]
    rows = [
        (there, here)
        for there, here in pairs
        if isinstance(there, ExpiringTimeKeyConfig) and isinstance(here, ExpiringTimeKeyConfig)
    ]
    if not rows:
        yield 90, "equal tables"
        return
    keys = all(keys_of(there) == keys_of(here) for there, here in rows)
    yield (40, "equal keys") if keys else (0, "other keys")
    kept = all(there.retention_micros == here.retention_micros for there, here in rows)
    yield (15, "equal retention") if kept else (0, "another retention")
    shared, every = 0, 0
    for there, here in rows:
        one, other = _typed(columns_of(there)), _typed(columns_of(here))
        shared, every = shared + len(one & other), every + len(one | other)
    yield 35 * shared // max(every, 1), f"{shared} of {every} columns in common"


def _typed(columns: Sequence[StateColumn]) -> set[tuple[str, str]]:
    return {(one.name, one.kind) for one in columns}


def _alike_place(theirs: OperatorShape, ours: OperatorShape) -> Iterator[tuple[int, str]]:
    if theirs.before is not None and theirs.before == ours.before:
        yield _PLACE, f"after the source {ours.before}"
    if theirs.after is not None and theirs.after == ours.after:
        yield _PLACE, f"before the sink {ours.after}"


# ---- matching ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ambiguous:
    """Operators that match several others equally well.

    Attributes:
        sources, operators: of the source and of the job.
    """

    sources: tuple[OperatorId, ...]
    operators: tuple[OperatorId, ...]

    def __str__(self) -> str:
        return (
            f"{', '.join(self.operators)} may take the state of {', '.join(self.sources)}, and "
            "nothing shows which takes which"
        )

    @property
    def override(self) -> str:
        """The override that decides it, as YAML."""
        return f"map: {{{self.sources[0]}: {self.operators[0]}}}"


@dataclass(frozen=True, slots=True)
class Matching:
    """Which operator takes the state of which.

    Attributes:
        matches: in the order of the job's plan.
        ambiguous: what a person must decide.
    """

    matches: tuple[OperatorMatch, ...]
    ambiguous: tuple[Ambiguous, ...] = ()


def match_operators(
    theirs: Sequence[OperatorShape], ours: Sequence[OperatorShape], overrides: Overrides
) -> Matching:
    """Match the operators of the source with those of the job.

    Sinks are left out, and operators of a kind that has no tables. The overrides must name
    operators that exist.

    Args:
        theirs, ours: as `shapes_of` returns them.
    """
    work = _Pairing()
    named = dict(overrides.matches)
    for source, operator in named.items():
        work.matches[operator] = OperatorMatch(
            source=source, operator=operator, score=None, why="an override names them"
        )
    free = [one for one in theirs if one.operator not in {*named, *overrides.drop}]
    open_ = [one for one in ours if one.operator not in {*named.values(), *overrides.start_empty}]
    kinds = dict.fromkeys(one.kind for one in (*theirs, *ours) if one.configs)
    for kind in kinds:
        if kind != _SINK:
            work.match(_of_kind(free, kind), _of_kind(open_, kind))
    order = [one.operator for one in ours]
    found = sorted(work.matches.values(), key=lambda one: order.index(one.operator))
    return Matching(tuple(found), tuple(work.ambiguous))


def _of_kind(shapes: Sequence[OperatorShape], kind: str) -> list[OperatorShape]:
    return [one for one in shapes if one.kind == kind]


@dataclass(slots=True)
class _Pairing:
    matches: dict[OperatorId, OperatorMatch] = field(default_factory=dict)
    ambiguous: list[Ambiguous] = field(default_factory=list)

    def match(self, theirs: list[OperatorShape], ours: list[OperatorShape]) -> None:
        """Match the best pairs first: each decided pair may decide others."""
        scores = {
            (a.operator, b.operator): found
            for a in theirs
            for b in ours
            if (found := score(a, b)) is not None
        }
        while scores:
            decided = _decided(scores) or self._in_order(theirs, ours, scores)
            if decided is None:
                return
            for a, b, assumed in decided:
                self.matches[b] = OperatorMatch(
                    source=a,
                    operator=b,
                    score=scores[a, b].points,
                    why=scores[a, b].why,
                    assumed=assumed,
                )
            gone = {a for a, _, _ in decided}, {b for _, b, _ in decided}
            scores = {
                key: one
                for key, one in scores.items()
                if key[0] not in gone[0] and key[1] not in gone[1]
            }

    def _in_order(
        self, theirs: Sequence[OperatorShape], ours: Sequence[OperatorShape], scores: _Scores
    ) -> list[_Decided] | None:
        """Match the best group of operators that are alike by their order in the plan."""
        best = max(scores, key=lambda key: scores[key].points)
        group = _group(best, scores)
        left = [one.operator for one in theirs if one.operator in group[0]]
        right = [one.operator for one in ours if one.operator in group[1]]
        alike = [scores[a, b].points for a in left for b in right if (a, b) in scores]
        whole = len(alike) == len(left) * len(right) and max(alike) - min(alike) < MARGIN
        indexed = all(one.index is not None for one in (*theirs, *ours))
        if len(left) != len(right) or not whole or not indexed:
            self.ambiguous.append(Ambiguous(tuple(left), tuple(right)))
            return None
        why = f"{', '.join(right)} are alike: matched by their order in the plan"
        return [(a, b, why) for a, b in zip(left, right, strict=True)]


_Pair = tuple[OperatorId, OperatorId]
_Scores = Mapping[_Pair, Score]
_Decided = tuple[OperatorId, OperatorId, str | None]


def _decided(scores: _Scores) -> list[_Decided] | None:
    """Return the pairs of which each is by far the best for the other; None = there are none."""
    best = [pair for pair in scores if all(_is_best(pair, scores, side) for side in (0, 1))]
    return [(a, b, None) for a, b in best] or None


def _is_best(pair: _Pair, scores: _Scores, side: int) -> bool:
    others = [one.points for key, one in scores.items() if key[side] == pair[side] and key != pair]
    return scores[pair].points >= max(others, default=-MARGIN) + MARGIN


def _group(best: _Pair, scores: _Scores) -> tuple[set[OperatorId], set[OperatorId]]:
    """Return the operators that are about as alike as the best pair, and connected with it."""
    close = {key for key, one in scores.items() if one.points > scores[best].points - MARGIN}
    left, right = {best[0]}, {best[1]}
    while connected := {(a, b) for a, b in close if a in left or b in right}:
        left |= {a for a, _ in connected}
        right |= {b for _, b in connected}
        close -= connected
    return left, right
