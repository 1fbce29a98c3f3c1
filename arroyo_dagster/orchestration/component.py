"""`ArroyoStateComponent`: the definitions of one deployment, from a few lines of YAML."""

from pathlib import Path
from typing import Annotated, Literal, Self

import dagster as dg
from dagster.components.utils.defs_state import (
    DefsStateConfig,
    DefsStateConfigArgs,
    ResolvedDefsStateConfig,
)
from dagster.components.utils.translation import TranslationFn, TranslationFnResolver
from pydantic import BaseModel, Field, PrivateAttr, ValidationError

from arroyo_dagster.errors import ArroyoStateError, InputError
from arroyo_dagster.orchestration.definitions import (
    ArroyoOptions,
    build_arroyo_definitions,
    find_pipelines,
)
from arroyo_dagster.orchestration.directory import ArroyoDirectory
from arroyo_dagster.orchestration.pipelines.model import PipelineList
from arroyo_dagster.orchestration.resources import ArroyoStateStore
from arroyo_dagster.orchestration.secrets import as_variable
from arroyo_dagster.orchestration.translator import (
    ArroyoAssetProps,
    DagsterArroyoTranslator,
    deployment_identifier,
)
from arroyo_dagster.orchestration.yaml.exports import Export
from arroyo_dagster.orchestration.yaml.fields import (
    BootstrappedState,
    Dataflows,
    ForkSettings,
    LineageSection,
    Maintenance,
    Owner,
    ScheduleTimes,
    Sensor,
    Spark,
    Verify,
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
    Duration,
    HttpUrl,
    Name,
    Options,
    Secret,
    Url,
    seconds_of,
)


class Advanced(YamlModel):
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
        default="20s", description="The most time for the list of pipelines, when it is made."
    )
    list_cache: str | None = Field(
        default=None,
        description="The file of the last list of pipelines. Default: below DAGSTER_HOME.",
        examples=["/var/lib/dagster/arroyo_pipelines.json"],
    )
    sensor: Sensor = Field(default_factory=Sensor, description="How much one tick does.")
    verify: Verify = Field(
        default_factory=Verify, description="When pipelines are verified, and what is reported."
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
        description="Add `forked_state`: a pipeline takes the state of another one. Default: "
        "without it.",
    )
    bootstrapped_state: BootstrappedState | None = Field(
        default=None,
        description="Add `bootstrapped_state`: a pipeline takes state that a function of yours "
        "computes on Spark from stored events. Default: without it.",
        examples=[{"function": "history:orders"}],
    )
    dataflows: Dataflows = Field(
        default_factory=Dataflows, description="SDF dataflows: their states become assets."
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
    docs_url: HttpUrl | None = Field(
        default=None,
        description="Where your copy of the documentation site is served, for links to the "
        "runbook.",
        examples=["https://docs.example.com/arroyo-dagster"],
    )


@dg.scaffold_with(ArroyoStateScaffolder)
class ArroyoStateComponent(dg.StateBackedComponent, YamlModel):
    """Inspect and maintain the state of the streaming jobs below one checkpoint URL."""

    checkpoint_url: Url = Field(
        description="The checkpoint URL, in any form that Arroyo takes.",
        examples=[
            "s3://bucket/checkpoints",
            "s3::https://minio.example.com:9000/bucket/checkpoints",
        ],
    )
    mode: Literal["view", "maintain"] = Field(
        default="view",
        description="view: report and verify. maintain: also compact, and expire old epochs.",
    )
    running: bool = Field(default=False, description="Start sensor and schedules as running.")
    delete: bool = Field(
        default=False,
        description="With `mode: maintain`, delete old epochs. Without it, runs only show what "
        "would be deleted.",
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
    gone: list[str] = Field(
        default_factory=list,
        description="Jobs that were deleted on purpose, as job or pipeline/job: they leave the "
        "definitions.",
        examples=[["payments/job_1"]],
    )
    freshness: Duration | None = Field(
        default=None,
        description="The maximum age of each pipeline's newest epoch, as a freshness policy. "
        "Default: none; `healthy` knows which jobs are at rest.",
        examples=["15m"],
    )
    lineage: LineageSection = Field(
        default_factory=LineageSection,
        description="Which sources and sinks of pipelines are shown, and under which keys.",
    )
    defs_state: ResolvedDefsStateConfig = Field(
        default_factory=DefsStateConfigArgs.legacy_code_server_snapshots,
        description="Where Dagster keeps the list of pipelines. Default: it is made when the code "
        "server starts.",
    )
    translation: Annotated[
        TranslationFn[str] | None,
        TranslationFnResolver(template_vars_for_translation_fn=lambda table: {"table": table}),
    ] = Field(
        default=None,
        description="Changes to key, group, description, tags… of the assets; {{ table }} is the "
        "asset's kind, such as checkpoint.",
        examples=[{"group_name": "streaming"}],
    )
    advanced: Advanced = Field(
        default_factory=Advanced, description="Everything else, each with its default."
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

    @property
    def defs_state_config(self) -> DefsStateConfig:
        """Return where Dagster keeps the list of pipelines."""
        name = f"ArroyoStateComponent[{self.deployment or 'default'}]"
        return DefsStateConfig.from_args(self.defs_state, default_key=name)

    def write_state_to_path(self, state_path: Path) -> None:
        """List the pipelines; where that fails, the last list stays, with the reason."""
        state_path.write_text(self._listed().to_json())

    def build_defs_from_state(
        self, context: dg.ComponentLoadContext, state_path: Path | None
    ) -> dg.Definitions:
        """Build what `build_arroyo_definitions` returns for these fields.

        Raises:
            DagsterInvalidDefinitionError: the component is refused; its last line says why.
        """
        try:
            self._check_deployment(context)
            listed = PipelineList(self.checkpoint_url, problem=_NEVER_LISTED)
            if state_path is not None:
                listed = PipelineList.from_json(state_path.read_text(), str(state_path))
            return self._definitions(context, listed)
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

    def _listed(self) -> PipelineList:
        return find_pipelines(
            self._store().process_config_and_initialize(),
            ArroyoDirectory(assume=self.advanced.assume).process_config_and_initialize(),
            deployment=self.deployment,
            list_within=seconds_of(self.advanced.list_within),
            list_cache=self.advanced.list_cache,
            gone=self.gone,
        )

    def _definitions(
        self, context: dg.ComponentLoadContext, listed: PipelineList
    ) -> dg.Definitions:
        from arroyo_dagster.state.operations.catalog.job_directory import AssumedJobs

        more = self.advanced
        store, session = self._store(), more.spark.session()
        AssumedJobs(more.assume)  # what is wrong is known now, with the file and the line
        for resource in (store, session):
            resource.check_fields()
        return build_arroyo_definitions(
            store,
            pipelines=listed,
            mode=self.mode,
            running=self.running,
            deployment=self.deployment,
            options=ArroyoOptions(
                spark=session,
                runner=more.spark.runner(session, more.maintenance.engine, store),
                translator=_Translated(more, self.translation),
                sensor=more.sensor.options(),
                verify=more.verify.options(),
                schedules=more.schedules.options(),
                maintenance=more.maintenance.options(delete=self.delete, gone=self.gone),
                waiting_limit=seconds_of(more.verify.waiting_limit),
                freshness=None if self.freshness is None else seconds_of(self.freshness),
                lineage=self.lineage.options(),
                directory=ArroyoDirectory(assume=more.assume),
                window=None if more.window is None else more.window.options(),
                exports=[one.settings() for one in more.exports],
                fork=None if more.fork is None else more.fork.options(),
                bootstrapped_state=None
                if more.bootstrapped_state is None
                else more.bootstrapped_state.function,
                dataflows=[context.path / file for file in more.dataflows.files],
                sdf=more.dataflows.options(),
                private_columns=more.private_columns,
            ),
        )

    def _store(self) -> ArroyoStateStore:
        return ArroyoStateStore(
            checkpoint_url=self.checkpoint_url,
            storage_options=self.storage_options,
            delete_options=self.delete_options,
            layout=self.advanced.layout,
            arroyo_api_url=self.arroyo_api_url,
            arroyo_api_token=as_variable(self.arroyo_api_token),
            arroyo_database=as_variable(self.arroyo_database),
        )


_NEVER_LISTED = (
    "the pipelines were never listed. Next: run `dg utils refresh-defs-state`, and reload the "
    "definitions"
)


class _Translated(DagsterArroyoTranslator):
    """The default names with owners and tags, changed as the YAML says under `translation`."""

    def __init__(self, more: Advanced, translation: TranslationFn[str] | None) -> None:
        self._more = more
        self._translation = translation

    def docs_url(self) -> str | None:
        return self._more.docs_url

    def get_asset_spec(self, props: ArroyoAssetProps) -> dg.AssetSpec:
        spec = super().get_asset_spec(props)
        spec = spec.merge_attributes(owners=self._more.owners, tags=self._more.tags)
        return spec if self._translation is None else self._translation(spec, props.table)
