"""Run a pipeline on Spark: one Spark job per epoch, one task per subtask and level.

The driver asks the sources how far an epoch goes. Spark's Python workers, or of a small epoch the
driver, read the splits, and send the rows as Arrow to the tasks that own their key ranges. Each
task restores, processes and writes its subtask's tables. The driver merges the reports and
publishes the epoch. See `docs/decisions/spark-runtime.md`.
"""

from __future__ import annotations

import contextlib
import pickle
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from arroyo_dagster.engine.coordinator import JobRun, finished
from arroyo_dagster.engine.exchange import ExchangeChunk
from arroyo_dagster.engine.pipeline import Pipeline
from arroyo_dagster.engine.pipeline_run import (
    EpochReports,
    OnEpoch,
    PipelineRun,
    RunOutcome,
    SourceSplit,
)
from arroyo_dagster.engine.task import EpochPlan, merged_watermarks
from arroyo_dagster.errors import ProtocolError
from arroyo_dagster.spark.columns import struct_type
from arroyo_dagster.spark.engine.chunks import CHUNK_SCHEMA, FAILURE, PLACE, chunk_batches
from arroyo_dagster.spark.engine.connectors.binding import bound_to_run, noting
from arroyo_dagster.spark.engine.holders.messages import HolderAddress, Meeting, Placed, Secret
from arroyo_dagster.spark.engine.holders.subtasks import LevelWork, RunId, TaskReport
from arroyo_dagster.spark.engine.packed_pipeline import PackedPipeline
from arroyo_dagster.spark.engine.worker import (
    BatchFunction,
    LevelRunner,
    ReadRows,
    SmallEpochs,
    SplitReader,
    chunk_function,
    level_function,
    number_batches,
    receiver,
)
from arroyo_dagster.spark.jobs import context_of, fetch_rows, slots
from arroyo_dagster.spark.packing import pickled
from arroyo_dagster.spark.session import open_session
from arroyo_dagster.spark.settings import SparkChoice, SparkSettings, runs_in_process
from arroyo_dagster.spark.tasks import TASKS_PER_SLOT
from arroyo_dagster.spark.versions import in_partitions
from arroyo_dagster.spark.workers import DiskProbe, check_workers
from arroyo_dagster.state.storage.store import ObjectStore

if TYPE_CHECKING:
    from pyspark import RDD
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
        allow_dropped: as in `JobRun.start`.
        session: the session to use; None = the one of `spark`, stopped at the end if it was started
            for it.
        on_spark: called with the Spark that was chosen, and why.
    """

    spark: SparkSettings = field(default_factory=SparkSettings)
    interval_seconds: float = 0.0
    max_epochs: int | None = None
    follow: bool = False
    allow_dropped: Collection[str] = ()
    session: SparkSession | None = None
    on_spark: Callable[[SparkChoice], None] = lambda choice: None

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
    resolved = options or SparkOptions()
    with bound_to_run(pipeline, store) as staging:
        # Before the start: if this fails, it must not fence a run that is active.
        packed = PackedPipeline.pack(pipeline)
        session, started = resolved.get_session()
        try:
            run = SparkRun.start(
                pipeline, store, session, packed, allow_dropped=resolved.allow_dropped
            )
            with (
                contextlib.closing(run.job),
                staging.running(session, follow=resolved.follow),
            ):
                return run.run(
                    max_epochs=resolved.max_epochs,
                    follow=resolved.follow,
                    interval_seconds=resolved.interval_seconds,
                    on_epoch=noting(staging, run.job, on_epoch),
                )
        finally:
            if started:
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
        # Elsewhere what `SparkSession.addArtifacts` ships is not for the tasks of an RDD.
        self._context = context_of(session) if runs_in_process(session) else None
        host = driver_host(session)
        parallelism = job.pipeline.parallelism
        # The secret of this process. Its runs share holders, which take a second to start.
        if not _SECRETS:
            _SECRETS.append(Secret.new())
        self._placement = Placement(_SECRETS[0], parallelism, self._slots, host)
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
        allow_dropped: Collection[str] = (),
    ) -> Self:
        """Start the next run of a job; errors as in `run_pipeline`.

        Args:
            allow_dropped: as in `JobRun.start`.
            packed: the pipeline, packed; None = pack it now.
            application: an id of this run, or one that concurrent runs of different jobs share;
                None = a new one. The subtasks of an earlier run of the job are dropped.
        """
        packed = packed or PackedPipeline.pack(pipeline)
        probe = check_workers(session, store)
        job = JobRun.start(store, pipeline, allow_dropped=allow_dropped)
        with job.closed_on_failure():
            run_id = RunId(application or uuid.uuid4().hex, pipeline.paths.root)
            return cls(job, session, packed, run_id, probe)

    def process(self, plan: EpochPlan, splits: Sequence[SourceSplit]) -> EpochReports:
        """Process the rows of one epoch as one Spark job: a stage that reads, unless the driver
        has read them, and one per level; one of all levels for a single subtask with few rows.
        """
        parallelism, levels = self.pipeline.parallelism, self.pipeline.levels
        meeting = self._placement.meeting(then_stop=plan.then_stop)
        read = self._small.read(splits)
        runners = [self._runner(level, plan, meeting) for level in range(1, levels + 1)]
        job = self._job(runners, self._reading(splits, meeting) if read is None else read)
        reports: list[TaskReport] = []
        places: list[Placed] = []
        for row in fetch_rows(self._session, job):
            if row.edge == FAILURE:
                raise pickle.loads(row.payload)
            (places if row.edge == PLACE else reports).append(pickle.loads(row.payload))
        self._placement.learn(places)
        expected = levels * parallelism
        if len({(report.level, report.subtask) for report in reports}) != expected:
            raise ProtocolError(
                f"{len(reports)} of {expected} tasks reported",
                epoch=plan.epoch,
                next_step="run it again; nothing was published",
            )
        subtasks = [pair for report in reports for pair in report.reports.items()]
        return EpochReports(
            subtasks, merged_watermarks([report.watermarks_micros for report in reports])
        )

    def _runner(self, level: int, plan: EpochPlan, meeting: Meeting) -> LevelRunner:
        work = LevelWork(self._packed, self.job.store, self._run_id, level, plan, self._probe)
        placed = self._placement.of_level(level)
        return LevelRunner(level, pickled(work), placed, meeting, self._probe)

    def _job(
        self, runners: Sequence[LevelRunner], read: ReadRows | DataFrame
    ) -> DataFrame | RDD[ExchangeChunk]:
        """Return the Spark job of an epoch: the chunks that its last tasks yield.

        Args:
            read: what the driver has read, or the chunks that workers read.
        """
        parallelism = self.pipeline.parallelism
        if not isinstance(read, ReadRows):
            return _with_levels(read, runners, parallelism)
        # One subtask has all of the few rows: its task runs all levels.
        first = len(runners) if parallelism == 1 else 1
        begin, later = level_function(runners[:first], read), runners[first:]
        if self._context is None:
            numbers = self._session.range(0, parallelism, 1, parallelism)
            return _with_levels(_mapped(numbers, begin), later, parallelism)
        # An RDD spares the planning of a query, which takes as long as a small epoch.
        indexes = self._context.parallelize(range(parallelism), parallelism)
        chunks = indexes.mapPartitions(chunk_function(begin, number_batches))
        for runner in later:
            shuffled = chunks.keyBy(receiver).partitionBy(parallelism, int).values()
            chunks = shuffled.mapPartitions(chunk_function(level_function([runner]), chunk_batches))
        return chunks

    def _reading(self, splits: Sequence[SourceSplit], meeting: Meeting) -> DataFrame:
        """Return the chunks of an epoch's rows, which workers read."""
        tasks = max(1, min(len(splits), self._slots * TASKS_PER_SLOT))
        parts = [splits[task::tasks] for task in range(tasks)]
        reader = SplitReader(self._packed, parts, meeting, early=self.pipeline.parallelism)
        return _mapped(self._session.range(0, tasks, 1, tasks), reader.function())


def _with_levels(frame: DataFrame, runners: Sequence[LevelRunner], parallelism: int) -> DataFrame:
    for runner in runners:
        placed = in_partitions(frame, parallelism, "subtask")
        frame = _mapped(placed, level_function([runner]))
    return frame


def _mapped(frame: DataFrame, function: BatchFunction) -> DataFrame:
    # A schema as text costs three questions to the JVM, 6 ms of an epoch.
    return frame.mapInArrow(function, struct_type(CHUNK_SCHEMA))


# ---- the driver's knowledge of which process holds each subtask of a run -------------------------

_IDLE_SECONDS = 900.0
"""How long holders wait at least for the next epoch."""

_ENCRYPTED = (
    "spark.network.crypto.enabled",
    "spark.authenticate.enableSaslEncryption",
    "spark.ssl.enabled",
    "spark.ssl.rpc.enabled",
)

_SECRETS: list[Secret] = []


def driver_host(session: SparkSession) -> str | None:
    """Return the host of the driver, if tasks may reach holders of other hosts; else None.

    They may not where Spark encrypts its own connections: those to holders are not encrypted.
    """

    def setting(name: str) -> str:
        return session.conf.get(name, "") or ""

    if setting("spark.master").startswith("local") or any(
        setting(name) == "true" for name in _ENCRYPTED
    ):
        return None
    return setting("spark.driver.host") or None


class Placement:
    """Where the subtasks of one run are held, as their tasks report it.

    Args:
        parallelism: the number of subtasks of each level.
        slots: how many tasks Spark runs at a time.
        driver_host: see `Meeting`.
    """

    def __init__(
        self, secret: Secret, parallelism: int, slots: int, driver_host: str | None
    ) -> None:
        self._secret = secret
        self._wanted = min(parallelism, slots)
        self._driver_host = driver_host
        self._holders: dict[tuple[int, int], HolderAddress] = {}
        self._alive: dict[str, HolderAddress] = {}
        self._balanced: set[tuple[int, int]] = set()
        self._longest_gap_seconds = 0.0
        self._last_epoch = time.monotonic()

    def meeting(self, *, then_stop: bool) -> Meeting:
        """Return what the tasks of the next epoch need.

        Args:
            then_stop: the epoch is the last of the run.
        """
        now = time.monotonic()
        self._longest_gap_seconds = max(self._longest_gap_seconds, now - self._last_epoch)
        self._last_epoch = now
        idle_seconds = _IDLE_SECONDS + (0 if then_stop else 3 * self._longest_gap_seconds)
        start = len(self._alive) < self._wanted
        return Meeting(self._secret, self._driver_host, idle_seconds, start)

    def of_level(self, level: int) -> Mapping[int, HolderAddress]:
        """Return the holder of each subtask of a level; of none before the first epoch."""
        return {subtask: holder for (of, subtask), holder in self._holders.items() if of == level}

    def learn(self, placed: Sequence[Placed]) -> None:
        """Take over what the tasks of an epoch report, and spread subtasks if they are uneven."""
        ran = {task.holder.holder: task.holder for task in placed if task.holder is not None}
        blocked = {task.lost.holder for task in placed if task.lost is not None and task.blocked}
        if blocked & ran.keys():
            # Hosts do not reach each other's holders. Each serves the tasks of its own.
            self._driver_host = None
        lost = {task.lost.holder for task in placed if task.lost is not None} - ran.keys()
        own = {task.own.holder: task.own for task in placed if task.own is not None}
        self._alive = {name: address for name, address in (own | ran).items() if name not in lost}
        self._holders = {
            (task.level, task.subtask): task.holder for task in placed if task.holder is not None
        }
        for level in {task.level for task in placed}:
            self._spread(level)

    def _spread(self, level: int) -> None:
        """Assign subtasks of the process that has most to the one that has fewest.

        Each once in a run, as the process that takes one over restores it.
        """
        subtasks: dict[str, list[int]] = {name: [] for name in self._alive}
        for (of, subtask), holder in sorted(self._holders.items()):
            if of == level and holder.holder in subtasks:
                subtasks[holder.holder].append(subtask)
        while len(subtasks) > 1:
            most = max(subtasks, key=lambda name: len(subtasks[name]))
            fewest = min(subtasks, key=lambda name: len(subtasks[name]))
            free = [subtask for subtask in subtasks[most] if (level, subtask) not in self._balanced]
            if len(subtasks[most]) - len(subtasks[fewest]) < 2 or not free:
                return
            subtasks[most].remove(free[-1])
            subtasks[fewest].append(free[-1])
            self._balanced.add((level, free[-1]))
            self._holders[level, free[-1]] = self._alive[fewest]
