"""A running Arroyo job, stopped with a checkpoint for a change of its state, and started again.

The job is started again in any case: a step that fails or takes too long ends the change, but does
not prevent the start. There is one exception. In the legacy layout an edit that is interrupted
while it is published leaves some operators with the new state and some with the old one. It is
undone before the start, and while that fails the job stays stopped, with its record.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Generic, Protocol, TypeVar

from arroyo_dagster.errors import ArroyoStateError, ConflictError, InputError, StorageError
from arroyo_dagster.state.codec.derived import encode
from arroyo_dagster.state.metadata.lease import Leased, LeasedOperation, LeaseOptions, lease
from arroyo_dagster.state.model.ids import PipelineId
from arroyo_dagster.state.model.job_facts import JobCondition, JobFacts
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.maintenance_window import (
    ChangeT,
    PlanT,
    WindowEnd,
    WindowOutcome,
    WindowRecord,
)
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
from arroyo_dagster.state.operations.compaction.controlled_job import JobControl
from arroyo_dagster.state.operations.compaction.rewrite_preconditions import check_restorable
from arroyo_dagster.state.operations.compaction.window_recovery import (
    JobWindowOptions,
    WindowedJob,
    not_done,
    read_window_record,
)
from arroyo_dagster.state.storage.store import ObjectStore

_GRACE_SECONDS = 30.0
_T = TypeVar("_T")
OptionsT = TypeVar("OptionsT", bound=LeasedOperation)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkOptions(LeasedOperation):
    """How the work of a window is done.

    Attributes:
        quiet_seconds: how long the objects of the job must not have changed; 0 for a job that the
            window itself has stopped.
        cancelled: whether the time for the work is over.
    """

    quiet_seconds: float
    cancelled: Callable[[], bool]

    def into(self, kind: type[OptionsT], **more: Any) -> OptionsT:
        """Return the options of the operation that does the work."""
        return kind(**{field.name: getattr(self, field.name) for field in fields(self)}, **more)


@dataclass(frozen=True, slots=True)
class NewParallelism:
    """The parallelism of all operators of a job, before and after a window."""

    before: int
    after: int


class WindowWork(Protocol[PlanT, ChangeT]):
    """A change of the state of a stopped Arroyo job, in place."""

    @property
    def edits(self) -> bool:
        """Whether a change that is published in part leaves a state that must not be started."""

    def plan(self, store: ObjectStore, directory: JobDirectory) -> PlanT:
        """Plan it, also while the job runs."""

    def is_empty(self, plan: PlanT) -> bool:
        """Whether a plan changes nothing, so that the job need not be stopped."""

    def run(
        self, store: ObjectStore, directory: JobDirectory, planned: PlanT, options: WorkOptions
    ) -> ChangeT:
        """Carry it out while the job is stopped.

        Args:
            planned: what was planned before the job was stopped, of an earlier epoch.
        """

    def summarize(self, change: ChangeT) -> str:
        """Return in a few words what was changed, or that nothing was."""

    def parallelism(self, store: ObjectStore, change: ChangeT) -> NewParallelism | None:
        """Return the parallelism at which the job is to start; None = as it was."""


class JobWindow(WindowedJob, Generic[PlanT, ChangeT]):
    """One window in progress."""

    def __init__(
        self,
        store: ObjectStore,
        paths: JobPaths,
        control: JobControl,
        options: JobWindowOptions,
        work: WindowWork[PlanT, ChangeT],
    ) -> None:
        super().__init__(store, paths, control, options)
        self._work = work

    def open(self, *, dry_run: bool) -> WindowOutcome[PlanT, ChangeT]:
        """Stop the job, change its state, and start it again; `run_window` has the rules."""
        if dry_run:
            return self._outcome(WindowEnd.DRY_RUN, plan=self._plan())
        with self.held() as held:
            left = read_window_record(self.store, self.paths)
            if left is not None:
                return not_done(self.paths, self.recovered(held, left))
            facts = self.job.ask()
            if facts.condition.at_rest:
                return self._at_rest()
            self._check_may_stop(facts)
            plan = self._plan()
            if self._work.is_empty(plan):
                return self._outcome(WindowEnd.NOTHING_TO_DO, plan=plan)
            # Before the job is stopped: it must not be down while another process maintains it.
            with self._maintained() as waited:
                if waited:
                    facts = self.job.ask()
                    self._check_may_stop(facts)
                return self._stopped_for_it(held, facts, plan)

    def _outcome(
        self,
        end: WindowEnd,
        *,
        plan: PlanT | None = None,
        change: ChangeT | None = None,
        downtime_seconds: float = 0.0,
    ) -> WindowOutcome[PlanT, ChangeT]:
        return WindowOutcome(
            end=end,
            steps=tuple(self.job.steps),
            plan=plan,
            change=change,
            problem=self.job.problem,
            facts=self.job.facts,
            downtime_seconds=downtime_seconds,
        )

    def _plan(self) -> PlanT:
        return self._work.plan(self.store, self.job.directory)

    @contextmanager
    def _maintained(self) -> Iterator[bool]:
        """Hold the lease of the job's maintenance during the window; yield whether it waited."""
        closes, limits = self.options.closes_at_micros, self.options.limits
        wait_seconds = self.options.lease_wait_seconds
        if closes is not None:
            left = self.job.seconds_left(closes) - limits.stop - limits.start
            wait_seconds = max(0.0, min(wait_seconds, left))
        waits: list[float] = []

        def sleep(seconds: float) -> None:
            waits.append(seconds)
            self.options.sleep(seconds)

        options = LeaseOptions(
            wait_seconds=wait_seconds,
            clock=self.options.clock,
            sleep=sleep,
            on_event=self.job.did,
        )
        store = self.store
        with lease(store, self.paths, self.options.owner, options) as self.store:
            try:
                yield bool(waits)
            finally:
                self.store = store

    def _check_may_stop(self, facts: JobFacts) -> None:
        if facts.condition is not JobCondition.RUNNING or facts.pipeline is None:
            raise InputError(
                f"a window needs a running job; this job is {facts.state}",
                job=self.paths.root,
                next_step="wait until it runs",
            )
        closes, limits = self.options.closes_at_micros, self.options.limits
        needed = limits.stop + limits.start
        left = None if closes is None else self.job.seconds_left(closes)
        if left is not None and left < needed:
            raise InputError(
                f"the window closes in {max(0, left):.0f} s, but to stop the job and start it "
                f"again may take {needed:.0f} s",
                job=self.paths.root,
                next_step="start earlier, or reduce the limits of the steps; the job was not "
                "touched",
            )

    def _at_rest(self) -> WindowOutcome[PlanT, ChangeT]:
        """Change the state of a job that was stopped on purpose, and leave it stopped."""
        self.job.did("the job is already at rest: its state is changed, and it is not started")
        limits = self.options.limits
        plan = self._plan()
        change = self._change(plan, self.job.after(limits.rewrite), limits.quiet)
        return self._outcome(WindowEnd.AT_REST, plan=plan, change=change)

    # ---- a job that is stopped for the window ----------------------------------------------------

    def _stopped_for_it(
        self, held: Leased, facts: JobFacts, plan: PlanT
    ) -> WindowOutcome[PlanT, ChangeT]:
        assert facts.pipeline is not None
        self._leave_record(held, facts)
        began = self.options.clock()
        change: ChangeT | None = None
        new: NewParallelism | None = None
        started = undone = False
        try:
            change = self._between(facts, plan)
            # A start as before loads the same rows, so what fails here keeps the parallelism.
            new = None if change is None else self._work.parallelism(self.store, change)
        except ArroyoStateError as error:
            self.job.failed("given up", error)
        finally:
            # Also on an interrupt of this process: that is no reason to leave the job stopped.
            started = self.start(
                facts.pipeline,
                edits=self._work.edits,
                parallelism=None if new is None else new.after,
            )
        if not started and new is not None:
            started = self._start_as_before(facts.pipeline, new)
        elif not started and change is not None and change.published:
            started = undone = self._restore_metadata_and_start(facts.pipeline)
        if started:
            self.forget(held)
        return self._outcome(
            _end(started, undone or self.undone, change is not None and change.published),
            plan=plan,
            change=change,
            downtime_seconds=-self.job.seconds_left(began),
        )

    def _leave_record(self, held: Leased, facts: JobFacts) -> None:
        assert facts.pipeline is not None
        record = WindowRecord(
            pipeline=facts.pipeline,
            job=self.paths.job,
            run_id=facts.run_id,
            owner=self.options.owner,
            opened_at_micros=self.options.clock(),
            edits=self._work.edits,
        )
        held.put(self.paths.window, encode(record))
        self.job.did(f"wrote the window's record; the job runs as {facts.run_id}")

    def _between(self, before: JobFacts, plan: PlanT) -> ChangeT | None:
        """Do all steps from the request to stop until before the start."""
        assert before.pipeline is not None
        limits = self.options.limits
        stopped = self.job.stop(before.pipeline, limits.stop)
        if stopped.run_id != before.run_id:
            raise ConflictError(
                f"the job was started by someone else: it is now run {stopped.run_id}",
                job=self.paths.root,
                retryable=True,
            )
        if stopped.condition is not JobCondition.STOPPED:
            raise ConflictError(
                f"the job did not stop, its status is {stopped.state}: "
                f"{stopped.failure or 'no reason given'}",
                job=self.paths.root,
                next_step="check it in Arroyo",
            )
        until = self.job.after(limits.rewrite)
        if self.options.closes_at_micros is not None:
            closes = self.options.closes_at_micros - int(limits.start * 1e6)
            until = min(until, closes)
        # The job was observed coming to rest, so there is no unknown stop time to wait for. A
        # cleanup that Arroyo may still run reads only metadata of older epochs; if it changes an
        # object meanwhile, nothing is published (arroyo-state.md 9.6).
        change = self._change(plan, until, quiet_seconds=0.0)
        if change.published:
            self._verify(change)
        return change

    def _change(self, plan: PlanT, until_micros: int, quiet_seconds: float) -> ChangeT:
        """Do the work within the time limit; work that hangs is abandoned and can change nothing
        more.

        Raises:
            ConflictError: it did not end in time.
        """
        over = threading.Event()
        how = WorkOptions(
            owner=self.options.owner,
            quiet_seconds=quiet_seconds,
            lease_wait_seconds=self.options.lease_wait_seconds,
            on_lease=self.job.did,
            clock=self.options.clock,
            sleep=self.options.sleep,
            cancelled=lambda: over.is_set() or self.job.seconds_left(until_micros) <= 0,
        )

        def work() -> ChangeT:
            change = self._work.run(self.store, self.job.directory, plan, how)
            self.options.on_change(change)
            return change

        change = _within(
            work,
            max(0.0, self.job.seconds_left(until_micros)) + _GRACE_SECONDS,
            over,
        )
        self.job.did(self._work.summarize(change))
        return change

    def _verify(self, change: ChangeT) -> None:
        """Verify what the job will restore; restore the original metadata if it does not pass."""
        try:
            check_restorable(self.store, self.paths, change.plan.epoch, self.options.verify_level)
            self.job.did(f"verified at level {self.options.verify_level}")
        except StorageError as error:
            self.job.failed("not verified", error)
        except ArroyoStateError as error:
            self.job.failed("the changed epoch does not pass verification", error)
            self.undone = self.restore_metadata()

    def _start_as_before(self, pipeline: PipelineId, new: NewParallelism) -> bool:
        """Start a job at its earlier parallelism, which loads the same rows from the same files."""
        facts = self.job.facts
        why = "Arroyo did not answer" if facts is None else facts.failure or facts.state
        self.job.problem = None  # "start it by hand" is no longer the next step
        self.job.failed(
            f"not started at parallelism {new.after}",
            ConflictError(
                f"the job did not start at parallelism {new.after} ({why}); it is started at "
                f"{new.before} again, which loads the same rows",
                job=self.paths.root,
                next_step="check that Arroyo has a free task slot for each subtask",
            ),
        )
        return self.job.start(pipeline, self.options.limits.start, parallelism=new.before)

    def _restore_metadata_and_start(self, pipeline: PipelineId) -> bool:
        """Restore the original metadata of a job that failed after the change, and start it."""
        if self.job.facts is None or self.job.facts.condition is not JobCondition.FAILED:
            return False
        self.job.failed(
            "failed after the change",
            ConflictError(
                f"the job failed after its state was changed: {self.job.facts.failure}",
                job=self.paths.root,
                next_step="report it, with the job's logs",
            ),
        )
        return self.restore_metadata() and self.job.start(pipeline, self.options.limits.start)


def _end(started: bool, undone: bool, published: bool) -> WindowEnd:
    if not started:
        return WindowEnd.NOT_STARTED
    if undone:
        return WindowEnd.UNDONE
    return WindowEnd.REWRITTEN if published else WindowEnd.KEPT


def _within(work: Callable[[], _T], seconds: float, over: threading.Event) -> _T:
    """Run `work` in a thread that may be abandoned.

    Raises:
        ConflictError: it did not end in time; `over` is then set.
    """
    done: list[_T] = []
    failed: list[BaseException] = []

    def do() -> None:
        try:
            done.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=do, name="arroyo-rewrite", daemon=True)
    thread.start()
    try:
        thread.join(seconds)
    except BaseException:  # an interrupt: the job must not start while its state is being written
        over.set()
        thread.join(_GRACE_SECONDS)
        raise
    finally:
        over.set()
    if failed:
        raise failed[0]
    if not done:
        raise ConflictError(
            "the rewrite hangs and was abandoned: it can no longer change anything",
            retryable=True,
            next_step="check the store; everything published so far can be restored",
        )
    return done[0]
