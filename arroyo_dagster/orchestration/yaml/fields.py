"""The sections of the component's YAML. Each turns into the options of the Python API."""

from copy import copy
from datetime import timedelta
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, create_model

from arroyo_dagster.orchestration.catalog.checks import RECENT
from arroyo_dagster.orchestration.catalog.sensor import SensorOptions
from arroyo_dagster.orchestration.compaction.assets import CompactionConfig
from arroyo_dagster.orchestration.compaction.maintenance_window import (
    MaintenanceWindow,
    WindowConfig,
)
from arroyo_dagster.orchestration.dataflow.assets import SdfOptions
from arroyo_dagster.orchestration.definitions import ScheduleOptions
from arroyo_dagster.orchestration.gc.assets import (
    DeadJobsConfig,
    GcConfig,
    GcRunConfig,
    OrphansConfig,
)
from arroyo_dagster.orchestration.maintenance import MaintenanceOptions
from arroyo_dagster.orchestration.pipes import PipesRunner, load_client
from arroyo_dagster.orchestration.resources import ArroyoStateStore, SparkSessionResource
from arroyo_dagster.orchestration.runners import (
    InProcessRunner,
    MaintenanceRunner,
    SparkRunner,
    SparkThresholdFields,
)
from arroyo_dagster.orchestration.secrets import as_variable
from arroyo_dagster.orchestration.settings import setting_field, settings_config
from arroyo_dagster.orchestration.surgery.forked_state import ForkConfig, StateFork
from arroyo_dagster.orchestration.yaml.model import YamlModel
from arroyo_dagster.orchestration.yaml.texts import (
    Cron,
    Options,
    Secret,
    TimeZone,
    Window,
    texts_of_form,
)
from arroyo_dagster.state.model.health import HealthLimits
from arroyo_dagster.state.model.settings import setting_fields, settings_from
from arroyo_dagster.state.model.verify import AuditSettings

MINUTE = timedelta(minutes=1)


def _like(config: type[Any], name: str, **changes: Any) -> Any:
    """Return the field of a config, for a field of the component: described and bounded once."""
    field = copy(config.model_fields[name])
    for key, value in changes.items():
        setattr(field, key, value)
    return field


def _section(config: type[Any], *left_out: str) -> Any:
    """Return a class with the fields of a config, but for those that are set elsewhere."""
    fields: Any = {
        name: (field.annotation, _like(config, name))
        for name, field in config.model_fields.items()
        if name not in left_out
    }
    return create_model(f"{config.__name__}Fields", __base__=YamlModel, **fields)


class ScheduleTimes(YamlModel):
    """When to run what no event triggers."""

    fleet: Cron = Field(default=ScheduleOptions.fleet, description="Cron of the fleet overview.")
    health: Cron = Field(default=ScheduleOptions.health, description="Cron of the health checks.")
    audit: Cron = Field(default=ScheduleOptions.audit, description="Cron of the audits.")
    states: Cron = Field(
        default=ScheduleOptions.states, description="Cron of the checks of dataflows' states."
    )
    sync: Cron = Field(
        default=ScheduleOptions.sync, description="Cron of the synchronization of partition keys."
    )
    refresh: Cron = Field(
        default=ScheduleOptions.refresh, description="Cron of the catalogue of epochs."
    )
    compaction: Cron = Field(default=ScheduleOptions.compaction, description="Cron of compaction.")
    gc: Cron = Field(default=ScheduleOptions.gc, description="Cron of the expiry of old epochs.")
    orphans: Cron = Field(default=ScheduleOptions.orphans, description="Cron of the gc of orphans.")
    dead_jobs: Cron = Field(
        default=ScheduleOptions.dead_jobs, description="Cron of the gc of dead jobs."
    )
    exports: Cron = Field(
        default=ScheduleOptions.exports, description="Cron of the exports of tables."
    )
    timezone: TimeZone = Field(
        default="UTC", description="Time zone of the schedules above, for example `Europe/Berlin`."
    )
    running: bool = Field(default=False, description="Start the schedules as running.")

    def options(self) -> ScheduleOptions:
        """Return the same times for `build_arroyo_definitions`."""
        return ScheduleOptions(**{k: v for k, v in dict(self).items() if k != "running"})


_OF_MAINTENANCE = (
    *("policy", "wait_seconds", "lease_wait_seconds", "max_checkpoint_slowdown", "dry_run"),
)


class CompactionSection(_section(CompactionConfig, *_OF_MAINTENANCE)):  # type: ignore[misc]
    """How the schedules merge files, apart from the policy."""


class Maintenance(YamlModel):
    """How the schedules compact and delete state."""

    policy: Literal["bin-pack", "levels", "window", "full"] = _like(CompactionConfig, "policy")
    compaction: CompactionSection = Field(
        default_factory=CompactionSection, description="How to merge files: sizes, order, budgets."
    )
    min_backlog: int = setting_field(MaintenanceOptions, "min_backlog", ge=1)
    most_jobs: int = setting_field(MaintenanceOptions, "most_jobs")
    budget_minutes: float = setting_field(MaintenanceOptions, "budget_minutes")
    parallel_jobs: int = setting_field(MaintenanceOptions, "parallel_jobs")
    lease_wait_seconds: float = _like(GcRunConfig, "lease_wait_seconds")
    max_checkpoint_slowdown: float = _like(GcRunConfig, "max_checkpoint_slowdown")
    keep_epochs: int | None = _like(GcConfig, "keep_epochs")
    keep_days: float | None = _like(GcConfig, "keep_days")
    delete: bool = Field(
        default=False,
        description="Delete older epochs. Without it, runs only show what would be deleted.",
    )
    delete_orphans: bool = Field(
        default=False, description="Delete orphans. Without it, runs only show them."
    )
    orphans_older_than_days: float = _like(
        OrphansConfig, "older_than_days", description="Keep orphans younger than this."
    )
    delete_dead_jobs: bool = Field(
        default=False, description="Delete jobs that Arroyo's API or database proves to be gone."
    )
    dead_jobs_older_than_days: float = _like(
        DeadJobsConfig,
        "older_than_days",
        description="Keep dead jobs with an object that is younger than this.",
    )
    needs_approval: bool = _like(
        GcRunConfig,
        "needs_approval",
        description="Scheduled runs only plan. To delete, start the job's own run with "
        "`approved_plan`, the digest of the plan that a person has reviewed.",
    )
    quarantine: bool = _like(GcRunConfig, "quarantine")
    journal_days: float | None = _like(GcRunConfig, "journal_days")
    engine: Literal["spark", "in-process"] = Field(
        default="spark", description="Where to merge and delete."
    )

    def options(self) -> MaintenanceOptions:
        """Return the same options for `build_arroyo_definitions`."""
        shared: dict[str, Any] = {
            "quarantine": self.quarantine,
            "lease_wait_seconds": self.lease_wait_seconds,
            "max_checkpoint_slowdown": self.max_checkpoint_slowdown,
            "journal_days": self.journal_days,
            "needs_approval": self.needs_approval,
        }
        return MaintenanceOptions(
            min_backlog=self.min_backlog,
            most_jobs=self.most_jobs,
            budget_minutes=self.budget_minutes,
            parallel_jobs=self.parallel_jobs,
            compaction=CompactionConfig(
                policy=self.policy,
                lease_wait_seconds=self.lease_wait_seconds,
                max_checkpoint_slowdown=self.max_checkpoint_slowdown,
                **dict(self.compaction),
            ),
            gc=GcConfig(
                keep_epochs=self.keep_epochs,
                keep_days=self.keep_days,
                dry_run=not self.delete,
                **shared,
            ),
            orphans=OrphansConfig(
                older_than_days=self.orphans_older_than_days,
                dry_run=not self.delete_orphans,
                **shared,
            ),
            dead_jobs=DeadJobsConfig(
                older_than_days=self.dead_jobs_older_than_days,
                dry_run=not self.delete_dead_jobs,
                **shared,
            ),
        )


class Pipes(YamlModel):
    """The Dagster Pipes client that starts a process for each job's maintenance."""

    client: str = Field(
        description="The client, as module:name, or a function without arguments that returns one.",
        examples=["my_project.clients:spark_submit"],
    )
    arguments: Options = _like(
        PipesRunner,
        "arguments",
        examples=[{"command": ["spark-submit", "--master", "yarn", "maintain.py"]}],
    )

    def runner(self, store: ArroyoStateStore, thresholds: dict[str, int]) -> PipesRunner:
        """Return what starts the process.

        Raises:
            InputError: there is no such client.
        """
        client = load_client(self.client)
        return PipesRunner(client=client, store=store, arguments=self.arguments, **thresholds)


class Spark(YamlModel):
    """How to start Spark for maintenance; unused with `engine: in-process`."""

    master: str | None = _like(SparkSessionResource, "master", examples=["local[*]", "yarn"])
    remote_url: Secret = _like(
        SparkSessionResource,
        "remote_url",
        description="Use the Spark Connect server at this URL; {env: NAME} if it holds a token.",
        examples=["sc://spark-connect:15002"],
    )
    conf: Options = Field(
        default_factory=dict,
        repr=False,
        description="Settings of Spark. They take precedence over those of this package. For "
        "secrets, name environment variables, as {env: NAME}.",
        examples=[{"spark.executor.memory": "4g"}],
    )
    packages: list[str] = _like(
        SparkSessionResource,
        "packages",
        examples=[["org.apache.spark:spark-sql-kafka-0-10_2.13:4.1.0"]],
    )
    ship: bool = _like(SparkSessionResource, "ship")
    stop_on_teardown: bool = _like(SparkSessionResource, "stop_on_teardown")
    in_process_mb: int = _like(
        SparkRunner,
        "in_process_mb",
    )
    spark_from_files: int = _like(SparkRunner, "spark_from_files")
    spark_from_objects: int = _like(SparkRunner, "spark_from_objects")
    pipes: Pipes | None = Field(
        default=None,
        description="Let a Dagster Pipes client start a process for each job that reaches a "
        "threshold, such as an application of spark-submit. Fields other than the thresholds are "
        "unused then.",
    )

    def session(self) -> SparkSessionResource:
        """Return the session of these fields."""
        return SparkSessionResource(
            master=self.master,
            remote_url=as_variable(self.remote_url),
            conf={name: as_variable(value) for name, value in self.conf.items()},
            packages=self.packages,
            ship=self.ship,
            stop_on_teardown=self.stop_on_teardown,
        )

    def runner(
        self, session: SparkSessionResource, engine: str, store: ArroyoStateStore
    ) -> MaintenanceRunner:
        """Return what compacts and deletes."""
        if engine == "in-process":
            return InProcessRunner()
        thresholds = {name: getattr(self, name) for name in SparkThresholdFields.model_fields}
        if self.pipes is not None:
            return self.pipes.runner(store, thresholds)
        return SparkRunner(spark=session, **thresholds)


class Sensor(YamlModel):
    """How much one tick of the sensor does."""

    interval_seconds: int | None = Field(
        default=SensorOptions.interval_seconds,
        ge=1,
        description="The minimum number of seconds between two polls. Default: 30 to 300, by the "
        "number of jobs.",
    )
    epochs_per_job: int = Field(
        default=SensorOptions.epochs_per_job,
        ge=1,
        description="The maximum number of newest epochs of a job that get an event each.",
    )
    events: int = Field(
        default=SensorOptions.events,
        ge=1,
        description="The maximum number of events of a tick; other jobs come first in the next.",
    )
    budget_seconds: float = Field(
        default=SensorOptions.budget_seconds,
        gt=0,
        description="Start nothing after this many seconds. Dagster ends a tick after 60.",
    )
    files_per_job: int = Field(
        default=SensorOptions.files_per_job,
        ge=1,
        description="For a job with more files, bytes and rows are left out of the event.",
    )

    def options(self) -> SensorOptions:
        """Return the same options for `build_arroyo_definitions`."""
        return SensorOptions(**dict(self))


_SET_ELSEWHERE = ("jobs", "between", "time_zone", "dry_run", "recover_only")


class WindowSection(_section(WindowConfig, *_SET_ELSEWHERE)):  # type: ignore[misc]
    """How to stop, rewrite and start a job within its window."""


class WindowSettings(YamlModel):
    """When running Arroyo jobs may be stopped to be rewritten. Opt-in per job."""

    jobs: list[str] = Field(
        min_length=1,
        description="Jobs as job or pipeline/job, at least one. No other job is touched.",
        examples=[["payments/job_1"]],
    )
    between: Window = Field(description="The daily window, as HH:MM-HH:MM.")
    time_zone: TimeZone = Field(
        default="UTC", description="Time zone of `between`, for example `Europe/Berlin`."
    )
    limits: WindowSection = Field(
        default_factory=WindowSection,
        description="How long each step may take, and which files to rewrite.",
    )
    dry_run: bool = _like(WindowConfig, "dry_run")

    def options(self) -> MaintenanceWindow:
        """Return the same window for `build_arroyo_definitions`."""
        config = WindowConfig(jobs=self.jobs, dry_run=self.dry_run, **dict(self.limits))
        return MaintenanceWindow(
            jobs=self.jobs, between=self.between, time_zone=self.time_zone, config=config
        )


_T = TypeVar("_T")


def _settings_of(section: YamlModel, settings: type[_T]) -> _T:
    """Return the settings that a section with their names in Dagster holds."""
    fields = {field.config: field.name for field in setting_fields(settings)}
    return settings_from(settings, {fields[name]: one for name, one in dict(section).items()})


class HealthSection(_section(settings_config(HealthLimits))):  # type: ignore[misc]
    """When a health check reports a job."""

    def settings(self) -> HealthLimits:
        """Return the same limits for `build_arroyo_definitions`."""
        return _settings_of(self, HealthLimits)


class AuditSection(_section(settings_config(AuditSettings))):  # type: ignore[misc]
    """How closely jobs are audited, and how long."""

    def settings(self) -> AuditSettings:
        """Return the same settings for `build_arroyo_definitions`."""
        return _settings_of(self, AuditSettings)


class ForkSection(_section(ForkConfig, "execute", "approve")):  # type: ignore[misc]
    """What the schedule forks: from which job, into which, and how."""


class ForkSettings(YamlModel):
    """The asset `forked_state`, and when its schedule forks."""

    nightly: ForkSection | None = Field(
        default=None, description="What the schedule forks. Default: no schedule."
    )
    cron: Cron = Field(default=StateFork.cron, description="Cron of the fork.")
    timezone: TimeZone = Field(
        default="UTC", description="Time zone of `cron`, for example `Europe/Berlin`."
    )

    def options(self) -> StateFork:
        """Return the same fork for `build_arroyo_definitions`."""
        nightly = None if self.nightly is None else ForkConfig(**dict(self.nightly))
        return StateFork(nightly=nightly, cron=self.cron, timezone=self.timezone)


class BootstrappedState(YamlModel):
    """The asset `bootstrapped_state`, and what computes it."""

    function: str = Field(
        pattern=r".:.",
        description="MODULE:FUNCTION, which the code location can import: it gets the Spark "
        "session, and returns the tables and their cut as a `Bootstrap`.",
        examples=["history:orders"],
    )


class Checks(YamlModel):
    """Thresholds of the checks."""

    recent_minutes: float = Field(
        default=RECENT / MINUTE,
        gt=0,
        description="The maximum age of the newest epoch of a job that is not at rest.",
    )
    health: HealthSection = Field(
        default_factory=HealthSection, description="When a health check reports a job."
    )
    audit: AuditSection = Field(
        default_factory=AuditSection, description="How closely jobs are audited, and how long."
    )
    state_stale_minutes: float = Field(
        default=SdfOptions.stale_after / MINUTE,
        gt=0,
        description="The maximum age of the newest epoch of a service that owns a dataflow's "
        "state and is not at rest.",
    )
    state_read_mb: float = Field(
        default=SdfOptions.read_bytes / (1 << 20),
        gt=0,
        description="Do not count the rows of a dataflow's state with larger files, in MiB.",
    )

    def sdf(self) -> SdfOptions:
        """Return the same options for dataflows' states."""
        return SdfOptions(
            stale_after=self.state_stale_minutes * MINUTE,
            read_bytes=int(self.state_read_mb * (1 << 20)),
        )


Owner = Annotated[
    str,
    *texts_of_form(
        r"^(team:[A-Za-z0-9_-]+|[^@\s]+@[^@\s]+\.[^@\s]+)$",
        "an owner: team:NAME, or an e-mail address",
    ),
]
"""`team:NAME`, or an e-mail address."""
