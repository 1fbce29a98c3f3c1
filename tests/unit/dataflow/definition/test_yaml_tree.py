"""YAML 1.2 with the line of everything; hostile texts are refused in bounded time."""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import pytest

from arroyo_dagster.dataflow.definition.diagnostics import Diagnostics
from arroyo_dagster.dataflow.definition.yaml_tree import MOST_LEVELS, read_tree


def plain(text: str) -> Any:
    diagnostics = Diagnostics()
    root = read_tree(text, diagnostics)
    assert diagnostics.found == ()
    assert root is not None
    return root.plain()


def refused(text: str) -> str:
    diagnostics = Diagnostics()
    read_tree(text, diagnostics)
    (one,) = diagnostics.found
    assert one.number == "E04"
    return f"{one.line}:{one.column} {one.message}"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("yes", "yes"),
        ("off", "off"),
        ("1:30", "1:30"),
        ("012", 12),
        ("0o14", 12),
        ("0x1F", 31),
        ("1_000", "1_000"),
        ("0.5.0", "0.5.0"),
        ("true", True),
        ("tRUE", "tRUE"),
        ("~", None),
        ("null", None),
        ("'null'", "null"),
        ("1e3", 1000.0),
        ("-.inf", float("-inf")),
        (".5", 0.5),
        ("2024-01-01", "2024-01-01"),
        ("<<", "<<"),
        ("!!str 12", "12"),
        ("!!int '7'", 7),
        ("'12'", "12"),
    ],
)
def test_scalars_follow_the_core_schema_of_yaml_1_2(text: str, value: object) -> None:
    assert plain(f"a: {text}") == {"a": value}


def test_every_duplicate_key_is_reported_with_its_line() -> None:
    diagnostics = Diagnostics()
    read_tree("a: 1\nb:\n  c: 1\n  c: 2\n'a': 2\n", diagnostics)
    assert [(one.number, one.line, one.path) for one in diagnostics.found] == [
        ("E03", 4, "b.c"),
        ("E03", 5, "a"),
    ]
    assert "duplicate key `c`, first given in line 3" in diagnostics.found[0].message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: *x", "1:4 alias *x has no anchor"),
        ("a: &x [*x]", "1:8 alias *x lies in its own anchor"),
        ("a: [", "not YAML"),
        ("a: 1\n---\nb: 2\n", "2:1 a second document"),
        ("", "1:1 the document is empty"),
        ("a: !thing 1", "1:4 unknown tag"),
        ("a: !!int x", "1:4 'x' is no"),
        ("? [a]\n: 1", "1:3 expected text as the key"),
        ("1: a", "1:1 expected text as the key"),
        ("a: \x00", "not YAML"),
        ("\tb: 1", "not YAML"),
        ("a: '\\", "not YAML"),
    ],
)
def test_what_cannot_be_understood_is_said_with_its_place(text: str, said: str) -> None:
    assert said in refused(text)


LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (LAUGHS, "each use of an alias counted"),
        ("[" * 20_000, f"nested deeper than {MOST_LEVELS} levels"),
        pytest.param(
            *("[" * 100_000, f"nested deeper than {MOST_LEVELS} levels"), marks=pytest.mark.soak
        ),
        ("{a: " * 100_000, f"nested deeper than {MOST_LEVELS} levels"),
        ("- " * 100_000, f"nested deeper than {MOST_LEVELS} levels"),
        ("".join(f"{' ' * n}a:\n" for n in range(200)), "nested deeper"),
        ("- 1\n" * 20_100, "more than"),
        ("a: " + "x" * (1 << 21), "longer than"),
    ],
    ids=["laughs", "flow", "more flow", "maps", "block", "stairs", "long", "big"],
)
def test_a_hostile_text_is_refused_in_bounded_time_and_memory(text: str, said: str) -> None:
    tracemalloc.start()
    try:
        start = time.process_time()
        assert said in refused(text)
        assert time.process_time() - start < 20  # traced, on a busy machine; seconds less in truth
        assert tracemalloc.get_traced_memory()[1] < 100_000_000
    finally:
        tracemalloc.stop()
