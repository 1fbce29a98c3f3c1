"""Bytes forecast from samples: exact where all may be read, near where rows add up or repeat."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from arroyo_dagster.errors import FormatError, InputError
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.operations.compaction.forecasts import _scaled_up
from arroyo_dagster.state.storage import MemoryStore
from arroyo_dagster.state.storage.wrappers import Scratch

SIZES = [1000 + 37 * (at % 11) for at in range(400)]
P = StatePath


def adding_up(chosen: Sequence[int]) -> int:
    return 500 + sum(SIZES[at] for at in chosen) // 3


def repeating(chosen: Sequence[int]) -> int:
    """Each file holds 60 of 6000 keys."""
    keys = {(at * 7919 + n * 104_729) % 6000 for at in chosen for n in range(60)}
    return 20 * len(keys)


@pytest.mark.parametrize(
    ("merged", "share"),
    [(adding_up, 0.3), (adding_up, 0.1), (adding_up, 0.05), (repeating, 0.3)],
)
def test_a_sample_tells_the_rest_within_a_factor(
    merged: Callable[[Sequence[int]], int], share: float
) -> None:
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


def test_all_is_merged_where_all_may_be_read() -> None:
    assert _scaled_up(SIZES, 1.0, adding_up) == adding_up(range(len(SIZES)))


def test_two_large_files_are_not_read() -> None:
    def never(chosen: Sequence[int]) -> int:
        raise AssertionError(chosen)

    assert _scaled_up([10**9, 10**9], 0.01, never) == 2 * 10**9


def test_a_broken_input_is_left_to_whoever_merges() -> None:
    def broken(chosen: Sequence[int]) -> int:
        raise FormatError("broken", path="a", next_step="look")

    assert _scaled_up(SIZES, 1.0, broken) == sum(SIZES)


def test_a_scratch_store_reads_through_and_writes_to_memory() -> None:
    store = MemoryStore()
    store.put(P("a"), b"old")
    scratch = Scratch(store)
    scratch.put(P("a"), b"newer")
    scratch.put(P("b"), b"beside")
    assert scratch.read(P("a")) == b"newer"
    assert scratch.read_range(P("b"), 2, 3) == b"sid"
    assert scratch.open_input(P("b")).read() == b"beside"
    head = scratch.head(P("b"))
    assert head is not None
    assert head.size_bytes == 6
    assert scratch.head(P("c")) is None
    assert store.read(P("a")) == b"old"
    assert store.head(P("b")) is None
    with pytest.raises(InputError, match="write-protected"):
        scratch.delete_many([P("a")])
