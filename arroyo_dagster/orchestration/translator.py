"""The name and description of each asset: one class with one method, for users to override."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import dagster as dg

from arroyo_dagster.errors import InputError
from arroyo_dagster.orchestration.rendering import with_commands
from arroyo_dagster.state.model.ids import checked_name
from arroyo_dagster.state.planning.exports import CHANGES, EVERY, FORMATS, NEWEST, TableExport

CHECKPOINT = "checkpoint"
EPOCH_CATALOG = "epoch_catalog"
OPERATOR_METADATA = "operator_metadata"
PROGRESS = "progress"
FLEET = "fleet"
HEALTH = "health"
AUDIT = "audit"
COMPACTED_STATE = "compacted_state"
RETAINED_EPOCHS = "retained_epochs"
ORPHANS = "orphans"
DEAD_JOBS = "dead_jobs"
GC_JOURNAL = "gc_journal"
EXPORTED_STATE = "exported_state"
FORKED_STATE = "forked_state"
BOOTSTRAPPED_STATE = "bootstrapped_state"

STATE_GROUP = "arroyo_state"
MAINTENANCE_GROUP = "arroyo_maintenance"
_SENSOR_ALIVE = timedelta(minutes=15)


@dataclass(frozen=True)
class ArroyoTableProps:
    """What is known about an asset when it is named.

    Attributes:
        table: `checkpoint`, `epoch_catalog`, `operator_metadata`, `progress`, `fleet`, `health`,
            `audit`, `compacted_state`, `retained_epochs`, `orphans`, `dead_jobs`, each of these
            three with `_plan` too, `gc_journal`, `forked_state`, or `exported_state`.
        deployment: the name of the deployment, if one instance has several.
        export: of `exported_state`, which export it is.
    """

    table: str
    deployment: str | None = None
    export: TableExport | None = None


@dataclass(frozen=True)
class _AssetText:
    """What is shown of an asset.

    Attributes:
        commands: of `arroyo-state`, that show or do the same; JOB is a partition.
    """

    text: str
    commands: tuple[str, ...] = ()
    group: str = STATE_GROUP
    kinds: tuple[str, ...] = ("arroyo",)


_TABLES = {
    CHECKPOINT: _AssetText(
        "The newest ready epoch of each job, as the job wrote it. The sensor reports it; Dagster "
        "produces nothing here.",
        ("show JOB",),
    ),
    EPOCH_CATALOG: _AssetText(
        "Every epoch of a job: times, files, bytes, rows, watermark. A row stays when the epoch "
        "expires.",
        ("epochs JOB",),
        kinds=("arroyo", "parquet"),
    ),
    OPERATOR_METADATA: _AssetText(
        "Every data file that a table of an operator lists, at every present epoch.",
        ("show JOB EPOCH", "rows JOB OPERATOR TABLE"),
        kinds=("arroyo", "parquet"),
    ),
    PROGRESS: _AssetText(
        "How far each partition of the sources is read, how fast, and how far event time is "
        "behind, over the newest epochs of a job.",
        ("sql @offsets JOB", "sql @watermarks JOB"),
    ),
    FLEET: _AssetText("A summary of all jobs, over time.", ("jobs",)),
    HEALTH: _AssetText(
        "How the state of all jobs develops: late, growing or fragmented jobs.",
        ("health", "health JOB"),
    ),
    AUDIT: _AssetText(
        "Tests of whether each job can be restored: its newest epoch is verified in full, and its "
        "older epochs are compared with the store.",
        ("health --level 4", "health JOB --level 4", "verify JOB"),
    ),
    COMPACTED_STATE: _AssetText(
        "A job's state in fewer, larger files. A restore loads the same rows.",
        ("compact plan JOB", "compact run JOB"),
        MAINTENANCE_GROUP,
        ("arroyo", "spark", "parquet"),
    ),
    f"{RETAINED_EPOCHS}_plan": _AssetText(
        "What an expiry of old epochs would delete, and the proof that nothing that stays needs "
        "it.",
        ("gc plan expire JOB --keep 10",),
        MAINTENANCE_GROUP,
    ),
    RETAINED_EPOCHS: _AssetText(
        "The kept epochs of a job. Older epochs are deleted with the files that only they list.",
        ("gc run expire JOB --keep 10",),
        MAINTENANCE_GROUP,
        ("arroyo", "spark"),
    ),
    f"{ORPHANS}_plan": _AssetText(
        "Unreferenced objects of a job, and why each other object stays.",
        ("gc plan orphans JOB", "gc explain PATH"),
        MAINTENANCE_GROUP,
    ),
    ORPHANS: _AssetText(
        "Unreferenced objects of a job, deleted once they are old enough.",
        ("gc run orphans JOB",),
        MAINTENANCE_GROUP,
        ("arroyo", "spark"),
    ),
    f"{DEAD_JOBS}_plan": _AssetText(
        "What would be deleted with a job whose pipeline is gone, and the source that confirms it.",
        ("gc plan dead-job JOB --arroyo-api URL_OF_ARROYO",),
        MAINTENANCE_GROUP,
    ),
    DEAD_JOBS: _AssetText(
        "Jobs that will never run again, deleted completely.",
        ("gc run dead-job JOB --arroyo-api URL_OF_ARROYO",),
        MAINTENANCE_GROUP,
        ("arroyo", "spark"),
    ),
    GC_JOURNAL: _AssetText(
        "What was deleted or moved to quarantine, when, by whom and under which plan.",
        ("sql @journal JOB", "sql @fate --param path=PATH"),
        MAINTENANCE_GROUP,
    ),
    FORKED_STATE: _AssetText(
        "The state of one Arroyo job in another, stopped one, which continues from there with its "
        "own sinks. A run plans only, unless it is configured to execute.",
        ("fork SOURCE JOB", "evolve SOURCE JOB", "undo JOB"),
        MAINTENANCE_GROUP,
    ),
    BOOTSTRAPPED_STATE: _AssetText(
        "The state of a stopped Arroyo job, computed on Spark from stored events. A run plans "
        "only, unless it is configured to execute.",
        ("bootstrap JOB MODULE:FUNCTION", "undo JOB"),
        MAINTENANCE_GROUP,
        ("arroyo", "spark"),
    ),
}

_OPTIONAL = (FORKED_STATE, BOOTSTRAPPED_STATE)
TABLES = tuple(table for table in _TABLES if table not in _OPTIONAL)
"""The assets that every deployment has, as in `ArroyoTableProps.table`."""

_EXPORTED = {
    NEWEST: "the newest epoch at each run",
    EVERY: "every epoch",
    CHANGES: "what changed from each epoch to the next",
}


def _export_text(export: TableExport) -> _AssetText:
    form = export.to.format
    how = "" if form == FORMATS[0] else f" --format {form}"
    return _AssetText(
        f"The table `{export.table}` of the operator `{export.operator}` of `{export.jobs}`, "
        f"exported to {form.capitalize()}: {_EXPORTED[export.epochs]}, each once.",
        (f"export JOB {export.operator} {export.table} TARGET{how}",),
        kinds=("arroyo", _KINDS.get(form, form)),
    )


_KINDS = {"delta": "deltalake"}
"""What Dagster calls formats."""


class DagsterArroyoTranslator:
    """Names and describes the assets; override `get_asset_spec` to change any of it.

    What it returns may have an `automation_condition`, which Dagster evaluates. Dependencies and
    partitions are added to it.
    """

    def get_asset_spec(self, props: ArroyoTableProps) -> dg.AssetSpec:
        """Return key, group, kinds, description, tags, owners and metadata of an asset."""
        export = props.export
        shown = _TABLES.get(props.table) if export is None else _export_text(export)
        if shown is None:
            raise InputError("there is no such asset", table=props.table, tables=list(_TABLES))
        deployment = [props.deployment] if props.deployment else []
        # How long ago any job was heard of tells whether the sensor is alive, nothing more.
        policy = dg.FreshnessPolicy.time_window(fail_window=_SENSOR_ALIVE)
        return dg.AssetSpec(
            ["arroyo", *deployment, props.table, *(() if export is None else (export.name,))],
            group_name=shown.group,
            kinds=set(shown.kinds),
            description=with_commands(shown.text, shown.commands),
            metadata={"arroyo/table": props.table},
            freshness_policy=policy if props.table == CHECKPOINT else None,
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


def runbook_metadata(entry: str, docs_url: str | None) -> dict[str, Any]:
    """Return metadata that leads to an entry of the runbook: a link, or the page."""
    if docs_url is None:
        return {"runbook": f"docs/operate/runbook.md, {entry}"}
    return {"runbook": dg.MetadataValue.url(_runbook_url(entry, docs_url))}


def _runbook_url(entry: str, docs_url: str) -> str:
    return f"{docs_url.rstrip('/')}/operate/runbook/#{entry}"


def check_description(
    text: str, entry: str, docs_url: str | None, details: Sequence[str] = ()
) -> str:
    """Return the description of a check in Markdown, with its entry of the runbook.

    Dagster's pages show the description of a check, and nothing of its metadata.

    Args:
        details: further lines of Markdown.
    """
    where = f"`{entry}` in docs/operate/runbook.md"
    if docs_url is not None:
        where = f"[{entry}]({_runbook_url(entry, docs_url)})"
    lines = "\n".join(f"- {line}" for line in (*details, f"Runbook: {where}"))
    return f"{text}\n\n{lines}"


def at_source_of(function: Callable[..., Any], wrapper: Any) -> Callable[..., Any]:
    """Return a wrapper of a function, to which Dagster's code references lead as to the function.

    They take the line from what is wrapped, but the file from the wrapper.
    """
    file = inspect.unwrap(function).__code__.co_filename
    wrapper.__code__ = wrapper.__code__.replace(co_filename=file)
    found: Callable[..., Any] = wrapper
    return found


def specified_assets(
    *, specs: Sequence[dg.AssetSpec], **options: Any
) -> Callable[[Callable[..., Any]], dg.AssetsDefinition]:
    """Return `dg.multi_asset(specs=…, …)`, for dependencies with any keys.

    Dagster 1.12 takes the keys of dependencies for names, and refuses those with a dot, as a
    deployment or a dataflow may have. Such dependencies have another key while the asset is made.
    """
    upstream = {dep.asset_key for spec in specs for dep in spec.deps} - {one.key for one in specs}
    dotted = sorted(key for key in upstream if any("." in part for part in key.path))
    plain = {key: dg.AssetKey([f"arroyo_upstream_{at}"]) for at, key in enumerate(dotted)}
    renamed = [
        spec.replace_attributes(deps=[_renamed(dep, plain) for dep in spec.deps]) for spec in specs
    ]

    def make(function: Callable[..., Any]) -> dg.AssetsDefinition:
        made = dg.multi_asset(specs=renamed, **options)(function)
        keys = {name: key for key, name in plain.items()}
        return made.with_attributes(asset_key_replacements=keys) if keys else made

    return make


def _renamed(dep: dg.AssetDep, keys: Mapping[dg.AssetKey, dg.AssetKey]) -> dg.AssetDep:
    if dep.asset_key not in keys:
        return dep
    # Its other fields differ between releases of Dagster.
    others = {name: getattr(dep, name) for name in dep._fields if name != "asset_key"}
    return dg.AssetDep(keys[dep.asset_key], **others)


@dataclass(frozen=True)
class Naming:
    """The names of one deployment: of its assets, jobs, ops, resources, partitions...

    Attributes:
        jobs: one partition per job; its keys are the roots of jobs.
    """

    translator: DagsterArroyoTranslator
    jobs: dg.DynamicPartitionsDefinition
    deployment: str | None = None

    def spec(
        self, table: str, *, deps: Iterable[str] = (), partitioned: bool = True
    ) -> dg.AssetSpec:
        """Return the spec of an asset that depends on the tables `deps`."""
        spec = self.translator.get_asset_spec(ArroyoTableProps(table, self.deployment))
        return spec.replace_attributes(
            deps=[*spec.deps, *(self.key(one) for one in deps)],
            partitions_def=self.jobs if partitioned else None,
        )

    def export_spec(self, export: TableExport, deps: Iterable[dg.AssetKey]) -> dg.AssetSpec:
        """Return the spec of the asset of an export, which may have nothing to do."""
        props = ArroyoTableProps(EXPORTED_STATE, self.deployment, export)
        spec = self.translator.get_asset_spec(props)
        return spec.replace_attributes(
            deps=[*spec.deps, *deps], partitions_def=self.jobs, skippable=True
        )

    def key(self, table: str) -> dg.AssetKey:
        """Return the key of an asset."""
        return self.translator.get_asset_spec(ArroyoTableProps(table, self.deployment)).key

    def name(self, base: str) -> str:
        """Return the name of a job, op, schedule, sensor, pool or resource of this deployment.

        Args:
            base: the name without a deployment, for example `arroyo_refresh`; of the deployment
                `blue` it is `arroyo_blue_refresh`.
        """
        if self.deployment is None:
            return base
        first, _, rest = base.partition("_")
        return f"{first}_{deployment_identifier(self.deployment)}_{rest}"

    def check_spec(
        self, name: str, table: str, description: str, *, details: Sequence[str] = (), **more: Any
    ) -> dg.AssetCheckSpec:
        """Return the spec of a check of one of the assets, with its entry of the runbook.

        Args:
            details: further lines of the description, in Markdown.
            more: further arguments of `dg.AssetCheckSpec`.
        """
        more["metadata"] = {**more.get("metadata", {}), **self.runbook(name)}
        text = check_description(description, name, self.translator.docs_url(), details)
        return dg.AssetCheckSpec(name, asset=self.key(table), description=text, **more)

    def runbook(self, entry: str) -> dict[str, Any]:
        """Return metadata that leads to an entry of the runbook: a link, or the page."""
        return runbook_metadata(entry, self.translator.docs_url())

    def bind(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose parameters `arroyo_*` are this deployment's resources.

        Dagster takes a parameter's name for the key of a resource.
        """
        if self.deployment is None:
            return function
        signature = inspect.signature(function)
        renamed = {
            name: self.name(name) for name in signature.parameters if name.startswith("arroyo_")
        }
        names = {key: name for name, key in renamed.items()}

        def given(arguments: dict[str, Any]) -> dict[str, Any]:
            return {names.get(key, key): value for key, value in arguments.items()}

        if inspect.isgeneratorfunction(function):  # Dagster asks the function, not its result

            @functools.wraps(function)
            def bound(*positional: Any, **arguments: Any) -> Any:
                yield from function(*positional, **given(arguments))
        else:

            @functools.wraps(function)
            def bound(*positional: Any, **arguments: Any) -> Any:
                return function(*positional, **given(arguments))

        parameters = [
            one.replace(name=renamed.get(one.name, one.name))
            for one in signature.parameters.values()
        ]
        found: Any = at_source_of(function, bound)
        found.__signature__ = signature.replace(parameters=parameters)
        found.__annotations__ = {
            renamed.get(name, name): hint for name, hint in function.__annotations__.items()
        }
        return bound
