"""What a body cannot use is found before it runs, and nothing else."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from arroyo_dagster.dataflow.definition.definition import Dataflow, Package
from arroyo_dagster.dataflow.definition.diagnostics import InvalidDefinition
from arroyo_dagster.dataflow.definition.loading import load_dataflow
from arroyo_dagster.dataflow.definition.names import engine_table_error
from arroyo_dagster.dataflow.definition.reading import parse_document
from arroyo_dagster.dataflow.runtime.checks import (
    BodyFindings,
    check_bodies,
    check_package_bodies,
)
from arroyo_dagster.errors import InputError
from tests.dataflows import Flow, builder, definition, reader, row_of

PACKAGES = Path(__file__).parents[4] / "examples" / "sdf" / "packages"
ROW = row_of(count="u32", pu_zone="string")


def found(services: str, **more: str) -> BodyFindings:
    document = parse_document(definition(services, **more), extended=True)  # type: ignore[arg-type]
    assert isinstance(document, Dataflow)
    return check_bodies(document, {})


def messages(services: str) -> list[str]:
    return [f"{one.number} {one.message}" for one in found(services).errors]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("cuonts().increment(1)", "E44 name `cuonts` in line 2 .* did you mean `counts`"),
        ("for one in recrod: pass", "E44 name `recrod`"),
        ("[x for y in record]", "E44 name `x`"),
        ("(lambda: nothing)()", "E44 name `nothing`"),
        ("row = counts()\nrow.cuont += 1", "E44 `cuont` in line 3 .* a row .* mean `count`"),
        ("counts().get()", "E44 `get` in line 2 .* it has count, delete, exists, pu_zone"),
        ("sql('select nothing from counts')", "E46 the query in line 2 .*nothing"),
        ("sql(\n  'select * from '\n  'count')", "E46 .*there are counts"),
        ("sql('select * from counts where count = :n and x = 1', params={'n': 1})", "E46"),
    ],
)
def test_names_members_and_tables_that_do_not_exist_are_errors(body: str, message: str) -> None:
    (only,) = messages(builder(body, value=ROW))
    assert re.search(message, only), only


@pytest.mark.parametrize(
    "body",
    [
        "row = counts()\nrow.count += 1\nrow.pu_zone = record\nrow.update()",
        "row = counts()\nrow = row.to_dict()\nrow.anything",
        "import json\nfrom os import path as p\njson.dumps(p)",
        "global seen\nseen = 1\nprint(seen, __name__)",
        "try:\n    pass\nexcept ValueError as error:\n    str(error)",
        "def inner(a, *b, c=1, **d):\n    return [a, b, c, d, record]\ninner(1)",
        "counts = record\ncounts.anything",
        "x = state('counts'), key(), window(), env['a']",
        "sql('select count from counts where _key = :k limit :n', params={'k': 'a', 'n': 1})",
        "sql('select c._updated_at, sum(count) as s from counts c group by c._updated_at')",
        "sql(f'select {record} from counts')",
        "sql = record\nsql('nonsense')",
        "class Local:\n    x = 1\n    y = x\nLocal.x",
        "with open('x') as file: file",
        "[n := 1, n]",
    ],
)
def test_bodies_that_can_run_have_no_findings(body: str) -> None:
    assert found(builder(body, value=ROW)) == BodyFindings()


def test_readers_have_frames_and_lists_and_cells_are_of_owners() -> None:
    owner = builder("cell = counts()\ncell.value += cell.increment(2)\ncell.update()")
    assert messages(owner + reader("return str(counts().index(('a', 1)))")) == []
    (only,) = messages(owner + reader("return str(counts().append('a'))"))
    assert "`append` in line 2 of the body is not found in the pairs of key and value" in only
    rows = builder("counts().update()", value=ROW)
    assert messages(rows + reader("return str(counts().rows().next())")) == []
    assert "a frame" in messages(rows + reader("return counts().count"))[0]


def uses(target: str) -> str:
    return f"""
  pass:
    sources: [{{type: topic, id: words}}]
    transforms: [{{operator: map, uses: "{target}"}}]
    sinks: [{{type: topic, id: answers}}]
"""


@pytest.mark.parametrize(
    ("target", "error", "warning"),
    [
        ("json:dumps", None, None),
        ("os.path:join", None, None),
        ("json:dmups", "`json` has no `dmups`", None),
        ("nowhere.at_all:f", None, "there is no module `nowhere.at_all` here"),
        ("json.nowhere:f", None, "there is no module `json.nowhere` here"),
        ("count-it", None, "needs `--bind count-it=module:function`"),
    ],
)
def test_functions_that_are_not_there_are_found(
    target: str, error: str | None, warning: str | None
) -> None:
    result = found(uses(target))
    for diagnostics, expected in ((result.errors, error), (result.warnings, warning)):
        assert len(diagnostics) == (expected is not None)
        assert all(expected in one.message for one in diagnostics if expected)


def test_a_module_beside_the_definition_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("raise RuntimeError\ndef there(): pass\n")
    document = parse_document(definition(uses("beside:there")))
    assert isinstance(document, Dataflow)
    assert check_bodies(document, {}, folders=[str(tmp_path)]) == BodyFindings()


@pytest.mark.parametrize(
    ("old", "new", "path"),
    [
        ("name: flow", "name: ../../etc", "meta.name"),
        ("namespace: test", "namespace: a/b", "meta.namespace"),
        ("  build:", '  "a/b":', "services.a/b"),
        ("  words: {", '  "w\\0": {}\n  words: {', "topics"),
    ],
)
def test_names_that_cannot_be_paths_are_errors(old: str, new: str, path: str) -> None:
    text = definition(builder("pass"))
    assert old in text
    with pytest.raises(InvalidDefinition) as caught:
        parse_document(text.replace(old, new, 1))
    assert any(one.path.startswith(path) for one in caught.value.diagnostics)


def test_an_error_comes_with_the_warnings_that_may_explain_it() -> None:
    text = definition(builder("pass") + reader("return counts()"))
    with pytest.raises(InvalidDefinition) as caught:
        parse_document(text.replace("    states:\n      counts", "    state:\n      counts", 1))
    assert "E16" in str(caught.value)
    assert "L3 line" in str(caught.value)
    assert "services.build.state" in str(caught.value)


def test_a_reference_to_no_state_names_the_nearest() -> None:
    text = definition(builder("pass") + reader("pass", states="{counts: {from: build.cuonts}}"))
    with pytest.raises(InvalidDefinition, match=r"did you mean `build\.counts`"):
        parse_document(text)


def test_a_sink_of_one_subtask_is_refused_before_a_run(tmp_path: Path) -> None:
    from arroyo_dagster.dataflow.topics.cells import JsonLines
    from arroyo_dagster.dataflow.topics.sinks import AppendSink

    flow = Flow(definition(builder("pass") + reader("return record")), parallelism=2)
    sink = AppendSink("answers", str(tmp_path / "out.jsonl"), JsonLines("answers"))
    flow.bindings.sinks["answers"] = sink  # type: ignore[index]
    with pytest.raises(InputError, match="takes the records of one subtask"):
        _ = flow.pipelines


# ---- bodies of packages, and what may precede a def ----------------------------------------------


def test_bodies_of_package_functions_are_checked(tmp_path: Path) -> None:
    shutil.copytree(PACKAGES, tmp_path / "packages")
    file = tmp_path / "packages" / "text" / "sdf-package.yaml"
    file.write_text(file.read_text().replace("row.count += 1", "row.cuont += 1"))
    dataflow, packages = load_dataflow(tmp_path / "packages" / "dataflow.yaml")
    (only,) = check_bodies(dataflow, packages).errors
    assert only.number == "E44"
    assert "`cuont` in line 3 of the body" in only.message
    assert check_bodies(*load_dataflow(PACKAGES / "dataflow.yaml")).errors == ()


def test_an_assignment_may_stand_before_the_function() -> None:
    text = (
        builder("pass")
        .replace("              return record", "              return NAMES[record]")
        .replace(
            "          def build_key", "          NAMES = {'a': 'b'}\n\n          def build_key"
        )
    )
    flow = Flow(definition(text.replace("pass", "counts().increment(1)"), converter="raw"))
    assert flow.send("words", ["a"]).cells("build.counts") == {"b": 1}


@pytest.mark.parametrize("name", ["a/b", "../../etc", "a\\0b", "-x", "x" * 200])
def test_a_state_that_cannot_be_a_table_is_an_error(name: str) -> None:
    text = builder("pass").replace("      counts:\n", f'      "{name}":\n')
    with pytest.raises(InvalidDefinition) as caught:
        parse_document(definition(text), extended=True)
    assert any(
        one.number == "E21" and "cannot be the name of a table" in one.message
        for one in caught.value.diagnostics
    )


def test_an_unknown_operator_names_the_nearest() -> None:
    text = builder("pass").replace(
        "    partition:\n", "    transforms: [{operator: fliter, run: 'def f(a): return 1'}]\n"
        "    partition:\n"
    )  # fmt: skip
    with pytest.raises(InvalidDefinition, match="found `fliter`; did you mean `filter`"):
        parse_document(definition(text), extended=True)


@pytest.mark.parametrize("name", ["metrics", "metrics.log", "schemas"])
def test_a_state_with_the_name_of_a_table_of_the_engine_is_an_error(name: str) -> None:
    text = builder("pass").replace("      counts:\n", f'      "{name}":\n')
    with pytest.raises(InvalidDefinition, match=r"E21 line \d+: .*a table of the engine"):
        parse_document(definition(text), extended=True)


def test_watermark_is_a_table_of_the_engine_only_in_windows() -> None:
    assert engine_table_error("watermark", windowed=False) is None
    assert "with windows" in (engine_table_error("watermark", windowed=True) or "")


TEXT = (PACKAGES / "text" / "sdf-package.yaml").read_text()


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("row.count += 1", "row.cuont += 1", "E44 .*`cuont` in line 3 .*mean `count`"),
        ("row = word_count()", "row = word_cuont()", "E44 .*`word_cuont` in line 2"),
        ("rows.u32(", "rwos.u32(", "E44 .*name `rwos` in line 3"),
        ("select count from", "select cuont from", "E46 .*cuont"),
    ],
)
def test_bodies_of_a_package_are_checked_alone(before: str, after: str, message: str) -> None:
    assert before in TEXT
    package = parse_document(TEXT.replace(before, after), extended=True)
    assert isinstance(package, Package)
    (only,) = check_package_bodies(package, {}).errors
    assert re.search(message, f"{only.number} {only.message}"), only
    assert TEXT.splitlines()[only.line - 1].strip() == "run: |"


WORDS = Path(__file__).parents[4] / "examples" / "sdf" / "words"


@pytest.mark.parametrize("name", ["dataflow", "frames", "queries"])
def test_the_examples_have_no_errors(name: str) -> None:
    dataflow, packages = load_dataflow(WORDS / f"{name}.yaml")
    assert check_bodies(dataflow, packages).errors == ()


def test_a_function_of_whole_batches_has_the_rows_of_its_states() -> None:
    text = (WORDS / "frames.yaml").read_text()
    document = parse_document(text.replace("hits().rows()", "hits().get()"))
    assert isinstance(document, Dataflow)
    (one,) = check_bodies(document, {}).errors
    assert one.message.endswith(
        "`get` in line 5 of the body is not found in the rows of a batch of state `hits`; it has "
        "delete, rows, update"
    )
