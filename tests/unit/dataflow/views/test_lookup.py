"""Look-ups by key: what is searched, what is indexed, and a dict give the same answers."""

from __future__ import annotations

import ast

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arroyo_dagster.dataflow.views.frames import KeyLookup, Pairs
from tests.dataflows import Flow, builder, definition, reader, row_of


def pairs_of(values: dict[str, int]) -> Pairs:
    keys = sorted(values)
    return Pairs(pl.DataFrame({"_key": keys, "value": [values[key] for key in keys]}))


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 9)), st.lists(st.text(max_size=3)))
def test_pairs_answer_as_a_dict_does(values: dict[str, int], others: list[str]) -> None:
    pairs = pairs_of(values)
    asked = [*values, *others] * 2  # beyond a sixteenth of the keys: searched, then indexed
    assert [pairs.get(key) for key in asked] == [values.get(key) for key in asked]
    assert [key in pairs for key in asked] == [key in values for key in asked]
    assert list(pairs) == sorted(values.items())
    assert pairs == sorted(values.items())
    assert dict(pairs) == values
    assert pairs[:2] == sorted(values.items())[:2]


@given(st.lists(st.sampled_from(["a", "b", "c", "ä", "\U0001f600", "\uffff", ""]), max_size=40))
def test_first_row_of_a_key_counts_in_any_order(keys: list[str]) -> None:
    for listed in (keys, sorted(keys)):
        lookup = KeyLookup(pl.DataFrame({"_key": listed}, schema={"_key": pl.String}))
        for key in [*keys, "d", *keys]:
            expected = listed.index(key) if key in listed else None
            assert lookup.find(key) == expected


def test_keys_of_numbers_and_bools_are_found_by_value() -> None:
    pairs = pairs_of({"1": 10, "true": 20})
    assert (pairs.get(1), pairs.get(True), pairs.get(2, 5)) == (10, 20, 5)
    assert 1 in pairs
    assert ("1", 10) in pairs
    assert ("1", 11) not in pairs
    assert None not in pairs
    assert pairs[-1] == ("true", 20)
    with pytest.raises(IndexError):
        pairs[2]


READ = """
found = cells()
row = rows().get(record)
answer = [found.get(record, 0), record in found, row and row["n"], record in rows(), [*found][0]]
return repr(answer)
"""


def test_a_reader_looks_up_by_key_at_every_epoch() -> None:
    services = (
        builder("counts().increment(1)", name="cells", state="counts")
        + builder(
            "r = last()\nr.n += 1\nr.update()", name="rows", state="last", value=row_of(n="u32")
        )
        + reader(READ, states="{cells: {from: cells.counts}, rows: {from: rows.last}}")
    )
    flow = Flow(definition(services, converter="raw"))
    flow.send("words", ["b", "a", "b"]).send("asked", ["a", "b", "c"])
    flow.send("words", ["a", "c"]).send("asked", ["a", "c"])
    assert [ast.literal_eval(one) for one in flow.sinks["answers"].values] == [
        [1, True, 1, True, ("a", 1)],
        [2, True, 2, True, ("a", 1)],
        [0, False, None, False, ("a", 1)],
        [2, True, 2, True, ("a", 2)],
        [1, True, 1, True, ("a", 2)],
    ]
