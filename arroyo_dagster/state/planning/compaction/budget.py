"""The order of merges or rewrites, and how many of them fit into a budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from arroyo_dagster.state.model.compaction import Budget, LeftOut, MergeOrder
from arroyo_dagster.state.model.ids import OperatorId, StatePath, TableName


class Costly(Protocol):
    """Work on files of one table; its cost is the number of bytes to read."""

    @property
    def operator(self) -> OperatorId: ...
    @property
    def table(self) -> TableName: ...
    @property
    def paths(self) -> tuple[StatePath, ...]: ...
    @property
    def size_bytes(self) -> int: ...


_C = TypeVar("_C", bound=Costly)


def _first(order: MergeOrder, merges: Sequence[_C], gain: Callable[[_C], int]) -> list[_C]:
    if order is MergeOrder.GAIN:
        return sorted(merges, key=lambda one: gain(one) / max(1, one.size_bytes), reverse=True)
    if order is MergeOrder.SMALLEST:
        return sorted(merges, key=lambda merge: merge.size_bytes)
    return list(merges)


def within_budget(
    budget: Budget, merges: Sequence[_C], gain: Callable[[_C], int]
) -> tuple[list[_C], list[LeftOut]]:
    """Take the merges that fit into a budget, in its order, and return the reason for each other.

    Args:
        gain: returns by how many files at least one merge reduces the number of files.
    """
    taken: list[_C] = []
    left: list[LeftOut] = []
    tables: set[tuple[OperatorId, TableName]] = set()
    bytes_left, files_left = budget.size_bytes, budget.files
    for merge in _first(budget.order, merges, gain):
        table = (merge.operator, merge.table)
        reason = None
        if budget.min_gain_files > 1 and gain(merge) < budget.min_gain_files:
            reason = (
                f"it removes only {gain(merge)} files, less than the minimum of "
                f"{budget.min_gain_files}"
            )
        elif budget.merges is not None and len(taken) >= budget.merges:
            reason = budget.merges_reason
        elif bytes_left is not None and merge.size_bytes > bytes_left:
            reason = f"over the budget of {budget.size_bytes} bytes"
        elif files_left is not None and len(merge.paths) > files_left:
            reason = f"over the budget of {budget.files} files"
        elif budget.tables is not None and table not in tables and len(tables) == budget.tables:
            reason = f"over the budget of {budget.tables} tables"
        if reason is not None:
            left.append(
                LeftOut(operator=table[0], table=table[1], reason=reason, files=merge.paths)
            )
            continue
        taken.append(merge)
        tables.add(table)
        bytes_left = None if bytes_left is None else bytes_left - merge.size_bytes
        files_left = None if files_left is None else files_left - len(merge.paths)
    return taken, left
