"""See, keep small and trust the state of streaming jobs.

The public names: the errors, those of `arroyo_dagster.state`, and for Dagster those of
`arroyo_dagster.orchestration`, each loaded when first asked for.
Importing this package loads none of dagster, pyspark, pyarrow and polars.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from arroyo_dagster import errors, state

if TYPE_CHECKING:
    from arroyo_dagster.errors import *  # noqa: F403 - its public names are ours
    from arroyo_dagster.orchestration import (
        ArroyoStateComponent as ArroyoStateComponent,
    )
    from arroyo_dagster.orchestration import (
        ArroyoStateStore as ArroyoStateStore,
    )
    from arroyo_dagster.orchestration import (
        ArroyoTableProps as ArroyoTableProps,
    )
    from arroyo_dagster.orchestration import (
        DagsterArroyoTranslator as DagsterArroyoTranslator,
    )
    from arroyo_dagster.orchestration import (
        SparkSessionResource as SparkSessionResource,
    )
    from arroyo_dagster.orchestration import (
        build_arroyo_definitions as build_arroyo_definitions,
    )
    from arroyo_dagster.state import *  # noqa: F403

__version__ = "0.1.0"

_ORCHESTRATION = (
    "ArroyoStateComponent",
    "ArroyoStateStore",
    "ArroyoTableProps",
    "DagsterArroyoTranslator",
    "SparkSessionResource",
    "build_arroyo_definitions",
)
_MODULES = {
    **dict.fromkeys(_ORCHESTRATION, "orchestration"),
    **dict.fromkeys(errors.__all__, "errors"),
    **dict.fromkeys(state.__all__, "state"),
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
