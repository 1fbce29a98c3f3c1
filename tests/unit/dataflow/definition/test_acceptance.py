"""The acceptance checks of sdf-states.md 10 that concern definitions; A13 to A15: test_windows."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from arroyo_dagster.dataflow.definition.definition import Dataflow, StateDef, StateForm
from arroyo_dagster.dataflow.definition.diagnostics import InvalidDefinition
from arroyo_dagster.dataflow.definition.reading import parse_document

DATA = Path(__file__).parent / "data"
EXAMPLES = sorted(DATA.glob("*.yaml"))

ROW = "{type: arrow-row, properties: {hits: {type: u32}}}"


def dataflow(states: str, *, version: str = "0.6.0", more: str = "") -> str:
    return (
        f"apiVersion: {version}\nmeta: {{name: n, version: 0.1.0, namespace: s}}\n{more}"
        f"topics: {{t: {{schema: {{value: {{type: string}}}}}}}}\n"
        f"services:\n  a:\n    sources: [{{type: topic, id: t}}]\n"
        f"    transforms: [{{operator: map, uses: m:f}}]\n    states: {states}\n"
    )


def keyed(value: str, key: str = "string") -> str:
    return f"{{type: keyed-state, properties: {{key: {{type: {key}}}, value: {value}}}}}"


def parsed(text: str, **options: Any) -> Dataflow:
    document = parse_document(text, **options)
    assert isinstance(document, Dataflow)
    return document


def states_of(text: str) -> tuple[StateDef, ...]:
    document = parse_document(text, legacy=True, extended=True)
    return document.states if isinstance(document, Dataflow) else (*document.states.values(),)


def numbers(text: str, **options: Any) -> list[str]:
    with pytest.raises(InvalidDefinition) as caught:
        parse_document(text, **options)
    return [one.number for one in caught.value.diagnostics]


def test_a21_only_extended_mode_takes_f64_and_nothing_an_object() -> None:
    floats, objects = (
        dataflow(f"{{s: {keyed('{type: f64}')}}}"),
        dataflow(f"{{s: {keyed('{type: object, properties: {a: {type: string}}}')}}}"),
    )
    assert numbers(floats) == ["E13"]
    (state,) = parsed(floats, extended=True).states
    assert state.extended == {"scalar"}
    assert numbers(objects) == numbers(objects, extended=True) == ["E13"]
    fragment = dataflow(f"{{s: {keyed('{type: u32}')}}}").partition("\n")[2]
    assert numbers(fragment) == ["E01"]
    assert len(states_of(fragment)) == 1


def _shuffled(value: Any, chance: random.Random) -> Any:
    if isinstance(value, dict):
        keys = list(value)
        chance.shuffle(keys)
        return {key: _shuffled(value[key], chance) for key in keys}
    if isinstance(value, list):
        return [_shuffled(one, chance) for one in value]
    return value


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a24_the_order_of_definitions_changes_neither_model_nor_hash(path: Path) -> None:
    from arroyo_dagster.dataflow.definition.diagnostics import Diagnostics
    from arroyo_dagster.dataflow.definition.yaml_tree import read_tree

    text = path.read_text()
    root = read_tree(text, Diagnostics())
    assert root is not None
    plain = root.plain()
    for seed in range(5):
        shuffled = _shuffled(plain, random.Random(seed))
        if "types" in shuffled and "verdict" in shuffled["types"]:
            shuffled["types"]["verdict"] = plain["types"]["verdict"]  # untagged: order counts
        text_again = json.dumps(shuffled)
        assert parse_document(text_again) == parse_document(text)
        hashes = [[state.schema_hash for state in states_of(one)] for one in (text, text_again)]
        assert hashes[0] == hashes[1]


def test_a_schema_hash_tells_columns_apart_and_leaves_the_ttl_out() -> None:
    def hashed(value: str, key: str = "string") -> str:
        (state,) = states_of(dataflow(f"{{s: {keyed(value, key)}}}"))
        return state.schema_hash

    assert hashed(ROW) == hashed(ROW[:-1] + ", ttl: 5m}")
    others = {
        hashed(ROW),
        hashed(ROW, "i32"),
        hashed(ROW.replace("u32", "u16")),
        hashed("{type: u32}"),
    }
    assert len(others) == 4


# ---- legacy forms --------------------------------------------------------------------------------

MAP_FORM = f"{{hits: {keyed(ROW)}}}"
LIST_FORM = f"[{{name: hits, type: keyed-state, {keyed(ROW)[20:-1]}}}]"


@pytest.mark.parametrize("version", ["0.1.0", "0.2.0", "0.3.0", "0.4.0"])
@pytest.mark.parametrize(
    "states", [MAP_FORM, LIST_FORM, MAP_FORM.replace("keyed-state", "key-value")]
)
@pytest.mark.parametrize("inside", ["service", "transforms"])
def test_legacy_reading_takes_every_legacy_form(version: str, states: str, inside: str) -> None:
    block = f"states: {states}"
    if inside == "transforms":
        block = (
            f"transforms: {{states: {states}, steps: [{{operator: assign-key, run: 'fn k(x: String)"
            " -> Result<String> {}'}, {operator: update-state, uses: bump}]}"
        )
    text = (
        f"apiVersion: {version}\nmeta: {{name: n, version: 0.1.0, namespace: s}}\nservices:\n"
        f"  a:\n    source: {{type: topic, id: t}}\n    {block}\n  b:\n    states:\n"
        "    - from: a.hits\n"
    )
    expected, reader = states_of(text)
    assert (expected.name, expected.owner, expected.api_version) == ("hits", "a", version)
    assert [column.name for column in expected.columns] == ["hits"]
    assert (reader.form, reader.name, reader.owner) == (StateForm.REFERENCE, "hits", "a")
    assert "E01" in numbers(text)
    service = parsed(text, legacy=True).services["a"]
    assert [source.id for source in service.sources] == ["t"]
    if inside == "transforms":
        assert service.partition is not None
        assert service.partition.assign_key.name == "k"
        assert service.partition.update_state is not None
