"""Dataflows in Dagster: each state is an asset with lineage and checks, reported by the sensor.

    defs = build_arroyo_definitions("s3://bucket/checkpoints", dataflows=["dataflow.yaml"])

The services run elsewhere (`arroyo-state sdf run`). Their jobs are reported, compacted and expired
like all others. Materializing a state reads its owner's newest epoch.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg

from arroyo_dagster.dataflow.definition.definition import Dataflow, StateDef
from arroyo_dagster.orchestration import rendering as shown
from arroyo_dagster.orchestration.check_results import check_result
from arroyo_dagster.orchestration.dataflow.graph import DagsterSdfTranslator, SdfGraph
from arroyo_dagster.orchestration.dataflow.user_steps import user_step
from arroyo_dagster.orchestration.failures import as_failure
from arroyo_dagster.orchestration.requests import BACKGROUND_TAGS
from arroyo_dagster.orchestration.resources import ArroyoStateStore
from arroyo_dagster.orchestration.translator import RESTORABLE, Names, check_description
from arroyo_dagster.state.model.clock import wall_clock
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.units import format_bytes
from arroyo_dagster.state.planning.privacy import NOTHING_PRIVATE, PrivateColumns
from arroyo_dagster.state.planning.restore.reads import job_watermark_micros
from arroyo_dagster.state.planning.verify.checks import Verdict, every_job_recent

if TYPE_CHECKING:
    from arroyo_dagster.dataflow.views.summary import StateSummary
    from arroyo_dagster.state.storage.store import ObjectStore

KEYS_UNIQUE, TTL_EFFECTIVE, NOT_STALE = "keys_unique", "ttl_effective", "not_stale"
STALE_AFTER = timedelta(minutes=15)

_CHECKS = {
    KEYS_UNIQUE: "Every key has one row (in a windowed state, one per window).",
    TTL_EFFECTIVE: "Rows past their ttl are neither shown nor kept.",
    NOT_STALE: "The owner wrote an epoch recently, or is at rest.",
    RESTORABLE: (
        "The owner's newest epoch can be restored: every file exists, with the expected content."
    ),
}


@dataclass(frozen=True, kw_only=True)
class SdfOptions:
    """How to read states.

    Attributes:
        stale_after: the maximum age of the newest epoch of an owner that is not at rest.
        read_bytes: rows are not counted, and no sample is shown, for a state with larger files.
        private: the columns that are masked in the sample.
    """

    stale_after: timedelta = STALE_AFTER
    read_bytes: int = 64 << 20
    private: PrivateColumns = NOTHING_PRIVATE


def load_graph(
    file: str | Path | Dataflow, translator: DagsterSdfTranslator | None = None
) -> SdfGraph:
    """Read a dataflow.yaml as a graph of assets.

    Raises:
        InvalidDefinition: it has errors; the exception lists all.
        InputError: it is a package, not a dataflow.
    """
    from arroyo_dagster.dataflow.definition.loading import load_dataflow

    chosen = translator or DagsterSdfTranslator()
    if isinstance(file, Dataflow):
        return SdfGraph(file, chosen)
    return SdfGraph(load_dataflow(file)[0], chosen, file=Path(file))


def sdf_dataflow_assets(
    file: str | Path | Dataflow,
    *,
    name: str | None = None,
    translator: DagsterSdfTranslator | None = None,
) -> Callable[[Callable[..., Any]], dg.AssetsDefinition]:
    """Make the states of a dataflow the assets of a function, with their checks.

        @sdf_dataflow_assets("dataflow.yaml")
        def words(context, arroyo_store):
            yield from observe_states(context, arroyo_store, "dataflow.yaml")

    The function may take the deployment's resources, such as `arroyo_store`, by these names, with
    or without annotations. States that are not read, or have not changed, are not materialized.

    Args:
        file: the dataflow.yaml, or the definition itself.
        name: of the op; default: derived from the dataflow's name.
        translator: names and describes the assets.

    Raises:
        InvalidDefinition: the file has errors.
    """
    states = _states_of(load_graph(file, translator), name)
    return lambda function: states(user_step(function))


def _states_of(
    graph: SdfGraph,
    name: str | None = None,
    docs_url: str | None = None,
    resources: set[str] | None = None,
) -> Callable[[Callable[..., Any]], dg.AssetsDefinition]:
    return dg.multi_asset(
        required_resource_keys=resources,
        name=name or f"{graph.op_name}_states",
        specs=[spec.replace_attributes(skippable=True) for spec in graph.state_specs()],
        check_specs=_check_specs(graph, docs_url),
        can_subset=True,
    )


def _check_specs(graph: SdfGraph, docs_url: str | None) -> list[dg.AssetCheckSpec]:
    return [
        dg.AssetCheckSpec(
            name,
            asset=graph.key_of(state),
            description=check_description(description, name, docs_url),
        )
        for state in graph.owned
        for name, description in _CHECKS.items()
    ]


def build_sdf_assets(
    graph: SdfGraph, names: Names, options: SdfOptions | None = None
) -> list[dg.AssetsDefinition | dg.AssetSpec]:
    """Build the assets of a dataflow: states, topics and services."""

    @_states_of(graph, docs_url=names.translator.docs_url(), resources=names.resources)
    def states(context: dg.AssetExecutionContext) -> Any:
        yield from observe_states(context, names.tools(context).store, graph, options=options)

    return [states, *graph.outer_specs()]


# ---- looking -------------------------------------------------------------------------------------


def observe_states(
    context: dg.AssetExecutionContext,
    arroyo_store: ArroyoStateStore,
    file: str | Path | Dataflow | SdfGraph,
    *,
    options: SdfOptions | None = None,
) -> Iterator[Any]:
    """Read the states that a run selected: yield results for those that have changed, and their
    checks.

    Raises:
        dg.Failure: the store failed, or a state cannot be read.
    """
    graph = file if isinstance(file, SdfGraph) else load_graph(file)
    with as_failure():
        view = StatesView(graph, arroyo_store.reading(), options or SdfOptions())
        wanted = context.selected_asset_keys | {
            check.asset_key for check in context.selected_asset_check_keys
        }
        for state in [state for state in graph.owned if graph.key_of(state) in wanted]:
            key = graph.key_of(state)
            summary = view.summary(state)
            if key in context.selected_asset_keys and has_changed(context.instance, key, summary):
                yield dg.MaterializeResult(
                    asset_key=key,
                    metadata=summary_metadata(summary),
                    data_version=dg.DataVersion(summary.version),
                )
            for check in context.selected_asset_check_keys:
                if check.asset_key == key:
                    yield view.check(state, check.name)


class StatesView:
    """The states of a dataflow at the newest epochs of their owners, each read once."""

    def __init__(self, graph: SdfGraph, store: "ObjectStore", options: SdfOptions) -> None:
        from arroyo_dagster.dataflow.views.view import Views

        self.graph = graph
        self._store = store
        self._options = options
        self.views = Views(store, graph.dataflow, private=options.private)
        self._summaries: dict[str, StateSummary] = {}

    def summary(self, state: StateDef) -> "StateSummary":
        """Return the summary of one state."""
        from arroyo_dagster.dataflow.views.summary import summarise

        name = f"{state.owner}.{state.name}"
        if name not in self._summaries:
            (self._summaries[name],) = summarise(
                self._store, self.views, [state], read_bytes=self._options.read_bytes
            )
        return self._summaries[name]

    @property
    def owners(self) -> set[str]:
        """Return the services that own a state and have an epoch."""
        return {name for name, epoch in self.views.epochs.items() if epoch is not None}

    def refresh(self) -> None:
        """Read newer epochs from now on."""
        self.views.refresh()
        self._summaries.clear()

    def check(self, state: StateDef, name: str) -> dg.AssetCheckResult:
        """Return one check of one state."""
        verdict = self._verdict(state, name)
        return check_result(
            verdict,
            name,
            self.graph.key_of(state),
            severity=dg.AssetCheckSeverity.WARN
            if name == NOT_STALE or verdict.passed
            else dg.AssetCheckSeverity.ERROR,
            passed=not verdict.findings,
        )

    def _verdict(self, state: StateDef, name: str) -> Verdict:
        from arroyo_dagster.dataflow.views.summary import keys_unique, ttl_effective
        from arroyo_dagster.dataflow.views.view import service_paths
        from arroyo_dagster.state.operations.catalog import footers as health

        paths = service_paths(self.graph.dataflow, state.owner)
        if name == RESTORABLE:
            return health.check_newest(self._store, paths, health.check_restorable)
        if name == KEYS_UNIQUE:
            return keys_unique(self.summary(state))
        now_micros = wall_clock()
        if name == TTL_EFFECTIVE:
            return ttl_effective(self.summary(state), now_ms=now_micros // 1000)
        limit = int(self._options.stale_after.total_seconds() * 1_000_000)
        ages = health.job_ages(self._store, [paths])
        return every_job_recent(ages, now_micros=now_micros, limit_micros=limit)


# ---- telling -------------------------------------------------------------------------------------


def has_changed(instance: dg.DagsterInstance, key: dg.AssetKey, summary: "StateSummary") -> bool:
    """Return whether the state has changed since it was last reported."""
    if summary.epoch is None:
        return False
    event = instance.get_latest_materialization_event(key)
    told = event.asset_materialization if event is not None else None
    return told is None or (told.tags or {}).get(shown.DATA_VERSION) != summary.version


def summary_metadata(summary: "StateSummary") -> dict[str, Any]:
    """Return the summary of a state as metadata; unknown values are left out."""
    ttl = summary.state.ttl_ms
    return shown.known(
        {
            "dagster/row_count": summary.rows,
            "size": format_bytes(summary.size_bytes),
            "sdf/epoch": summary.epoch,
            "sdf/finished_at": shown.timestamp(summary.finished_micros),
            "sdf/watermark": shown.timestamp(summary.watermark_micros),
            "sdf/oldest_update": shown.timestamp(
                None if summary.oldest_ms is None else summary.oldest_ms * 1000
            ),
            "sdf/expired_rows_kept": summary.expired_rows if ttl is not None else None,
            "first rows": shown.table(summary.sample),
            "sdf/files": summary.files,
            "sdf/bytes": summary.size_bytes,
        }
    )


class StatesReport:
    """What the sensor reports about states when their owners write new epochs.

    Lives as long as the code server: for a newer epoch, only the files listed since are read.
    """

    def __init__(self, graphs: Sequence[SdfGraph], options: SdfOptions | None = None) -> None:
        self._graphs = {graph.name: graph for graph in graphs}
        self._options = options or SdfOptions()
        self._views: dict[tuple[str, str], StatesView] = {}

    def events(
        self, instance: dg.DagsterInstance, store: "ObjectStore", jobs: Iterable[JobPaths]
    ) -> Iterator[dg.AssetMaterialization]:
        """Return the events for changed states of jobs that have advanced.

        Raises:
            ArroyoStateError: a state cannot be read.
        """
        owners: dict[str, set[str]] = {}
        for job in jobs:
            if job.pipeline is not None and job.pipeline in self._graphs:
                owners.setdefault(job.pipeline, set()).add(job.job)
        for name, services in owners.items():
            yield from self._of_dataflow(instance, store, self._graphs[name], services)

    def _of_dataflow(
        self,
        instance: dg.DagsterInstance,
        store: "ObjectStore",
        graph: SdfGraph,
        services: set[str],
    ) -> Iterator[dg.AssetMaterialization]:
        known = (store.url, graph.name)
        if known not in self._views:
            self._views[known] = StatesView(graph, store, self._options)
        view = self._views[known]
        view.refresh()
        yield from (_service_event(graph, view, name) for name in sorted(services & view.owners))
        for state in graph.owned:
            if state.owner not in services:
                continue
            key, summary = graph.key_of(state), view.summary(state)
            if has_changed(instance, key, summary):
                yield dg.AssetMaterialization(
                    key,
                    description=f"epoch {summary.epoch} of {state.owner}",
                    tags={shown.DATA_VERSION: summary.version},
                    metadata=summary_metadata(summary),
                )


def _service_event(graph: SdfGraph, view: StatesView, service: str) -> dg.AssetMaterialization:
    head = view.views.head(service)
    assert head is not None
    return dg.AssetMaterialization(
        graph.service_key(service),
        description=f"epoch {head.epoch} of {service}",
        metadata=shown.known(
            {
                "sdf/epoch": head.epoch,
                "sdf/finished_at": shown.timestamp(head.finish_time_micros),
                "sdf/watermark": shown.timestamp(job_watermark_micros(head)),
            }
        ),
    )


def build_sdf_job(graph: SdfGraph) -> Any:
    """Build the job that reads all states of a dataflow and checks them."""
    keys: Mapping[str, dg.AssetKey] = {state.table: graph.key_of(state) for state in graph.owned}
    return dg.define_asset_job(
        graph.op_name,
        selection=dg.AssetSelection.assets(*keys.values()),
        description=f"Read the states of {graph.name}, and check them.",
        executor_def=dg.in_process_executor,
        run_tags=BACKGROUND_TAGS,
    )
