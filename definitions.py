"""Environment variables in, definitions out. The pipelines are listed when this loads; nothing else
is opened or started.

| variable | meaning |
|---|---|
| `ARROYO__CHECKPOINT_URL` (or `CHECKPOINT_URL`) | the checkpoint URL |
| `ARROYO_MODE` | `view`, or `maintain`: also compact, and expire epochs of managed pipelines |
| `ARROYO_RUNNING` | `1`: sensor and schedules are on from the start |
| `ARROYO_DELETE` | `1`, with `maintain`: expiry deletes; otherwise it shows what would go |
| `ARROYO_DEPLOYMENT` | tells several deployments of one Dagster instance apart |
| `ARROYO_LAYOUT` | `auto`, `legacy` or `protocol` |
| `ARROYO_SENSOR_SECONDS` | between two polls of the sensor; by default by the number of jobs |
| `ARROYO_VERIFY_CRON`, `ARROYO_FLEET_CRON` | when pipelines are verified; when `fleet` is made |
| `ARROYO_COMPACTION_CRON`, `ARROYO_GC_CRON` | when pipelines are compacted; old epochs expired |
| `ARROYO_COMPACT_AFTER_FILES` | a pipeline is compacted once so many files were never merged |
| `ARROYO_KEEP_EPOCHS` | how many epochs scheduled expiry keeps, 10 by default |
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
from typing import Any

import dagster as dg

from arroyo_dagster import (
    ArroyoOptions,
    ArroyoStateStore,
    GcConfig,
    InProcessRunner,
    MaintenanceOptions,
    ScheduleOptions,
    SensorOptions,
    SparkSessionResource,
    build_arroyo_definitions,
)

_CRONS = ("verify", "fleet", "compaction", "gc")


def _build(given: Mapping[str, str]) -> dg.Definitions:
    other = "CHECKPOINT_URL" in given and "ARROYO__CHECKPOINT_URL" not in given
    seconds = given.get("ARROYO_SENSOR_SECONDS")
    mode: Any = given.get("ARROYO_MODE", "view")
    return build_arroyo_definitions(
        ArroyoStateStore(
            checkpoint_url=dg.EnvVar("CHECKPOINT_URL" if other else "ARROYO__CHECKPOINT_URL"),
            layout=given.get("ARROYO_LAYOUT", "auto"),
        ),
        mode=mode,
        running=given.get("ARROYO_RUNNING") == "1",
        deployment=given.get("ARROYO_DEPLOYMENT"),
        options=ArroyoOptions(
            spark=_spark(given),
            runner=InProcessRunner() if given.get("ARROYO_ENGINE") == "in-process" else None,
            sensor=SensorOptions(interval_seconds=int(seconds) if seconds else None),
            schedules=_schedules(given),
            maintenance=_maintenance(given),
            dataflows=[one for one in given.get("ARROYO_DATAFLOWS", "").split(os.pathsep) if one],
        ),
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
    crons = {name: given.get(f"ARROYO_{name.upper()}_CRON") for name in _CRONS}
    crons["states"] = crons["fleet"]
    return ScheduleOptions(**{name: cron for name, cron in crons.items() if cron})


def _maintenance(given: Mapping[str, str]) -> MaintenanceOptions:
    after = given.get("ARROYO_COMPACT_AFTER_FILES", str(MaintenanceOptions.min_backlog))
    return MaintenanceOptions(
        min_backlog=int(after),
        gc=GcConfig(
            keep_epochs=int(given.get("ARROYO_KEEP_EPOCHS", "10")),
            dry_run=given.get("ARROYO_DELETE") != "1",
        ),
    )


defs = _build(os.environ)
