"""Schedules: the fleet and the partition keys by the clock, maintenance by the backlog."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import dagster as dg

from arroyo_dagster.orchestration.partitions import key_error
from arroyo_dagster.orchestration.resources import ArroyoStateStore
from arroyo_dagster.orchestration.translator import Naming

FLEET_CRON = "*/15 * * * *"
HEALTH_CRON = "37 * * * *"
AUDIT_CRON = "23 1 * * *"
SYNC_CRON = "7 * * * *"
REFRESH_CRON = "*/30 * * * *"
EXPORTS_CRON = "27 * * * *"
MOST_RUNS = 50
JOB_TAG = "arroyo/job_id"
"""The run tag whose value is the partition key: for limits on concurrent runs of one job."""

MAINTENANCE_TAG = "arroyo/maintenance"
"""The tag of every run that changes or deletes state; its value is the deployment. For a limit on
the runs of an instance."""

MAX_RUNTIME_SECONDS = 7200
BACKGROUND_TAGS = {
    "dagster/priority": "-1",
    dg.MAX_RUNTIME_SECONDS_TAG: str(MAX_RUNTIME_SECONDS),
}
"""Tags of background runs: other runs go first, and one that does not end is ended."""


def maintenance_tags(deployment: str | None) -> dict[str, str]:
    """Return the tags of runs that change or delete state."""
    return {**BACKGROUND_TAGS, MAINTENANCE_TAG: deployment or "default"}


Backlog = Callable[[ArroyoStateStore], Mapping[str, int]]
"""The backlog, by partition key."""


def build_clock_schedule(
    name: str,
    job: Any,
    cron: str,
    *,
    description: str,
    running: bool = False,
    timezone: str = "UTC",
) -> dg.ScheduleDefinition:
    """Build a schedule of a job without partitions."""
    return dg.ScheduleDefinition(
        name=name,
        description=description,
        job=job,
        cron_schedule=cron,
        execution_timezone=timezone,
        default_status=schedule_status(running),
    )


@dataclass(frozen=True, kw_only=True)
class DueOptions:
    """How a schedule asks for runs of what is due.

    Attributes:
        min_backlog: fewer is left for later.
        most_runs: at most so many a tick, the largest backlog first.
        run_config: of each run.
        running: on from the start.
    """

    min_backlog: int = 1
    most_runs: int = MOST_RUNS
    run_config: dg.RunConfig | None = None
    running: bool = False
    timezone: str = "UTC"


def build_due_schedule(
    name: str,
    job: Any,
    cron: str,
    *,
    naming: Naming,
    backlog: Backlog,
    options: DueOptions | None = None,
) -> dg.ScheduleDefinition:
    """Build a schedule of a job partitioned by jobs: a run for each that has enough to do.

    Args:
        backlog: how much there is to do, from storage and never from events; only called when
            the schedule is evaluated.
    """
    chosen = options or DueOptions()
    min_backlog = chosen.min_backlog

    @dg.schedule(
        name=name,
        job=job,
        cron_schedule=cron,
        execution_timezone=chosen.timezone,
        default_status=schedule_status(chosen.running),
        description=f"Request a run for each job with a backlog of {min_backlog} or more.",
    )
    @naming.bind
    def due_schedule(context: dg.ScheduleEvaluationContext, arroyo_store: ArroyoStateStore) -> Any:
        found = backlog(arroyo_store)
        partitions = set(context.instance.get_dynamic_partitions(str(naming.jobs.name)))
        # A run of a partition that is not there would fail the whole tick.
        due = {key: n for key, n in found.items() if n >= min_backlog and key in partitions}
        largest = sorted(due, key=lambda key: (-due[key], key))[: chosen.most_runs]
        unknown = [key for key in found if key not in partitions and key_error(key) is None]
        if unknown:
            context.log.warning(f"{len(unknown)} jobs have no partition key yet: {unknown[:5]}")
        if not largest:
            return dg.SkipReason(f"nothing due: {len(found)} jobs, none with {min_backlog} or more")
        at = context.scheduled_execution_time.strftime("%Y%m%dT%H%M")
        return [
            dg.RunRequest(
                run_key=f"{key}:{at}",
                partition_key=key,
                run_config=chosen.run_config,
                tags={JOB_TAG: key},
            )
            for key in largest
        ]

    return due_schedule


def schedule_status(running: bool) -> dg.DefaultScheduleStatus:
    """Return RUNNING or STOPPED. The default is STOPPED: installing starts nothing."""
    return dg.DefaultScheduleStatus.RUNNING if running else dg.DefaultScheduleStatus.STOPPED
