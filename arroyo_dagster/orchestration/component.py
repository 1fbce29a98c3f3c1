"""`ArroyoStateComponent`: the definitions of one deployment, from a few lines of YAML."""

from typing import Annotated, Literal, Self

import dagster as dg
from dagster.components.utils.translation import TranslationFn, TranslationFnResolver
from pydantic import BaseModel, Field, PrivateAttr, ValidationError

from arroyo_dagster.errors import ArroyoStateError, InputError
from arroyo_dagster.orchestration.definitions import build_arroyo_definitions
from arroyo_dagster.orchestration.directory import ArroyoDirectory
from arroyo_dagster.orchestration.resources import ArroyoStateStore
from arroyo_dagster.orchestration.secrets import as_variable
from arroyo_dagster.orchestration.translator import (
    ArroyoTableProps,
    DagsterArroyoTranslator,
    deployment_identifier,
)
from arroyo_dagster.orchestration.yaml.exports import Export
from arroyo_dagster.orchestration.yaml.fields import (
    MINUTE,
    BootstrappedState,
    Checks,
    ForkSettings,
    Maintenance,
    Owner,
    ScheduleTimes,
    Sensor,
    Spark,
    WindowSettings,
)
from arroyo_dagster.orchestration.yaml.model import (
    ComponentModel,
    YamlModel,
    describe_errors,
    refuse,
)
from arroyo_dagster.orchestration.yaml.scaffolder import ArroyoStateScaffolder
from arroyo_dagster.orchestration.yaml.texts import (
    HttpUrl,
    Name,
    Options,
    Secret,
    Url,
)


@dg.scaffold_with(ArroyoStateScaffolder)
class ArroyoStateComponent(dg.Component, YamlModel):
    """Inspect and maintain the state of the streaming jobs below one checkpoint URL."""

    checkpoint_url: Url = Field(
        description="The checkpoint URL, in any form that Arroyo takes.",
        examples=[
            "s3://bucket/checkpoints",
            "s3::https://minio.example.com:9000/bucket/checkpoints",
        ],
    )
    deployment: Name | None = Field(
        default=None,
        description="Name of this deployment, if one Dagster instance has several. All names of "
        "its definitions contain it.",
        examples=["production"],
    )
    storage_options: Options = Field(
        default_factory=dict,
        repr=False,
        description="Options of the remote store's client. For secrets, name environment "
        "variables, as {env: NAME}; they are resolved when the store is opened.",
        examples=[{"region": "eu-central-1", "secret_access_key": {"env": "S3_SECRET"}}],
    )
    delete_options: Options = Field(
        default_factory=dict,
        repr=False,
        description="Options of a client that only deletes, in the form of storage_options. With "
        "them, storage_options need no permission to delete.",
        examples=[{"secret_access_key": {"env": "S3_DELETE_SECRET"}}],
    )
    layout: Literal["auto", "legacy", "protocol"] = Field(
        default="auto", description="Which jobs to show, by layout."
    )
    arroyo_api_url: HttpUrl | None = Field(
        default=None,
        description="Arroyo's REST API, as a source of job names and status.",
        examples=["http://arroyo:5115"],
    )
    arroyo_api_token: Secret = Field(
        default=None,
        repr=False,
        description="The token of that API, as {env: NAME}. Default: ARROYO_API_TOKEN.",
        examples=[{"env": "ARROYO_TOKEN"}],
    )
    arroyo_database: Secret = Field(
        default=None,
        repr=False,
        description="The controller's state.sqlite, as a source of job names and status; "
        "{env: NAME} if the URL holds a password.",
        examples=["/var/lib/arroyo/state.sqlite"],
    )
    assume: dict[str, str] = Field(
        default_factory=dict,
        description="Assumed status by job or pipeline/job: stopped, running…; the API and the "
        "database take precedence.",
        examples=[{"payments/job_1": "stopped"}],
    )
    catalogue_url: Url | None = Field(
        default=None,
        description="Where the catalogue is stored, one place for all hosts. Default: below "
        "DAGSTER_HOME. Required if Dagster's storage or run launcher serves several hosts.",
        examples=["s3://bucket/arroyo-catalogue"],
    )
    catalogue_options: Options = Field(
        default_factory=dict,
        repr=False,
        description="Options of the catalogue's store, in the form of storage_options.",
        examples=[{"secret_access_key": {"env": "S3_SECRET"}}],
    )
    sensor_running: bool = Field(default=False, description="Start the sensor as running.")
    sensor: Sensor = Field(default_factory=Sensor, description="How much one tick does.")
    compaction_sensor: bool = Field(
        default=False,
        description="Add a sensor that requests compactions when there is enough to do, instead "
        "of by the clock. It starts as running with sensor_running.",
    )
    schedules: ScheduleTimes = Field(
        default_factory=ScheduleTimes, description="When to run what no event triggers."
    )
    maintenance: Maintenance = Field(
        default_factory=Maintenance, description="How the schedules compact and delete state."
    )
    spark: Spark = Field(
        default_factory=Spark, description="How to start Spark for maintenance. Default: locally."
    )
    window: WindowSettings | None = Field(
        default=None,
        description="Which running Arroyo jobs may be stopped, and when. Default: none.",
    )
    fork: ForkSettings | None = Field(
        default=None,
        description="Add the asset forked_state: a job of this deployment takes the state of "
        "another one. Default: without it.",
        examples=[{"nightly": {"source": "orders/main", "job": "staging/main", "window": True}}],
    )
    bootstrapped_state: BootstrappedState | None = Field(
        default=None,
        description="Add the asset bootstrapped_state: a job takes state that a function of yours "
        "computes on Spark from stored events. Default: without it.",
        examples=[{"function": "history:orders"}],
    )
    checks: Checks = Field(default_factory=Checks, description="Thresholds of the checks.")
    dataflows: list[str] = Field(
        default_factory=list,
        description="SDF dataflows whose states lie below the checkpoint URL: dataflow.yaml "
        "files, relative to this file.",
        examples=[["dataflow.yaml"]],
    )
    private_columns: list[str] = Field(
        default_factory=list,
        description="Columns whose values are masked wherever values are shown, as column, "
        "table.column, table.* or job.operator.table.column.field.",
        examples=[["email", "orders.*"]],
    )
    exports: list[Export] = Field(
        default_factory=list,
        description="Tables that are exported to Parquet, Delta or Iceberg; each is an asset.",
        examples=[
            [
                {
                    "name": "order_counts",
                    "jobs": "shop/main",
                    "operator": "count",
                    "table": "counts",
                    "target": "s3://lake/order_counts",
                    "format": "delta",
                }
            ]
        ],
    )
    owners: list[Owner] = Field(
        default_factory=list,
        description="Owners of all assets: team:NAME, or e-mail addresses.",
        examples=[["team:streaming", "ann@example.com"]],
    )
    tags: dict[str, str] = Field(
        default_factory=dict,
        description="Tags of all assets.",
        examples=[{"domain": "payments"}],
    )
    translation: Annotated[
        TranslationFn[str] | None,
        TranslationFnResolver(template_vars_for_translation_fn=lambda table: {"table": table}),
    ] = Field(
        default=None,
        description="Changes to key, group, description, tags… of the assets; {{ table }} is the "
        "asset's name.",
        examples=[{"group_name": "streaming"}],
    )
    docs_url: HttpUrl | None = Field(
        default=None,
        description="Where your copy of the documentation site is served, for links to the "
        "runbook.",
        examples=["https://docs.example.com/arroyo-dagster"],
    )
    _source: str | None = PrivateAttr(None)

    @classmethod
    def get_spec(cls) -> dg.ComponentTypeSpec:
        """Return what `dg` shows of this component."""
        return dg.ComponentTypeSpec(tags=["arroyo", "spark"])

    @classmethod
    def _model_base(cls) -> type[BaseModel]:
        return ComponentModel

    @classmethod
    def load(cls, attributes: BaseModel | None, context: dg.ComponentLoadContext) -> Self:
        """Load a component from YAML.

        Raises:
            DagsterInvalidDefinitionError: the YAML is wrong; its last line says what and where.
        """
        given = cls.model().model_validate({}) if attributes is None else attributes
        positions = context.resolution_context.source_position_tree
        if isinstance(given, ComponentModel) and given.wrong is not None:
            refuse(describe_errors(given.wrong, cls.model(), positions))
        try:
            component = super().load(given, context)
        except ValidationError as error:  # a value that a template yields
            refuse(describe_errors(error, cls.model(), positions))
        component._source = str(context.path if positions is None else positions.position)
        return component

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Build what `build_arroyo_definitions` returns for these fields.

        Raises:
            DagsterInvalidDefinitionError: the component is refused; its last line says why.
        """
        try:
            self._check_deployment(context)
            return self._definitions(context)
        except (ArroyoStateError, dg.DagsterInvalidDefinitionError) as error:
            refuse(f"{self._source}: {error}" if self._source else str(error))

    def _check_deployment(self, context: dg.ComponentLoadContext) -> None:
        """Refuse two components of one name: their definitions would have the same names."""
        others = context.component_tree.get_all_components(of_type=ArroyoStateComponent)
        for other in others:
            if other is self or other._name() != self._name():
                continue
            what = "have no deployment" if self._name() is None else f"are {self.deployment!r}"
            places = sorted(one._source or "another component" for one in (self, other))
            raise InputError(
                f"two components {what}: {' and '.join(places)}",
                next_step="give each a name of its own, as `deployment: NAME`; one may have none",
            )

    def _name(self) -> str | None:
        return None if self.deployment is None else deployment_identifier(self.deployment)

    def _definitions(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        from arroyo_dagster.state.operations.catalog.job_directory import AssumedJobs

        store, session = self._store(), self.spark.session()
        AssumedJobs(self.assume)  # what is wrong is known now, with the file and the line
        for resource in (store, session):
            resource.check_fields()
        return build_arroyo_definitions(
            store,
            spark=session,
            runner=self.spark.runner(session, self.maintenance.engine, store),
            maintenance=self.maintenance.options(),
            translator=_Translated(self.owners, self.tags, self.translation, self.docs_url),
            deployment=self.deployment,
            sensor=self.sensor.options(),
            sensor_running=self.sensor_running,
            compaction_sensor=self.compaction_sensor,
            schedules=self.schedules.options(),
            schedules_running=self.schedules.running,
            recent=self.checks.recent_minutes * MINUTE,
            health=self.checks.health.settings(),
            audit=self.checks.audit.settings(),
            dataflows=[context.path / one for one in self.dataflows],
            sdf=self.checks.sdf(),
            private_columns=self.private_columns,
            directory=ArroyoDirectory(assume=self.assume),
            window=None if self.window is None else self.window.options(),
            exports=[one.settings() for one in self.exports],
            fork=None if self.fork is None else self.fork.options(),
            bootstrapped_state=None
            if self.bootstrapped_state is None
            else self.bootstrapped_state.function,
        )

    def _store(self) -> ArroyoStateStore:
        return ArroyoStateStore(
            checkpoint_url=self.checkpoint_url,
            storage_options=self.storage_options,
            delete_options=self.delete_options,
            layout=self.layout,
            catalogue_url=self.catalogue_url,
            catalogue_options=self.catalogue_options,
            arroyo_api_url=self.arroyo_api_url,
            arroyo_api_token=as_variable(self.arroyo_api_token),
            arroyo_database=as_variable(self.arroyo_database),
        )


ArroyoStateScaffolder.component = ArroyoStateComponent


class _Translated(DagsterArroyoTranslator):
    """The default names with owners and tags, changed as the YAML says under `translation`."""

    def __init__(
        self,
        owners: list[str],
        tags: dict[str, str],
        translation: TranslationFn[str] | None,
        docs_url: str | None,
    ) -> None:
        self._owners = owners
        self._tags = tags
        self._translation = translation
        self._docs_url = docs_url

    def docs_url(self) -> str | None:
        return self._docs_url

    def get_asset_spec(self, props: ArroyoTableProps) -> dg.AssetSpec:
        spec = super().get_asset_spec(props)
        spec = spec.merge_attributes(owners=self._owners, tags=self._tags)
        return spec if self._translation is None else self._translation(spec, props.table)
