"""Parse YAML text into a tree with the line and column of every value and key.

Plain scalars are resolved by the core schema of YAML 1.2: `yes` and `1:30` are text, `012` is 12.
Duplicate keys and documents above the limits are errors. The tree is built from the parser's events
without recursion, so that deep nesting or repeated aliases cannot exhaust the stack or the memory.

Source: sdf-states.md 2.2 (L1, L2); yaml.org/spec/1.2.2, 10.3.2.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)

from arroyo_dagster.dataflow.definition.diagnostics import Diagnostic, Diagnostics

MOST_CHARACTERS = 1 << 20
MOST_NODES = 20_000
MOST_LEVELS = 64


@dataclass(slots=True)
class Node:
    """One value of the document.

    Attributes:
        path: its YAML path; empty for the root.
        line, column: the position of its start, counted from 1.
        value: a scalar, the nodes of a sequence, or the nodes of a mapping by key.
        key_places: the line and column of each key of a mapping.
        spellings: the members that readers may ask for, each with its spellings; None = any.
        diagnostics: collects the errors of the document.
    """

    path: str
    line: int
    column: int
    value: Scalar | tuple[Node, ...] | dict[str, Node]
    key_places: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    spellings: Mapping[str, tuple[str, ...]] | None = None
    diagnostics: Diagnostics = field(default_factory=Diagnostics, repr=False)

    def report(
        self, number: str, message: str, *, key: str | None = None, softened: bool = True
    ) -> None:
        """Report an error as `diagnostic_at` describes it.

        Args:
            softened: whether `Diagnostics.softened` applies to it.
        """
        self.diagnostics.add(self.diagnostic_at(number, message, key=key), softened=softened)

    def warn(self, rule: str, message: str, *, key: str | None = None) -> None:
        """Add a warning at this node, or at a key of this mapping."""
        self.diagnostics.warn(self.diagnostic_at(rule, message, key=key))

    def get(self, key: str) -> Node | None:
        """Return a member; None if this is not a mapping, or the member is absent or null.

        Raises:
            LookupError: the grammar has no such member here.
        """
        given = (self.members.get(one) for one in self._spelled(key))
        return next((one for one in given if one is not None and one.value is not None), None)

    def given(self, key: str) -> Node | None:
        """Return a member as `get` does, but also one that is null."""
        return next((self.members[one] for one in self._spelled(key) if one in self.members), None)

    def _spelled(self, key: str) -> tuple[str, ...]:
        if self.spellings is None:
            return (key,)
        if key not in self.spellings:
            raise LookupError(f"the grammar has no member `{key}` at `{self.path}`")
        return self.spellings[key]

    @property
    def members(self) -> dict[str, Node]:
        """The nodes of a mapping by key; empty if this is not a mapping."""
        return self.value if isinstance(self.value, dict) else {}

    @property
    def items(self) -> tuple[Node, ...]:
        """The nodes of a sequence; empty if this is not a sequence."""
        return self.value if isinstance(self.value, tuple) else ()

    def listed(self, key: str) -> tuple[Node, ...]:
        """The nodes of a member that is a sequence; empty if it is not one."""
        member = self.get(key)
        return () if member is None else member.items

    @property
    def text(self) -> str | None:
        """The value if it is text, else None."""
        return self.value if isinstance(self.value, str) else None

    @property
    def kind(self) -> str:
        """The kind of the value, as messages name it."""
        return next(word for kinds, word in _KINDS if isinstance(self.value, kinds))

    def plain(self) -> Any:
        """Return the value as dicts, lists and scalars."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, tuple):
            return [node.plain() for node in self.value]
        return self.value

    def diagnostic_at(self, number: str, message: str, *, key: str | None = None) -> Diagnostic:
        """Return an error at this node, or at a key of this mapping, present or not.

        The message names an unknown member that is probably meant by an absent key.
        """
        line, column, path = self.line, self.column, self.path
        if key is not None:
            line, column = self.key_places.get(key, (line, column))
            message += "" if key in self.members else self.misspelling_of(key)
            path = joined(path, key)
        return Diagnostic(line=line, column=column, path=path, number=number, message=message)

    def misspelling_of(self, *keys: str) -> str:
        """Return the end of a message that names an unknown member close to one of the keys."""
        known = {one for spelled in (self.spellings or {}).values() for one in spelled}
        unknown = [one for one in self.members if one not in known] if known else []
        for key in keys:
            for near in difflib.get_close_matches(key, unknown, n=1):
                line = self.key_places.get(near, (self.line, 0))[0]
                return f"; did you mean `{key}` by `{near}` in line {line}?"
        return ""


_KINDS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (bool, "a boolean"),
    (int, "an integer"),
    (float, "a number"),
    (str, "text"),
    (dict, "a mapping"),
    (tuple, "a list"),
    (type(None), "null"),
)


def joined(path: str, key: str) -> str:
    """Return the path of a key below a path; keys with special characters are quoted."""
    if not re.fullmatch(r"[^\s.\[\]\"']+", key):
        key = json.dumps(key, ensure_ascii=False)
    return f"{path}.{key}" if path else key


def read_tree(text: str, diagnostics: Diagnostics) -> Node | None:
    """Read one YAML document.

    Returns:
        The root; None if the text cannot be parsed, with the reason in `diagnostics`.
    """
    try:
        if len(text) > MOST_CHARACTERS:
            raise _RefusedError(1, 1, f"the text is longer than {MOST_CHARACTERS} characters")
        root = _Builder().build(text)
    except _RefusedError as error:
        line, column, message = error.args
        Node("", line, column, None, diagnostics=diagnostics).report("E04", message)
        return None
    return _placed(root, "", diagnostics)


@dataclass(slots=True)
class _Raw:
    """A node without its path, since aliases can place one node at several paths.

    Attributes:
        value: a scalar, the items of a sequence, or the keys and values of a mapping in turn.
        size, depth: how many nodes it has with those inside, and how deep they are nested.
        closed: whether it is complete.
    """

    line: int
    column: int
    value: Any
    is_mapping: bool = False
    size: int = 1
    depth: int = 1
    closed: bool = False


class _RefusedError(Exception):
    """The text is not one document within the limits: its line, its column, a message."""


class _Builder:
    """Builds a tree from the parser's events, and counts nodes at each use of an alias."""

    def __init__(self) -> None:
        self._open: list[_Raw] = [_Raw(1, 1, [])]
        self._anchors: dict[str, _Raw] = {}
        self._documents = 0
        self._nodes = 0

    def build(self, text: str) -> _Raw:
        for event in _events(text):
            mark = event.start_mark
            line, column = mark.line + 1, mark.column + 1
            if isinstance(event, DocumentStartEvent):
                self._documents += 1
                if self._documents > 1:
                    raise _RefusedError(line, column, "a second document; expected one")
            elif isinstance(event, MappingEndEvent | SequenceEndEvent):
                raw = self._open.pop()
                raw.closed = True
                self._put(raw)
            elif isinstance(event, AliasEvent):
                self._put(self._aliased(event, line, column))
            elif isinstance(event, ScalarEvent | MappingStartEvent | SequenceStartEvent):
                self._begin(event, line, column)
        if not self._open[0].value:
            raise _RefusedError(1, 1, "the document is empty; expected a mapping")
        root: _Raw = self._open[0].value[0]
        return root

    def _begin(self, event: Any, line: int, column: int) -> None:
        self._count(1, line, column)
        if isinstance(event, ScalarEvent):
            raw = _Raw(line, column, _resolved(event, line, column), closed=True)
        else:
            raw = _Raw(line, column, [], is_mapping=isinstance(event, MappingStartEvent))
        if event.anchor is not None:
            self._anchors[event.anchor] = raw
        if raw.closed:
            self._put(raw)
            return
        self._check_depth(1, line, column)
        self._open.append(raw)

    def _check_depth(self, more: int, line: int, column: int) -> None:
        if len(self._open) - 1 + more > MOST_LEVELS:
            raise _RefusedError(line, column, f"nested deeper than {MOST_LEVELS} levels")

    def _count(self, more: int, line: int, column: int) -> None:
        self._nodes += more
        if self._nodes > MOST_NODES:
            raise _RefusedError(
                line, column, f"more than {MOST_NODES} values, each use of an alias counted"
            )

    def _aliased(self, event: Any, line: int, column: int) -> _Raw:
        raw = self._anchors.get(event.anchor)
        if raw is None:
            raise _RefusedError(line, column, f"alias *{event.anchor} has no anchor before it")
        if not raw.closed:
            raise _RefusedError(line, column, f"alias *{event.anchor} lies in its own anchor")
        self._check_depth(raw.depth, line, column)
        self._count(raw.size, line, column)
        return raw

    def _put(self, raw: _Raw) -> None:
        parent = self._open[-1]
        parent.size += raw.size
        parent.depth = max(parent.depth, raw.depth + 1)
        parent.value.append(raw)


def _events(text: str) -> Iterator[Any]:
    try:
        yield from YAML(typ="safe", pure=True).parse(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        said = " ".join(part for part in (error.context, error.problem) if part)
        raise _RefusedError(line, column, f"not YAML: {said}") from error
    except (YAMLError, ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        # On malformed escapes and directives, the parser raises errors other than YAML errors.
        raise _RefusedError(1, 1, f"not YAML: {str(error).splitlines()[0:1]}") from error


def _resolved(event: Any, line: int, column: int) -> Scalar:
    tag = event.tag
    if tag is None:
        text = str(event.value)
        plain = (convert(text) for form, convert in _CORE if form.match(text))
        return next(plain, text) if event.implicit[0] else text
    convert = _BY_TAG.get(str(tag).removeprefix(_TAG_PREFIX)) if str(tag) != "!" else str
    if convert is None:
        raise _RefusedError(line, column, f"unknown tag {tag}; expected none")
    try:
        return convert(event.value)
    except ValueError:
        raise _RefusedError(line, column, f"{event.value!r} is no {tag}") from None


def _placed(raw: _Raw, path: str, diagnostics: Diagnostics) -> Node:
    """Return a node with its path. It may recurse, since the depth is already bounded."""
    node = Node(path, raw.line, raw.column, raw.value, diagnostics=diagnostics)
    if raw.is_mapping:
        _put_members(node, raw.value)
    elif isinstance(raw.value, list):
        items = enumerate(raw.value)
        node.value = tuple(_placed(item, f"{path}[{index}]", diagnostics) for index, item in items)
    return node


def _put_members(node: Node, keys_and_values: list[_Raw]) -> None:
    members: dict[str, Node] = {}
    places: dict[str, tuple[int, int]] = {}
    node.value, node.key_places = members, places
    for key, value in zip(keys_and_values[::2], keys_and_values[1::2], strict=True):
        name = key.value
        at_key = Node(node.path, key.line, key.column, None, diagnostics=node.diagnostics)
        if not isinstance(name, str):
            at_key.report("E04", "expected text as the key of a mapping; put it in quotes")
            continue
        at_key.path = joined(node.path, name)
        if name in members:
            at_key.report("E03", f"duplicate key `{name}`, first given in line {places[name][0]}")
            continue
        places[name] = (key.line, key.column)
        members[name] = _placed(value, at_key.path, node.diagnostics)


# ---- the values of plain scalars in YAML 1.2 -----------------------------------------------------
# Source: yaml.org/spec/1.2.2, 10.3.2, the core schema; sdf-states.md 2.2 (L1).

Scalar = str | int | float | bool | None

_TAG_PREFIX = "tag:yaml.org,2002:"
_CORE: tuple[tuple[re.Pattern[str], Callable[[str], Scalar]], ...] = tuple(
    (re.compile(rf"(?:{pattern})\Z"), convert)
    for pattern, convert in (
        (r"null|Null|NULL|~|", lambda text: None),
        (r"true|True|TRUE|false|False|FALSE", lambda text: text.lower() == "true"),
        (r"(?=.{1,63}\Z)[-+]?[0-9]+", int),  # a longer one is read as a float
        (r"(?=.{1,63}\Z)(?:0o[0-7]+|0x[0-9a-fA-F]+)", lambda text: int(text, 0)),
        (r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", float),
        (r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", lambda text: float(text.replace(".", ""))),
    )
)
"""The forms of plain scalars in the order of the schema's table; all others are text."""

_BY_TAG: dict[str, Callable[[str], Scalar]] = {
    "str": lambda text: text,
    "null": lambda text: None,
    "bool": lambda text: text.lower() == "true",
    "int": int,
    "float": lambda text: float(text.replace(".inf", "inf").replace(".nan", "nan")),
}
