"""What is to be deleted, as values."""

from __future__ import annotations

from dataclasses import dataclass

from arroyo_dagster.state.model.ids import Epoch, StatePath


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpirePlan:
    """What goes when epochs expire: each step is complete before the next begins.

    Attributes:
        min_epoch: the oldest epoch that somebody wants to keep.
        keep_from: the oldest epoch that stays.
        epochs: the epochs that go, oldest first.
        data: data files that no kept epoch lists, in path order.
        records: markers, subtask objects and epoch records, oldest epoch first.
        manifests: what refers to the others, oldest first, last of all: a run that stops half way
            leaves no gap in the chain of parents, and the next finds again what is left.
    """

    min_epoch: Epoch
    keep_from: Epoch
    epochs: tuple[Epoch, ...]
    data: tuple[StatePath, ...]
    records: tuple[StatePath, ...]
    manifests: tuple[StatePath, ...]

    @property
    def steps(self) -> tuple[tuple[StatePath, ...], ...]:
        # One manifest a step: an interruption must never remove a newer one before an older one.
        return (self.data, self.records, *((path,) for path in self.manifests))
