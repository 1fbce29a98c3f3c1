"""Which epochs the newest one builds on, and which were rolled back."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence

from arroyo_dagster.state.model.ids import Epoch


def rolled_back(
    newest: Epoch, epochs: Iterable[Epoch], restored: Mapping[Epoch, Epoch]
) -> frozenset[Epoch]:
    """Return the epochs that are neither `newest` nor its ancestors.

    Args:
        epochs: the existing epochs, in any order.
        restored: for each epoch that a rollback published, the epoch whose content it has.
    """
    left: set[Epoch] = set()
    ancestor = newest
    for epoch in sorted({*epochs}, reverse=True):
        if epoch > ancestor:
            left.add(epoch)
        else:
            ancestor = restored.get(epoch, Epoch(max(0, epoch - 1)))
    return frozenset(left)


def behind_pinned(epochs: Sequence[Epoch], pinned: Collection[Epoch]) -> tuple[Epoch, ...]:
    """Return the epochs after the last gap that follows a pinned epoch; all if there is none.

    Args:
        epochs: the existing epochs, ascending.
    """
    start = 0
    for index, (earlier, later) in enumerate(itertools.pairwise(epochs), start=1):
        if later - earlier > 1 and earlier in pinned:
            start = index
    return tuple(epochs[start:])
