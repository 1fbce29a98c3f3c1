"""How alike the places of two operators in the graphs of their pipelines are, and which of several
operators that are alike otherwise has the place of which.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from arroyo_dagster.state.model.ids import OperatorId
from arroyo_dagster.state.planning.surgery.places import (
    ABOVE,
    BELOW,
    GraphPlace,
    PlacedOperators,
    PlaceTrait,
)

_POINTS = {ABOVE: 20, BELOW: 10}
"""Of a score: for equal traits before an operator, and after it."""
_NAMES = ("named", "called")
_WHERE = {ABOVE: "before", BELOW: "after"}
_MATCHED = 8
_MENTIONED = 3
"""How many reasons are mentioned."""
_LACKING = {ABOVE: ("named", "matched", "counts"), BELOW: ("counts",)}
"""Traits that tell operators apart also where both lack them: others come and go with small changes
of the SQL, such as another name of a view or a sink.
"""

OperatorPair = tuple[OperatorId, OperatorId]
"""An operator of the source, and one of the job."""
_Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class PlaceComparison:
    """The operators of two epochs in the graphs of their pipelines."""

    source: PlacedOperators
    job: PlacedOperators

    @property
    def left(self) -> int:
        """How many of 100 points are for what operators are, and not for their place."""
        return 100 - sum(_POINTS.values())

    def compare(self, source: OperatorId, operator: OperatorId) -> list[tuple[int, str]]:
        """Return the points for the places of two operators, and what they are for."""
        a, b = self.source.places.get(source), self.job.places.get(operator)
        if a is None or b is None:
            return [(0, "its place in a graph is not known")]
        found = []
        for side, most in _POINTS.items():
            one, other = self._comparable(a, side), self._comparable(b, side)
            weight = sum(trait.weight for trait in (one | other).values())
            shared = sum(one[key].weight for key in one.keys() & other.keys())
            points = most if weight == 0 else most * shared // weight
            both = one.keys() & other.keys()
            names = sorted((key for key in both if key[0] in _NAMES), reverse=True)[:_MENTIONED]
            text = f"{len(both)} of {len(one | other)} traits {_WHERE[side]} it in the graph"
            if names:
                text += f", with {' and '.join(other[key].text for key in names)}"
            found.append((points, text))
        return found

    def _comparable(self, place: GraphPlace, side: str) -> dict[_Key, PlaceTrait]:
        """Leave out expressions unless both graphs have them."""
        both = self.source.has_expressions and self.job.has_expressions
        return {key: one for key, one in _traits(place, side).items() if both or key[0] != "equal"}

    def distinguish(
        self, pairs: Collection[OperatorPair], matched: Collection[OperatorPair]
    ) -> Mapping[OperatorPair, str]:
        """Return the pairs whose places are more alike than those of all others of `pairs`, with
        what tells them apart. What comes before an operator decides; what comes after it only if
        nothing before it does.

        Args:
            pairs: that are alike otherwise.
            matched: that are decided already.
        """
        for side in (ABOVE, BELOW):
            evidence = _Evidence.of(self, side, pairs, matched)
            found = {pair: evidence.why(pair) for pair in pairs if evidence.decides(pair)}
            if found:
                return found
        return {}

    def doubt(self, pair: OperatorPair, matched: Collection[OperatorPair]) -> str | None:
        """Return why a match may be wrong: its operators get their rows from other sources.

        Args:
            matched: every match; sources that are matched are the same.
        """
        a, b = self.source.places.get(pair[0]), self.job.places.get(pair[1])
        if a is None or b is None:
            return None
        same = dict(matched)
        theirs, ours = (
            {one for one in place.before if one.startswith("source_")} for place in (a, b)
        )
        named = {key for key in a.above.keys() & b.above.keys() if key[0] == "named"}
        if not theirs or not ours or named or {same.get(one) for one in theirs} & ours:
            return None
        return (
            f"{pair[1]} takes the state of {pair[0]}, which gets its rows from "
            f"{', '.join(sorted(theirs))} and not from {', '.join(sorted(ours))}: if these are not "
            "the same, let it start without state"
        )


def _traits(place: GraphPlace, side: str) -> dict[_Key, PlaceTrait]:
    return dict(place.above if side == ABOVE else place.below)


@dataclass(frozen=True, slots=True)
class _Evidence:
    """The traits that not all operators of a group have, by operator: what may tell them apart.

    Attributes:
        points: by pair, the weight of the traits that both have, or both lack.
    """

    side: str
    traits: tuple[Mapping[OperatorId, Mapping[_Key, tuple[int, str]]], ...]
    points: Mapping[OperatorPair, int]

    @staticmethod
    def of(
        places: PlaceComparison,
        side: str,
        pairs: Collection[OperatorPair],
        matched: Collection[OperatorPair],
    ) -> _Evidence:
        sides = (places.source, places.job)
        found = tuple(
            {
                one: dict(_all_traits(sides[at], side, one, at, matched))
                for one in dict.fromkeys(pair[at] for pair in pairs)
                if one in sides[at].places
            }
            for at in (0, 1)
        )
        every = [traits for group in found for traits in group.values()]
        # A trait that only one of the graphs has shows nothing: something was added or removed.
        known = (sides[0].traits & sides[1].traits) | {("matched", str(b)) for _, b in matched}
        telling = {
            key: weight
            for traits in every
            for key, (weight, _) in traits.items()
            if key in known and not all(key in other for other in every)
        }
        points = {
            (a, b): sum(
                weight
                for key, weight in telling.items()
                if _agree(key, side, key in found[0][a], key in found[1][b])
            )
            for a, b in pairs
            if a in found[0] and b in found[1]
        }
        shown = tuple(
            {
                one: {key: trait for key, trait in traits.items() if key in telling}
                for one, traits in group.items()
            }
            for group in found
        )
        return _Evidence(side, shown, points)

    def decides(self, pair: OperatorPair) -> bool:
        """Whether each of a pair has no other that is as alike."""
        mine = self.points.get(pair)
        if mine is None:
            return False
        rivals = [
            points
            for other, points in self.points.items()
            if other != pair and (other[0] == pair[0] or other[1] == pair[1])
        ]
        return bool(rivals) and mine > max(rivals)

    def why(self, pair: OperatorPair) -> str:
        a, b = self.traits[0][pair[0]], self.traits[1][pair[1]]
        both = sorted(a.keys() & b.keys(), key=lambda key: (-b[key][0], key))
        texts = [f"both {self.side} {b[key][1]}" for key in both[:_MENTIONED]]
        neither = {
            key: trait
            for traits in (*self.traits[0].values(), *self.traits[1].values())
            for key, trait in traits.items()
            if _agree(key, self.side, key in a, key in b)
        }
        if not texts:
            keys = sorted(neither, key=lambda key: (-neither[key][0], key))[:_MENTIONED]
            texts = [f"neither is {self.side} {neither[key][1]}" for key in keys]
        return f"told from others that are alike by the graphs: {', '.join(texts)}"


def _agree(key: _Key, side: str, a: bool, b: bool) -> bool:
    return (a and b) or (key[0] in _LACKING[side] and not a and not b)


def _all_traits(
    placed: PlacedOperators,
    side: str,
    operator: OperatorId,
    at: int,
    matched: Collection[OperatorPair],
) -> Iterator[tuple[_Key, tuple[int, str]]]:
    """Yield what an operator is recognized by on one side, with weight and text."""
    place = placed.places[operator]
    for key, trait in _traits(place, side).items():
        yield key, (trait.weight, trait.text)
    reached = place.before if side == ABOVE else place.after
    for pair in matched:
        if pair[at] in reached:
            yield ("matched", str(pair[1])), (_MATCHED, f"{pair[1]}, which is matched")
