"""What a body cannot use is found before it runs, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from arroyo_dagster.dataflow.definition.definition import Dataflow
from arroyo_dagster.dataflow.definition.diagnostics import InvalidDefinition
from arroyo_dagster.dataflow.definition.reading import parse_document
from arroyo_dagster.dataflow.runtime.checks import BodyFindings, check_bodies
from arroyo_dagster.errors import InputError
from tests.dataflows import Flow, builder, definition, reader, row_of

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


def test_a_sink_of_one_subtask_is_refused_before_a_run(tmp_path: Path) -> None:
    from arroyo_dagster.dataflow.topics.cells import JsonLines
    from arroyo_dagster.dataflow.topics.sinks import AppendSink

    flow = Flow(definition(builder("pass") + reader("return record")), parallelism=2)
    sink = AppendSink("answers", str(tmp_path / "out.jsonl"), JsonLines("answers"))
    flow.bindings.sinks["answers"] = sink  # type: ignore[index]
    with pytest.raises(InputError, match="takes the records of one subtask"):
        _ = flow.pipelines


# ---- bodies of packages, and what may precede a def ----------------------------------------------


@pytest.mark.parametrize("name", ["a/b", "../../etc", "a\\0b", "-x", "x" * 200])
def test_a_state_that_cannot_be_a_table_is_an_error(name: str) -> None:
    text = builder("pass").replace("      counts:\n", f'      "{name}":\n')
    with pytest.raises(InvalidDefinition) as caught:
        parse_document(definition(text), extended=True)
    assert any(
        one.number == "E21" and "cannot be the name of a table" in one.message
        for one in caught.value.diagnostics
    )


WORDS = Path(__file__).parents[4] / "examples" / "sdf" / "words"


def test_a_function_of_whole_batches_has_the_rows_of_its_states() -> None:
    text = (WORDS / "frames.yaml").read_text()
    document = parse_document(text.replace("hits().rows()", "hits().get()"))
    assert isinstance(document, Dataflow)
    (one,) = check_bodies(document, {}).errors
    assert one.message.endswith(
        "`get` in line 5 of the body is not found in the rows of a batch of state `hits`; it has "
        "delete, rows, update"
    )
