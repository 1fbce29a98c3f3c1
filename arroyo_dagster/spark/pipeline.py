"""Run a pipeline on Spark: structured streaming, one micro-batch per epoch, one task per subtask.

Spark's Python workers read the sources, and send the rows as Arrow to the tasks that own their key
ranges. Each task restores, processes and writes its subtask's tables. The driver merges the reports
and publishes the epoch. See `docs/decisions/spark-runtime.md`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import pickle
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

import pyarrow as pa

from arroyo_dagster.errors import ConflictError, ProtocolError
from arroyo_dagster.spark.query_log import batch_offsets, query_id
from arroyo_dagster.spark.session import default_location, get_session
from arroyo_dagster.spark.worker import (
    CHUNK_DDL,
    CHUNK_SCHEMA,
    FAILURE,
    LevelRunner,
    PackedPipeline,
    RunId,
    TaskReport,
    chunk_batches,
)
from arroyo_dagster.state.model.checkpoints import StreamProgress, SubtaskCheckpoint
from arroyo_dagster.state.model.ids import OperatorId
from arroyo_dagster.state.planning.restore.batch_identity import (
    ADOPT,
    BatchVerdict,
    another_query,
    carried_progress,
)
from arroyo_dagster.state.runtime.coordinator import JobRun, finished
from arroyo_dagster.state.runtime.exchange import WATERMARK, ExchangeChunk
from arroyo_dagster.state.runtime.in_process import IN_PROCESS, OnEpoch, RunOutcome
from arroyo_dagster.state.runtime.operators import Offset
from arroyo_dagster.state.runtime.pipeline import Pipeline
from arroyo_dagster.state.runtime.task import EpochPlan, merged_watermarks
from arroyo_dagster.state.storage.store import ObjectStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_POLL_SECONDS = 0.1
_STOP_POLL_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkOptions:
    """How pipelines run on Spark.

    Attributes:
        master: the master; None = `local[*]`. An active session is used unchanged.
        conf: Spark settings.
        checkpoint_location: where Spark stores its logs of batches, with one directory per job for
            `run_pipelines`; None = below the jobs, which must then be on local disk.
        interval_seconds: the minimum time between two epochs of a job.
        adopt: whether to continue from the offsets recorded with the states, in new streaming
            queries.
        max_epochs: stop each job, with a last checkpoint, after this many epochs; None = unlimited.
        follow: whether to wait for more when the sources have nothing new; else stop then. With it,
            several jobs run concurrently; else one after the other, in rounds.
        session: the session to use; None = the active one, else start one and stop it at the end.
    """

    master: str | None = None
    conf: Mapping[str, str] | None = field(default=None, repr=False)
    checkpoint_location: str | None = None
    interval_seconds: float = 0.0
    adopt: bool = False
    max_epochs: int | None = None
    follow: bool = False
    session: SparkSession | None = None

    def get_session(self) -> tuple[SparkSession, bool]:
        """Return the session, and whether the caller must stop it."""
        return (self.session, False) if self.session else get_session(self.master, self.conf)


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
        ConflictError: a newer run was started, or the micro-batch is not the next one of the
            recorded query; the error says how to continue. Nothing is lost.
        InputError: no checkpoint location is given, and the store is not on local disk.
        ArroyoStateError: see `JobRun`.
    """
    if (newest := finished(store, pipeline)) is not None:
        return RunOutcome(epochs=0, newest=newest, exhausted=True)
    chosen = options or SparkOptions()
    run = SparkRun.start(pipeline, store, chosen, on_epoch=on_epoch)
    with contextlib.closing(run.job):
        session, mine = chosen.get_session()
        try:
            return run.run(session)
        finally:
            if mine:
                session.stop()


class _Finished(Exception):
    """Stops the streaming query. If the batch returned normally, Spark would commit it."""


@dataclass
class _QueryLog:
    """Selects the streaming query to continue, and the location of its log.

    Attributes:
        job: the job, for errors.
        location: the location of the log; `accept` sets that of the recorded query.
        given: whether the caller chose the location.
        adopt: whether to start a new query.
    """

    job: str
    location: str
    given: bool
    adopt: bool

    def accept(self, progress: StreamProgress) -> None:
        """Continue the query that wrote the newest epoch.

        Raises:
            ConflictError: that epoch was written in process, or a local log is missing.
        """
        if self.adopt or progress.rolled_back_to is not None:
            return  # a new query, from the recorded offsets
        if not self.given and progress.checkpoint_location:
            self.location = progress.checkpoint_location
        if progress.query_id == IN_PROCESS:
            raise ConflictError(
                "the job's newest epoch was written in process",
                job=self.job,
                next_step=f"continue without --spark; or {ADOPT}",
            )
        folder = self.location.removeprefix("file://")
        if folder.startswith("/") and not Path(folder, "metadata").exists():
            raise another_query(progress, path=self.location)


class SparkRun:
    """The driver's side of one run on Spark; it is never sent to workers. Created by `start`."""

    def __init__(
        self,
        job: JobRun,
        packed: PackedPipeline,
        location: str,
        options: SparkOptions,
        *,
        on_epoch: OnEpoch | None,
        application: str,
    ) -> None:
        self.job = job
        self._pipeline = job.pipeline
        self._store = job.store
        self._packed = packed
        self._location = location
        self._options = options
        self._adopt = options.adopt
        self._on_epoch = on_epoch
        self._run_id = RunId(application, job.pipeline.paths.root)
        self._offsets = job.offsets()
        self._count = 0
        self._done = False
        self._failure: BaseException | None = None

    @classmethod
    def start(
        cls,
        pipeline: Pipeline,
        store: ObjectStore,
        options: SparkOptions,
        *,
        on_epoch: OnEpoch | None,
        application: str | None = None,
    ) -> Self:
        """Start the next run of a job; other arguments and errors as in `run_pipeline`.

        Args:
            application: an id that concurrent runs with the same workers share; None = a new one.
                A worker drops the subtasks of other applications.
        """
        given = options.checkpoint_location
        log = _QueryLog(
            pipeline.job,
            given
            or f"{default_location(store, pipeline.paths.maintenance)}/{uuid.uuid4().hex[:16]}",
            given=given is not None,
            adopt=options.adopt,
        )
        # Before the start: if this fails, it must not fence a run that is active.
        packed = PackedPipeline.pack(pipeline)
        job = JobRun.start(store, pipeline, accept=log.accept)
        with job.closed_on_failure():
            return cls(
                job,
                packed,
                log.location,
                options,
                on_epoch=on_epoch,
                application=application or uuid.uuid4().hex,
            )

    # ---- the query -------------------------------------------------------------------------------

    def run(self, session: SparkSession) -> RunOutcome:
        """Run the streaming query until the run ends by itself or by request."""
        from arroyo_dagster.spark.stream import open_streams

        chunks = open_streams(session, self._packed, self._offsets)
        writer = chunks.writeStream.foreachBatch(self._on_batch)
        writer = writer.option("checkpointLocation", self._location)
        interval_seconds = self._options.interval_seconds
        if interval_seconds > 0:
            writer = writer.trigger(processingTime=f"{interval_seconds} seconds")
        # Errors of a batch are raised below; py4j must not log them too.
        logging.getLogger("py4j.clientserver").setLevel(logging.CRITICAL)
        query = writer.start()
        try:
            self._wait(query)
        finally:
            query.stop()
        problem = self._failure or query.exception()
        if problem is not None and not self._done:
            raise problem
        if not self._done and self.job.stop_requested():
            self._final_epoch(session)
        self.job.stop_done()
        return self._outcome()

    def _outcome(self) -> RunOutcome:
        return RunOutcome.of(self.job, self._count, self._exhausted(self._offsets))

    def _wait(self, query: StreamingQuery) -> None:
        looked = time.monotonic()
        while query.isActive and not self._done and self._failure is None:
            time.sleep(_POLL_SECONDS)
            if time.monotonic() - looked < _STOP_POLL_SECONDS or not self._idle(query):
                continue
            looked = time.monotonic()
            if not self._options.follow or self.job.stop_requested():
                return

    def _idle(self, query: StreamingQuery) -> bool:
        status = query.status
        if status["isTriggerActive"] and status["isDataAvailable"]:
            return False
        return all(
            node.source.latest_offset(self._offsets[name]) == self._offsets[name]
            for name, node in self._pipeline.sources.items()
        )

    # ---- one micro-batch -------------------------------------------------------------------------

    def _on_batch(self, chunks: DataFrame, batch_id: int) -> None:
        try:
            self._batch(chunks, batch_id)
        except BaseException as error:
            # Spark would return it as text only.
            if not isinstance(error, _Finished):
                self._failure = error
            raise

    def _batch(self, chunks: DataFrame, batch_id: int) -> None:
        if self._done:
            raise _Finished
        session = chunks.sparkSession
        query, ends = self._identity(session, batch_id)
        offsets = json.dumps(ends, sort_keys=True)
        verdict = self.job.verdict(query, batch_id, offsets, adopt=self._adopt)
        if verdict is BatchVerdict.REPEAT:
            return
        self._adopt = False
        self._epoch(chunks, ends, query, batch_id, stop=self.job.stop_requested())

    def _epoch(
        self,
        chunks: DataFrame,
        ends: Mapping[OperatorId, Offset],
        query: str,
        batch_id: int,
        *,
        stop: bool,
    ) -> None:
        exhausted = self._exhausted(ends)
        most = self._options.max_epochs
        last = most is not None and self._count + 1 >= most
        plan = self.job.plan(then_stop=stop or exhausted or last)
        progress = StreamProgress(
            query_id=query,
            batch_id=batch_id,
            offsets=json.dumps(ends, sort_keys=True),
            checkpoint_location=self._location,
            final=plan.then_stop,
            exhausted=exhausted,
        )
        with self.job.backend.unless_fenced():
            reports, marks = self._process(chunks, plan)
            checkpoint = self.job.finish(plan, reports, ends, marks, progress)
        self._offsets = dict(ends)
        self._count += 1
        self._done = plan.then_stop
        if self._on_epoch is not None:
            self._on_epoch(checkpoint)

    def _process(
        self, chunks: DataFrame, plan: EpochPlan
    ) -> tuple[list[tuple[OperatorId, SubtaskCheckpoint]], dict[OperatorId, int | None]]:
        frame = chunks
        for level in range(1, self._pipeline.levels + 1):
            runner = LevelRunner(self._packed, self._store, self._run_id, level, plan)
            frame = frame.repartitionById(self._pipeline.parallelism, "subtask")
            frame = frame.mapInArrow(runner.function(), CHUNK_DDL)
        found: list[TaskReport] = []
        for row in frame.collect():
            if row.edge == FAILURE:
                raise pickle.loads(row.payload)
            found.append(pickle.loads(row.payload))
        expected = self._pipeline.levels * self._pipeline.parallelism
        if len({(report.level, report.subtask) for report in found}) != expected:
            raise ProtocolError(
                f"{len(found)} of {expected} tasks reported",
                epoch=plan.epoch,
                next_step="run it again; nothing was published",
            )
        reports = [pair for report in found for pair in report.reports.items()]
        return reports, merged_watermarks([report.watermarks_micros for report in found])

    def _final_epoch(self, session: SparkSession) -> None:
        """Write a last epoch without rows, with the batch id of the newest epoch.

        For a stop request while nothing is new.
        """
        progress = carried_progress(self.job.base) if self.job.base else None
        query, batch_id = (progress.query_id, progress.batch_id) if progress else ("", 0)
        nudges = list(chunk_batches(_nudges(self._pipeline)))
        rows = pa.Table.from_batches(nudges, CHUNK_SCHEMA)
        self._epoch(session.createDataFrame(rows), self._offsets, query, batch_id, stop=True)

    def _exhausted(self, offsets: Mapping[OperatorId, Offset]) -> bool:
        return all(
            node.source.exhausted(offsets[name]) for name, node in self._pipeline.sources.items()
        )

    def _identity(
        self, session: SparkSession, batch_id: int
    ) -> tuple[str, dict[OperatorId, Offset]]:
        """Return the query's id and each source's end offset in the batch, from Spark's log."""
        offsets = batch_offsets(session, self._location, batch_id)
        if len(offsets) != len(self._pipeline.sources):
            raise ProtocolError(
                f"Spark's log of batch {batch_id} holds {len(offsets)} offsets for "
                f"{len(self._pipeline.sources)} sources",
                path=f"{self._location}/offsets/{batch_id}",
                next_step="report this with your version of Spark; nothing was written",
            )
        return query_id(session, self._location), dict(
            zip(self._pipeline.sources, offsets, strict=True)
        )


def _nudges(pipeline: Pipeline) -> Iterator[ExchangeChunk]:
    for level in range(1, pipeline.levels + 1):
        for subtask in range(pipeline.parallelism):
            yield ExchangeChunk(level, subtask, WATERMARK, 0, b"")
