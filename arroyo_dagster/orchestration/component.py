"""`ArroyoStateComponent`: the definitions of one deployment, from a few lines of YAML."""

from typing import Annotated, Any, Literal

import dagster as dg
from dagster.components.utils.translation import TranslationFn, TranslationFnResolver
from pydantic import Field

from arroyo_dagster.orchestration.compaction.assets import CompactionConfig
from arroyo_dagster.orchestration.compaction.maintenance_window import MaintenanceWindow
from arroyo_dagster.orchestration.definitions import ScheduleOptions, build_arroyo_definitions
from arroyo_dagster.orchestration.gc.assets import DeadJobsConfig, GcConfig, OrphansConfig
from arroyo_dagster.orchestration.maintenance import MaintenanceOptions
from arroyo_dagster.orchestration.resources import ArroyoStateStore
from arroyo_dagster.orchestration.runners import InProcessRunner
from arroyo_dagster.orchestration.secrets import as_variable, named_in_template
from arroyo_dagster.orchestration.settings import setting_field
from arroyo_dagster.orchestration.translator import ArroyoTableProps, DagsterArroyoTranslator
from arroyo_dagster.state.model.compaction import CompactionSettings
from arroyo_dagster.state.model.garbage import DeletionSettings, Retention


def _resolve_options(context: dg.ResolutionContext, options: Any) -> Any:
    return context.resolve_value(named_in_template(options))


Options = Annotated[
    dict[str, Any],
    dg.Resolver(_resolve_options, model_field_type=dict[str, Any], inject_before_resolve=False),
]
"""Options of a store's client. For secrets, name environment variables: `{env: NAME}`."""

Secret = Annotated[
    Any,
    dg.Resolver(
        _resolve_options,
        model_field_type=str | dict[str, str] | None,
        inject_before_resolve=False,
    ),
]
"""A text that may hold a secret. If it does, name an environment variable: `{env: NAME}`."""


class ScheduleTimes(dg.Model, dg.Resolvable):
    """When to run what no event triggers."""

    fleet: str = Field(default=ScheduleOptions.fleet, description="Cron of the fleet overview.")
    states: str = Field(
        default=ScheduleOptions.states, description="Cron of the checks of dataflows' states."
    )
    sync: str = Field(
        default=ScheduleOptions.sync, description="Cron of the synchronization of partition keys."
    )
    refresh: str = Field(
        default=ScheduleOptions.refresh, description="Cron of the catalogue of epochs."
    )
    compaction: str = Field(default=ScheduleOptions.compaction, description="Cron of compaction.")
    gc: str = Field(default=ScheduleOptions.gc, description="Cron of the expiry of old epochs.")
    orphans: str = Field(default=ScheduleOptions.orphans, description="Cron of the gc of orphans.")
    dead_jobs: str = Field(
        default=ScheduleOptions.dead_jobs, description="Cron of the gc of dead jobs."
    )
    timezone: str = Field(
        default="UTC", description="Time zone of the schedules above, for example `Europe/Berlin`."
    )
    running: bool = Field(default=False, description="Start the schedules as running.")


class Maintenance(dg.Model, dg.Resolvable):
    """How the schedules compact and delete state."""

    policy: Literal["bin-pack", "levels", "window", "full"] = setting_field(
        CompactionSettings, "policy", alone=True
    )
    min_backlog: int = setting_field(MaintenanceOptions, "min_backlog")
    most_jobs: int = setting_field(MaintenanceOptions, "most_jobs")
    budget_minutes: float = setting_field(MaintenanceOptions, "budget_minutes")
    keep_epochs: int = setting_field(Retention, "keep_epochs", default=10)
    delete: bool = Field(
        default=False,
        description="Delete older epochs. Without it, runs only show what would be deleted.",
    )
    delete_orphans: bool = Field(
        default=False, description="Delete orphans. Without it, runs only show them."
    )
    delete_dead_jobs: bool = Field(
        default=False, description="Delete jobs that Arroyo's API or database proves to be gone."
    )
    quarantine: bool = setting_field(DeletionSettings, "quarantine")
    engine: Literal["spark", "in-process"] = Field(
        default="spark", description="Where to merge and delete."
    )

    def options(self) -> MaintenanceOptions:
        """Return the same options for `build_arroyo_definitions`."""
        return MaintenanceOptions(
            min_backlog=self.min_backlog,
            most_jobs=self.most_jobs,
            budget_minutes=self.budget_minutes,
            compaction=CompactionConfig(policy=self.policy),
            gc=GcConfig(
                keep_epochs=self.keep_epochs, dry_run=not self.delete, quarantine=self.quarantine
            ),
            orphans=OrphansConfig(dry_run=not self.delete_orphans, quarantine=self.quarantine),
            dead_jobs=DeadJobsConfig(dry_run=not self.delete_dead_jobs, quarantine=self.quarantine),
        )


class WindowSettings(dg.Model, dg.Resolvable):
    """When running Arroyo jobs may be stopped to be rewritten. Opt-in per job."""

    jobs: list[str] = Field(
        min_length=1,
        description="Jobs as job or pipeline/job, at least one. No other job is touched.",
    )
    between: str = Field(description="The daily window, as HH:MM-HH:MM.")
    time_zone: str = Field(
        default="UTC", description="Time zone of `between`, for example `Europe/Berlin`."
    )


class ArroyoStateComponent(dg.Component, dg.Model, dg.Resolvable):
    """Inspect and maintain the state of the streaming jobs below one checkpoint URL."""

    checkpoint_url: str = Field(description="The checkpoint URL, in any form that Arroyo takes.")
    storage_options: Options = Field(
        default_factory=dict,
        repr=False,
        description="Options of the remote store's client. For secrets, name environment "
        "variables, as {env: NAME}; they are resolved when the store is opened.",
    )
    layout: Literal["auto", "legacy", "protocol"] = Field(
        default="auto", description="Which jobs to show, by layout."
    )
    arroyo_api_url: str | None = Field(
        default=None, description="Arroyo's REST API, as a source of job names and status."
    )
    arroyo_api_token: Secret = Field(
        default=None,
        repr=False,
        description="The token of that API, as {env: NAME}. Default: ARROYO_API_TOKEN.",
    )
    arroyo_database: Secret = Field(
        default=None,
        repr=False,
        description="The controller's state.sqlite, as a source of job names and status; "
        "{env: NAME} if the URL holds a password.",
    )
    catalogue_url: str | None = Field(
        default=None,
        description="Where the catalogue is stored, one place for all hosts. Default: below "
        "DAGSTER_HOME. Required if Dagster's storage or run launcher serves several hosts.",
    )
    catalogue_options: Options = Field(
        default_factory=dict,
        repr=False,
        description="Options of the catalogue's store, in the form of storage_options.",
    )
    deployment: str | None = Field(
        default=None, description="Name of this deployment, if one Dagster instance has several."
    )
    sensor_running: bool = Field(default=False, description="Start the sensor as running.")
    schedules: ScheduleTimes = Field(default_factory=ScheduleTimes)
    maintenance: Maintenance = Field(default_factory=Maintenance)
    window: WindowSettings | None = Field(
        default=None,
        description="Which running Arroyo jobs may be stopped, and when. Default: none.",
    )
    dataflows: list[str] = Field(
        default_factory=list,
        description="SDF dataflows whose states lie below the checkpoint URL: dataflow.yaml "
        "files, relative to this file.",
    )
    translation: Annotated[
        TranslationFn[str] | None,
        TranslationFnResolver(template_vars_for_translation_fn=lambda table: {"table": table}),
    ] = None

    @classmethod
    def get_spec(cls) -> dg.ComponentTypeSpec:
        """Return what `dg` shows of this component."""
        return dg.ComponentTypeSpec(tags=["arroyo", "spark"])

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Build what `build_arroyo_definitions` returns for these fields."""
        times = self.schedules
        return build_arroyo_definitions(
            ArroyoStateStore(
                checkpoint_url=self.checkpoint_url,
                storage_options=self.storage_options,
                layout=self.layout,
                catalogue_url=self.catalogue_url,
                catalogue_options=self.catalogue_options,
                arroyo_api_url=self.arroyo_api_url,
                arroyo_api_token=as_variable(self.arroyo_api_token),
                arroyo_database=as_variable(self.arroyo_database),
            ),
            runner=InProcessRunner() if self.maintenance.engine == "in-process" else None,
            maintenance=self.maintenance.options(),
            translator=_Translated(self.translation),
            deployment=self.deployment,
            sensor_running=self.sensor_running,
            schedules=ScheduleOptions(
                fleet=times.fleet,
                states=times.states,
                sync=times.sync,
                refresh=times.refresh,
                compaction=times.compaction,
                gc=times.gc,
                orphans=times.orphans,
                dead_jobs=times.dead_jobs,
                timezone=times.timezone,
            ),
            schedules_running=times.running,
            window=None
            if self.window is None
            else MaintenanceWindow(
                jobs=self.window.jobs,
                between=self.window.between,
                time_zone=self.window.time_zone,
            ),
            dataflows=[context.path / one for one in self.dataflows],
        )


class _Translated(DagsterArroyoTranslator):
    """The default names, changed by what the YAML says under `translation`."""

    def __init__(self, translation: TranslationFn[str] | None) -> None:
        self._translation = translation

    def get_asset_spec(self, props: ArroyoTableProps) -> dg.AssetSpec:
        spec = super().get_asset_spec(props)
        return spec if self._translation is None else self._translation(spec, props.table)
