"""Every field of a JSON object is what it should be, or the error names object and field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from arroyo_dagster.errors import FormatError
from arroyo_dagster.state.model.json_fields import MAX_I64, MAX_U64, Fields

Read = Callable[[Fields], Any]
HALF_A_PAIR = "\ud800"


@pytest.mark.parametrize(
    ("read", "value"),
    [
        (lambda one: one.text("f"), None),
        (lambda one: one.text("f"), 1),
        (lambda one: one.text("f"), HALF_A_PAIR),
        (lambda one: one.text("f", empty=False), ""),
        (lambda one: one.optional_text("f"), 1),
        (lambda one: one.number("f"), None),
        (lambda one: one.number("f"), -1),
        (lambda one: one.number("f"), True),
        (lambda one: one.number("f"), 1.0),
        (lambda one: one.number("f"), "1"),
        (lambda one: one.number("f"), MAX_U64 + 1),
        (lambda one: one.number("f", largest=MAX_I64), MAX_I64 + 1),
        (lambda one: one.optional_number("f"), -1),
        (lambda one: one.flag("f"), 0),
        (lambda one: one.list("f"), {"a": 1}),
        (lambda one: one.texts("f"), ["a", 1]),
        (lambda one: one.texts("f"), [HALF_A_PAIR]),
        (lambda one: one.object("f"), [1]),
        (lambda one: one.objects("f"), [{}, 1]),
        (lambda one: one.object("in").number("f"), None),
        (lambda one: one.objects("all")[0].text("f"), None),
    ],
)
def test_a_field_of_another_type_is_refused_by_its_name(read: Read, value: Any) -> None:
    values = {"f": value, "in": {"f": value}, "all": [{"f": value}]}
    with pytest.raises(FormatError, match="field f should be") as caught:
        read(Fields(values, path="the/path", next_step="report it"))
    assert caught.value.facts == {"path": "the/path"}
    assert caught.value.next_step == "report it"
