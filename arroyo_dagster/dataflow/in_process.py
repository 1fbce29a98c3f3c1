"""Many services run in this process, one round after the other: an epoch of each, owners first.

In a round a reader comes behind the owners of what it reads, so it sees their epoch of this round.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from arroyo_dagster.dataflow.topics.segments import SegmentSource, note_ends
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.ids import JobId
from arroyo_dagster.state.runtime.coordinator import finished
from arroyo_dagster.state.runtime.in_process import LocalRun
from arroyo_dagster.state.runtime.pipeline import Pipeline
from arroyo_dagster.state.storage.store import ObjectStore

OnPipelineEpoch = Callable[[Pipeline, Checkpoint], None]

_STOP_POLL_SECONDS = 0.05
"""How often a pause checks whether the run should stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataflowOutcome:
    """How a run of a dataflow ended.

    Attributes:
        rounds: how many rounds wrote an epoch.
        epochs: how many epochs each service wrote.
        ended: whether every source had ended, and every record between services was read.
    """

    rounds: int
    epochs: dict[JobId, int]
    ended: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DataflowOptions:
    """How the services of a dataflow run.

    Attributes:
        max_rounds: how many rounds that write something; None = no end of its own.
        until_idle: end when nothing is new.
        idle_seconds: how long to wait before looking again.
        interval_seconds: the least time between two rounds.
        stop: asked between epochs; True = write the last checkpoints and end.
        on_epoch: called with every epoch once it is published and committed.
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
) -> DataflowOutcome:
    """Run the services of a dataflow, each from its newest checkpoint on.

    Ends when every source has ended, after `max_rounds`, when asked to, or, `until_idle`, when
    nothing is new; always with a checkpoint of each service.

    Args:
        pipelines: one a service, owners of states before their readers.
        between: the sources of topics that services write themselves.

    Raises:
        ConflictError: a newer run of a service was started. Nothing is lost.
        ArroyoStateError: see `JobRun`.
    """
    with _complete(between):
        if all(finished(store, pipeline) is not None for pipeline in pipelines):
            epochs = {pipeline.paths.job: 0 for pipeline in pipelines}
            return DataflowOutcome(rounds=0, epochs=epochs, ended=True)
    with contextlib.ExitStack() as held:
        # All start before the first step: what an epoch of another run left to be committed is
        # there then, whichever service reads it.
        chosen = options or DataflowOptions()
        told = _notes_between(between, chosen.on_epoch)
        runs: list[_Running] = []
        for pipeline in pipelines:
            run = LocalRun.start(pipeline, store)
            held.enter_context(contextlib.closing(run.job))
            runs.append(_Running(run, told))
        return _Rounds(runs, between, chosen).run()


def _notes_between(
    between: Sequence[SegmentSource], on_epoch: OnPipelineEpoch | None
) -> OnPipelineEpoch:
    """Tell topics between services what was read of them, then whoever asked."""

    def note_epoch(pipeline: Pipeline, checkpoint: Checkpoint) -> None:
        for source in between:
            source.note(pipeline.job, checkpoint)
        if on_epoch is not None:
            on_epoch(pipeline, checkpoint)

    return note_epoch


@contextlib.contextmanager
def _complete(between: Sequence[SegmentSource]) -> Iterator[None]:
    """While this lasts, topics between services end where they end now."""
    before = [source.complete for source in between]
    for source in between:
        source.complete = True
    try:
        yield
    finally:
        for source, complete in zip(between, before, strict=True):
            source.complete = complete


class _Running:
    """One service that runs."""

    def __init__(
        self,
        run: LocalRun,
        on_epoch: OnPipelineEpoch,
    ) -> None:
        self.pipeline = run.pipeline
        self._run = run
        self._on_epoch = on_epoch
        self.epochs = 0
        self.last = False
        """Whether its last epoch of this run is written."""

    @property
    def exhausted(self) -> bool:
        return self._run.exhausted

    def stop_requested(self) -> bool:
        """Whether `arroyo-state stop` asked for it."""
        return self._run.job.stop_requested()

    def step(self, *, last: bool = False) -> bool:
        """Write an epoch if something is new, or it is the last. Returns whether it did."""
        if self.last:
            return False
        done = self._run.step(then_stop=last, even_if_idle=last)
        if done is None:
            return False
        self.epochs += 1
        # Behind the end of all its sources an epoch is the last without anybody asking.
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
            wrote = self._round()
            count += wrote
            if not wrote and self._note_ends():
                continue
            if not wrote and (options.until_idle or self._ended()):
                break
            self._pause(max(due - time.monotonic(), 0.0 if wrote else options.idle_seconds))
        return self._finish(count)

    def _round(self) -> bool:
        wrote = False
        for run in self._runs:
            if self._stop():
                break
            wrote |= run.step()
        return wrote

    def _asked(self) -> bool:
        return self._stop() or any(run.stop_requested() for run in self._runs)

    def _ended(self) -> bool:
        """Whether nothing will ever come, once a round wrote nothing.

        In a circle of services nobody ends first: nothing new for any of them is the end.
        """
        if all(run.exhausted for run in self._runs):
            return True
        with _complete(self._between):
            return all(run.exhausted for run in self._runs)

    def _note_ends(self) -> bool:
        ended = {run.pipeline.job for run in self._runs if run.exhausted}
        return note_ends(self._between, ended)

    def _finish(self, rounds: int) -> DataflowOutcome:
        ended = self._ended()
        with _complete(self._between) if ended else contextlib.nullcontext():
            for run in self._runs:
                if not (ended and run.last):
                    run.step(last=True)
        for run in self._runs:
            run.stop_done()
        epochs = {run.pipeline.paths.job: run.epochs for run in self._runs}
        return DataflowOutcome(rounds=rounds, epochs=epochs, ended=ended)

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not self._stop():
            time.sleep(min(left, _STOP_POLL_SECONDS))
