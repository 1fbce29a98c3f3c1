"""Every mistake of the errors table: its number, its place, the words a reader looks for."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from arroyo_dagster.dataflow.definition.diagnostics import InvalidDefinition
from arroyo_dagster.dataflow.definition.reading import parse_document
from arroyo_dagster.errors import DefinitionError
from tests.definitions import CASES, KEYED, dataflow


@pytest.mark.parametrize(("number", "text", "path", "words"), CASES)
def test_a_mistake_has_its_number_its_place_and_its_words(
    number: str, text: str, path: str, words: tuple[str, ...]
) -> None:
    with pytest.raises(InvalidDefinition) as caught:
        parse_document(text)
    found = [one for one in caught.value.diagnostics if (one.number, one.path) == (number, path)]
    assert found, caught.value
    for word in words:
        assert word in found[0].message
    lines = text.splitlines()
    assert 1 <= found[0].line <= len(lines)
    assert {one.number for one in caught.value.diagnostics} == {number}, caught.value


def test_all_mistakes_come_at_once_in_the_order_of_the_text() -> None:
    text = "\n".join(
        [
            "apiVersion: 0.2.0",
            "meta: {name: n, version: 0.1.0}",
            "types: {x: {type: gone}}",
            "services:",
            "  a:",
            "    states:",
            "      one: {from: nodot}",
            "      two: {type: keyed-state, properties: {key: {type: lost}, value: {type: list}}}",
            "  b:",
            "    sources: []",
        ]
    )
    with pytest.raises(InvalidDefinition) as caught:
        parse_document(text)
    error = caught.value
    assert [(one.number, one.line) for one in error.diagnostics] == [
        ("E01", 1),
        ("E04", 2),
        ("E23", 3),
        ("E39", 6),
        ("E15", 7),
        ("E14", 8),
        ("E13", 8),
        ("E39", 10),
    ]
    assert isinstance(error, DefinitionError)
    assert error.facts["line"] == 1
    shown = str(error)
    assert "service `a`" in shown
    assert all(f"line {one.line}: {one.path}" in shown for one in error.diagnostics)


def test_an_error_keeps_its_mistakes_across_processes() -> None:
    with pytest.raises(InvalidDefinition) as caught:
        parse_document("services: {a: 5}")
    again = pickle.loads(pickle.dumps(caught.value.with_file("x.yaml")))
    assert again.diagnostics == caught.value.diagnostics
    assert str(again).startswith("x.yaml: the dataflow failed validation")


@pytest.mark.parametrize(
    ("text", "number", "path"),
    [
        (dataflow(f"{{s: {KEYED}}}", rest="language: python"), "L3", "services.a.language"),
        (dataflow(f"{{s: {KEYED}}}", rest=""), "E40", "services.a.states"),
        (dataflow(rest="partition: {assign-key: {uses: k}}"), "2.4", "services.a.partition"),
        (dataflow(root="whatever: 5"), "L3", "whatever"),
    ],
)
def test_what_is_accepted_but_hardly_meant_is_a_warning(text: str, number: str, path: str) -> None:
    warnings = parse_document(text).warnings
    assert (number, path) in [(one.number, one.path) for one in warnings]


def test_a_thousand_mistakes_are_enough() -> None:
    states: dict[str, Any] = {f"s{n}": 5 for n in range(1500)}
    with pytest.raises(InvalidDefinition) as caught:
        parse_document(dataflow(str(states)))
    assert len(caught.value.diagnostics) == 1000
