"""Type descriptions, from Python types and from JSON."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
from dataclasses import dataclass
from typing import Annotated, Any, NewType, Optional

import pytest

from arroyo_dagster.errors import FormatError, InputError
from tests.formats import types as t

Route = NewType("Route", str)


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


@pytest.mark.parametrize(
    "python_type", [complex, object, list, tuple, dict, Any, int | str, int | str | None, "str", 3]
)
def test_other_types_are_refused_with_what_is_allowed(python_type: Any) -> None:
    with pytest.raises(InputError, match="cannot be encoded") as caught:
        t.describe(python_type)
    assert "dataclasses" in str(caught.value)


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
