"""Run several pipelines in one Spark application, such as the services of a dataflow."""

from __future__ import annotations

import contextlib
import json
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from arroyo_dagster.dataflow.topics.segments import SegmentSource, note_ends
from arroyo_dagster.errors import NotFoundError
from arroyo_dagster.spark.dataflow.topics import SparkTopics
from arroyo_dagster.spark.pipeline import SparkOptions, SparkRun
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.clock import wall_clock
from arroyo_dagster.state.runtime.coordinator import finished
from arroyo_dagster.state.runtime.in_process import RunOutcome
from arroyo_dagster.state.runtime.pipeline import Pipeline
from arroyo_dagster.state.runtime.stop_requests import request_stop
from arroyo_dagster.state.storage.store import ObjectStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_ASK_AGAIN_SECONDS = 0.5
_STOP_POLL_SECONDS = 0.2
OnServiceEpoch = Callable[[Pipeline, Checkpoint], None]


def run_pipelines(
    pipelines: Sequence[Pipeline],
    store: ObjectStore,
    options: SparkOptions | None = None,
    *,
    topics: SparkTopics | None = None,
    between: Sequence[SegmentSource] = (),
    stop: Callable[[], bool] = lambda: False,
    on_epoch: OnServiceEpoch | None = None,
) -> dict[str, RunOutcome]:
    """Run pipelines in one application, from their newest checkpoints.

    Args:
        pipelines: the pipelines, owners of states before their readers.
        store: the object store of the states.
        options: with `follow`, all pipelines run concurrently until each has ended or is stopped;
            else they run one after the other, in rounds, until none of them has new rows.
        topics: the topics that are bound to Spark's sources; they are staged during the run.
        between: the sources of topics that these pipelines write.
        stop: polled; True = every run writes a last checkpoint and ends.
        on_epoch: called with every epoch after it is published and committed, by one thread at a
            time.

    Returns:
        The outcome of each run, by the root of the job.

    Raises:
        ArroyoStateError: a run failed, as in `run_pipeline`; the other runs were stopped with a
            checkpoint.
    """
    chosen = options or SparkOptions()
    found, mine = chosen.get_session()
    try:
        together = _Together(
            _Environment(
                session=found,
                store=store,
                options=chosen,
                topics=topics,
                between=between,
                stop=stop,
                on_epoch=on_epoch,
            )
        )
        if chosen.follow:
            return together.all_at_once(pipelines)
        return together.in_turn(pipelines)
    finally:
        if mine:
            found.stop()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Environment:
    """What the runs of one application share; attributes as in `run_pipelines`."""

    session: SparkSession
    store: ObjectStore
    options: SparkOptions
    topics: SparkTopics | None
    between: Sequence[SegmentSource]
    stop: Callable[[], bool]
    on_epoch: OnServiceEpoch | None


class _Together:
    def __init__(self, shared: _Environment) -> None:
        self._shared = shared
        self._noting = threading.Lock()
        self._application = uuid.uuid4().hex

    def in_turn(self, pipelines: Sequence[Pipeline]) -> dict[str, RunOutcome]:
        """Run all pipelines in rounds, until a round has nothing new."""
        if self._shared.topics is not None:
            self._shared.topics.stage_all(self._shared.session)
        outcomes: dict[str, RunOutcome] = {}
        news = True
        while news and not self._shared.stop():
            news = False
            for pipeline in pipelines:
                root = pipeline.paths.root
                before = outcomes.get(root)
                if before is not None and (
                    self._shared.options.max_epochs is not None
                    or not has_new_rows(pipeline, before.newest)
                ):
                    continue
                outcome = self._at_once([pipeline])[root]
                news = news or outcome.epochs > 0
                outcomes[root] = outcome.after(before) if before else outcome
            ended = {one.job for one in pipelines if outcomes[one.paths.root].exhausted}
            news = note_ends(self._shared.between, ended) or news
        return outcomes

    def all_at_once(self, pipelines: Sequence[Pipeline]) -> dict[str, RunOutcome]:
        """Run each pipeline in a thread and stage topics; if one fails, stop the others with a
        checkpoint.
        """
        staging = (
            [] if self._shared.topics is None else self._shared.topics.start(self._shared.session)
        )
        try:
            return self._at_once(pipelines, staging)
        finally:
            for query in staging:
                query.stop()

    def _at_once(
        self, pipelines: Sequence[Pipeline], staging: Sequence[StreamingQuery] = ()
    ) -> dict[str, RunOutcome]:
        with ThreadPoolExecutor(max(1, len(pipelines)), "arroyo-service") as pool:
            runs: dict[str, Future[RunOutcome]] = {
                one.paths.root: pool.submit(self._run, one) for one in pipelines
            }
            going = set(runs.values())
            while going and not self._shared.stop() and _is_staging(staging):
                done, going = wait(going, timeout=_STOP_POLL_SECONDS, return_when=FIRST_EXCEPTION)
                if any(run.exception() is not None for run in done):
                    break
            self._stop([one for one in pipelines if runs[one.paths.root] in going], runs)
        found = {root: run.result() for root, run in runs.items()}
        for query in staging:
            if (problem := query.exception()) is not None:
                raise problem
        return found

    def _stop(self, pipelines: Sequence[Pipeline], runs: Mapping[str, Future[RunOutcome]]) -> None:
        """Request runs to stop, repeatedly, since a run may not have started yet."""
        for pipeline in pipelines:
            run = runs[pipeline.paths.root]
            while not run.done():
                with contextlib.suppress(NotFoundError):
                    request_stop(self._shared.store, pipeline.paths, wall_clock())
                wait([run], timeout=_ASK_AGAIN_SECONDS)

    def _run(self, pipeline: Pipeline) -> RunOutcome:
        if (newest := finished(self._shared.store, pipeline)) is not None:
            return RunOutcome(epochs=0, newest=newest, exhausted=True)
        options = self._shared.options
        if options.checkpoint_location is not None:
            location = f"{options.checkpoint_location}/{pipeline.paths.root}"
            options = replace(options, checkpoint_location=location)
        run = SparkRun.start(
            pipeline,
            self._shared.store,
            options,
            on_epoch=lambda checkpoint: self._note_epoch(pipeline, checkpoint),
            application=self._application,
        )
        with contextlib.closing(run.job):
            return run.run(self._shared.session)

    def _note_epoch(self, pipeline: Pipeline, checkpoint: Checkpoint) -> None:
        with self._noting:
            for source in self._shared.between:
                source.note(pipeline.job, checkpoint)
            if self._shared.topics is not None:
                self._shared.topics.note(pipeline, checkpoint)
            if self._shared.on_epoch is not None:
                self._shared.on_epoch(pipeline, checkpoint)


def _is_staging(staging: Sequence[StreamingQuery]) -> bool:
    return all(query.isActive for query in staging)


def has_new_rows(pipeline: Pipeline, newest: Checkpoint | None) -> bool:
    """Return whether a source has more rows than the newest epoch read; True without an epoch."""
    if newest is None or newest.progress is None:
        return True
    taken = json.loads(newest.progress.offsets)
    return any(
        name not in taken or node.source.latest_offset(taken[name]) != taken[name]
        for name, node in pipeline.sources.items()
    )
