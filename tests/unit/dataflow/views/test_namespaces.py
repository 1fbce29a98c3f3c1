"""What `show state` shows: every namespace of a dataflow, and the exact text of its rows."""

from __future__ import annotations

import datetime

import pytest

from arroyo_dagster.dataflow.definition.definition import Dataflow
from arroyo_dagster.dataflow.definition.reading import parse_document
from arroyo_dagster.dataflow.definition.types import ScalarType
from arroyo_dagster.dataflow.definition.windows import GLOBAL_WINDOW, Window
from arroyo_dagster.dataflow.views.namespaces import CliError, Namespaces
from arroyo_dagster.dataflow.views.rendering import (
    cell_text,
    millis_text,
    watermark_text,
    window_text,
)
from arroyo_dagster.sdf_testing import DataflowTrial

FLOW = """
apiVersion: 0.6.0
meta: {name: n, version: 0.1.0, namespace: t}
topics: {given: {schema: {value: {type: %s}}}}
services:
  build:
    sources: [{type: topic, id: given}]
    states:
      kept: {type: keyed-state, properties: {key: {type: %s}, value: %s}}
    partition:
      assign-key: {run: "def of(v): return %s"}
      update-state:
        run: |
          def update(v):
              %s
"""


def flow(given: str, key: str, value: str, of: str, update: str, now: int = 0) -> DataflowTrial:
    body = update.replace("\n", "\n              ")
    found = parse_document(FLOW % (given, key, value, of, body), extended=True)
    assert isinstance(found, Dataflow)
    clock = [now]
    trial = DataflowTrial(found, clock=lambda: clock[0])
    trial.clock = clock  # type: ignore[attr-defined]
    return trial


def test_keys_and_patterns_narrow_rows() -> None:
    trial = flow("string", "string", "{type: u32}", "v", "kept().increment(1)")
    trial.send("given", "apple", "pear", "apple").run()
    found = Namespaces(trial.store, trial.dataflow).get("build/kept")
    assert found.lines(key="apple") == [["apple", "*", "2"]]
    assert found.lines(pattern="r$") == [["pear", "*", "1"]]
    assert found.lines(key="apple", pattern="r$") == []
    with pytest.raises(CliError, match="not a regular expression"):
        found.lines(pattern="[")


def test_times_and_windows_are_rfc_3339() -> None:
    assert millis_text(1_767_607_200_000) == "2026-01-05T10:00:00Z"
    assert millis_text(1_767_607_200_007) == "2026-01-05T10:00:00.007Z"
    assert millis_text(-1) == "1969-12-31T23:59:59.999Z"
    assert millis_text(2**62) == str(2**62)
    assert watermark_text(1_767_607_200_000) == "2026-01-05T10:00:00.000Z"
    moment = datetime.datetime(2026, 1, 5, 10, tzinfo=datetime.UTC)
    assert cell_text(moment, ScalarType.TIMESTAMP) == "2026-01-05T10:00:00Z"
    assert cell_text(True, ScalarType.BOOL) == "true"
    assert window_text(GLOBAL_WINDOW) == "*"
    assert (
        window_text(Window(1_767_607_200_000, 1_767_607_230_000))
        == "2026-01-05T10:00:00Z:2026-01-05T10:00:30Z"
    )
