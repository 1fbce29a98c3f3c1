"""The maintenance window of running Arroyo jobs: its job, the schedule that opens it, and a sensor
that starts jobs that a window left stopped. Opt-in per job.
"""

import time
from collections.abc import Generator, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import dagster as dg
from pydantic import Field

from arroyo_dagster.errors import ArroyoStateError, InputError
from arroyo_dagster.orchestration import rendering as shown
from arroyo_dagster.orchestration.compaction.assets import (
    format_rewrite,
    published_events,
    rewrite_metadata,
    rewrite_version,
)
from arroyo_dagster.orchestration.compaction.daily_window import DailyWindow, micros_of
from arroyo_dagster.orchestration.failures import as_failure
from arroyo_dagster.orchestration.pipelines.model import ListedPipeline
from arroyo_dagster.orchestration.requests import MAINTENANCE_TAG, schedule_status
from arroyo_dagster.orchestration.serving import BoundsConfig, Turn, serve, unlisted_pipeline
from arroyo_dagster.orchestration.settings import LaunchpadConfig, configured, setting_field
from arroyo_dagster.orchestration.translator import COMPACTED_STATE, Names
from arroyo_dagster.state.model.compaction import CompactionPolicy, CompactionSettings
from arroyo_dagster.state.model.leases import LeaseSettings
from arroyo_dagster.state.model.maintenance_window import (
    WindowEnd,
    WindowLimits,
    WindowOutcome,
    WindowSteps,
)
from arroyo_dagster.state.model.rewrite import RewriteOutcome

if TYPE_CHECKING:
    from arroyo_dagster.state.operations.compaction.maintenance_window import RewriteWindow

OP, JOB, RECOVERY = "arroyo_window", "arroyo_windows", "arroyo_window_recovery"
_SENSOR_SECONDS = 60
_AGAIN_SECONDS = 600
_UNLIMITED = BoundsConfig(budget_minutes=1e6)  # it closes by the clock


class MaintenanceWindow(LaunchpadConfig):
    """Which jobs to stop for maintenance, and when."""

    jobs: list[str] = Field(
        description="The jobs that may be stopped, as job or pipeline/job. No other job is touched."
    )
    between: str = Field(
        default="",
        description="HH:MM-HH:MM, every day. No job is stopped outside of it, and each runs "
        "again before it closes. Empty: at once.",
    )
    time_zone: str = Field(
        default="UTC", description="Time zone of `between`, for example `Europe/Berlin`."
    )
    policy: Literal["bin-pack", "levels", "window", "full"] = setting_field(
        CompactionSettings, "policy", alone=True, default=CompactionPolicy.FULL.value
    )
    stop_seconds: float = setting_field(WindowSteps, "stop")
    rewrite_seconds: float = setting_field(WindowSteps, "rewrite")
    start_seconds: float = setting_field(WindowSteps, "start")
    quiet_seconds: float = setting_field(WindowSteps, "quiet")
    lease_wait_seconds: float = setting_field(LeaseSettings, "lease_wait_seconds")
    verify_level: int = setting_field(WindowSteps, "verify_level")
    recover_only: bool = Field(
        default=False, description="Start jobs that an earlier window left stopped; stop nothing."
    )
    dry_run: bool = Field(default=False, description="Plan only; touch nothing.")


# ---- the job -------------------------------------------------------------------------------------


def _build_job(names: Names) -> dg.JobDefinition:
    @dg.op(
        name=names.name(OP),
        pool=names.name("arroyo_compaction"),
        description="Serve the jobs one after the other: stop, rewrite, verify, start.",
        required_resource_keys=names.resources,
    )
    def arroyo_window(context: dg.OpExecutionContext, config: MaintenanceWindow) -> Any:
        ends: dict[str, Any] = {}

        def work(turn: Turn) -> Iterator[Any]:
            root = turn.pipeline.root
            try:
                ends[root] = yield from _steps(turn, context, config, names)
            except ArroyoStateError as error:
                ends[root] = error.message
                raise
            _check(root, ends[root], names)

        with as_failure():
            if not config.jobs:  # the run would be green, and nothing was looked at
                raise InputError(
                    "no job is named, and no other job is touched",
                    field="jobs",
                    next_step="name the jobs that may be stopped, as job or pipeline/job",
                )
        jobs = [names.pipelines.by_root.get(job, unlisted_pipeline(job)) for job in config.jobs]
        tools, noted = names.tools(context), partial(_key, names)
        yield from serve(context, jobs, work, _UNLIMITED, tools, noted=noted, in_turn=True)
        rows = map(_row, ends.items())
        yield dg.Output(None, metadata=shown.known({"jobs": shown.table(rows)}))

    @dg.job(
        name=names.name(JOB),
        executor_def=dg.in_process_executor,
        tags={MAINTENANCE_TAG: names.deployment or "default", "dagster/max_retries": "0"},
        description="Stop running Arroyo jobs with a checkpoint, rewrite their state, start them "
        "again.",
    )
    def arroyo_windows() -> None:
        arroyo_window()

    return arroyo_windows


def _key(names: Names, pipeline: ListedPipeline) -> dg.AssetKey | None:
    """Return the asset that shows what a window does; None = the definitions do not know the job.

    A job may be named without its pipeline.
    """
    matches = [
        listed
        for listed in names.pipelines.pipelines
        if pipeline.root in (listed.root, listed.root.rpartition("/")[2])
    ]
    return names.key(COMPACTED_STATE, matches[0]) if len(matches) == 1 else None


def _steps(
    turn: Turn, context: dg.OpExecutionContext, config: MaintenanceWindow, names: Names
) -> "Generator[Any, Any, RewriteWindow | str]":
    """Yield the events of one job's window, and return how it ended, or why it was not opened."""
    from arroyo_dagster.state.operations.catalog.jobs import find_job
    from arroyo_dagster.state.operations.compaction.maintenance_window import (
        WindowOptions,
        run_window,
    )
    from arroyo_dagster.state.operations.compaction.window_recovery import recover_window

    store, root, begun = turn.tools.store, turn.pipeline.root, time.monotonic()
    paths = find_job(store.reading(), root)
    key, control = _key(names, turn.pipeline), turn.tools.directory.control(store)
    changes: list[RewriteOutcome] = []
    options = WindowOptions(
        settings=configured(CompactionSettings, config),
        limits=configured(WindowLimits, config),
        verify_level=config.verify_level,
        owner=turn.owner,
        run=turn.tools.runner.rewrites(),
        lease_wait_seconds=turn.lease_wait_seconds(config.lease_wait_seconds),
        on_step=lambda step: context.log.info(f"{root}: {step.did}"),
        on_change=lambda change: changes.extend([change] if change.published and key else []),
    )
    if not config.dry_run:
        # What is down comes first, whatever the time.
        recovered = recover_window(store.writable(), paths, control, options)
        if recovered is not None:
            return recovered
    if config.recover_only:
        return "no window left this job stopped"
    if config.between:
        daily = DailyWindow.parse(config.between, config.time_zone)
        closes = daily.closes_at()
        if closes is None:
            return f"the window is not open; it opens at {daily.opens_next().to_iso8601_string()}"
        options = replace(options, closes_at_micros=micros_of(closes))

    def event(change: RewriteOutcome) -> dg.AssetMaterialization:
        assert key is not None
        return dg.AssetMaterialization(
            key,
            metadata={**rewrite_metadata(change, time.monotonic() - begun), **ended},
            tags={shown.DATA_VERSION: rewrite_version(change)},
        )

    ended: dict[str, Any] = {"arroyo/window": "interrupted"}
    reached = store.reading() if config.dry_run else store.writable()
    outcome: RewriteWindow = yield from published_events(
        lambda: run_window(reached, paths, control, options, dry_run=config.dry_run),
        changes,
        event,
    )
    context.log.info(f"{root}: {outcome.end.value}")
    downtime = shown.duration(outcome.downtime_seconds * 1e6)
    ended = {"arroyo/window": outcome.end.value, "downtime": downtime}
    if outcome.change is not None and outcome.change.published:
        context.log.info(f"{root}: {format_rewrite(outcome.change)}")
    if outcome.end is not WindowEnd.UNDONE:
        yield from map(event, changes)
    return outcome


def _check(root: str, end: "RewriteWindow | str", names: Names) -> None:
    """Fail where something went wrong.

    Raises:
        dagster.Failure: the job may be down, or a step failed.
    """
    if isinstance(end, str):
        return
    if not end.started:
        raise dg.Failure(
            f"NOT STARTED AGAIN: {root}. Next: check it in Arroyo; the sensor "
            f"{names.name(RECOVERY)}, or this job with recover_only, starts it"
        )
    if end.problem is not None:
        raise dg.Failure(f"the job runs, but at least one step failed: {end.problem}")


def _row(item: tuple[str, Any]) -> dict[str, Any]:
    name, end = item
    if not isinstance(end, WindowOutcome):
        return {"job": name, "end": "not touched", "down for s": 0.0, "problem": end}
    seconds = round(end.downtime_seconds, 1)
    return {"job": name, "end": end.end.value, "down for s": seconds, "problem": end.problem}


# ---- when ----------------------------------------------------------------------------------------


def build_window_definitions(
    names: Names, window: MaintenanceWindow | None, *, running: bool = False
) -> dg.Definitions:
    """Build the job, the schedule that opens the window, and the sensor that starts jobs left
    stopped.

    Args:
        window: None = without a schedule, for windows that others open.

    Raises:
        InputError: the window has the wrong form, or there is no such time zone.
    """
    job = _build_job(names)
    schedules = []
    if window is not None:
        schedules.append(
            dg.ScheduleDefinition(
                name=names.name("arroyo_window_schedule"),
                job=job,
                description="Stop, rewrite and start the jobs of the maintenance window when it "
                "opens.",
                cron_schedule=DailyWindow.parse(window.between, window.time_zone).cron,
                execution_timezone=window.time_zone,
                run_config=dg.RunConfig({names.name(OP): window}),
                default_status=schedule_status(running),
            )
        )
    return dg.Definitions(jobs=[job], schedules=schedules, sensors=[_build_sensor(names, job)])


def _build_sensor(names: Names, job: dg.JobDefinition) -> dg.SensorDefinition:
    """It runs wherever a window is configured, whatever is switched off: a job may be down."""

    @dg.sensor(
        name=names.name(RECOVERY),
        job=job,
        minimum_interval_seconds=_SENSOR_SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Restart jobs whose maintenance window was interrupted.",
        required_resource_keys=names.resources,
    )
    def arroyo_window_recovery(context: dg.SensorEvaluationContext) -> Any:
        from arroyo_dagster.state.operations.compaction.window_recovery import interrupted_windows

        store = names.tools(context).store
        with as_failure():
            roots = [str(one.root) for one in interrupted_windows(store.reading(), store.jobs())]
        if not roots:
            return dg.SkipReason("no job needs to be started again")
        # Again after a while, if the API was away as well.
        attempt = int(time.time()) // _AGAIN_SECONDS
        return [
            dg.RunRequest(
                run_key=f"{root}:{attempt}",
                run_config=dg.RunConfig(
                    {names.name(OP): MaintenanceWindow(jobs=[root], recover_only=True)}
                ),
                tags={"arroyo/job_id": root},
            )
            for root in roots
        ]

    return arroyo_window_recovery
