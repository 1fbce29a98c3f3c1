"""Windows as services run them: what flush sees, what readers see, how time goes on."""

from __future__ import annotations

from typing import Any

import pytest

from arroyo_dagster.dataflow.errors import StateSchemaError
from tests.dataflows import Flow, builder, definition, row_of
from tests.journeys.test_sdf_acceptance import event, windowed

ROWS: dict[str, Any] = {
    "value": row_of(n="u32"),
    "body": "row = counts(); row.n += 1; row.update()",
}


@pytest.mark.parametrize("parallelism", [1, 2])
@pytest.mark.parametrize(("value", "column"), [("{type: u32}", "value"), (row_of(n="u32"), "n")])
def test_whole_batches_fill_the_windows_that_records_fill_one_by_one(
    value: str, column: str, parallelism: int
) -> None:
    added = (
        f"import polars as pl; return counts().rows().with_columns({column}=pl.col('{column}') + 1)"
    )
    flow = windowed(
        value=value,
        argument="events: 'pl.DataFrame'",
        body=f"assert events['t'].max() < 19000; {added}",
        flush="return [list(pair) if isinstance(pair, tuple) else pair['n'] for pair in counts()]",
        parallelism=parallelism,
    )
    flow.send("events", [event(1, "a"), event(2, "b"), event(12, "a"), event(19, "lost")])
    flow.restart()
    flow.send("events", [event(13, "a"), event(25)])
    closed = flow.sinks["closed"].values
    assert closed == ([[1, 1], [2]] if column == "n" else [[["a", 1], ["b", 1]], [["a", 2]]])


def test_before_the_window_the_window_is_all_of_time() -> None:
    flow = windowed(time="event['t'] if window()[1] - window()[0] > 1 << 40 else None")
    flow.topics["events"].per_epoch = 1
    flow.send("events", [event(1), event(2), event(25)])
    assert flow.sinks["closed"].values == [[["k", 2]]]


@pytest.mark.parametrize("form", [{}, ROWS], ids=["cells", "rows"])
@pytest.mark.parametrize("windowed_first", [False, True])
def test_e50_a_state_that_gets_or_loses_its_windows_is_refused(
    form: dict[str, Any], windowed_first: bool
) -> None:
    value, body = form.get("value", "{type: u32}"), form.get("body", "counts().increment(1)")
    in_windows = windowed(**form)
    plain = Flow(definition(builder(body, value=value)), store=in_windows.store)
    if windowed_first:
        in_windows.send("events", [event(1)])
        plain, in_windows = in_windows, plain
    else:
        plain.send("words", ["a"])
    objects = list(plain.store.list(""))
    with pytest.raises(StateSchemaError, match="windows") as error:
        _ = in_windows.pipelines
    assert error.value.facts["number"] == "E50"
    assert list(plain.store.list("")) == objects
