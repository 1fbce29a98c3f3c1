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
from arroyo_dagster.orchestration.translator import ArroyoTableProps, DagsterArroyoTranslator


def _resolve_options(context: dg.ResolutionContext, options: Any) -> Any:
    return context.resolve_value(named_in_template(options))


Options = Annotated[
    dict[str, Any],
    dg.Resolver(_resolve_options, model_field_type=dict[str, Any], inject_before_resolve=False),
]
"""Options of a store's client; of secrets the names of variables, as `{env: NAME}`."""

Secret = Annotated[
    Any,
    dg.Resolver(
        _resolve_options,
        model_field_type=str | dict[str, str] | None,
        inject_before_resolve=False,
    ),
]
"""A text that may hold a secret: then the name of a variable, as `{env: NAME}`."""


class ScheduleTimes(dg.Model, dg.Resolvable):
    """When what has no event of its own is done."""

    fleet: str = Field(default=ScheduleOptions.fleet, description="Cron of the fleet overview.")
    states: str = Field(
        default=ScheduleOptions.states, description="Cron of the checks of dataflows' states."
    )
    sync: str = Field(default=ScheduleOptions.sync, description="Cron of the partition keys.")
    refresh: str = Field(
        default=ScheduleOptions.refresh, description="Cron of the catalogue of epochs."
    )
    compaction: str = Field(default=ScheduleOptions.compaction, description="Cron of compaction.")
    gc: str = Field(default=ScheduleOptions.gc, description="Cron of the expiry of old epochs.")
    orphans: str = Field(
        default=ScheduleOptions.orphans, description="Cron of the collection of orphans."
    )
    dead_jobs: str = Field(
        default=ScheduleOptions.dead_jobs, description="Cron of the removal of dead jobs."
    )
    timezone: str = Field(default="UTC", description="Of the times of day in these.")
    running: bool = Field(default=False, description="On from the start.")


class Maintenance(dg.Model, dg.Resolvable):
    """How the schedules keep state small."""

    policy: Literal["bin-pack", "levels", "window", "full"] = Field(
        default="bin-pack",
        description="Merge small neighbours, level by level, by window of event time, or all.",
    )
    min_backlog: int = Field(
        default=MaintenanceOptions.min_backlog,
        description="Compact a job once so many of its files were never merged.",
    )
    most_jobs: int = Field(
        default=MaintenanceOptions.most_jobs,
        ge=1,
        description="One run of a schedule serves no more jobs, those that need it most.",
    )
    budget_minutes: float = Field(
        default=MaintenanceOptions.budget_minutes,
        gt=0,
        description="A run of a schedule begins no further job after so long.",
    )
    keep_epochs: int = Field(default=10, description="So many of the newest epochs stay.")
    delete: bool = Field(
        default=False, description="Remove older epochs; without it runs only show what would go."
    )
    delete_orphans: bool = Field(
        default=False, description="Remove what nothing refers to; without it runs only show it."
    )
    delete_dead_jobs: bool = Field(
        default=False, description="Remove jobs that a server proves to be gone."
    )
    quarantine: bool = Field(
        default=False, description="Move aside instead of deleting: `gc undelete` brings back."
    )
    engine: Literal["spark", "in-process"] = Field(
        default="spark", description="Who merges and deletes."
    )

    def options(self) -> MaintenanceOptions:
        """The same for `build_arroyo_definitions`."""
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
    """When running jobs of Arroyo's may be stopped to be rewritten; opt-in, job by job."""

    jobs: list[str] = Field(
        min_length=1, description="As job or pipeline/job, one at least; no other is touched."
    )
    between: str = Field(description="HH:MM-HH:MM, every day.")
    time_zone: str = Field(default="UTC", description="Of these times: a name of the tz database.")


class ArroyoStateComponent(dg.Component, dg.Model, dg.Resolvable):
    """See and keep small the state of the streaming jobs below one checkpoint URL."""

    checkpoint_url: str = Field(description="The checkpoint URL, in any form Arroyo takes.")
    storage_options: Options = Field(
        default_factory=dict,
        repr=False,
        description="For the client of a remote store. Of secrets only the names of variables, "
        "as {env: NAME}; they are looked up when the store is opened.",
    )
    layout: Literal["auto", "legacy", "protocol"] = Field(
        default="auto", description="Which jobs to see."
    )
    arroyo_api_url: str | None = Field(
        default=None, description="Arroyo's REST API, to ask what its jobs are doing."
    )
    arroyo_api_token: Secret = Field(
        default=None, repr=False, description="For that API, as {env: NAME}; else ARROYO_API_TOKEN."
    )
    arroyo_database: Secret = Field(
        default=None,
        repr=False,
        description="The controller's state.sqlite, for the same; {env: NAME} where the URL holds "
        "a password.",
    )
    catalogue_url: str | None = Field(
        default=None,
        description="Where the catalogue is kept, one place for all hosts. Below DAGSTER_HOME by "
        "default; required where Dagster's storage or run launcher serves several hosts.",
    )
    catalogue_options: Options = Field(
        default_factory=dict, repr=False, description="As storage_options, for the catalogue."
    )
    deployment: str | None = Field(
        default=None, description="Tells several deployments of one instance apart."
    )
    sensor_running: bool = Field(default=False, description="The sensor is on from the start.")
    schedules: ScheduleTimes = Field(default_factory=ScheduleTimes)
    maintenance: Maintenance = Field(default_factory=Maintenance)
    window: WindowSettings | None = Field(
        default=None, description="When running jobs of Arroyo's may be stopped, and which; none."
    )
    dataflows: list[str] = Field(
        default_factory=list,
        description="SDF dataflows whose states lie there: dataflow.yaml files, seen from here.",
    )
    translation: Annotated[
        TranslationFn[str] | None,
        TranslationFnResolver(template_vars_for_translation_fn=lambda table: {"table": table}),
    ] = None

    @classmethod
    def get_spec(cls) -> dg.ComponentTypeSpec:
        """Say what `dg` shows of this component."""
        return dg.ComponentTypeSpec(tags=["arroyo", "spark"])

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Build what `build_arroyo_definitions` gives for these fields."""
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
