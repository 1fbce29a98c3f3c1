"""Read the section `tests` of a definition, and say how an outcome differs from the expected one.

The section is an extension of this project; SDF ignores it.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from arroyo_dagster.dataflow.definition.definition import Dataflow, Package
from arroyo_dagster.dataflow.definition.diagnostics import InvalidDefinition
from arroyo_dagster.dataflow.definition.names import mangled
from arroyo_dagster.dataflow.definition.shapes import Many, MappingShape, check
from arroyo_dagster.dataflow.definition.yaml_tree import Node
from arroyo_dagster.dataflow.errors import did_you_mean
from arroyo_dagster.errors import ArroyoStateError

_MOST_LINES = 40
"""The maximum number of lines of one difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One way in which an outcome differs from the expected one.

    Attributes:
        line: the line of the definition that expects something else.
        what: what differs.
        lines: what was expected and is missing, each after `- `, and what was found, after `+ `.
    """

    line: int
    what: str
    lines: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join((f"line {self.line}: {self.what}", *(f"  {line}" for line in self.lines)))


@dataclass(frozen=True, slots=True, kw_only=True)
class TestOutcome:
    """The outcome of a test.

    Attributes:
        function: the function that was called; empty for a test of a dataflow.
        line: the line of the test in its definition.
        differences: how it differs from what was expected; empty = it passed.
    """

    __test__ = False  # not a test class of pytest

    name: str
    function: str = ""
    line: int
    differences: tuple[Difference, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether the test passed."""
        return not self.differences

    @property
    def problem(self) -> str | None:
        """What was expected and found; None = it passed."""
        return "\n".join(map(str, self.differences)) or None


# ---- the section ---------------------------------------------------------------------------------


def read_entries(
    document: Dataflow | Package, shape: MappingShape, check_entry: Callable[[Node], None]
) -> tuple[Node, ...]:
    """Return the entries of the section; none if there is no section.

    Args:
        document: the definition.
        shape: the shape of an entry.
        check_entry: reports what the shape does not say of an entry, which is a mapping.

    Raises:
        InvalidDefinition: the section has errors; with all of them.
    """
    if document.tests is None:
        return ()
    tests, what = document.tests, "dataflow" if isinstance(document, Dataflow) else "package"
    check(tests, Many(shape))
    for entry in tests.items:
        if isinstance(entry.value, dict):
            check_entry(entry)
    if errors := tests.diagnostics.take():
        raise InvalidDefinition(what, errors)
    return tests.items


def arguments_of(
    entry: Node, shape: MappingShape, *, nullable: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the members of a valid entry as keyword arguments.

    Null counts as absent, except for the members in `nullable`.
    """
    given = {key: node for key in shape.fields if (node := entry.given(key)) is not None}
    return {
        mangled(key): node.plain()
        for key, node in given.items()
        if node.value is not None or key in nullable
    }


def check_expectation(entry: Node, keys: Sequence[str], *, nullable: Sequence[str] = ()) -> None:
    """Report an entry that expects nothing. `nullable`: the keys that expect something if null."""
    if not any(entry.get(key) or (key in nullable and entry.given(key)) for key in keys):
        listed = ", ".join(f"`{key}`" for key in keys)
        entry.report("E04", f"expects nothing: give one of {listed}")


def check_known(node: Node | None, what: str, known: Iterable[str]) -> None:
    """Report keys of a mapping that are not among the known names; `-` and `_` are equal."""
    names = list(known)
    same = {mangled(name) for name in names}
    for name in () if node is None else node.members:
        if node is not None and mangled(name) not in same:
            near = did_you_mean(name, names) or f"; there are {', '.join(names) or 'none'}"
            node.report("E04", f"there is no {what} `{name}`{near}", key=name)


def line_at(entry: Node, *path: str) -> int:
    """Return the line of the key at a path below a node, or of the last key that there is."""
    line = entry.line
    node: Node | None = entry
    for key in path:
        if node is None or key not in node.key_places:
            break
        line, node = node.key_places[key][0], node.members.get(key)
    return line


# ---- differences ---------------------------------------------------------------------------------


def as_text(value: Any) -> str:
    """Return a value as JSON; values that are equal as JSON have equal texts: 1.0 and 1."""
    return json.dumps(_canonical(value), ensure_ascii=False, sort_keys=True, default=str)


def _canonical(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _canonical(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def compared(
    line: int, what: str, expected: Sequence[str], found: Sequence[str]
) -> list[Difference]:
    """Return how two lists of texts differ: one difference, or none if they are equal."""
    lines: list[str] = []
    matcher = difflib.SequenceMatcher(None, expected, found, autojunk=False)
    for kind, start, stop, other_start, other_stop in matcher.get_opcodes():
        if kind != "equal":
            lines += [f"- {line}" for line in expected[start:stop]]
            lines += [f"+ {line}" for line in found[other_start:other_stop]]
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"and {len(lines) - _MOST_LINES} more lines"]
    return [Difference(line=line, what=what, lines=tuple(lines))] if lines else []


def row_texts(rows: Mapping[str, Any]) -> list[str]:
    """Return the rows of a state as texts, sorted by key."""
    return sorted(f"{key}: {as_text(row)}" for key, row in rows.items())


def error_text(error: BaseException) -> str:
    """Return an error of a function or of the test itself as the text that outcomes show."""
    said = error.message if isinstance(error, ArroyoStateError) else str(error)
    return f"{type(error).__name__}: {said}"
