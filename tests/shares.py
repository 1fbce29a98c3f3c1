"""Enumerated faults and cases, dealt out: a part of them to CI, all of them where there is time
(`make soak`)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
from _pytest.mark import ParameterSet
from hypothesis import settings

from arroyo_dagster.state import Layout

T = TypeVar("T")
LAYOUTS = pytest.mark.parametrize("layout", list(Layout), ids=[layout.value for layout in Layout])


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
    """A sixth of the points for each layout, by the argument `share`, others for the other.

    All points for both layouts are soak tests.
    """
    cases = []
    for at, one in enumerate(Layout):
        cases.append(pytest.param(one, Share(at, 3 * len(Layout)), id=one.value))
        everything = pytest.param(
            one, Share(0, 1), id=f"{one.value}-everything", marks=pytest.mark.soak
        )
        cases.append(everything)
    return pytest.mark.parametrize((layout, "share"), cases)


def dealt_out(cases: Iterable[Any], of: int) -> list[ParameterSet]:
    """Each case with a share of `of`, the next one for the next case: all points are soak tests.

    Args:
        cases: the values of a parameter; tuples for those of several.
    """
    found = []
    for at, one in enumerate(cases):
        values = one if isinstance(one, tuple) else (one,)
        name = "-".join(str(value) for value in values)
        found.append(pytest.param(*values, Share(at % of, of), id=name))
        found.append(
            pytest.param(*values, Share(0, 1), id=f"{name}-everything", marks=pytest.mark.soak)
        )
    return found


def some_of(cases: Iterable[Any], one_in: int, first: int = 0) -> list[ParameterSet]:
    """Every `one_in`-th case for CI, from the `first` on; the others are soak tests.

    Args:
        cases: the values of a parameter; tuples for those of several.
    """
    return [_case(one, in_ci=at % one_in == first % one_in) for at, one in enumerate(cases)]


def all_but(cases: Iterable[Any], soak: Sequence[Any]) -> list[ParameterSet]:
    """The cases, some of which are soak tests."""
    return [_case(one, in_ci=one not in soak) for one in cases]


def _case(values: Any, *, in_ci: bool) -> ParameterSet:
    marks = () if in_ci else (pytest.mark.soak,)
    return pytest.param(*(values if isinstance(values, tuple) else (values,)), marks=marks)


def share_or_all(of: int) -> pytest.MarkDecorator:
    """One of so many points, by the argument `share`: all of them are soak tests."""
    cases = [
        pytest.param(Share(0, of), id=f"one-in-{of}"),
        pytest.param(Share(0, 1), id="everything", marks=pytest.mark.soak),
    ]
    return pytest.mark.parametrize("share", cases)


def fewer_examples(one_in: int) -> settings:
    """One of so many examples of what Hypothesis looks at: what is dear, in any profile."""
    return settings(max_examples=max(3, settings().max_examples // one_in))
