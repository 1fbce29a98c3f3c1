"""Which operator of a job takes the state of which operator of another one.

Operator ids carry no meaning: they shift when SQL changes. So operators are compared by their kind,
tables, keys and columns, and by their place: in the graphs of the two pipelines, if both are known,
else the source before them and the sink after them in the order of the plan. What stays alike is
refused: a person decides it.

Source: docs/spec/state-surgery.md, `Rules`; docs/spec/arroyo-state.md 1.4.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from arroyo_dagster.state.model.checkpoints import Checkpoint, OperatorCheckpoint
from arroyo_dagster.state.model.ids import OperatorId, TableName
from arroyo_dagster.state.model.surgery.evolve import MatchReason, OperatorMatch, Overrides
from arroyo_dagster.state.model.tables import ExpiringTimeKeyConfig, TableConfig
from arroyo_dagster.state.planning.surgery.columns import StateColumn, columns_of, keys_of
from arroyo_dagster.state.planning.surgery.place_evidence import PlaceComparison
from arroyo_dagster.state.planning.surgery.places import operator_number

MARGIN = 5
"""Scores that differ by less are taken for equal."""
_PLACE = 5
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
    kind, index = operator_number(name)
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

    held_reasons: tuple[MatchReason, ...]
    place_reasons: tuple[MatchReason, ...] = ()

    @property
    def reasons(self) -> tuple[MatchReason, ...]:
        return self.held_reasons + self.place_reasons

    @property
    def held(self) -> int:
        """The points for what they are and hold, without their places."""
        return sum(one.points for one in self.held_reasons)

    @property
    def points(self) -> int:
        return sum(one.points for one in self.reasons)

    @property
    def why(self) -> str:
        """The reasons, for people."""
        return ", ".join(map(str, self.reasons))


def score(
    theirs: OperatorShape, ours: OperatorShape, places: PlaceComparison | None = None
) -> Score | None:
    """Compare an operator of the source with one of the job; None = they are of other kinds.

    Args:
        places: of both in the graphs; None = not known.
    """
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
    else:
        found.append((20, "the job has written none of its tables yet"))
    near: list[tuple[int, str]] = []
    if places is not None:
        most = 100 if theirs.kind == _SOURCE else 90
        found = [(points * places.left // most, text) for points, text in found]
        near = places.compare(theirs.operator, ours.operator)
    elif theirs.kind != _SOURCE:
        near = list(_alike_place(theirs, ours))
    return Score(_reasons(found), _reasons(near))


def _reasons(found: Sequence[tuple[int, str]]) -> tuple[MatchReason, ...]:
    return tuple(MatchReason(points, text) for points, text in found)


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
        """An override that decides it, in the order of the plans, as YAML."""
        pairs = zip(self.sources, self.operators, strict=False)
        return "map: {" + ", ".join(f"{source}: {operator}" for source, operator in pairs) + "}"


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
    theirs: Sequence[OperatorShape],
    ours: Sequence[OperatorShape],
    overrides: Overrides,
    places: PlaceComparison | None = None,
) -> Matching:
    """Match the operators of the source with those of the job.

    Sinks are left out, and operators of a kind that has no tables. The overrides must name
    operators that exist.

    Args:
        theirs, ours: as `shapes_of` returns them.
        places: of the operators in the graphs of both pipelines; None = not known.
    """
    work = _Pairing(theirs, ours, places)
    named = dict(overrides.matches)
    for source, operator in named.items():
        work.matches[operator] = OperatorMatch(
            source=source, operator=operator, score=None, why="an override names them"
        )
    kinds = {one.kind for one in (*theirs, *ours) if one.configs} - {_SINK}
    left = {*named, *overrides.drop}, {*named.values(), *overrides.start_empty}
    work.match(
        [one for one in theirs if one.kind in kinds and one.operator not in left[0]],
        [one for one in ours if one.kind in kinds and one.operator not in left[1]],
    )
    order = [one.operator for one in ours]
    found = sorted(work.doubted(), key=lambda one: order.index(one.operator))
    return Matching(tuple(found), tuple(work.ambiguous))


_Pair = tuple[OperatorId, OperatorId]
_Scores = Mapping[_Pair, Score]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Decided:
    """A pair, and what told it from others that are alike."""

    pair: _Pair
    distinction: str | None = None


@dataclass(slots=True)
class _Pairing:
    sources: Sequence[OperatorShape]
    operators: Sequence[OperatorShape]
    places: PlaceComparison | None
    matches: dict[OperatorId, OperatorMatch] = field(default_factory=dict)
    ambiguous: list[Ambiguous] = field(default_factory=list)

    def match(self, theirs: list[OperatorShape], ours: list[OperatorShape]) -> None:
        """Match the best pairs first: each decided pair may decide others."""
        scores = {
            (a.operator, b.operator): compared
            for a in theirs
            for b in ours
            if (compared := score(a, b, self.places)) is not None
        }
        while scores:
            alike = self._most_alike(scores)
            found = _clear(scores) or self._by_place(scores)
            for one in found:
                self._add(one, scores[one.pair])
            if found:
                decided = _Group([one.pair for one in found])
            else:  # the best group is ambiguous; what is left may still match
                decided = alike
                self.ambiguous.append(decided.ambiguous(self.sources, self.operators))
            scores = _without(scores, decided.left, decided.right)

    def _add(self, one: _Decided, found: Score) -> None:
        source, operator = one.pair
        texts = (found.why, one.distinction)
        self.matches[operator] = OperatorMatch(
            source=source,
            operator=operator,
            score=found.points,
            why="; ".join(text for text in texts if text is not None),
            reasons=found.reasons,
        )

    def doubted(self) -> Iterator[OperatorMatch]:
        """Yield the matches, with what the graphs say against them."""
        pairs = [(one.source, one.operator) for one in self.matches.values()]
        for one, pair in zip(self.matches.values(), pairs, strict=True):
            doubt = None if self.places is None else self.places.doubt(pair, pairs)
            yield one if doubt is None or one.score is None else replace(one, assumed=doubt)

    def _most_alike(self, scores: _Scores) -> _Group:
        """Return the best group of operators that are alike; graphs tell apart, and do not part."""
        graphs = self.places is not None
        points = {pair: one.held if graphs else one.points for pair, one in scores.items()}
        return _groups(points)[0]

    def _by_place(self, scores: _Scores) -> list[_Decided]:
        """Match operators that are alike by their places in the graphs."""
        if self.places is None:
            return []
        matched = [(one.source, one.operator) for one in self.matches.values()]
        for group in _groups({pair: one.points for pair, one in scores.items()}):
            found = self.places.distinguish(group.pairs, matched)
            if found:
                return [_Decided(pair, distinction=text) for pair, text in found.items()]
        return []


@dataclass(frozen=True, slots=True)
class _Group:
    """Operators that are about as alike as the best pair of them, and connected with it."""

    pairs: Collection[_Pair]

    @property
    def left(self) -> set[OperatorId]:
        return {a for a, _ in self.pairs}

    @property
    def right(self) -> set[OperatorId]:
        return {b for _, b in self.pairs}

    def ambiguous(
        self, theirs: Sequence[OperatorShape], ours: Sequence[OperatorShape]
    ) -> Ambiguous:
        """Return the operators, in the order of the plans."""
        left, right = self.left, self.right
        return Ambiguous(
            tuple(one.operator for one in theirs if one.operator in left),
            tuple(one.operator for one in ours if one.operator in right),
        )


def _clear(scores: _Scores) -> list[_Decided]:
    """Return the pairs of which each is by far the best for the other."""
    best = [pair for pair in scores if all(_is_best(pair, scores, side) for side in (0, 1))]
    return [_Decided(pair) for pair in best]


def _is_best(pair: _Pair, scores: _Scores, side: int) -> bool:
    others = [one.points for key, one in scores.items() if key[side] == pair[side] and key != pair]
    return scores[pair].points >= max(others, default=-MARGIN) + MARGIN


def _groups(points: Mapping[_Pair, int]) -> list[_Group]:
    """Return the groups of operators that are alike, the best first."""
    left = dict(points)
    found = []
    while left:
        group = _group(max(left, key=lambda key: left[key]), left)
        found.append(group)
        left = _without(left, group.left, group.right)
    return found


def _without(
    found: Mapping[_Pair, _T], sources: Collection[OperatorId], operators: Collection[OperatorId]
) -> dict[_Pair, _T]:
    return {(a, b): one for (a, b), one in found.items() if a not in sources and b not in operators}


def _group(best: _Pair, points: Mapping[_Pair, int]) -> _Group:
    close = {key for key, one in points.items() if one > points[best] - MARGIN}
    left, right = {best[0]}, {best[1]}
    pairs: set[_Pair] = set()
    while connected := {(a, b) for a, b in close if a in left or b in right}:
        left |= {a for a, _ in connected}
        right |= {b for _, b in connected}
        pairs |= connected
        close -= connected
    return _Group(sorted(pairs))
