"""Type descriptions, from Python types and from JSON."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
from dataclasses import dataclass
from typing import Annotated, Any, NewType, Optional

import pytest

from arroyo_dagster.errors import FormatError, InputError
from arroyo_dagster.state.model import types as t

Route = NewType("Route", str)


@dataclass(frozen=True)
class Stop:
    code: str
    delay: t.I32


@dataclass
class Flight:
    number: t.U16
    stops: list[Stop]
    tail: str | None = None


@dataclass
class Loop:
    inner: list[Loop]


@dataclass
class Undefined:
    field: Nowhere  # type: ignore[name-defined]  # noqa: F821


@dataclass
class Hidden:
    field: int = dataclasses.field(init=False, default=1)


@dataclass
class WithArgument:
    field: int
    extra: dataclasses.InitVar[int]


@pytest.mark.parametrize(
    ("python_type", "form"),
    [
        (str, "string"),
        (int, "i64"),
        (bool, "bool"),
        (float, "f64"),
        (bytes, "bytes"),
        (None, "unit"),
        (type(None), "unit"),
        (t.U128, "u128"),
        (t.ISize, "isize"),
        (t.F32, "f32"),
        (t.Char, "char"),
        (Annotated[int, t.U8], "u8"),
        (Annotated[int, "a note"], "i64"),
        (Route, "string"),
        (int | None, {"option": "i64"}),
        (Optional[t.U32], {"option": "u32"}),  # noqa: UP045 - the older spelling works too
        (tuple[str, t.U8], {"tuple": ["string", "u8"]}),
        (tuple[()], {"tuple": []}),
        (list[bytes], {"list": "bytes"}),
        (dict[str, list[int]], {"map": {"key": "string", "value": {"list": "i64"}}}),
        (set[str], {"set": "string"}),
        (frozenset[str], {"set": "string"}),
        (dt.datetime, "system_time"),
        (dt.timedelta, "duration"),
        (t.SystemTimeNanos, "system_time"),
        (t.DurationNanos, "duration"),
        (t.ArrayOf(t.STRING, 3), {"array": {"item": "string", "length": 3}}),
    ],
)
def test_python_types_are_described(python_type: Any, form: t.TypeJson) -> None:
    described = t.describe(python_type)
    assert t.to_json(described) == form
    assert t.describe(described) is described
    assert t.to_json(t.from_json(json.loads(json.dumps(form)))) == form


def test_a_dataclass_is_a_struct_of_its_fields_in_order() -> None:
    described = t.describe(Flight)
    assert isinstance(described, t.StructOf)
    assert described.python is Flight
    stop = {"struct": {"name": "Stop", "fields": [["code", "string"], ["delay", "i32"]]}}
    assert t.to_json(described) == {
        "struct": {
            "name": "Flight",
            "fields": [
                ["number", "u16"],
                ["stops", {"list": stop}],
                ["tail", {"option": "string"}],
            ],
        }
    }


def test_without_classes_is_what_a_reader_of_the_json_has() -> None:
    plain = t.without_classes(t.describe(Flight))
    assert isinstance(plain, t.StructOf)
    assert plain.python is None
    assert plain != t.describe(Flight)
    assert t.without_classes(t.describe(dt.datetime)) == t.TimeOf("system_time", as_nanos=True)


def test_an_enum_has_a_json_form() -> None:
    enum = t.EnumOf(
        "State",
        (t.Variant("Finished", t.UNIT), t.Variant("RecordsRead", t.Primitive("usize"))),
    )
    form = t.to_json(enum)
    assert form == {
        "enum": {"name": "State", "variants": [["Finished", "unit"], ["RecordsRead", "usize"]]}
    }
    assert t.from_json(form) == enum


@pytest.mark.parametrize(
    "python_type",
    [
        complex,
        object,
        list,
        tuple,
        dict,
        Any,
        int | str,
        int | str | None,
        "str",
        3,
    ],
)
def test_other_types_are_refused_with_what_is_allowed(python_type: Any) -> None:
    with pytest.raises(InputError, match="cannot be encoded") as caught:
        t.describe(python_type)
    assert "dataclasses" in str(caught.value)


def test_a_refused_field_is_named() -> None:
    @dataclass
    class Bad:
        good: int
        wrong: Annotated[complex, "no"]

    with pytest.raises(InputError, match=r"complex.*Bad\.wrong"):
        t.describe(list[Bad])


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (Loop, "contains itself"),
        (Undefined, "Nowhere"),
        (Hidden, "not an argument"),
        (WithArgument, "no field"),
    ],
)
def test_dataclasses_that_cannot_be_rebuilt_are_refused(cls: type, message: str) -> None:
    with pytest.raises(InputError, match=message):
        t.describe(cls)


def test_an_option_of_an_option_is_refused() -> None:
    for item in (t.OptionOf(t.STRING), t.UNIT):
        with pytest.raises(InputError, match="told apart"):
            t.OptionOf(item)


@pytest.mark.parametrize(
    "form",
    [
        None,
        7,
        [],
        {},
        "u7",
        "",
        {"option": "i64", "list": "i64"},
        {"vector": "i64"},
        {"option": "unit"},
        {"map": {"key": "string"}},
        {"map": ["string", "i64"]},
        {"array": {"item": "u8", "length": -1}},
        {"array": {"item": "u8", "length": 2**60}},
        {"array": {"item": "u8", "length": "3"}},
        {"tuple": "i64"},
        {"struct": {"name": "A", "fields": [["a", "i64"], ["a", "i64"]]}},
        {"struct": {"name": "A", "fields": [["a"]]}},
        {"struct": {"name": 1, "fields": []}},
        {"struct": {"name": "A", "fields": [[1, "i64"]]}},
        {"struct": {"name": "A", "fields": {}, "more": 1}},
        {"enum": {"name": "E", "variants": []}},
    ],
)
def test_json_that_describes_nothing_is_a_format_error(form: object) -> None:
    with pytest.raises(FormatError, match="not the description of a type"):
        t.from_json(form)


def test_nesting_has_an_end() -> None:
    form: Any = "u8"
    for _ in range(100_000):
        form = {"list": form}
    with pytest.raises(FormatError, match="lie within each other"):
        t.from_json(form)
