"""Serve the jobs of a batch in threads of one process, and one Spark session.

Metadata of many small jobs is read, planned and merged at the same time. Only the main thread
calls Dagster: it writes the lines that threads log as they come, and yields the events of each job
in the order of the keys. An interrupt of the main thread interrupts every job, and each releases
its lease; see `state.metadata.interrupts`.
"""

import contextvars
import queue
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import dagster as dg

from arroyo_dagster.errors import ArroyoStateError
from arroyo_dagster.orchestration.directory import ArroyoDirectory
from arroyo_dagster.orchestration.resources import ArroyoStateStore
from arroyo_dagster.orchestration.runners import MaintenanceRunner
from arroyo_dagster.orchestration.skips import SkippedError
from arroyo_dagster.redaction import redact_text

if TYPE_CHECKING:
    from arroyo_dagster.state.metadata.interrupts import Interrupts
    from arroyo_dagster.state.storage.store import ObjectStore

JobEvent = dg.MaterializeResult | dg.AssetCheckResult | dg.AssetObservation  # type: ignore[type-arg]

_UNREPORTED = 4
"""The results of so many jobs per thread may wait for a slow job before them."""

_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Tools:
    """The resources that the events of a job are made with."""

    store: ArroyoStateStore
    runner: MaintenanceRunner
    directory: ArroyoDirectory


class JobContext:
    """The context of a batch, presented as the context of a run of one job.

    Attributes:
        more_jobs_follow: whether this job is not the batch's last.
        lease_wait_seconds: how long to wait for the lease on the job; None = as configured.
        log: collects lines, which the main thread writes.
    """

    has_partition_key = True
    has_partition_key_range = False

    def __init__(
        self,
        context: dg.OpExecutionContext,
        key: str,
        *,
        log: Any,
        more_jobs_follow: bool = False,
        lease_wait_seconds: float | None = None,
        asset: dg.AssetsDefinition | None = None,
    ) -> None:
        self.partition_key = key
        self.log = log
        self.more_jobs_follow = more_jobs_follow
        self.lease_wait_seconds = lease_wait_seconds
        self.partition_keys = [key]
        self.selected_asset_keys = set() if asset is None else set(asset.keys)
        self.selected_asset_check_keys = set() if asset is None else set(asset.check_keys)
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def of(self, asset: dg.AssetsDefinition) -> "JobContext":
        """Return the same context for the step of an asset."""
        return JobContext(
            self._context,
            self.partition_key,
            log=self.log,
            more_jobs_follow=self.more_jobs_follow,
            lease_wait_seconds=self.lease_wait_seconds,
            asset=asset,
        )


class JobLog:
    """The log of one job: collects lines, with the job before each."""

    def __init__(self, key: str, lines: "queue.SimpleQueue[tuple[str, str]]") -> None:
        self._key = key
        self._lines = lines

    def info(self, text: str) -> None:
        """Log what happens."""
        self._put("info", text)

    def warning(self, text: str) -> None:
        """Log what a person should know."""
        self._put("warning", text)

    def error(self, text: str) -> None:
        """Log what is wrong."""
        self._put("error", text)

    def _put(self, level: str, text: str) -> None:
        named = text if text.startswith(self._key) else f"{self._key}: {text}"
        self._lines.put((level, named))


class _ThreadStore:
    """The store of a batch for one of its threads: its calls deliver the thread's interrupt."""

    def __init__(self, store: ArroyoStateStore) -> None:
        self._store = store

    def writable(self) -> "ObjectStore":
        from arroyo_dagster.state.metadata.interrupts import Interruptible

        return Interruptible(self._store.writable())

    def reading(self) -> "ObjectStore":
        from arroyo_dagster.state.storage.wrappers import WriteProtected

        return WriteProtected(self.writable())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@dataclass
class ServedJob:
    """The outcome of one job.

    Attributes:
        error: why it failed, or a `SkippedError`; None if it is done or was interrupted.
        left: whether it was not started, because the budget was used up.
    """

    key: str
    events: list[JobEvent] = field(default_factory=list)
    error: Exception | None = None
    left: bool = False
    seconds: float = 0.0


class JobPool:
    """Serves the jobs of one batch.

    Args:
        events: does the work for one job and yields its events.
        config: of the batch.
    """

    def __init__(
        self,
        events: Callable[[Any, Any, Any], Iterator[Any]],
        context: dg.OpExecutionContext,
        config: Any,
        tools: Tools,
    ) -> None:
        self._of_job = events
        self._context = context
        self._config = config
        self._settings = getattr(config, "settings", None)
        self._tools = Tools(
            _ThreadStore(tools.store),  # type: ignore[arg-type] # it has the same methods
            tools.runner,
            tools.directory,
        )
        self._lines: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self._begun = time.monotonic()

    def served(
        self, keys: Sequence[str], more_jobs_follow: bool, *, lease_wait_seconds: float | None
    ) -> Iterator[ServedJob]:
        """Serve jobs, and yield the outcome of each in the order of the keys.

        Args:
            more_jobs_follow, lease_wait_seconds: as of `JobContext`.
        """
        from arroyo_dagster.state.metadata.interrupts import Interrupts

        if not keys:
            return
        threads = min(self._config.parallel_jobs, len(keys))
        interrupts, waiting = Interrupts(), deque[Future[ServedJob]]()

        def job_context(key: str) -> JobContext:
            return JobContext(
                self._context,
                key,
                log=JobLog(key, self._lines),
                more_jobs_follow=more_jobs_follow,
                lease_wait_seconds=lease_wait_seconds,
            )

        if self._tools.runner.one_job_at_a_time:
            for key in keys:
                served = self._serve(job_context(key), interrupts)
                self._write_lines(0.0)
                yield served
            return

        def submit(key: str) -> Future[ServedJob]:
            # Dagster keeps the context of the step in a context variable.
            run = contextvars.copy_context().run
            return pool.submit(run, self._serve, job_context(key), interrupts)

        with ThreadPoolExecutor(threads, "arroyo-job") as pool:
            try:
                for key in keys:
                    if len(waiting) == _UNREPORTED * threads:
                        yield self._next(waiting)
                    waiting.append(submit(key))
                while waiting:
                    yield self._next(waiting)
            except GeneratorExit:
                self._end(interrupts, waiting)
                raise
            except BaseException:  # an interrupt: what was published is on record all the same
                self._end(interrupts, waiting)
                for future in waiting:
                    if not future.cancelled():
                        yield self._awaited(future)
                raise

    def _end(self, interrupts: "Interrupts", waiting: "deque[Future[ServedJob]]") -> None:
        interrupts.request()
        for future in waiting:
            future.cancel()

    def _next(self, waiting: "deque[Future[ServedJob]]") -> ServedJob:
        """Return the outcome of the first job that waits, and take it out."""
        found = self._awaited(waiting[0])
        waiting.popleft()
        return found

    def _awaited(self, future: Future[ServedJob]) -> ServedJob:
        """Return the outcome of a job; until then write the lines that jobs log."""
        while not future.done():
            self._write_lines(_POLL_SECONDS)
        self._write_lines(0.0)
        return future.result()

    def _write_lines(self, seconds: float) -> None:
        """Write the lines that threads have logged; wait this long for the first."""
        try:
            while True:
                level, line = self._lines.get(seconds > 0, seconds)
                getattr(self._context.log, level)(line)
        except queue.Empty:
            return

    def _serve(self, job: JobContext, interrupts: "Interrupts") -> ServedJob:
        """Serve one job, in a thread of the pool."""
        from arroyo_dagster.state.metadata.interrupts import InterruptedThreadError

        served, began = ServedJob(job.partition_key), time.monotonic()
        if began - self._begun > self._config.budget_minutes * 60:
            served.left = True
            return served
        try:
            with interrupts.here():
                for event in self._of_job(job, self._settings, self._tools):
                    served.events.append(event)
        except InterruptedThreadError:
            pass  # the main thread raises its own
        except (SkippedError, dg.Failure, dg.RetryRequested, ArroyoStateError) as error:
            served.error = error
        except Exception as error:  # a mistake in this package must not stop other jobs
            job.log.error(redact_text(traceback.format_exc()))
            served.error = error
        served.seconds = time.monotonic() - began
        return served
