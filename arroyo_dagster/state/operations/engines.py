"""Where a step of an operation runs, and how: this process, unless an `ItemRunner` is given.

A step is a function and independent items. The choice of an engine depends on the amount of work
alone, and is a value with its reason, so that reports can show it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from arroyo_dagster.state.planning.engines import EngineChoice, StepEngine, WorkAmount
from arroyo_dagster.state.storage.concurrency import CONCURRENCY, concurrently

I = TypeVar("I")  # noqa: E741
R = TypeVar("R")

OnItems = Callable[[int], None]
"""Called with the number of items that were completed since the last call, perhaps by a thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Threads:
    """How a step runs if this process runs it.

    Attributes:
        count: how many items at a time; 1 bounds the memory to that of one item.
    """

    count: int = CONCURRENCY


class ItemRunner(Protocol):
    """Runs the items of a step on the engine that it chooses."""

    @property
    def distributes(self) -> bool:
        """Whether it may choose another engine than this process."""

    def choose(
        self, step: str, amount: WorkAmount, *, only_here: str | None = None
    ) -> EngineChoice:
        """Choose the engine of a step, and report the choice.

        Args:
            only_here: why only this process can run the step; None = any engine can.
        """

    def run(
        self,
        choice: EngineChoice,
        function: Callable[[I], R],
        items: Sequence[I],
        weights: Sequence[int],
        *,
        threads: Threads = Threads(),
        on_items: OnItems = lambda count: None,
    ) -> list[R]:
        """Return `[function(item) for item in items]`.

        Args:
            choice: as `choose` returned it for this step.
            function: a module-level function, or a `functools.partial` of one. It may run several
                times for an item, and two such runs may overlap.
            weights: how much work each item is.
            on_items: reports progress.

        Raises:
            Exception: the first error in the order of `items`.
        """


@dataclass(frozen=True, slots=True)
class InProcess:
    """Runs every step in threads of this process."""

    @property
    def distributes(self) -> bool:
        """Return False: there is no other engine."""
        return False

    def choose(
        self, step: str, amount: WorkAmount, *, only_here: str | None = None
    ) -> EngineChoice:
        """Choose this process."""
        reason = only_here or "Spark is not asked for"
        return EngineChoice(step=step, engine=StepEngine.IN_PROCESS, reason=reason)

    def run(
        self,
        choice: EngineChoice,
        function: Callable[[I], R],
        items: Sequence[I],
        weights: Sequence[int],
        *,
        threads: Threads = Threads(),
        on_items: OnItems = lambda count: None,
    ) -> list[R]:
        """Run the items in threads; see `ItemRunner.run`."""

        def run_one(item: I) -> R:
            result = function(item)
            on_items(1)
            return result

        return concurrently(run_one, items, threads.count)


HERE = InProcess()
