"""Protects the messages of user code that fails: where it is, what failed, and on which record."""

from __future__ import annotations

import re

import pytest

from arroyo_dagster.dataflow.errors import StepFailed
from tests.dataflows import Flow, builder, definition, reader, row_of


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
