"""`arroyo-state sdf check` and `sdf schema` as a shell sees them."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner, Result

from arroyo_dagster import cli
from arroyo_dagster.dataflow.definition.json_schema import json_schema
from tests.definitions import KEYED, dataflow

DATA = Path(__file__).parents[1] / "dataflow" / "definition" / "data"


def run(*args: str) -> Result:
    return CliRunner().invoke(cli.main, ["sdf", *args], catch_exceptions=False)


def test_a_right_file_shows_its_states() -> None:
    result = run("check", str(DATA / "window-lights.yaml"))
    assert (result.exit_code, result.stderr) == (0, "")
    assert "pu-zone u64" in result.stdout
    assert "4 states, no errors, 1 warning" in result.stdout
    assert "warning E27 line 75: services.reader.transforms[0]: function" in result.stdout


def test_as_json_states_have_their_schema() -> None:
    result = run("check", str(DATA / "page-hits.yaml"), "--json")
    document = json.loads(result.stdout)
    assert (result.exit_code, document["valid"], document["kind"]) == (0, True, "dataflow")
    assert [(one["in"], one["owner"]) for one in document["states"]] == [
        ("count-hits", "count-hits"),
        ("answer", "count-hits"),
    ]
    assert document["states"][0]["columns"] == [["hits", "u32"]]
    assert document["states"][0]["ttl_ms"] == 600_000


def test_a_wrong_file_ends_with_3_and_names_every_line(tmp_path: Path) -> None:
    file = tmp_path / "dataflow.yaml"
    file.write_text(dataflow("{s: 5, t: {from: x}}"))
    result = run("check", str(file))
    assert result.exit_code == 3
    assert "E10 line 8: services.a.states.s" in result.stdout
    assert "E15 line 8: services.a.states.t.from" in result.stdout
    document = json.loads(run("check", str(file), "--json").stdout)
    assert document["valid"] is False
    assert [(one["number"], one["kind"]) for one in document["mistakes"]] == [
        ("E10", "StateDefinitionError"),
        ("E15", "StateReferenceError"),
    ]


def test_a_file_that_is_not_there_ends_with_1() -> None:
    result = run("check", "nowhere.yaml", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stderr)["error"]["type"] == "NotFoundError"


def test_options_let_extensions_and_old_versions_through(tmp_path: Path) -> None:
    file = tmp_path / "dataflow.yaml"
    file.write_text(dataflow(f"{{s: {KEYED.replace('u32', 'f64')}}}", root="odd: 1"))
    assert run("check", str(file)).exit_code == 3
    result = run("check", str(file), "--extended")
    assert result.exit_code == 0
    assert "warning L3 line 4: odd: unknown key, ignored" in result.stdout
    file.write_text(file.read_text().replace("0.6.0", "0.3.0").replace("f64", "u32"))
    assert run("check", str(file)).exit_code == 3
    assert run("check", str(file), "--legacy").exit_code == 0


def test_the_schema_is_printed() -> None:
    result = run("schema", "sdf-package")
    assert json.loads(result.stdout) == json_schema("sdf-package")
