"""Windows as services run them: what flush sees, what readers see, how time goes on."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from arroyo_dagster.dataflow.errors import StateSchemaError
from arroyo_dagster.dataflow.runtime.service_source import ServiceSource
from tests.dataflows import Clock, Flow, Topic, builder, definition, reader, row_of
from tests.journeys.test_sdf_acceptance import event, windowed

ROWS: dict[str, Any] = {
    "value": row_of(n="u32"),
    "body": "row = counts(); row.n += 1; row.update()",
}


@pytest.mark.parametrize("parallelism", [1, 2])
def test_flush_queries_the_closing_window_and_no_other(parallelism: int) -> None:
    flow = windowed(
        **ROWS,
        flush="""rows = sql("select _key, n from counts order by n desc, _key limit 1").rows()
              top = (rows.str("_key"), rows.u32("n")) if rows.next() else None
              return [window()[0], key(), len(counts()), list(top)]""",
        parallelism=parallelism,
    )
    flow.send("events", [event(1, "a"), event(2, "b"), event(3, "b"), event(12, "c"), event(25)])
    assert flow.sinks["closed"].values == [[0, None, 2, ["b", 2]], [10_000, None, 1, ["c", 1]]]


def test_a_failing_flush_is_counted_and_the_window_is_still_shown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    flow = windowed(flush="return None if counts()[0][0] == 'a' else 1 / 0")
    with caplog.at_level(logging.WARNING, "arroyo_dagster.sdf"):
        flow.send("events", [event(1, "a"), event(11, "b"), event(21, "c")])
    assert flow.sinks["closed"].values == []
    assert flow.metrics("build")["flushed"].failed == 2
    assert flow.cells("build.counts") == {"b": 1}
    assert "E42" in caplog.text
    assert "division" in caplog.text


def test_a_window_starts_from_defaults_and_live_rows_are_shown_apart() -> None:
    flow = windowed(**ROWS, flush="return [row['n'] for row in counts()]")
    flow.send("events", [event(1), event(2), event(11), event(13)])
    assert flow.sinks["closed"].values == [[2]]
    assert flow.rows("build.counts") == {"k": {"n": 2}}
    live = flow.views().view("build.counts", live=True)
    assert live.windows() == [(10_000, 20_000)]
    assert live.frame()["n"].to_list() == [2]
    assert flow.views().view("build.counts").windows() == [(0, 10_000)]


def test_an_update_sees_the_window_that_closed_last_through_sql() -> None:
    flow = windowed(
        value=row_of(n="u32"),
        body="row = counts(); row.n = len(sql('select * from counts')) + 1; row.update()",
        flush="return [row['n'] for row in counts()]",
    )
    flow.send("events", [event(1, "a"), event(2, "b"), event(11, "c")])
    flow.send("events", [event(12, "d"), event(21)])
    assert flow.sinks["closed"].values == [[1, 1], [1, 3]]


def test_open_windows_are_closed_at_the_end_only_if_that_is_asked() -> None:
    for asked in (False, True):
        flow = windowed(flush_open=asked, topics={"events": Topic(ended=True)})
        flow.topics["events"].send(event(1, "a"), event(12, "b"))
        for _ in range(3 if asked else 1):
            flow.step()
        closed = [[["a", 1]], [["b", 1]]]
        assert flow.sinks["closed"].values == closed[: 2 if asked else 1]


def test_a_late_record_moves_no_window_and_a_restart_forgets_no_watermark() -> None:
    flow = windowed(watermark="grace-period: 5s")
    flow.send("events", [event(1), event(16)])
    flow.restart()
    flow.send("events", [event(2), event(9), event(26)])
    assert flow.sinks["closed"].values == [[["k", 1]], [["k", 1]]]
    assert flow.metrics("build")["window"].dropped_late == 2


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


@pytest.mark.parametrize("parallelism", [1, 3])
def test_times_before_1970_have_windows_too(parallelism: int) -> None:
    flow = windowed(
        parallelism=parallelism,
        **ROWS,
        flush="return [window()[0], sum(row['n'] for row in counts())]",
    )
    flow.send("events", [event(-25, "a")])
    flow.restart()
    flow.send("events", [event(-24, "b"), event(-11, "c"), event(-10, "d")])
    flow.restart()
    flow.send("events", [event(1, "e")])
    assert flow.sinks["closed"].values == [[-30_000, 2], [-20_000, 1], [-10_000, 1]]


@pytest.mark.parametrize("time", [2**63, "soon", None, 1.5, True])
def test_a_time_that_is_no_64_bit_int_costs_its_record(
    time: Any, caplog: pytest.LogCaptureFixture
) -> None:
    flow = windowed(time=repr(time))
    flow.send("events", [event(1)])
    assert flow.metrics("build")["event_time"].failed == 1
    assert "E29" in caplog.text


@pytest.mark.parametrize("years", [3000, 250_000_000])
def test_a_time_far_away_closes_everything_and_breaks_nothing(years: int) -> None:
    flow = windowed(**ROWS, flush="return [window()[0] // 1000]")
    far = {"k": "k", "t": years * 31_556_952_000}
    flow.send("events", [event(1), far, event(2)])
    flow.restart()
    flow.send("events", [event(3)])
    assert flow.sinks["closed"].values == [[0]]
    assert flow.metrics("build")["window"].dropped_late == 2


def test_a_ttl_hides_rows_of_the_window_that_closed_last() -> None:
    clock = Clock()
    value = row_of(n="u32")[:-1] + ", ttl: 60s}"
    flow = windowed(**{**ROWS, "value": value}, flush="return 'closed'", clock=clock)
    flow.send("events", [event(1), event(11)])
    assert flow.rows("build.counts") == {"k": {"n": 1}}
    clock.ms += 60_000
    assert flow.rows("build.counts") == {}


def test_a_window_without_flush_puts_nothing_out_and_is_read() -> None:
    flow = windowed(flush="", more=reader("return str(dict(counts()))"))
    flow.send("events", [event(1), event(11)])
    assert flow.send("asked", ['"?"']).sinks["answers"].values == ["{'k': 1}"]
    assert flow.sinks["closed"].values == []


def test_the_clock_and_the_readers_epochs_are_settled_in_the_offset() -> None:
    clock = Clock()
    flow = windowed(more=reader("return '1'"), clock=clock)
    source = flow.pipelines[1].sources
    (node,) = source.values()
    read = node.source
    assert isinstance(read, ServiceSource)
    start = read.initial_offset()
    assert read.latest_offset(start) is start
    flow.topics["asked"].send('"?"')
    end = read.latest_offset(start)
    assert (end["clock_ms"], end["epochs"]) == (clock.ms, {"build": None})
    flow.send("events", [event(1)])
    assert read.latest_offset(start)["epochs"] == {"build": 1}
    clock.ms -= 5_000
    assert read.latest_offset(end)["clock_ms"] == end["clock_ms"]


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
