"""Which epochs the newest one builds on, and which a rollback has left behind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from arroyo_dagster.state.model.ids import Epoch


def rolled_back(
    newest: Epoch, epochs: Iterable[Epoch], restored: Mapping[Epoch, Epoch]
) -> frozenset[Epoch]:
    """Choose the epochs that are not `newest` and no ancestors of it.

    Args:
        epochs: those that exist, in any order.
        restored: for each epoch that a rollback published, the epoch whose content it holds.
    """
    left: set[Epoch] = set()
    ancestor = newest
    for epoch in sorted({*epochs}, reverse=True):
        if epoch > ancestor:
            left.add(epoch)
        else:
            ancestor = restored.get(epoch, Epoch(max(0, epoch - 1)))
    return frozenset(left)
