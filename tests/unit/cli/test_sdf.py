"""`arroyo-state sdf check` and `sdf schema` as a shell sees them."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner, Result

from arroyo_dagster import cli
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


def test_options_let_extensions_and_old_versions_through(tmp_path: Path) -> None:
    file = tmp_path / "dataflow.yaml"
    file.write_text(dataflow(f"{{s: {KEYED.replace('u32', 'f64')}}}", root="odd: 1"))
    assert run("check", str(file)).exit_code == 3
    result = run("check", str(file), "--accept", "extended")
    assert result.exit_code == 0
    assert "warning L3 line 4: odd: unknown key, ignored" in result.stdout
    file.write_text(file.read_text().replace("0.6.0", "0.3.0").replace("f64", "u32"))
    assert run("check", str(file)).exit_code == 3
    assert run("check", str(file), "--accept", "legacy").exit_code == 0


# ---- several files, and functions without a body -------------------------------------------------

EXAMPLES = Path(__file__).parents[3] / "examples" / "sdf"
MISTAKES = Path(__file__).parents[1] / "dataflow" / "definition" / "data" / "mistakes"


def checked(*args: object) -> Result:
    return CliRunner().invoke(cli.main, ["sdf", "check", *map(str, args)])


def test_files_folders_and_patterns_are_checked_in_one_process() -> None:
    good = checked(
        EXAMPLES / "words", EXAMPLES / "flights" / "dataflow.yaml", EXAMPLES / "packages"
    )
    assert good.exit_code == 0, good.output
    assert "4 files, 0 with errors" in good.output
    mixed = checked(EXAMPLES / "words" / "dataflow.yaml", MISTAKES / "name-[ac]*.yaml")
    assert mixed.exit_code == 3
    assert "did you mean `counts`" in mixed.output
    assert "examples/words@" in mixed.output
    documents = json.loads(checked(MISTAKES / "type-*.yaml", "--json").output)["files"]
    assert len(documents) == len(list(MISTAKES.glob("type-*.yaml")))
    assert not any(one["valid"] for one in documents)


UNBOUND = """apiVersion: 0.6.0
meta: {name: n, version: 0.1.0, namespace: s}
topics: {t: {schema: {value: {type: string}}}}
services:
  a:
    sources: [{type: topic, id: t}]
    states:
      c: {type: keyed-state, properties: {key: {type: string}, value: {type: u32}}}
    partition:
      assign-key: {uses: by-word}
      update-state: {run: "fn count_word(word: String) -> Result<()> { Ok(()) }"}
"""


def test_all_functions_without_a_body_are_named_at_once_with_stubs(tmp_path: Path) -> None:
    file = tmp_path / "dataflow.yaml"
    file.write_text(UNBOUND)
    (tmp_path / "words.txt").write_text("be\n")
    words = ("--source", f"t=jsonl:{tmp_path}/words.txt", "--url", str(tmp_path / "state"))
    refused = CliRunner().invoke(cli.main, ["sdf", "run", str(file), *words])
    assert refused.exit_code == 1
    assert "2 functions are not Python" in refused.output
    assert "assign-key `by-word` (line 10), update-state `count_word` (line 11)" in refused.output
    assert "--bind by-word=MODULE:FUNCTION --bind count-word=MODULE:FUNCTION" in refused.output
    stubs = checked(file, "--stubs")
    assert stubs.exit_code == 0
    names: dict[str, object] = {}
    exec(stubs.output, names)
    assert {"by_word", "count_word"} <= names.keys()
    assert "#   --bind by-word=MODULE:by_word" in stubs.output


def test_the_graph_of_a_dataflow_has_its_services_topics_and_states() -> None:
    shown = CliRunner().invoke(
        cli.main, ["sdf", "show", str(EXAMPLES / "words" / "dataflow.yaml"), "--dot"]
    )
    assert shown.exit_code == 0
    lines = shown.output.splitlines()
    assert lines[0] == 'digraph "examples/words" {'
    assert lines[-1] == "}"
    for edge in (
        '"topic sentences" -> "service split";',
        '"service split" -> "topic words";',
        '"topic words" -> "service count-words";',
        '"service count-words" -> "state count-words.hits";',
        '"state count-words.word-stats" -> "service look-up" [style=dashed];',
    ):
        assert f"  {edge}" in lines, shown.output
    assert '  "state count-words.hits" [shape=cylinder, label="hits"];' in lines
