"""Read types from YAML: those of `types`, and the keyed-states of `states`.

An invalid body of a built-in type is reported as such, and never read as an alias (spec L10).

Source: sdf-states.md 2.3 to 2.7, 2.9; errors E04, E12 to E14, E18 to E20.
"""

from __future__ import annotations

from collections.abc import Callable

from arroyo_dagster.dataflow.definition.diagnostics import Diagnostics
from arroyo_dagster.dataflow.definition.durations import ACCEPTED, parse_duration_ms
from arroyo_dagster.dataflow.definition.grammar import TAGGING
from arroyo_dagster.dataflow.definition.names import column_attribute, mangled
from arroyo_dagster.dataflow.definition.shapes import Conformity, Flag, text_of
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


class TypeReader:
    """Reads types; errors are added to `diagnostics`, and the result is then None."""

    def __init__(self, diagnostics: Diagnostics, shapes: Conformity) -> None:
        self._mistakes = diagnostics
        self.shapes = shapes
        self._rows = RowReader(diagnostics, shapes)

    def wrong(self, node: Node, number: str, message: str, *, key: str | None = None) -> None:
        """Report an error."""
        self._mistakes.add(node.diagnostic_at(number, message, key=key))

    # ---- any type --------------------------------------------------------------------------------

    def read(self, node: Node) -> TypeDef | None:
        """Read a type: a mapping with `type`."""
        named = node.given("type")
        if named is None:
            message = "missing `type`" if isinstance(node.value, dict) else f"found {node.kind}"
            self.wrong(node, "E04", f"expected a mapping with `type`: {message}")
            return None
        if named.value is None:
            return PlainType.NULL
        if named.text is None:
            self.wrong(named, "E04", f"expected the name of a type, found {named.kind}")
            return None
        return self._of_kind(node, named.text)

    def _of_kind(self, node: Node, kind: str) -> TypeDef | None:
        special: dict[str, Callable[[Node], TypeDef | None]] = {
            "keyed-state": self.keyed,
            "arrow-row": self._rows.read,
            "primitive": self._primitive,
            "object": self._object,
            "key-value": self._key_value,
            "enum": self._enum,
            "list": lambda one: self._inner(one, "list", "items"),
            "option": lambda one: self._inner(one, "option", "value"),
        }
        if kind in special:
            return special[kind](node)
        if kind in ("bytes", "null"):
            return PlainType(kind)
        if not kind.strip():
            self.wrong(node, "E04", "the name of a type cannot be empty", key="type")
            return None
        return SCALARS.get(kind) or NamedType(kind)

    def declared(self, node: Node) -> dict[str, TypeDef | None]:
        """Read a `types` section; the types by name, None for a type with an error."""
        found: dict[str, TypeDef | None] = {}
        for name, one in node.members.items():
            if name in BUILT_IN - {"timestamp"} or not name.strip():
                what = "the name of a built-in type" if name.strip() else "empty"
                self.wrong(node, "E04", f"type name `{name}` is {what}; choose another", key=name)
            found[name] = self.read(one)
        return found

    # ---- composites ------------------------------------------------------------------------------

    def _composite(self, node: Node, kind: str, members: list[Member | None]) -> TypeDef | None:
        complete = tuple(member for member in members if member is not None)
        if len(complete) < len(members):
            return None
        return CompositeType(
            kind=kind,
            members=complete,
            untagged=kind == "enum" and text_of(node, "tagging") == "untagged",
            type_name=text_of(node, "type-name"),
        )

    def _named_members(self, node: Node, kind: str, key: str) -> list[Member | None]:
        holder = node.get(key)
        if holder is None or not isinstance(holder.value, dict):
            found = "it is missing" if holder is None else f"found {holder.kind}"
            self.wrong(node, "E04", f"type {kind} needs a mapping `{key}`; {found}", key=key)
            return [None]
        return [self._member(name, one) for name, one in holder.members.items()]

    def _member(self, name: str, node: Node) -> Member | None:
        declared = PlainType.NULL if node.value is None else self.read(node)
        if declared is None:
            return None
        optional = node.get("optional")
        if optional is not None:
            self.shapes.check(optional, Flag())
        return Member(
            name=name,
            type=declared,
            optional=optional is not None and optional.value is True,
            written_as=text_of(node.get("serialize"), "rename"),
            read_as=text_of(node.get("deserialize"), "rename"),
        )

    def _object(self, node: Node) -> TypeDef | None:
        members = self._named_members(node, "object", "properties")
        members.sort(key=lambda member: "" if member is None else member.name)
        return self._composite(node, "object", members)

    def _enum(self, node: Node) -> TypeDef | None:
        tagging = node.get("tagging")
        if tagging is not None:
            self.shapes.check(tagging, TAGGING)
        return self._composite(node, "enum", self._named_members(node, "enum", "oneOf"))

    def _inner(self, node: Node, kind: str, key: str) -> TypeDef | None:
        inner = node.get(key)
        if inner is None:
            self.wrong(node, "E04", f"type {kind} needs `{key}`", key=key)
            return None
        return self._composite(node, kind, [self._member(key, inner)])

    def _key_value(self, node: Node) -> TypeDef | None:
        holder = node.get("properties")
        members: list[Member | None] = []
        for key in ("key", "value"):
            inner = None if holder is None else holder.get(key)
            if inner is None:
                self.wrong(holder or node, "E04", f"type key-value needs `{key}`", key=key)
            members.append(None if inner is None else self._member(key, inner))
        return self._composite(node, "key-value", members)

    # ---- keyed-state -----------------------------------------------------------------------------

    def keyed(self, node: Node) -> KeyedType | None:
        """Read the body of a keyed-state."""
        key, value = self.halves(node)
        return None if key is None or value is None else KeyedType(key=key, value=value)

    def halves(self, node: Node) -> tuple[TypeDef | None, TypeDef | None]:
        """Read the key type and the value type of a keyed-state, each None if it has an error."""
        holder = self._required(node, "properties")
        if holder is None:
            return None, None
        key, value = self._required(holder, "key"), self._required(holder, "value")
        key_type = None if key is None else self._key(key)
        return key_type, None if value is None else self.value(value)

    def _required(self, node: Node, key: str) -> Node | None:
        found = node.get(key)
        if found is None:
            self.wrong(node, "E12", f"missing `{key}`", key=key)
        elif not isinstance(found.value, dict):
            self.wrong(found, "E04", f"expected a mapping, found {found.kind}")
            return None
        return found

    def _type_name(self, node: Node, number: str, what: str) -> str | None:
        named = node.get("type")
        if named is not None and named.text:
            return named.text
        found = "missing" if named is None else f"{named.kind}"
        self.wrong(node, number, f"{what}: `type` is {found}; expected its name", key="type")
        return None

    def _key(self, node: Node) -> TypeDef | None:
        word = self._type_name(node, "E14", "key type")
        if word is None:
            return None
        declared = COLUMN_TYPES.get(word)
        if word in BUILT_IN and (declared is None or not declared.can_be_key):
            self.wrong(
                node,
                "E14",
                f"key type `{word}` is not hashable; expected one of {', '.join(KEY_TYPES)}",
                key="type",
            )
            return None
        return declared or NamedType(word)

    def value(self, node: Node) -> TypeDef | None:
        """Read the value type of a keyed-state."""
        word = self._type_name(node, "E13", "unsupported type for value")
        if word == "arrow-row":
            return self._rows.read(node)
        if word == "primitive":
            return self._primitive(node)
        if word in SCALARS and node.given("ttl"):
            return PrimitiveType(type=SCALARS[word], ttl_ms=self._rows.ttl(node))
        if word is None:
            return None
        if word in UNSUPPORTED_VALUES or word in ("keyed-state", "timestamp"):
            self.wrong(node, "E13", unsupported_value(word), key="type")
            return None
        return SCALARS.get(word) or NamedType(word)

    def _primitive(self, node: Node) -> TypeDef | None:
        holder = self._required(node, "properties")
        inner = None if holder is None else holder.get("value")
        if inner is None:
            if holder is not None:
                self.wrong(holder, "E12", "missing `value`", key="value")
            return None
        word = text_of(inner, "type") if isinstance(inner.value, dict) else inner.text
        if word not in SCALARS:
            self.wrong(inner, "E13", unsupported_value(word or inner.kind))
            return None
        declared, ttl_ms = SCALARS[word], self._rows.ttl(node)
        if declared is ScalarType.U32 and ttl_ms is None:
            return declared
        return PrimitiveType(type=declared, ttl_ms=ttl_ms)


def unsupported_value(word: str) -> str:
    """Return the message for a value type that no state can have."""
    return (
        f"unsupported type for value: `{word}`; expected an arrow-row, a primitive or a scalar "
        f"({', '.join(SCALARS)})"
    )


# ---- read arrow-rows from YAML: their columns and their TTL --------------------------------------
# Source: sdf-states.md 2.2 (L6, L8, L9), 2.4, 2.8; errors E12, E18 to E20.

RESERVED_COLUMNS = ("_key", "_updated_at")


class RowReader:
    """Reads arrow-rows; errors are added to `diagnostics`, and the result is then None."""

    def __init__(self, diagnostics: Diagnostics, shapes: Conformity) -> None:
        self._mistakes = diagnostics
        self._shapes = shapes

    def _wrong(self, node: Node, number: str, message: str, *, key: str | None = None) -> None:
        self._mistakes.add(node.diagnostic_at(number, message, key=key))

    def _required(self, node: Node) -> Node | None:
        found = node.get("properties")
        if found is None:
            self._wrong(node, "E12", "missing `properties`", key="properties")
        elif not isinstance(found.value, dict):
            self._wrong(found, "E04", f"expected a mapping, found {found.kind}")
            return None
        return found

    def read(self, node: Node) -> RowType | None:
        """Read an arrow-row: its columns, sorted by name, and its TTL."""
        ttl_ms = self.ttl(node)
        holder = self._required(node)
        if holder is None:
            return None
        ttl = holder.get("ttl")  # the name of a column, perhaps
        if ttl is not None and not isinstance(ttl.value, dict):
            self._wrong(ttl, "E18", f"ttl `{ttl.plain()}` is misplaced: put it beside `properties`")
        taken: dict[str, str] = {}
        columns = [self._column(holder, name, one, taken) for name, one in holder.members.items()]
        complete = [column for column in columns if column is not None]
        if len(complete) < len(columns):
            return None
        return RowType(columns=tuple(sorted(complete, key=lambda c: c.name)), ttl_ms=ttl_ms)

    def ttl(self, node: Node) -> int | None:
        """Read the TTL of a value in milliseconds; None = there is none, or it is wrong."""
        ttl = node.given("ttl")
        if ttl is None:
            return None
        milliseconds = None if ttl.text is None else parse_duration_ms(ttl.text)
        if not milliseconds:
            self._wrong(
                ttl, "E18", f"ttl `{ttl.plain()}` is no duration above 0; expected {ACCEPTED}"
            )
        return milliseconds

    def _column(self, holder: Node, name: str, node: Node, taken: dict[str, str]) -> Column | None:
        problem = _name_error(name, taken)
        if problem is not None:
            self._wrong(holder, "E20", problem, key=name)
        word = text_of(node, "type")
        if word not in COLUMN_TYPES:
            if name == "ttl" and not isinstance(node.value, dict):
                return None  # already reported as misplaced
            self._wrong(node, "E19", _column_error(name, node))
            return None
        if problem is not None:
            return None
        return Column(
            name=name,
            type=COLUMN_TYPES[word],
            attribute=column_attribute(name),
            convert=self._shapes.optional_text(node, "convert"),
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
