"""Random dataflows of counters, last values, windows and joins against a plain interpreter.

The interpreter below knows nothing of epochs, subtasks or tables: it goes through the records once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from arroyo_dagster.state import CompactionPolicy, CompactionSettings, run_compaction
from tests.dataflows import Flow, definition, reader, row_of

Event = dict[str, Any]
EVENT = "event: {type: object, properties: {k: {type: string}, n: {type: i32}, t: {type: i64}}}"
FULL = CompactionSettings(policy=CompactionPolicy.FULL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """A windowed service: tumbling where the slide is the duration; times in milliseconds."""

    duration: int
    slide: int
    offset: int
    grace: int
    rows: bool

    def of(self, time: int) -> list[tuple[int, int]]:
        starts = range(time - self.duration + 1, time + 1)
        return [
            (start, start + self.duration)
            for start in starts
            if (start - self.offset) % self.slide == 0
        ]


def events() -> st.SearchStrategy[list[Event]]:
    one = st.fixed_dictionaries(
        {"k": st.sampled_from("abc"), "n": st.integers(-5, 5), "t": st.integers(0, 60)}
    )
    return st.lists(one, max_size=24)


def window_shapes() -> st.SearchStrategy[Windows]:
    def made(slide: int, many: int, offset: int, grace: int, rows: bool) -> Windows:
        return Windows(duration=slide * many, slide=slide, offset=offset, grace=grace, rows=rows)

    return st.builds(
        made,
        st.integers(3, 12),
        st.integers(1, 3),
        st.integers(0, 5),
        st.integers(0, 8),
        st.booleans(),
    )


# ---- the plain interpreter -----------------------------------------------------------------------


def counted(records: Sequence[Event]) -> dict[str, int]:
    found: dict[str, int] = {}
    for one in records:
        if one["n"] != 0:  # the function raises for those
            found[one["k"]] = found.get(one["k"], 0) + abs(one["n"])
    return found


def lasts(records: Sequence[Event]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for one in records:
        if one["n"] == -5:
            found.pop(one["k"], None)
            continue
        row = found.setdefault(one["k"], {"last": 0, "seen": 0})
        row["last"], row["seen"] = one["n"], row["seen"] + 1
    return found


def flushed(records: Sequence[Event], shape: Windows) -> tuple[list[Any], int]:
    """What each closed window held, in the order they close, and how many records were late."""
    watermark: int | None = None
    opened: dict[tuple[int, int], dict[str, int]] = {}
    closed: list[Any] = []
    late = 0
    for one in records:
        taken = [
            window
            for window in shape.of(one["t"])
            if watermark is None or window[1] + shape.grace > watermark
        ]
        late += not taken
        for window in taken:
            held = opened.setdefault(window, {})
            held[one["k"]] = held.get(one["k"], 0) + one["n"]
        watermark = one["t"] if watermark is None else max(watermark, one["t"])
        due = [window for window in opened if watermark >= window[1] + shape.grace]
        for window in sorted(due, key=lambda pair: (pair[1], pair[0])):
            closed.append([window[0], *([key, n] for key, n in sorted(opened.pop(window).items()))])
    return closed, late


def joined(records: Sequence[Event]) -> str:
    counts, rows = counted(records), lasts(records)
    keys = sorted({key for key in counts if key in rows})
    return " ".join(f"{key}={rows[key]['last']}/{rows[key]['seen']}" for key in keys)


# ---- the same as a dataflow ----------------------------------------------------------------------


COUNTS = """
  count:
    sources: [{type: topic, id: events}]
    states:
      totals: {type: keyed-state, properties: {key: {type: string}, value: {type: i64}}}
      kept: {type: keyed-state, properties: {key: {type: string}, value: KEPT}}
    partition:
      assign-key:
        run: |
          def count_key(event):
              return event.k
      update-state:
        run: |
          def count_update(event):
              totals().increment(abs(event.n))
              row = kept()
              row.n += 1
              row.update()
              if event.n == 0:
                  raise ValueError("nothing to count")
  last:
    sources: [{type: topic, id: events}]
    states:
      lasts: {type: keyed-state, properties: {key: {type: string}, value: LASTS}}
    partition:
      assign-key:
        run: |
          def last_key(event):
              return event.k
      update-state:
        run: |
          def last_update(event):
              row = lasts()
              if event.n == -5:
                  row.delete()
                  return
              row.last = event.n
              row.seen += 1
              row.update()
"""


def dataflow(shape: Windows) -> str:
    add = (
        "row = sums(); row.n += event.n; row.update()"
        if shape.rows
        else "sums().increment(event.n)"
    )
    show = "[row['_key'], row['n']] for row in sums()" if shape.rows else "list(p) for p in sums()"
    windows = f"""
  windows:
    sources: [{{type: topic, id: events}}]
    states:
      sums:
        type: keyed-state
        properties:
          key: {{type: string}}
          value: {row_of(n="i32") if shape.rows else "{type: i32}"}
    window:
      sliding: {{duration: {shape.duration}ms, slide: {shape.slide}ms, offset: {shape.offset}ms}}
      watermark: {{grace-period: {shape.grace}ms}}
      assign-timestamp:
        run: |
          def windows_time(event, given):
              return event.t
      partition:
        assign-key:
          run: |
            def windows_key(event):
                return event.k
        update-state:
          run: |
            def windows_update(event):
                {add}
      flush:
        run: |
          def windows_flush():
              return [window()[0], *({show})]
    sinks: [{{type: topic, id: closed}}]
"""
    look_up = (
        "rows = sql('select l._key, l.last, l.seen from kept k join lasts l on k._key = l._key "
        "order by l._key').rows()\n"
        "found = []\n"
        "while rows.next():\n"
        "    found.append(f\"{rows.str('_key')}={rows.i32('last')}/{rows.u32('seen')}\")\n"
        "return ' '.join(found)"
    )
    both = "{kept: {from: count.kept}, lasts: {from: last.lasts}}"
    states = COUNTS.replace("KEPT", row_of(n="u32"))
    states = states.replace("LASTS", row_of(last="i32", seen="u32"))
    text = definition(
        states + windows + reader(look_up, states=both), topics={"events": "event", "closed": ""}
    )
    return text.replace("services:\n", f"types:\n  {EVENT}\nservices:\n", 1)


CASES = given(
    records=events(),
    shape=window_shapes(),
    per_epoch=st.integers(1, 9),
    splits=st.integers(1, 3),
    parallelism=st.integers(1, 3),
    upsets=st.lists(st.sampled_from(["", "", "restart", "compact"]), min_size=24, max_size=24),
)
# To shrink one takes minutes: every example is a few runs.
QUICK = [Phase.explicit, Phase.reuse, Phase.generate]


def check(
    records: list[Event],
    shape: Windows,
    per_epoch: int,
    splits: int,
    parallelism: int,
    upsets: list[str],
) -> None:
    flow = Flow(dataflow(shape), parallelism=parallelism)
    topic = flow.topics["events"]
    topic.per_epoch, topic.splits = per_epoch, splits
    topic.send(*records)
    for upset in upsets:
        if not flow.step():
            break
        if upset == "compact":
            run_compaction(flow.store, flow.pipelines[0].paths, FULL)
        if upset:
            flow.restart()
    flow.run()

    assert flow.cells("count.totals") == counted(records)
    assert {key: row["n"] for key, row in flow.rows("count.kept").items()} == {
        key: sum(one["k"] == key and one["n"] != 0 for one in records) for key in counted(records)
    }
    assert flow.rows("last.lasts") == lasts(records)
    closed, late = flushed(records, shape)
    assert flow.sinks["closed"].values == closed
    metrics = flow.metrics("windows")
    assert ("window" in metrics and metrics["window"].dropped_late) == late or not records
    failed = flow.metrics("count")["count_update"].failed if records else 0
    assert failed == sum(one["n"] == 0 for one in records)
    answer = flow.send("asked", ['"?"']).sinks["answers"].values[-1]
    assert answer == joined(records)


@settings(max_examples=6, deadline=None, phases=QUICK)
@CASES
def test_a_dataflow_ends_as_a_plain_loop_over_its_records_would(**case: Any) -> None:
    check(**case)


@pytest.mark.soak
@settings(max_examples=150, deadline=None, phases=QUICK)
@CASES
def test_many_dataflows_end_as_plain_loops_would(**case: Any) -> None:
    check(**case)
