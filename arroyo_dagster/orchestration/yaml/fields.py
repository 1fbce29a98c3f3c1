"""The sections of the component's YAML. Each turns into the options of the Python API."""

import dataclasses
import inspect
import re
from collections.abc import Iterator, Sequence
from copy import copy
from datetime import timedelta
from typing import Annotated, Any, ClassVar, Literal, get_type_hints

from pydantic import Field, PositiveFloat, PositiveInt, create_model

from arroyo_dagster.orchestration.compaction.assets import CompactionConfig
from arroyo_dagster.orchestration.compaction.maintenance_window import MaintenanceWindow
from arroyo_dagster.orchestration.dataflow.assets import SdfOptions
from arroyo_dagster.orchestration.definitions import (
    ArroyoOptions,
    Lineage,
    MaintenanceOptions,
    ScheduleOptions,
)
from arroyo_dagster.orchestration.gc.assets import DeadJobsConfig, GcConfig, OrphansConfig
from arroyo_dagster.orchestration.loading import LIST_WITHIN
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
from arroyo_dagster.orchestration.settings import configured, setting_field, settings_config
from arroyo_dagster.orchestration.surgery.forked_state import ForkConfig, StateFork
from arroyo_dagster.orchestration.verify.verdict import VerifyOptions
from arroyo_dagster.orchestration.yaml.model import YamlModel
from arroyo_dagster.orchestration.yaml.texts import (
    Duration,
    ExportName,
    HttpUrl,
    Options,
    Secret,
    TimeZone,
    Window,
    texts_of_form,
)
from arroyo_dagster.state.model.health import HealthLimits
from arroyo_dagster.state.planning.exports import TableExport, TargetOptions

_ATTRIBUTE = re.compile(r"^    ([a-z_, ]+): (.*(?:\n     +.*)*)", re.MULTILINE)


class Section(YamlModel):
    """A part of the YAML that turns into options of the Python API."""

    made_of: ClassVar[Any] = None

    def as_options(self, **more: Any) -> Any:
        """Return the options.

        Args:
            more: those that have no field of their name here.
        """
        fields: dict[str, Any] = dict(self)
        for name, value in fields.items():
            fields[name] = value.as_options() if isinstance(value, Section) else value
        return self.made_of(**fields | more)


def section(options: Any, /, *left_out: str, **kinds: Any) -> Any:
    """Return a section with the fields of options: their types, defaults, bounds, descriptions.

    Args:
        options: a config of Dagster, or a dataclass whose docstring describes its attributes.
        left_out: fields that are set elsewhere.
        kinds: the types of fields that differ in YAML.
    """
    every = _of_dataclass(options) if dataclasses.is_dataclass(options) else _of_config(options)
    fields: Any = {
        name: (kinds.get(name, kind), field) for name, kind, field in every if name not in left_out
    }
    for name, (kind, field) in fields.items():
        if isinstance(kind, type) and issubclass(kind, YamlModel):  # it has defaults of its own
            fields[name] = kind, Field(default_factory=kind, description=field.description)
    made = create_model(f"{options.__name__}Fields", __base__=Section, **fields)
    made.made_of = options
    return made


def _of_config(config: Any) -> Iterator[tuple[str, Any, Any]]:
    for name, field in config.model_fields.items():
        yield name, field.annotation, copy(field)


def _of_dataclass(options: Any) -> Iterator[tuple[str, Any, Any]]:
    _, _, described = inspect.cleandoc(options.__doc__ or "").partition("Attributes:\n")
    texts = {
        name: " ".join(text.replace("None =", "Default:").split())
        for names, text in _ATTRIBUTE.findall(described.partition("\n\n")[0])
        for name in names.split(", ")
    }
    hints = get_type_hints(options)
    for field in dataclasses.fields(options):
        text = texts.get(field.name, "")
        defaults = {name: getattr(field, name) for name in ("default", "default_factory")}
        kept = {name: value for name, value in defaults.items() if value is not dataclasses.MISSING}
        text = f"{text[:1].upper()}{text[1:]}"
        yield field.name, hints[field.name], Field(description=text, repr=field.repr, **kept)


def _like(config: Any, name: str, **changes: Any) -> Any:
    """Return the field of a config, for a field of the component: described and bounded once."""
    field = copy(config.model_fields[name])
    for key, value in changes.items():
        setattr(field, key, value)
    return field


# ---- when, and how much --------------------------------------------------------------------------


class ScheduleTimes(section(ScheduleOptions, timezone=TimeZone)):  # type: ignore[misc]
    """When to run what no event triggers."""


class Sensor(
    section(  # type: ignore[misc]
        SensorOptions,
        interval_seconds=PositiveInt | None,
        events=PositiveInt,
        budget_seconds=PositiveFloat,
        files_per_job=PositiveInt,
    )
):
    """How much one tick of the sensor does."""


class LineageSection(
    section(Lineage, sources=bool | dict[str, str | None], sinks=bool | dict[str, str | None])  # type: ignore[misc]
):
    """Which sources and sinks of pipelines are shown, and under which keys."""


class HealthSection(section(settings_config(HealthLimits))):  # type: ignore[misc]
    """When the check `healthy` reports a pipeline."""


class Verify(
    section(VerifyOptions, "limits", audit_after=Duration, report_every=Duration)  # type: ignore[misc]
):
    """When pipelines are verified, and what is reported."""

    waiting_limit: Duration = Field(
        default=86_400.0,
        description="A pipeline that waits for maintenance for longer makes `fleet` red.",
    )
    health: HealthSection = Field(
        default_factory=HealthSection, description="Thresholds of the check `healthy`."
    )

    def as_options(self, **more: Any) -> VerifyOptions:
        """Return the options."""
        limits = configured(HealthLimits, self.health)
        return VerifyOptions(
            audit_after=self.audit_after, report_every=self.report_every, limits=limits, **more
        )


# ---- maintenance ---------------------------------------------------------------------------------

_NOT_IN_YAML = ("wait_seconds", "dry_run", "approved_plan", *BoundsConfig.model_fields)


class CompactionSection(section(CompactionConfig, *_NOT_IN_YAML)):  # type: ignore[misc]
    """How the schedules merge files."""


class GcSection(section(GcConfig, *_NOT_IN_YAML)):  # type: ignore[misc]
    """Which epochs the schedules keep, and how they delete."""


class _OptInSection(Section):
    enabled: bool = Field(default=False, description="Delete; otherwise only show what would be.")

    def as_options(self, **more: Any) -> Any:
        fields = {name: value for name, value in self if name != "enabled"}
        return self.made_of(**fields | more, dry_run=not self.enabled)


class OrphansSection(_OptInSection, section(OrphansConfig, *_NOT_IN_YAML)):  # type: ignore[misc]
    """How the schedule deletes what no epoch lists."""


class DeadJobsSection(
    _OptInSection,
    section(DeadJobsConfig, *_NOT_IN_YAML, "gone"),  # type: ignore[misc]
):
    """How the schedule deletes jobs that are proven gone."""


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

    def as_options(self, *, delete: bool, gone: Sequence[str]) -> MaintenanceOptions:
        """Return the same options for `build_arroyo_definitions`.

        Args:
            delete: whether expiry deletes.
            gone: jobs that were deleted on purpose.
        """
        bounds = {"budget_minutes": self.budget_minutes, "parallel_jobs": self.parallel_jobs}
        return MaintenanceOptions(
            min_backlog=self.min_backlog,
            most_jobs=self.most_jobs,
            compaction=self.compaction.as_options(**bounds),
            gc=self.gc.as_options(**bounds, dry_run=not delete),
            orphans=self.orphans and self.orphans.as_options(**bounds),
            dead_jobs=self.dead_jobs and self.dead_jobs.as_options(**bounds, gone=list(gone)),
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


class Spark(
    section(  # type: ignore[misc]
        SparkSessionResource,
        master=str | None,
        remote_url=Secret,
        conf=Options,
        packages=list[str],
        ship=bool,
        stop_on_teardown=bool,
    ),
    section(SparkThresholdFields, in_process_mb=int, spark_from_files=int, spark_from_objects=int),  # type: ignore[misc]
):
    """How to start Spark for maintenance; unused with `engine: in-process`."""

    pipes: Pipes | None = Field(
        default=None,
        description="Let a Dagster Pipes client start a process for each job that reaches a "
        "threshold, such as an application of spark-submit. Fields other than the thresholds are "
        "unused then.",
    )

    def session(self) -> SparkSessionResource:
        """Return the session of these fields."""
        fields = {name: getattr(self, name) for name in SparkSessionResource.model_fields}
        conf = {name: as_variable(value) for name, value in self.conf.items()}
        return SparkSessionResource(
            **fields | {"conf": conf, "remote_url": as_variable(self.remote_url)}
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


# ---- opt-in --------------------------------------------------------------------------------------

_SET_ELSEWHERE = ("jobs", "between", "time_zone", "dry_run", "recover_only")


class WindowSection(section(MaintenanceWindow, *_SET_ELSEWHERE)):  # type: ignore[misc]
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

    def as_options(self) -> MaintenanceWindow:
        """Return the same window for `build_arroyo_definitions`."""
        window: MaintenanceWindow = self.limits.as_options(
            jobs=self.jobs, between=self.between, time_zone=self.time_zone, dry_run=self.dry_run
        )
        return window


class ForkSection(section(ForkConfig, "execute", "approve")):  # type: ignore[misc]
    """What the schedule forks: from which job, into which, and how."""


class ForkSettings(
    section(StateFork, nightly=ForkSection | None, timezone=TimeZone)  # type: ignore[misc]
):
    """The asset `forked_state`, and when its schedule forks."""


class Export(
    section(TableExport, "to", name=ExportName, epochs=Literal["newest", "every", "changes"]),  # type: ignore[misc]
    section(  # type: ignore[misc]
        TargetOptions,
        format=Literal["parquet", "delta", "iceberg"],
        unsigned=Literal["decimal", "long"] | None,
        nanos=Literal["exact", "floor", "long"] | None,
        catalog=Options,
        options=Options,
    ),
):
    """A table that is exported to Parquet, Delta or Iceberg, each epoch once."""

    def as_options(self, **more: Any) -> TableExport:
        """Return the same export for `build_arroyo_definitions`."""
        to = {field.name: getattr(self, field.name) for field in dataclasses.fields(TargetOptions)}
        return TableExport(
            **{name: value for name, value in self if name not in to}, to=TargetOptions(**to)
        )


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
        default=SdfOptions.stale_after.total_seconds(),
        description="The maximum age of the newest epoch of a service that owns a state and is not "
        "at rest.",
    )
    read_mb: float = Field(
        default=SdfOptions.read_bytes / (1 << 20),
        gt=0,
        description="Do not count the rows of a state with larger files, in MiB.",
    )

    def as_options(self) -> SdfOptions:
        """Return the same options for dataflows' states."""
        return SdfOptions(
            stale_after=timedelta(seconds=self.stale_after),
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


_ELSEWHERE = ("runner", "translator", "waiting_limit", "freshness", "lineage", "directory", "sdf")


class Advanced(
    section(  # type: ignore[misc]
        ArroyoOptions,
        *_ELSEWHERE,
        spark=Spark,
        sensor=Sensor,
        verify=Verify,
        schedules=ScheduleTimes,
        maintenance=Maintenance,
        window=WindowSettings | None,
        exports=list[Export],
        fork=ForkSettings | None,
        bootstrapped_state=BootstrappedState | None,
        dataflows=Dataflows,
        private_columns=list[str],
    )
):
    """Everything that has a default, in one place."""

    layout: Literal["auto", "legacy", "protocol"] = Field(
        default="auto", description="Which jobs to show, by layout."
    )
    assume: dict[str, str] = Field(
        default_factory=dict,
        description="Assumed status by job or pipeline/job: stopped, running…; the API and the "
        "database take precedence.",
        examples=[{"payments/job_1": "stopped"}],
    )
    list_within: Duration = Field(
        default=LIST_WITHIN, description="The most time for the list of pipelines."
    )
    list_cache: str | None = Field(
        default=None,
        description="The file of the last list of pipelines. Default: below DAGSTER_HOME.",
        examples=["/var/lib/dagster/arroyo_pipelines.json"],
    )
    owners: list[Owner] = Field(
        default_factory=list,
        description="Owners of all assets: team:NAME, or e-mail addresses.",
        examples=[["team:streaming", "ann@example.com"]],
    )
    tags: dict[str, str] = Field(
        default_factory=dict, description="Tags of all assets.", examples=[{"domain": "payments"}]
    )
    docs_url: HttpUrl | None = Field(
        default=None,
        description="Where your copy of the documentation site is served, for links to the "
        "runbook.",
        examples=["https://docs.example.com/arroyo-dagster"],
    )
