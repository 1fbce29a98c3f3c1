"""The acceptance checks of sdf-states.md 10 that need a service to run.

Those about definitions stand in tests/unit/dataflow; A20 and A23 run the command line.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.dataflows import SECOND, Clock, Flow, builder, definition, reader, row_of

WORDS = ["apple", "orange", "banana", "orange", "grape", "orange", "banana"]


@pytest.mark.parametrize("parallelism", [1, 3])
def test_a1_words_are_counted(parallelism: int) -> None:
    flow = Flow(
        definition(builder("counts().increment(1)"), converter="raw"), parallelism=parallelism
    )
    flow.send("words", WORDS)
    assert flow.cells("build.counts") == {"apple": 1, "banana": 2, "grape": 1, "orange": 3}


@pytest.mark.parametrize("order", [(-20 * 173.33, 20 * 219.41), (20 * 219.41, -20 * 173.33)])
def test_a2_an_f32_column_is_rounded_at_every_update(order: tuple[float, float]) -> None:
    body = "row = counts()\nrow.balance += record\nrow.update()"
    services = builder(body, value=row_of(balance="f32"), topic="amounts", key_body="return 'a'")
    flow = Flow(definition(services, topics={"amounts": "f32"}))
    flow.send("amounts", list(order))
    frame = flow.views().view("build.counts").frame()
    assert str(frame["balance"].to_numpy()[0]) == "921.6001"


def test_a3_a_default_takes_part() -> None:
    body = "row = counts()\nrow.speed = (row.speed + record) / 2\nrow.update()"
    services = builder(body, value=row_of(speed="f64"), topic="speeds", key_body="return 'car'")
    flow = Flow(definition(services, topics={"speeds": "f64"}))
    assert flow.send("speeds", [10.0, 20.0]).rows("build.counts") == {"car": {"speed": 12.5}}


def test_a4_a_number_becomes_the_text_of_a_key() -> None:
    services = builder("counts().increment(1)", topic="ids")
    flow = Flow(definition(services, topics={"ids": "u64"}))
    assert flow.send("ids", [0, 1, 2]).cells("build.counts") == {"0": 1, "1": 1, "2": 1}


def test_a5_an_int_key_is_text_in_a_frame_and_an_int_in_key() -> None:
    body = "row = counts()\nrow.seen = key()\nrow.update()"
    look_up = "frame = counts()\nrows = frame.rows()\nrows.next()\nreturn rows.str(frame.key())"
    services = builder(body, key="i32", value=row_of(seen="i32"), topic="ids") + reader(look_up)
    flow = Flow(definition(services, topics={"ids": "i64"}))
    flow.send("ids", [42])
    assert flow.rows("build.counts") == {"42": {"seen": 42}}
    assert flow.send("asked", ['"x"']).sinks["answers"].values == ["42"]


def test_a6_the_key_comes_first_then_columns_by_name() -> None:
    body = "row = counts()\nrow.c = 3\nrow.a = 1\nrow.b = 2\nrow.update()"
    flow = Flow(definition(builder(body, value=row_of(c="u8", a="u8", b="u8")), converter="raw"))
    flow.send("words", ["x"])
    assert flow.sql("select * from counts").columns == ["_key", "a", "b", "c"]


def test_a7_a_dashed_column_is_an_attribute_a_quoted_name_and_a_descriptor() -> None:
    body = "row = counts()\nrow.pu_zone += 1\nrow['pu-zone'] += 1\nrow.update()"
    look_up = (
        "frame = sql('select `pu-zone` from counts')\n"
        "rows = frame.rows()\nrows.next()\n"
        "return str(rows.u64(frame.col('pu-zone')))"
    )
    services = builder(body, value=row_of(pu_zone="u64")) + reader(look_up)
    flow = Flow(definition(services, converter="raw"))
    flow.send("words", ["x"])
    assert flow.send("asked", ["?"]).sinks["answers"].values == [2]


def test_a8_a_dashed_state_is_a_table_under_both_names_and_listed_once() -> None:
    body = "row = count_per_word()\nrow.count += 1\nrow.update()"
    flow = Flow(
        definition(
            builder(body, value=row_of(count="u32"), state="count-per-word"), converter="raw"
        )
    )
    flow.send("words", WORDS)
    for name in ("count_per_word", "`count-per-word`"):
        answer = flow.sql(f"select count from {name} where _key = 'orange'")
        assert answer.rows() == [(3,)]
    assert flow.sql("show tables").rows() == [("count_per_word",)]


def test_a9_a_function_that_returns_before_update_leaves_no_row() -> None:
    body = "row = counts()\nrow.hits += 1\nif record == 'skip':\n    return\nrow.update()"
    flow = Flow(definition(builder(body, value=row_of(hits="u32")), converter="raw"))
    assert flow.send("words", ["skip"]).rows("build.counts") == {}
    assert flow.send("words", ["kept"]).rows("build.counts") == {"kept": {"hits": 1}}


def test_a10_increment_gives_the_new_value() -> None:
    seen: list[int] = []

    def count(record: str) -> None:
        from arroyo_dagster.sdf import state

        seen.append(state("counts").increment(1))

    flow = Flow(definition(bound_to("count"), converter="raw"), functions={"count": count})
    flow.send("words", ["counter"] * 3)
    assert (seen, flow.cells("build.counts")) == ([1, 2, 3], {"counter": 3})


def bound_to(name: str) -> str:
    """A builder whose update-state is Rust, for a binding to fill."""
    before, _, _ = builder("pass").partition("      update-state:\n")
    return (
        f"{before}      update-state: {{run: 'pub fn {name}(word: String) -> Result<()> {{ }}'}}\n"
    )


def test_a12_rows_expire_on_the_engines_clock() -> None:
    clock = Clock()
    start = clock.ms
    body = "row = counts()\nrow.hits += 1\nrow.update()"
    value = row_of(hits="u32")[:-1] + ", ttl: 60s}"
    flow = Flow(
        definition(builder(body, value=value) + reader("return str(len(counts()))")), clock=clock
    )
    flow.send("words", ['"k"'])
    clock.ms = start + 59_999
    assert flow.rows("build.counts") == {"k": {"hits": 1}}
    assert flow.send("asked", ['"?"']).sinks["answers"].values == ["1"]
    clock.ms = start + 60_000
    assert flow.rows("build.counts") == {}
    assert flow.views().view("build.counts").get("k") is None
    assert flow.sql("select * from counts").height == 0
    assert flow.send("asked", ['"?"']).sinks["answers"].values == ["1", "0"]
    clock.ms = start + 61_000
    assert flow.send("words", ['"k"']).rows("build.counts") == {"k": {"hits": 1}}
    flow.restart()
    clock.ms = start + 61_500
    assert flow.send("words", ['"k"']).rows("build.counts") == {"k": {"hits": 2}}


WINDOWED = """
  build:
    sources: [{{type: topic, id: events}}]
    states:
      counts:
        type: keyed-state
        properties: {{key: {{type: string}}, value: {value}}}
    window:
      {kind}
      watermark: {{{watermark}}}
      assign-timestamp:
        run: |
          def event_time(event, given):
              return {time}
      partition:
        assign-key:
          run: |
            def event_key(event):
                return event["k"]
        update-state:
          run: |
            def count({argument}):
                {body}
{flush}    sinks: [{{type: topic, id: closed}}]
"""
FLUSH = """      flush:
        run: |
          def flushed():
              {flush}
"""
EVENT = "event: {type: object, properties: {k: {type: string}, t: {type: i64}}}"


def windowed(
    *,
    kind: str = "tumbling: {duration: 10s}",
    watermark: str = "",
    value: str = "{type: u32}",
    argument: str = "event",
    body: str = "counts().increment(1)",
    flush: str = "return [list(pair) for pair in counts()]",
    time: str = "event['t']",
    more: str = "",
    **options: Any,
) -> Flow:
    """A service that counts events in windows; `flush` "": it has none."""
    services = WINDOWED.format(
        kind=kind,
        watermark=watermark,
        value=value,
        argument=argument,
        body=body,
        time=time,
        flush=FLUSH.format(flush=flush) if flush else "",
    )
    text = definition(services + more, topics={"events": "event", "closed": ""})
    text = text.replace("services:\n", f"types:\n  {EVENT}\nservices:\n", 1)
    return Flow(text, **options)


def event(seconds: float, key: str = "k") -> dict[str, Any]:
    return {"k": key, "t": int(seconds * SECOND)}


@pytest.mark.parametrize("parallelism", [1, 3])
@pytest.mark.parametrize("per_epoch", [1, 2, 100])
def test_a13_late_records_are_dropped_when_grace_is_over(parallelism: int, per_epoch: int) -> None:
    flow = windowed(watermark="grace-period: 3s", parallelism=parallelism)
    flow.topics["events"].per_epoch = per_epoch
    flow.send("events", [event(one) for one in (1, 9, 12, 9.5)])
    assert flow.sinks["closed"].values == []
    flow.send("events", [event(13), event(9.7)])
    assert flow.sinks["closed"].values == [[["k", 3]]]
    assert flow.metrics("build")["window"].dropped_late == 1


def test_a14_a_record_falls_into_every_sliding_window_over_it() -> None:
    flow = windowed(
        kind="sliding: {duration: 60s, slide: 10s}",
        value=row_of(at="i64"),
        body="row = counts(); row.at = window()[0]; row.update()",
        flush="return [row['at'] // 1000 for row in counts()]",
    )
    flow.send("events", [event(65), event(1000)])
    assert flow.sinks["closed"].values == [[10], [20], [30], [40], [50], [60]]


def test_a15_an_idle_service_flushes_its_open_windows() -> None:
    clock = Clock()
    flow = windowed(watermark="idleness: 12s", clock=clock)
    flow.send("events", [event(1), event(14)])
    assert flow.sinks["closed"].values == [[["k", 1]]]
    clock.ms += 11_999
    assert flow.step() == 0
    clock.ms += 1
    assert flow.step() == 1
    assert flow.sinks["closed"].values == [[["k", 1]], [["k", 1]]]
    assert flow.step() == 0


@pytest.mark.parametrize("parallelism", [1, 3])
def test_a16_flush_sees_every_key_of_a_window_once(parallelism: int) -> None:
    flow = windowed(parallelism=parallelism)
    flow.send("events", [event(1, "a"), event(2, "b"), event(3, "a"), event(10, "c")])
    assert flow.sinks["closed"].values == [[["a", 2], ["b", 1]]]


@pytest.mark.parametrize("value", ["{type: u32}", row_of(n="u32")])
def test_a17_readers_of_a_windowed_state_see_the_window_that_closed_last(value: str) -> None:
    is_row = "arrow" in value
    body = "row = counts(); row.n += 1; row.update()" if is_row else "counts().increment(1)"
    show = "{row['_key']: row['n'] for row in counts()}" if is_row else "dict(counts())"
    look_up = f"import json\nreturn json.dumps({show})"
    flow = windowed(value=value, body=body, flush="return 'closed'", more=reader(look_up))

    def seen() -> Any:
        import json

        return json.loads(flow.send("asked", ['"?"']).sinks["answers"].values[-1])

    flow.send("events", [event(1, "a")])
    assert seen() == {}
    flow.send("events", [event(11, "b")])
    assert seen() == {"a": 1}
    flow.restart()
    assert seen() == {"a": 1}
    flow.send("events", [event(21, "c"), event(22, "d"), event(31, "e")])
    assert seen() == {"c": 1, "d": 1}


def test_a19_a_full_outer_join_of_two_tables() -> None:
    bump = "row = {0}()\nrow.n += 1\nrow.update()"
    look_up = (
        "rows = sql('select coalesce(l._key, r._key) as k, coalesce(l.n, 0) + coalesce(r.n, 0) "
        "as total from lefts l full outer join rights r on l._key = r._key "
        "order by k').rows()\n"
        "found = []\nwhile rows.next():\n"
        "    found.append(f\"{rows.str('k')}={rows.i32('total')}\")\n"
        "return ' '.join(found)"
    )
    services = (
        builder(bump.format("lefts"), state="lefts", name="left", value=row_of(n="i32"))
        + builder(
            bump.format("rights"),
            state="rights",
            name="right",
            topic="others",
            value=row_of(n="i32"),
        )
        + reader(look_up, states="{lefts: {from: left.lefts}, rights: {from: right.rights}}")
    )
    flow = Flow(definition(services, topics={"others": "string"}, converter="raw"))
    flow.send("words", ["a", "b", "b"])
    flow.send("others", ["b", "c"])
    assert flow.send("asked", ["?"]).sinks["answers"].values == ["a=1 b=3 c=1"]
