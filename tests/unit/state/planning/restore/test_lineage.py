"""Which epochs a rollback has left behind, by the numbers alone."""

from __future__ import annotations

from arroyo_dagster.state import Epoch
from arroyo_dagster.state.planning.restore.partially_collected import behind_pinned, rolled_back


def left(newest: int, restored: dict[int, int], missing: tuple[int, ...] = ()) -> set[int]:
    epochs = [Epoch(n) for n in range(1, newest + 1) if n not in missing]
    return {*rolled_back(Epoch(newest), epochs, {Epoch(k): Epoch(v) for k, v in restored.items()})}


def test_without_a_rollback_every_epoch_is_an_ancestor() -> None:
    assert left(9, {}) == set()
    assert left(9, {}, missing=(3, 4)) == set()


def test_epochs_between_a_rollback_and_what_it_restored_are_left() -> None:
    assert left(9, {9: 5}) == {6, 7, 8}
    assert left(12, {9: 5}) == {6, 7, 8}


def test_a_rollback_that_was_rolled_back_itself_does_not_count() -> None:
    assert left(12, {9: 5, 12: 8}) == {9, 10, 11}


def test_a_rollback_below_another_counts_as_well() -> None:
    assert left(12, {5: 2, 12: 6}) == {3, 4, 7, 8, 9, 10, 11}


def test_it_does_not_matter_whether_the_restored_epoch_is_still_there() -> None:
    assert left(9, {9: 5}, missing=(1, 2, 3, 4, 5)) == {6, 7, 8}


def test_epochs_left_behind_pinned_ones_are_not_counted() -> None:
    def behind(epochs: list[int], *pinned: int) -> tuple[int, ...]:
        return behind_pinned([Epoch(one) for one in epochs], {Epoch(one) for one in pinned})

    assert behind([1, 2, 3]) == (1, 2, 3)
    assert behind([1, 2, 5, 6]) == (1, 2, 5, 6)
    assert behind([1, 2, 5, 6], 2) == (5, 6)
    assert behind([1, 2, 4, 5], 2) == (4, 5)
    assert behind([1, 2, 5, 6], 1) == (1, 2, 5, 6)
    assert behind([1, 2, 3], 1, 2) == (1, 2, 3)
    assert behind([2, 5, 8], 2, 5) == (8,)
    assert behind([7]) == (7,)
