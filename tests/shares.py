"""Enumerated faults, dealt out: every other point, to one layout or the other; all of them to both
where there is time (`make soak`)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import pytest

from arroyo_dagster.state.model.layout import Layout

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Share:
    """A share of the points at which something may go wrong.

    Attributes:
        first, of: which of how many.
    """

    first: int
    of: int

    def __call__(self, points: Iterable[T], sparse: int = 1) -> list[T]:
        """Its points; of every `sparse` ones, except where it has all, only one."""
        step = self.of * sparse if self.of > 1 else 1
        return list(itertools.islice(points, self.first, None, step))


def everywhere(layout: str) -> pytest.MarkDecorator:
    """A quarter of the points for each layout, by the argument `share`, others for the other.

    All points for both layouts are soak tests.
    """
    cases = []
    for at, one in enumerate(Layout):
        cases.append(pytest.param(one, Share(at, 2 * len(Layout)), id=one.value))
        everything = pytest.param(
            one, Share(0, 1), id=f"{one.value}-everything", marks=pytest.mark.soak
        )
        cases.append(everything)
    return pytest.mark.parametrize((layout, "share"), cases)


EITHER_OR_BOTH = pytest.mark.parametrize(
    "both", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["either", "both"]
)


def either_or_both(first: T, second: T, point: int, *, both: bool) -> tuple[T, ...]:
    """What is followed to its end behind a fault: the two in turn, or both (`make soak`)."""
    if both:
        return (first, second)
    return (second,) if point % 2 else (first,)
