"""Dagster: when to act, what to show. It decides nothing about state.

Its public names are loaded when first asked for, so that naming one thing of it does not load all.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arroyo_dagster.orchestration.component import ArroyoStateComponent
    from arroyo_dagster.orchestration.definitions import build_arroyo_definitions
    from arroyo_dagster.orchestration.failures import as_failure
    from arroyo_dagster.orchestration.resources import ArroyoStateStore, SparkSessionResource
    from arroyo_dagster.orchestration.schedules import build_due_schedule
    from arroyo_dagster.orchestration.sensors import SensorOptions, build_checkpoint_sensor
    from arroyo_dagster.orchestration.translator import ArroyoTableProps, DagsterArroyoTranslator

__all__ = [
    "ArroyoStateComponent",
    "ArroyoStateStore",
    "ArroyoTableProps",
    "DagsterArroyoTranslator",
    "SensorOptions",
    "SparkSessionResource",
    "as_failure",
    "build_arroyo_definitions",
    "build_checkpoint_sensor",
    "build_due_schedule",
]

_MODULES = {
    "ArroyoStateComponent": "component",
    "ArroyoStateStore": "resources",
    "ArroyoTableProps": "translator",
    "DagsterArroyoTranslator": "translator",
    "SensorOptions": "sensors",
    "SparkSessionResource": "resources",
    "as_failure": "failures",
    "build_arroyo_definitions": "definitions",
    "build_checkpoint_sensor": "sensors",
    "build_due_schedule": "schedules",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
