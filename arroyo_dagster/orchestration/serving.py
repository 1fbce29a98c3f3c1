"""Serve the pipelines of a run: several at the same time, each with events of its own.

One pipeline never stops the others. The run ends with a failure that names every pipeline that
failed, so that Dagster's alerting works. Waiting is no failure: a lease that another process holds,
or a job that may not be touched now, is an observation, which `fleet` shows.

A step has one main thread, which alone may yield events and receives interrupts; pipelines are
served in threads, which are told of an interrupt at their next call of the store.
"""

import contextvars
import queue
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from arroyo_dagster.errors import ArroyoStateError, ConflictError, LeaseHeldError
from arroyo_dagster.orchestration import rendering as shown
from arroyo_dagster.orchestration.failures import as_failure, failure_of
from arroyo_dagster.orchestration.pipelines.model import ListedPipeline, key_part
from arroyo_dagster.orchestration.resources import ArroyoStateStore
from arroyo_dagster.orchestration.runners import Tools
from arroyo_dagster.orchestration.settings import LaunchpadConfig
from arroyo_dagster.orchestration.translator import Names, in_layers
from arroyo_dagster.redaction import redact_text, without_secrets

if TYPE_CHECKING:
    from arroyo_dagster.state.metadata.interrupts import Interrupts
    from arroyo_dagster.state.storage.store import ObjectStore

WAITING, FAILED, SINCE = "arroyo/waiting", "arroyo/failed", "arroyo/since"
"""Metadata of an observation: why a pipeline waits or failed, and since when."""

BUDGET_MINUTES = 45.0
PARALLEL_JOBS = 4
_UNREPORTED = 4
"""The results of so many pipelines per thread may wait for a slow one before them."""

_REASONS = 5
"""The description of a run that failed has the reasons of so many pipelines; a table has all."""

_POLL_SECONDS = 0.1
_AGAIN_SECONDS = 25.0
"""The wait before pipelines are served again whose store failed: longer than a lease's renewal."""


class BoundsConfig(LaunchpadConfig):
    """How much one run does."""

    budget_minutes: float = Field(
        default=BUDGET_MINUTES,
        gt=0,
        description="Start no further pipeline after this many minutes.",
    )
    parallel_jobs: int = Field(
        default=PARALLEL_JOBS, ge=1, description="Serve this many pipelines at the same time."
    )


def unlisted_pipeline(root: str) -> ListedPipeline:
    """Return a job that the definitions do not know, for work on the whole root."""
    return ListedPipeline(root=root, key=tuple(map(key_part, root.split("/"))))


class WaitingError(Exception):
    """Nothing was done for a pipeline, and nothing is wrong: a later run does it.

    Args:
        reason: one line that says why, and what lets it be done.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(without_secrets(reason))


def is_waiting(error: BaseException | None) -> bool:
    """Return whether an error means that a pipeline waits: for a lease, or until its state, which
    changed meanwhile, is looked at again.
    """
    return isinstance(error, WaitingError | ConflictError)


class PipelineLog:
    """The log of one pipeline: collects lines, with the pipeline before each."""

    def __init__(self, root: str, lines: "queue.SimpleQueue[tuple[str, str]]") -> None:
        self._root = root
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
        named = text if text.startswith(self._root) else f"{self._root}: {text}"
        self._lines.put((level, named))


@dataclass(frozen=True)
class Turn:
    """One pipeline's turn in a run.

    Attributes:
        owner: the run, as leases and records name it.
        waits: whether to wait for a lease that another process holds.
        tools: resources whose stores deliver an interrupt of the run.
    """

    pipeline: ListedPipeline
    owner: str
    log: PipelineLog
    tools: Tools
    waits: bool = False

    def lease_wait_seconds(self, configured: float) -> float:
        """Return how long to wait for a lease: not at all where the run returns to the pipeline."""
        return configured if self.waits else 0.0


Work = Callable[[Turn], Iterator[Any]]
"""Does the work for one pipeline, and yields its events."""


class _ThreadStore:
    """The store resource in a thread of a run: its calls deliver the run's interrupt."""

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
class Served:
    """The outcome of one pipeline.

    Attributes:
        error: why it failed or waits; None if it is done or was interrupted.
        left: whether it was not started, because the budget was used up.
    """

    pipeline: ListedPipeline
    events: list[Any] = field(default_factory=list)
    error: Exception | None = None
    left: bool = False
    seconds: float = 0.0


@dataclass
class Results:
    """The outcomes of the pipelines of a run, by root."""

    done: dict[str, Served] = field(default_factory=dict)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row for each pipeline: first those that failed, then those that wait."""
        for root, served in sorted(self.done.items(), key=lambda item: (_rank(item[1]), item[0])):
            yield {
                "pipeline": root,
                "outcome": _outcome(served),
                "seconds": round(served.seconds, 1),
            }

    @property
    def failed(self) -> dict[str, str]:
        """Why pipelines failed, in one line each."""
        return {
            root: _reason(served.error)
            for root, served in self.done.items()
            if served.error is not None and not is_waiting(served.error)
        }

    def check(self) -> None:
        """Fail if a pipeline failed.

        Raises:
            dagster.Failure: naming every pipeline that failed, in one line.
        """
        failed = self.failed
        if failed:
            lines = [f"{root}: {reason}" for root, reason in failed.items()]
            others = ", ".join(list(failed)[_REASONS:])
            reasons = "; ".join(lines[:_REASONS]) + (f"; likewise {others}" if others else "")
            raise dg.Failure(
                f"{len(failed)} of {shown.counted(len(self.done), 'pipeline')} failed: {reasons}",
                metadata={"pipelines": shown.table(self.rows())},
                allow_retries=False,
            )


def _rank(served: Served) -> int:
    if served.error is None:
        return 3 if served.left else 2
    return 1 if is_waiting(served.error) else 0


def _outcome(served: Served) -> str:
    if served.left:
        return "left for the next run"
    if served.error is None:
        return "done"
    reason = _reason(served.error)
    return f"waiting, because {reason}" if is_waiting(served.error) else reason


def _reason(error: BaseException | None) -> str:
    """Return why a pipeline failed or waits, in one line without secrets."""
    if isinstance(error, ArroyoStateError):
        error = failure_of(error)
    words = getattr(error, "description", None) or str(error)
    return redact_text(" ".join(str(words).split()))


def serve(
    context: Any,
    pipelines: Sequence[ListedPipeline],
    work: Work,
    config: BoundsConfig,
    tools: Tools,
    *,
    noted: Callable[[ListedPipeline], dg.AssetKey | None] | None = None,
    in_turn: bool = False,
) -> Generator[Any, Any, Results]:
    """Serve pipelines, and yield the events of each in their order.

    Those that wait for a lease, or whose store failed, are served once more behind the others.

    Args:
        context: of the step.
        noted: the asset that gets an observation where a pipeline waits or fails; None = none.
        in_turn: serve one after the other, in the main thread, which an interrupt reaches at once.

    Returns:
        The outcome of each pipeline; none of them failed.

    Raises:
        dagster.Failure: a pipeline failed; all others were served.
    """
    pool = _Pool(work, context, config, tools, in_turn or tools.runner.one_job_at_a_time)
    with as_failure():
        tools.store.reading()  # checked and opened once, before there are threads
    results = Results()
    yield from _events(pool.served(pipelines, waits=False), results)
    again = [
        served.pipeline
        for served in results.done.values()
        if isinstance(served.error, LeaseHeldError) or getattr(served.error, "retryable", False)
    ]
    if any(not is_waiting(results.done[pipeline.root].error) for pipeline in again):
        from arroyo_dagster.state.metadata.interrupts import interruptible_sleep

        interruptible_sleep(_AGAIN_SECONDS)
    yield from _events(pool.served(again, waits=True), results)
    for root, served in results.done.items():
        if served.error is None:
            continue
        context.log.warning(f"{root}: {_outcome(served)}")
        key = None if noted is None else noted(served.pipeline)
        if key is not None:
            yield _observation(served, key, context.instance)
    left = sum(served.left for served in results.done.values())
    if left:
        context.log.info(
            f"{left} pipelines are left for the next run: the budget of "
            f"{config.budget_minutes:g} min is used up"
        )
    results.check()
    return results


def _events(served: Iterator[Served], results: Results) -> Iterator[Any]:
    for result in served:
        yield from result.events
        results.done[result.pipeline.root] = result


def _observation(
    served: Served, key: dg.AssetKey, instance: dg.DagsterInstance
) -> dg.AssetObservation:
    """Return what an asset shows of a pipeline that waits or failed, and since when it does."""
    waits = is_waiting(served.error)
    name = WAITING if waits else FAILED
    earlier = last_note(instance, key)
    since = earlier.get(SINCE) if name in earlier else None
    reason = _reason(served.error)
    return dg.AssetObservation(
        key,
        description=f"waiting, because {reason}" if waits else reason,
        metadata={name: reason, SINCE: time.time() if since is None else since},
    )


def last_note(instance: dg.DagsterInstance, key: dg.AssetKey) -> dict[str, Any]:
    """Return what the newest observation of an asset says; empty if something was made since."""
    notes = instance.fetch_observations(key, limit=1).records
    if not notes or notes[0].asset_observation is None:
        return {}
    made = instance.fetch_materializations(key, limit=1).records
    if made and made[0].storage_id > notes[0].storage_id:
        return {}
    return {name: entry.value for name, entry in notes[0].asset_observation.metadata.items()}


class _Pool:
    """Serves pipelines in threads, and yields their outcomes in the main thread."""

    def __init__(
        self, work: Work, context: Any, config: BoundsConfig, tools: Tools, in_turn: bool
    ) -> None:
        self._work = work
        self._in_turn = in_turn
        self._context = context
        self._config = config
        self._tools = Tools(
            _ThreadStore(tools.store),  # type: ignore[arg-type] # it has the same methods
            tools.runner,
            tools.directory,
        )
        self._lines: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self._begun = time.monotonic()

    def served(self, pipelines: Sequence[ListedPipeline], *, waits: bool) -> Iterator[Served]:
        """Serve pipelines, and yield the outcome of each in their order."""
        from arroyo_dagster.state.metadata.interrupts import Interrupts

        if not pipelines:
            return
        threads = min(self._config.parallel_jobs, len(pipelines))
        interrupts, waiting = Interrupts(), deque[Future[Served]]()
        owner = f"dagster run {self._context.run.run_id}"

        def turn(pipeline: ListedPipeline) -> Turn:
            log = PipelineLog(pipeline.root, self._lines)
            return Turn(pipeline, owner, log, self._tools, waits)

        if self._in_turn:
            for pipeline in pipelines:
                served = Served(pipeline)
                try:
                    self._serve(served, turn(pipeline), interrupts)
                except BaseException:  # an interrupt: what was published is on record all the same
                    yield served
                    raise
                finally:
                    self._write_lines(0.0)
                yield served
            return

        def submit(pipeline: ListedPipeline) -> Future[Served]:
            # Dagster keeps the context of the step in a context variable.
            run = contextvars.copy_context().run
            return pool.submit(run, self._serve, Served(pipeline), turn(pipeline), interrupts)

        with ThreadPoolExecutor(threads, "arroyo-pipeline") as pool:
            try:
                for pipeline in pipelines:
                    if len(waiting) == _UNREPORTED * threads:
                        yield self._next(waiting)
                    waiting.append(submit(pipeline))
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

    def _end(self, interrupts: "Interrupts", waiting: "deque[Future[Served]]") -> None:
        interrupts.request()
        for future in waiting:
            future.cancel()

    def _next(self, waiting: "deque[Future[Served]]") -> Served:
        """Return the outcome of the first pipeline that waits, and take it out."""
        served = self._awaited(waiting[0])
        waiting.popleft()
        return served

    def _awaited(self, future: Future[Served]) -> Served:
        """Return the outcome of a pipeline; until then write the lines that are logged."""
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

    def _serve(self, served: Served, turn: Turn, interrupts: "Interrupts") -> Served:
        """Serve one pipeline, in a thread of the pool or in turn."""
        from arroyo_dagster.state.metadata.interrupts import InterruptedThreadError

        began = time.monotonic()
        if began - self._begun > self._config.budget_minutes * 60:
            served.left = True
            return served
        try:
            with interrupts.here():
                for event in self._work(turn):
                    served.events.append(event)
        except InterruptedThreadError:
            pass  # the main thread raises its own
        except (WaitingError, dg.Failure, ArroyoStateError) as error:
            served.error = error
        except Exception as error:  # a fault of ours stops no others; causes may hold secrets
            turn.log.error(redact_text(traceback.format_exc(chain=False)))
            served.error = error
        served.seconds = time.monotonic() - began
        return served


# ---- an asset that each pipeline has -------------------------------------------------------------

AssetWork = Callable[[Turn, dg.AssetKey, Any, dg.AssetExecutionContext], Iterator[Any]]
"""Makes the asset of this key for one pipeline, by the configuration of the run; yields events."""


@dataclass(frozen=True, kw_only=True)
class PipelineStep:
    """The step that makes the asset `table` of the pipelines that a run selects.

    Attributes:
        config: of the step; one without `BoundsConfig` has the default bounds.
        work: makes the asset of one pipeline.
        pool: of the step.
        resources: keys that the step needs beside those of every step.
        check: raises where a run must not serve the pipelines that it selects.
        in_turn: as of `serve`.
    """

    table: str
    config: type[dg.Config]
    work: AssetWork
    pool: str
    resources: Sequence[str] = ()
    check: Callable[[Sequence[ListedPipeline]], None] = lambda selected: None
    in_turn: bool = False


def build_pipeline_assets(
    names: Names, step: PipelineStep, pipelines: Mapping[ListedPipeline, Sequence[dg.AssetKey]]
) -> list[dg.AssetsDefinition]:
    """Build an asset of pipelines: one step, or several for keys that Dagster cannot tell apart.

    A pipeline for which nothing was to do has made nothing. What waits or fails is an observation
    of its asset.

    Args:
        pipelines: those that have the asset, each with its upstream assets.
    """
    table, config_class = step.table, step.config
    specs = [
        (pipeline, names.spec(table, pipeline, deps=deps).replace_attributes(skippable=True))
        for pipeline, deps in pipelines.items()
    ]

    def build(op: str, layer: Sequence[tuple[ListedPipeline, dg.AssetSpec]]) -> dg.AssetsDefinition:
        @dg.multi_asset(
            name=op,
            specs=[spec for _, spec in layer],
            pool=names.name(step.pool),
            can_subset=True,
            required_resource_keys={*names.resources, *step.resources},
        )
        def make(
            context: dg.AssetExecutionContext,
            config: config_class,  # type: ignore[valid-type]
        ) -> Any:
            bounds = config if isinstance(config, BoundsConfig) else BoundsConfig()
            selected = [listed for listed, spec in layer if spec.key in context.selected_asset_keys]
            step.check(selected)

            def serve_one(turn: Turn) -> Iterator[Any]:
                yield from step.work(turn, names.key(table, turn.pipeline), config, context)

            yield from serve(
                context,
                selected,
                serve_one,
                bounds,
                names.tools(context),
                noted=lambda pipeline: names.key(table, pipeline),
                in_turn=step.in_turn,
            )

        return make

    return in_layers(names.name(f"arroyo_{table}"), specs, build)
