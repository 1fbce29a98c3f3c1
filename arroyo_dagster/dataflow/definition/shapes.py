"""Shapes of YAML values, and the check that a document has them.

`grammar` describes SDF's documents by these shapes. Both the check here and the JSON Schema for
editors are derived from it.

Source: sdf-states.md 2.2 (L3), 9 (E04).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
        number: the error number if it is required and missing, or does not have its shape.
    """

    shape: Shape
    required: bool = False
    also: str | None = None
    number: str = "E04"


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
class Named:
    """A reference to a shape by its name in the grammar, so that shapes can be recursive."""

    name: str


@dataclass(frozen=True, slots=True)
class CustomShape:
    """A shape that its own reader checks, with its own error numbers."""

    shape: Shape


Shape: TypeAlias = (
    "Text | Flag | Count | Anything | Many | ByName | MappingShape | Variants | Either | Named"
    " | CustomShape"
)


@dataclass(slots=True)
class Conformity:
    """Checks nodes against shapes."""

    grammar: Mapping[str, Shape]
    diagnostics: Diagnostics
    _warned: set[str] = field(default_factory=set)

    def check(self, node: Node, shape: Shape, number: str = "E04") -> None:
        """Report everything in `node` that does not have the shape.

        The readers check `Variants`, `Either` and `CustomShape`; this method skips them.
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
            self._field(node, name, one)
        if shape.one_of and not any(node.get(name) for name in shape.one_of):
            keys = " or ".join(f"`{name}`" for name in shape.one_of)
            self.diagnostics.add(node.diagnostic_at("E04", f"missing {keys}"))
        self.unknown_keys(node, shape)

    def _field(self, node: Node, name: str, one: FieldShape) -> None:
        found, other = node.get(name), node.get(one.also) if one.also else None
        if found is not None and other is not None:
            message = f"duplicate key `{name}`, also given as `{one.also}`"
            self.diagnostics.add(other.diagnostic_at("E03", message))
        present = found or other
        if present is not None:
            self.check(present, one.shape, one.number)
        elif one.required and not isinstance(one.shape, CustomShape):
            self.diagnostics.add(node.diagnostic_at(one.number, f"missing `{name}`", key=name))

    def optional_text(self, node: Node, key: str) -> str | None:
        """Return the text of a key, which must be filled; None if it is absent."""
        found = node.get(key)
        if found is not None and not (found.text or "").strip():
            self._expected(found, f"`{key}` to be text", "E04")
            return None
        return None if found is None else found.text

    def unknown_keys(self, node: Node, shape: MappingShape) -> None:
        """Warn of keys that the shape does not have, once per path."""
        if shape.open or node.path in self._warned:
            return
        self._warned.add(node.path)
        known = set(shape.fields) | {one.also for one in shape.fields.values() if one.also}
        for key in node.members:
            if key not in known:
                near = did_you_mean(key, known - set(node.members))
                if shape.closed:
                    said = f"unknown key; expected one of {', '.join(sorted(known))}{near}"
                    self.diagnostics.add(node.diagnostic_at("E04", said, key=key))
                else:
                    said = f"unknown key, ignored{near}"
                    self.diagnostics.warn(node.diagnostic_at("L3", said, key=key))


def pick(node: Node, name: str) -> Node | None:
    """Return the node of a key in either spelling, with dashes or with underscores."""
    return node.get(name) or node.get(name.replace("-", "_"))


def text_of(node: Node | None, name: str) -> str | None:
    """Return the text of a key; None if it is absent or not text."""
    found = None if node is None else node.get(name)
    return None if found is None else found.text
