"""The door for Dagster: environment in, definitions out. Nothing is opened or started here.

| variable | meaning |
|---|---|
| `ARROYO__CHECKPOINT_URL` (or `CHECKPOINT_URL`) | the checkpoint URL; read when something runs |
| `ARROYO_CATALOGUE_URL` | where the catalogue is kept; on one host below `DAGSTER_HOME` |
| `ARROYO_LAYOUT` | `auto`, `legacy` or `protocol` |
| `ARROYO_DEPLOYMENT` | tells several deployments of one Dagster instance apart |
| `ARROYO_RUNNING` | `1`: sensor and schedules are on from the start |
| `ARROYO_SENSOR_SECONDS` | between two polls of the sensor; by default by the number of jobs |
| `ARROYO_REFRESH_CRON` | when new epochs are catalogued |
| `ARROYO_FLEET_CRON` | when the fleet is looked at, and the states of dataflows |
| `ARROYO_COMPACTION_CRON`, `ARROYO_GC_CRON` | when jobs are compacted, old epochs expired |
| `ARROYO_COMPACT_AFTER_FILES` | a job is compacted once so many files were never merged |
| `ARROYO_COMPACTION_POLICY` | `bin-pack` or `full`, for scheduled runs |
| `ARROYO_KEEP_EPOCHS` | how many epochs scheduled expiry keeps, 10 by default |
| `ARROYO_DELETE` | `1`: scheduled expiry deletes; otherwise it shows what would go |
| `ARROYO_ENGINE` | `spark` or `in-process`: who merges and deletes |
| `ARROYO_DATAFLOWS` | paths of dataflow.yaml files, with `:` between: their states as assets |
| `ARROYO_SPARK_MASTER` | the Spark master; by default Spark's own configuration, else `local[*]` |
| `ARROYO_SPARK_REMOTE` | the URL of a Spark Connect server, instead of a master |
| `ARROYO_SPARK_CONF` | settings of Spark: `NAME=VALUE`, with spaces between |
| `ARROYO_SPARK_PACKAGES` | Maven coordinates of jars, with spaces between |
| `ARROYO_SPARK_SHIP` | `1`: send this package to the workers of the cluster |
"""

import os
from collections.abc import Mapping

import dagster as dg

from arroyo_dagster.orchestration.catalog.sensor import SensorOptions
from arroyo_dagster.orchestration.compaction.assets import CompactionConfig
from arroyo_dagster.orchestration.definitions import ScheduleOptions, build_arroyo_definitions
from arroyo_dagster.orchestration.maintenance import (
    GcConfig,
    MaintenanceOptions,
)
from arroyo_dagster.orchestration.resources import ArroyoStateStore, SparkSessionResource
from arroyo_dagster.orchestration.runners import InProcessRunner


def _build(given: Mapping[str, str]) -> dg.Definitions:
    other = "CHECKPOINT_URL" in given and "ARROYO__CHECKPOINT_URL" not in given
    running = given.get("ARROYO_RUNNING") == "1"
    seconds = given.get("ARROYO_SENSOR_SECONDS")
    return build_arroyo_definitions(
        ArroyoStateStore(
            checkpoint_url=dg.EnvVar("CHECKPOINT_URL" if other else "ARROYO__CHECKPOINT_URL"),
            layout=given.get("ARROYO_LAYOUT", "auto"),
            catalogue_url=given.get("ARROYO_CATALOGUE_URL"),
        ),
        spark=_spark(given),
        runner=InProcessRunner() if given.get("ARROYO_ENGINE") == "in-process" else None,
        maintenance=_maintenance(given),
        deployment=given.get("ARROYO_DEPLOYMENT"),
        sensor=SensorOptions(interval_seconds=int(seconds) if seconds else None),
        sensor_running=running,
        schedules=_schedules(given),
        schedules_running=running,
        dataflows=[one for one in given.get("ARROYO_DATAFLOWS", "").split(os.pathsep) if one],
    )


def _spark(given: Mapping[str, str]) -> SparkSessionResource:
    # EnvVar: a URL may hold a token, a setting a password, and Dagster shows what is configured.
    remote = dg.EnvVar("ARROYO_SPARK_REMOTE") if given.get("ARROYO_SPARK_REMOTE") else None
    return SparkSessionResource(
        master=given.get("ARROYO_SPARK_MASTER") or None,
        remote_url=remote,
        conf=dict(one.split("=", 1) for one in given.get("ARROYO_SPARK_CONF", "").split()),
        packages=given.get("ARROYO_SPARK_PACKAGES", "").split(),
        ship=given.get("ARROYO_SPARK_SHIP") == "1",
    )


def _schedules(given: Mapping[str, str]) -> ScheduleOptions:
    return ScheduleOptions(
        fleet=given.get("ARROYO_FLEET_CRON", ScheduleOptions.fleet),
        states=given.get("ARROYO_FLEET_CRON", ScheduleOptions.states),
        refresh=given.get("ARROYO_REFRESH_CRON", ScheduleOptions.refresh),
        compaction=given.get("ARROYO_COMPACTION_CRON", ScheduleOptions.compaction),
        gc=given.get("ARROYO_GC_CRON", ScheduleOptions.gc),
    )


def _maintenance(given: Mapping[str, str]) -> MaintenanceOptions:
    after = given.get("ARROYO_COMPACT_AFTER_FILES", str(MaintenanceOptions.min_backlog))
    return MaintenanceOptions(
        min_backlog=int(after),
        compaction=CompactionConfig(policy=given.get("ARROYO_COMPACTION_POLICY", "bin-pack")),
        gc=GcConfig(
            keep_epochs=int(given.get("ARROYO_KEEP_EPOCHS", "10")),
            dry_run=given.get("ARROYO_DELETE") != "1",
        ),
    )


defs = _build(os.environ)
