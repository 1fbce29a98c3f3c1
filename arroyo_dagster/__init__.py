"""See, keep small and trust the state of streaming jobs.

The public names: the errors, those of `arroyo_dagster.state`, and for Dagster those of
`arroyo_dagster.orchestration`, each loaded when first asked for.
Importing this package loads none of dagster, pyspark, pyarrow and polars.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from arroyo_dagster import errors, moved, state
from arroyo_dagster.lazy import lazy_names

if TYPE_CHECKING:
    from arroyo_dagster.errors import *  # noqa: F403 - its public names are ours
    from arroyo_dagster.orchestration import *  # noqa: F403
    from arroyo_dagster.state import *  # noqa: F403

__version__ = "0.1.0"

moved.install()

_ORCHESTRATION = (
    "ArroyoDirectory",
    "ArroyoStateComponent",
    "ArroyoStateStore",
    "ArroyoTableProps",
    "CompactionConfig",
    "DagsterArroyoTranslator",
    "GcConfig",
    "InProcessRunner",
    "MaintenanceOptions",
    "MaintenanceWindow",
    "ScheduleOptions",
    "SensorOptions",
    "SparkRunner",
    "SparkSessionResource",
    "WindowConfig",
    "build_arroyo_definitions",
)
_MODULES = {
    **dict.fromkeys(_ORCHESTRATION, "orchestration"),
    **dict.fromkeys(errors.__all__, "errors"),
    **dict.fromkeys(state.__all__, "state"),
}

__all__ = sorted(_MODULES)

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
