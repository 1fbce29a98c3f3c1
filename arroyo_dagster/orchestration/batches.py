"""Maintain many jobs in one run: those with the largest backlog, within a budget, each with events
of its own.

A run costs ten seconds of process start and more, so a run per job fills the queue faster than it
empties. One batch of a kind is queued or running at a time; no other is requested meanwhile.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import dagster as dg

from arroyo_dagster.orchestration import rendering as shown
from arroyo_dagster.orchestration.batch_requests import BatchKind, chosen, maintained_backlog
from arroyo_dagster.orchestration.directory import ArroyoDirectory
from arroyo_dagster.orchestration.failures import as_failure
from arroyo_dagster.orchestration.job_pool import JobContext, JobEvent, JobPool, ServedJob, Tools
from arroyo_dagster.orchestration.resources import ArroyoStateStore
from arroyo_dagster.orchestration.runners import MaintenanceRunner
from arroyo_dagster.orchestration.schedules import BACKGROUND_TAGS, maintenance_tags
from arroyo_dagster.orchestration.skips import SKIPPED_TAG, SkippedError
from arroyo_dagster.orchestration.translator import Naming
from arroyo_dagster.redaction import redact_text


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
    skipped: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def rows(self) -> Iterator[Mapping[str, Any]]:
        """Return the outcome of each job: failed jobs first, then those that were skipped."""

        def rank(key: str) -> int:
            return 0 if key in self.failed else 1 if key in self.skipped else 2

        for key in sorted(self.seconds, key=rank):
            outcome = self.failed.get(key) or self.skipped.get(key) or "done"
            yield {"job": key, "outcome": outcome, "seconds": round(self.seconds[key], 1)}
        for key in self.left:
            yield {"job": key, "outcome": "left for the next run", "seconds": 0.0}


def build_batch_job(kind: BatchKind, naming: Naming) -> dg.JobDefinition:
    """Build the Dagster job of a kind: one op that serves its jobs, several at the same time."""
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
        # Job by job: what was done is on record, whatever becomes of the run.
        yield from _serve(context, kind, keys, given, tools, done)
        if done.failed:
            raise _failure(done, len(keys))
        facts = {
            "arroyo/jobs": len(keys),
            "arroyo/jobs_left": len(done.left),
            "arroyo/jobs_skipped": len(done.skipped),
            "jobs": shown.table(done.rows()),
        }
        yield dg.Output(None, metadata=shown.known(facts))

    @dg.job(
        name=kind.name,
        description=kind.description,
        executor_def=dg.in_process_executor,
        tags=maintenance_tags(naming.deployment) if kind.changes else BACKGROUND_TAGS,
    )
    def batch_job() -> None:
        batch_op()

    return batch_job


def _neediest(kind: BatchKind, store: ArroyoStateStore) -> list[str]:
    with as_failure():
        found = maintained_backlog(kind, store)
    return chosen(found, {}, min_backlog=kind.min_backlog)


def _serve(
    context: dg.OpExecutionContext,
    kind: BatchKind,
    keys: Sequence[str],
    config: Any,
    tools: Tools,
    done: _BatchResults,
) -> Iterator[Any]:
    """Serve jobs and yield their events, in the order of the keys.

    A job that another process maintains is served again behind the others, and is waited for only
    then. The last job is served when all others are done: it reports on the whole fleet.
    """
    pool = JobPool(kind.events, context, config, tools)
    with as_failure():
        tools.store.reading()  # checked and opened once, before there are threads
    report = partial(_report, context, len(keys))
    yield from _events(pool.served(keys[:-1], True, lease_wait_seconds=0.0), done, report)
    yield from _events(pool.served(keys[-1:], False, lease_wait_seconds=0.0), done, report)
    again, done.skipped = list(done.skipped), {}
    yield from _events(pool.served(again, True, lease_wait_seconds=None), done, report)
    if done.left:
        context.log.info(
            f"{len(done.left)} jobs are left for the next run: the budget of "
            f"{config.budget_minutes:g} min is used up"
        )
    for key, reason in done.skipped.items():
        context.log.warning(f"{key}: {reason}")
    if done.skipped:
        text = f"{len(done.skipped)} of {len(keys)} jobs"
        context.instance.add_run_tags(context.run.run_id, {SKIPPED_TAG: text})


def _report(context: dg.OpExecutionContext, total: int, key: str, done: _BatchResults) -> None:
    """Log that a job was served, or why it failed."""
    if key in done.failed:
        context.log.error(f"{key}: {done.failed[key]}")
    context.log.info(f"{len(done.seconds)} of {total} jobs were served; the last is {key}")


def _events(
    served: Iterator[ServedJob],
    done: _BatchResults,
    report: Callable[[str, _BatchResults], None],
) -> Iterator[Any]:
    """Yield the events of jobs, and note the outcome of each."""
    for job in served:
        for event in job.events:
            yield _of_job(event, job.key)
        if job.left:
            done.left.append(job.key)
            continue
        done.seconds[job.key] = done.seconds.get(job.key, 0.0) + job.seconds
        if isinstance(job.error, SkippedError):
            done.skipped[job.key] = str(job.error)
        elif job.error is not None:
            done.failed[job.key] = _reason(job.error).removeprefix(f"{job.key}: ")
        report(job.key, done)


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
