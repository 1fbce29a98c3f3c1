"""Dagster: when to act, what to show. It decides nothing about state.

Its public names are loaded when first asked for, so that naming one thing of it does not load all.
"""

from typing import TYPE_CHECKING

from arroyo_dagster.lazy import lazy_names

if TYPE_CHECKING:
    from arroyo_dagster.orchestration.compaction import CompactionConfig
    from arroyo_dagster.orchestration.component import ArroyoStateComponent
    from arroyo_dagster.orchestration.definitions import (
        ScheduleOptions,
        build_arroyo_definitions,
    )
    from arroyo_dagster.orchestration.directory import ArroyoDirectory
    from arroyo_dagster.orchestration.failures import as_failure
    from arroyo_dagster.orchestration.gc import DeadJobsConfig, GcConfig, OrphansConfig
    from arroyo_dagster.orchestration.maintenance import MaintenanceOptions
    from arroyo_dagster.orchestration.resources import ArroyoStateStore, SparkSessionResource
    from arroyo_dagster.orchestration.runners import (
        InProcessRunner,
        MaintenanceRunner,
        SparkRunner,
    )
    from arroyo_dagster.orchestration.schedules import build_due_schedule
    from arroyo_dagster.orchestration.sensors import SensorOptions, build_checkpoint_sensor
    from arroyo_dagster.orchestration.translator import ArroyoTableProps, DagsterArroyoTranslator
    from arroyo_dagster.orchestration.window import MaintenanceWindow, WindowConfig

__all__ = [
    "ArroyoDirectory",
    "ArroyoStateComponent",
    "ArroyoStateStore",
    "ArroyoTableProps",
    "CompactionConfig",
    "DagsterArroyoTranslator",
    "DeadJobsConfig",
    "GcConfig",
    "InProcessRunner",
    "MaintenanceOptions",
    "MaintenanceRunner",
    "MaintenanceWindow",
    "OrphansConfig",
    "ScheduleOptions",
    "SensorOptions",
    "SparkRunner",
    "SparkSessionResource",
    "WindowConfig",
    "as_failure",
    "build_arroyo_definitions",
    "build_checkpoint_sensor",
    "build_due_schedule",
]

_MODULES = {
    "ArroyoDirectory": "directory",
    "ArroyoStateComponent": "component",
    "ArroyoStateStore": "resources",
    "ArroyoTableProps": "translator",
    "DagsterArroyoTranslator": "translator",
    "CompactionConfig": "compaction",
    "DeadJobsConfig": "gc",
    "GcConfig": "gc",
    "OrphansConfig": "gc",
    "InProcessRunner": "runners",
    "MaintenanceOptions": "maintenance",
    "MaintenanceRunner": "runners",
    "MaintenanceWindow": "window",
    "ScheduleOptions": "definitions",
    "SensorOptions": "sensors",
    "SparkRunner": "runners",
    "SparkSessionResource": "resources",
    "WindowConfig": "window",
    "as_failure": "failures",
    "build_arroyo_definitions": "definitions",
    "build_checkpoint_sensor": "sensors",
    "build_due_schedule": "schedules",
}

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
