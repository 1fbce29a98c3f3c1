"""Maintain many jobs in one run: those with the largest backlog, within a budget, each with events
of its own.

A run costs ten seconds of process start and more, so a run per job fills the queue faster than it
empties. One batch of a kind is queued or running at a time; no other is requested meanwhile.
"""

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import dagster as dg

from arroyo_dagster.errors import ArroyoStateError
from arroyo_dagster.orchestration import rendering as shown
from arroyo_dagster.orchestration.batch_requests import BatchKind, chosen
from arroyo_dagster.orchestration.directory import ArroyoDirectory
from arroyo_dagster.orchestration.failures import as_failure
from arroyo_dagster.orchestration.resources import ArroyoStateStore
from arroyo_dagster.orchestration.runners import MaintenanceRunner
from arroyo_dagster.orchestration.schedules import BACKGROUND_TAGS
from arroyo_dagster.orchestration.translator import Naming
from arroyo_dagster.redaction import redact_text

JobEvent = dg.MaterializeResult | dg.AssetCheckResult | dg.AssetObservation  # type: ignore[type-arg]


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
    """

    has_partition_key = True
    has_partition_key_range = False

    def __init__(
        self,
        context: dg.OpExecutionContext,
        key: str,
        *,
        more_jobs_follow: bool = False,
        asset: dg.AssetsDefinition | None = None,
    ) -> None:
        self.partition_key = key
        self.more_jobs_follow = more_jobs_follow
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
            more_jobs_follow=self.more_jobs_follow,
            asset=asset,
        )


def asset_events(
    *assets: dg.AssetsDefinition,
) -> Callable[[JobContext, Any, Tools], Iterator[JobEvent]]:
    """Yield the events of partitioned assets for one job, one asset after the other.

    Args:
        assets: written as generators; the configuration is the first one's.
    """

    def events(context: JobContext, config: Any, tools: Tools) -> Iterator[JobEvent]:
        given = {
            "config": config,
            "arroyo_store": tools.store,
            "arroyo_runner": tools.runner,
            "arroyo_directory": tools.directory,
        }
        for asset in assets:
            work: Any = asset.node_def
            function = inspect.unwrap(work.compute_fn.decorated_fn)  # what `Naming.bind` binds
            wanted = inspect.signature(function).parameters
            arguments = {name: value for name, value in given.items() if name in wanted}
            yield from function(context.of(asset), **arguments)

    return events


# ---- the run -------------------------------------------------------------------------------------


@dataclass
class _BatchResults:
    """The outcome of the jobs of a batch, by key."""

    failed: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def rows(self) -> Iterator[Mapping[str, Any]]:
        """Return the outcome of each job, failed jobs first."""
        for key in sorted(self.seconds, key=lambda key: key not in self.failed):
            outcome, seconds = self.failed.get(key, "done"), round(self.seconds[key], 1)
            yield {"job": key, "outcome": outcome, "seconds": seconds}
        for key in self.left:
            yield {"job": key, "outcome": "left for the next run", "seconds": 0.0}


def build_batch_job(kind: BatchKind, naming: Naming) -> dg.JobDefinition:
    """Build the Dagster job of a kind: one op that serves one job after the other."""
    config_class = kind.config

    @dg.op(name=kind.op, pool=kind.pool, description=kind.description, out=dg.Out(dg.Nothing))
    @naming.bind
    def batch_op(  # type: ignore[no-untyped-def]
        context: dg.OpExecutionContext,
        config: config_class,  # type: ignore[valid-type]
        arroyo_store: ArroyoStateStore,
        arroyo_runner: MaintenanceRunner,
        arroyo_directory: ArroyoDirectory,
    ):
        tools = Tools(arroyo_store, arroyo_runner, arroyo_directory)
        given: Any = config
        keys, done = given.jobs or _neediest(kind, arroyo_store), _BatchResults()
        # One by one: what was done is on record, whatever becomes of the run.
        yield from _serve(context, kind, keys, given, tools, done)
        if done.failed:
            raise _failure(done, len(keys))
        facts = {
            "arroyo/jobs": len(keys),
            "arroyo/jobs_left": len(done.left),
            "jobs": shown.table(done.rows()),
        }
        yield dg.Output(None, metadata=shown.known(facts))

    @dg.job(
        name=kind.name,
        description=kind.description,
        executor_def=dg.in_process_executor,
        tags=BACKGROUND_TAGS,
    )
    def batch_job() -> None:
        batch_op()

    return batch_job


def _neediest(kind: BatchKind, store: ArroyoStateStore) -> list[str]:
    with as_failure():
        found = kind.backlog(store)
    return chosen(found, {}, min_backlog=kind.min_backlog)


def _serve(
    context: dg.OpExecutionContext,
    kind: BatchKind,
    keys: Sequence[str],
    config: Any,
    tools: Tools,
    done: _BatchResults,
) -> Iterator[Any]:
    begun = time.monotonic()
    for at, key in enumerate(keys):
        if time.monotonic() - begun > config.budget_minutes * 60:
            done.left = list(keys[at:])
            context.log.info(
                f"{len(done.left)} jobs are left for the next run: the budget of "
                f"{config.budget_minutes:g} min is used up"
            )
            break
        started = time.monotonic()
        context.log.info(f"{at + 1} of {len(keys)}: {key}")
        job = JobContext(context, key, more_jobs_follow=at + 1 < len(keys))
        try:
            for event in kind.events(job, config.settings, tools):
                yield _of_job(event, key)
        except (dg.Failure, dg.RetryRequested, ArroyoStateError) as error:
            done.failed[key] = _reason(error).removeprefix(f"{key}: ")
            context.log.error(f"{key}: {done.failed[key]}")
        done.seconds[key] = time.monotonic() - started


def _of_job(event: JobEvent, key: str) -> Any:
    """An event of the step of one job as one of the batch."""
    if isinstance(event, dg.AssetObservation):
        return event
    assert event.asset_key is not None
    if isinstance(event, dg.MaterializeResult):
        version = event.data_version
        return dg.AssetMaterialization(
            asset_key=event.asset_key,
            partition=key,
            metadata=event.metadata,
            tags={} if version is None else {"dagster/data_version": version.value},
        )
    assert event.check_name is not None
    return dg.AssetCheckEvaluation(
        asset_key=event.asset_key,
        check_name=event.check_name,
        passed=event.passed,
        metadata={**event.metadata, "arroyo/job": dg.MetadataValue.text(key)},
        severity=event.severity,
        description=f"{key}: {event.description}",
        blocking=False,
    )


def _reason(error: BaseException) -> str:
    """Return why a job failed, in one line without secrets."""
    cause = error.__cause__ if isinstance(error, dg.RetryRequested) else error
    words = getattr(cause, "description", None) or str(cause or error)
    return redact_text(" ".join(str(words).split()))


def _failure(done: _BatchResults, total: int) -> dg.Failure:
    key, reason = next(iter(done.failed.items()))
    return dg.Failure(
        f"{len(done.failed)} of {total} jobs failed; the first is {key}: {reason}",
        metadata={"jobs": shown.table(done.rows())},
        allow_retries=False,  # the next run of the schedule serves them again
    )
