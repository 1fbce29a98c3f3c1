"""The key, group and description of each asset: one class with one method to override."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dagster as dg

from arroyo_dagster.errors import InputError
from arroyo_dagster.orchestration.pipelines.model import (
    ListedPipeline,
    PipelineList,
    group_names,
    key_part,
    layers,
)
from arroyo_dagster.orchestration.rendering import with_commands
from arroyo_dagster.orchestration.runners import Tools
from arroyo_dagster.state.model.ids import checked_name
from arroyo_dagster.state.planning.exports import CHANGES, EVERY, FORMATS, NEWEST, TableExport

CHECKPOINT = "checkpoint"
COMPACTED_STATE = "compacted_state"
RETAINED_EPOCHS = "retained_epochs"
EXPORTED_STATE = "exported_state"
FORKED_STATE = "forked_state"
BOOTSTRAPPED_STATE = "bootstrapped_state"
FLEET = "fleet"
ORPHANS = "orphans"
DEAD_JOBS = "dead_jobs"

RESTORABLE = "restorable"
HEALTHY = "healthy"
EVERY_PIPELINE = "every_pipeline_known"

STORE, SPARK, RUNNER, DIRECTORY = (
    f"arroyo_{name}" for name in ("store", "spark", "runner", "directory")
)
"""The keys of the resources of a deployment without a name."""

FLEET_GROUP = "arroyo_fleet"
_PIPELINE = "PIPELINE"  # stands for the pipeline's root in commands


@dataclass(frozen=True, kw_only=True)
class ArroyoAssetProps:
    """What is known about an asset when it is named.

    Attributes:
        table: what it is: `checkpoint`, `compacted_state`, `retained_epochs`, `exported_state`,
            `forked_state`, `bootstrapped_state` of a pipeline; `fleet`, `orphans`, `dead_jobs` of
            the whole deployment.
        deployment: the name of the deployment, if one instance has several.
        pipeline: of assets of a pipeline.
        group: of the pipeline's assets, distinct in this deployment.
        export: of `exported_state`, which export it is.
    """

    table: str
    deployment: str | None = None
    pipeline: ListedPipeline | None = None
    group: str = FLEET_GROUP
    export: TableExport | None = None


@dataclass(frozen=True)
class _AssetText:
    """What is shown of an asset.

    Attributes:
        commands: of `arroyo-state`, that show or do the same.
    """

    text: str
    commands: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ("arroyo",)


_TABLES = {
    CHECKPOINT: _AssetText(
        "The newest ready epoch, as the pipeline wrote it. The sensor reports it; Dagster produces "
        "nothing here.",
        ("show PIPELINE", "verify PIPELINE"),
    ),
    COMPACTED_STATE: _AssetText(
        "The state in fewer, larger files. A restore loads the same rows.",
        ("compact plan PIPELINE", "compact run PIPELINE"),
        ("arroyo", "spark", "parquet"),
    ),
    RETAINED_EPOCHS: _AssetText(
        "The kept epochs. Older epochs are deleted with the files that only they list.",
        ("gc plan expire PIPELINE --keep 10", "sql @journal PIPELINE"),
        ("arroyo", "spark"),
    ),
    FLEET: _AssetText(
        "All pipelines in one table, the worst first, over time.", ("jobs", "health")
    ),
    ORPHANS: _AssetText(
        "Unreferenced objects of all pipelines, deleted once they are old enough.",
        ("gc plan orphans JOB", "gc explain PATH"),
        ("arroyo", "spark"),
    ),
    DEAD_JOBS: _AssetText(
        "Jobs that will never run again, deleted completely.",
        ("gc plan dead-job JOB --arroyo-api URL_OF_ARROYO",),
        ("arroyo", "spark"),
    ),
    FORKED_STATE: _AssetText(
        "The state of another Arroyo job in this one, which was stopped and continues from there "
        "with its own sinks. A run plans only, unless it is configured to execute.",
        ("fork SOURCE PIPELINE", "evolve SOURCE PIPELINE", "undo PIPELINE"),
    ),
    BOOTSTRAPPED_STATE: _AssetText(
        "The state of a stopped Arroyo job, computed on Spark from stored events. A run plans "
        "only, unless it is configured to execute.",
        ("bootstrap PIPELINE MODULE:FUNCTION", "undo PIPELINE"),
        ("arroyo", "spark"),
    ),
}

TABLES = tuple(_TABLES)
"""What the assets are, but for exports, as in `ArroyoAssetProps.table`."""

_EXPORTED = {
    NEWEST: "the newest epoch at each run",
    EVERY: "every epoch",
    CHANGES: "what changed from each epoch to the next",
}
_FORMAT_KINDS = {"delta": "deltalake"}
"""What Dagster calls formats."""


def _export_text(export: TableExport) -> _AssetText:
    form = export.to.format
    option = "" if form == FORMATS[0] else f" --format {form}"
    return _AssetText(
        f"The table `{export.table}` of the operator `{export.operator}`, exported to "
        f"{form.capitalize()}: {_EXPORTED[export.epochs]}, each once.",
        (f"export PIPELINE {export.operator} {export.table} TARGET{option}",),
        ("arroyo", _FORMAT_KINDS.get(form, form)),
    )


class DagsterArroyoTranslator:
    """Names and describes the assets; override `get_asset_spec` to change any of it.

    What it returns may have an `automation_condition` or a `freshness_policy`, which Dagster
    evaluates. Dependencies are added to it.
    """

    def get_asset_spec(self, props: ArroyoAssetProps) -> dg.AssetSpec:
        """Return key, group, kinds, description, tags, owners and metadata of an asset."""
        export, pipeline = props.export, props.pipeline
        asset = _TABLES.get(props.table) if export is None else _export_text(export)
        if asset is None:
            raise InputError("there is no such asset", table=props.table, tables=list(_TABLES))
        deployment = [key_part(props.deployment)] if props.deployment else []
        text, commands, metadata = asset.text, asset.commands, {"arroyo/table": props.table}
        if pipeline is not None:
            commands = tuple(command.replace(_PIPELINE, pipeline.root) for command in commands)
            metadata["arroyo/job"] = pipeline.root
            name = pipeline.current_name or pipeline.name
            if name:
                metadata["arroyo/pipeline"] = name
            if props.table == CHECKPOINT and pipeline.sql:
                text = f"{text}\n\n```sql\n{pipeline.sql.strip()}\n```"
        return dg.AssetSpec(
            [
                *("arroyo", *deployment),
                *(pipeline.key if pipeline is not None else ()),
                props.table,
                *(() if export is None else (export.name,)),
            ],
            group_name=props.group,
            kinds=set(asset.kinds),
            description=with_commands(text, commands),
            metadata=metadata,
        )

    def docs_url(self) -> str | None:
        """Return where a copy of the documentation site is served, for links to it; None = nowhere.

        `make docs` builds the site.
        """
        return None


def deployment_identifier(deployment: str) -> str:
    """Return a deployment's name as it stands in names of Dagster: `-` and `.` become `_`.

    Raises:
        InputError: it is not a name for a deployment.
    """
    return checked_name(deployment, "deployment").replace("-", "_").replace(".", "_")


def check_description(
    text: str, entry: str, docs_url: str | None, details: Sequence[str] = ()
) -> str:
    """Return the description of a check in Markdown, with its entry of the runbook.

    Dagster's pages show the description of a check, and nothing of its metadata.

    Args:
        details: further lines of Markdown.
    """
    runbook = f"`{entry}` in docs/operate/runbook.md"
    if docs_url is not None:
        runbook = f"[{entry}]({docs_url.rstrip('/')}/operate/runbook.html#{entry})"
    lines = "\n".join(f"- {line}" for line in (*details, f"Runbook: {runbook}"))
    return f"{text}\n\n{lines}"


@dataclass(frozen=True)
class Names:
    """The names of one deployment: of its assets, checks, jobs, ops, resources…

    Attributes:
        pipelines: those that the definitions know.
    """

    translator: DagsterArroyoTranslator
    pipelines: PipelineList
    deployment: str | None = None

    def name(self, base: str) -> str:
        """Return the name of a job, op, schedule, sensor, pool or resource of this deployment.

        Args:
            base: the name without a deployment, for example `arroyo_verify`; of the deployment
                `blue` it is `arroyo_blue_verify`.
        """
        if self.deployment is None:
            return base
        first, _, rest = base.partition("_")
        return f"{first}_{deployment_identifier(self.deployment)}_{rest}"

    def find(self, root: str) -> ListedPipeline:
        """Return the pipeline of a job.

        Raises:
            InputError: the definitions do not know it.
        """
        if root in self.pipelines.by_root:
            return self.pipelines.by_root[root]
        raise InputError(
            "the definitions do not know this job",
            job=root,
            next_step="name it as job or pipeline/job, as `arroyo-state jobs` prints it; reload "
            "the definitions if it is new",
        )

    @property
    def resources(self) -> set[str]:
        """The keys of the resources that steps, schedules and sensors need."""
        return {self.name(key) for key in (STORE, RUNNER, DIRECTORY)}

    def tools(self, context: Any) -> Tools:
        """Return these resources of a step, schedule or sensor."""
        return Tools(
            *(getattr(context.resources, self.name(key)) for key in (STORE, RUNNER, DIRECTORY))
        )

    def spec(
        self,
        table: str,
        pipeline: ListedPipeline | None = None,
        *,
        deps: Iterable[dg.AssetKey] = (),
        export: TableExport | None = None,
    ) -> dg.AssetSpec:
        """Return the spec of an asset, which depends on `deps` beside what the translator says."""
        name = (table, pipeline and pipeline.root, export and export.name)
        if name not in self._specs:
            group = FLEET_GROUP if pipeline is None else f"arroyo_{self._groups[pipeline.key]}"
            if self.deployment is not None:
                group = group.replace(
                    "arroyo_", f"arroyo_{deployment_identifier(self.deployment)}_", 1
                )
            self._specs[name] = self.translator.get_asset_spec(
                ArroyoAssetProps(
                    table=table,
                    deployment=self.deployment,
                    pipeline=pipeline,
                    group=group,
                    export=export,
                )
            )
        spec = self._specs[name]
        added = [*deps]
        return spec.replace_attributes(deps=[*spec.deps, *added]) if added else spec

    def key(self, table: str, pipeline: ListedPipeline | None = None) -> dg.AssetKey:
        """Return the key of an asset."""
        return self.spec(table, pipeline).key

    def check_spec(
        self, name: str, asset: dg.AssetKey, text: str, *, details: Sequence[str] = (), **more: Any
    ) -> dg.AssetCheckSpec:
        """Return the spec of a check of one of the assets, with its entry of the runbook.

        Args:
            details: further lines of the description, in Markdown.
            more: further arguments of `dg.AssetCheckSpec`.
        """
        description = check_description(text, name, self.translator.docs_url(), details)
        return dg.AssetCheckSpec(name, asset=asset, description=description, **more)

    @functools.cached_property
    def _specs(self) -> dict[Any, dg.AssetSpec]:
        """What the translator said: keys are asked for many times."""
        return {}

    @functools.cached_property
    def _groups(self) -> Mapping[tuple[str, ...], str]:
        return group_names(pipeline.key for pipeline in self.pipelines.pipelines)


def in_layers(
    name: str, specs: Sequence[tuple[ListedPipeline, dg.AssetSpec]], build: Callable[..., Any]
) -> list[Any]:
    """Build one definition of `specs`; further ones for keys that Dagster cannot tell apart.

    Dagster derives names from keys, so that `a-b` and `a_b` have the same ones within one step.

    Args:
        build: gets the name of the op, and its pipelines by the key of their asset.
    """
    by_path = {tuple(spec.key.path): (pipeline, spec) for pipeline, spec in specs}
    built = []
    for number, layer in enumerate(layers(by_path), 1):
        op = name if number == 1 else f"{name}_{number}"
        built.append(build(op, [by_path[path] for path in layer]))
    return built
