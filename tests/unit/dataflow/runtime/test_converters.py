"""Converters: records to values and back, by the declared type."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arroyo_dagster.dataflow.definition.definition import Dataflow
from arroyo_dagster.dataflow.definition.reading import parse_document
from arroyo_dagster.dataflow.definition.types import Scope
from arroyo_dagster.dataflow.runtime.converters import Converter
from tests.dataflows import builder, definition

TYPES = """
types:
  trip:
    type: object
    properties:
      pu-zone: {type: u32}
      fare: {type: f32, optional: true}
      status: {type: status}
      stops: {type: stops}
      note: {type: string, serialize: {rename: out}, deserialize: {rename: in}}
  stops: {type: list, items: {type: i16}}
  status: {type: enum, oneOf: {not-paid: {type: "null"}, paid-by: {type: string}}}
  either: {type: enum, tagging: untagged, oneOf: {n: {type: u8}, s: {type: string}}}
  maybe: {type: option, value: {type: u8}}
  pair: {type: key-value, properties: {key: {type: string}, value: {type: u8}}}
  zoned: {type: object, properties: {pu-zone: {type: u32, optional: true}}}
  blob: {type: bytes}
  tree: {type: object, properties: {name: {type: string}, below: {type: forest}}}
  forest: {type: list, items: {type: tree}}
services:
"""


@functools.cache
def converter(kind: str | None, name: str = "json", *, snake_case: bool = False) -> Converter:
    topics = {"words": kind or ""}
    text = definition(builder("pass"), topics=topics).replace("services:\n", TYPES[1:], 1)
    document = parse_document(text)
    assert isinstance(document, Dataflow)
    types = Scope.of(document.types, {})
    declared = document.topics["words"].value
    return Converter(name=name, type=declared, types=types, snake_case=snake_case)


def test_0_5_0_has_snake_case_fields_and_camel_case_variants() -> None:
    old = converter("trip", snake_case=True)
    given = {"pu_zone": 1, "status": "NotPaid", "stops": [], "in": "x"}
    trip = old.reader()(json.dumps(given))
    assert (trip.pu_zone, trip.status) == (1, "not-paid")
    written = json.loads(old.writer()(trip))
    assert written == {"pu_zone": 1, "status": "NotPaid", "stops": [], "out": "x"}


@pytest.mark.parametrize(
    ("kind", "given", "value"),
    [
        ("string", '"é"', "é"),
        ("u8", "255", 255),
        ("f64", "1", 1.0),
        ("bool", "true", True),
        ("stops", "[1, 2]", [1, 2]),
        ("status", '"not-paid"', "not-paid"),
        ("status", '{"paid-by": "me"}', {"paid-by": "me"}),
        ("either", "7", 7),
        ("either", '"seven"', "seven"),
        ("maybe", "null", None),
        ("maybe", "3", 3),
        ("pair", '{"key": "k", "value": 1}', ("k", 1)),
        ("blob", "[1, 2, 255]", b"\x01\x02\xff"),
        ("tree", '{"name": "a", "below": [{"name": "b", "below": []}]}',
         {"name": "a", "below": [{"name": "b", "below": []}]}),
        (None, '{"a": [1, {"b": null}]}', {"a": [1, {"b": None}]}),
    ],
)  # fmt: skip
def test_values_of_every_type_come_and_go(kind: str | None, given: str, value: Any) -> None:
    both = converter(kind)
    assert both.reader()(given.encode()) == both.reader()(given) == value
    assert json.loads(both.writer()(value)) == json.loads(given)


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        ("string", "1", "string"),
        ("u8", "256", "255"),
        ("u8", "1.0", "u8"),
        ("u8", "true", "u8"),
        ("f32", "1e39", "f32"),
        ("f64", "NaN", "JSON"),
        ("bool", "1", "True or False"),
        ("stops", '[1, "x"]', "1: "),
        ("stops", "{}", "a list"),
        ("trip", "[]", "an object"),
        ("trip", '{"pu-zone": 1}', "`in` is missing"),
        ("trip", '{"pu-zone": null}', "`in`"),
        ("status", '"paid-by"', "not-paid"),
        ("status", '{"a": 1, "b": 2}', "variants"),
        ("either", "300", "no variant fits"),
        ("pair", '{"key": "k"}', "key"),
        ("blob", "[256]", "0 to 255"),
        ("string", "{", "Expecting"),
        ("string", "[" * 100_000, "deep"),
        ("string", "", "Expecting"),
    ],
)
def test_what_does_not_fit_is_a_value_error_that_says_why(kind: str, given: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        converter(kind).reader()(given)


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        ("trip", {"pu-zone": 1, "more": 2}, "`more`"),
        ("trip", {"pu_zone": 1}, "missing"),
        ("trip", [1], "an object"),
        ("stops", "text", "a list"),
        ("status", "nothing", "not-paid"),
        ("status", {"not-paid": 1}, "variants"),
        ("pair", ("k",), "a pair"),
        ("blob", "text", "bytes"),
        ("string", b"bytes", "string"),
        (None, {1, 2}, "set"),
        (None, float("nan"), "nan"),
    ],
)
def test_what_cannot_be_written_is_a_value_error(kind: str | None, value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        converter(kind).writer()(value)


@pytest.mark.parametrize(
    ("kind", "raw", "value"),
    [
        ("string", b"caf\xc3\xa9", "café"),
        ("bool", b"\x03", True),
        ("bool", b"\x02", False),
        ("u16", b"\x01\x02", 258),
        ("i32", b"\xff\xff\xff\xfe", -2),
        ("u64", b"\xff" * 8, 2**64 - 1),
        ("f32", b"\x3f\x00\x00\x00", 0.5),
        ("f64", b"\x3f\xe0" + b"\x00" * 6, 0.5),
        ("blob", b"\xff\x00", b"\xff\x00"),
    ],
)
def test_raw_records_are_text_or_big_endian(kind: str, raw: bytes, value: Any) -> None:
    both = converter(kind, "raw")
    assert both.reader()(raw) == value
    assert both.reader()(both.writer()(value)) == value


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(
        st.characters(exclude_categories=["Cs"])), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(st.binary(max_size=40))
def test_bytes_that_are_anything_end_in_a_value_or_a_value_error(data: bytes) -> None:
    for kind in ("string", "trip", "either", None):
        try:
            converter(kind).reader()(data)
        except ValueError:
            continue


USUAL = (
    "object, properties: {text: {type: string}, at: {type: i64}, small: {type: u8}, on: "
    "{type: bool}, note: {type: string, optional: true}, share: {type: f64, optional: true}, "
    "stops: {type: stops}}"
)
odd_values = st.one_of(
    st.text(max_size=3),
    st.sampled_from(["\ud800", "é", None, True, False, 1.5, 255, 256, -1, 1 << 70, [], {}]),
    st.lists(st.integers(-1, 1 << 15), max_size=2),
)
usual_objects = st.fixed_dictionaries(
    {
        "text": st.text(max_size=3),
        "at": st.integers(-9, 9),
        "small": st.integers(0, 255),
        "on": st.booleans(),
        "stops": st.just([1]),
    },
    optional={
        "note": st.none() | st.text(max_size=2),
        "share": st.floats(-1, 1),
        "more": st.none(),
    },
)
members = st.sampled_from(["text", "at", "small", "on", "note", "share", "stops"])


def odd_objects() -> st.SearchStrategy[str]:
    """JSON of `usual_objects` with members that are missing or odd, and text around it."""
    return st.builds(
        lambda value, odd, missing, around: around.format(
            json.dumps({k: v for k, v in {**value, **odd}.items() if k not in missing})
        ),
        usual_objects,
        st.dictionaries(members, odd_values, max_size=2),
        st.sets(members, max_size=1),
        st.sampled_from(["{}", " {} ", "{}x", "{},{{}}"]),
    )


@given(st.lists(usual_objects.map(json.dumps) | odd_objects(), max_size=3))
def test_records_decoded_together_are_those_decoded_one_by_one(texts: list[str]) -> None:
    try:
        records = converter(USUAL).batch_reader()(texts)
    except (ValueError, LookupError, TypeError):
        return
    read = converter(USUAL).reader()

    def listed(record: Any) -> Any:
        return type(record), [(name, type(value), value) for name, value in {**record}.items()]

    assert [*map(listed, records)] == [listed(read(text)) for text in texts]


@given(st.lists(usual_objects.map(json.dumps), max_size=3))
def test_usual_records_are_decoded_together(texts: list[str]) -> None:
    assert len(converter(USUAL).batch_reader()(texts)) == len(texts)
