"""Whatever stands in a definition, reading it ends in a definition or in typed errors."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from arroyo_dagster.dataflow.definition.diagnostics import (
    KIND_OF_NUMBER,
    Diagnostics,
    InvalidDefinition,
)
from arroyo_dagster.dataflow.definition.reading import parse_document
from arroyo_dagster.dataflow.definition.yaml_tree import read_tree
from arroyo_dagster.dataflow.topics.bindings import read_bindings

DATA = Path(__file__).parents[1] / "unit" / "dataflow" / "definition" / "data"
TEXTS = [path.read_text() for path in sorted(DATA.glob("*.yaml"))]


def _plain(text: str) -> Any:
    root = read_tree(text, Diagnostics())
    assert root is not None
    return root.plain()


PLAINS = [_plain(text) for text in TEXTS]
WORDS = st.sampled_from(
    [
        *("type", "properties", "key", "value", "states", "services", "from", "system", "name"),
        *("keyed-state", "arrow-row", "primitive", "object", "list", "enum", "option", "null"),
        *("transforms", "steps", "window", "tumbling", "sliding", "duration", "slide", "ttl"),
        *("run", "uses", "operator", "source", "sink", "items", "oneOf", "imports", "pkg", "meta"),
        *("partition", "flush", "assign-key", "update-state", "schema", "topics", "", "a.b", "."),
        *("per-light", "windowed.per-light", "1s", "0s", "u32", "string", "fn f()", "def f(): 1"),
    ]
)
LEAVES = WORDS | st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=10,
)


def read_all(text: str) -> None:
    """Read a text in every way."""
    tried(lambda: parse_document(text))
    tried(lambda: parse_document(text, packages={}))
    tried(lambda: parse_document(text, legacy=True, extended=True))


def tried(read: Callable[[], Any]) -> Any:
    """What was read; None if it was refused, in the way it should be."""
    try:
        return read()
    except InvalidDefinition as error:
        refused = error
    assert refused.diagnostics
    assert {one.number for one in refused.diagnostics} <= KIND_OF_NUMBER.keys()
    assert str(refused)
    return None


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    read_all(text)


@given(st.sampled_from(TEXTS), st.data())
def test_a_damaged_text_is_read_or_refused(text: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 40)))
    read_all(text[:start] + data.draw(st.text(" \n:-{}[]&*!|>'\"%@#a1\t", max_size=8)) + text[end:])


def _spots(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    members = value.items() if isinstance(value, dict) else enumerate(value)
    found = [path]
    for key, one in members:
        inner = (*path, key)
        found += _spots(one, inner) if isinstance(one, dict | list) else [inner]
    return found


def _changed(value: Any, path: tuple[Any, ...], put: Any, *, drop: bool) -> Any:
    if not path:
        return put
    copy = dict(value) if isinstance(value, dict) else list(value)
    if drop and len(path) == 1:
        del copy[path[0]]
    else:
        copy[path[0]] = _changed(copy[path[0]], path[1:], put, drop=drop)
    return copy


@given(
    st.sampled_from(PLAINS),
    st.integers(),
    st.lists(st.tuples(TREES, st.booleans()), min_size=1, max_size=3),
)
def test_a_definition_with_other_parts_put_in_is_read_or_refused(
    plain: Any, seed: int, changes: list[tuple[Any, bool]]
) -> None:
    chance = random.Random(seed)
    for put, drop in changes:
        if isinstance(plain, dict | list):
            plain = _changed(plain, chance.choice(_spots(plain)), put, drop=drop)
    read_all(json.dumps(plain))


@given(TREES)
def test_any_tree_of_the_grammars_words_is_read_or_refused(tree: Any) -> None:
    read_all(json.dumps(tree))
    read_all(json.dumps({"services": {"a": tree}}))
    read_all(json.dumps({"states": tree, "functions": {"f": tree}}))
    read_all(
        json.dumps(
            {"services": {"a": {"states": {"s": tree}, "transforms": tree}}, "types": {"t": tree}}
        )
    )


PIECES = st.sampled_from(
    [
        *(
            "sources:",
            "sinks:",
            "functions:",
            "env:",
            " w: ",
            "jsonl",
            ":",
            "x",
            "{",
            "}",
            "[",
            "]",
        ),
        *("follow", "true", "rate", "5", "?", "=", "\n", " ", ",", "null", "&a ", "*a", "- ", "'"),
    ]
)


@given(st.lists(PIECES, max_size=40))
def test_any_bindings_file_is_read_or_refused_with_its_mistakes(pieces: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "bindings.yaml"
        file.write_text("".join(pieces))
        try:
            found = read_bindings(file)
        except InvalidDefinition as error:
            told = [one.message for one in error.diagnostics if one.line > 0]
        else:
            told = [f"{one.topic} {one.kind}" for one in found.sources.values()]
    assert all(told)
