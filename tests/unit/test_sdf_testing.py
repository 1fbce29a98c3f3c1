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
from arroyo_dagster.sdf_testing import (
    DataflowTrial,
    OneDataflowTest,
    OnePackageTest,
    dataflow_tests,
    load_trial,
    package_tests,
)

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
"""  # noqa: E501


def test_tests_that_fail_say_what_was_expected_and_found(tmp_path: Path) -> None:
    result = run("test", package(tmp_path, FAILING))
    assert result.exit_code == 3
    assert "passed  twice: right" in result.stdout
    assert "passed  bump: error" in result.stdout
    line = 1 + package(tmp_path, FAILING).read_text().split("\n").index(FAILING.split("\n")[3])
    file = tmp_path / "sdf-package.yaml"
    assert (
        f"FAILED  twice: wrong\n        {file}:{line}: the result\n"
        '          - {"key": "none", "value": 5}\n          + {"key": "none", "value": 4}\n'
    ) in result.stdout
    assert f"{file}:{line + 1}: state hits\n          - 1: 2\n          + 1: 1\n" in result.stdout
    assert "- an error with 'E41'\n          + {" in result.stdout
    assert "it failed\n          + StateValueError" in result.stdout
    assert result.stdout.endswith("2 passed, 4 failed\n")
    document = json.loads(run("test", package(tmp_path, FAILING), "--json").stdout)
    assert (document["passed"], document["failed"]) == (2, 4)
    assert document["tests"][1]["line"] == line
    one = run("test", package(tmp_path, FAILING), "--only", "right")
    assert (one.exit_code, one.stdout) == (0, "passed  twice: right\n1 passed, 0 failed\n")
    with pytest.raises(AssertionError, match="twice: line"):
        package_tests(package(tmp_path, FAILING))[1].check()


def test_every_mistake_of_the_section_is_told(tmp_path: Path) -> None:
    bad = """
tests:
  - 5
  - {name: a, function: 5, expect: 1}
  - {name: a, function: twice, expect: 1, expekt: 2}
  - {name: a, function: twice}
  - {name: a, function: twice, expect: 1, expect-error: x, states: {hits: 5}}
  - {name: a, function: thrice, expect: 1, states: {hit: {}}}
"""
    with pytest.raises(InvalidDefinition) as raised:
        package_tests(package(tmp_path, bad))
    line = 1 + package(tmp_path, bad).read_text().split("\n").index("  - 5")
    assert sorted((one.path, one.line - line) for one in raised.value.diagnostics) == [
        ("tests[0]", 0),
        ("tests[1].function", 1),
        ("tests[2].expekt", 2),
        ("tests[3]", 3),
        ("tests[4]", 4),
        ("tests[4].states.hits", 4),
        ("tests[5].function", 5),
        ("tests[5].states.hit", 5),
    ]
    checked = run("check", package(tmp_path, bad))
    assert (checked.exit_code, f"line {line + 5}: " in checked.stdout) == (3, True)
    assert "did you mean `hits`" in checked.stdout
    assert "there are no tests" in run("test", package(tmp_path)).stderr


def test_functions_that_are_not_bound_are_told_together(tmp_path: Path) -> None:
    text = (HEAD + STATES).replace(
        "def twice(k, n) -> tuple[str, int]:", "fn twice(n: u8) -> Result<u8> {"
    )
    tests = """
tests:
  - {name: a, function: elsewhere, value: 1, expect: true}
  - {name: b, function: twice, value: 1, expect: {key: none, value: 2}}
"""
    file = tmp_path / "sdf-package.yaml"
    file.write_text(text + tests)
    result = run("test", file)
    assert result.exit_code == 1
    assert "2 functions are not Python" in result.stderr
    assert "--bind elsewhere=MODULE:FUNCTION --bind twice=MODULE:FUNCTION" in result.stderr


COLUMNS = """
states:
  hits: {type: keyed-state, properties: {key: {type: string}, value: {type: u32}}}
types:
  word: {type: object, properties: {text: {type: string}, size: {type: u32}}}
functions:
  count:
    operator: update-state
    states: [{name: hits}]
    inputs: [{name: words, type: word}]
    run: |
      import polars as pl

      def count(words: pl.DataFrame):
          more = words.group_by("_key").len("more")
          rows = hits().rows().join(more, on="_key")
          hits().update(rows.select("_key", pl.col("value").cast(pl.Int64) + pl.col("more")))
  count-sql:
    operator: update-state
    states: [{name: hits}]
    inputs: [{name: words, type: word}]
    run: |
      select hits._key, hits.value + more.n as value from hits
      join (select _key, count(*) as n from batch group by _key) more on hits._key = more._key
  sizes:
    operator: map
    inputs: [{name: words, type: word}]
    output: {type: word}
    run: select text, size * 2 as size from batch
  long:
    operator: filter
    inputs: [{name: words, type: word}]
    output: {type: bool}
    run: |
      import pyarrow as pa
      import pyarrow.compute as pc

      def long(words: pa.Table):
          return pc.greater(words["size"], 3)
  by-text:
    operator: assign-key
    inputs: [{name: words, type: word}]
    output: {type: string}
    run: select text from batch
tests:
  - name: a batch is counted
    function: count
    states: {hits: {be: 2, or: 1}}
    value: [{text: be, size: 2}, {text: be, size: 2}, {text: to, size: 2}]
    state-key: [be, be, to]
    expect-states: {hits: {be: 4, to: 1, or: 1}}
  - name: a query counts
    function: count-sql
    states: {hits: {be: 2}}
    value: [{text: be, size: 2}, {text: to, size: 2}]
    state-key: [be, to]
    expect-states: {hits: {be: 3, to: 1}}
  - name: a batch that fails writes nothing
    function: count
    states: {hits: {be: 4294967295, to: 1}}
    value: [{text: to, size: 2}, {text: be, size: 2}]
    state-key: [to, be]
    expect-error: E41
    expect-states: {hits: {be: 4294967295, to: 1}}
  - {name: keys are needed, function: count, value: {text: a, size: 1}, expect-error: a key for each}
  - {name: one record, function: sizes, value: {text: a, size: 1}, expect: {text: a, size: 2}}
  - {name: many, function: sizes, value: [{text: a, size: 1}], expect: [{text: a, size: 2}]}
  - {name: a mask, function: long, value: [{text: a, size: 1}, {text: b, size: 4}], expect: [false, true]}
  - {name: keys, function: by-text, value: [{text: a, size: 1}], expect: [a]}
"""  # noqa: E501


def test_functions_of_whole_batches_are_tested(tmp_path: Path) -> None:
    file = tmp_path / "sdf-package.yaml"
    file.write_text(HEAD + COLUMNS)
    result = run("test", file)
    assert (result.stdout.split("\n")[-2], result.exit_code) == ("8 passed, 0 failed", 0)
    wrong = COLUMNS.replace("be: 3, to: 1", "be: 2, to: 1").replace("size: 2}}", "size: 3}}")
    file.write_text(HEAD + wrong.replace("expect: [a]", "expect: [b]"))
    result = run("test", file)
    assert (result.stdout.split("\n")[-2], result.exit_code) == ("5 passed, 3 failed", 3)
    assert "- be: 2\n          + be: 3" in result.stdout


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
    functions = "function add-word\nfunction count-of\nfunction sentence-words\n"
    assert run("show", TEXT).stdout == f"{functions}state word-count\n"
    assert run("show", TEXT, "word-count").exit_code == 2


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


# ---- the section `tests` of a dataflow -----------------------------------------------------------

WORDS = EXAMPLES / "words" / "dataflow.yaml"


@pytest.mark.parametrize("test", dataflow_tests(WORDS), ids=str)
def test_the_dataflow_of_the_examples(test: OneDataflowTest) -> None:
    test.check()


def words(folder: Path, tests: str, *changes: tuple[str, str]) -> Path:
    text = WORDS.read_text().partition("\ntests:")[0]
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    file = folder / "dataflow.yaml"
    file.write_text(f"{text}\ntests:\n{tests}")
    return file


def line_of(file: Path, part: str) -> int:
    return next(at for at, line in enumerate(file.read_text().split("\n"), 1) if part in line)


def test_every_difference_of_every_test_is_told(tmp_path: Path) -> None:
    tests = """
  - name: wrong
    records: {sentences: [a b a], asked: [a]}
    expect:
      words: [{text: a, sentence-length: 3}, {text: b, sentence-length: 3}]
    expect-states:
      count-words.hits: {a: 3, b: 1}
      word-stats: {}
  - name: right
    records: {sentences: [a b a]}
    expect-states: {hits: {b: 1, a: 2.0}}
  - {name: nothing was given, expect: {answers: []}, expect-states: {hits: {}}}
"""
    file = words(tmp_path, tests)
    result = run("test", file)
    assert result.exit_code == 3
    assert result.stdout.split("\n") == [
        "FAILED  wrong",
        f"        {file}:{line_of(file, 'words: [{')}: topic words",
        '          + {"sentence-length": 3, "text": "a"}',
        f"        {file}:{line_of(file, 'count-words.hits: {')}: state count-words.hits",
        "          - a: 3",
        "          + a: 2",
        f"        {file}:{line_of(file, 'word-stats: {}')}: state word-stats",
        '          + a: {"count": 2, "longest-sentence": 3}',
        '          + b: {"count": 1, "longest-sentence": 3}',
        "passed  right",
        "passed  nothing was given",
        "2 passed, 1 failed",
        "",
    ]
    found = json.loads(run("test", file, "--json", "--only", "wrong").stdout)["tests"]
    assert [(one["line"], one["passed"]) for one in found] == [(line_of(file, "wrong"), False)]
    assert f"line {line_of(file, 'count-words.hits: {')}: state" in found[0]["problem"]


def test_records_that_fail_are_expected_or_told(tmp_path: Path) -> None:
    tests = """
  - {name: told, records: {sentences: [a or b]}, expect-states: {hits: {a: 1, b: 1}}}
  - name: expected
    records: {sentences: [or or]}
    expect-failed: {count-words/count_word: 2}
  - {name: not, records: {sentences: [a]}, expect-failed: {count-words/count_word: 2}}
"""
    count = "hits().increment(1)"
    file = words(tmp_path, tests, (count, f'{count} if word.text != "or" else 1 / 0'))
    result = run("test", file)
    assert result.exit_code == 3
    assert "passed  expected" in result.stdout
    assert "failed records\n          + count-words/count_word: 1\n" in result.stdout
    assert "ZeroDivisionError: division by zero; in line 2 of the body" in result.stdout
    assert "failed records\n          - count-words/count_word: 2\n" in result.stdout
    assert "1 passed, 2 failed" in result.stdout


def test_every_mistake_of_a_dataflows_tests_is_told(tmp_path: Path) -> None:
    tests = """
  - {name: a, records: {sentence: [a]}, expect: {sentences: []}}
  - {name: b, records: [{asked: a}, 5], expect-states: {hit: {}}}
  - {name: c, records: {words: []}}
  - {name: d, expect-failed: {count-words/count: 1, split/words: x}}
  - {expekt: {}, close-windows: 1}
  - {name: e, expect: , records: []}
"""
    file = words(tmp_path, tests)
    first = line_of(file, "- {name: a")
    for command in ("check", "test"):
        result = run(command, file)
        assert result.exit_code == (3 if command == "check" else 1)
        said = result.stdout if command == "check" else result.stderr
        for line, part in (
            (0, "tests[0].records.sentence: there is no input topic `sentence`; did you mean"),
            (0, "tests[0].expect.sentences: there is no output topic `sentences`"),
            (1, "tests[1].records[0].asked: expected a list of records, found text"),
            (1, "tests[1].records[1]: expected the records of each topic, found an integer"),
            (1, "tests[1].expect-states.hit: there is no state `hit`; did you mean `hits`?"),
            (2, "tests[2].records.words: there is no input topic `words`"),
            (2, "tests[2]: expects nothing"),
            (3, "count-words/count: there is no service/step"),
            (3, "expected a whole number, found text"),
            (4, "tests[4].name: missing `name`"),
            (4, "tests[4].expekt: unknown key"),
            (4, "tests[4].close-windows: expected true or false"),
            (5, "tests[5]: expects nothing"),
        ):
            assert f"line {first + line}: " in said
            assert part in said
    assert run("show", file, "--dot").exit_code == 0  # no other command reads the section


def test_windows_of_a_test_are_closed_at_its_end(tmp_path: Path) -> None:
    at = "2026-03-02T08:0"
    reading = f"{{sensor: hall, floor: 0, celsius: 20, at: '{at}0:00+00:00'}}"
    tests = f"""
tests:
  - name: closed
    records: {{readings: [{reading}]}}
    close-windows: true
    expect-states: {{means: {{hall: {{readings: 1, total: 20}}}}}}
  - name: open
    records: {{readings: [{reading}]}}
    expect: {{warmest-rooms: []}}
"""
    file = tmp_path / "dataflow.yaml"
    file.write_text((EXAMPLES / "temperature" / "dataflow.yaml").read_text() + tests)
    result = run("test", file)
    assert (result.exit_code, result.stdout.split("\n")[-2]) == (0, "2 passed, 0 failed")


def test_functions_and_env_come_from_a_bindings_file(tmp_path: Path) -> None:
    tests = "  - {name: a, records: {sentences: [a]}, expect-states: {hits: {a: 1}}}\n"
    file = words(
        tmp_path, tests, ("def by_text(word):", "fn by_text(word: Word) -> Result<String> {")
    )
    (tmp_path / "sdf_test_keys.py").write_text("def by(word):\n    return word.text\n")
    bindings = tmp_path / "bindings.yaml"
    bindings.write_text("functions: {by-text: 'sdf_test_keys:by'}\nsinks: {answers: stdout}\n")
    assert run("test", file, "--bindings", bindings).exit_code == 0
    assert run("test", file, "--bind", "by-text=sdf_test_keys:by").exit_code == 0


# ---- records with keys and times -----------------------------------------------------------------

CLICKS = EXAMPLES / "clicks" / "dataflow.yaml"


@pytest.mark.parametrize("test", dataflow_tests(CLICKS), ids=str)
def test_the_clicks_of_the_examples(test: OneDataflowTest) -> None:
    test.check()


def clicks(folder: Path, *changes: tuple[str, str]) -> Path:
    text = CLICKS.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    file = folder / "dataflow.yaml"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("{ record: bob, key: /home }", "{ record: bob, key: /x }", '"key": "/home", "record"'),
        ("{ record: bob, key: /home }", "bob", '- {"key": null, "record": "bob"}'),
        (
            "{ record: bob, key: /home }",
            "{ record: bob, key: /home, timestamp: 1 }",
            '- {"key": "/home", "record": "bob", "timestamp": "1970-01-01T00:00:00.001000+00:00"}',
        ),
        ("10:01:00Z", "10:00:59Z", '- "ann 2, bob 1"'),
        ("key: bob, timestamp: 2026-01-05T10:01:00Z", "key: 5, timestamp: 1", "key 5 of topic"),
    ],
)
def test_keys_and_times_are_compared(tmp_path: Path, old: str, new: str, said: str) -> None:
    file = clicks(tmp_path, (old, new))
    result = run("test", file)
    assert (result.exit_code, said in result.stdout) == (3, True), result.stdout


@pytest.mark.parametrize(
    ("new", "path", "said"),
    [
        ("timestamp: 2026-01-05T10:01:00", "timestamp", "a date and time with its zone"),
        ("timestamp: soon", "timestamp", "`soon`; expected epoch milliseconds"),
        ("timestamp: 99999999999999999", "timestamp", "expected epoch milliseconds"),
        ("timestamp: 1, tyme: 2", "tyme", "unknown key"),
    ],
)
def test_wrong_record_is_an_error_at_its_line(
    tmp_path: Path, new: str, path: str, said: str
) -> None:
    file = clicks(tmp_path, ("timestamp: 2026-01-05T10:01:00Z", new))
    with pytest.raises(InvalidDefinition) as raised:
        dataflow_tests(file)
    (one,) = raised.value.diagnostics
    assert (one.path, one.line) == (f"tests[0].records.clicks[3].{path}", line_of(file, new))
    assert said in one.message
    listed = clicks(tmp_path, ("record: /about, key: bob", "record: /about, key: [bob]"))
    with pytest.raises(InvalidDefinition, match=r"clicks\[1\].key: expected text, an integer"):
        dataflow_tests(listed)


def test_a_key_that_does_not_fit_its_topic_is_told_at_its_line(tmp_path: Path) -> None:
    new = "key: 5, timestamp: 1"
    file = clicks(tmp_path, ("key: bob, timestamp: 2026-01-05T10:01:00Z", new))
    result = run("test", file)
    assert f"{file.name}:{line_of(file, new)}: InputError: key 5 of topic" in result.stdout


def test_keys_have_the_type_of_their_topic(tmp_path: Path) -> None:
    changes = (
        (
            "key: { type: string }, value: { type: string }",
            "key: { type: u16 }, value: { type: u16 }",
        ),
    )
    flow = DataflowTrial(
        clicks(
            tmp_path,
            *changes,
            ("tuple[str, str]", "tuple[int, int]"),
            ("config:\n  converter: raw", ""),
        )
    )
    flow.send("clicks", 7, key=300, time_ms=5).run()
    assert [(one.key, one.value, one.time_ms) for one in flow.received_records("visits")] == [
        (7, 300, 5)
    ]
    with pytest.raises(InputError, match="key 70000 of topic `clicks`: 70000 is no u16"):
        flow.send("clicks", 7, key=70_000)


def test_a_json_record_may_have_members_of_the_same_names(tmp_path: Path) -> None:
    file = tmp_path / "dataflow.yaml"
    file.write_text(
        HEAD
        + """
types:
  o: {type: object, properties: {record: {type: string}, key: {type: string, optional: true}}}
topics: {t: {schema: {value: {type: o}}}, u: {schema: {value: {type: o}}}}
services:
  s:
    sources: [{type: topic, id: t}]
    sinks: [{type: topic, id: u}]
tests:
  - {name: plain, records: {t: [{record: a}]}, expect: {u: [{record: a}]}}
  - name: inside
    records: {t: [{record: {record: a, key: b}, key: c}, {record: d}]}
    expect: {u: [{record: {record: a, key: b}, key: c}, {record: d}]}
"""
    )
    assert run("test", file).stdout.endswith("2 passed, 0 failed\n")
