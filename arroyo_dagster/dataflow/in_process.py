"""Run the services of a dataflow in rounds: one epoch of each, owners first.

In each round, owners run before their readers, so that a reader sees the owners' epochs of the
same round. Epochs are processed in this process, or where `start` has them processed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from arroyo_dagster.dataflow.topics.segments import SegmentSource, note_ends
from arroyo_dagster.engine.coordinator import finished
from arroyo_dagster.engine.in_process import LocalRun
from arroyo_dagster.engine.pipeline import Pipeline
from arroyo_dagster.engine.pipeline_run import PipelineRun
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.ids import JobId
from arroyo_dagster.state.storage.store import ObjectStore

OnPipelineEpoch = Callable[[Pipeline, Checkpoint], None]
StartRun = Callable[[Pipeline, ObjectStore], PipelineRun]

_STOP_POLL_SECONDS = 0.05
"""How often a pause checks whether the run should stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataflowOutcome:
    """How a run of a dataflow ended.

    Attributes:
        rounds: the number of rounds that wrote an epoch.
        epochs: the number of epochs that each service wrote.
        ended: whether every source has ended, and every record between services was read.
    """

    rounds: int
    epochs: dict[JobId, int]
    ended: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DataflowOptions:
    """How the services of a dataflow run.

    Attributes:
        max_rounds: the maximum number of rounds that write an epoch; None = unlimited.
        until_idle: whether to end when the sources have nothing new.
        idle_seconds: how long to wait after a round without an epoch.
        interval_seconds: the minimum time between the starts of two rounds.
        stop: called between epochs; True = write the last checkpoints and end.
        on_epoch: called with every epoch after it is published and committed.
    """

    max_rounds: int | None = None
    until_idle: bool = False
    idle_seconds: float = 0.2
    interval_seconds: float = 0.0
    stop: Callable[[], bool] = lambda: False
    on_epoch: OnPipelineEpoch | None = None


def run_dataflow(
    pipelines: Sequence[Pipeline],
    store: ObjectStore,
    options: DataflowOptions | None = None,
    *,
    between: Sequence[SegmentSource] = (),
    start: StartRun = LocalRun.start,
) -> DataflowOutcome:
    """Run the services of a dataflow, each from its newest checkpoint.

    The run ends when every source has ended, after `max_rounds`, on a stop request, or, with
    `until_idle`, when nothing is new. It writes a last checkpoint of each service.

    Args:
        pipelines: one per service, owners of states before their readers.
        store: the object store of the states.
        options: None = the defaults.
        between: the sources of topics that services of this dataflow write.
        start: starts the next run of a service; default: in this process.

    Raises:
        ConflictError: a newer run of a service was started. Nothing is lost.
        ArroyoStateError: see `JobRun`.
    """
    with _complete(between):
        if all(finished(store, pipeline) is not None for pipeline in pipelines):
            epochs = {pipeline.paths.job: 0 for pipeline in pipelines}
            return DataflowOutcome(rounds=0, epochs=epochs, ended=True)
    with contextlib.ExitStack() as held:
        # Start all services before the first step: a start commits what an earlier run left
        # uncommitted, so that every service can read it.
        chosen = options or DataflowOptions()
        told = _notes_between(between, chosen.on_epoch)
        runs: list[_Running] = []
        for pipeline in pipelines:
            run = start(pipeline, store)
            held.enter_context(contextlib.closing(run.job))
            runs.append(_Running(run, told))
        return _Rounds(runs, between, chosen).run()


def _notes_between(
    between: Sequence[SegmentSource], on_epoch: OnPipelineEpoch | None
) -> OnPipelineEpoch:
    """Return a callback that notes each epoch's read positions, then calls `on_epoch`."""

    def note_epoch(pipeline: Pipeline, checkpoint: Checkpoint) -> None:
        for source in between:
            source.note(pipeline.job, checkpoint)
        if on_epoch is not None:
            on_epoch(pipeline, checkpoint)

    return note_epoch


@contextlib.contextmanager
def _complete(between: Sequence[SegmentSource]) -> Iterator[None]:
    """Within the block, treat topics between services as complete: they end where they end now."""
    before = [source.complete for source in between]
    for source in between:
        source.complete = True
    try:
        yield
    finally:
        for source, complete in zip(between, before, strict=True):
            source.complete = complete


class _Running:
    """A running service."""

    def __init__(
        self,
        run: PipelineRun,
        on_epoch: OnPipelineEpoch,
    ) -> None:
        self.pipeline = run.pipeline
        self._run = run
        self._on_epoch = on_epoch
        self.epochs = 0
        self.last = False
        """Whether the last epoch of this run is written."""

    @property
    def exhausted(self) -> bool:
        return self._run.exhausted

    def stop_requested(self) -> bool:
        """Return whether `arroyo-state stop` requested a stop."""
        return self._run.job.stop_requested()

    def step(self, *, last: bool = False) -> bool:
        """Write an epoch if something is new or `last`; return whether one was written."""
        if self.last:
            return False
        done = self._run.step(then_stop=last, even_if_idle=last)
        if done is None:
            return False
        self.epochs += 1
        # An epoch that reaches the end of all sources is the last even without a request.
        self.last = last or (done.progress is not None and done.progress.final)
        self._on_epoch(self.pipeline, done)
        return True

    def stop_done(self) -> None:
        self._run.job.stop_done()


class _Rounds:
    def __init__(
        self,
        runs: Sequence[_Running],
        between: Sequence[SegmentSource],
        options: DataflowOptions,
    ) -> None:
        self._runs = runs
        self._between = between
        self._options = options
        self._stop = options.stop

    def run(self) -> DataflowOutcome:
        options = self._options
        count = 0
        while not self._asked() and (options.max_rounds is None or count < options.max_rounds):
            due = time.monotonic() + options.interval_seconds
            wrote = False
            for run in self._runs:
                if self._stop():
                    break
                wrote |= run.step()
                if run.last:  # services behind it can tell now that they have read everything
                    self._note_ends()
            count += wrote
            if not wrote and self._note_ends():
                continue
            if not wrote and (options.until_idle or self._ended()):
                break
            self._pause(max(due - time.monotonic(), 0.0 if wrote else options.idle_seconds))
        ended = self._ended()
        with _complete(self._between) if ended else contextlib.nullcontext():
            for run in self._runs:
                if not (ended and run.last):
                    run.step(last=True)
        for run in self._runs:
            run.stop_done()
        epochs = {run.pipeline.paths.job: run.epochs for run in self._runs}
        return DataflowOutcome(rounds=count, epochs=epochs, ended=ended)

    def _asked(self) -> bool:
        return self._stop() or any(run.stop_requested() for run in self._runs)

    def _ended(self) -> bool:
        """Return whether all sources have ended, topics between services included.

        In a cycle of services none ends first: they have ended when none has new records.
        """
        if all(run.exhausted for run in self._runs):
            return True
        with _complete(self._between):
            return all(run.exhausted for run in self._runs)

    def _note_ends(self) -> bool:
        ended = {run.pipeline.job for run in self._runs if run.exhausted}
        return note_ends(self._between, ended)

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not self._stop():
            time.sleep(min(left, _STOP_POLL_SECONDS))
