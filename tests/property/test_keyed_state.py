"""Keyed state and timers against dicts, through whatever may happen to a job.

The machine of `test_state_machine` runs the job of `tests.keyed_jobs`: epochs, crashes at any
change of the store, restarts at another parallelism, lost attempts, other processes, compactions
and expiry. The engine's clock is the test's.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from arroyo_dagster.engine import Pipeline
from arroyo_dagster.state import GcOptions, ObjectStore, ParquetBackend, TableName, run_gc
from tests.gc_jobs import expiry
from tests.internals import restored_rows
from tests.jobs import SinkInto, output_of, state_of
from tests.keyed_jobs import OPERATIONS, KeepByKey, KeyedModel, keyed_content
from tests.property.test_state_machine import FAULTS, Fault, Script
from tests.property.test_state_machine import Job as Machine
from tests.shares import fewer_examples

VERBS = st.sampled_from(OPERATIONS)
LISTS = st.lists(
    st.tuples(st.sampled_from("abc"), VERBS, st.integers(0, 4)), min_size=1, max_size=8
)


class KeyedJob(Machine):
    """The job, its store, and where the model stands: rows taken and clock, by epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.clocks: list[int] = []
        self.now = 1000

    def pipeline(self, store: ObjectStore) -> Pipeline:
        pipeline = Pipeline(
            "machine", parallelism=self.parallelism, keep_epochs=2, merge_files_after=2
        )
        stream = pipeline.source("script", Script(self.commands), timestamp="at")
        stream.key_by("key").apply("keep", KeepByKey()).sink("out", SinkInto(store))
        return pipeline

    def start(self, store: ObjectStore) -> None:
        super().start(store)
        assert self.run is not None
        self.run.job.backend.clock = lambda: self.now

    @initialize(parallelism=st.integers(1, 3))
    def begin(self, parallelism: int) -> None:
        self.parallelism = parallelism

    @rule(epochs=st.lists(st.tuples(LISTS, st.integers(0, 15)), min_size=1, max_size=4))
    def keep(self, epochs: list[tuple[list[tuple[str, str, int]], int]]) -> None:
        for commands, later in epochs:
            self.command(commands, later)
            self.checkpoint(idle=False)

    @rule(later=st.integers(-5, 40))
    def time_goes_by(self, later: int) -> None:
        self.now += later

    @precondition(lambda self: bool(self.boundaries))
    @rule(fault=FAULTS)
    def expire(self, fault: Fault) -> None:
        """As few epochs as the run keeps: gc refuses more where a run's own expiry was killed."""
        self.maintain(
            fault, lambda store, paths: run_gc(store, paths, expiry(2), GcOptions(owner="m"))
        )

    def look(self) -> None:
        before = len(self.boundaries)
        super().look()
        if len(self.boundaries) > before:
            state = state_of(self.store, self.pipeline(self.store))
            self.clocks.append(state["keep"]["clock"]["clock"])

    def model(self) -> KeyedModel:
        model, first, watermark = KeyedModel(), 0, None
        for last, clock in zip(self.boundaries, self.clocks, strict=True):
            model.begin(clock)
            for number in range(first, last):
                model.obey(number, self.commands[number])
                watermark = max(watermark or 0, self.commands[number][2])
            model.fire(watermark)
            first = last
        return model

    @invariant()
    def state_and_output_are_those_of_the_model(self) -> None:
        if not self.boundaries:
            return
        model, pipeline = self.model(), self.pipeline(self.store)
        expected = model.content()
        for parallelism in {self.parallelism, 1 + len(self.boundaries) % 3}:
            assert keyed_content(self.store, pipeline, parallelism) == expected
        self.rows_are(expected)
        found = output_of(self.store)
        # An epoch that was published and not yet committed shows its output at the next start.
        assert found <= model.output
        if self.run is not None:
            assert found == model.output

    def rows_are(self, expected: dict[str, dict[str, int]]) -> None:
        """What `arroyo-state rows` prints of the table."""
        operator = (
            ParquetBackend(self.store, self.pipeline(self.store).paths).load().operator("keep")
        )
        assert operator is not None
        if TableName("values") not in operator.tables:
            assert not expected["values"]
            return
        rows = restored_rows(self.store, operator, TableName("values"), managed=True).rows
        assert (
            dict(zip(*rows.select([0, 1]).to_pydict().values(), strict=True))
            == (expected["values"])
        )


TestKeyedJob = KeyedJob.TestCase
TestKeyedJob.settings = settings(fewer_examples(2), stateful_step_count=10)


def test_the_clock_of_rows_by_key_does_not_go_back_with_that_of_the_machine() -> None:
    job = KeyedJob()
    job.begin(parallelism=1)
    job.go_on(epochs=[([("c", "again", 2), ("a", "set", 0)], 0)])
    job.stop()
    job.time_goes_by(later=-5)
    job.keep(epochs=[([("a", "put", 4)], 1), ([("c", "entry", 2)], 1)])
    job.state_and_output_are_those_of_the_model()
    assert job.clocks == sorted(job.clocks)
