"""Key ranges: who owns which routing key."""

from __future__ import annotations

from itertools import pairwise

import pytest

from arroyo_dagster.state import KeyRange, range_for_server, server_for_hash
from arroyo_dagster.state.model.keys import key_range_size
from tests.formats import MAX_ROUTING_KEY


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
