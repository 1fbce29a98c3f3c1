"""`arroyo-state sdf generate`: what it writes passes, and it never overwrites a file."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner, Result

from arroyo_dagster import cli
from arroyo_dagster.dataflow.definition.diagnostics import Diagnostics
from arroyo_dagster.dataflow.definition.yaml_tree import read_tree

FILES = {"dataflow": "dataflow.yaml", "package": "sdf-package.yaml"}


def run(*args: object, stdin: str | None = None) -> Result:
    runner = CliRunner()
    return runner.invoke(cli.main, ["sdf", *map(str, args)], input=stdin, catch_exceptions=False)


@pytest.mark.parametrize("kind", FILES)
def test_generated_file_passes(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("generate", kind, "new-words", "--namespace", "my-team")
    assert (result.exit_code, result.stderr) == (0, "")
    file = tmp_path / "new-words" / FILES[kind]
    assert "my-team/new-words@0.1.0, 1 states, no errors, 0 warnings" in run("check", file).stdout
    assert run("test", file).stdout.endswith("1 passed, 0 failed\n")
    first, text = file.read_text().split("\n", 1)
    schema = first.partition("$schema=")[2]
    validator = jsonschema.Draft7Validator(json.loads((file.parent / schema).read_text()))
    root = read_tree(text, Diagnostics())
    assert root is not None
    assert not list(validator.iter_errors(root.plain()))
    wrong = {**root.plain(), "tests": [{"name": "a", "expekt": 1}]}
    assert list(validator.iter_errors(wrong))


@pytest.mark.parametrize("kind", FILES)
def test_no_file_is_overwritten(kind: str, tmp_path: Path) -> None:
    file = tmp_path / FILES[kind]
    file.write_text("mine")
    result = run("generate", kind, "words", "--folder", tmp_path)
    assert (result.exit_code, "exists already" in result.stderr) == (1, True)
    assert [one.name for one in tmp_path.iterdir()] == [file.name]
    assert file.read_text() == "mine"
    file.unlink()
    schema = file.with_suffix(".schema.json")
    schema.write_text("mine")
    result = run("generate", kind, "words", "--folder", tmp_path)
    assert (result.exit_code, str(schema) in result.stderr) == (1, True)
    assert (schema.read_text(), file.exists()) == ("mine", False)


@pytest.mark.parametrize("name", ["", "a b", "../a", "A", "a: b", "a--b", "-a", "a\n"])
def test_a_name_that_is_none_is_refused(name: str, tmp_path: Path) -> None:
    result = run("generate", "dataflow", "--folder", tmp_path / "new", "--", name)
    assert (result.exit_code, "is not a name" in result.stderr) == (1, True)
    assert not (tmp_path / "new").exists()
