"""The tables of SDF services are tables like any other: read, verified, merged, collected, lost
never."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from typing import Any

import pytest

from arroyo_dagster.state import (
    CompactionPolicy,
    CompactionSettings,
    MemoryStore,
    ObjectStore,
    ParquetBackend,
    read_rows,
    run_compaction,
    run_gc,
    verify_job,
)
from tests.dataflows import Flow, definition, row_of
from tests.faulty_stores import Crash, FaultInjecting
from tests.gc_jobs import expiry
from tests.journeys.test_sdf_acceptance import event, windowed

FULL = CompactionSettings(policy=CompactionPolicy.FULL)
BOTH = """
  build:
    sources: [{type: topic, id: words}]
    states:
      cells:
        type: keyed-state
        properties: {key: {type: string}, value: {type: u32}}
      rows:
        type: keyed-state
        properties:
          key: {type: string}
          value: {type: arrow-row, properties: {n: {type: u32}, last: {type: string}}}
    partition:
      assign-key:
        run: |
          def first_letter(record):
              return record[0]
      update-state:
        run: |
          def add(record):
              cells().increment(1)
              row = rows()
              if record.endswith("!"):
                  row.delete()
                  return
              row.n += 1
              row.last = record
              row.update()
"""


def letters(count: int, seed: int) -> list[str]:
    chance = random.Random(seed)
    return [
        chance.choice("abcdefgh") + str(at) + ("!" if chance.random() < 0.15 else "")
        for at in range(count)
    ]


def expected(words: list[str]) -> tuple[dict[str, int], dict[str, dict[str, Any]]]:
    rows: dict[str, dict[str, Any]] = {}
    for word in words:
        if word.endswith("!"):
            rows.pop(word[0], None)
        else:
            row = rows.setdefault(word[0], {"n": 0, "last": ""})
            row["n"], row["last"] = row["n"] + 1, word
    return dict(Counter(word[0] for word in words)), rows


def flow_of(words: list[str], **options: Any) -> Flow:
    flow = Flow(definition(BOTH, converter="raw"), **options)
    flow.topics["words"].send(*words)
    return flow


@pytest.mark.parametrize("parallelism", [1, 2])
def test_maintenance_changes_nothing_that_readers_or_builders_see(parallelism: int) -> None:
    words = letters(80, 1)
    flow = flow_of(words, parallelism=parallelism)
    flow.topics["words"].per_epoch = 10
    paths = flow.pipelines[0].paths
    for turn in range(8):
        flow.step()
        if turn % 3 == 1:
            flow.restart()
        if turn % 4 == 2:
            run_compaction(flow.store, paths, FULL)
            flow.restart()
        if turn % 5 == 4:
            run_gc(flow.store, paths, expiry(2))
        cells, rows = expected(words[: 10 * (turn + 1)])
        assert (flow.cells("build.cells"), flow.rows("build.rows")) == (cells, rows)
        verdict = verify_job(flow.store, paths)
        assert verdict.passed, verdict
    found = read_rows(flow.store, paths, "states", "rows")
    assert {row["_key"]: row["n"] for row in found.rows} == {
        key: row["n"] for key, row in expected(words)[1].items()
    }


def test_a_builder_takes_over_what_was_merged_while_it_runs() -> None:
    words = letters(80, 2)
    flow = flow_of(words)
    flow.topics["words"].per_epoch = 10
    for _ in range(5):
        flow.step()
    run_compaction(flow.store, flow.pipelines[0].paths, FULL)
    flow.run()
    assert (flow.cells("build.cells"), flow.rows("build.rows")) == expected(words)
    assert verify_job(flow.store, flow.pipelines[0].paths).passed


def test_windowed_tables_drop_what_is_closed_and_stay_restorable() -> None:
    flow = windowed(
        value=row_of(n="u32"),
        body="row = counts(); row.n += 1; row.update()",
        flush="return [[row['_key'], row['n']] for row in counts()]",
        parallelism=2,
    )
    paths = flow.pipelines[0].paths
    for second in range(0, 60, 5):
        flow.send("events", [event(second, "a"), event(second + 1, "b")])
        assert verify_job(flow.store, paths).passed
        if second % 20 == 0:
            run_compaction(flow.store, paths, FULL)
            flow.restart()
    values = flow.sinks["closed"].values
    assert values == [[["a", 2], ["b", 2]]] * 5
    newest = ParquetBackend(flow.store, paths).load()
    operator = newest.operator("states")
    assert operator is not None
    assert len(operator.tables["counts"].files) <= 6  # of twelve epochs: closed windows expire
    live = flow.views().view("build.counts", live=True)
    assert live.windows() == [(50_000, 60_000)]


@pytest.mark.parametrize("mode", ["before", "after"])
def test_a_crash_at_any_change_of_the_store_costs_nothing(mode: Any) -> None:
    """The k-th change fails, or is done and then fails; a new run goes on exactly once."""
    words = letters(24, 3)

    def flow_on(store: ObjectStore) -> Flow:
        flow = flow_of(words, store=store)
        flow.topics["words"].per_epoch = 8
        return flow

    counted = FaultInjecting(MemoryStore())
    flow_on(counted).run()
    for at in range(1, counted.changes + 1, 4 if mode == "after" else 5):
        inner = MemoryStore()
        faulty = FaultInjecting(inner, fail_at=at, mode=mode, crash=True)
        with contextlib.suppress(Crash):
            flow_on(faulty).run()
        assert faulty.crashed
        again = flow_on(inner).run()
        assert (again.cells("build.cells"), again.rows("build.rows")) == expected(words), at


def test_a_crash_amid_windows_flushes_each_window_once() -> None:
    events = [event(second, "ab"[second % 2]) for second in range(0, 28, 2)]

    def flow_on(store: ObjectStore, sinks: Flow | None = None) -> Flow:
        flow = windowed(store=store)
        if sinks is not None:
            flow.sinks["closed"].name = sinks.sinks["closed"].name
        flow.topics["events"].per_epoch = 5
        flow.topics["events"].send(*events)
        return flow

    counted = FaultInjecting(MemoryStore())
    undisturbed = flow_on(counted).run().sinks["closed"].values
    assert len(undisturbed) == 2
    for at in range(1, counted.changes + 1, 7):
        inner = MemoryStore()
        first = flow_on(FaultInjecting(inner, fail_at=at, mode="after", crash=True))
        with contextlib.suppress(Crash):
            first.run()
        again = flow_on(inner, first).run()
        assert again.sinks["closed"].values == undisturbed, at
