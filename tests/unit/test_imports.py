"""What importing this package loads, and that every public name is there."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import arroyo_dagster
from arroyo_dagster import errors, state

HEAVY = ("dagster", "pyspark", "pyarrow", "polars", "numpy", "fsspec")


def loaded_after(statement: str) -> list[str]:
    code = f"{statement}\nimport sys\nprint(*(m for m in {HEAVY!r} if m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.splitlines()[-1].split()


@pytest.mark.parametrize("module", ["arroyo_dagster", "arroyo_dagster.state"])
def test_importing_the_package_loads_nothing_heavy(module: str) -> None:
    assert loaded_after(f"import {module}") == []


@pytest.mark.parametrize(
    "statement",
    [
        "import arroyo_dagster.cli",
        "from arroyo_dagster.state import *",
        "import arroyo_dagster\narroyo_dagster.run_pipeline",
    ],
)
def test_neither_dagster_nor_pyspark_is_ever_loaded(statement: str) -> None:
    assert not {"dagster", "pyspark"} & set(loaded_after(statement))


def test_every_public_name_is_there() -> None:
    for name in state.__all__:
        assert getattr(arroyo_dagster, name) is getattr(state, name)
    for name in errors.__all__:
        assert getattr(arroyo_dagster, name) is getattr(errors, name)
    assert {*state.__all__, *errors.__all__} <= set(dir(arroyo_dagster))


def test_the_names_for_the_type_checker_are_the_names_that_are_loaded() -> None:
    tree = ast.parse(Path(state.__file__ or "").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    declared = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    loaded = {name: f"{state.__name__}.{module}" for name, module in state._MODULES.items()}
    assert declared == loaded
    assert sorted(state.__all__) == sorted(loaded)


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Pipelin'"):
        arroyo_dagster.Pipelin  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="no attribute 'Pipelin'"):
        state.Pipelin  # type: ignore[attr-defined]
