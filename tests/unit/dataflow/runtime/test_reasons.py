"""Protects the messages of user code that fails: where it is, what failed, and on which record."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from arroyo_dagster.dataflow.errors import StepFailed
from tests.dataflows import Flow, Sent, builder, definition, reader, row_of


def logged(caplog: pytest.LogCaptureFixture, services: str) -> str:
    Flow(definition(services, converter="raw")).send("words", ["a"])
    return caplog.records[0].getMessage()


@pytest.mark.parametrize(
    ("body", "value", "message"),
    [
        (
            "x = 0\ncounts().set(1 / x)",
            "{type: u32}",
            r"build_update skipped a record \(topic words, partition 0, offset 0\): "
            r"ZeroDivisionError: division by zero; in line 3 of the body: `1 / x`; record 'a'",
        ),
        (
            "counts().set(-1)",
            "{type: u32}",
            "E41: state `counts`, key 'a': -1 is no u32: expected an int from 0 to 4294967295; "
            r"in line 2 of the body: `counts\(\).set\(-1\)`",
        ),
        (
            "row = counts()\nrow.n = 'x'\nrow.update()",
            row_of(n="u8", m="u8"),
            "E41: column `n` of state `counts`, key 'a': 'x' is no u8: expected an int from 0 to "
            r"255; in line 4 of the body: `row.update\(\)`",
        ),
        ("{}[record]", "{type: u32}", r"KeyError: 'a'; in line 2 of the body: `\{\}\[record\]`"),
    ],
)
def test_a_failure_names_the_line_the_expression_and_the_record(
    caplog: pytest.LogCaptureFixture, body: str, value: str, message: str
) -> None:
    said = logged(caplog, builder(body, value=value))
    assert re.search(message, said), said


def test_a_record_that_does_not_decode_names_no_line_of_code(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kind = "object, properties: {text: {type: string}, n: {type: u32}}"
    flow = Flow(definition(builder("pass", key_body="return record.text"), topics={"words": kind}))
    flow.send("words", [{"text": 5, "n": 1}, Sent(b"no JSON")])
    first, second = (one.getMessage() for one in caplog.records)
    assert "ValueError: text: 5 is no string: expected valid Unicode text; record" in first
    assert "Next: correct the type of the topic or the record" in first
    assert "Expecting value: line 1 column 1 (char 0); record" in second


@pytest.mark.parametrize(
    ("value", "change"),
    [("{type: u32}", "counts().increment(1)"), (row_of(n="u32", m="u8"), "counts().update()")],
)
def test_e43_a_change_through_a_reference_is_told(
    caplog: pytest.LogCaptureFixture, value: str, change: str
) -> None:
    flow = Flow(
        definition(builder("pass", value=value) + reader(f"x = counts\n{change}"), converter="raw")
    )
    flow.send("asked", ["a"])
    said = caplog.records[0].getMessage()
    assert "E43: " in said
    assert "only update-state of the service that owns it changes it" in said


def test_a_function_of_a_module_is_named_by_its_file(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "app_that_fails.py").write_text("def f(word):\n    return int(word)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    text = definition(
        "\n  pass:\n    sources: [{type: topic, id: words}]\n"
        "    transforms: [{operator: map, uses: 'app_that_fails:f'}]\n"
    )
    Flow(text).send("words", ['"a"'])
    assert "in app_that_fails.py line 2: `int(word)`" in caplog.records[0].getMessage()


def test_a_function_that_ends_the_process_is_told_and_nothing_is_published() -> None:
    flow = Flow(definition(builder("raise SystemExit(3)"), converter="raw"))
    with pytest.raises(StepFailed, match=r"SystemExit\(3\); in line 2 of the body") as error:
        flow.send("words", ["a"])
    assert "nothing of the epoch was published" in str(error.value)
    assert (error.value.facts["service"], error.value.facts["step"]) == (
        "build",
        "`build_update`",
    )
    assert flow.views().epochs == {"build": None}


def test_the_first_failure_of_a_step_says_what_to_do_next(caplog: pytest.LogCaptureFixture) -> None:
    text = definition(builder("counts().set(-1)"), converter="raw")
    Flow(text, on_error="dead-letter").send("words", ["a", "b"])
    first, second = (one.getMessage() for one in caplog.records[:2])
    assert "Next: write a value that fits" in first
    assert first.endswith("; then `sdf replay` processes the record again")
    assert "Next: " not in second
    with pytest.raises(StepFailed) as error:
        Flow(text, on_error="fail").send("words", ["a"])
    assert error.value.next_step is not None
    assert error.value.next_step.startswith("write a value that fits")
    assert error.value.next_step.endswith(", or run with --on-error skip")
