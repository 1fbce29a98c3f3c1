"""`ArroyoStateComponent`: the definitions of one deployment, from a few lines of YAML."""

import json
from pathlib import Path
from typing import Annotated, Literal, Self

import dagster as dg
from dagster.components.utils.defs_state import (
    DefsStateConfig,
    DefsStateConfigArgs,
    ResolvedDefsStateConfig,
)
from dagster.components.utils.translation import TranslationFn, TranslationFnResolver
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from arroyo_dagster.errors import ArroyoStateError, InputError
from arroyo_dagster.orchestration.definitions import ArroyoOptions, build_arroyo_definitions
from arroyo_dagster.orchestration.loading import PipelineSource, read_state, refresh_list
from arroyo_dagster.orchestration.pipelines.model import PipelineList
from arroyo_dagster.orchestration.resources import ArroyoDirectory, ArroyoStateStore
from arroyo_dagster.orchestration.secrets import as_variable
from arroyo_dagster.orchestration.translator import (
    ArroyoAssetProps,
    DagsterArroyoTranslator,
    deployment_identifier,
)
from arroyo_dagster.orchestration.yaml.fields import Advanced, LineageSection
from arroyo_dagster.orchestration.yaml.model import (
    ComponentModel,
    YamlModel,
    describe_errors,
    refuse,
)
from arroyo_dagster.orchestration.yaml.texts import Duration, HttpUrl, Name, Options, Secret, Url

# ---- what `dg scaffold defs arroyo_dagster.ArroyoStateComponent NAME` writes ---------------------

_HEAD = """\
# Every field: `dg docs serve`, or docs/dagster-configuration.md.
"""


class ArroyoStateParams(BaseModel):
    """The options of `dg scaffold defs arroyo_dagster.ArroyoStateComponent`."""

    model_config = ConfigDict(extra="forbid")

    checkpoint_url: str = Field(
        default="s3://bucket/checkpoints",
        description="The checkpoint URL, in any form that Arroyo takes.",
    )
    mode: str = Field(default="view", description="view or maintain.")
    deployment: str | None = Field(
        default=None, description="Name of this deployment, if one Dagster instance has several."
    )
    arroyo_api_url: str | None = Field(default=None, description="Arroyo's REST API.")


class ArroyoStateScaffolder(dg.Scaffolder[ArroyoStateParams]):
    """Writes a short `defs.yaml`, or a `component.py`."""

    @classmethod
    def get_scaffold_params(cls) -> type[ArroyoStateParams]:
        """Return the model of the command's options."""
        return ArroyoStateParams

    def scaffold(self, request: dg.ScaffoldRequest[ArroyoStateParams]) -> None:
        """Write the file."""
        parameters = request.params.model_dump(exclude_none=True)
        if request.scaffold_format == "python":
            dg.scaffold_component(request)
            return
        lines = "".join(f"  {name}: {json.dumps(value)}\n" for name, value in parameters.items())
        others = "".join(
            f"  # {line}\n"
            for line in (
                "running: true  # sensor and schedules are on from the start",
                "delete: true  # with `mode: maintain`, delete old epochs",
                "arroyo_api_url: http://arroyo:5115  # names, lineage and status of Arroyo jobs",
            )
            if line.split(":")[0] not in parameters
        )
        text = f"{_HEAD}type: {request.type_name}\n\nattributes:\n{lines}{others}"
        if request.append:
            with request.target_path.open("a") as file:
                file.write(f"---\n{text}")
        else:
            (request.target_path / "defs.yaml").write_text(text)


# ---- component -----------------------------------------------------------------------------------


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
    _origin: str | None = PrivateAttr(None)
    _loading: bool = PrivateAttr(False)

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
        model = cls.model().model_validate({}) if attributes is None else attributes
        positions = context.resolution_context.source_position_tree
        if isinstance(model, ComponentModel) and model.wrong is not None:
            refuse(describe_errors(model.wrong, cls.model(), positions))
        try:
            component = super().load(model, context)
        except ValidationError as error:  # a value that a template yields
            refuse(describe_errors(error, cls.model(), positions))
        component._origin = str(context.path if positions is None else positions.position)
        return component

    @property
    def defs_state_config(self) -> DefsStateConfig:
        """Return where Dagster keeps the list of pipelines."""
        name = f"ArroyoStateComponent[{self.deployment or 'default'}]"
        return DefsStateConfig.from_args(self.defs_state, default_key=name)

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Build what `build_arroyo_definitions` returns for these fields.

        Raises:
            DagsterInvalidDefinitionError: the component is refused; its last line says why.
        """
        try:
            self._check_deployment(context)
            kind = self.defs_state_config.management_type
            if kind.value == "LEGACY_CODE_SERVER_SNAPSHOTS":
                return self._definitions(context, None)
            self._loading = True
            return super().build_defs(context)
        except (ArroyoStateError, dg.DagsterInvalidDefinitionError) as error:
            refuse(f"{self._origin}: {error}" if self._origin else str(error))

    def write_state_to_path(self, state_path: Path) -> None:
        """List the pipelines: see `refresh_list`."""
        config = self.defs_state_config
        refresh_list(self._source(), state_path, config, loading=self._loading)

    def build_defs_from_state(
        self, context: dg.ComponentLoadContext, state_path: Path | None
    ) -> dg.Definitions:
        """Build the definitions of a list that `write_state_to_path` has written."""
        if state_path is None:
            never = PipelineList(self.checkpoint_url, problem=_NEVER_LISTED)
            return self._definitions(context, never)
        return self._definitions(context, read_state(state_path, self.checkpoint_url))

    def _check_deployment(self, context: dg.ComponentLoadContext) -> None:
        """Refuse two components of one name: their definitions would have the same names."""
        others = context.component_tree.get_all_components(of_type=ArroyoStateComponent)
        for other in others:
            if other is self or other._name() != self._name():
                continue
            problem = "have no deployment" if self._name() is None else f"are {self.deployment!r}"
            places = sorted(owner._origin or "another component" for owner in (self, other))
            raise InputError(
                f"two components {problem}: {' and '.join(places)}",
                next_step="give each a name of its own, as `deployment: NAME`; one may have none",
            )

    def _name(self) -> str | None:
        return None if self.deployment is None else deployment_identifier(self.deployment)

    def _source(self) -> PipelineSource:
        return PipelineSource(
            store=self._store(),
            directory=ArroyoDirectory(assume=self.advanced.assume),
            deployment=self.deployment,
            within_seconds=self.advanced.list_within,
            cache=self.advanced.list_cache,
            gone=self.gone,
        )

    def _definitions(
        self, context: dg.ComponentLoadContext, listed: PipelineList | None
    ) -> dg.Definitions:
        from arroyo_dagster.state.operations.catalog.job_directory import AssumedJobs

        more = self.advanced
        store, session, bootstrap = self._store(), more.spark.session(), more.bootstrapped_state
        AssumedJobs(more.assume)  # what is wrong is known now, with the file and the line
        for resource in (store, session):
            resource.check_fields()
        return build_arroyo_definitions(
            store,
            pipelines=listed,
            mode=self.mode,
            running=self.running,
            deployment=self.deployment,
            list_within=more.list_within,
            list_cache=more.list_cache,
            gone=self.gone,
            options=ArroyoOptions(
                spark=session,
                runner=more.spark.runner(session, more.maintenance.engine, store),
                translator=_Translated(more, self.translation),
                sensor=more.sensor.as_options(),
                verify=more.verify.as_options(),
                schedules=more.schedules.as_options(),
                maintenance=more.maintenance.as_options(delete=self.delete, gone=self.gone),
                waiting_limit=more.verify.waiting_limit,
                freshness=self.freshness,
                lineage=self.lineage.as_options(),
                directory=ArroyoDirectory(assume=more.assume),
                window=more.window and more.window.as_options(),
                exports=[export.as_options() for export in more.exports],
                fork=more.fork and more.fork.as_options(),
                bootstrapped_state=bootstrap and bootstrap.function,
                dataflows=[context.path / file for file in more.dataflows.files],
                sdf=more.dataflows.as_options(),
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
