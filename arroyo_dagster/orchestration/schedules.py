"""Schedules: the fleet and the partition keys by the clock, maintenance by the backlog."""

from collections.abc import Callable, Mapping
from typing import Any

import dagster as dg

from arroyo_dagster.orchestration.partitions import key_error
from arroyo_dagster.orchestration.resources import ArroyoStateStore
from arroyo_dagster.orchestration.translator import Naming

FLEET_CRON = "*/15 * * * *"
SYNC_CRON = "7 * * * *"
REFRESH_CRON = "*/30 * * * *"
MOST_RUNS = 50
JOB_TAG = "arroyo/job_id"
"""The run tag whose value is the partition key: for limits on concurrent runs of one job."""

MAX_RUNTIME_SECONDS = 7200
BACKGROUND_TAGS = {
    "dagster/priority": "-1",
    dg.MAX_RUNTIME_SECONDS_TAG: str(MAX_RUNTIME_SECONDS),
}
"""Tags of background runs: other runs go first, and one that does not end is ended."""

Backlog = Callable[[ArroyoStateStore], Mapping[str, int]]
"""The backlog, by partition key."""


def build_clock_schedule(
    name: str, job: Any, cron: str, *, running: bool = False, timezone: str = "UTC"
) -> dg.ScheduleDefinition:
    """Build a schedule of a job without partitions."""
    return dg.ScheduleDefinition(
        name=name,
        job=job,
        cron_schedule=cron,
        execution_timezone=timezone,
        default_status=schedule_status(running),
    )


def build_due_schedule(
    name: str,
    job: Any,
    cron: str,
    *,
    naming: Naming,
    backlog: Backlog,
    min_backlog: int = 1,
    most_runs: int = MOST_RUNS,
    run_config: dg.RunConfig | None = None,
    running: bool = False,
    timezone: str = "UTC",
) -> dg.ScheduleDefinition:
    """Build a schedule of a job partitioned by jobs: a run for each that has enough to do.

    Args:
        backlog: read from storage, never from events; only called when the schedule is evaluated.
        min_backlog: jobs with a smaller backlog wait.
        most_runs: the maximum number of runs per tick, the largest backlog first.
    """

    @dg.schedule(
        name=name,
        job=job,
        cron_schedule=cron,
        execution_timezone=timezone,
        default_status=schedule_status(running),
    )
    def due_schedule(context: dg.ScheduleEvaluationContext, arroyo_store: ArroyoStateStore) -> Any:
        found = backlog(arroyo_store)
        partitions = set(context.instance.get_dynamic_partitions(str(naming.jobs.name)))
        # A run of a partition that is not there would fail the whole tick.
        due = {key: n for key, n in found.items() if n >= min_backlog and key in partitions}
        chosen = sorted(due, key=lambda key: (-due[key], key))[:most_runs]
        unknown = [key for key in found if key not in partitions and key_error(key) is None]
        if unknown:
            context.log.warning(f"{len(unknown)} jobs have no partition key yet: {unknown[:5]}")
        if not chosen:
            return dg.SkipReason(f"nothing due: {len(found)} jobs, none with {min_backlog} or more")
        at = context.scheduled_execution_time.strftime("%Y%m%dT%H%M")
        return [
            dg.RunRequest(
                run_key=f"{key}:{at}",
                partition_key=key,
                run_config=run_config,
                tags={JOB_TAG: key},
            )
            for key in chosen
        ]

    return due_schedule


def schedule_status(running: bool) -> dg.DefaultScheduleStatus:
    """Return RUNNING or STOPPED. The default is STOPPED: installing starts nothing."""
    return dg.DefaultScheduleStatus.RUNNING if running else dg.DefaultScheduleStatus.STOPPED
