"""Shapes of YAML values, and the check that a document has them.

`grammar` describes SDF's documents by these shapes. The check here, the members that readers may
ask for, and the JSON Schema for editors are derived from it.

Source: sdf-states.md 2.2 (L3), 9 (E04).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from arroyo_dagster.dataflow.definition.diagnostics import Diagnostics
from arroyo_dagster.dataflow.definition.yaml_tree import Node
from arroyo_dagster.dataflow.errors import did_you_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Text: one of `choices` if not empty, none of `never`, matching `pattern` if not None.

    Only the JSON Schema uses `never`, `pattern` and `nullable`; `Conformity` does not check them.
    """

    choices: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    pattern: str | None = None
    nullable: bool = False


@dataclass(frozen=True, slots=True)
class Flag:
    """True or false."""


@dataclass(frozen=True, slots=True)
class Count:
    """A whole number."""


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


@dataclass(frozen=True, slots=True)
class Named:
    """A reference to a shape by its name in the grammar, so that shapes can be recursive."""

    name: str


@dataclass(frozen=True, slots=True)
class CustomShape:
    """A shape that its own reader checks, with its own error numbers.

    `later`: whether this reader also reports unknown members, since others do not read it.
    """

    shape: Shape
    later: bool = False


Shape: TypeAlias = (
    "Text | Flag | Count | Anything | Many | ByName | MappingShape | Variants | Either | Both"
    " | Named | CustomShape"
)


@dataclass(slots=True)
class Conformity:
    """Checks nodes against shapes, and tells them their members."""

    grammar: Mapping[str, Shape]
    diagnostics: Diagnostics

    def bound(self, node: Node, shape: Shape) -> Node:
        """Return the node, and all below it, with the members that the grammar has for them.

        Unknown and misplaced members are reported.
        """
        shapes = tuple(self._alternatives(node, shape))
        if isinstance(node.value, tuple):
            of = next((one.of for one in shapes if isinstance(one, Many)), Anything())
            return replace(node, value=tuple(self.bound(one, of) for one in node.value))
        names = next((one for one in shapes if isinstance(one, ByName)), None)
        tables = [one for one in shapes if isinstance(one, MappingShape)]
        if not isinstance(node.value, dict) or not (names or tables):
            return node
        if names is not None:
            members = {key: self.bound(one, names.of) for key, one in node.value.items()}
            return replace(node, value=members)
        return self._with_members(node, tables)

    def _alternatives(self, node: Node, shape: Shape) -> Iterator[Shape]:
        if isinstance(shape, Named):
            yield from self._alternatives(node, self.grammar[shape.name])
        elif isinstance(shape, CustomShape) and not shape.later:
            yield from self._alternatives(node, shape.shape)
        elif isinstance(shape, Variants):
            yield shape.by_type.get(text_of(node, "type") or "", shape.otherwise)
        elif isinstance(shape, Either | Both):
            for one in shape.shapes:
                yield from self._alternatives(node, one)
        else:
            yield shape

    def _with_members(self, node: Node, tables: list[MappingShape]) -> Node:
        fields = {name: one for table in reversed(tables) for name, one in table.fields.items()}
        spellings = {
            name: (name,) if one.also is None else (name, one.also) for name, one in fields.items()
        }
        known = {key: fields[name] for name, keys in spellings.items() for key in keys}
        members = dict(node.members)
        for key, member in node.members.items():
            if key not in known:
                self._unknown(node, key, tables, known)
            elif known[key].misplaced:
                said = f"{key} `{member.plain()}` is misplaced: {known[key].misplaced}"
                self.diagnostics.add(node.diagnostic_at(known[key].number, said, key=key))
            else:
                members[key] = self.bound(member, known[key].shape)
        return replace(node, value=members, spellings=spellings)

    def _unknown(
        self, node: Node, key: str, tables: list[MappingShape], known: Mapping[str, FieldShape]
    ) -> None:
        near = did_you_mean(key, known.keys() - node.members.keys())
        if any(table.closed for table in tables):
            said = f"unknown key; expected one of {', '.join(sorted(known))}{near}"
            self.diagnostics.add(node.diagnostic_at("E04", said, key=key))
        elif not any(table.open for table in tables):
            self.diagnostics.warn(node.diagnostic_at("L3", f"unknown key, ignored{near}", key=key))

    def check(self, node: Node, shape: Shape, number: str = "E04") -> None:
        """Report everything in `node` that does not have the shape.

        The readers check `Variants`, `Either` and `CustomShape`; this method skips them. `bound`
        reports unknown members.
        """
        if isinstance(shape, Named):
            shape = self.grammar[shape.name]
        if isinstance(shape, Text):
            self._text(node, shape, number)
        elif isinstance(shape, Flag) and not isinstance(node.value, bool):
            self._expected(node, "true or false", number)
        elif isinstance(shape, Count) and type(node.value) is not int:
            self._expected(node, "a whole number", number)
        elif isinstance(shape, Many):
            self._many(node, shape, number)
        elif isinstance(shape, ByName):
            self._by_name(node, shape, number)
        elif isinstance(shape, MappingShape):
            self._record(node, shape, number)
        elif isinstance(shape, Both):
            for one in shape.shapes:
                self.check(node, one, number)

    def _expected(self, node: Node, expected: str, number: str) -> None:
        self.diagnostics.add(node.diagnostic_at(number, f"expected {expected}, found {node.kind}"))

    def _text(self, node: Node, shape: Text, number: str) -> None:
        if node.text is None:
            self._expected(node, "text", number)
        elif shape.choices and node.text not in shape.choices:
            expected = ", ".join(shape.choices)
            near = did_you_mean(node.text, shape.choices)
            self.diagnostics.add(
                node.diagnostic_at(number, f"expected one of {expected}, found `{node.text}`{near}")
            )

    def _many(self, node: Node, shape: Many, number: str) -> None:
        if not isinstance(node.value, tuple):
            self._expected(node, "a list", number)
            return
        if len(node.value) < shape.least:
            self._expected(node, f"a list of at least {shape.least}", number)
        for item in node.value:
            self.check(item, shape.of)

    def _by_name(self, node: Node, shape: ByName, number: str) -> None:
        if not isinstance(node.value, dict):
            self._expected(node, "a mapping", number)
        for member in node.members.values():
            self.check(member, shape.of)

    def _record(self, node: Node, shape: MappingShape, number: str) -> None:
        if not isinstance(node.value, dict):
            self._expected(node, "a mapping", number)
            return
        for name, one in shape.fields.items():
            present = node.get(name)
            other = node.members.get(one.also) if one.also else None
            if other is not None and present is not other and other.value is not None:
                message = f"duplicate key `{name}`, also given as `{one.also}`"
                self.diagnostics.add(other.diagnostic_at("E03", message))
            if present is not None:
                self.check(present, one.shape, one.number)
            elif one.required and not isinstance(one.shape, CustomShape):
                self.diagnostics.add(node.diagnostic_at(one.number, f"missing `{name}`", key=name))
        if shape.one_of and not any(node.get(name) for name in shape.one_of):
            keys = " or ".join(f"`{name}`" for name in shape.one_of)
            said = f"missing {keys}{node.misspelling_of(*shape.one_of)}"
            self.diagnostics.add(node.diagnostic_at("E04", said))

    def optional_text(self, node: Node, key: str) -> str | None:
        """Return the text of a key, which must be filled; None if it is absent."""
        found = node.get(key)
        if found is not None and not (found.text or "").strip():
            self._expected(found, f"`{key}` to be text", "E04")
            return None
        return None if found is None else found.text


def text_of(node: Node | None, name: str) -> str | None:
    """Return the text of a key; None if it is absent or not text."""
    found = None if node is None else node.get(name)
    return None if found is None else found.text
