"""Dataflows in Dagster: each state is an asset with lineage and checks, reported by the sensor.

    defs = build_arroyo_definitions(
        "s3://bucket/checkpoints", options=ArroyoOptions(dataflows=["dataflow.yaml"])
    )

The services run elsewhere (`arroyo-state sdf run`). Their jobs are reported, compacted and expired
like all others. Materializing a state reads its owner's newest epoch.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg

from arroyo_dagster.orchestration import rendering as shown
from arroyo_dagster.orchestration.check_results import check_result, yield_and_report
from arroyo_dagster.orchestration.dataflow.graph import DataflowSource, SdfGraph
from arroyo_dagster.orchestration.failures import as_failure
from arroyo_dagster.orchestration.requests import BACKGROUND_TAGS, clock_schedule
from arroyo_dagster.orchestration.resources import ArroyoStateStore
from arroyo_dagster.orchestration.translator import RESTORABLE, Names, check_description
from arroyo_dagster.state.model.clock import wall_clock
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.units import format_bytes
from arroyo_dagster.state.planning.privacy import NOTHING_PRIVATE, PrivateColumns
from arroyo_dagster.state.planning.restore.reads import job_watermark_micros
from arroyo_dagster.state.planning.verify.findings import Verdict
from arroyo_dagster.state.planning.verify.fleet import every_job_recent

if TYPE_CHECKING:
    from arroyo_dagster.dataflow.definition.definition import StateDef
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


def load_graph(file: DataflowSource) -> SdfGraph:
    """Read a dataflow.yaml as a graph of assets.

    Raises:
        InvalidDefinition: it has errors; the exception lists all.
        InputError: it is a package, not a dataflow.
    """
    from arroyo_dagster.dataflow.definition.loading import load_dataflow

    if isinstance(file, str | Path):
        return SdfGraph(load_dataflow(file)[0], file=Path(file))
    return file if isinstance(file, SdfGraph) else SdfGraph(file)


def sdf_dataflow_assets(
    file: DataflowSource,
    *,
    name: str | None = None,
    docs_url: str | None = None,
    resources: set[str] | None = None,
) -> Callable[[Callable[..., Any]], dg.AssetsDefinition]:
    """Make the states of a dataflow the assets of a function, with their checks.

        @sdf_dataflow_assets("dataflow.yaml")
        def words(context: dg.AssetExecutionContext, arroyo_store: ArroyoStateStore):
            yield from observe_states(context, arroyo_store, "dataflow.yaml")

    States that are not read, or have not changed, are not materialized.

    Args:
        file: the dataflow.yaml, or the definition itself.
        name: of the op; default: derived from the dataflow's name.
        docs_url: where a copy of the documentation site is served, for links to the runbook.
        resources: the keys of resources that the function takes from its context.

    Raises:
        InvalidDefinition: the file has errors.
    """
    graph = load_graph(file)
    checks = [
        dg.AssetCheckSpec(
            check,
            asset=graph.key_of(state),
            description=check_description(description, check, docs_url),
        )
        for state in graph.owned
        for check, description in _CHECKS.items()
    ]
    return dg.multi_asset(
        name=name or f"{graph.op_name}_states",
        specs=[spec.replace_attributes(skippable=True) for spec in graph.state_specs()],
        check_specs=checks,
        can_subset=True,
        required_resource_keys=resources,
    )


def build_dataflow_definitions(
    graph: SdfGraph, names: Names, options: SdfOptions, cron: str, **clock: Any
) -> dg.Definitions:
    """Build the assets of a dataflow, states, topics and services, and a job that reads all states
    and checks them.

    Args:
        cron, clock: when the job runs, as `clock_schedule` takes them.
    """

    @sdf_dataflow_assets(graph, docs_url=names.translator.docs_url(), resources=names.resources)
    def states(context: dg.AssetExecutionContext) -> Any:
        yield from observe_states(context, names.tools(context).store, graph, options=options)

    job: Any = dg.define_asset_job(
        graph.op_name,
        selection=dg.AssetSelection.assets(states),
        description=f"Read the states of {graph.name}, and check them.",
        executor_def=dg.in_process_executor,
        run_tags=BACKGROUND_TAGS,
    )
    return dg.Definitions(
        assets=[states, *graph.outer_specs()],
        jobs=[job],
        schedules=[clock_schedule(job, cron, **clock)],
    )


# ---- runs ----------------------------------------------------------------------------------------


def observe_states(
    context: dg.AssetExecutionContext,
    arroyo_store: ArroyoStateStore,
    file: DataflowSource,
    *,
    options: SdfOptions | None = None,
) -> Iterator[Any]:
    """Read the states that a run selected: yield results for those that have changed, and their
    checks.

    Raises:
        dg.Failure: the store failed, or a state cannot be read.
    """
    checks = context.selected_asset_check_keys
    with as_failure():
        graph = load_graph(file)
        view = StatesView(graph, arroyo_store.reading(), options or SdfOptions())
        for state in graph.owned:
            key = graph.key_of(state)
            if key in context.selected_asset_keys:
                summary = view.summary(state)
                if has_changed(context.instance, key, summary):
                    yield dg.MaterializeResult(
                        asset_key=key,
                        metadata=summary_metadata(summary),
                        data_version=dg.DataVersion(summary.version),
                    )
            results = (view.check(state, check.name) for check in checks if check.asset_key == key)
            yield from yield_and_report(context, results)


class StatesView:
    """The states of a dataflow at the newest epochs of their owners, each read once."""

    def __init__(self, graph: SdfGraph, store: "ObjectStore", options: SdfOptions) -> None:
        from arroyo_dagster.dataflow.views.view import Views

        self.graph = graph
        self._store = store
        self._options = options
        self._views = Views(store, graph.dataflow, private=options.private)
        self._summaries: dict[tuple[str, str], StateSummary] = {}

    def summary(self, state: "StateDef") -> "StateSummary":
        """Return the summary of one state."""
        from arroyo_dagster.dataflow.views.summary import summarise

        name = (state.owner, state.name)
        if name not in self._summaries:
            (self._summaries[name],) = summarise(
                self._store, self._views, [state], read_bytes=self._options.read_bytes
            )
        return self._summaries[name]

    def check(self, state: "StateDef", name: str) -> dg.AssetCheckResult:
        """Return one check of one state."""
        verdict = self._verdict(state, name)
        warns = name == NOT_STALE or verdict.passed
        return check_result(
            verdict,
            name,
            self.graph.key_of(state),
            severity=dg.AssetCheckSeverity.WARN if warns else dg.AssetCheckSeverity.ERROR,
            passed=not verdict.findings,
        )

    def _verdict(self, state: "StateDef", name: str) -> Verdict:
        from arroyo_dagster.dataflow.views.summary import keys_unique, ttl_effective
        from arroyo_dagster.dataflow.views.view import service_paths
        from arroyo_dagster.state.operations.catalog.footers import (
            check_newest,
            check_restorable,
            job_ages,
        )

        paths, now_micros = service_paths(self.graph.dataflow, state.owner), wall_clock()
        if name == RESTORABLE:
            return check_newest(self._store, paths, check_restorable)
        if name == KEYS_UNIQUE:
            return keys_unique(self.summary(state))
        if name == TTL_EFFECTIVE:
            return ttl_effective(self.summary(state), now_ms=now_micros // 1000)
        limit = self._options.stale_after // timedelta(microseconds=1)
        ages = job_ages(self._store, [paths])
        return every_job_recent(ages, now_micros=now_micros, limit_micros=limit)

    def events(
        self, instance: dg.DagsterInstance, services: set[str]
    ) -> Iterator[dg.AssetMaterialization]:
        """Read newer epochs, and yield the events of services, and of their states that changed."""
        self._views.refresh()
        self._summaries.clear()
        for service in sorted(services):
            head = self._views.head(service)
            if head is not None:
                yield dg.AssetMaterialization(
                    self.graph.service_key(service),
                    description=f"epoch {head.epoch} of {service}",
                    metadata=_epoch_metadata(
                        head.epoch, head.finish_time_micros, job_watermark_micros(head)
                    ),
                )
        for state in self.graph.owned:
            if state.owner not in services:
                continue
            key, summary = self.graph.key_of(state), self.summary(state)
            if has_changed(instance, key, summary):
                yield dg.AssetMaterialization(
                    key,
                    description=f"epoch {summary.epoch} of {state.owner}",
                    tags={shown.DATA_VERSION: summary.version},
                    metadata=summary_metadata(summary),
                )


def has_changed(instance: dg.DagsterInstance, key: dg.AssetKey, summary: "StateSummary") -> bool:
    """Return whether the state has changed since it was last reported."""
    if summary.epoch is None:
        return False
    event = instance.get_latest_materialization_event(key)
    reported = event.asset_materialization if event is not None else None
    return reported is None or (reported.tags or {}).get(shown.DATA_VERSION) != summary.version


def summary_metadata(summary: "StateSummary") -> dict[str, Any]:
    """Return the summary of a state as metadata; unknown values are left out."""
    oldest, has_ttl = summary.oldest_ms, summary.state.ttl_ms is not None
    return shown.known(
        {
            "dagster/row_count": summary.rows,
            "size": format_bytes(summary.size_bytes),
            **_epoch_metadata(summary.epoch, summary.finished_micros, summary.watermark_micros),
            "sdf/oldest_update": shown.timestamp(None if oldest is None else oldest * 1000),
            "sdf/expired_rows_kept": summary.expired_rows if has_ttl else None,
            "first rows": shown.table(summary.sample),
            "sdf/files": summary.files,
            "sdf/bytes": summary.size_bytes,
        }
    )


def _epoch_metadata(
    epoch: int | None, finished_micros: int | None, watermark_micros: int | None
) -> dict[str, Any]:
    return shown.known(
        {
            "sdf/epoch": epoch,
            "sdf/finished_at": shown.timestamp(finished_micros),
            "sdf/watermark": shown.timestamp(watermark_micros),
        }
    )


class StatesReport:
    """What the sensor reports about states when their owners write new epochs.

    Lives as long as the code server: for a newer epoch, only the files listed since are read.
    """

    def __init__(self, graphs: Iterable[SdfGraph], options: SdfOptions) -> None:
        self._graphs = {graph.name: graph for graph in graphs}
        self._options = options
        self._views: dict[str, StatesView] = {}

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
            if name not in self._views:
                self._views[name] = StatesView(self._graphs[name], store, self._options)
            yield from self._views[name].events(instance, services)
