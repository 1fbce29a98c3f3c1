"""Environment variables in, definitions out: a start without code. For all else, write a component
(`dg scaffold defs arroyo_dagster.ArroyoStateComponent NAME`), or call `build_arroyo_definitions`.

| variable | meaning |
|---|---|
| `ARROYO__CHECKPOINT_URL` (or `CHECKPOINT_URL`) | the checkpoint URL |
| `ARROYO_MODE` | `view`, or `maintain`: also compact, and expire epochs of managed pipelines |
| `ARROYO_RUNNING` | `1`: sensor and schedules are on from the start |
| `ARROYO_DELETE` | `1`, with `maintain`: expiry deletes; otherwise it shows what it would delete |
| `ARROYO_DEPLOYMENT` | the name of this deployment, if one Dagster instance has several |
| `ARROYO_API_URL`, `ARROYO_DATABASE` | Arroyo, as a source of names and job status |
| `ARROYO_SPARK_MASTER`, `_REMOTE`, `_CONF`, `_PACKAGES`, `_SHIP` | as for `arroyo-state` |
"""

import os

import dagster as dg

from arroyo_dagster import (
    ArroyoOptions,
    ArroyoStateStore,
    GcConfig,
    MaintenanceOptions,
    SparkSessionResource,
    build_arroyo_definitions,
)


def _variable(name: str) -> dg.EnvVar | None:
    """The variable itself: its value may be a secret, and Dagster shows what is configured."""
    return dg.EnvVar(name) if os.environ.get(name) else None


_OTHER = "CHECKPOINT_URL" in os.environ and "ARROYO__CHECKPOINT_URL" not in os.environ

defs = build_arroyo_definitions(
    ArroyoStateStore(
        checkpoint_url=dg.EnvVar("CHECKPOINT_URL" if _OTHER else "ARROYO__CHECKPOINT_URL"),
        arroyo_api_url=_variable("ARROYO_API_URL"),
        arroyo_database=_variable("ARROYO_DATABASE"),
    ),
    mode="maintain" if os.environ.get("ARROYO_MODE") == "maintain" else "view",
    running=os.environ.get("ARROYO_RUNNING") == "1",
    deployment=os.environ.get("ARROYO_DEPLOYMENT"),
    options=ArroyoOptions(
        spark=SparkSessionResource(
            master=os.environ.get("ARROYO_SPARK_MASTER"),
            remote_url=_variable("ARROYO_SPARK_REMOTE"),
            conf=dict(one.split("=", 1) for one in os.environ.get("ARROYO_SPARK_CONF", "").split()),
            packages=os.environ.get("ARROYO_SPARK_PACKAGES", "").split(),
            ship=os.environ.get("ARROYO_SPARK_SHIP") == "1",
        ),
        maintenance=MaintenanceOptions(gc=GcConfig(dry_run=os.environ.get("ARROYO_DELETE") != "1")),
    ),
)
