"""Schedules that request one run for the pipelines that are due, unless one is unfinished."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import dagster as dg

from arroyo_dagster.errors import ArroyoStateError
from arroyo_dagster.orchestration import rendering as shown
from arroyo_dagster.orchestration.failures import as_failure
from arroyo_dagster.orchestration.pipelines.model import ListedPipeline
from arroyo_dagster.orchestration.runners import Tools
from arroyo_dagster.orchestration.serving import FAILED, SINCE, last_note
from arroyo_dagster.orchestration.translator import Names

MAX_RUNTIME_SECONDS = 7200
MAINTENANCE_TAG = "arroyo/maintenance"
"""The tag of every run that changes or deletes state; its value is the deployment. For a limit on
the runs of an instance."""

BACKGROUND_TAGS = {
    "dagster/priority": "-1",
    dg.MAX_RUNTIME_SECONDS_TAG: str(MAX_RUNTIME_SECONDS),
    "dagster/max_retries": "0",  # the next run of the schedule serves what failed
}
"""Tags of background runs: other runs go first, and one that does not end is ended."""

_UNFINISHED = [
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]

Due = Callable[[Tools, dg.DagsterInstance], Sequence[ListedPipeline]]
"""Returns the pipelines that are due, those that need it most first."""


def maintenance_tags(deployment: str | None) -> dict[str, str]:
    """Return the tags of runs that change or delete state."""
    return {**BACKGROUND_TAGS, MAINTENANCE_TAG: deployment or "default"}


def asset_job(
    names: Names,
    name: str,
    assets: Sequence[dg.AssetsDefinition],
    description: str,
    config: dg.Config | None = None,
    tags: Mapping[str, str] | None = None,
) -> Any:
    """Build the job of the steps of some assets, all in one process.

    Args:
        config: of each step; None = the defaults.
        tags: of its runs; None = those of runs that change or delete state.
    """
    return dg.define_asset_job(
        names.name(name),
        selection=dg.AssetSelection.assets(*assets),
        description=description,
        config=None if config is None else dg.RunConfig({one.op.name: config for one in assets}),
        executor_def=dg.in_process_executor,
        run_tags=maintenance_tags(names.deployment) if tags is None else tags,
    )


def due_schedule(
    names: Names,
    job: Any,
    cron: str,
    *,
    due: Due,
    request: Callable[[Sequence[ListedPipeline]], dg.RunRequest],
    timezone: str = "UTC",
    running: bool = False,
) -> dg.ScheduleDefinition:
    """Build the schedule of a job: one run for all pipelines that are due."""

    @dg.schedule(
        name=f"{job.name}_schedule",
        job=job,
        cron_schedule=cron,
        execution_timezone=timezone,
        default_status=schedule_status(running),
        description=job.description,
        required_resource_keys=names.resources,
    )
    def schedule(context: dg.ScheduleEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        unfinished = unfinished_run(context.instance, job.name)
        if unfinished is not None:
            return dg.SkipReason(f"nothing requested: {unfinished}")
        with as_failure():
            pipelines = due(names.tools(context), context.instance)
        if not pipelines:
            total = shown.counted(len(names.pipelines.pipelines), "pipeline")
            return dg.SkipReason(f"nothing due: {total}")
        return request(pipelines)

    return schedule


def due_by_backlog(
    names: Names,
    table: str,
    pipelines: Sequence[ListedPipeline],
    backlog: Callable[[Tools, ListedPipeline], int],
    *,
    most: int,
    retry_after: float,
) -> Due:
    """Return what finds the pipelines with the largest backlog, from the store, never from events.

    A pipeline that cannot be read has none here: its check says why. One that failed is not due
    again before `retry_after` seconds.

    Args:
        table: the asset that a run of the pipeline makes.
        most: the maximum number of pipelines.
    """

    def due(tools: Tools, instance: dg.DagsterInstance) -> list[ListedPipeline]:
        from arroyo_dagster.state.storage.concurrency import concurrently

        maintained = set(tools.store.maintained(pipeline.root for pipeline in pipelines))

        def size(pipeline: ListedPipeline) -> int:
            try:
                return backlog(tools, pipeline) if pipeline.root in maintained else 0
            except ArroyoStateError:
                return 0

        sizes = dict(zip(pipelines, concurrently(size, pipelines), strict=True))
        largest = sorted(filter(sizes.get, pipelines), key=lambda one: (-sizes[one], one.root))
        return [one for one in largest if not failed_lately(names.key(table, one), instance)][:most]

    def failed_lately(key: dg.AssetKey, instance: dg.DagsterInstance) -> bool:
        note = last_note(instance, key)
        return FAILED in note and 0 <= time.time() - float(note[SINCE]) < retry_after

    return due


def clock_schedule(
    job: Any, cron: str, *, timezone: str = "UTC", running: bool = False
) -> dg.ScheduleDefinition:
    """Build the schedule of a job that has something to do at each tick."""
    return dg.ScheduleDefinition(
        name=f"{job.name}_schedule",
        description=job.description,
        job=job,
        cron_schedule=cron,
        execution_timezone=timezone,
        default_status=schedule_status(running),
    )


def unfinished_run(instance: dg.DagsterInstance, job_name: str) -> str | None:
    """Describe a run of a job that is queued or running; None if there is none.

    A run that has been running for twice its limit has died with its process. Without run
    monitoring it must not block the others forever.
    """
    records = instance.get_run_records(dg.RunsFilter(job_name=job_name, statuses=_UNFINISHED))
    now = time.time()
    for record in records:
        if now - (record.start_time or now) < 2 * MAX_RUNTIME_SECONDS:
            run = record.dagster_run
            return f"run {run.run_id[:8]} is {run.status.value.lower()}"
    return None


def schedule_status(running: bool) -> dg.DefaultScheduleStatus:
    """Return RUNNING or STOPPED. The default is STOPPED: installing starts nothing."""
    return dg.DefaultScheduleStatus.RUNNING if running else dg.DefaultScheduleStatus.STOPPED
