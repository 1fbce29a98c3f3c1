"""Run the items of an operation's steps on Spark where a step is large, else in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from arroyo_dagster.spark.jobs import slots
from arroyo_dagster.spark.tasks import TASKS_PER_SLOT, run_items
from arroyo_dagster.spark.thresholds import SparkThresholds
from arroyo_dagster.state.operations.engines import HERE, OnItems, Threads
from arroyo_dagster.state.planning.engines import EngineChoice, StepEngine, WorkAmount
from arroyo_dagster.state.storage.store import ObjectStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

I = TypeVar("I")  # noqa: E741
R = TypeVar("R")

GROUPS_PER_TASK = 4
"""A group of items is the unit of a retry, so a task gets several."""


@dataclass(slots=True)
class SparkItems:
    """Chooses an engine for each step by thresholds, and runs its items there.

    Attributes:
        session: returns the session; called only for a step that runs on Spark.
        store: the store that the items use.
        thresholds: from which amount of work a step runs on Spark.
        choices: the choices so far, each step and engine once.
    """

    session: Callable[[], SparkSession]
    store: ObjectStore
    thresholds: SparkThresholds = field(default_factory=SparkThresholds)
    choices: list[EngineChoice] = field(default_factory=list)

    @property
    def distributes(self) -> bool:
        """Return True: large steps run on Spark."""
        return True

    def choose(
        self, step: str, amount: WorkAmount, *, only_here: str | None = None
    ) -> EngineChoice:
        """Choose the engine of a step by the thresholds, and keep the choice."""
        choice = self.thresholds.choose(step, amount, only_here=only_here)
        if (step, choice.engine) not in {(kept.step, kept.engine) for kept in self.choices}:
            self.choices.append(choice)
        return choice

    def run(
        self,
        choice: EngineChoice,
        function: Callable[[I], R],
        items: Sequence[I],
        weights: Sequence[int],
        *,
        threads: Threads = Threads(),  # noqa: B008 - a frozen value
        on_items: OnItems = lambda count: None,
    ) -> list[R]:
        """Run the items where `choice` says; see `ItemRunner.run`.

        On Spark, items travel and are retried in groups of neighbours: what they share is sent
        once for a group.
        """
        if choice.engine is not StepEngine.SPARK:
            return HERE.run(choice, function, items, weights, threads=threads, on_items=on_items)
        if not items:
            return []
        session = self.session()
        groups = grouped(weights, slots(session) * TASKS_PER_SLOT * GROUPS_PER_TASK)
        results = run_items(
            session,
            partial(_run_group, function),
            [tuple(items[index] for index in group) for group in groups],
            [sum(max(1, weights[index]) for index in group) for group in groups],
            _by_items(on_items, len(items), sum(max(1, weight) for weight in weights)),
            store=self.store,
        )
        return [result for group in results for result in group]


def grouped(weights: Sequence[int], groups: int) -> list[range]:
    """Divide items into at most about `groups` ranges of neighbours of similar weight.

    Args:
        weights: of the items; a weight below 1 counts as 1.
        groups: how many ranges to aim at; an item that is heavier than its share is a range of its
            own.

    Returns:
        The indexes of the items of each range, in order; no range is empty.
    """
    share = max(1, -(-sum(max(1, weight) for weight in weights) // max(1, groups)))
    ranges: list[range] = []
    start = total = 0
    for index, weight in enumerate(weights):
        if index > start and total + max(1, weight) > share:
            ranges.append(range(start, index))
            start, total = index, 0
        total += max(1, weight)
    return [*ranges, range(start, len(weights))] if weights else []


def _run_group(function: Callable[[I], R], items: Sequence[I]) -> list[R]:
    return [function(item) for item in items]


def _by_items(on_items: OnItems, items: int, weight: int) -> Callable[[int], None]:
    """Convert progress in weight to progress in items; all of one are all of the other."""
    done = reported = 0

    def report(more: int) -> None:
        nonlocal done, reported
        done += more
        now = items * done // weight
        if now > reported:
            on_items(now - reported)
            reported = now

    return report
