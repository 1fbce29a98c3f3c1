"""The code location of `ui.py`: the job and the dataflow of FLIGHTS_URL, looked at every minute."""

from __future__ import annotations

import os
from pathlib import Path

from arroyo_dagster import (
    ArroyoOptions,
    GcConfig,
    MaintenanceOptions,
    ScheduleOptions,
    SensorOptions,
    SparkSessionResource,
    build_arroyo_definitions,
)

DATAFLOW = Path(__file__).parents[1] / "sdf" / "flights" / "dataflow.yaml"

defs = build_arroyo_definitions(
    os.environ["FLIGHTS_URL"],
    mode="maintain",
    running=True,
    options=ArroyoOptions(
        spark=SparkSessionResource(master="local[2]"),
        sensor=SensorOptions(interval_seconds=10),
        schedules=ScheduleOptions(
            verify="* * * * *",
            fleet="*/2 * * * *",
            states="*/2 * * * *",
            compaction="* * * * *",
            gc="*/5 * * * *",
        ),
        maintenance=MaintenanceOptions(min_backlog=24, gc=GcConfig(keep_epochs=60, dry_run=False)),
        dataflows=[DATAFLOW],
    ),
)
