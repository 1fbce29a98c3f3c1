"""`build_arroyo_definitions`: everything that a code location needs, in one call."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import dagster as dg

from arroyo_dagster.dataflow.definition.definition import Dataflow
from arroyo_dagster.orchestration.batch_requests import build_batch_schedule
from arroyo_dagster.orchestration.batches import build_batch_job
from arroyo_dagster.orchestration.catalog.assets import (
    build_catalogue,
    build_fleet,
    checkpoint_spec,
)
from arroyo_dagster.orchestration.catalog.audit import build_audit
from arroyo_dagster.orchestration.catalog.checks import RECENT
from arroyo_dagster.orchestration.catalog.forget import build_forget_job
from arroyo_dagster.orchestration.catalog.health import build_health
from arroyo_dagster.orchestration.catalog.progress import build_progress
from arroyo_dagster.orchestration.catalog.sensor import SensorOptions, build_checkpoint_sensor
from arroyo_dagster.orchestration.compaction.assets import build_compacted_state
from arroyo_dagster.orchestration.compaction.maintenance_window import (
    MaintenanceWindow,
    build_recovery_definitions,
    build_window_definitions,
)
from arroyo_dagster.orchestration.compaction.sensor import build_compaction_sensor
from arroyo_dagster.orchestration.dataflow.assets import (
    SdfOptions,
    StatesReport,
    build_sdf_assets,
    build_sdf_job,
    load_graph,
)
from arroyo_dagster.orchestration.dataflow.graph import SdfGraph
from arroyo_dagster.orchestration.directory import ArroyoDirectory
from arroyo_dagster.orchestration.export.assets import (
    build_export_requests,
    build_exported_state,
)
from arroyo_dagster.orchestration.gc.assets import build_collection, build_gc_journal
from arroyo_dagster.orchestration.maintenance import (
    COMPACTION_CRON,
    DEAD_JOBS_CRON,
    GC_CRON,
    ORPHANS_CRON,
    MaintenanceAssets,
    MaintenanceOptions,
    build_batches,
    build_maintenance_job,
)
from arroyo_dagster.orchestration.partitions import build_sync_job, jobs_partitions
from arroyo_dagster.orchestration.resources import ArroyoStateStore, SparkSessionResource
from arroyo_dagster.orchestration.runners import MaintenanceRunner, SparkRunner
from arroyo_dagster.orchestration.schedules import (
    AUDIT_CRON,
    BACKGROUND_TAGS,
    EXPORTS_CRON,
    FLEET_CRON,
    HEALTH_CRON,
    REFRESH_CRON,
    SYNC_CRON,
    build_clock_schedule,
)
from arroyo_dagster.orchestration.surgery.bootstrapped_state import build_bootstrapped_state
from arroyo_dagster.orchestration.surgery.forked_state import StateFork, build_forked_state
from arroyo_dagster.orchestration.translator import (
    DagsterArroyoTranslator,
    Naming,
)
from arroyo_dagster.state.model.garbage import PlanKind
from arroyo_dagster.state.model.health import HealthLimits
from arroyo_dagster.state.model.verify import AuditSettings
from arroyo_dagster.state.planning.exports import TableExport
from arroyo_dagster.state.planning.privacy import PrivateColumns

STORE = "arroyo_store"
SPARK = "arroyo_spark"
RUNNER = "arroyo_runner"
DIRECTORY = "arroyo_directory"

_PER_JOB = {
    "arroyo_compaction": "Merge the files of one job.",
    "arroyo_gc": "Expire old epochs of one job. Deletes only if the run's configuration "
    "enables it.",
    "arroyo_collect_orphans": "Delete unreferenced objects of one job, if the run's configuration "
    "enables it.",
    "arroyo_remove_dead_jobs": "Delete one job whose pipeline is gone, if the run's configuration "
    "enables it.",
}


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """When to run what no event triggers, as cron; times of day in `timezone`."""

    fleet: str = FLEET_CRON
    health: str = HEALTH_CRON
    audit: str = AUDIT_CRON
    states: str = FLEET_CRON
    sync: str = SYNC_CRON
    refresh: str = REFRESH_CRON
    compaction: str = COMPACTION_CRON
    gc: str = GC_CRON
    orphans: str = ORPHANS_CRON
    dead_jobs: str = DEAD_JOBS_CRON
    exports: str = EXPORTS_CRON
    timezone: str = "UTC"


def build_arroyo_definitions(
    store: ArroyoStateStore | str,
    *,
    spark: SparkSessionResource | None = None,
    runner: MaintenanceRunner | None = None,
    maintenance: MaintenanceOptions | None = None,
    translator: DagsterArroyoTranslator | None = None,
    deployment: str | None = None,
    sensor: SensorOptions | None = None,
    sensor_running: bool = False,
    compaction_sensor: bool = False,
    schedules: ScheduleOptions | None = None,
    schedules_running: bool = False,
    recent: timedelta = RECENT,
    health: HealthLimits | None = None,
    audit: AuditSettings | None = None,
    dataflows: Sequence[str | Path | Dataflow | SdfGraph] = (),
    sdf: SdfOptions | None = None,
    private_columns: Sequence[str] = (),
    directory: ArroyoDirectory | None = None,
    window: MaintenanceWindow | None = None,
    exports: Sequence[TableExport] = (),
    fork: StateFork | None = None,
    bootstrapped_state: str | None = None,
) -> dg.Definitions:
    """Build the assets, checks, jobs, sensor, schedules and resources of one deployment.

    Nothing is opened, read or started. Merge the result with other definitions by
    `dg.Definitions.merge`. All names begin with `arroyo_`, with a deployment with
    `arroyo_{deployment}_`: results for different deployments merge.

    Args:
        store: where checkpoints and catalogue are stored; or just the checkpoint URL.
        spark: how to start Spark for maintenance; local by default.
        runner: where to compact and expire; Spark by default.
        maintenance: how the schedules compact and expire jobs.
        translator: names and describes the assets.
        deployment: name of this deployment if one Dagster instance has several; part of asset keys
            and of the names of partitions, jobs, ops, schedules, sensors, pools and resources.
        compaction_sensor: add a sensor that requests compactions when there is enough to do,
            instead of by the clock; on or off with `sensor_running`.
        sensor_running, schedules_running: start as running; off by default, so that installing
            starts nothing.
        recent: the maximum age of the newest epoch of a job that is not at rest.
        health: when a health check reports a job.
        audit: how closely jobs are audited, and how long.
        dataflows: dataflow.yaml files of SDF dataflows whose states lie below the checkpoint URL:
            their states become assets.
        sdf: how to read those states.
        private_columns: the columns whose values are masked wherever values are shown, for example
            `email`, `orders.email` or `orders.*`; see `PrivateColumns`.
        directory: where the status of Arroyo jobs comes from; without it no Arroyo job is
            rewritten.
        window: which running Arroyo jobs may be stopped to be rewritten, and when; none by default.
        exports: tables that are exported to Parquet, Delta or Iceberg; each is an asset.
        fork: add the asset `forked_state`, and a schedule if it has a nightly fork.
        bootstrapped_state: add the asset `bootstrapped_state`, computed by this MODULE:FUNCTION.

    Raises:
        InvalidDefinition: a dataflow.yaml has errors.
        InputError: a private column has an empty part, two exports have the same name, or the
            nightly fork approves a plan.
    """
    naming = Naming(
        translator or DagsterArroyoTranslator(), jobs_partitions(deployment), deployment
    )
    resource = _store_of(store, deployment)
    clock = schedules or ScheduleOptions()
    catalogue, fleet = build_catalogue(naming), build_fleet(naming, recent=recent)
    healths = build_health(naming, health or HealthLimits())
    audits = build_audit(naming, audit or AuditSettings())
    refresh_job = _in_process(
        naming.name("arroyo_refresh"),
        dg.AssetSelection.assets(catalogue),
        "Catalogue new epochs of a job.",
    )
    progress = build_progress(naming)
    progress_job = _in_process(
        naming.name("arroyo_progress"),
        dg.AssetSelection.assets(progress),
        "Show how far the sources and the event time of a job are.",
    )
    fleet_job = _in_process(
        naming.name("arroyo_fleet"),
        dg.AssetSelection.assets(fleet),
        "Summarize all jobs, and evaluate the checks over them.",
    )
    health_job = _in_process(
        naming.name("arroyo_health"),
        dg.AssetSelection.assets(healths),
        "Find jobs that are late, growing or fragmented.",
    )
    audit_job = _in_process(
        naming.name("arroyo_audit"),
        dg.AssetSelection.assets(audits),
        "Verify the jobs that wait longest for it, and compare their older epochs with the store.",
    )
    sync_job = build_sync_job(naming)
    compacted, journal = build_compacted_state(naming), build_gc_journal(naming)
    expiry_assets, orphans, dead_jobs = (build_collection(naming, kind) for kind in PlanKind)
    per_job = partial(_maintenance_job, naming)
    compaction_job = per_job("arroyo_compaction", compacted)
    gc_job = per_job("arroyo_gc", expiry_assets, journal)
    orphans_job = per_job("arroyo_collect_orphans", orphans, journal)
    dead_jobs_job = per_job("arroyo_remove_dead_jobs", dead_jobs, journal)
    session = spark or SparkSessionResource()
    graphs = [_graph_of(one, deployment) for one in dataflows]
    sdf_jobs = [build_sdf_job(graph) for graph in graphs]
    if private_columns:
        sdf = sdf or SdfOptions()
        named = [*sdf.private.patterns, *private_columns]
        sdf = replace(sdf, private=PrivateColumns.of(named))
    told = StatesReport(graphs, sdf) if graphs else None
    optional = []
    if window is not None:
        optional.append(build_window_definitions(naming, window, running=schedules_running))
    if fork is not None:
        nightly, running = fork.nightly, schedules_running
        optional.append(
            build_forked_state(
                nightly,
                cron=fork.cron,
                timezone=fork.timezone,
                running=running,
                deployment=deployment,
                translator=translator,
            )
        )
        if window is None and nightly is not None and nightly.window:
            optional.append(build_recovery_definitions(naming, running=running))

    if bootstrapped_state is not None:
        optional.append(
            build_bootstrapped_state(
                bootstrapped_state, deployment=deployment, translator=translator
            )
        )

    def timed(name: str, job: Any, cron: str) -> dg.ScheduleDefinition:
        return build_clock_schedule(
            name,
            job,
            cron,
            description=job.description,
            running=schedules_running,
            timezone=clock.timezone,
        )

    batches = build_batches(
        naming,
        maintenance or MaintenanceOptions(),
        MaintenanceAssets(
            catalogue=catalogue,
            compacted=compacted,
            expiry_assets=expiry_assets,
            orphans=orphans,
            dead_jobs=dead_jobs,
            journal=journal,
        ),
    )
    exported: list[dg.AssetsDefinition] = []
    export_jobs = []
    if exports:
        private = PrivateColumns.of(private_columns)
        exported.append(build_exported_state(naming, exports, graphs, private))
        export_jobs.append(
            _in_process(
                naming.name("arroyo_export"),
                dg.AssetSelection.assets(*exported),
                "Export the tables of one job.",
            )
        )
        batches["exports"] = build_export_requests(naming, exports, *exported)
    batch_jobs = {name: build_batch_job(one.kind, naming) for name, one in batches.items()}
    sdf_assets = [asset for graph in graphs for asset in build_sdf_assets(graph, naming, sdf)]
    sensors = [
        build_checkpoint_sensor(
            naming,
            options=sensor,
            states=told,
            state_keys=[key for graph in graphs for key in graph.reported_keys()],
            running=sensor_running,
        )
    ]
    if compaction_sensor:
        sensors.append(
            build_compaction_sensor(
                batch_jobs["compaction"], batches["compaction"], running=sensor_running
            )
        )
    shared = dg.Definitions(
        assets=[
            *(checkpoint_spec(naming), catalogue, progress, fleet, healths, audits),
            *(compacted, expiry_assets, orphans, dead_jobs, journal),
            *sdf_assets,
            *exported,
        ],
        jobs=[
            *(refresh_job, fleet_job, health_job, audit_job, sync_job, compaction_job, gc_job),
            *(progress_job, build_forget_job(naming, recent=recent)),
            *(orphans_job, dead_jobs_job, *batch_jobs.values(), *sdf_jobs, *export_jobs),
        ],
        sensors=sensors,
        schedules=[
            timed(naming.name("arroyo_fleet_schedule"), fleet_job, clock.fleet),
            timed(naming.name("arroyo_health_schedule"), health_job, clock.health),
            timed(naming.name("arroyo_audit_schedule"), audit_job, clock.audit),
            timed(naming.name("arroyo_sync_schedule"), sync_job, clock.sync),
            *(timed(f"{job.name}_schedule", job, clock.states) for job in sdf_jobs),
            *(
                build_batch_schedule(
                    naming.name(f"arroyo_{name}_schedule"),
                    batch_jobs[name],
                    getattr(clock, name),
                    one,
                    running=schedules_running,
                    timezone=clock.timezone,
                )
                for name, one in batches.items()
            ),
        ],
        resources={
            naming.name(STORE): resource,
            naming.name(SPARK): session,
            naming.name(RUNNER): runner or SparkRunner(spark=session),
            naming.name(DIRECTORY): directory or ArroyoDirectory(),
        },
    )
    return dg.Definitions.merge(shared, *optional)


def _store_of(store: ArroyoStateStore | str, deployment: str | None) -> ArroyoStateStore:
    """The store, which knows the deployment: its catalogue is that deployment's own."""
    if isinstance(store, str):
        return ArroyoStateStore(checkpoint_url=store, deployment=deployment)
    if deployment is None or store.deployment is not None:
        return store
    given = {name: getattr(store, name) for name in store.model_fields_set}
    return type(store)(**{**given, "deployment": deployment})


def _graph_of(dataflow: str | Path | Dataflow | SdfGraph, deployment: str | None) -> SdfGraph:
    graph = dataflow if isinstance(dataflow, SdfGraph) else load_graph(dataflow)
    return replace(graph, deployment=graph.deployment or deployment)


def _maintenance_job(naming: Naming, name: str, *assets: dg.AssetsDefinition) -> Any:
    return build_maintenance_job(name, naming, *assets, description=_PER_JOB[name])


def _in_process(name: str, selection: dg.AssetSelection, description: str) -> Any:
    # One process a run: a step of its own would import everything anew.
    return dg.define_asset_job(
        name,
        selection=selection,
        description=description,
        executor_def=dg.in_process_executor,
        run_tags=BACKGROUND_TAGS,
    )
