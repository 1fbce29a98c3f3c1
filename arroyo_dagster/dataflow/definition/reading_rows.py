"""Read arrow-rows from YAML: their columns and their TTL.

Source: sdf-states.md 2.2 (L6, L8, L9), 2.4, 2.8; errors E12, E18 to E20.
"""

from __future__ import annotations

from arroyo_dagster.dataflow.definition.diagnostics import Diagnostics
from arroyo_dagster.dataflow.definition.durations import ACCEPTED, parse_duration_ms
from arroyo_dagster.dataflow.definition.names import column_attribute, mangled
from arroyo_dagster.dataflow.definition.shapes import Conformity, text_of
from arroyo_dagster.dataflow.definition.types import COLUMN_TYPES, Column, RowType
from arroyo_dagster.dataflow.definition.yaml_tree import Node

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
        self._misplaced_ttl_column(holder)
        taken: dict[str, str] = {}
        columns = [self._column(holder, name, one, taken) for name, one in holder.members.items()]
        complete = [column for column in columns if column is not None]
        if len(complete) < len(columns):
            return None
        return RowType(columns=tuple(sorted(complete, key=lambda c: c.name)), ttl_ms=ttl_ms)

    def _misplaced_ttl_column(self, holder: Node) -> None:
        ttl = holder.get("ttl")  # the name of a column, perhaps
        if ttl is not None and not isinstance(ttl.value, dict):
            self._wrong(ttl, "E18", f"ttl `{ttl.plain()}` is misplaced: put it beside `properties`")

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
