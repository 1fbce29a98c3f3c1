"""Dagster definitions: when to run, what to show. Decisions about state are made in `state`.

Public names are loaded lazily, so that importing one does not load all.
"""

from typing import TYPE_CHECKING

from arroyo_dagster.lazy import lazy_names

if TYPE_CHECKING:
    from arroyo_dagster.orchestration.catalog.sensor import SensorOptions, build_checkpoint_sensor
    from arroyo_dagster.orchestration.compaction.assets import CompactionConfig
    from arroyo_dagster.orchestration.compaction.maintenance_window import (
        MaintenanceWindow,
        WindowConfig,
    )
    from arroyo_dagster.orchestration.component import ArroyoStateComponent
    from arroyo_dagster.orchestration.definitions import (
        ScheduleOptions,
        build_arroyo_definitions,
    )
    from arroyo_dagster.orchestration.directory import ArroyoDirectory
    from arroyo_dagster.orchestration.failures import as_failure
    from arroyo_dagster.orchestration.gc.assets import DeadJobsConfig, GcConfig, OrphansConfig
    from arroyo_dagster.orchestration.maintenance import MaintenanceOptions
    from arroyo_dagster.orchestration.resources import ArroyoStateStore, SparkSessionResource
    from arroyo_dagster.orchestration.runners import (
        InProcessRunner,
        MaintenanceRunner,
        SparkRunner,
    )
    from arroyo_dagster.orchestration.schedules import build_due_schedule
    from arroyo_dagster.orchestration.translator import ArroyoTableProps, DagsterArroyoTranslator

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
    "CompactionConfig": "compaction.assets",
    "DeadJobsConfig": "gc.assets",
    "GcConfig": "gc.assets",
    "OrphansConfig": "gc.assets",
    "InProcessRunner": "runners",
    "MaintenanceOptions": "maintenance",
    "MaintenanceRunner": "runners",
    "MaintenanceWindow": "compaction.maintenance_window",
    "ScheduleOptions": "definitions",
    "SensorOptions": "catalog.sensor",
    "SparkRunner": "runners",
    "SparkSessionResource": "resources",
    "WindowConfig": "compaction.maintenance_window",
    "as_failure": "failures",
    "build_arroyo_definitions": "definitions",
    "build_checkpoint_sensor": "catalog.sensor",
    "build_due_schedule": "schedules",
}

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
