"""Key ranges: who owns which routing key."""

from __future__ import annotations

from itertools import pairwise

import pytest

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.keys import (
    MAX_ROUTING_KEY,
    KeyRange,
    key_range_size,
    range_for_server,
    server_for_hash,
)


@pytest.mark.parametrize(
    ("parallelism", "size"),
    [
        (2, 9223372036854775808),
        (3, 6148914691236517206),
        (4, 4611686018427387904),
        (6, 3074457345618258603),
    ],
)
def test_ranges_have_the_sizes_arroyo_gives_them(parallelism: int, size: int) -> None:
    assert key_range_size(parallelism) == size
    assert range_for_server(0, parallelism) == KeyRange(0, size - 1)
    assert range_for_server(parallelism - 1, parallelism).end == MAX_ROUTING_KEY


@pytest.mark.parametrize("parallelism", [1, 2, 3, 5, 7, 64, 1000])
def test_ranges_touch_and_hold_every_routing_key(parallelism: int) -> None:
    ranges = [range_for_server(index, parallelism) for index in range(parallelism)]
    assert ranges[0].start == 0
    assert ranges[-1].end == MAX_ROUTING_KEY
    assert all(a.end + 1 == b.start for a, b in pairwise(ranges))
    for index, keys in enumerate(ranges):
        assert server_for_hash(keys.start, parallelism) == index
        assert server_for_hash(keys.end, parallelism) == index


def test_state_is_not_divided_as_the_shuffle_divides_it() -> None:
    assert server_for_hash(6148914691236517205, 3) == 0


def test_a_single_subtask_owns_everything() -> None:
    assert range_for_server(0, 1) == KeyRange(0, MAX_ROUTING_KEY)
    assert server_for_hash(MAX_ROUTING_KEY, 1) == 0


def test_both_ends_of_a_range_are_included() -> None:
    keys = KeyRange(10, 20)
    assert [keys.contains(key) for key in (9, 10, 20, 21)] == [False, True, True, False]
    assert keys.intersects(0, 10)
    assert keys.intersects(20, 30)
    assert keys.intersects(0, 30)
    assert not keys.intersects(0, 9)
    assert not keys.intersects(21, 30)
    assert keys.covers(10, 20)
    assert not keys.covers(9, 20)
    assert not keys.covers(10, 21)


@pytest.mark.parametrize(("start", "end"), [(2, 1), (-1, 5), (0, 2**64), (True, 5), (0.5, 1)])
def test_a_range_that_is_none_is_refused(start: int, end: int) -> None:
    with pytest.raises(InputError):
        KeyRange(start, end)


@pytest.mark.parametrize("parallelism", [0, -1, 2**31, True, 1.5, None])
def test_a_parallelism_that_is_none_is_refused(parallelism: int) -> None:
    with pytest.raises(InputError, match="parallelism"):
        range_for_server(0, parallelism)
    with pytest.raises(InputError, match="parallelism"):
        server_for_hash(0, parallelism)


@pytest.mark.parametrize("index", [-1, 3, True])
def test_an_index_no_subtask_has_is_refused(index: int) -> None:
    with pytest.raises(InputError, match="index"):
        range_for_server(index, 3)


@pytest.mark.parametrize("routing_key", [-1, 2**64, "1"])
def test_a_routing_key_outside_64_bits_is_refused(routing_key: int) -> None:
    with pytest.raises(InputError, match="routing key"):
        server_for_hash(routing_key, 3)
