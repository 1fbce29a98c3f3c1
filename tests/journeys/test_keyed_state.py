"""State by key and its timers, whatever goes wrong: a fault at every change of the store, restarts
at another parallelism, compaction between, in both layouts. Timers fire exactly once.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import random
from collections import Counter
from typing import Any, Literal

import pyarrow as pa
import pytest

from arroyo_dagster.engine import (
    Collector,
    Operator,
    OperatorContext,
    Pipeline,
    TableSource,
    keyed_state,
    keyed_timers,
    run_pipeline,
    task,
)
from arroyo_dagster.errors import InputError, StorageError
from arroyo_dagster.state import (
    CompactionPolicy,
    CompactionSettings,
    GcOptions,
    Layout,
    MemoryStore,
    ObjectStore,
    ParquetBackend,
    run_compaction,
    run_gc,
    verify_job,
)
from tests.faulty_stores import Crash, FaultInjecting
from tests.gc_jobs import expiry
from tests.internals import LocalRun
from tests.jobs import SinkInto, output_of
from tests.keyed_jobs import COMMANDS, OPERATIONS, KeepByKey, KeyedModel, keyed_content
from tests.shares import Share, everywhere

pytestmark = pytest.mark.usefixtures("one_at_a_time", "restarts_at_once")

ROWS, ROWS_PER_EPOCH = 48, 12
TIMELESS = [verb for verb in OPERATIONS if verb != "alarm"]
"""What does not depend on the clock of the machine, so that every run ends alike."""
_CHANCE = random.Random(5)
SCRIPT = [
    (_CHANCE.choice("abc"), _CHANCE.choice(TIMELESS), 10 + number // 2) for number in range(ROWS)
]


def keyed_job(
    store: ObjectStore, *, parallelism: int = 2, layout: Layout = Layout.PROTOCOL
) -> Pipeline:
    rows = pa.table([list(range(ROWS)), *map(list, zip(*SCRIPT, strict=True))], schema=COMMANDS)
    pipeline = Pipeline("keyed", parallelism=parallelism, layout=layout)
    source = TableSource(rows, rows_per_epoch=ROWS_PER_EPOCH, splits=2)
    stream = pipeline.source("script", source, timestamp="at")
    stream.key_by("key").apply("keep", KeepByKey(ttl_micros=None)).sink("out", SinkInto(store))
    return pipeline


def expected() -> tuple[dict[str, Any], Counter[Any]]:
    model = KeyedModel()
    for first in range(0, ROWS, ROWS_PER_EPOCH):
        last = first + ROWS_PER_EPOCH
        for number in range(first, last):
            model.obey(number, SCRIPT[number])
        model.fire(SCRIPT[last - 1][2])
    return model.content(), model.output


def end_of(
    store: ObjectStore, layout: Layout = Layout.PROTOCOL
) -> tuple[dict[str, Any], Counter[Any]]:
    pipeline = keyed_job(store, layout=layout)
    contents = [keyed_content(store, pipeline, parallelism) for parallelism in (1, 2, 3)]
    assert contents[0] == contents[1] == contents[2]
    return contents[0], output_of(store)


@everywhere("layout")
def test_a_fault_at_any_change_loses_no_state_and_fires_no_timer_twice(
    layout: Layout, share: Share
) -> None:
    """The run is killed, and continues at another parallelism."""
    counted = FaultInjecting(MemoryStore())
    run_pipeline(keyed_job(counted, layout=layout), counted)
    wanted = expected()
    assert end_of(counted, layout) == wanted
    assert any(dict(row)["number"] == -1 for row in wanted[1]), "no timer has fired"
    modes: tuple[Literal["before", "after", "partial"], ...] = ("before", "after", "partial")
    for at in share(range(1, counted.changes + 1)):
        store = MemoryStore()
        faulty = FaultInjecting(store, fail_at=at, mode=modes[at % 3], crash=at % 2 == 0)
        with contextlib.suppress(Crash, StorageError):
            run_pipeline(keyed_job(faulty, layout=layout), faulty)
        run_pipeline(keyed_job(store, parallelism=1 + at % 3, layout=layout), store)
        assert end_of(store, layout) == wanted, f"fault at change {at}"


@pytest.mark.parametrize("policy", CompactionPolicy)
def test_compaction_gc_and_verify_treat_it_as_any_table(policy: CompactionPolicy) -> None:
    store = MemoryStore()
    pipeline = keyed_job(store)
    run_pipeline(pipeline, store, max_epochs=2)
    before = keyed_content(store, pipeline, 2)
    assert not verify_job(store, pipeline.paths).verdict.findings
    settings = CompactionSettings(policy=policy, min_files=2)
    outcome = run_compaction(store, pipeline.paths, settings)
    assert policy is not CompactionPolicy.FULL or outcome.changed
    assert keyed_content(store, pipeline, 2) == before
    assert keyed_content(store, pipeline, 3) == before
    run_pipeline(pipeline, store)
    assert end_of(store) == expected()
    run_gc(store, pipeline.paths, expiry(2), GcOptions(owner="m"))
    assert end_of(store) == expected()
    assert not verify_job(store, pipeline.paths).verdict.findings


def test_a_full_compaction_leaves_one_row_for_each_key_and_no_deletes() -> None:
    store = MemoryStore()
    pipeline = keyed_job(store, parallelism=1)
    run_pipeline(pipeline, store)
    wanted = keyed_content(store, pipeline, 1)
    settings = CompactionSettings(policy=CompactionPolicy.FULL, min_files=2)
    outcome = run_compaction(store, pipeline.paths, settings)
    assert sum(merge.dropped.get("delete operations, applied", 0) for merge in outcome.merges)
    operator = ParquetBackend(store, pipeline.paths).load().operator("keep")
    assert operator is not None
    rows = {
        name: sum(merge.rows_out for merge in outcome.merges if merge.merged.table == name)
        for name in ("values", "lists")
    }
    assert rows == {
        "values": len(wanted["values"]),
        "lists": sum(map(len, wanted["lists"].values())),
    }
    assert keyed_content(store, pipeline, 1) == wanted


# ---- the engine's clock --------------------------------------------------------------------------


class Reminds(Operator):
    """Answers each row a second later by the engine's clock, and forgets it after two."""

    output_schema = pa.schema([("word", pa.string()), ("known", pa.bool_())])

    def tables(self) -> Any:
        ttl = dt.timedelta(seconds=2)
        return [
            keyed_timers("later", str, processing_time=True),
            keyed_state("seen", str, int, ttl),
        ]

    def on_start(self, ctx: OperatorContext) -> None:
        self.later, self.seen = ctx.timers("later"), ctx.value_state("seen")

    def process_batch(
        self, batch: pa.RecordBatch, ctx: OperatorContext, collector: Collector
    ) -> None:
        words = batch["word"]
        self.seen.put_many(words, [1] * len(words))
        for seconds in (1, 3):
            at = (ctx.clock_micros + seconds * 1_000_000) * 1000
            self.later.register_many(words, [at] * len(words))

    def on_timers(
        self, name: str, timers: pa.RecordBatch, ctx: OperatorContext, collector: Collector
    ) -> None:
        known = self.seen.contains_many(timers["key"])
        collector.collect(pa.record_batch([timers["key"], known], schema=self.output_schema))


def test_timers_of_the_clock_fire_while_no_rows_come_and_after_a_restart() -> None:
    store = MemoryStore()
    rows = pa.table({"word": ["a", "b", "c"], "at": pa.array([0, 1, 2], pa.timestamp("us"))})
    now = [1_000_000]

    def start() -> LocalRun:
        pipeline = Pipeline("reminds", parallelism=2)
        stream = pipeline.source("words", TableSource(rows, rows_per_epoch=2), timestamp="at")
        stream.key_by("word").apply("remind", Reminds()).sink("out", SinkInto(store))
        run = LocalRun.start(pipeline, store)
        run.job.backend.clock = lambda: now[0]
        # A source that has nothing new, and has not ended.
        run.pipeline.sources["words"].source.latest_offset = lambda start: {"row": 2}  # type: ignore
        return run

    run = start()
    assert run.step() is not None
    assert run.step() is None
    now[0] += 999_999
    assert run.step() is None
    now[0] += 1
    assert run.step() is not None
    answered = Counter({(("word", word), ("known", True)): 1 for word in "ab"})
    assert output_of(store) == answered
    now[0] += 1_500_000
    run = start()  # it does not know yet whether timers are due
    assert run.step() is not None
    assert run.step() is None
    assert output_of(store) == answered
    now[0] += 10_000_000
    assert run.step() is not None
    assert run.step() is None
    forgotten = Counter({(("word", word), ("known", False)): 1 for word in "ab"})
    assert output_of(store) == answered + forgotten


class Rings(Operator):
    """Registers a timer for the same time again and again."""

    def tables(self) -> Any:
        return [keyed_timers("again", str)]

    def on_start(self, ctx: OperatorContext) -> None:
        self.again = ctx.timers("again")

    def process_batch(
        self, batch: pa.RecordBatch, ctx: OperatorContext, collector: Collector
    ) -> None:
        self.again.register_many(batch["word"], batch["_timestamp"])

    def on_timers(
        self, name: str, timers: pa.RecordBatch, ctx: OperatorContext, collector: Collector
    ) -> None:
        self.again.register_many(timers["key"], timers["at"])


def test_timers_that_never_end_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "_MAX_TIMER_CALLS", 50)
    rows = pa.table({"word": ["a"], "at": pa.array([5], pa.timestamp("us"))})
    pipeline = Pipeline("rings")
    stream = pipeline.source("words", TableSource(rows, rows_per_epoch=1), timestamp="at")
    stream.key_by("word").apply("ring", Rings())
    with pytest.raises(InputError, match="for times that have come"):
        run_pipeline(pipeline, MemoryStore())
