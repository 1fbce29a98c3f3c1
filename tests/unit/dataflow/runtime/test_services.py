"""Services as pipelines: operators, keys, failures, bindings, what is refused before a run."""

from __future__ import annotations

import logging
import pickle
from typing import Any

import pytest

from arroyo_dagster.dataflow.errors import (
    OperatorError,
    StateSchemaError,
    StepFailed,
    UnboundOperatorError,
    Unsupported,
)
from arroyo_dagster.dataflow.runtime.records_operator import keys_of_every_subtask
from arroyo_dagster.dataflow.runtime.service import RunOptions, service_order
from arroyo_dagster.dataflow.storage.engine_tables import Metric
from arroyo_dagster.dataflow.views.namespaces import Namespaces
from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.operations.catalog.query import read_rows
from tests.dataflows import Clock, Flow, Sent, builder, definition, reader, row_of

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


@pytest.mark.parametrize(
    ("transforms", "expected"),
    [
        (["map|w||return w.upper()"], ["A", "B", "AB"]),
        (["filter|w||return 'a' in w"], ["a", "ab"]),
        (["filter-map|w||return w * 2 if len(w) == 1 else None"], ["aa", "bb"]),
        (["flat-map|w||return list(w)"], ["a", "b", "a", "b"]),
        (["flat-map|w||yield from w"], ["a", "b", "a", "b"]),
        (["map|w||return w + '!'", "flat-map|w||return [w, w]", "filter|w||return w[0] == 'b'"],
         ["b!", "b!"]),
    ],
)  # fmt: skip
def test_transforms_do_what_they_are_called(transforms: list[str], expected: list[str]) -> None:
    assert answers(steps(*transforms), ["a", "b", "ab"]) == expected


def test_a_dict_that_a_step_returns_is_a_record_of_the_next() -> None:
    services = """
  pass:
    sources: [{type: topic, id: words}]
    transforms:
      - {operator: map, run: "def first(w): return {'word': w, 'more': [{'values': len(w)}]}"}
      - {operator: filter, run: "def some(r): return bool(r.more[0].values)"}
      - {operator: flat-map, run: "def twice(r): return [{'r': r}, {'r': r}]"}
      - {operator: filter-map, run: "def last(p): return {'n': p.r.more[0].values, 'w': p.r.word}"}
      - {operator: map, run: "def out(p): return f'{p.w}{p.n}'"}
    sinks: [{type: topic, id: answers}]
"""
    assert answers(services, ["ab", ""]) == ["ab2", "ab2"]


def test_keys_are_seen_given_and_written() -> None:
    services = steps(
        "map|key, w|-> tuple[str, str]|return (key + w, w)", "filter|key, w||return key != 'kb'"
    )
    flow = Flow(definition(services, converter="raw"))
    flow.send("words", [Sent(b"a", b"k"), Sent(b"b", b"k")])
    assert flow.sinks["answers"].rows == [(b"ka", b"a")]


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


def test_a_partition_sees_what_its_transforms_have_just_written() -> None:
    services = """
  part:
    sources: [{type: topic, id: words}]
    states:
      counts: {type: keyed-state, properties: {key: {type: string}, value: {type: u32}}}
    partition:
      assign-key:
        run: |
          def whole(word):
              return word
      transforms:
        - operator: filter-map
          run: |
            def nth(word):
                n = counts().increment(1)
                return f"{word}{n}" if n > 1 else None
    sinks: [{type: topic, id: answers}]
"""
    assert answers(services, ["a", "b", "a", "a"]) == ["a2", "a3"]


def test_transforms_of_sources_and_sinks_run_at_their_ends() -> None:
    services = """
  both:
    sources:
      - type: topic
        id: words
        transforms:
          - operator: map
            run: |
              def first(word):
                  return word + "1"
      - {type: topic, id: asked}
    sinks:
      - type: topic
        id: answers
        transforms:
          - operator: map
            run: |
              def last(word):
                  return word + "9"
      - {type: topic, id: others}
"""
    flow = Flow(definition(services, topics={"others": "string"}, converter="raw"))
    flow.topics["asked"].send("b")
    flow.send("words", ["a"])
    assert flow.sinks["answers"].values == ["a19", "b9"]
    assert flow.sinks["others"].values == ["a1", "b"]


# ---- failures ------------------------------------------------------------------------------------


def test_a_failing_record_is_counted_logged_and_skipped(caplog: pytest.LogCaptureFixture) -> None:
    services = builder("n = counts().increment(1)\nif record == 'bad':\n    raise ValueError('no')")
    flow = Flow(definition(services, converter="raw"))
    with caplog.at_level(logging.WARNING, "arroyo_dagster.sdf"):
        flow.send("words", ["a", "bad", "a"])
    assert flow.cells("build.counts") == {"a": 2}
    assert flow.metrics("build")["build_update"] == Metric(succeeded=2, failed=1)
    (message,) = [one.getMessage() for one in caplog.records]
    for part in ("build", "build_update", "words", "partition 0", "offset 1", "no", "'bad'"):
        assert part in message


def test_a_storm_of_failures_is_told_in_one_line_more(caplog: pytest.LogCaptureFixture) -> None:
    flow = Flow(definition(steps("map|w||return str(1 / (w != 'x'))"), converter="raw"))
    flow.send("words", ["a"] + ["x"] * 500)
    assert len(caplog.records) == 21
    assert "480 more records" in caplog.records[-1].getMessage()
    assert flow.metrics("pass")["f0"].failed == 500


def test_a_failing_record_ends_the_run_if_that_was_asked() -> None:
    flow = Flow(definition(steps("map|w||return 1 / 0"), converter="raw"), on_error="fail")
    with pytest.raises(StepFailed, match="division") as error:
        flow.send("words", ["x"])
    assert error.value.facts["topic"] == "words"
    with pytest.raises(InputError, match="skip"):
        RunOptions(on_error="ignore")


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


@pytest.mark.parametrize(
    ("key", "body", "text"),
    [
        ("bool", "return len(record) > 1", "true"),
        ("i64", "return '-42'", "-42"),
        ("u8", "return 7", "7"),
        ("string", "return True", "true"),
    ],
)
def test_a_key_becomes_what_the_state_declares(key: str, body: str, text: str) -> None:
    flow = Flow(definition(builder(BUMP, key=key, key_body=body), converter="raw"))
    assert flow.send("words", ["ab"]).cells("build.counts") == {text: 1}


def test_what_is_no_column_cannot_be_assigned(caplog: pytest.LogCaptureFixture) -> None:
    services = builder("row = counts()\nrow.m = 1\nrow.update()", value=row_of(n="u32"))
    flow = Flow(definition(services, converter="raw")).send("words", ["a"])
    assert flow.rows("build.counts") == {}
    assert "E44: 'Row(n)' object has no attribute 'm'" in caplog.text


def test_columns_of_any_name_are_kept() -> None:
    value = "{type: arrow-row, properties: {a b: {type: u8}, class: {type: string}}}"
    body = "row = counts()\nrow['a b'] += 1\nrow.class_ = 'x'\nrow.update()"
    flow = Flow(definition(builder(body, value=value), converter="raw")).send("words", ["a", "a"])
    assert flow.rows("build.counts") == {"a": {"a b": 2, "class": "x"}}


def test_update_state_returns_nothing() -> None:
    flow = Flow(definition(builder("return counts().increment(1)"), converter="raw"))
    assert flow.send("words", ["a"]).cells("build.counts") == {}


def test_records_that_do_not_decode_are_counted_at_their_topic() -> None:
    services = builder("counts().increment(record.n)", topic="things", key_body="return 'k'")
    text = definition(services, topics={"things": "thing"}).replace(
        "services:\n",
        "types:\n  thing: {type: object, properties: {n: {type: u8}}}\nservices:\n",
        1,
    )
    flow = Flow(text)
    flow.send("things", [{"n": 1}, "{", Sent(None), {"n": 300}, Sent(b"\xff"), {"n": 2}])
    assert flow.cells("build.counts") == {"k": 3}
    assert flow.metrics("build")["things"] == Metric(succeeded=2, failed=4, last_error_offset=4)


def test_results_that_do_not_fit_their_topic_are_counted_at_the_sink() -> None:
    services = steps("map|w||return len(w)")
    flow = Flow(definition(services, topics={"answers": "string"}, converter="raw"))
    assert flow.send("words", ["abc"]).sinks["answers"].values == []
    assert flow.metrics("pass")["sink answers"].failed == 1


# ---- readers -------------------------------------------------------------------------------------


def test_a_reader_sees_the_newest_epoch_and_never_writes() -> None:
    look_up = (
        "try:\n    counts().append(1)\nexcept AttributeError:\n    pass\n"
        "return ' '.join(f'{k}={n}' for k, n in counts())"
    )
    flow = Flow(definition(builder(BUMP) + reader(look_up), converter="raw"))
    flow.send("asked", ["?"])
    flow.send("words", ["a", "b", "a"])
    flow.send("asked", ["?"])
    assert flow.sinks["answers"].values == ["", "a=2 b=1"]


def test_a_builder_reads_its_own_state_as_of_the_epoch_before() -> None:
    body = (
        "row = counts()\nrow.n = len(sql('select * from counts'))\nrow.update()\n"
        "assert len(state('counts').to_dict()) == 1"
    )
    flow = Flow(definition(builder(body, value=row_of(n="u32")), converter="raw"), parallelism=2)
    flow.send("words", ["a", "b"])
    flow.send("words", ["c"])
    assert flow.rows("build.counts") == {"a": {"n": 0}, "b": {"n": 0}, "c": {"n": 2}}


def test_a_reference_has_another_name_if_it_is_given_one() -> None:
    body = "row = counts()\nrow.n += 1\nrow.update()"
    look_up = (
        "return str(len(mine()) + len(sql('select * from mine')) + "
        "len(sql('select * from counts')))"
    )
    services = builder(body, value=row_of(n="u32")) + reader(
        look_up, states="{mine: {from: build.counts}}"
    )
    flow = Flow(definition(services, converter="raw")).send("words", ["a"])
    assert flow.send("asked", ["?"]).sinks["answers"].values == [3]


def test_services_are_ordered_owners_first_and_writers_of_topics_first() -> None:
    services = (
        reader("return '1'", name="aread")
        + builder(BUMP, topic="answers", name="build")
        + steps("map|w||return w", sinks="[{type: topic, id: asked}]")
    )
    order = service_order(Flow(definition(services, converter="raw")).dataflow)
    assert set(order) == {"aread", "build", "pass"}
    assert order.index("build") < order.index("aread")
    assert order.index("pass") < order.index("aread")


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


def test_an_inline_body_that_cannot_be_loaded_is_refused() -> None:
    with pytest.raises(OperatorError, match="no_such_module"):
        _ = Flow(
            definition(
                builder(BUMP, key_body="return record").replace(
                    "def build_key", "import no_such_module\n          def build_key"
                )
            )
        ).pipelines


def test_a_topic_without_a_source_and_a_system_state_are_refused() -> None:
    flow = Flow(definition(builder(BUMP)))
    del flow.topics["words"]
    with pytest.raises(InputError, match="--source words"):
        _ = flow.pipelines
    states = "{counts: {system: metrics}}"
    with pytest.raises(Unsupported) as error:
        _ = Flow(definition(reader("return '1'", states=states))).pipelines
    assert error.value.facts["number"] == "E17"


def test_a_column_that_tables_need_themselves_is_refused() -> None:
    services = builder("pass", value="{type: arrow-row, properties: {_timestamp: {type: u8}}}")
    with pytest.raises(InputError, match="_timestamp") as error:
        _ = Flow(definition(services)).pipelines
    assert error.value.facts["number"] == "E20"


def test_pipelines_pickle() -> None:
    flow = Flow(definition(builder(BUMP) + reader("return str(counts())"), converter="raw"))
    flow.options = RunOptions()
    copies = pickle.loads(pickle.dumps(flow.pipelines))
    assert [one.job for one in copies] == ["build", "read"]


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


# ---- tables --------------------------------------------------------------------------------------


def test_what_is_stored_is_read_as_rows_of_ordinary_tables() -> None:
    flow = Flow(definition(builder(BUMP), converter="raw")).send("words", ["a", "b", "a"])
    paths = flow.pipelines[0].paths
    assert str(paths.pipeline) == "test.flow"
    found = read_rows(flow.store, paths, "states", "counts")
    assert sorted((row["_key"], row["value"]) for row in found.rows) == [("a", 2), ("b", 1)]
    assert {row["key"] for row in read_rows(flow.store, paths, "states", "schemas").rows} == {
        "counts"
    }


@pytest.mark.parametrize("parallelism", [1, 2, 7, 32])
def test_every_subtask_has_a_key_that_reaches_it(parallelism: int) -> None:
    keys = keys_of_every_subtask(parallelism)
    assert len(set(keys)) == parallelism


@pytest.mark.parametrize("body", ["return 'k'", "return record"])
def test_records_of_one_key_are_folded_in_the_order_of_their_topic(body: str) -> None:
    services = builder(
        "row = counts()\nrow.all += record[0]\nrow.update()",
        value=row_of(all="string"),
        key_body=body.replace("record", "record[0]"),
    )
    flow = Flow(definition(services, converter="raw"), parallelism=3)
    flow.topics["words"].splits = 5
    letters = "abcdefghijklmnopqrstuvwxyz"
    flow.send("words", list(letters))
    found = flow.rows("build.counts")
    assert "".join(found[key]["all"] for key in sorted(found)) == letters
