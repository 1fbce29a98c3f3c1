"""JSON Schemas for editors, generated from the grammar that the reader checks.

They cover shapes, choices of words, and durations. Only the reader checks what relates two places
of a document, such as references and duplicate names.
"""

from __future__ import annotations

import json
from typing import Any

from arroyo_dagster.dataflow.definition import grammar
from arroyo_dagster.dataflow.definition.shapes import (
    Both,
    ByName,
    Count,
    CustomShape,
    Either,
    Flag,
    Many,
    MappingShape,
    Named,
    Shape,
    Text,
    Variants,
)
from arroyo_dagster.errors import InputError

ROOTS = {"dataflow": grammar.DATAFLOW, "sdf-package": grammar.PACKAGE}


def schema_text(kind: str) -> str:
    """Return the schema of a kind of document as the text of a file."""
    return json.dumps(json_schema(kind), indent=1, ensure_ascii=False) + "\n"


def json_schema(kind: str) -> dict[str, Any]:
    """Return the schema of a kind of document, in draft 7, which most editors support.

    Args:
        kind: `dataflow` or `sdf-package`.

    Raises:
        InputError: `kind` is unknown.
    """
    if kind not in ROOTS:
        raise InputError(f"no schema of that kind; expected one of {', '.join(ROOTS)}", given=kind)
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": f"{kind}.yaml of Stateful Dataflow",
        **_of(ROOTS[kind]),
        "definitions": {name: _of(shape) for name, shape in grammar.GRAMMAR.items()},
    }


def _of(shape: Shape) -> dict[str, Any]:
    if isinstance(shape, CustomShape):
        return _of(shape.shape)
    if isinstance(shape, Named):
        return {"$ref": f"#/definitions/{shape.name}"}
    if isinstance(shape, Text):
        found: dict[str, Any] = {"type": ["string", "null"] if shape.nullable else "string"}
        if shape.choices:
            found["enum"] = list(shape.choices)
        if shape.never:
            found["not"] = {"enum": list(shape.never)}
        if shape.pattern is not None:
            found["pattern"] = shape.pattern
        return found
    if isinstance(shape, Flag):
        return {"type": "boolean"}
    if isinstance(shape, Count):
        return {"type": "integer"}
    if isinstance(shape, Many):
        least = {"minItems": shape.least} if shape.least else {}
        return {"type": "array", "items": _of(shape.of), **least}
    if isinstance(shape, ByName):
        names = {"propertyNames": {"pattern": shape.names}} if shape.names else {}
        return {"type": "object", "additionalProperties": _of(shape.of), **names}
    if isinstance(shape, MappingShape):
        return _record(shape)
    if isinstance(shape, Variants):
        cases = [
            {
                "if": {"properties": {"type": {"const": name}}, "required": ["type"]},
                "then": _of(one),
            }
            for name, one in shape.by_type.items()
        ]
        known = {"properties": {"type": {"enum": list(shape.by_type)}}, "required": ["type"]}
        cases.append({"if": {"not": known}, "then": _of(shape.otherwise)})
        return {"type": "object", "allOf": cases}
    if isinstance(shape, Both):
        return {"allOf": [_of(one) for one in shape.shapes]}
    return {"anyOf": [_of(one) for one in shape.shapes]} if isinstance(shape, Either) else {}


def _record(shape: MappingShape) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    required: list[str] = []
    either: list[dict[str, Any]] = []
    belonging = {name: one for name, one in shape.fields.items() if not one.misplaced}
    for name, one in belonging.items():
        inner = _of(one.shape)
        properties[name] = inner if one.required else _or_null(inner)
        if one.also is not None:
            properties[one.also] = properties[name]
        if one.required and one.also is not None:
            either.append(_at_least_one((name, one.also)))
        elif one.required:
            required.append(name)
    found: dict[str, Any] = {"type": "object", "properties": properties}
    if shape.closed:
        found["additionalProperties"] = False
    if required:
        found["required"] = required
    if shape.one_of:
        either.append(_at_least_one(shape.one_of))
    if shape.apart:
        either.append({"not": {"required": list(shape.apart)}})
    if shape.needed:
        either.append(_at_least_one(shape.apart))
    return {**found, "allOf": either} if either else found


def _at_least_one(names: tuple[str, ...]) -> dict[str, Any]:
    return {"anyOf": [{"required": [name]} for name in names]}


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Also allow null: a key without a value counts as absent."""
    kind = schema.get("type")
    if not schema or (isinstance(kind, list) and "null" in kind):
        return schema
    return {"anyOf": [schema, {"type": "null"}]}
