"""Positions of aggregates move as the SELECT does, or the map is refused."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from arroyo_dagster.state.planning.surgery.columns import aggregates_of, map_accumulators
from tests.evolved_jobs import COUNT, MOST, SUM, SUMS, Sql
from tests.formats import ExpiringTimeKeyConfig

SELECTS = st.lists(st.booleans(), min_size=1, max_size=8)
"""For each aggregate whether it keeps its arguments."""


def side(select: list[bool]) -> tuple[list[str], set[int]]:
    """What the tables of an aggregate show: names in `a`, numbers in `b`."""
    named = [f"f{at}" for at, keeps in enumerate(select) if not keeps]
    return named, {at for at, keeps in enumerate(select) if keeps}


def test_aggregates_of_several_columns_count_once_and_keys_do_not() -> None:
    config = Sql(totals=(SUM, SUMS, COUNT, MOST)).config("a").config
    assert isinstance(config, ExpiringTimeKeyConfig)
    assert aggregates_of(config) == ("sum(v)", "count(Int64(1))", "max(v)")


@given(SELECTS, SELECTS)
def test_arguments_keep_order_and_come_once(was: list[bool], now: list[bool]) -> None:
    theirs, here = side(was), side(now)
    found = map_accumulators(theirs, here, {})
    if len(theirs[1]) != len(here[1]) or len(here[1]) > 1:
        assert isinstance(found, str)
        return
    assert not isinstance(found, str)
    assert [found[number] for number in sorted(theirs[1])] == sorted(here[1])


@given(SELECTS)
def test_the_same_select_moves_nothing(select: list[bool]) -> None:
    same = {number: number for number in side(select)[1]}
    assert map_accumulators(side(select), side(select), {}, same=True) == same
    found = map_accumulators(side(select), side(select), {})
    assert found == same if len(same) < 2 else isinstance(found, str)
