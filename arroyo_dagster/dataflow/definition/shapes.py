"""Shapes of YAML values, and the check that a document has them.

`grammar` describes SDF's documents by these shapes. The check here, the members that readers may
ask for, and the JSON Schema for editors are derived from it.

Source: sdf-states.md 2.2 (L3), 9 (E04).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from arroyo_dagster.dataflow.definition.yaml_tree import Node
from arroyo_dagster.dataflow.errors import did_you_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalar:
    """A scalar of a type: one of `choices` if not empty, none of `never`, matching `pattern`.

    Only the JSON Schema uses `never`, `pattern` and `nullable`; `check` does not check them.
    """

    type: type = str
    choices: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    pattern: str | None = None
    nullable: bool = False


TEXT, FLAG, COUNT = Scalar(), Scalar(type=bool), Scalar(type=int)
_WORDS = {str: ("text", "string"), bool: ("true or false", "boolean")}
_WORDS[int] = ("a whole number", "integer")
"""The types of scalars, as messages and as the JSON Schema name them."""


@dataclass(frozen=True, slots=True)
class Anything:
    """Any value; it is kept as written."""


@dataclass(frozen=True, slots=True)
class Many:
    """A list of at least `least` items."""

    of: Shape
    least: int = 0


@dataclass(frozen=True, slots=True)
class ByName:
    """A mapping from names to values of one shape. `names`: the pattern of the names, if any."""

    of: Shape
    names: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldShape:
    """A key of a mapping.

    Attributes:
        also: another spelling of the key.
        number: the error number if it is required and missing, does not have its shape, or is
            misplaced.
        misplaced: where the key belongs, which is an error here; empty = it belongs here.
    """

    shape: Shape
    required: bool = False
    also: str | None = None
    number: str = "E04"
    misplaced: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MappingShape:
    """A mapping with known keys; unknown ones are ignored with a warning.

    Attributes:
        one_of: keys; at least one must be present.
        apart: keys; at most one may be present, and with `needed` exactly one must be. Their
            readers report violations.
        open: whether other keys are valid too; then no unknown key is reported.
        closed: whether unknown keys are errors, since they would change what is meant.
    """

    fields: Mapping[str, FieldShape]
    one_of: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    needed: bool = False
    open: bool = False
    closed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Variants:
    """A mapping with a shape by its `type`; `otherwise` for every other type."""

    by_type: Mapping[str, MappingShape]
    otherwise: MappingShape


@dataclass(frozen=True, slots=True)
class Either:
    """One of several shapes."""

    shapes: tuple[Shape, ...]


@dataclass(frozen=True, slots=True)
class Both:
    """All of several shapes: a mapping has the members of each."""

    shapes: tuple[Shape, ...]


@dataclass(eq=False, slots=True)
class Named:
    """A shape with a name, which is set once, so that shapes can be recursive."""

    name: str
    shape: Shape = field(default_factory=Anything)


@dataclass(frozen=True, slots=True)
class CustomShape:
    """A shape that its own reader checks, with its own error numbers.

    `later`: whether this reader also reports unknown members, since others do not read it.
    """

    shape: Shape
    later: bool = False


Shape: TypeAlias = (
    "Scalar | Anything | Many | ByName | MappingShape | Variants | Either | Both | Named"
    " | CustomShape"
)


def mapping(
    *,
    one_of: tuple[str, ...] = (),
    apart: tuple[str, ...] = (),
    needed: bool = False,
    open: bool = False,  # noqa: A002 - as the attribute is named
    closed: bool = False,
    **fields: Shape | FieldShape,
) -> MappingShape:
    """Return the shape of a mapping, as `MappingShape` describes it.

    Args:
        fields: the keys, with `_` for `-` and after a keyword; a shape is that of an optional key.
    """
    named = {
        name.rstrip("_").replace("_", "-"): shape
        if isinstance(shape, FieldShape)
        else FieldShape(shape=shape)
        for name, shape in fields.items()
    }
    return MappingShape(
        fields=named, one_of=one_of, apart=apart, needed=needed, open=open, closed=closed
    )


def required(shape: Shape, number: str = "E04", *, also: str | None = None) -> FieldShape:
    """Return a key that must be present."""
    return FieldShape(shape=shape, required=True, number=number, also=also)


# ---- the check -----------------------------------------------------------------------------------


def check(node: Node, shape: Shape, number: str = "E04", *, members_only: bool = False) -> None:
    """Report everything in `node` that does not have the shape, and tell it its members.

    Of what is below `Variants`, `Either` and `CustomShape`, only unknown and misplaced members are
    reported; their readers check the rest. So it is with `members_only`.
    """
    alternatives = [*_alternatives(node, shape, members_only)]
    for part, skipped in alternatives:
        if not skipped:
            _check_value(node, part, number)
        if isinstance(part, Many | ByName):
            for inner in node.items if isinstance(part, Many) else node.members.values():
                check(inner, part.of, members_only=skipped)
    tables = [(part, skipped) for part, skipped in alternatives if isinstance(part, MappingShape)]
    if tables and isinstance(node.value, dict):
        _check_members(node, tables)


def _alternatives(node: Node, shape: Shape, skipped: bool) -> Iterator[tuple[Shape, bool]]:
    """Yield the shapes that a node may have, and whether its reader checks it."""
    if isinstance(shape, Named):
        yield from _alternatives(node, shape.shape, skipped)
    elif isinstance(shape, CustomShape) and not shape.later:
        yield from _alternatives(node, shape.shape, True)
    elif isinstance(shape, Variants):
        yield shape.by_type.get(text_of(node, "type") or "", shape.otherwise), True
    elif isinstance(shape, Either | Both):
        for part in shape.shapes:
            yield from _alternatives(node, part, skipped or isinstance(shape, Either))
    else:
        yield shape, skipped


def _check_value(node: Node, shape: Shape, number: str) -> None:
    expected = None
    if isinstance(shape, Scalar):
        if type(node.value) is not shape.type:
            expected = _WORDS[shape.type][0]
        elif shape.choices and node.value not in shape.choices:
            choices, near = ", ".join(shape.choices), did_you_mean(str(node.value), shape.choices)
            node.report(number, f"expected one of {choices}, found `{node.value}`{near}")
    elif isinstance(shape, Many):
        if not isinstance(node.value, tuple):
            expected = "a list"
        elif len(node.value) < shape.least:
            expected = f"a list of at least {shape.least}"
    elif isinstance(shape, ByName | MappingShape) and not isinstance(node.value, dict):
        expected = "a mapping"
    if expected is not None:
        node.report(number, f"expected {expected}, found {node.kind}")


def _check_members(node: Node, tables: list[tuple[MappingShape, bool]]) -> None:
    fields = {
        name: (key, skipped)
        for table, skipped in tables[::-1]
        for name, key in table.fields.items()
    }
    node.spellings = {
        name: (name, key.also) if key.also else (name,) for name, (key, _) in fields.items()
    }
    known = {spelling: name for name, spelled in node.spellings.items() for spelling in spelled}
    for spelling, member in node.members.items():
        if spelling not in known:
            _report_unknown(node, spelling, [table for table, _ in tables], known.keys())
            continue
        key, skipped = fields[known[spelling]]
        if key.misplaced:
            message = f"{spelling} `{member.plain()}` is misplaced: {key.misplaced}"
            node.report(key.number, message, key=spelling, softened=False)
        else:
            skipped = skipped or member is not node.get(known[spelling])
            check(member, key.shape, key.number, members_only=skipped)
    for table, skipped in tables:
        if not skipped:
            _check_keys(node, table)


def _report_unknown(
    node: Node, key: str, tables: list[MappingShape], known: Collection[str]
) -> None:
    near = did_you_mean(key, set(known) - node.members.keys())
    if any(table.closed for table in tables):
        message = f"unknown key; expected one of {', '.join(sorted(known))}{near}"
        node.report("E04", message, key=key)
    elif not any(table.open for table in tables):
        node.warn("L3", f"unknown key, ignored{near}", key=key)


def _check_keys(node: Node, table: MappingShape) -> None:
    for name, key in table.fields.items():
        member = node.get(name)
        other = node.members.get(key.also) if key.also else None
        if other is not None and member is not other and other.value is not None:
            other.report("E03", f"duplicate key `{name}`, also given as `{key.also}`")
        if member is None and key.required and not isinstance(key.shape, CustomShape):
            node.report(key.number, f"missing `{name}`", key=name)
    if table.one_of and not any(node.get(name) for name in table.one_of):
        keys = " or ".join(f"`{name}`" for name in table.one_of)
        node.report("E04", f"missing {keys}{node.misspelling_of(*table.one_of)}")


def text_of(node: Node | None, name: str) -> str | None:
    """Return the text of a key; None if it is absent or not text."""
    member = None if node is None else node.get(name)
    return None if member is None else member.text


def optional_text(node: Node, key: str) -> str | None:
    """Return the text of a key, which must be filled; None if it is absent."""
    member = node.get(key)
    if member is not None and not (member.text or "").strip():
        member.report("E04", f"expected `{key}` to be text, found {member.kind}")
        return None
    return None if member is None else member.text


# ---- the JSON Schema -----------------------------------------------------------------------------


def schema_of(shape: Shape) -> dict[str, Any]:
    """Return the JSON Schema of a shape, with references to `definitions` for named ones."""
    match shape:
        case CustomShape(inner):
            return schema_of(inner)
        case Named(name):
            return {"$ref": f"#/definitions/{name}"}
        case Scalar():
            return _scalar(shape)
        case Many(item, least):
            schema = {"type": "array", "items": schema_of(item)}
            return {**schema, "minItems": least} if least else schema
        case ByName(member, names):
            schema = {"type": "object", "additionalProperties": schema_of(member)}
            return {**schema, "propertyNames": {"pattern": names}} if names else schema
        case MappingShape():
            return _mapping(shape)
        case Variants():
            return {"type": "object", "allOf": [*_cases(shape)]}
        case Both(parts):
            return {"allOf": [schema_of(part) for part in parts]}
        case Either(parts):
            return {"anyOf": [schema_of(part) for part in parts]}
    return {}


def _scalar(shape: Scalar) -> dict[str, Any]:
    kind = _WORDS[shape.type][1]
    schema: dict[str, Any] = {"type": [kind, "null"] if shape.nullable else kind}
    if shape.choices:
        schema["enum"] = list(shape.choices)
    if shape.never:
        schema["not"] = {"enum": list(shape.never)}
    if shape.pattern is not None:
        schema["pattern"] = shape.pattern
    return schema


def _cases(shape: Variants) -> Iterator[dict[str, Any]]:
    for name, table in shape.by_type.items():
        is_it = {"properties": {"type": {"const": name}}, "required": ["type"]}
        yield {"if": is_it, "then": schema_of(table)}
    known = {"properties": {"type": {"enum": list(shape.by_type)}}, "required": ["type"]}
    yield {"if": {"not": known}, "then": schema_of(shape.otherwise)}


def _mapping(shape: MappingShape) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    needed: list[str] = []
    either: list[dict[str, Any]] = []
    for name, key in shape.fields.items():
        if key.misplaced:
            continue
        inner = schema_of(key.shape)
        properties[name] = inner if key.required else _or_null(inner)
        if key.also is not None:
            properties[key.also] = properties[name]
        if key.required and key.also is not None:
            either.append(_at_least_one((name, key.also)))
        elif key.required:
            needed.append(name)
    found: dict[str, Any] = {"type": "object", "properties": properties}
    if shape.closed:
        found["additionalProperties"] = False
    if needed:
        found["required"] = needed
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
