"""Packages: what a dataflow imports from them, and files that hold them."""

from __future__ import annotations

from pathlib import Path

import pytest

from arroyo_dagster.dataflow.definition.definition import Dataflow, Package, StateForm
from arroyo_dagster.dataflow.definition.diagnostics import Diagnostic, InvalidDefinition
from arroyo_dagster.dataflow.definition.loading import load_document
from arroyo_dagster.dataflow.definition.reading import parse_document
from arroyo_dagster.dataflow.definition.types import ScalarType

DATA = Path(__file__).parent / "data"
PACKAGE = (DATA / "sdf-package.yaml").read_text()
KEYED = "{type: keyed-state, properties: {key: {type: string}, value: {type: u32}}}"


def dataflow(imports: str, service: str = "", types: str = "{}") -> str:
    return (
        "apiVersion: 0.6.0\nmeta: {name: n, version: 0.1.0, namespace: s}\n"
        f"types: {types}\nimports: {imports}\n"
        "topics: {t: {schema: {value: {type: string}}}}\n"
        "services:\n  counting:\n    sources: [{type: topic, id: t}]\n"
        f"    partition: {{assign-key: {{uses: k}}, update-state: {{uses: count-word}}}}\n{service}"
    )


def imported(*, what: str, pkg: str = "demo/counting@0.1.0") -> str:
    return f"[{{pkg: {pkg}, {what}}}]"


FUNCTIONS = "functions: [{name: count-word}, {name: is-long, alias: long}]"


def read(text: str) -> Dataflow:
    package = parse_document(PACKAGE)
    assert isinstance(package, Package)
    found = parse_document(text, packages={package.id: package})
    assert isinstance(found, Dataflow)
    return found


def diagnostics(text: str) -> list[Diagnostic]:
    with pytest.raises(InvalidDefinition) as caught:
        read(text)
    return list(caught.value.diagnostics)


def test_a_state_that_a_function_brought_can_be_referred_to() -> None:
    other = (
        "  b: {sources: [{type: topic, id: t}], states: {per-word: {from: counting.per-word}}}\n"
    )
    found = read(dataflow(imported(what=FUNCTIONS), other))
    state = found.services["b"].states["per-word"]
    assert (state.form, state.owner, state.scalar_type) == (
        StateForm.REFERENCE,
        "counting",
        ScalarType.U32,
    )
    believed = parse_document(dataflow(imported(what=FUNCTIONS), other))
    assert isinstance(believed, Dataflow)
    assert believed.services["b"].states["per-word"].value_kind is None
    wrong = other.replace("counting.per-word", "counting.other")
    (one,) = diagnostics(dataflow(imported(what=FUNCTIONS), wrong))
    assert one.number == "E16"


SECOND = (
    "  again:\n    sources: [{type: topic, id: t}]\nSTATES"
    "    partition: {assign-key: {uses: k}, update-state: {uses: count-word}}\n"
)


def test_e22_a_function_in_two_services_would_make_two_owners_of_one_table() -> None:
    (one,) = diagnostics(dataflow(imported(what=FUNCTIONS), SECOND.replace("STATES", "")))
    assert (one.number, one.path) == ("E22", "services.again.states")
    for said in ("already defined by `counting`", "per-word: { from: counting.per-word }"):
        assert said in one.message
    # As it says, so it is.
    reading = "    states: {per-word: {from: counting.per-word}}\n"
    found = read(dataflow(imported(what=FUNCTIONS), SECOND.replace("STATES", reading)))
    assert found.services["again"].states["per-word"].form is StateForm.REFERENCE


def test_e22_what_a_service_declares_itself_was_there_first() -> None:
    other = f"  later: {{sources: [{{type: topic, id: t}}], states: {{per-word: {KEYED}}}}}\n"
    (one,) = diagnostics(dataflow(imported(what=FUNCTIONS), other))
    assert (one.number, one.path) == ("E22", "services.counting.states")
    assert "already defined by `later`" in one.message


def test_an_imported_state_is_a_type_and_creates_nothing() -> None:
    service = "    states: {mine: {type: per-word}}\n"
    found = read(
        dataflow(imported(what="states: [{name: per-word}], types: [{name: amount}]"), service)
    )
    (state,) = found.states
    assert (state.name, state.scalar_type) == ("mine", ScalarType.U32)


@pytest.mark.parametrize(
    ("text", "number", "words"),
    [
        (
            dataflow(imported(what="states: [{name: x}]")),
            "E31",
            ("`x`", "demo/counting", "not found"),
        ),
        (
            dataflow(imported(what="types: [{name: amount}]"), types="{amount: {type: u8}}"),
            "E32",
            ("`amount`", "conflicts"),
        ),
        (dataflow(imported(what="functions: [{name: x}]")), "E33", ("`x`", "count-word")),
        (
            dataflow(imported(what=FUNCTIONS), "    transforms: [{operator: map, uses: long}]\n"),
            "E33",
            ("`long`", "filter", "map"),
        ),
        (dataflow(imported(what="path: .", pkg="demo/other@1")), "E35", ("demo/other@1", "`dev`")),
        (
            dataflow(
                imported(what=FUNCTIONS),
                f"    states: {{per-word: {KEYED.replace('u32', 'i32')}}}\n",
            ).replace("{type: i32}", "{type: primitive, properties: {value: i32}}"),
            "E22",
            ("`per-word`", "already defined"),
        ),
        (dataflow(imported(what="types: [{name: x}]")), "E23", ("Referenced type `x` not found",)),
    ],
)
def test_a_mistaken_import_says_what_the_package_has(
    text: str, number: str, words: tuple[str, ...]
) -> None:
    (one,) = diagnostics(text)
    assert one.number == number
    assert all(word in one.message for word in words), one.message


# ---- files ---------------------------------------------------------------------------------------


def write(folder: Path, imports: str) -> Path:
    (folder / "lib").mkdir()
    (folder / "lib" / "sdf-package.yaml").write_text(PACKAGE)
    file = folder / "dataflow.yaml"
    file.write_text(dataflow(imports))
    return file


def test_the_dev_section_replaces_a_folder_unless_it_is_left_out(tmp_path: Path) -> None:
    file = write(tmp_path, imported(what=f"path: gone, {FUNCTIONS}"))
    file.write_text(
        file.read_text() + "dev: {imports: [{pkg: demo/counting@0.1.0, path: ./lib}]}\n"
    )
    assert load_document(file).imports[0].path == "gone"
    with pytest.raises(InvalidDefinition, match="E35"):
        load_document(file, dev=False)


INLINE = """
apiVersion: 0.6.0
meta: {name: text, version: 0.1.0, namespace: demo}
functions:
  f:
    operator: OPERATOR
    run: |
      BODY
"""


@pytest.mark.parametrize(
    ("operator", "body"),
    [
        ("map", "def f(text): return text.upper()"),
        ("filter", "def f(text): return bool(text)"),
        ("filter-map", "def f(text): return text or None"),
        ("assign-key", "def f(key, text): return text"),
        ("map", "fn f(text: String) -> Result<String> { Ok(text) }"),
        ("filter", "fn f(text: String) -> Result<bool> { Ok(true) }"),
    ],
)
def test_an_inline_function_without_output_has_the_signature_of_its_body(
    operator: str, body: str
) -> None:
    found = parse_document(INLINE.replace("OPERATOR", operator).replace("BODY", body))
    assert isinstance(found, Package)
    assert found.functions["f"].source == f"{body}\n"


@pytest.mark.parametrize(
    ("operator", "body", "number"),
    [
        ("map", "def f(): return 1", "E27"),
        ("map", "fn f(text: String) -> Result<()> { Ok(()) }", "E38"),
        ("filter", "fn f(text: String) -> Result<String> { Ok(text) }", "E38"),
        ("map", "def f(text) return 1", "E27"),
    ],
)
def test_an_inline_body_of_a_package_that_does_not_fit_is_refused(
    operator: str, body: str, number: str
) -> None:
    with pytest.raises(InvalidDefinition) as caught:
        parse_document(INLINE.replace("OPERATOR", operator).replace("BODY", body))
    assert [one.number for one in caught.value.diagnostics] == [number]
    assert "function `f`" in caught.value.diagnostics[0].message


def test_e21_an_imported_function_brings_no_state_with_the_name_of_an_engine_table() -> None:
    text = PACKAGE.replace("per-word", "watermark")
    package = parse_document(text)
    assert isinstance(package, Package)
    plain = dataflow(imported(what=FUNCTIONS))
    parse_document(plain, packages={package.id: package})  # only windows have a watermark
    windowed = plain.replace(
        "partition: {",
        "window: {tumbling: {duration: 1s}, assign-timestamp: {uses: t}, partition: {",
    ).replace("count-word}}", "count-word}}}")
    with pytest.raises(InvalidDefinition) as caught:
        parse_document(windowed, packages={package.id: package})
    (one,) = caught.value.diagnostics
    assert (one.number, one.path) == ("E21", "services.counting")
    assert "a function of package `demo/counting@0.1.0` adds it" in one.message
