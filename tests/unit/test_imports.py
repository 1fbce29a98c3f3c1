"""What importing this package loads, and that every public name is there."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import arroyo_dagster
from arroyo_dagster import engine, errors, state

PROJECT = Path(__file__).parents[2]
STUBS = sorted((PROJECT / "arroyo_dagster").rglob("__init__.pyi"))
HEAVY = ("dagster", "pyspark", "pyarrow", "polars", "numpy", "fsspec")


def loaded_after(statement: str) -> list[str]:
    code = f"{statement}\nimport sys\nprint(*(m for m in {HEAVY!r} if m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.splitlines()[-1].split()


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
    for module in (state, engine, errors):
        for name in module.__all__:
            assert getattr(arroyo_dagster, name) is getattr(module, name)
            assert name in dir(arroyo_dagster)


@pytest.mark.parametrize("stub", STUBS, ids=lambda stub: stub.parent.name)
def test_every_name_of_a_stub_is_that_of_its_module(stub: Path) -> None:
    package = importlib.import_module(".".join(stub.relative_to(PROJECT).parent.parts))
    declared = {}
    for node in ast.parse(stub.read_text()).body:
        assert isinstance(node, ast.ImportFrom)
        # `X as X`: a type checker sees the name as public. The order is that of ruff.
        assert all(alias.name == alias.asname for alias in node.names), ast.unparse(node)
        declared |= {alias.name: node.module for alias in node.names}
    assert sorted(declared) == sorted(package.__all__) == dir(package)
    for name, module in declared.items():
        holder = importlib.import_module(f"{package.__name__}.{module}")
        assert getattr(package, name) is getattr(holder, name)


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="attribute Pipelin"):
        arroyo_dagster.Pipelin  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="attribute Pipelin"):
        state.Pipelin  # type: ignore[attr-defined]
