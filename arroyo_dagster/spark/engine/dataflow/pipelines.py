"""Run several pipelines in one Spark application, such as the services of a dataflow."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

from arroyo_dagster.dataflow.in_process import (
    DataflowOptions,
    DataflowOutcome,
    OnPipelineEpoch,
    run_dataflow,
)
from arroyo_dagster.dataflow.topics.segments import SegmentSource
from arroyo_dagster.engine.coordinator import finished
from arroyo_dagster.engine.pipeline import Pipeline
from arroyo_dagster.engine.pipeline_run import RunOutcome
from arroyo_dagster.engine.stop_requests import request_stop
from arroyo_dagster.errors import NotFoundError
from arroyo_dagster.spark.engine.connectors.queries import StagingQueries
from arroyo_dagster.spark.engine.dataflow.topics import SparkTopics, topic_offsets
from arroyo_dagster.spark.engine.pipeline import SparkOptions, SparkRun
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.clock import wall_clock
from arroyo_dagster.state.storage.store import ObjectStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ASK_AGAIN_SECONDS = 0.5
_STOP_POLL_SECONDS = 0.2


def run_pipelines(
    pipelines: Sequence[Pipeline],
    store: ObjectStore,
    options: SparkOptions | None = None,
    *,
    topics: SparkTopics | None = None,
    between: Sequence[SegmentSource] = (),
    stop: Callable[[], bool] = lambda: False,
    on_epoch: OnPipelineEpoch | None = None,
) -> DataflowOutcome:
    """Run pipelines in one application, from their newest checkpoints.

    Args:
        pipelines: the pipelines, owners of states before their readers.
        store: the object store of the states.
        options: with `follow`, all pipelines run concurrently until each has ended or is stopped;
            else they run in rounds, as in process, until none of them has new rows.
        topics: the topics that are bound to Spark's sources; they are staged during the run.
        between: the sources of topics that these pipelines write.
        stop: polled; True = every run writes a last checkpoint and ends.
        on_epoch: called with every epoch after it is published and committed, by one thread at a
            time.

    Raises:
        ArroyoStateError: a run failed, as in `run_pipeline`; with `follow`, the other runs were
            stopped with a checkpoint.
    """
    resolved = options or SparkOptions()
    session, started = resolved.get_session()
    try:
        together = _Together(session, store, resolved, topics, between, stop, on_epoch)
        return together.all_at_once(pipelines) if resolved.follow else together.in_rounds(pipelines)
    finally:
        if started:
            session.stop()


@dataclass
class _Together:
    """The runs of one application; attributes as in `run_pipelines`."""

    session: SparkSession
    store: ObjectStore
    options: SparkOptions
    topics: SparkTopics | None
    between: Sequence[SegmentSource]
    stop: Callable[[], bool]
    on_epoch: OnPipelineEpoch | None

    def __post_init__(self) -> None:
        self._noting = threading.RLock()
        self._staging = StagingQueries({}) if self.topics is None else self.topics.queries()
        self._application = uuid.uuid4().hex

    def in_rounds(self, pipelines: Sequence[Pipeline]) -> DataflowOutcome:
        """Run all pipelines in rounds, until a round has nothing new."""
        options = DataflowOptions(
            max_rounds=self.options.max_epochs,
            until_idle=True,
            interval_seconds=self.options.interval_seconds,
            stop=self.stop,
            on_epoch=self._note_epoch,
        )
        with self._staging.running(self.session, follow=False):
            return run_dataflow(
                pipelines, self.store, options, between=self.between, start=self._start
            )

    def all_at_once(self, pipelines: Sequence[Pipeline]) -> DataflowOutcome:
        """Run each pipeline in a thread and stage topics; if one fails, stop the others with a
        checkpoint.
        """
        with self._staging.running(self.session, follow=True):
            done = self._in_threads(pipelines)
        epochs = {pipeline.paths.job: done[pipeline.paths.root].epochs for pipeline in pipelines}
        return DataflowOutcome(
            rounds=max(epochs.values(), default=0),
            epochs=epochs,
            ended=all(outcome.exhausted for outcome in done.values()),
        )

    def _in_threads(self, pipelines: Sequence[Pipeline]) -> dict[str, RunOutcome]:
        with ThreadPoolExecutor(max(1, len(pipelines)), "arroyo-service") as pool:
            runs: dict[str, Future[RunOutcome]] = {
                pipeline.paths.root: pool.submit(self._run, pipeline) for pipeline in pipelines
            }
            going = set(runs.values())
            while going and not self.stop() and self._staging.active:
                done, going = wait(going, timeout=_STOP_POLL_SECONDS, return_when=FIRST_EXCEPTION)
                if any(run.exception() is not None for run in done):
                    break
            self._stop([item for item in pipelines if runs[item.paths.root] in going], runs)
        outcomes = {root: run.result() for root, run in runs.items()}
        self._staging.check()
        return outcomes

    def _stop(self, pipelines: Sequence[Pipeline], runs: Mapping[str, Future[RunOutcome]]) -> None:
        """Request runs to stop, repeatedly, since a run may not have started yet."""
        for pipeline in pipelines:
            run = runs[pipeline.paths.root]
            while not run.done():
                with contextlib.suppress(NotFoundError):
                    request_stop(self.store, pipeline.paths, wall_clock())
                wait([run], timeout=_ASK_AGAIN_SECONDS)

    def _run(self, pipeline: Pipeline) -> RunOutcome:
        if (newest := finished(self.store, pipeline)) is not None:
            return RunOutcome(epochs=0, newest=newest, exhausted=True)

        def on_epoch(checkpoint: Checkpoint) -> None:
            with self._noting:
                for source in self.between:
                    source.note(pipeline.job, checkpoint)
                self._note_epoch(pipeline, checkpoint)

        run = self._start(pipeline, self.store)
        with contextlib.closing(run.job):
            return run.run(
                max_epochs=self.options.max_epochs,
                follow=True,
                interval_seconds=self.options.interval_seconds,
                on_epoch=on_epoch,
            )

    def _start(self, pipeline: Pipeline, store: ObjectStore) -> SparkRun:
        return SparkRun.start(pipeline, store, self.session, application=self._application)

    def _note_epoch(self, pipeline: Pipeline, checkpoint: Checkpoint) -> None:
        with self._noting:
            self._staging.note(pipeline.job, topic_offsets(checkpoint))
            if self.on_epoch is not None:
                self.on_epoch(pipeline, checkpoint)
