"""Run a pipeline on Spark: one Spark job per epoch, one task per subtask and level.

The driver asks the sources how far an epoch goes. Spark's Python workers, or of a small epoch the
driver, read the splits, and send the rows as Arrow to the tasks that own their key ranges. Each
task restores, processes and writes its subtask's tables. The driver merges the reports and
publishes the epoch. See `docs/decisions/spark-runtime.md`.
"""

from __future__ import annotations

import contextlib
import pickle
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from typing import TYPE_CHECKING, Self

from arroyo_dagster.errors import ProtocolError
from arroyo_dagster.spark.chunks import CHUNK_DDL, FAILURE, PLACE
from arroyo_dagster.spark.connectors.binding import bound_to_run, noting
from arroyo_dagster.spark.holders.messages import Meeting, Placed
from arroyo_dagster.spark.holders.placement import Placement, driver_host, driver_secret
from arroyo_dagster.spark.holders.subtasks import LevelWork, RunId, TaskReport
from arroyo_dagster.spark.jobs import fetch_rows, slots
from arroyo_dagster.spark.packing import PackedPipeline, pickled
from arroyo_dagster.spark.session import open_session
from arroyo_dagster.spark.settings import SparkChoice, SparkSettings
from arroyo_dagster.spark.small_epochs import SmallEpochs
from arroyo_dagster.spark.tasks import TASKS_PER_SLOT
from arroyo_dagster.spark.worker import LevelRunner, SplitReader
from arroyo_dagster.spark.workers import DiskProbe, check_workers
from arroyo_dagster.state.runtime.coordinator import JobRun, finished
from arroyo_dagster.state.runtime.in_process import warn_of_adopt
from arroyo_dagster.state.runtime.pipeline import Pipeline
from arroyo_dagster.state.runtime.pipeline_run import (
    EpochReports,
    OnEpoch,
    PipelineRun,
    RunOutcome,
    SourceSplit,
)
from arroyo_dagster.state.runtime.task import EpochPlan, merged_watermarks
from arroyo_dagster.state.storage.store import ObjectStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkOptions:
    """How pipelines run on Spark.

    Attributes:
        spark: which Spark; see `open_session`.
        interval_seconds: the minimum time between two epochs of a job.
        max_epochs: stop each job, with a last checkpoint, after this many epochs; None = unlimited.
        follow: whether to wait for more when the sources have nothing new; else stop then. With it,
            several jobs run concurrently; else one after the other, in rounds.
        session: the session to use; None = the one of `spark`, stopped at the end if it was started
            for it.
        on_spark: called with the Spark that was chosen, and why.
        master, conf: settings of `spark`; release 0.3 removes them.
        checkpoint_location, adopt: have no effect any more; release 0.3 removes them.
    """

    spark: SparkSettings = field(default_factory=SparkSettings)
    interval_seconds: float = 0.0
    max_epochs: int | None = None
    follow: bool = False
    session: SparkSession | None = None
    on_spark: Callable[[SparkChoice], None] = lambda choice: None
    master: InitVar[str | None] = None
    conf: InitVar[Mapping[str, str] | None] = None
    checkpoint_location: InitVar[str | None] = None
    adopt: InitVar[bool] = False

    def __post_init__(
        self,
        master: str | None,
        conf: Mapping[str, str] | None,
        checkpoint_location: str | None,
        adopt: bool,
    ) -> None:
        if master is not None or conf is not None:
            own = replace(self.spark, master=master or self.spark.master, conf=conf or {})
            object.__setattr__(self, "spark", own)
        if adopt:
            warn_of_adopt()
        if checkpoint_location is not None:
            warnings.warn(
                "checkpoint_location has no effect: runs keep no log of Spark's any more; "
                "release 0.3 removes it",
                DeprecationWarning,
                stacklevel=3,
            )

    def get_session(self) -> tuple[SparkSession, bool]:
        """Return the session, and whether the caller must stop it."""
        if self.session is not None:
            return self.session, False
        opened = open_session(self.spark)
        self.on_spark(opened.choice)
        return opened.session, opened.started


def run_pipeline(
    pipeline: Pipeline,
    store: ObjectStore,
    options: SparkOptions | None = None,
    *,
    on_epoch: OnEpoch | None = None,
) -> RunOutcome:
    """Run a pipeline on Spark, from its newest checkpoint.

    Args:
        pipeline: the pipeline.
        store: the object store of the state.
        options: None = the defaults.
        on_epoch: called with every epoch after it is published and committed.

    Raises:
        InputError: Spark's workers cannot run this package, or do not share the disk of the state;
            or Spark cannot read a `SparkSource`.
        ConflictError: a newer run was started. Nothing is lost.
        StorageError: Spark did not start; or tasks failed or were lost, and Spark gave up. Nothing
            is lost.
        ArroyoStateError: see `JobRun`.
    """
    if (newest := finished(store, pipeline)) is not None:
        return RunOutcome(epochs=0, newest=newest, exhausted=True)
    chosen = options or SparkOptions()
    with bound_to_run(pipeline, store) as staging:
        # Before the start: if this fails, it must not fence a run that is active.
        packed = PackedPipeline.pack(pipeline)
        session, mine = chosen.get_session()
        try:
            run = SparkRun.start(pipeline, store, session, packed)
            with (
                contextlib.closing(run.job),
                staging.running(session, follow=chosen.follow),
            ):
                return run.run(
                    max_epochs=chosen.max_epochs,
                    follow=chosen.follow,
                    interval_seconds=chosen.interval_seconds,
                    on_epoch=noting(staging, run.job, on_epoch),
                )
        finally:
            if mine:
                session.stop()


class SparkRun(PipelineRun):
    """The driver's side of one run on Spark; it is never sent to workers. Created by `start`."""

    def __init__(
        self,
        job: JobRun,
        session: SparkSession,
        packed: PackedPipeline,
        run_id: RunId,
        probe: DiskProbe | None,
    ) -> None:
        super().__init__(job)
        self._session = session
        self._packed = packed
        self._run_id = run_id
        self._probe = probe
        self._slots = slots(session)
        host = driver_host(session)
        parallelism = job.pipeline.parallelism
        self._placement = Placement(driver_secret(), parallelism, self._slots, host)
        self._small = SmallEpochs(job.pipeline)

    @classmethod
    def start(
        cls,
        pipeline: Pipeline,
        store: ObjectStore,
        session: SparkSession,
        packed: PackedPipeline | None = None,
        *,
        application: str | None = None,
    ) -> Self:
        """Start the next run of a job; errors as in `run_pipeline`.

        Args:
            packed: the pipeline, packed; None = pack it now.
            application: an id of this run, or one that concurrent runs of different jobs share;
                None = a new one. The subtasks of an earlier run of the job are dropped.
        """
        packed = packed or PackedPipeline.pack(pipeline)
        probe = check_workers(session, store)
        job = JobRun.start(store, pipeline)
        with job.closed_on_failure():
            run_id = RunId(application or uuid.uuid4().hex, pipeline.paths.root)
            return cls(job, session, packed, run_id, probe)

    def process(self, plan: EpochPlan, splits: Sequence[SourceSplit]) -> EpochReports:
        """Process the rows of one epoch as one Spark job: a stage that reads, unless the driver
        has read them, and one per level.
        """
        parallelism, levels = self.pipeline.parallelism, self.pipeline.levels
        meeting = self._placement.meeting(then_stop=plan.then_stop)
        # Workers that read start their holders meanwhile.
        read = None if meeting.start else self._small.read(splits)
        frame = None if read is not None else self._reading(splits, meeting)
        for level in range(1, levels + 1):
            work = LevelWork(self._packed, self.job.store, self._run_id, level, plan, self._probe)
            placed = self._placement.of_level(level)
            runner = LevelRunner(level, pickled(work), placed, meeting, self._probe)
            if frame is None:
                assert read is not None
                frame = self._session.range(0, parallelism, 1, parallelism)
                frame = frame.mapInArrow(runner.function_with(read), CHUNK_DDL)
            else:
                frame = frame.repartitionById(parallelism, "subtask")
                frame = frame.mapInArrow(runner.function(), CHUNK_DDL)
        assert frame is not None
        found: list[TaskReport] = []
        places: list[Placed] = []
        for row in fetch_rows(self._session, frame):
            if row.edge == FAILURE:
                raise pickle.loads(row.payload)
            (places if row.edge == PLACE else found).append(pickle.loads(row.payload))
        self._placement.learn(places)
        expected = levels * parallelism
        if len({(report.level, report.subtask) for report in found}) != expected:
            raise ProtocolError(
                f"{len(found)} of {expected} tasks reported",
                epoch=plan.epoch,
                next_step="run it again; nothing was published",
            )
        subtasks = [pair for report in found for pair in report.reports.items()]
        return EpochReports(
            subtasks, merged_watermarks([report.watermarks_micros for report in found])
        )

    def _reading(self, splits: Sequence[SourceSplit], meeting: Meeting) -> DataFrame:
        """Return the chunks of an epoch's rows, which workers read."""
        tasks = max(1, min(len(splits), self._slots * TASKS_PER_SLOT))
        parts = [splits[task::tasks] for task in range(tasks)]
        reader = SplitReader(self._packed, parts, meeting, early=self.pipeline.parallelism)
        return self._session.range(0, tasks, 1, tasks).mapInArrow(reader.function(), CHUNK_DDL)
