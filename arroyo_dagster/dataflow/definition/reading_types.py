"""Read types from YAML: those of `types`, and the keyed-states of `states`.

Each function reports errors at its nodes, and returns None for what has one. An invalid body of a
built-in type is reported as such, and never read as an alias (spec L10).

Source: sdf-states.md 2.2 (L6, L8, L9), 2.3 to 2.9; errors E04, E12 to E14, E18 to E20.
"""

from __future__ import annotations

from collections.abc import Callable

from arroyo_dagster.dataflow.definition.durations import ACCEPTED, parse_duration_ms
from arroyo_dagster.dataflow.definition.grammar import TAGGING
from arroyo_dagster.dataflow.definition.names import column_attribute, mangled
from arroyo_dagster.dataflow.definition.shapes import FLAG, check, optional_text, text_of
from arroyo_dagster.dataflow.definition.types import (
    BUILT_IN,
    COLUMN_TYPES,
    KEY_TYPES,
    SCALARS,
    UNSUPPORTED_VALUES,
    Column,
    CompositeType,
    KeyedType,
    Member,
    NamedType,
    PlainType,
    PrimitiveType,
    RowType,
    ScalarType,
    TypeDef,
)
from arroyo_dagster.dataflow.definition.yaml_tree import Node


def read_type(node: Node) -> TypeDef | None:
    """Read a type: a mapping with `type`."""
    named = node.given("type")
    if named is None:
        message = "missing `type`" if isinstance(node.value, dict) else f"found {node.kind}"
        node.report("E04", f"expected a mapping with `type`: {message}")
        return None
    kind = named.text
    if named.value is None:
        return PlainType.NULL
    if kind is None:
        named.report("E04", f"expected the name of a type, found {named.kind}")
        return None
    if kind in _READERS:
        return _READERS[kind](node)
    if kind in ("bytes", "null"):
        return PlainType(kind)
    if not kind.strip():
        node.report("E04", "the name of a type cannot be empty", key="type")
        return None
    return SCALARS.get(kind) or NamedType(kind)


def read_declared(node: Node) -> dict[str, TypeDef | None]:
    """Read a `types` section; the types by name, None for a type with an error."""
    types: dict[str, TypeDef | None] = {}
    for name, declared in node.members.items():
        if name in BUILT_IN - {"timestamp"} or not name.strip():
            what = "the name of a built-in type" if name.strip() else "empty"
            node.report("E04", f"type name `{name}` is {what}; choose another", key=name)
        types[name] = read_type(declared)
    return types


# ---- composites ----------------------------------------------------------------------------------


def _composite(node: Node, kind: str, members: list[Member | None]) -> TypeDef | None:
    complete = tuple(member for member in members if member is not None)
    if len(complete) < len(members):
        return None
    return CompositeType(
        kind=kind,
        members=complete,
        untagged=kind == "enum" and text_of(node, "tagging") == "untagged",
        type_name=text_of(node, "type-name"),
    )


def _named_members(node: Node, kind: str, key: str) -> list[Member | None]:
    holder = node.get(key)
    if holder is None or not isinstance(holder.value, dict):
        fault = "it is missing" if holder is None else f"found {holder.kind}"
        node.report("E04", f"type {kind} needs a mapping `{key}`; {fault}", key=key)
        return [None]
    return [_member(name, member) for name, member in holder.members.items()]


def _member(name: str, node: Node) -> Member | None:
    declared = PlainType.NULL if node.value is None else read_type(node)
    if declared is None:
        return None
    optional = node.get("optional")
    if optional is not None:
        check(optional, FLAG)
    return Member(
        name=name,
        type=declared,
        optional=optional is not None and optional.value is True,
        written_as=text_of(node.get("serialize"), "rename"),
        read_as=text_of(node.get("deserialize"), "rename"),
    )


def _object(node: Node) -> TypeDef | None:
    members = _named_members(node, "object", "properties")
    members.sort(key=lambda member: "" if member is None else member.name)
    return _composite(node, "object", members)


def _enum(node: Node) -> TypeDef | None:
    tagging = node.get("tagging")
    if tagging is not None:
        check(tagging, TAGGING)
    return _composite(node, "enum", _named_members(node, "enum", "oneOf"))


def _with_members(node: Node, holder: Node | None, kind: str, *keys: str) -> TypeDef | None:
    members: list[Member | None] = []
    for key in keys:
        inner = None if holder is None else holder.get(key)
        if inner is None:
            (holder or node).report("E04", f"type {kind} needs `{key}`", key=key)
        members.append(None if inner is None else _member(key, inner))
    return _composite(node, kind, members)


# ---- keyed-state ---------------------------------------------------------------------------------


def _keyed(node: Node) -> KeyedType | None:
    key, value = read_halves(node)
    return None if key is None or value is None else KeyedType(key=key, value=value)


def read_halves(node: Node) -> tuple[TypeDef | None, TypeDef | None]:
    """Read the key type and the value type of a keyed-state, each None if it has an error."""
    holder = _required(node, "properties")
    if holder is None:
        return None, None
    key, value = _required(holder, "key"), _required(holder, "value")
    return None if key is None else _key(key), None if value is None else _value(value)


def _required(node: Node, key: str) -> Node | None:
    member = node.get(key)
    if member is None:
        node.report("E12", f"missing `{key}`", key=key)
        return None
    if not isinstance(member.value, dict):
        member.report("E04", f"expected a mapping, found {member.kind}")
        return None
    return member


def _type_name(node: Node, number: str, what: str) -> str | None:
    named = node.get("type")
    if named is not None and named.text:
        return named.text
    kind = "missing" if named is None else f"{named.kind}"
    node.report(number, f"{what}: `type` is {kind}; expected its name", key="type")
    return None


def _key(node: Node) -> TypeDef | None:
    word = _type_name(node, "E14", "key type")
    if word is None:
        return None
    declared = COLUMN_TYPES.get(word)
    if word in BUILT_IN and (declared is None or not declared.can_be_key):
        message = f"key type `{word}` is not hashable; expected one of {', '.join(KEY_TYPES)}"
        node.report("E14", message, key="type")
        return None
    return declared or NamedType(word)


def _value(node: Node) -> TypeDef | None:
    word = _type_name(node, "E13", "unsupported type for value")
    if word in ("arrow-row", "primitive"):
        return _READERS[word](node)
    if word in SCALARS and node.given("ttl"):
        return PrimitiveType(type=SCALARS[word], ttl_ms=_ttl(node))
    if word is None:
        return None
    if word in UNSUPPORTED_VALUES or word in ("keyed-state", "timestamp"):
        node.report("E13", unsupported_value(word), key="type")
        return None
    return SCALARS.get(word) or NamedType(word)


def _primitive(node: Node) -> TypeDef | None:
    holder = _required(node, "properties")
    inner = None if holder is None else holder.get("value")
    if inner is None:
        if holder is not None:
            holder.report("E12", "missing `value`", key="value")
        return None
    word = text_of(inner, "type") if isinstance(inner.value, dict) else inner.text
    if word not in SCALARS:
        inner.report("E13", unsupported_value(word or inner.kind))
        return None
    declared, ttl_ms = SCALARS[word], _ttl(node)
    if declared is ScalarType.U32 and ttl_ms is None:
        return declared
    return PrimitiveType(type=declared, ttl_ms=ttl_ms)


def unsupported_value(word: str) -> str:
    """Return the message for a value type that no state can have."""
    return (
        f"unsupported type for value: `{word}`; expected an arrow-row, a primitive or a scalar "
        f"({', '.join(SCALARS)})"
    )


# ---- arrow-rows: their columns and their TTL -----------------------------------------------------

RESERVED_COLUMNS = ("_key", "_updated_at")


def _row(node: Node) -> RowType | None:
    ttl_ms = _ttl(node)
    holder = _required(node, "properties")
    if holder is None:
        return None
    ttl = holder.get("ttl")  # the name of a column, perhaps
    if ttl is not None and not isinstance(ttl.value, dict):
        ttl.report("E18", f"ttl `{ttl.plain()}` is misplaced: put it beside `properties`")
    taken: dict[str, str] = {}
    columns = [_column(holder, name, column, taken) for name, column in holder.members.items()]
    complete = [column for column in columns if column is not None]
    if len(complete) < len(columns):
        return None
    return RowType(columns=tuple(sorted(complete, key=lambda c: c.name)), ttl_ms=ttl_ms)


def _ttl(node: Node) -> int | None:
    """Read the TTL of a value in milliseconds; None = there is none, or it is wrong."""
    ttl = node.given("ttl")
    if ttl is None:
        return None
    milliseconds = None if ttl.text is None else parse_duration_ms(ttl.text)
    if not milliseconds:
        ttl.report("E18", f"ttl `{ttl.plain()}` is no duration above 0; expected {ACCEPTED}")
    return milliseconds


def _column(holder: Node, name: str, node: Node, taken: dict[str, str]) -> Column | None:
    problem = _name_error(name, taken)
    if problem is not None:
        holder.report("E20", problem, key=name)
    word = text_of(node, "type")
    if word not in COLUMN_TYPES:
        if name == "ttl" and not isinstance(node.value, dict):
            return None  # already reported as misplaced
        node.report("E19", _column_error(name, node))
        return None
    if problem is not None:
        return None
    return Column(
        name=name,
        type=COLUMN_TYPES[word],
        attribute=column_attribute(name),
        convert=optional_text(node, "convert"),
    )


def _name_error(name: str, taken: dict[str, str]) -> str | None:
    if not name.strip():
        return "Column name is empty"
    if name in RESERVED_COLUMNS or name.startswith("_window"):
        return f"Column name `{name}` is reserved for the engine; choose another"
    for spelled in {mangled(name), column_attribute(name)}:
        if taken.setdefault(spelled, name) != name:
            return (
                f"Column name `{name}` is not unique: with `{taken[spelled]}` it is `{spelled}` "
                "in Python and SQL"
            )
    return None


def _column_error(name: str, node: Node) -> str:
    found = node.kind
    if isinstance(node.value, dict):
        named = node.get("type")
        found = "no type" if named is None else f"type `{named.plain()}`"
    return (
        f"column `{name}` has {found}; expected `{{type: …}}` with one of {', '.join(COLUMN_TYPES)}"
    )


_READERS: dict[str, Callable[[Node], TypeDef | None]] = {
    "keyed-state": _keyed,
    "arrow-row": _row,
    "primitive": _primitive,
    "object": _object,
    "enum": _enum,
    "key-value": lambda node: _with_members(
        node, node.get("properties"), "key-value", "key", "value"
    ),
    "list": lambda node: _with_members(node, node, "list", "items"),
    "option": lambda node: _with_members(node, node, "option", "value"),
}
