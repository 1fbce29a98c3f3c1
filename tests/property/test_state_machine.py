"""A job against a plain model, through whatever may happen to a job.

Every row of the source is a command to the operator, so what any offset means is known: the model
replays the commands up to it. Between commands the job checkpoints, crashes at any change of the
store, restarts with another parallelism, goes on in another process that is behind, merges files
and lets epochs expire. Somebody else compacts and expires it, and crashes at any change too.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from arroyo_dagster.engine import Collector, Operator, OperatorContext, Pipeline
from arroyo_dagster.engine.task import LevelTask
from arroyo_dagster.state import (
    CompactionOptions,
    CompactionPolicy,
    CompactionSettings,
    GcOptions,
    JobPaths,
    MemoryStore,
    ObjectStore,
    TableConfig,
    global_table_config,
    run_compaction,
    run_gc,
    timestamp_table_config,
)
from tests.faulty_stores import Crash, FaultInjecting
from tests.gc_jobs import expiry
from tests.internals import LocalRun
from tests.jobs import SinkInto, output_of, state_of
from tests.keyed_jobs import Command, Script
from tests.shares import fewer_examples

KEPT = pa.schema(
    [
        pa.field("key", pa.string()),
        pa.field("number", pa.int64()),
        pa.field("_timestamp", pa.timestamp("ns"), nullable=False),
    ]
)
RETENTION_MICROS = 20
VERBS = ["set", "remove", "again", "keep", "keep", "keep", "forget", "forget some", "look"]
Fault = tuple[int, Any]
FAULTS: st.SearchStrategy[Fault] = st.tuples(
    st.one_of(st.just(999), st.integers(1, 20)), st.sampled_from(["before", "after", "partial"])
)
COMMAND_LISTS = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from(VERBS), st.integers(0, 4)),
    min_size=1,
    max_size=6,
)


class Obey(Operator):
    """Does what its rows say, and puts out what it sees in its tables."""

    output_schema = pa.schema([("number", pa.int64()), ("seen", pa.int64())])

    def tables(self) -> Sequence[TableConfig]:
        return [
            global_table_config("values", key=str, value=int),
            timestamp_table_config(
                "rows", retention_micros=RETENTION_MICROS, schema=KEPT, keys=["key"]
            ),
        ]

    def on_start(self, ctx: OperatorContext) -> None:
        self.values = ctx.table_manager.get_global_keyed_state("values", str, int)
        self.rows = ctx.table_manager.get_expiring_time_key_table("rows")

    def process_batch(
        self, batch: pa.RecordBatch, ctx: OperatorContext, collector: Collector
    ) -> None:
        times = batch["_timestamp"].cast(pa.int64()).to_pylist()
        seen = [
            self._obey(number, key, verb, nanos // 1000)
            for number, key, verb, nanos in zip(
                *(batch[name].to_pylist() for name in ("number", "key", "verb")), times, strict=True
            )
        ]
        collector.collect(pa.record_batch([batch["number"], seen], schema=self.output_schema))

    def _obey(self, number: int, key: str, verb: str, micros: int) -> int:
        if verb == "set":
            self.values.insert(key, number)
        elif verb == "remove":
            self.values.remove(key)
        elif verb == "again":
            self.values.remove(key)
            self.values.insert(key, number)
        elif verb == "keep":
            self.rows.insert(pa.table([[key], [number], [micros * 1000]], schema=KEPT))
        elif verb == "forget":
            self.rows.delete_key(key)
        elif verb == "forget some":
            self.rows.delete_time_range(micros - 5, micros, key)
        here = self.rows.rows().column("key").to_pylist().count(key)
        return 1000 * here + (self.values.get(key) or 0)


class Model:
    """What `Obey` does, with a dict and a list."""

    def __init__(self) -> None:
        self.values: dict[str, int] = {}
        self.rows: list[tuple[str, int, int]] = []
        self.seen: Counter[Any] = Counter()

    def obey(self, number: int, command: Command) -> None:
        key, verb, micros = command
        if verb in ("set", "again"):
            self.values[key] = number
        elif verb == "remove":
            self.values.pop(key, None)
        elif verb == "keep":
            self.rows.append((key, number, micros))
        elif verb == "forget":
            self.rows = [row for row in self.rows if row[0] != key]
        elif verb == "forget some":
            self.rows = [
                row for row in self.rows if row[0] != key or not micros - 5 <= row[2] < micros
            ]
        here = sum(row[0] == key for row in self.rows)
        seen = 1000 * here + self.values.get(key, 0)
        self.seen[(("number", number), ("seen", seen))] += 1

    def barrier(self, watermark: int) -> None:
        self.rows = [row for row in self.rows if row[2] >= watermark - RETENTION_MICROS]


class Job(RuleBasedStateMachine):
    """The job, its store, and where the model stands."""

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore()
        self.commands: list[Command] = []
        self.boundaries: list[int] = []
        self.run: LocalRun | None = None
        self.others: list[list[LevelTask]] = []

    def pipeline(self, store: ObjectStore) -> Pipeline:
        pipeline = Pipeline(
            "machine", parallelism=self.parallelism, keep_epochs=2, merge_files_after=2
        )
        stream = pipeline.source("script", Script(self.commands, splits=2), timestamp="at")
        stream.key_by("key").apply("obey", Obey()).sink("out", SinkInto(store))
        return pipeline

    def start(self, store: ObjectStore) -> None:
        pipeline = self.pipeline(store)
        self.run = LocalRun.start(pipeline, store)
        self.others = [
            [LevelTask(pipeline, level, index, store) for index in range(self.parallelism)]
            for level in range(1, pipeline.levels + 1)
        ]
        self.look()  # a start may have claimed an epoch that waited for it

    # ---- what may happen ------------------------------------------------------------------------

    @initialize(parallelism=st.integers(1, 3))
    def begin(self, parallelism: int) -> None:
        self.parallelism = parallelism

    @rule(epochs=st.lists(st.tuples(COMMAND_LISTS, st.integers(0, 15)), min_size=1, max_size=4))
    def go_on(self, epochs: list[tuple[list[Command], int]]) -> None:
        for commands, later in epochs:
            self.command(commands, later)
            self.checkpoint(idle=False)

    @rule(commands=COMMAND_LISTS, later=st.integers(0, 15))
    def command(self, commands: list[Command], later: int) -> None:
        now = max((micros for _, _, micros in self.commands), default=10) + later
        self.commands.extend((key, verb, now - early) for key, verb, early in commands)

    @rule(idle=st.booleans())
    def checkpoint(self, idle: bool) -> None:
        if self.run is None:
            self.start(self.store)
        self.step(even_if_idle=idle)

    def step(self, *, even_if_idle: bool) -> None:
        assert self.run is not None
        try:
            self.run.step(even_if_idle=even_if_idle)
        except Crash:
            self.run = None
        self.look()

    @precondition(lambda self: self.run is not None)
    @rule(commands=COMMAND_LISTS)
    def go_on_in_another_process(self, commands: list[Command]) -> None:
        assert self.run is not None
        self.run._tasks, self.others = self.others, self.run._tasks
        self.command(commands, 1)
        self.step(even_if_idle=False)

    @precondition(lambda self: self.run is not None)
    @rule(commands=COMMAND_LISTS)
    def lose_an_attempt(self, commands: list[Command]) -> None:
        """Two processes write the same epoch, as Spark has them do; one's reports are lost."""
        assert self.run is not None
        self.command(commands, 1)
        run, ends = self.run, {"script": {"row": len(self.commands)}}
        run._tasks, self.others = self.others, run._tasks
        try:
            run.process(run.job.plan(False), run.splits(ends))
        except Crash:
            self.run = None
            return
        finally:
            run._tasks, self.others = self.others, run._tasks
        self.step(even_if_idle=False)

    @rule(
        at=st.integers(1, 60),
        mode=st.sampled_from(["before", "after", "partial"]),
        epochs=st.integers(1, 2),
    )
    def crash(self, at: int, mode: Any, epochs: int) -> None:
        faulty = FaultInjecting(self.store, fail_at=at, mode=mode, crash=True)
        self.run = None
        try:
            self.start(faulty)
        except Crash:
            self.run = None
            self.look()
        for _ in range(epochs):
            if self.run is not None:
                self.step(even_if_idle=True)

    @precondition(lambda self: self.run is not None)
    @rule()
    def stop(self) -> None:
        """End the run with a last checkpoint: the job is at rest."""
        assert self.run is not None
        with contextlib.suppress(Crash):
            self.run.step(then_stop=True, even_if_idle=True)
        self.run = None
        self.look()

    @precondition(lambda self: bool(self.boundaries))
    @rule(policy=st.sampled_from(CompactionPolicy), fault=FAULTS)
    def compact(self, policy: CompactionPolicy, fault: Fault) -> None:
        """Maintenance, beside a run or alone; a run takes over what it leaves."""
        chosen, options = (
            CompactionSettings(policy=policy, min_files=2),
            CompactionOptions(owner="m"),
        )
        self.maintain(fault, lambda store, paths: run_compaction(store, paths, chosen, options))

    @precondition(lambda self: bool(self.boundaries))
    @rule(keep=st.integers(2, 3), fault=FAULTS)
    def expire(self, keep: int, fault: Fault) -> None:
        self.maintain(
            fault, lambda store, paths: run_gc(store, paths, expiry(keep), GcOptions(owner="m"))
        )

    def maintain(self, fault: Fault, work: Callable[[ObjectStore, JobPaths], object]) -> None:
        at, mode = fault
        faulty = FaultInjecting(self.store, fail_at=at, mode=mode, crash=True)
        with contextlib.suppress(Crash):
            work(faulty, self.pipeline(self.store).paths)
        self.look()

    @rule(parallelism=st.integers(1, 3))
    def restart(self, parallelism: int) -> None:
        self.run = None
        self.parallelism = parallelism

    # ---- what must hold -------------------------------------------------------------------------

    def look(self) -> None:
        """See whether one more epoch has come to exist, and where it ends."""
        pipeline = self.pipeline(self.store)
        found = [info.path for info in self.store.list_dir(pipeline.paths.epochs).objects]
        newest = int(found[-1][-14:-7]) if found else 0
        if newest > len(self.boundaries):
            assert newest == len(self.boundaries) + 1
            state = state_of(self.store, pipeline)
            self.boundaries.append(int(state["script"]["offsets"].get("row", 0)))

    @invariant()
    def state_and_output_are_those_of_the_model(self) -> None:
        if not self.boundaries:
            return
        model, first, watermark = Model(), 0, 0
        for last in self.boundaries:
            for number in range(first, last):
                model.obey(number, self.commands[number])
                watermark = max(watermark, self.commands[number][2])
            model.barrier(watermark)
            first = last
        state = state_of(self.store, self.pipeline(self.store))
        assert state[""]["epoch"] == len(self.boundaries)
        assert state["obey"].get("values", {}) == model.values
        rows = Counter((key, number, micros * 1000) for key, number, micros in model.rows)
        assert state["obey"].get("rows", Counter()) == rows
        self.output_is(model)

    def output_is(self, model: Model) -> None:
        # An epoch that was published and not yet committed shows its output at the next start.
        found = output_of(self.store)
        assert found <= model.seen
        if self.run is not None:
            assert found == model.seen

    def teardown(self) -> None:
        if hasattr(self, "parallelism"):
            self.run = None
            self.start(self.store)
            self.checkpoint(True)
            self.state_and_output_are_those_of_the_model()


TestJob = Job.TestCase
TestJob.settings = settings(fewer_examples(2), stateful_step_count=10)
