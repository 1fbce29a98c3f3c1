"""Start a job that a maintenance window has stopped: at the window's end, or after it was
interrupted.

Before a job is stopped, a record is written beside it, which is deleted once the job runs again. If
the process dies in between, any process that finds the record without a lease starts the job
(`recover_window`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from arroyo_dagster.errors import (
    ArroyoStateError,
    ConflictError,
    FormatError,
    NotFoundError,
    StorageError,
)
from arroyo_dagster.state.codec.maintenance_records import decode_window_record
from arroyo_dagster.state.metadata.lease import (
    Leased,
    LeasedOperation,
    LeaseOptions,
    lease,
    newest_lease,
)
from arroyo_dagster.state.model.clock import Clock, wall_clock
from arroyo_dagster.state.model.ids import PipelineId
from arroyo_dagster.state.model.job_facts import JobCondition, JobFacts
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.leases import EXPIRED_SECONDS
from arroyo_dagster.state.model.maintenance_window import (
    WindowEnd,
    WindowOutcome,
    WindowRecord,
    WindowStep,
    WindowSteps,
)
from arroyo_dagster.state.operations.compaction.controlled_job import (
    POLL_SECONDS,
    ControlledJob,
    JobControl,
    means_to_run,
)
from arroyo_dagster.state.operations.undo import (
    UndoOptions,
    changed_since,
    has_unfinished_edit,
    run_undo,
)
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore


@dataclass(frozen=True, slots=True, kw_only=True)
class JobWindowOptions(LeasedOperation, WindowSteps):
    """Options of a window, whatever is done in it.

    Attributes:
        closes_at_micros: the time by which the job must run again, by `clock`; None = no such time.
        on_step: called with each step when it is done.
        on_change: called with what was changed, in a thread, before anything else follows; for a
            caller that is interrupted afterwards.
    """

    closes_at_micros: int | None = None
    owner: str = "arroyo-state compact window"
    on_step: Callable[[WindowStep], None] = lambda step: None
    on_change: Callable[[Any], None] = lambda change: None


def recover_window(
    store: ObjectStore,
    paths: JobPaths,
    control: JobControl,
    options: JobWindowOptions | None = None,
) -> WindowOutcome[Any, Any] | None:
    """Start a job that a window left stopped because its process died.

    An edit that the window left half published is undone first.

    Returns:
        The outcome; None if no window left the job stopped.

    Raises:
        ConflictError: the window is held by another process, so it has not ended.
    """
    if read_window_record(store, paths) is None:
        return None
    job = WindowedJob(store, paths, control, options or JobWindowOptions())
    with job.held() as held:
        left = read_window_record(store, paths)
        return None if left is None else job.recovered(held, left)


def interrupted_windows(
    store: ObjectStore,
    jobs: Iterable[JobPaths],
    *,
    clock: Clock = wall_clock,
) -> list[JobPaths]:
    """Return the jobs whose window was interrupted: its record exists, and its lease is not held.

    Costs two requests per job; a record that does not decode counts. Of a job that the store
    denies, nothing is known: it is left out.
    """

    def cut_off(paths: JobPaths) -> bool:
        try:
            return store.head(paths.window) is not None and not _is_held(store, paths, clock())
        except StorageError:
            return False

    all_jobs = list(jobs)
    interrupted = concurrently(cut_off, all_jobs)
    return [paths for paths, cut in zip(all_jobs, interrupted, strict=True) if cut]


def _is_held(store: ObjectStore, paths: JobPaths, now_micros: int) -> bool:
    """Whether a process holds the window. Writes nothing, and therefore uses this machine's time. A
    caller that acts on the answer first takes the lease, which uses the store's time.
    """
    try:
        newest = newest_lease(store, paths.windows)
    except FormatError:
        return False
    return newest is not None and newest.held_until(now_micros, now_micros) is not None


def read_window_record(store: ObjectStore, paths: JobPaths) -> WindowRecord | FormatError | None:
    """Read the record of a window that has not ended; None if there is none.

    A record that does not decode is returned as its error, because a window left that record too.
    """
    try:
        return decode_window_record(store.read(paths.window), paths.window)
    except NotFoundError:
        return None
    except FormatError as error:
        return error


class WindowedJob:
    """A job that a window stops or has stopped, and how it comes to run again.

    Attributes:
        undone: whether the state from before the window was restored.
    """

    def __init__(
        self, store: ObjectStore, paths: JobPaths, control: JobControl, options: JobWindowOptions
    ) -> None:
        self.store = store
        self.paths = paths
        self.options = options
        self.undone = False
        self.job = ControlledJob(
            paths, control, clock=options.clock, sleep=options.sleep, on_step=options.on_step
        )

    @contextmanager
    def held(self) -> Iterator[Leased]:
        """Hold the lease of the job's windows.

        Raises:
            LeaseHeldError: another process holds it.
        """
        options = LeaseOptions(
            directory=self.paths.windows,
            wait_seconds=self._lease_wait_seconds(),
            clock=self.options.clock,
            sleep=self.options.sleep,
        )
        with lease(self.store, self.paths, self.options.owner, options) as held:
            yield held

    def _lease_wait_seconds(self) -> float:
        """Return how long to wait for the lease: longer if an interrupted window has a record."""
        if read_window_record(self.store, self.paths) is None:
            return 0.0
        if _is_held(self.store, self.paths, self.options.clock()):
            self.job.did("waiting until the lease of an earlier window is free or expires")
        return EXPIRED_SECONDS

    def recovered(self, held: Leased, left: WindowRecord | FormatError) -> WindowOutcome[Any, Any]:
        """Start a job that an interrupted window left stopped."""
        facts = self.job.ask()
        run = left.run_id if isinstance(left, WindowRecord) else None
        if run is not None and facts.run_id is not None and facts.run_id > run:
            self.job.did(
                "an earlier window was interrupted; the job has been started since, as "
                f"{facts.run_id}"
            )
            self.forget(held)
            self._note_change(left)
            return self._ended(WindowEnd.RECOVERED, None)
        self.job.did("an earlier window was interrupted: the job is started again")
        pipeline = facts.pipeline or (left.pipeline if isinstance(left, WindowRecord) else None)
        down_since = _down_since(facts, left)
        edits = not isinstance(left, WindowRecord) or left.edits
        started = pipeline is not None and self.start(pipeline, edits=edits)
        if started:
            self.forget(held)
        self._note_change(left)
        return self._ended(WindowEnd.RECOVERED if started else WindowEnd.NOT_STARTED, down_since)

    def _note_change(self, left: WindowRecord | FormatError) -> None:
        """Log whether the interrupted window had changed the state of the job."""
        text = "whether the interrupted window has changed the state is not known"
        with contextlib.suppress(ArroyoStateError):
            if isinstance(left, WindowRecord):
                changed = changed_since(self.store, self.paths, left.opened_at_micros)
                text = "the change of the interrupted window was not done"
                if changed is not None:
                    change = changed.operation or "compaction"
                    text = (
                        f"its {change} was done at epoch {changed.epoch}, before it was interrupted"
                    )
        self.job.did(text)

    def _ended(self, end: WindowEnd, down_since: int | None) -> WindowOutcome[Any, Any]:
        down = 0.0 if down_since is None else max(0.0, -self.job.seconds_left(down_since))
        return WindowOutcome(
            end=end,
            steps=tuple(self.job.steps),
            problem=self.job.problem,
            facts=self.job.facts,
            downtime_seconds=down,
        )

    def forget(self, held: Leased) -> None:
        """Delete the record of the window."""
        # If the delete fails, a later call finds and deletes the record while the job runs.
        with contextlib.suppress(StorageError, ConflictError):
            held.delete_many([self.paths.window])

    def start(self, pipeline: PipelineId, *, edits: bool, parallelism: int | None = None) -> bool:
        """Start the job until the time limit; return whether it certainly runs.

        Args:
            parallelism: as of `ControlledJob.start`; left out if an edit is undone.
            edits: undo an edit that is half published first; while that fails, the job stays
                stopped, as it would restore old state beside new one.
        """
        limit = self.options.limits.start
        if edits and not self._repair(self.job.after(limit)):
            return False
        return self.job.start(pipeline, limit, parallelism=None if self.undone else parallelism)

    def _repair(self, until_micros: int) -> bool:
        """Undo an edit of which only some objects were written; return whether none is left."""
        while True:
            try:
                if not has_unfinished_edit(self.store, self.paths):
                    return True
                self.job.did("the edit was published in part: it is undone before the start")
                self.undone = self._undo()
                if not self.undone:
                    raise NotFoundError("the record that undoes it is lost", job=self.paths.root)
            except ArroyoStateError as error:
                if self.job.seconds_left(until_micros) <= 0:
                    self.job.failed("not started", _half_edited(self.paths, error))
                    return False
                self.options.sleep(POLL_SECONDS)

    def restore_metadata(self) -> bool:
        """Restore the job's original metadata, and return whether that was done."""
        try:
            return self._undo()
        except ArroyoStateError as error:
            self.job.failed("could not restore the original metadata", error)
            return False

    def _undo(self) -> bool:
        options = UndoOptions(
            owner=self.options.owner,
            lease_wait_seconds=EXPIRED_SECONDS,
            clock=self.options.clock,
            sleep=self.options.sleep,
        )
        undone = run_undo(self.store, self.paths, self.job.directory, options)
        self.job.did(f"restored the original content of {len(undone.objects)} metadata objects")
        return undone.done


def not_done(paths: JobPaths, outcome: WindowOutcome[Any, Any]) -> WindowOutcome[Any, Any]:
    """Return the outcome of a call that wanted a change, and only ended an earlier window."""
    if outcome.problem is not None or not outcome.started:
        return outcome
    problem = ConflictError(
        "this call changed nothing: it ended an earlier window that was interrupted, and "
        + outcome.steps[-1].did,
        job=paths.root,
        retryable=True,
        next_step="if the change is still wanted, run the command again",
    )
    return replace(outcome, problem=problem)


def _half_edited(paths: JobPaths, error: ArroyoStateError) -> ConflictError:
    return ConflictError(
        f"an edit is published in part and cannot be undone yet ({error.message}): the job would "
        "restore old state beside new one",
        job=paths.root,
        next_step=f"undo it with `arroyo-state undo {paths.root} --yes`, then start the job",
    )


def _down_since(facts: JobFacts, left: WindowRecord | FormatError) -> int | None:
    """Return when the job was asked to stop, in microseconds; None if it runs, or if unknown."""
    if facts.condition is JobCondition.RUNNING and means_to_run(facts):
        return None
    if isinstance(left, WindowRecord):
        return left.opened_at_micros
    return facts.finish_time_micros
