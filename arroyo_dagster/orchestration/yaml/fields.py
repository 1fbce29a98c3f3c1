"""The sections of the component's YAML. Each turns into the options of the Python API."""

from collections.abc import Sequence
from copy import copy
from datetime import timedelta
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, create_model

from arroyo_dagster.orchestration.compaction.assets import CompactionConfig
from arroyo_dagster.orchestration.compaction.maintenance_window import MaintenanceWindow
from arroyo_dagster.orchestration.dataflow.assets import SdfOptions
from arroyo_dagster.orchestration.definitions import MaintenanceOptions, ScheduleOptions
from arroyo_dagster.orchestration.gc.assets import DeadJobsConfig, GcConfig, OrphansConfig
from arroyo_dagster.orchestration.lineage import Lineage
from arroyo_dagster.orchestration.pipes import PipesRunner, load_client
from arroyo_dagster.orchestration.resources import ArroyoStateStore, SparkSessionResource
from arroyo_dagster.orchestration.runners import (
    InProcessRunner,
    MaintenanceRunner,
    SparkRunner,
    SparkThresholdFields,
)
from arroyo_dagster.orchestration.secrets import as_variable
from arroyo_dagster.orchestration.sensor import SensorOptions
from arroyo_dagster.orchestration.serving import BoundsConfig
from arroyo_dagster.orchestration.settings import setting_field, settings_config
from arroyo_dagster.orchestration.surgery.forked_state import ForkConfig, StateFork
from arroyo_dagster.orchestration.verify.verdict import VerifyOptions
from arroyo_dagster.orchestration.yaml.model import YamlModel
from arroyo_dagster.orchestration.yaml.texts import (
    Cron,
    Duration,
    Options,
    Secret,
    TimeZone,
    Window,
    seconds_of,
    texts_of_form,
)
from arroyo_dagster.state.model.health import HealthLimits
from arroyo_dagster.state.model.settings import setting_fields, settings_from


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

    verify: Cron | None = Field(
        default=None,
        description="Cron of the checks. Default: every 15 minutes, less often for more than 100 "
        "pipelines.",
    )
    fleet: Cron = Field(default=ScheduleOptions.fleet, description="Cron of the overview.")
    compaction: Cron = Field(default=ScheduleOptions.compaction, description="Cron of compaction.")
    gc: Cron = Field(default=ScheduleOptions.gc, description="Cron of the expiry of old epochs.")
    orphans: Cron = Field(default=ScheduleOptions.orphans, description="Cron of the gc of orphans.")
    dead_jobs: Cron = Field(
        default=ScheduleOptions.dead_jobs, description="Cron of the gc of dead jobs."
    )
    exports: Cron = Field(default=ScheduleOptions.exports, description="Cron of the exports.")
    states: Cron = Field(
        default=ScheduleOptions.states, description="Cron of the checks of dataflows' states."
    )
    timezone: TimeZone = Field(
        default="UTC", description="Time zone of the schedules above, for example `Europe/Berlin`."
    )

    def options(self) -> ScheduleOptions:
        """Return the same times for `build_arroyo_definitions`."""
        return ScheduleOptions(**dict(self))


_NOT_IN_YAML = ("wait_seconds", "dry_run", "approved_plan", *BoundsConfig.model_fields)


class CompactionSection(_section(CompactionConfig, *_NOT_IN_YAML)):  # type: ignore[misc]
    """How the schedules merge files."""


class GcSection(_section(GcConfig, *_NOT_IN_YAML)):  # type: ignore[misc]
    """Which epochs the schedules keep, and how they delete."""


class OrphansSection(_section(OrphansConfig, *_NOT_IN_YAML)):  # type: ignore[misc]
    """How the schedule deletes what no epoch lists."""

    enabled: bool = Field(default=False, description="Delete orphans; otherwise only show them.")


class DeadJobsSection(_section(DeadJobsConfig, *_NOT_IN_YAML, "gone")):  # type: ignore[misc]
    """How the schedule deletes jobs that are proven gone."""

    enabled: bool = Field(default=False, description="Delete them; otherwise only show them.")


class Maintenance(YamlModel):
    """How the schedules compact and delete state, with `mode: maintain`."""

    min_backlog: int = setting_field(MaintenanceOptions, "min_backlog")
    most_jobs: int = setting_field(MaintenanceOptions, "most_jobs")
    budget_minutes: float = _like(BoundsConfig, "budget_minutes")
    parallel_jobs: int = _like(BoundsConfig, "parallel_jobs")
    compaction: CompactionSection = Field(
        default_factory=CompactionSection, description="How to merge files: sizes, order, budgets."
    )
    gc: GcSection = Field(default_factory=GcSection, description="Which epochs to keep.")
    orphans: OrphansSection | None = Field(
        default=None, description="Add the asset `orphans` of the whole root. Default: without it."
    )
    dead_jobs: DeadJobsSection | None = Field(
        default=None, description="Add the asset `dead_jobs`. Default: without it."
    )
    engine: Literal["spark", "in-process"] = Field(
        default="spark", description="Where to merge and delete."
    )

    def options(self, *, delete: bool, gone: Sequence[str]) -> MaintenanceOptions:
        """Return the same options for `build_arroyo_definitions`.

        Args:
            delete: whether expiry deletes.
            gone: jobs that were deleted on purpose.
        """
        bounds = {"budget_minutes": self.budget_minutes, "parallel_jobs": self.parallel_jobs}
        orphans, dead = self.orphans, self.dead_jobs

        def config(section: Any, config_class: Any, **more: Any) -> Any:
            fields = {name: value for name, value in dict(section).items() if name != "enabled"}
            return config_class(**fields, **bounds, **more)

        return MaintenanceOptions(
            min_backlog=self.min_backlog,
            most_jobs=self.most_jobs,
            compaction=config(self.compaction, CompactionConfig),
            gc=config(self.gc, GcConfig, dry_run=not delete),
            orphans=None
            if orphans is None
            else config(orphans, OrphansConfig, dry_run=not orphans.enabled),
            dead_jobs=None
            if dead is None
            else config(dead, DeadJobsConfig, dry_run=not dead.enabled, gone=list(gone)),
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
        "number of pipelines.",
    )
    events: int = Field(
        default=SensorOptions.events,
        ge=1,
        description="The maximum number of events of a tick; other pipelines come first in the "
        "next.",
    )
    budget_seconds: float = Field(
        default=SensorOptions.budget_seconds,
        gt=0,
        description="Start nothing after this many seconds. Dagster ends a tick after 60.",
    )
    files_per_job: int = Field(
        default=SensorOptions.files_per_job,
        ge=1,
        description="For a pipeline with more files, bytes and rows are left out of the event.",
    )
    source_rates: bool = Field(
        default=SensorOptions.source_rates,
        description="Show how far and how fast each partition of the sources is read.",
    )

    def options(self) -> SensorOptions:
        """Return the same options for `build_arroyo_definitions`."""
        return SensorOptions(**dict(self))


_SET_ELSEWHERE = ("jobs", "between", "time_zone", "dry_run", "recover_only")


class WindowSection(_section(MaintenanceWindow, *_SET_ELSEWHERE)):  # type: ignore[misc]
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
    dry_run: bool = _like(MaintenanceWindow, "dry_run")

    def options(self) -> MaintenanceWindow:
        """Return the same window for `build_arroyo_definitions`."""
        return MaintenanceWindow(
            jobs=self.jobs,
            between=self.between,
            time_zone=self.time_zone,
            dry_run=self.dry_run,
            **dict(self.limits),
        )


_T = TypeVar("_T")


def _settings_of(section: YamlModel, settings: type[_T]) -> _T:
    """Return the settings that a section with their names in Dagster holds."""
    fields = {field.config: field.name for field in setting_fields(settings)}
    return settings_from(settings, {fields[name]: one for name, one in dict(section).items()})


class HealthSection(_section(settings_config(HealthLimits))):  # type: ignore[misc]
    """When the check `healthy` reports a pipeline."""

    def settings(self) -> HealthLimits:
        """Return the same limits for `build_arroyo_definitions`."""
        return _settings_of(self, HealthLimits)


class Verify(YamlModel):
    """When pipelines are verified, and what is reported."""

    audit_after: Duration = Field(
        default="1d",
        description="A pipeline is verified at level 4 after this time, although nothing changed.",
    )
    report_every: Duration = Field(
        default="1h", description="An unchanged verdict is recorded at most once in this time."
    )
    waiting_limit: Duration = Field(
        default="1d",
        description="A pipeline that waits for maintenance for longer makes `fleet` red.",
    )
    health: HealthSection = Field(
        default_factory=HealthSection, description="Thresholds of the check `healthy`."
    )

    def options(self) -> VerifyOptions:
        """Return the same options for `build_arroyo_definitions`."""
        return VerifyOptions(
            audit_after=seconds_of(self.audit_after),
            report_every=seconds_of(self.report_every),
            limits=self.health.settings(),
        )


class LineageSection(YamlModel):
    """Which sources and sinks of pipelines are shown, and under which keys."""

    sources: bool | dict[str, str | None] = Field(
        default=True,
        description="All, none, or other keys by keys. A key with null is left to you: add deps.",
        examples=[{"kafka/orders": "raw/orders"}],
    )
    sinks: bool | dict[str, str | None] = Field(
        default=True,
        description="All, none, or other keys by keys. A key with null is left to you.",
        examples=[{"filesystem/lake/orders": "lake/orders"}],
    )

    def options(self) -> Lineage:
        """Return the same choice for `build_arroyo_definitions`."""
        return Lineage(sources=self.sources, sinks=self.sinks)


class ForkSection(_section(ForkConfig, "execute", "approve")):  # type: ignore[misc]
    """What the schedule forks: from which job, into which, and how."""


class ForkSettings(YamlModel):
    """The asset `forked_state`, and when its schedule forks."""

    nightly: ForkSection | None = Field(
        default=None, description="What the schedule forks. Default: no schedule."
    )
    job: str = Field(
        default="",
        description="Which job takes the state at night, as job or pipeline/job.",
        examples=["staging/main"],
    )
    cron: Cron = Field(default=StateFork.cron, description="Cron of the fork.")
    timezone: TimeZone = Field(
        default="UTC", description="Time zone of `cron`, for example `Europe/Berlin`."
    )

    def options(self) -> StateFork:
        """Return the same fork for `build_arroyo_definitions`."""
        nightly = None if self.nightly is None else ForkConfig(**dict(self.nightly))
        return StateFork(nightly=nightly, job=self.job, cron=self.cron, timezone=self.timezone)


class BootstrappedState(YamlModel):
    """The asset `bootstrapped_state`, and what computes it."""

    function: str = Field(
        pattern=r".:.",
        description="MODULE:FUNCTION, which the code location can import: it gets the Spark "
        "session, and returns the tables and their cut as a `Bootstrap`.",
        examples=["history:orders"],
    )


class Dataflows(YamlModel):
    """SDF dataflows whose states lie below the checkpoint URL."""

    files: list[str] = Field(
        default_factory=list,
        description="dataflow.yaml files, relative to this file.",
        examples=[["dataflow.yaml"]],
    )
    stale_after: Duration = Field(
        default="15m",
        description="The maximum age of the newest epoch of a service that owns a state and is not "
        "at rest.",
    )
    read_mb: float = Field(
        default=SdfOptions.read_bytes / (1 << 20),
        gt=0,
        description="Do not count the rows of a state with larger files, in MiB.",
    )

    def options(self) -> SdfOptions:
        """Return the same options for dataflows' states."""
        return SdfOptions(
            stale_after=timedelta(seconds=seconds_of(self.stale_after)),
            read_bytes=int(self.read_mb * (1 << 20)),
        )


Owner = Annotated[
    str,
    *texts_of_form(
        r"^(team:[A-Za-z0-9_-]+|[^@\s]+@[^@\s]+\.[^@\s]+)$",
        "an owner: team:NAME, or an e-mail address",
    ),
]
"""`team:NAME`, or an e-mail address."""
