"""`build_arroyo_definitions`: everything that a code location needs, in one call."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import dagster as dg

from arroyo_dagster.orchestration.compaction.assets import CompactionConfig, build_compacted_state
from arroyo_dagster.orchestration.compaction.maintenance_window import (
    MaintenanceWindow,
    build_window_definitions,
)
from arroyo_dagster.orchestration.dataflow.assets import (
    SdfOptions,
    StatesReport,
    build_dataflow_definitions,
    load_graph,
)
from arroyo_dagster.orchestration.dataflow.graph import DataflowSource, SdfGraph
from arroyo_dagster.orchestration.export.assets import build_exports
from arroyo_dagster.orchestration.fleet import FLEET_CRON, WAITING_LIMIT, build_fleet, report_fleet
from arroyo_dagster.orchestration.gc.assets import (
    DeadJobsConfig,
    GcConfig,
    OrphansConfig,
    build_epoch_expiry,
    build_root_gc,
)
from arroyo_dagster.orchestration.loading import LIST_WITHIN, PipelineSource, read_list
from arroyo_dagster.orchestration.pipelines.lineage import mapped, without_cycles
from arroyo_dagster.orchestration.pipelines.model import ListedPipeline, PipelineList
from arroyo_dagster.orchestration.requests import (
    Due,
    asset_job,
    clock_schedule,
    due_by_backlog,
    due_schedule,
)
from arroyo_dagster.orchestration.resources import (
    ArroyoDirectory,
    ArroyoStateStore,
    SparkSessionResource,
)
from arroyo_dagster.orchestration.runners import MaintenanceRunner, SparkRunner, Tools
from arroyo_dagster.orchestration.sensor import SensorOptions, build_checkpoint_sensor
from arroyo_dagster.orchestration.surgery.bootstrapped_state import build_bootstrapped_state
from arroyo_dagster.orchestration.surgery.forked_state import StateFork, build_forked_state
from arroyo_dagster.orchestration.translator import (
    CHECKPOINT,
    COMPACTED_STATE,
    DEAD_JOBS,
    DIRECTORY,
    ORPHANS,
    RETAINED_EPOCHS,
    RUNNER,
    SPARK,
    STORE,
    DagsterArroyoTranslator,
    Names,
)
from arroyo_dagster.orchestration.verify.definitions import build_verify
from arroyo_dagster.orchestration.verify.verdict import VerifyOptions
from arroyo_dagster.state.model.settings import Setting
from arroyo_dagster.state.planning.exports import TableExport
from arroyo_dagster.state.planning.privacy import PrivateColumns

COMPACTION_CRON = "17 * * * *"
GC_CRON = "43 3 * * *"
ORPHANS_CRON = "13 4 * * 0"
DEAD_JOBS_CRON = "33 4 * * 0"
SINKS_GROUP = "arroyo_sinks"
"""Of sinks with several writers."""


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """When to run what no event triggers, as cron.

    Attributes:
        verify: the checks of pipelines; None = every 15 minutes, less often for more than 100.
        fleet: the overview of all pipelines.
        compaction: merges files.
        gc: expires old epochs.
        orphans, dead_jobs: gc of the whole root.
        exports: exports tables.
        states: checks the states of dataflows.
        timezone: of these times of day, for example `Europe/Berlin`.
    """

    verify: str | None = None
    fleet: str = FLEET_CRON
    compaction: str = COMPACTION_CRON
    gc: str = GC_CRON
    orphans: str = ORPHANS_CRON
    dead_jobs: str = DEAD_JOBS_CRON
    exports: str = "27 * * * *"
    states: str = FLEET_CRON
    timezone: str = "UTC"


@dataclass(frozen=True, kw_only=True)
class MaintenanceOptions:
    """How the schedules compact pipelines and run gc.

    Attributes:
        min_backlog: a pipeline is compacted once so many of its files were never merged.
        most_jobs: at most so many pipelines a run, those with the largest backlog first.
        compaction, gc: the configuration of these runs; gc deletes only if its own configuration
            enables it.
        orphans, dead_jobs: likewise; None = without these assets.
    """

    min_backlog: Annotated[
        int,
        Setting(
            minimum=1, help="Compact a pipeline once this many of its files have never been merged."
        ),
    ] = 64
    most_jobs: Annotated[
        int,
        Setting(
            minimum=1,
            help="The maximum number of pipelines per run of a schedule, those with the largest "
            "backlog first.",
        ),
    ] = 500
    compaction: CompactionConfig = field(default_factory=CompactionConfig)
    gc: GcConfig = field(default_factory=GcConfig)
    orphans: OrphansConfig | None = None
    dead_jobs: DeadJobsConfig | None = None


@dataclass(frozen=True, kw_only=True)
class Lineage:
    """Which sources and sinks of pipelines are shown.

    Attributes:
        sources, sinks: True = all, False = none, or other keys by keys, as `kafka/orders`; None
            instead of another key leaves it to you: add `deps` of your own.
    """

    sources: bool | Mapping[str, str | None] = True
    sinks: bool | Mapping[str, str | None] = True


@dataclass(frozen=True, kw_only=True)
class ArroyoOptions:
    """Everything that has a default.

    Attributes:
        spark: how to start Spark for maintenance; local by default.
        runner: where to compact and expire; Spark by default.
        translator: names and describes the assets.
        sensor, verify, schedules, maintenance: how much, how closely, when and how.
        waiting_limit: in seconds; a pipeline that waits for maintenance for longer is an error.
        freshness: the maximum age of each pipeline's newest epoch, in seconds, as a policy of
            Dagster; None = none.
        lineage: which sources and sinks are shown, under which keys.
        directory: what is assumed of Arroyo jobs, beside the store's sources of their status.
        window: which running Arroyo jobs may be stopped to be rewritten, and when.
        exports: tables that are exported to Parquet, Delta or Iceberg.
        fork, bootstrapped_state: add these assets; the latter computed by this MODULE:FUNCTION.
        dataflows: dataflow.yaml files of SDF dataflows whose states lie below the checkpoint URL.
        sdf: how to read those states.
        private_columns: the columns whose values are masked wherever values are shown, for example
            `email`, `orders.email` or `orders.*`; see `PrivateColumns`.
    """

    spark: SparkSessionResource | None = None
    runner: MaintenanceRunner | None = None
    translator: DagsterArroyoTranslator = field(default_factory=DagsterArroyoTranslator)
    sensor: SensorOptions = field(default_factory=SensorOptions)
    verify: VerifyOptions = field(default_factory=VerifyOptions)
    schedules: ScheduleOptions = field(default_factory=ScheduleOptions)
    maintenance: MaintenanceOptions = field(default_factory=MaintenanceOptions)
    waiting_limit: float = WAITING_LIMIT
    freshness: float | None = None
    lineage: Lineage = field(default_factory=Lineage)
    directory: ArroyoDirectory | None = None
    window: MaintenanceWindow | None = None
    exports: Sequence[TableExport] = ()
    fork: StateFork | None = None
    bootstrapped_state: str | None = None
    dataflows: Sequence[DataflowSource] = ()
    sdf: SdfOptions | None = None
    private_columns: Sequence[str] = ()


def build_arroyo_definitions(
    store: ArroyoStateStore | str,
    *,
    pipelines: PipelineList | str | Path | None = None,
    mode: Literal["view", "maintain"] = "view",
    running: bool = False,
    deployment: str | None = None,
    list_within: float = LIST_WITHIN,
    list_cache: str | Path | None = None,
    gone: Sequence[str] = (),
    options: ArroyoOptions | None = None,
) -> dg.Definitions:
    """Build the assets, checks, jobs, sensor, schedules and resources of one deployment.

    Merge the result with other definitions by `dg.Definitions.merge`. All names begin with
    `arroyo_`, with a deployment with `arroyo_{deployment}_`: results for different deployments
    merge.

    Args:
        store: where checkpoints are stored; or just the checkpoint URL.
        pipelines: the pipelines to define, or the path of a list that `dg utils refresh-defs-state`
            or an earlier load has written. None = a list that is made when the code server starts;
            its runs use the same.
        mode: `view` reports and verifies; `maintain` also compacts, and expires epochs of managed
            pipelines (it deletes only if `options.maintenance.gc` has `dry_run=False`).
        running: start sensor and schedules as running; off by default, so that installing starts
            nothing.
        deployment: name of this deployment if one Dagster instance has several; part of asset keys
            and of the names of jobs, ops, schedules, sensors, pools and resources.
        list_within: the most seconds for the list. Whatever fails raises no error: the last list
            stays in force, or only `fleet` is defined, which says why.
        list_cache: the file of the last list; by default below DAGSTER_HOME.
        gone: jobs that were deleted on purpose, as job or pipeline/job.

    Raises:
        InputError: a private column has an empty part, two exports have the same name, or the
            nightly fork approves a plan.
        InvalidDefinition: a dataflow.yaml has errors.
    """
    resolved = options or ArroyoOptions()
    resource = ArroyoStateStore(checkpoint_url=store) if isinstance(store, str) else store
    directory = resolved.directory or ArroyoDirectory()

    def build(found: PipelineList) -> dg.Definitions:
        names = Names(resolved.translator, found, deployment)
        status_sources = (resource.arroyo_api_url, resource.arroyo_database, directory.assume)
        parts = _Parts(names, resolved, mode, running, has_status=any(status_sources))
        session = resolved.spark or SparkSessionResource()
        shared = dg.Definitions(
            resources={
                names.name(STORE): resource,
                names.name(SPARK): session,
                names.name(RUNNER): resolved.runner or SparkRunner(spark=session),
                names.name(DIRECTORY): directory,
            }
        )
        return dg.Definitions.merge(shared, *parts.all())

    if isinstance(pipelines, PipelineList):
        return build(pipelines.without(gone))
    if pipelines is not None:
        return build(read_list(pipelines, resource.checkpoint_url).without(gone))
    return PipelineSource(
        store=resource,
        directory=directory,
        deployment=deployment,
        within_seconds=list_within,
        cache=list_cache,
        gone=gone,
    ).definitions(build)


@dataclass(frozen=True)
class _Parts:
    """The parts of the definitions of a deployment."""

    names: Names
    options: ArroyoOptions
    mode: str
    running: bool
    has_status: bool

    def all(self) -> list[dg.Definitions]:
        """Return all that the options ask for."""
        options, times = self.options, self.options.schedules
        clock: dict[str, Any] = {"timezone": times.timezone, "running": self.running}
        maintained: dict[dg.AssetKey, ListedPipeline] = {}
        parts = []
        if self.mode == "maintain":
            parts += self._maintenance(clock, maintained)
        graphs = [self._graph(file) for file in options.dataflows]
        fleet = self.names, maintained, options.waiting_limit
        parts += [
            build_verify(
                self.names,
                options.verify,
                partial(report_fleet, *fleet),
                cron=times.verify,
                **clock,
            ),
            build_fleet(*fleet, cron=times.fleet, **clock),
            dg.Definitions(
                assets=lineage_specs(self.names, options.lineage, options.freshness),
                sensors=[self._sensor(graphs)],
            ),
            *(
                build_dataflow_definitions(graph, self.names, self._sdf, times.states, **clock)
                for graph in graphs
            ),
            *self._opt_in(graphs, clock),
        ]
        return parts

    def _maintenance(
        self, clock: dict[str, Any], maintained: dict[dg.AssetKey, ListedPipeline]
    ) -> list[dg.Definitions]:
        names, options = self.names, self.options.maintenance
        times, every = self.options.schedules, self.names.pipelines.pipelines
        changeable = self.has_status or self.options.window is not None
        compacted = [pipeline for pipeline in every if pipeline.managed or changeable]
        managed = [pipeline for pipeline in every if pipeline.managed]
        merges = build_compacted_state(names, compacted)
        epochs = build_epoch_expiry(names, managed, compacted)
        maintained |= {names.key(COMPACTED_STATE, pipeline): pipeline for pipeline in compacted}
        maintained |= {names.key(RETAINED_EPOCHS, pipeline): pipeline for pipeline in managed}
        parts = [
            self._per_pipeline(
                COMPACTED_STATE,
                merges,
                "arroyo_compaction",
                "Compact the pipelines with many files that were never merged.",
                options.compaction,
                clock | {"cron": times.compaction},
                self._due(COMPACTED_STATE, compacted, self._compaction_backlog),
            ),
            self._per_pipeline(
                RETAINED_EPOCHS,
                epochs,
                "arroyo_gc",
                "Expire old epochs of managed pipelines. Deletes only if configured to.",
                options.gc,
                clock | {"cron": times.gc},
                self._due(RETAINED_EPOCHS, managed, self._expiry_backlog),
            ),
        ]
        root = (
            (ORPHANS, options.orphans, times.orphans, "Delete what no epoch lists."),
            (DEAD_JOBS, options.dead_jobs, times.dead_jobs, "Delete jobs that are proven gone."),
        )
        for table, config, cron, text in root:
            if config is not None:
                asset = build_root_gc(names, table)
                job = asset_job(names, f"arroyo_{table}_gc", [asset], text, config)
                schedule = clock_schedule(job, cron, **clock)
                parts.append(dg.Definitions(assets=[asset], jobs=[job], schedules=[schedule]))
        return parts

    def _due(
        self,
        table: str,
        pipelines: Sequence[ListedPipeline],
        backlog: Callable[[Tools, ListedPipeline], int],
    ) -> Due:
        most, retry = self.options.maintenance.most_jobs, self.options.verify.audit_after
        return due_by_backlog(self.names, table, pipelines, backlog, most=most, retry_after=retry)

    def _compaction_backlog(self, tools: Tools, pipeline: ListedPipeline) -> int:
        """How often the files that were never merged reach the trigger."""
        from arroyo_dagster.state.operations.compaction.plan import compaction_backlog

        files = compaction_backlog(tools.store.reading(), pipeline.paths)
        return files // self.options.maintenance.min_backlog

    def _expiry_backlog(self, tools: Tools, pipeline: ListedPipeline) -> int:
        """How many epochs are to expire by their number."""
        from arroyo_dagster.state.operations.gc.pins import expiry_backlog

        keep = self.options.maintenance.gc.keep_epochs or 2
        return expiry_backlog(tools.store.reading(), pipeline.paths, keep)

    def _per_pipeline(
        self,
        table: str,
        assets: Sequence[dg.AssetsDefinition],
        name: str,
        text: str,
        config: dg.Config,
        clock: Mapping[str, Any],
        due: Due,
    ) -> dg.Definitions:
        """Build the job of an asset that each pipeline has, and the schedule for those due."""
        if not assets:
            return dg.Definitions()
        job = asset_job(self.names, name, assets, text, config)

        def request(pipelines: Sequence[ListedPipeline]) -> dg.RunRequest:
            keys = [self.names.key(table, pipeline) for pipeline in pipelines]
            selected = set(keys)
            ops: Any = {a.op.name: config for a in assets if selected & set(a.keys)}
            return dg.RunRequest(asset_selection=keys, run_config=dg.RunConfig(ops))

        schedule = due_schedule(self.names, job, due=due, request=request, **clock)
        return dg.Definitions(assets=assets, jobs=[job], schedules=[schedule])

    def _sensor(self, graphs: Sequence[SdfGraph]) -> dg.SensorDefinition:
        return build_checkpoint_sensor(
            self.names,
            options=self.options.sensor,
            states=StatesReport(graphs, self._sdf) if graphs else None,
            state_keys=[key for graph in graphs for key in graph.reported_keys()],
            running=self.running,
        )

    # ---- opt-in ----------------------------------------------------------------------------------

    @property
    def _private(self) -> PrivateColumns:
        return PrivateColumns.of(self.options.private_columns)

    @property
    def _sdf(self) -> SdfOptions:
        sdf = self.options.sdf or SdfOptions()
        named = [*sdf.private.patterns, *self.options.private_columns]
        return replace(sdf, private=PrivateColumns.of(named)) if named else sdf

    def _graph(self, dataflow: DataflowSource) -> SdfGraph:
        graph = load_graph(dataflow)
        return replace(graph, deployment=graph.deployment or self.names.deployment)

    def _opt_in(self, graphs: Sequence[SdfGraph], clock: Mapping[str, Any]) -> list[dg.Definitions]:
        names, options, parts = self.names, self.options, list[dg.Definitions]()
        if options.window is not None:
            parts.append(build_window_definitions(names, options.window, running=self.running))
        if options.exports:
            parts.append(
                build_exports(
                    names,
                    options.exports,
                    graphs,
                    self._private,
                    cron=options.schedules.exports,
                    **clock,
                )
            )
        if options.fork is not None:
            parts.append(
                build_forked_state(
                    names, options.fork, window=options.window is not None, running=self.running
                )
            )
        if options.bootstrapped_state is not None:
            parts.append(build_bootstrapped_state(names, options.bootstrapped_state))
        return parts


# ---- lineage -------------------------------------------------------------------------------------


def lineage_specs(names: Names, shown: Lineage, freshness: float | None) -> Sequence[dg.AssetSpec]:
    """Return `checkpoint` of each pipeline, downstream of its sources, and each sink once.

    An edge that would close a cycle is left out, and named in the metadata.

    Args:
        freshness: the maximum age of a checkpoint in seconds, as a policy of Dagster.

    Raises:
        InputError: another key has an empty part.
    """
    pipelines = [
        replace(
            item, sources=mapped(item.sources, shown.sources), sinks=mapped(item.sinks, shown.sinks)
        )
        for item in names.pipelines.pipelines
    ]
    edges = without_cycles(pipelines)
    policy = None
    if freshness is not None:
        policy = dg.FreshnessPolicy.time_window(fail_window=timedelta(seconds=freshness))
    specs = []
    for pipeline in pipelines:
        sources = [dg.AssetKey(key) for key in edges.sources.get(pipeline.root, ())]
        spec = names.spec(CHECKPOINT, pipeline, deps=sources)
        if sources:  # Dagster's pages hide keys that nobody defines
            reads = ", ".join(key.to_user_string() for key in sources)
            spec = spec.merge_attributes(metadata={"arroyo/reads": reads})
        left_out = edges.left_out.get(pipeline.root, ())
        if left_out:
            keys = ", ".join("/".join(key) for key in left_out)
            spec = spec.merge_attributes(metadata={"arroyo/edges_that_close_a_cycle": keys})
        if policy is not None:
            spec = spec.replace_attributes(freshness_policy=policy)
        specs.append(spec)
    kinds = {
        end.key: end.connector
        for pipeline in pipelines
        for end in pipeline.sinks
        if end.connector is not None
    }
    for key, roots in edges.sinks.items():
        writers = [names.spec(CHECKPOINT, names.find(root)) for root in roots]
        kind = kinds.get(key)
        specs.append(
            dg.AssetSpec(
                key,
                deps=[writer.key for writer in writers],
                group_name=writers[0].group_name if len(writers) == 1 else SINKS_GROUP,
                kinds={kind.replace("_", "")[:32]} if kind else None,
                description="What these pipelines write; Dagster produces nothing here.",
            )
        )
    return specs
