"""`build_arroyo_definitions`: everything that a code location needs, in one call."""

from collections.abc import Sequence
from dataclasses import dataclass
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
from arroyo_dagster.orchestration.catalog.checks import RECENT
from arroyo_dagster.orchestration.catalog.forget import build_forget_job
from arroyo_dagster.orchestration.catalog.sensor import SensorOptions, build_checkpoint_sensor
from arroyo_dagster.orchestration.compaction.assets import build_compacted_state
from arroyo_dagster.orchestration.compaction.maintenance_window import (
    MaintenanceWindow,
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
    BACKGROUND_TAGS,
    FLEET_CRON,
    REFRESH_CRON,
    SYNC_CRON,
    build_clock_schedule,
)
from arroyo_dagster.orchestration.translator import (
    DagsterArroyoTranslator,
    Naming,
)
from arroyo_dagster.state.model.garbage import PlanKind

STORE = "arroyo_store"
SPARK = "arroyo_spark"
RUNNER = "arroyo_runner"
DIRECTORY = "arroyo_directory"


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """When to run what no event triggers, as cron; times of day in `timezone`."""

    fleet: str = FLEET_CRON
    states: str = FLEET_CRON
    sync: str = SYNC_CRON
    refresh: str = REFRESH_CRON
    compaction: str = COMPACTION_CRON
    gc: str = GC_CRON
    orphans: str = ORPHANS_CRON
    dead_jobs: str = DEAD_JOBS_CRON
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
    dataflows: Sequence[str | Path | Dataflow | SdfGraph] = (),
    sdf: SdfOptions | None = None,
    directory: ArroyoDirectory | None = None,
    window: MaintenanceWindow | None = None,
) -> dg.Definitions:
    """Build the assets, checks, jobs, sensor, schedules and resources of one deployment.

    Nothing is opened, read or started. Merge the result with other definitions by
    `dg.Definitions.merge`; the keys of its resources begin with `arroyo_`.

    Args:
        store: where checkpoints and catalogue are stored; or just the checkpoint URL.
        spark: how to start Spark for maintenance; local by default.
        runner: where to compact and expire; Spark by default.
        maintenance: how the schedules compact and expire jobs.
        translator: names and describes the assets.
        deployment: name of this deployment if one Dagster instance has several; part of asset keys
            and of the name of the partitions.
        compaction_sensor: add a sensor that requests compactions when there is enough to do,
            instead of by the clock; on or off with `sensor_running`.
        sensor_running, schedules_running: start as running; off by default, so that installing
            starts nothing.
        recent: the maximum age of the newest epoch of a job that is not at rest.
        dataflows: dataflow.yaml files of SDF dataflows whose states lie below the checkpoint URL:
            their states become assets.
        sdf: how to read those states.
        directory: where the status of Arroyo jobs comes from; without it no Arroyo job is
            rewritten.
        window: which running Arroyo jobs may be stopped to be rewritten, and when; none by default.

    Raises:
        InvalidDefinition: a dataflow.yaml has errors.
    """
    naming = Naming(
        translator or DagsterArroyoTranslator(), jobs_partitions(deployment), deployment
    )
    resource = _store_of(store, deployment)
    clock = schedules or ScheduleOptions()
    catalogue, fleet = build_catalogue(naming), build_fleet(naming, recent=recent)
    refresh_job = _in_process(
        "arroyo_refresh", dg.AssetSelection.assets(catalogue), "Catalogue new epochs of a job."
    )
    fleet_job = _in_process(
        "arroyo_fleet",
        dg.AssetSelection.assets(fleet),
        "Look at all jobs at once.",
    )
    sync_job = build_sync_job(naming)
    compacted, journal = build_compacted_state(naming), build_gc_journal(naming)
    expiry_assets, orphans, dead_jobs = (build_collection(naming, kind) for kind in PlanKind)
    compaction_job = build_maintenance_job("arroyo_compaction", naming, compacted)
    gc_job = build_maintenance_job("arroyo_gc", naming, expiry_assets, journal)
    orphans_job = build_maintenance_job("arroyo_collect_orphans", naming, orphans, journal)
    dead_jobs_job = build_maintenance_job("arroyo_remove_dead_jobs", naming, dead_jobs, journal)
    session = spark or SparkSessionResource()
    graphs = [one if isinstance(one, SdfGraph) else load_graph(one) for one in dataflows]
    sdf_jobs = [build_sdf_job(graph) for graph in graphs]
    told = StatesReport(graphs, sdf) if graphs else None
    windowed = (
        dg.Definitions()
        if window is None
        else build_window_definitions(naming, window, running=schedules_running)
    )
    timed = partial(build_clock_schedule, running=schedules_running, timezone=clock.timezone)
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
    batch_jobs = {name: build_batch_job(one.kind) for name, one in batches.items()}
    sensors = [build_checkpoint_sensor(naming, options=sensor, states=told, running=sensor_running)]
    if compaction_sensor:
        sensors.append(
            build_compaction_sensor(
                batch_jobs["compaction"], batches["compaction"], running=sensor_running
            )
        )
    shared = dg.Definitions(
        assets=[
            *(checkpoint_spec(naming), catalogue, fleet, compacted),
            *(expiry_assets, orphans, dead_jobs, journal),
            *(asset for graph in graphs for asset in build_sdf_assets(graph, sdf)),
        ],
        jobs=[
            *(refresh_job, fleet_job, sync_job, compaction_job, gc_job),
            build_forget_job(naming, recent=recent),
            *(orphans_job, dead_jobs_job, *batch_jobs.values(), *sdf_jobs),
        ],
        sensors=sensors,
        schedules=[
            timed("arroyo_fleet_schedule", fleet_job, clock.fleet),
            timed("arroyo_sync_schedule", sync_job, clock.sync),
            *(timed(f"{job.name}_schedule", job, clock.states) for job in sdf_jobs),
            *(
                build_batch_schedule(
                    f"arroyo_{name}_schedule",
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
            STORE: resource,
            SPARK: session,
            RUNNER: runner or SparkRunner(spark=session),
            DIRECTORY: directory or ArroyoDirectory(),
        },
    )
    return dg.Definitions.merge(shared, windowed)


def _store_of(store: ArroyoStateStore | str, deployment: str | None) -> ArroyoStateStore:
    """The store, which knows the deployment: its catalogue is that deployment's own."""
    if isinstance(store, str):
        return ArroyoStateStore(checkpoint_url=store, deployment=deployment)
    if deployment is None or store.deployment is not None:
        return store
    given = {name: getattr(store, name) for name in store.model_fields_set}
    return type(store)(**{**given, "deployment": deployment})


def _in_process(name: str, selection: dg.AssetSelection, description: str) -> Any:
    # One process a run: a step of its own would import everything anew.
    return dg.define_asset_job(
        name,
        selection=selection,
        description=description,
        executor_def=dg.in_process_executor,
        run_tags=BACKGROUND_TAGS,
    )
