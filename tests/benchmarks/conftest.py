"""Figures are ratios to a peer, measured in turn in one run: machines are shared and noisy."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest


@dataclass
class Comparison:
    """Runs two things in turn and prints the ratio of their medians."""

    name: str

    def ratio(
        self,
        ours: Callable[[Any], object],
        peer: Callable[[Any], object],
        *,
        goal: float,
        rounds: int = 7,
        prepare: Callable[[], Any] = lambda: None,
    ) -> float:
        """Time `ours` against `peer`, after a round of each that does not count.

        Args:
            prepare: makes what both are given; not timed.
        """
        times: tuple[list[float], list[float]] = ([], [])
        for turn in range(rounds + 1):
            for kept, call in zip(times, (ours, peer), strict=True):
                given = prepare()
                gc.collect()
                begun = time.perf_counter()
                call(given)
                if turn:
                    kept.append(time.perf_counter() - begun)
        return self.report(times[0], times[1], goal=goal)

    def report(self, ours: list[float], peer: list[float], *, goal: float) -> float:
        """Print the medians, their ratio, and the goal."""
        mine, other = statistics.median(ours), statistics.median(peer)
        pairs = [a / b for a, b in zip(ours, peer, strict=False)]
        print(
            f"\n{self.name}: ours {mine * 1e3:.1f} ms, peer {other * 1e3:.1f} ms, "
            f"ratio {mine / other:.2f} (pairs {min(pairs):.2f} to {max(pairs):.2f}), "
            f"goal {goal}"
        )
        return mine / other


@pytest.fixture
def comparison(request: pytest.FixtureRequest) -> Comparison:
    return Comparison(request.node.name.removeprefix("test_").replace("_", " "))
