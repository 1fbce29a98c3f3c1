"""Bytes forecast from samples: exact where all may be read, near where rows add up or repeat."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from arroyo_dagster.state.operations.compaction.plan import _scaled_up

SIZES = [1000 + 37 * (at % 11) for at in range(400)]


def adding_up(chosen: Sequence[int]) -> int:
    return 500 + sum(SIZES[at] for at in chosen) // 3


def repeating(chosen: Sequence[int]) -> int:
    """Each file holds 60 of 6000 keys."""
    keys = {(at * 7919 + n * 104_729) % 6000 for at in chosen for n in range(60)}
    return 20 * len(keys)


@pytest.mark.parametrize(
    ("merged", "share"), [(adding_up, 0.3), (adding_up, 0.1), (adding_up, 0.05), (repeating, 0.3)]
)
def test_sample_forecasts_the_rest(merged: Callable[[Sequence[int]], int], share: float) -> None:
    read: list[int] = []

    def counted(chosen: Sequence[int]) -> int:
        assert list(chosen) == sorted(set(chosen))
        read.extend(chosen)
        return merged(chosen)

    expected = merged(range(len(SIZES)))
    assert expected / 1.5 <= _scaled_up(SIZES, share, counted) <= expected * 1.5
    assert sum(SIZES[at] for at in read) <= share * sum(SIZES)


def test_keys_that_a_small_sample_does_not_show_to_repeat_give_an_upper_bound() -> None:
    forecast = _scaled_up(SIZES, 0.05, repeating)
    assert repeating(range(len(SIZES))) <= forecast <= sum(SIZES)
