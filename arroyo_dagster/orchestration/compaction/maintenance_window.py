"""The maintenance window of running Arroyo jobs: its job, the schedule that opens it, and a sensor
that starts jobs that a window left stopped. Opt-in per job.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import dagster as dg
from pydantic import Field

from arroyo_dagster.errors import ArroyoStateError, InputError, LeaseHeldError
from arroyo_dagster.orchestration import rendering as shown
from arroyo_dagster.orchestration.compaction.assets import rewrite_version
from arroyo_dagster.orchestration.compaction.daily_window import DailyWindow, micros_of
from arroyo_dagster.orchestration.compaction.rendering import format_rewrite, rewrite_metadata
from arroyo_dagster.orchestration.failures import as_failure
from arroyo_dagster.orchestration.launchpad import LaunchpadConfig
from arroyo_dagster.orchestration.requests import (
    MAINTENANCE_TAG,
    schedule_status,
    sensor_status,
)
from arroyo_dagster.orchestration.serving import Tools
from arroyo_dagster.orchestration.settings import configured, setting_field
from arroyo_dagster.orchestration.translator import COMPACTED_STATE, Names
from arroyo_dagster.state.model.compaction import CompactionPolicy, CompactionSettings
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.leases import LeaseSettings
from arroyo_dagster.state.model.maintenance_window import WindowLimits, WindowOutcome, WindowSteps

if TYPE_CHECKING:
    from arroyo_dagster.state.operations.compaction.maintenance_window import (
        RewriteWindow,
        WindowOptions,
    )

OP = "arroyo_window"
JOB = "arroyo_windows"
RECOVERY = "arroyo_window_recovery"
_SENSOR_SECONDS = 60
_AGAIN_SECONDS = 600


class WindowConfig(LaunchpadConfig):
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

    def limits(self) -> WindowLimits:
        """Return the same limits for the state package."""
        return configured(WindowLimits, self)

    def settings(self) -> CompactionSettings:
        """Return the same settings for the state package.

        Raises:
            dagster.Failure: there is no such policy.
        """
        return configured(CompactionSettings, self)


@dataclass(frozen=True, kw_only=True)
class MaintenanceWindow:
    """The maintenance window of a deployment: which jobs, when.

    Attributes:
        jobs: as job or pipeline/job; opt-in per job.
        between: HH:MM-HH:MM in `time_zone`, every day.
        config: all other settings; its jobs and times are ignored.
    """

    jobs: Sequence[str]
    between: str
    time_zone: str = "UTC"
    config: WindowConfig | None = None

    def as_config(self) -> WindowConfig:
        """Return the configuration of its runs."""
        base = self.config or WindowConfig(jobs=[])
        return base.model_copy(
            update={
                "jobs": list(self.jobs),
                "between": self.between,
                "time_zone": self.time_zone,
            }
        )


# ---- the job -------------------------------------------------------------------------------------


def build_window_job(names: Names) -> dg.JobDefinition:
    """Build the job: one op that handles its jobs one after the other."""

    @dg.op(
        name=names.name(OP),
        pool=names.name("arroyo_compaction"),
        description="Serve the jobs one after the other: stop, rewrite, verify, start.",
        required_resource_keys=names.resources,
    )
    def arroyo_window(context: dg.OpExecutionContext, config: WindowConfig) -> None:
        ends: dict[str, Any] = {}
        tools = names.tools(context)
        _check_named(config)
        for name in config.jobs:
            try:
                ends[name] = _one(context, name, config, names, tools)
            except LeaseHeldError as error:  # there is nothing wrong
                context.log.warning(f"{name} waits: {error.message}")
                ends[name] = f"waits: {error.message}"
            except ArroyoStateError as error:  # before the job was touched: the others go on
                context.log.error(f"{name}: {error}")
                ends[name] = error
        context.add_output_metadata(shown.known({"jobs": shown.table(map(_row, ends.items()))}))
        _raise_errors(ends, names)

    @dg.job(
        name=names.name(JOB),
        executor_def=dg.in_process_executor,
        tags={MAINTENANCE_TAG: names.deployment or "default", "dagster/max_retries": "0"},
        description="Stop running Arroyo jobs with a checkpoint, rewrite their state, start them "
        "again.",
    )
    def arroyo_maintenance_window() -> None:
        arroyo_window()

    return arroyo_maintenance_window


def _check_named(config: WindowConfig) -> None:
    """Refuse a window for no job: its run would be green, and nothing was looked at."""
    with as_failure():
        if not config.jobs:
            raise InputError(
                "no job is named, and no other job is touched",
                field="jobs",
                next_step="name the jobs that may be stopped, as job or pipeline/job",
            )


def _one(
    context: dg.OpExecutionContext,
    name: str,
    config: WindowConfig,
    names: Names,
    tools: Tools,
) -> "RewriteWindow | str":
    """One job's window; or why it was not opened."""
    from arroyo_dagster.state.operations.catalog.jobs import find_job
    from arroyo_dagster.state.operations.compaction.maintenance_window import run_window
    from arroyo_dagster.state.operations.compaction.window_recovery import recover_window

    store = tools.store
    paths = find_job(store.reading(), name)
    options = _options(context, name, config, tools)
    control = tools.directory.control(store)
    if not config.dry_run:
        # What is down comes first, whatever the time.
        recovered = recover_window(store.writable(), paths, control, options)
        if recovered is not None:
            return recovered
    if config.recover_only:
        return "no window left this job stopped"
    closes = _closes(config)
    if isinstance(closes, str):
        context.log.info(f"{name}: {closes}")
        return closes
    begun = time.monotonic()
    outcome = run_window(
        store.reading() if config.dry_run else store.writable(),
        paths,
        control,
        _until(options, closes),
        dry_run=config.dry_run,
    )
    _observe(context, paths, outcome, names, time.monotonic() - begun)
    return outcome


def _options(
    context: dg.OpExecutionContext, name: str, config: WindowConfig, tools: Tools
) -> "WindowOptions":
    from arroyo_dagster.state.operations.compaction.maintenance_window import WindowOptions

    return WindowOptions(
        settings=config.settings(),
        limits=config.limits(),
        verify_level=config.verify_level,
        owner=f"dagster run {context.run.run_id}",
        run=tools.runner.rewrites(),
        lease_wait_seconds=config.lease_wait_seconds,
        on_step=lambda step: context.log.info(f"{name}: {step.did}"),
    )


def _closes(config: WindowConfig) -> int | str | None:
    """When the window closes, in microseconds; None if it does not; words if it is not open."""
    if not config.between:
        return None
    daily = DailyWindow.parse(config.between, config.time_zone)
    closes = daily.closes_at()
    if closes is None:
        return f"the window is not open; it opens at {daily.opens_next().to_iso8601_string()}"
    return micros_of(closes)


def _until(options: "WindowOptions", closes: int | None) -> "WindowOptions":
    from dataclasses import replace

    return replace(options, closes_at_micros=closes)


def _observe(
    context: dg.OpExecutionContext,
    paths: JobPaths,
    outcome: "RewriteWindow",
    names: Names,
    seconds: float,
) -> None:
    """Tell of the window in the log, and of rewritten state as the asset's."""
    context.log.info(f"{paths.root}: {outcome.end.value}")
    found = outcome.change
    if found is None or not found.published:
        return
    context.log.info(f"{paths.root}: {format_rewrite(found)}")
    metadata = rewrite_metadata(found, seconds)
    metadata["arroyo/window"] = outcome.end.value
    metadata["downtime"] = shown.duration(outcome.downtime_seconds * 1e6)
    pipeline = names.pipelines.by_root.get(paths.root)
    if pipeline is not None:
        context.log_event(
            dg.AssetMaterialization(
                asset_key=names.key(COMPACTED_STATE, pipeline),
                metadata=metadata,
                tags={"dagster/data_version": rewrite_version(found)},
            )
        )


def _row(item: tuple[str, Any]) -> dict[str, Any]:
    name, end = item
    if isinstance(end, WindowOutcome):
        return {
            "job": name,
            "end": end.end.value,
            "down for s": round(end.downtime_seconds, 1),
            "problem": "-" if end.problem is None else str(end.problem),
        }
    return {"job": name, "end": "not touched", "down for s": 0.0, "problem": str(end)}


def _raise_errors(ends: dict[str, Any], names: Names) -> None:
    """Fail the run where something went wrong, worst first.

    Raises:
        dagster.Failure: a job may be down, was not rewritten, or could not be looked at.
    """
    outcomes = {name: end for name, end in ends.items() if isinstance(end, WindowOutcome)}
    down = [name for name, end in outcomes.items() if not end.started]
    if down:
        raise dg.Failure(
            f"NOT STARTED AGAIN: {', '.join(down)}. Next: check them in Arroyo; the sensor "
            f"{names.name(RECOVERY)}, or this job with recover_only, starts them",
            allow_retries=True,
        )
    wrong = {name: end for name, end in ends.items() if isinstance(end, ArroyoStateError)}
    wrong |= {name: end.problem for name, end in outcomes.items() if end.problem is not None}
    if wrong:
        told = "; ".join(f"{name}: {problem}" for name, problem in wrong.items())
        raise dg.Failure(
            f"every job runs, but at least one step failed: {told}", allow_retries=False
        )


# ---- when ----------------------------------------------------------------------------------------


def build_window_definitions(
    names: Names, window: MaintenanceWindow, *, running: bool = False
) -> dg.Definitions:
    """Build the job, the schedule that opens the window, and the sensor that starts jobs left
    stopped.

    Raises:
        InputError: the window has the wrong form, or there is no such time zone.
    """
    job = build_window_job(names)
    return dg.Definitions(
        jobs=[job],
        schedules=[build_window_schedule(names, job, window, running=running)],
        sensors=[build_recovery_sensor(names, job)],
    )


def build_recovery_definitions(names: Names) -> dg.Definitions:
    """Build the job and the sensor that starts jobs left stopped, without a schedule: for windows
    that others open.
    """
    job = build_window_job(names)
    return dg.Definitions(jobs=[job], sensors=[build_recovery_sensor(names, job)])


def build_window_schedule(
    names: Names, job: dg.JobDefinition, window: MaintenanceWindow, *, running: bool = False
) -> dg.ScheduleDefinition:
    """Build the schedule that starts a run when the window opens.

    Raises:
        InputError: the window has the wrong form, or there is no such time zone.
    """
    daily = DailyWindow.parse(window.between, window.time_zone)
    return dg.ScheduleDefinition(
        name=names.name("arroyo_window_schedule"),
        job=job,
        description="Stop, rewrite and start the jobs of the maintenance window when it opens.",
        cron_schedule=daily.cron,
        execution_timezone=window.time_zone,
        run_config=dg.RunConfig({names.name(OP): window.as_config()}),
        default_status=schedule_status(running),
    )


def build_recovery_sensor(names: Names, job: dg.JobDefinition) -> dg.SensorDefinition:
    """Build the sensor that restarts jobs whose window was interrupted because its process died.

    It runs wherever a window is configured, whatever is switched off: a job may be down.
    """

    @dg.sensor(
        name=names.name(RECOVERY),
        job=job,
        minimum_interval_seconds=_SENSOR_SECONDS,
        default_status=sensor_status(True),
        description="Restart jobs whose maintenance window was interrupted.",
        required_resource_keys=names.resources,
    )
    def arroyo_window_recovery(context: dg.SensorEvaluationContext) -> Any:
        from arroyo_dagster.state.operations.compaction.window_recovery import interrupted_windows

        store = names.tools(context).store
        with as_failure():
            cut_off = interrupted_windows(store.reading(), store.jobs())
        if not cut_off:
            return dg.SkipReason("no job needs to be started again")
        # Again after a while, if the API was away as well.
        attempt = int(time.time()) // _AGAIN_SECONDS
        return [
            dg.RunRequest(
                run_key=f"{paths.root}:{attempt}",
                run_config=dg.RunConfig(
                    {names.name(OP): WindowConfig(jobs=[str(paths.root)], recover_only=True)}
                ),
                tags={"arroyo/job_id": str(paths.root)},
            )
            for paths in cut_off
        ]

    return arroyo_window_recovery
