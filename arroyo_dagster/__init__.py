"""Inspect, compact, verify and restore the state of streaming jobs.

The public names: the errors, those of `arroyo_dagster.state`, those of `arroyo_dagster.engine`, and
for Dagster those of `arroyo_dagster.orchestration`, each loaded at its first use.
Importing this package loads none of dagster, pyspark, pyarrow and polars.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import lazy_loader

from arroyo_dagster import errors, optional_packages, orchestration, state

if TYPE_CHECKING:
    from arroyo_dagster.engine import *  # noqa: F403 - this package exports its public names
    from arroyo_dagster.errors import *  # noqa: F403
    from arroyo_dagster.orchestration import *  # noqa: F403
    from arroyo_dagster.state import *  # noqa: F403

__version__ = "0.1.0"

optional_packages.explain_imports_of("arroyo_dagster.orchestration", "arroyo_dagster.spark")

# From its stub: who has only Arroyo jobs never loads the engine.
_engine_stub = os.path.join(os.path.dirname(__file__), "engine", "__init__.pyi")
_, _, _engine_names = lazy_loader.attach_stub(f"{__name__}.engine", _engine_stub)

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "engine": _engine_names,
        "errors": errors.__all__,
        "orchestration": dir(orchestration),  # contains only its public names
        "state": dir(state),
    },
)
