"""The test helpers for users: functions and dataflows in memory; and `sdf test` over them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from arroyo_dagster import cli
from arroyo_dagster.dataflow.definition.diagnostics import InvalidDefinition
from arroyo_dagster.dataflow.errors import StateValueError, UnboundOperatorError
from arroyo_dagster.errors import InputError
from arroyo_dagster.sdf_testing import DataflowTrial, OnePackageTest, load_trial, package_tests

EXAMPLES = Path(__file__).parents[2] / "examples" / "sdf"
TEXT = EXAMPLES / "packages" / "text"
HEAD = "apiVersion: 0.6.0\nmeta: {name: p, version: 0.1.0, namespace: t}\n"
STATES = """
states:
  hits: {type: keyed-state, properties: {key: {type: string}, value: {type: u32}}}
  rows:
    type: keyed-state
    properties:
      key: {type: i32}
      value: {type: arrow-row, properties: {n: {type: u8}, note: {type: string}}, ttl: 60s}
functions:
  bump:
    operator: update-state
    states: [{name: hits}, {name: rows}]
    inputs: [{name: by, type: u8}]
    run: |
      def bump(by):
          hits().increment(1)
          row = rows()
          row.n += by
          row.note = str(key())
          row.update()
  twice:
    operator: map
    inputs: [{name: k, type: string, kind: key, optional: true}, {name: n, type: u8}]
    output: {type: key-value, properties: {key: {type: string}, value: {type: u8}}}
    run: |
      def twice(k, n) -> tuple[str, int]:
          return (k or "none"), 2 * n
  whole:
    operator: flush
    states: [{name: hits}, {name: rows}]
    output: {type: u32}
    run: |
      def whole():
          return sum(n for _, n in hits()) + rows().shape()[0]
  elsewhere:
    operator: filter
    inputs: [{name: n, type: u8}]
    output: {type: bool}
"""


def package(folder: Path, more: str = "") -> Path:
    file = folder / "sdf-package.yaml"
    file.write_text(HEAD + STATES + more)
    return file


def run(*args: object) -> Result:
    return CliRunner().invoke(cli.main, ["sdf", *map(str, args)], catch_exceptions=False)


# ---- functions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("test", package_tests(TEXT), ids=str)
def test_the_package_of_the_examples(test: OnePackageTest) -> None:
    test.check()


def test_a_function_changes_the_entries_of_its_key(tmp_path: Path) -> None:
    now = 1_000_000
    trial = load_trial(package(tmp_path), clock=lambda: now)
    with pytest.raises(StateValueError, match="is no i32"):
        trial.call("bump", 3, state_key="x")
    trial.add("rows", 7, {"n": 250})
    assert trial.call("bump", 3, state_key=7) is None
    assert trial.states == {"hits": {"7": 1}, "rows": {"7": {"n": 253, "note": "7"}}}
    with pytest.raises(StateValueError, match="256 is no u8"):
        trial.call("bump", 3, state_key=7)
    assert trial.states["hits"] == {"7": 1}  # what a failing function wrote is not kept
    now += 60_000
    assert trial.states["rows"] == {}


def test_without_a_state_key_states_are_whole(tmp_path: Path) -> None:
    trial = load_trial(package(tmp_path))
    assert trial.call("whole") == 0
    trial.add("hits", "a", 2)
    trial.add("hits", "b", 3)
    trial.add("rows", 1, {"note": "x"})
    assert trial.call("whole") == 6


def test_keys_go_in_and_come_out(tmp_path: Path) -> None:
    trial = load_trial(package(tmp_path))
    assert trial.call("twice", 4, key="a") == {"key": "a", "value": 8}
    assert trial.call("twice", 4) == {"key": "none", "value": 8}
    with pytest.raises(InputError, match="does not fit input `n`"):
        trial.call("twice", 256)


def test_bodies_elsewhere_are_bound(tmp_path: Path) -> None:
    with pytest.raises(UnboundOperatorError, match="no Python function is bound"):
        load_trial(package(tmp_path)).call("elsewhere", 1)
    trial = load_trial(package(tmp_path), functions={"elsewhere": lambda n: n > 1})
    assert (trial.call("elsewhere", 1), trial.call("elsewhere", 2)) == (False, True)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda trial: trial.call("nothing", 1), "no function `nothing`"),
        (lambda trial: trial.call("twice"), "needs a value"),
        (lambda trial: trial.add("nothing", "a", 1), "no state `nothing`"),
        (lambda trial: trial.add("hits", "a", -1), "-1 is no u32"),
        (lambda trial: trial.add("rows", 1, {"m": 1}), "an object of its columns"),
    ],
)
def test_what_does_not_fit_is_told(tmp_path: Path, call: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        call(load_trial(package(tmp_path)))


# ---- the section `tests` -------------------------------------------------------------------------

FAILING = """
tests:
  - {name: right, function: twice, value: 2, expect: {key: none, value: 4}}
  - {name: wrong, function: twice, value: 2, expect: {key: none, value: 5}}
  - {name: state, function: bump, value: 1, state-key: 1, expect-states: {hits: {"1": 2}}}
  - {name: error, function: bump, value: 255, state-key: 1, states: {rows: {"1": {n: 1}}}, expect-error: E41}
  - {name: no error, function: twice, value: 2, expect-error: E41}
  - {name: raises, function: bump, value: 255, state-key: 1, states: {rows: {"1": {n: 1}}}, expect: null}
  - {name: nobody, function: nobody, expect: 1}
"""  # noqa: E501


def test_tests_that_fail_say_what_was_expected_and_found(tmp_path: Path) -> None:
    result = run("test", package(tmp_path, FAILING))
    assert result.exit_code == 3
    assert "passed  twice: right" in result.stdout
    assert "passed  bump: error" in result.stdout
    assert (
        'expected {"key": "none", "value": 5}, found {"key": "none", "value": 4}' in result.stdout
    )
    assert 'expected state hits to hold {"1": 2}, found {"1": 1}' in result.stdout
    assert "expected an error with 'E41', found" in result.stdout
    assert "raised StateValueError" in result.stdout
    assert "no function `nobody`" in result.stdout
    assert result.stdout.endswith("2 passed, 5 failed\n")
    document = json.loads(run("test", package(tmp_path, FAILING), "--json").stdout)
    assert (document["passed"], document["failed"]) == (2, 5)
    one = run("test", package(tmp_path, FAILING), "--only", "right")
    assert (one.exit_code, one.stdout) == (0, "passed  twice: right\n1 passed, 0 failed\n")
    with pytest.raises(AssertionError, match="expected"):
        package_tests(package(tmp_path, FAILING))[1].check()


def test_the_section_of_the_example_passes() -> None:
    result = run("test", TEXT)
    assert (result.exit_code, "5 passed, 0 failed" in result.stdout) == (0, True)


def test_every_mistake_of_the_section_is_told(tmp_path: Path) -> None:
    bad = """
tests:
  - 5
  - {name: a, function: 5, expect: 1}
  - {name: a, function: twice, expect: 1, expekt: 2}
  - {name: a, function: twice}
  - {name: a, function: twice, expect: 1, expect-error: x, states: {hits: 5}}
"""
    with pytest.raises(InvalidDefinition) as raised:
        package_tests(package(tmp_path, bad))
    assert sorted(one.path for one in raised.value.diagnostics) == [
        "tests[0]",
        "tests[1].function",
        "tests[2].expekt",
        "tests[3]",
        "tests[4]",
        "tests[4].states",
    ]
    assert "the package has no tests" in run("test", package(tmp_path)).stderr


def test_a_function_is_called_from_the_shell(tmp_path: Path) -> None:
    file = package(tmp_path)
    result = run("test", "function", "twice", "-f", file, "-v", "4", "-k", "a", "-o", "kv")
    assert (result.exit_code, result.stdout) == (0, '{"key": "a", "value": 8}\n')
    seeds = ("--state", 'rows:7={"n": 1}', "--state", "hits:7=4")
    result = run("test", "function", "bump", "-f", file, "-v", "2", "-s", "7", *seeds)
    assert (result.stdout, result.exit_code) == ("", 0)
    assert result.stderr == 'hits 7: 5\nrows 7: {"n": 3, "note": "7"}\n'
    (tmp_path / "value").write_text("5")
    flags = ("--value-file", tmp_path / "value", "--json")
    document = json.loads(run("test", "function", "twice", "-f", file, *flags).stdout)
    assert document["result"] == {"key": "none", "value": 10}
    raw = run("test", "function", "sentence-words", "-f", TEXT, "-v", "To BE")
    assert raw.stdout == "to\nbe\n"
    assert run("show", "functions", TEXT).stdout == "add-word\ncount-of\nsentence-words\n"
    assert run("show", "states", TEXT).stdout == "word-count\n"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["twice", "-v", "{"], "not valid JSON"),
        (["bump", "-v", "1", "--state", "hits"], "STATE:KEY=VALUE"),
        (["bump", "-v", "1", "--state", "hits:a=x"], "STATE:KEY=VALUE"),
        (["twice", "--value-file", "nowhere"], "cannot be read"),
        (["nobody", "-v", "1"], "no function"),
    ],
)
def test_a_call_that_cannot_be_is_told(tmp_path: Path, flags: list[str], said: str) -> None:
    result = run("test", "function", *flags, "-f", package(tmp_path))
    assert (result.exit_code, said in result.stderr) == (1, True)


# ---- dataflows -----------------------------------------------------------------------------------


def test_a_dataflow_is_tried_in_memory() -> None:
    flow = DataflowTrial(EXAMPLES / "words" / "dataflow.yaml")
    flow.send("sentences", "to be or not", "to be").run()
    assert flow.state("count-words.hits") == {"be": 2, "not": 1, "or": 1, "to": 2}
    assert flow.state("word-stats")["to"] == {"count": 2, "longest-sentence": 4}
    flow.send("sentences", "to").send("asked", "to", "zzz").run()
    assert [(one["word"], one["count"]) for one in flow.received("answers")] == [
        ("to", 3),
        ("zzz", 0),
    ]
    assert len(flow.received("words")) == 7
    assert flow.sql("select max(count) as most from word_stats") == [{"most": 3}]
    assert flow.failed == {}
    with pytest.raises(InputError, match="not sent to topic `words`"):
        flow.send("words", {})
    with pytest.raises(InputError, match="no service writes topic `asked`"):
        flow.received("asked")


def test_windows_are_closed_when_a_trial_says_so() -> None:
    flow = DataflowTrial(EXAMPLES / "temperature" / "dataflow.yaml")
    reading = {"sensor": "hall", "floor": 0, "celsius": 20.0, "at": "2026-03-02T08:00:00+00:00"}
    flow.send("readings", reading, b"broken").run()
    assert flow.received("warmest-rooms") == []
    assert flow.failed == {"latest/readings": 1, "ten-minutes/readings": 1}
    flow.run(close_windows=True)
    (closed,) = flow.received("warmest-rooms")
    assert closed["rooms"] == [{"sensor": "hall", "celsius": 20.0}]
    assert flow.state("ten-minutes.means") == {"hall": {"readings": 1, "total": 20.0}}


def test_what_cannot_be_tried_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a dataflow, found a package, which has no services"):
        DataflowTrial(TEXT)
    with pytest.raises(InputError, match="not tested function by function"):
        package_tests(EXAMPLES / "words" / "dataflow.yaml")
