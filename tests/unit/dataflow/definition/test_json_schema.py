"""The JSON Schema for editors tells right from wrong where a schema can."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from arroyo_dagster.dataflow.definition.diagnostics import Diagnostics
from arroyo_dagster.dataflow.definition.grammar import ROOTS, json_schema, schema_text
from arroyo_dagster.dataflow.definition.yaml_tree import read_tree
from tests.definitions import CASES
from tests.unit.dataflow.definition.test_grammar import EVERY_DATAFLOW, EVERY_PACKAGE

BEYOND_A_SCHEMA = {
    *("E02", "E03"),  # two places at once, or gone before a schema sees it
    *("E16", "E21", "E22", "E23", "E30", "E33"),  # names that are defined elsewhere
    *("E24", "E25", "E27", "E28", "E29", "E38", "E39"),  # code, and types of several parts
}


def document(text: str) -> Any:
    root = read_tree(text, Diagnostics())
    assert root is not None
    return root.plain()


def refused(kind: str, text: str) -> bool:
    validator = jsonschema.Draft7Validator(json_schema(kind))
    return next(validator.iter_errors(document(text)), None) is not None


@pytest.mark.parametrize("kind", ROOTS)
def test_the_schema_is_one_that_editors_take(kind: str) -> None:
    jsonschema.Draft7Validator.check_schema(json.loads(schema_text(kind)))


@pytest.mark.parametrize(
    ("kind", "text"), [("dataflow", EVERY_DATAFLOW), ("sdf-package", EVERY_PACKAGE)]
)
def test_the_schema_accepts_every_member(kind: str, text: str) -> None:
    assert not refused(kind, text)


def _told_by_a_schema(number: str, text: str, path: str, words: tuple[str, ...]) -> bool:
    if number in BEYOND_A_SCHEMA or (number, path) == ("E04", "types.u8"):
        return False
    if number in ("E13", "E14"):  # what an alias stands for
        return "types: {" not in text and "no_progress-of" not in text
    if number == "E10":
        return "from: b.s, type" not in text
    if number == "E18":  # a key where none is expected is only unknown
        elsewhere = any(word in ("misplaced", "SDF has none") for word in words)
        return not elsewhere or "{ttl: 5s}" in text
    if number == "E20":
        return "a_b" not in text
    if number == "E37":
        return not any(word in ("`0s`", "longer", "10000") for word in words)
    return True


TOLD = [case for case in CASES if _told_by_a_schema(*case)]


def test_a_schema_tells_most_mistakes_of_form() -> None:
    assert len(TOLD) >= 35


@pytest.mark.parametrize(("number", "text", "path", "words"), TOLD)
def test_the_schema_refuses_a_mistake_of_form(
    number: str, text: str, path: str, words: tuple[str, ...]
) -> None:
    kind = "sdf-package" if "functions:" in text and "services:" not in text else "dataflow"
    assert refused(kind, text)
