"""Protects the messages of user code that fails: where it is, what failed, and on which record."""

from __future__ import annotations

import pytest

from arroyo_dagster.dataflow.errors import StepFailed
from tests.dataflows import Flow, builder, definition, reader, row_of


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
    assert (error.value.facts["service"], error.value.facts["step"]) == ("build", "`build_update`")
    assert flow.views().epochs == {"build": None}
