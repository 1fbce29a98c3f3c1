"""Services as pipelines: operators, keys, failures, bindings, what is refused before a run."""

from __future__ import annotations

from typing import Any

import pytest

from arroyo_dagster.dataflow.errors import OperatorError, StateSchemaError, UnboundOperatorError
from arroyo_dagster.dataflow.runtime.service import RunOptions
from arroyo_dagster.dataflow.views.namespaces import Namespaces
from arroyo_dagster.state import StatePath
from tests.dataflows import Clock, Flow, builder, definition, reader, row_of

BUMP = "counts().increment(1)"


def steps(*transforms: str, sinks: str = "[{type: topic, id: answers}]") -> str:
    """A service without states: transforms as `operator: body`, one a line."""
    listed = "".join(
        f"\n      - operator: {operator}\n        run: |\n          def f{at}({arguments})"
        f"{annotation}:\n              {body}"
        for at, (operator, arguments, annotation, body) in enumerate(
            (*one.split("|"),) for one in transforms
        )
    )
    return f"""
  pass:
    sources: [{{type: topic, id: words}}]
    transforms:{listed}
    sinks: {sinks}
"""


def answers(services: str, words: list[Any], **more: Any) -> list[Any]:
    flow = Flow(definition(services, converter="raw"), **more)
    return flow.send("words", words).sinks["answers"].values


# ---- operators -----------------------------------------------------------------------------------


def test_an_assigned_key_is_the_record_key_of_later_steps() -> None:
    services = """
  part:
    sources: [{type: topic, id: words}]
    partition:
      assign-key:
        run: |
          def by_length(word):
              return len(word)
      transforms:
        - operator: map
          run: |
            def named(key, word):
                return f"{key + 1}:{word}"
    sinks: [{type: topic, id: answers}]
"""
    flow = Flow(definition(services, converter="raw"), parallelism=2)
    flow.send("words", ["a", "bb"])
    assert sorted(flow.sinks["answers"].rows) == [(b"1", b"2:a"), (b"2", b"3:bb")]


# ---- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transform", "number"),
    [
        ("map|w||return None", "E42"),
        ("filter|w||return 1", "E42"),
        ("flat-map|w||return 'text'", "E42"),
        ("flat-map|w||return 5", "E42"),
        ("flat-map|w||return [None]", "E42"),
        ("map|w|-> tuple[str, str]|return w", "E42"),
        ("map|w||return lambda: 1", "E42"),
    ],
)
def test_a_result_of_the_wrong_kind_costs_its_record(
    transform: str, number: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert answers(steps(transform), ["x"]) == []
    assert number in caplog.records[0].getMessage()


@pytest.mark.parametrize(
    ("body", "key", "number"),
    [
        ("return 1.5", "string", "E28"),
        ("return None", "string", "E28"),
        ("return [1]", "string", "E28"),
        ("return 'x'", "i32", "E41"),
        ("return 2**40", "i32", "E41"),
        ("return 7", "bool", "E41"),
        ("return '\\ud800'", "string", "E41"),
    ],
)
def test_a_key_that_cannot_be_costs_its_record(
    body: str, key: str, number: str, caplog: pytest.LogCaptureFixture
) -> None:
    services = builder(BUMP, key=key, key_body=body)
    flow = Flow(definition(services, converter="raw")).send("words", ["x"])
    assert (flow.cells("build.counts"), flow.metrics("build")["build_key"].failed) == ({}, 1)
    assert number in caplog.records[0].getMessage()


# ---- readers -------------------------------------------------------------------------------------


def test_a_builder_reads_its_own_state_as_of_the_epoch_before() -> None:
    body = (
        "row = counts()\nrow.n = len(sql('select * from counts'))\nrow.update()\n"
        "assert len(state('counts').to_dict()) == 1"
    )
    flow = Flow(definition(builder(body, value=row_of(n="u32")), converter="raw"), parallelism=2)
    flow.send("words", ["a", "b"])
    flow.send("words", ["c"])
    assert flow.rows("build.counts") == {"a": {"n": 0}, "b": {"n": 0}, "c": {"n": 2}}


# ---- before a run --------------------------------------------------------------------------------


def test_a_rust_step_needs_a_binding() -> None:
    services = builder(BUMP).replace(
        "run: |\n          def build_key(record):\n              return record",
        "run: 'pub fn key_of_word(w: String) -> Result<String> { Ok(w) }'",
    )
    with pytest.raises(UnboundOperatorError, match="--bind key-of-word=") as error:
        _ = Flow(definition(services)).pipelines
    assert (error.value.facts["number"], error.value.facts["function"]) == ("E26", "key_of_word")
    flow = Flow(definition(services, converter="raw"), functions={"key-of-word": "builtins:len"})
    with pytest.raises(OperatorError) as wrong:
        Flow(definition(services), functions={"key-of-word": "builtins:nothing"}).pipelines
    assert wrong.value.facts["number"] == "E27"
    assert flow.send("words", ["abc"]).cells("build.counts") == {"3": 1}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (lambda: 1, "0 arguments"),
        (lambda *a: 1, "`\\*`"),
        (lambda a, b, c: 1, "3 arguments"),
        ("no.such.module:f", "imported"),
    ],
)
def test_a_binding_that_cannot_serve_is_refused(body: Any, said: str) -> None:
    services = builder(BUMP).replace(
        "run: |\n          def build_key(record):\n              return record",
        "run: 'pub fn f(w: String) -> Result<String> { Ok(w) }'",
    )
    with pytest.raises(OperatorError, match=said) as error:
        _ = Flow(definition(services), functions={"f": body}).pipelines
    assert error.value.facts["number"] == "E27"


# ---- schemas -------------------------------------------------------------------------------------


def rows_flow(flow: Flow | None = None, **columns: str) -> Flow:
    names = sorted(columns)
    body = "row = counts()\n" + "\n".join(f"row.{name} += 1" for name in names) + "\nrow.update()"
    text = definition(builder(body, value=row_of(**columns)), converter="raw")
    if flow is None:
        return Flow(text)
    return Flow(text, store=flow.store, topics=flow.topics)


def test_e50_a_changed_schema_is_refused_before_anything_is_written() -> None:
    before = rows_flow(n="u32").send("words", ["a"])
    for columns, said in (
        ({"n": "u32", "m": "u32"}, "added column `m`"),
        ({"m": "u32"}, "removed column `n`"),
        ({"n": "i64"}, "changed from u32 to i64"),
    ):
        objects = list(before.store.list(StatePath("test.flow")))
        with pytest.raises(StateSchemaError, match=said) as error:
            _ = rows_flow(before, **columns).pipelines
        assert list(before.store.list(StatePath("test.flow"))) == objects
        assert error.value.facts["number"] == "E50"
    assert rows_flow(before, n="u32").send("words", ["a"]).rows("build.counts") == {"a": {"n": 2}}


def test_added_columns_begin_with_their_defaults_when_that_is_asked() -> None:
    before = rows_flow(n="u32").send("words", ["a", "b"])
    flow = rows_flow(before, n="u32", m="i32")
    flow.options = RunOptions(clock=Clock(), migrate=True)
    flow.send("words", ["a"])
    assert flow.rows("build.counts") == {"a": {"m": 1, "n": 2}, "b": {"m": 0, "n": 1}}
    again = rows_flow(flow, n="u32", m="i32").send("words", ["b"])
    assert again.rows("build.counts")["b"] == {"m": 1, "n": 2}


LOOK_UP = reader("return str(sorted((row['_key'], row['m'], row['n']) for row in counts()))")


def test_readers_get_defaults_until_the_owner_writes_a_row() -> None:
    before = rows_flow(n="u32").send("words", ["a", "b"])
    owner = builder("row = counts()\nrow.update()", value=row_of(n="u32", m="string"))
    flow = Flow(definition(owner + LOOK_UP, converter="raw"), store=before.store, migrate=True)
    assert flow.rows("build.counts") == {"a": {"m": "", "n": 1}, "b": {"m": "", "n": 1}}
    assert flow.sql("select m, n from counts where _key = 'b'").rows() == [("", 1)]
    shown = Namespaces(flow.store, flow.dataflow).get("build/counts/state")
    assert shown.lines() == [["a", "*", "", "1"], ["b", "*", "", "1"]]
    flow.send("asked", ["x"])
    assert flow.sinks["answers"].values == ["[('a', '', 1), ('b', '', 1)]"]


@pytest.mark.parametrize(
    ("value", "key", "said"),
    [
        (row_of(m="u32"), "string", "added column `m`; removed column `n`"),
        (row_of(n="i64"), "string", "column `n` changed from u32 to i64"),
        (row_of(n="u32"), "i32", "key changed from string to i32"),
        ("{type: u32}", "string", "kind changed from row to scalar"),
    ],
)
def test_e50_readers_refuse_a_state_that_was_stored_otherwise(
    value: str, key: str, said: str
) -> None:
    before = rows_flow(n="u32").send("words", ["1"])
    text = definition(builder("pass", value=value, key=key), converter="raw")
    flow = Flow(text, store=before.store)
    reads: list[Any] = [
        lambda: flow.views().view("build.counts"),
        lambda: Namespaces(flow.store, flow.dataflow).get("build/counts/state"),
    ]
    for read in reads:
        with pytest.raises(StateSchemaError, match=said) as error:
            read()
        assert error.value.facts["number"] == "E50"


def test_e50_a_window_that_a_state_got_later_is_refused_by_readers() -> None:
    before = Flow(definition(builder(BUMP), converter="raw")).send("words", ["a"])
    text = definition(builder(BUMP), converter="raw").replace(
        "    partition:\n", "    window:\n      tumbling: {duration: 10s}\n"
        "      assign-timestamp: {run: 'def when(word, time): return time'}\n      partition:\n"
    )  # fmt: skip
    head, _, tail = text.partition("      partition:\n")
    indented = "\n".join(f"  {line}" for line in tail.splitlines())
    flow = Flow(f"{head}      partition:\n{indented}", store=before.store)
    with pytest.raises(StateSchemaError, match="outside of windows"):
        flow.views().view("build.counts", live=True)
