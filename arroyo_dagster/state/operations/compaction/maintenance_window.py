"""Maintenance window: stop a running Arroyo job with a checkpoint, rewrite its state, start it
again.

The job is started again in any case: a step that fails or takes too long ends the rewrite, but does
not prevent the start. Before the job is stopped, a record is written beside it, which is deleted
once the job runs again. If this process dies, any process that finds the record without a lease
starts the job (`recover_window`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from arroyo_dagster.errors import (
    ArroyoStateError,
    ConflictError,
    FormatError,
    InputError,
    NotFoundError,
    StorageError,
)
from arroyo_dagster.state.codec.maintenance_records import (
    decode_window_record,
    encode_window_record,
)
from arroyo_dagster.state.metadata.lease import Leased, LeaseOptions, lease, newest_lease
from arroyo_dagster.state.model.clock import Clock, wall_clock
from arroyo_dagster.state.model.compaction import CompactionSettings
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
from arroyo_dagster.state.model.rewrite import RewriteOutcome, RewritePlan
from arroyo_dagster.state.operations.compaction.controlled_job import (
    ControlledJob,
    JobControl,
    means_to_run,
)
from arroyo_dagster.state.operations.compaction.rewrite import (
    RewriteOptions,
    RunRewrites,
    plan_rewrite,
    rewrite_here,
    run_rewrite,
)
from arroyo_dagster.state.operations.compaction.rewrite_preconditions import check_restorable
from arroyo_dagster.state.operations.compaction.rewrite_undo import UndoOptions, run_undo
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore

_GRACE_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowOptions(WindowSteps):
    """Options of a window.

    Attributes:
        settings: which files are rewritten, and how.
        closes_at_micros: the time by which the job must run again, by `clock`; None = no such time.
        run: executes the parts of the rewrite.
        clock: microseconds since the Unix epoch.
        on_step: called with each step when it is done.
        lease_wait_seconds: how long to wait, before the job is stopped, for a process that
            maintains it.
    """

    settings: CompactionSettings | None = None
    closes_at_micros: int | None = None
    owner: str = "arroyo-state compact window"
    run: RunRewrites = rewrite_here
    clock: Clock = wall_clock
    sleep: Callable[[float], None] = time.sleep
    on_step: Callable[[WindowStep], None] = lambda step: None
    lease_wait_seconds: float = 0.0


# ---- the window ----------------------------------------------------------------------------------


def run_window(
    store: ObjectStore,
    paths: JobPaths,
    control: JobControl,
    options: WindowOptions | None = None,
    *,
    dry_run: bool = False,
) -> WindowOutcome:
    """Stop a running Arroyo job with a checkpoint, rewrite its state, and start it again.

    A job that was stopped before is rewritten and stays stopped. A job that an earlier window left
    stopped is started again, and nothing else is done. A job with nothing to rewrite is not
    touched. If the job does not run from the rewritten state, the original metadata is restored.

    Args:
        control: Arroyo's own API; no other source is accepted here.
        dry_run: plan only, and change nothing.

    Returns:
        The outcome. `started` is False if it is not certain that the job runs; its record then
        stays, and `recover_window` starts the job later.

    Raises:
        InputError: the job is neither running nor at rest, or the window closes too soon.
        LeaseHeldError: another process maintains the job, or holds its window; the job was not
            touched.
        NotFoundError, FormatError, StorageError: before the job was touched.
    """
    window = _Window(store, paths, control, options or WindowOptions())
    if dry_run:
        return window.outcome(WindowEnd.DRY_RUN, plan=window.plan())
    with lease(
        store,
        paths,
        window.options.owner,
        LeaseOptions(
            directory=paths.windows,
            wait_seconds=window.lease_wait_seconds(),
            clock=window.options.clock,
            sleep=window.options.sleep,
        ),
    ) as held:
        left = read_window_record(store, paths)
        if left is not None:
            return window.recovered(held, left)
        facts = window.job.ask()
        if facts.condition.at_rest:
            return window.at_rest()
        window.check_may_stop(facts)
        plan = window.plan()
        if not plan.tables:
            return window.outcome(WindowEnd.NOTHING_TO_DO, plan=plan)
        # Before the job is stopped: it must not be down while another process maintains it.
        with window.maintained() as waited:
            if waited:
                facts = window.job.ask()
                window.check_may_stop(facts)
            return window.stopped_for_it(held, facts, plan)


def recover_window(
    store: ObjectStore,
    paths: JobPaths,
    control: JobControl,
    options: WindowOptions | None = None,
) -> WindowOutcome | None:
    """Start a job that a window left stopped because its process died.

    Returns:
        The outcome; None if no window left the job stopped.

    Raises:
        ConflictError: the window is held by another process, so it has not ended.
    """
    if read_window_record(store, paths) is None:
        return None
    window = _Window(store, paths, control, options or WindowOptions())
    with lease(
        store,
        paths,
        window.options.owner,
        LeaseOptions(
            directory=paths.windows,
            wait_seconds=window.lease_wait_seconds(),
            clock=window.options.clock,
            sleep=window.options.sleep,
        ),
    ) as held:
        left = read_window_record(store, paths)
        return None if left is None else window.recovered(held, left)


def interrupted_windows(
    store: ObjectStore,
    jobs: Iterable[JobPaths],
    *,
    clock: Clock = wall_clock,
) -> list[JobPaths]:
    """Return the jobs whose window was interrupted: its record exists, and its lease is not held.

    Costs two requests per job; a record that cannot be read counts.
    """

    def cut_off(paths: JobPaths) -> bool:
        return store.head(paths.window) is not None and not _is_held(store, paths, clock())

    wanted = list(jobs)
    found = concurrently(cut_off, wanted)
    return [paths for paths, one in zip(wanted, found, strict=True) if one]


def _is_held(store: ObjectStore, paths: JobPaths, now_micros: int) -> bool:
    """Whether a process holds the window. Writes nothing, and therefore uses this machine's time. A
    caller that acts on the answer first takes the lease, which uses the store's time.
    """
    try:
        found = newest_lease(store, paths.windows)
    except FormatError:
        return False
    return found is not None and found.held_until(now_micros, now_micros) is not None


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


class _Window:
    """One window in progress."""

    def __init__(
        self, store: ObjectStore, paths: JobPaths, control: JobControl, options: WindowOptions
    ) -> None:
        self.store = store
        self.paths = paths
        self.options = options
        self.job = ControlledJob(
            paths, control, clock=options.clock, sleep=options.sleep, on_step=options.on_step
        )

    def outcome(
        self,
        end: WindowEnd,
        *,
        plan: RewritePlan | None = None,
        rewrite: RewriteOutcome | None = None,
        downtime_seconds: float = 0.0,
    ) -> WindowOutcome:
        return WindowOutcome(
            end=end,
            steps=tuple(self.job.steps),
            plan=plan,
            rewrite=rewrite,
            problem=self.job.problem,
            facts=self.job.facts,
            downtime_seconds=downtime_seconds,
        )

    def lease_wait_seconds(self) -> float:
        """Return how long to wait for the lease: longer if an interrupted window has a record."""
        if read_window_record(self.store, self.paths) is None:
            return 0.0
        if _is_held(self.store, self.paths, self.options.clock()):
            self.job.did("waiting until the lease of an earlier window is free or expires")
        return EXPIRED_SECONDS

    def plan(self) -> RewritePlan:
        return plan_rewrite(self.store, self.paths, self.job.directory, self.options.settings)

    @contextmanager
    def maintained(self) -> Iterator[bool]:
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

    def check_may_stop(self, facts: JobFacts) -> None:
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

    # ---- a job that needs no start ---------------------------------------------------------------

    def at_rest(self) -> WindowOutcome:
        """Rewrite a job that was stopped on purpose, and leave it stopped."""
        self.job.did("the job is already at rest: it is rewritten, and not started")
        limits = self.options.limits
        found = self.rewrite(self.job.after(limits.rewrite), limits.quiet)
        return self.outcome(WindowEnd.AT_REST, plan=found.plan, rewrite=found)

    def recovered(self, held: Leased, left: WindowRecord | FormatError) -> WindowOutcome:
        """Start a job that an interrupted window left stopped."""
        facts = self.job.ask()
        run = left.run_id if isinstance(left, WindowRecord) else None
        if run is not None and facts.run_id is not None and facts.run_id > run:
            self.job.did(
                "an earlier window was interrupted; the job has been started since, as "
                f"{facts.run_id}"
            )
            self.forget(held)
            return self.outcome(WindowEnd.RECOVERED)
        self.job.did("an earlier window was interrupted: the job is started again")
        pipeline = facts.pipeline or (left.pipeline if isinstance(left, WindowRecord) else None)
        down_since = _down_since(facts, left)
        limit = self.options.limits.start
        started = pipeline is not None and self.job.start(pipeline, limit)
        end = WindowEnd.RECOVERED if started else WindowEnd.NOT_STARTED
        if started:
            self.forget(held)
        down = 0.0 if down_since is None else max(0.0, -self.job.seconds_left(down_since))
        return self.outcome(end, downtime_seconds=down)

    # ---- a job that is stopped for the window ----------------------------------------------------

    def stopped_for_it(self, held: Leased, facts: JobFacts, plan: RewritePlan) -> WindowOutcome:
        assert facts.pipeline is not None
        self.leave_record(held, facts)
        began = self.options.clock()
        limits = self.options.limits
        rewrite: RewriteOutcome | None = None
        started = undone = False
        try:
            rewrite = self.between(facts)
        except ArroyoStateError as error:
            self.job.failed("given up", error)
        finally:
            # Also on an interrupt of this process: that is no reason to leave the job stopped.
            started = self.job.start(facts.pipeline, limits.start)
        if not started and rewrite is not None and rewrite.published:
            started = undone = self.restore_metadata_and_start(facts.pipeline)
        if started:
            self.forget(held)
        return self.outcome(
            _end(started, undone or self.undone, rewrite),
            plan=plan,
            rewrite=rewrite,
            downtime_seconds=-self.job.seconds_left(began),
        )

    undone = False

    def leave_record(self, held: Leased, facts: JobFacts) -> None:
        assert facts.pipeline is not None
        record = WindowRecord(
            pipeline=facts.pipeline,
            job=self.paths.job,
            run_id=facts.run_id,
            owner=self.options.owner,
            opened_at_micros=self.options.clock(),
        )
        held.put(self.paths.window, encode_window_record(record))
        self.job.did(f"wrote the window's record; the job runs as {facts.run_id}")

    def forget(self, held: Leased) -> None:
        # If the delete fails, a later call finds and deletes the record while the job runs.
        with contextlib.suppress(StorageError, ConflictError):
            held.delete_many([self.paths.window])

    def between(self, before: JobFacts) -> RewriteOutcome | None:
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
        found = self.rewrite(until, quiet_seconds=0.0)
        if found.published:
            self.verify(found)
        return found

    def rewrite(self, until_micros: int, quiet_seconds: float) -> RewriteOutcome:
        """Rewrite within the time limit; a rewrite that hangs is abandoned and can change nothing
        more.

        Raises:
            ConflictError: it did not end in time.
        """
        over = threading.Event()
        options = self.options

        def rewrite() -> RewriteOutcome:
            how = RewriteOptions(
                run=options.run,
                owner=options.owner,
                quiet_seconds=quiet_seconds,
                lease_wait_seconds=options.lease_wait_seconds,
                on_lease=self.job.did,
                clock=options.clock,
                sleep=options.sleep,
                cancelled=lambda: over.is_set() or self.job.seconds_left(until_micros) <= 0,
            )
            return run_rewrite(self.store, self.paths, self.job.directory, options.settings, how)

        found = _within(
            rewrite, max(0.0, self.job.seconds_left(until_micros)) + _GRACE_SECONDS, over
        )
        files = f"{found.plan.before.files} files became {found.after.files}"
        self.job.did(f"rewritten: {files}" if found.published else "nothing was rewritten")
        return found

    def verify(self, found: RewriteOutcome) -> None:
        """Verify what the job will restore; restore the original metadata if it does not pass."""
        try:
            check_restorable(self.store, self.paths, found.plan.epoch, self.options.verify_level)
            self.job.did(f"verified at level {self.options.verify_level}")
        except StorageError as error:
            self.job.failed("not verified", error)
        except ArroyoStateError as error:
            self.job.failed("the rewritten epoch does not pass verification", error)
            self.undone = self.restore_metadata()

    def restore_metadata(self) -> bool:
        """Restore the job's original metadata, and return whether that was done."""
        try:
            options = UndoOptions(
                owner=self.options.owner,
                lease_wait_seconds=EXPIRED_SECONDS,
                clock=self.options.clock,
                sleep=self.options.sleep,
            )
            undone = run_undo(self.store, self.paths, self.job.directory, options)
        except ArroyoStateError as error:
            self.job.failed("could not restore the original metadata", error)
            return False
        self.job.did(f"restored the original content of {len(undone.objects)} metadata objects")
        return undone.done

    def restore_metadata_and_start(self, pipeline: PipelineId) -> bool:
        """Restore the original metadata of a job that failed after the rewrite, and start it."""
        if self.job.facts is None or self.job.facts.condition is not JobCondition.FAILED:
            return False
        self.job.failed(
            "failed after the rewrite",
            ConflictError(
                f"the job failed after its state was rewritten: {self.job.facts.failure}",
                job=self.paths.root,
                next_step="report it, with the job's logs",
            ),
        )
        return self.restore_metadata() and self.job.start(pipeline, self.options.limits.start)


def _down_since(facts: JobFacts, left: WindowRecord | FormatError) -> int | None:
    """Return when the job was asked to stop, in microseconds; None if it runs, or if unknown."""
    if facts.condition is JobCondition.RUNNING and means_to_run(facts):
        return None
    if isinstance(left, WindowRecord):
        return left.opened_at_micros
    return facts.finish_time_micros


def _end(started: bool, undone: bool, rewrite: RewriteOutcome | None) -> WindowEnd:
    if not started:
        return WindowEnd.NOT_STARTED
    if undone:
        return WindowEnd.UNDONE
    published = rewrite is not None and rewrite.published
    return WindowEnd.REWRITTEN if published else WindowEnd.KEPT


def _within(
    work: Callable[[], RewriteOutcome], seconds: float, over: threading.Event
) -> RewriteOutcome:
    """Run `work` in a thread that may be abandoned.

    Raises:
        ConflictError: it did not end in time; `over` is then set.
    """
    done: list[RewriteOutcome] = []
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
