"""docs/architecture.md agrees with the code: picture, table of floors, names of modules."""

from __future__ import annotations

import re

import pytest

from tests.test_house import FLOORS, PACKAGE

TEXT = (PACKAGE.parent / "docs" / "architecture.md").read_text()
(PICTURE,) = re.findall(r"```mermaid\n(.*?)```", TEXT, re.DOTALL)
LABELS = dict(re.findall(r'(\w+)\["([\w., ]+)"\]', PICTURE))
ARROWS = set(re.findall(r'^\s*(\w+)(?:\[".*?"\])? --> (\w+)', PICTURE, re.MULTILINE))
NODE_OF = {floor: node for node, label in LABELS.items() for floor in label.split(", ")}
PATHS = re.findall(r"`([a-z_]+(?:/[a-z_]+)*(?:\.py|/))`", TEXT)
JOURNEYS = ("Checkpoint", "Compaction", "gc", "Query")
WITHIN = {
    "state",
    "state.storage.remote",
    "state.storage.arroyo.postgres",
    "state.operations.export.delta_table",
    "state.operations.export.iceberg_table",
    "orchestration.resources",
}
"""Floors that the picture does not draw: each is part of another, or only has names of others."""


def _imported(floor: str) -> set[str]:
    """The nodes of the picture that a floor may import by the table of the house."""
    allowed, _ = FLOORS[floor]
    return {
        node
        for other, node in NODE_OF.items()
        if "*" in allowed or any(other == one or other.startswith(f"{one}.") for one in allowed)
    }


def _table() -> dict[str, set[str]]:
    """By node the nodes that it may import."""
    graph: dict[str, set[str]] = {node: set() for node in LABELS}
    for floor, node in NODE_OF.items():
        graph[node] |= _imported(floor) - {node}
    return graph


def test_the_picture_draws_every_floor_once() -> None:
    drawn = [floor for label in LABELS.values() for floor in label.split(", ")]
    assert len(drawn) == len(set(drawn))
    assert set(drawn) == FLOORS.keys() - WITHIN - {""}


def test_the_arrows_of_the_picture_are_the_imports_of_the_table() -> None:
    # What two arrows in a row already say is not drawn.
    imports = _table()
    direct = {
        (node, other)
        for node, found in imports.items()
        for other in found
        if not any(other in imports[between] for between in found - {other})
    }
    assert ARROWS == direct


def test_the_table_names_the_third_parties_of_each_floor() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| .+ \| (.+) \|$", TEXT, re.MULTILINE)
    shown = {floor: set() if found == "–" else set(found.split(", ")) for floor, found in rows}
    assert shown == {floor: parties for floor, (_, parties) in FLOORS.items() if floor}


@pytest.mark.parametrize("path", sorted(set(PATHS)))
def test_every_path_that_the_page_names_exists(path: str) -> None:
    if path.startswith(("tests/", "arroyo_dagster/")):
        assert (PACKAGE.parent / path).exists()
    elif path.endswith(".py"):
        assert (PACKAGE / path).is_file()
    else:  # a journey: a folder on several floors
        assert len(list(PACKAGE.rglob(path.rstrip("/")))) > 1


@pytest.mark.parametrize("journey", JOURNEYS)
def test_each_journey_is_steps_that_name_modules(journey: str) -> None:
    text = re.split(r"^## ", TEXT, flags=re.MULTILINE)
    (section,) = [one for one in text if one.startswith(f"{journey}\n")]
    steps = re.findall(r"^\d+\. (.+?)(?=^\d+\. |^$)", section, re.MULTILINE | re.DOTALL)
    assert len(steps) >= 5
    assert sum(bool(set(PATHS) & set(re.findall(r"`(.+?)`", step))) for step in steps) >= 5
