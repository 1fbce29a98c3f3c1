"""See, keep small and trust the state of streaming jobs.

The public names: the errors, and those of `arroyo_dagster.state`, each loaded when first asked for.
Importing this package loads none of dagster, pyspark, pyarrow and polars.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from arroyo_dagster import errors, state

if TYPE_CHECKING:
    from arroyo_dagster.errors import *  # noqa: F403 - its public names are ours
    from arroyo_dagster.state import *  # noqa: F403

__version__ = "0.1.0"

_MODULES = {
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
