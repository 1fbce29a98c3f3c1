"""Names for user functions of an SDF dataflow that are in Python modules.

    from arroyo_dagster.sdf import hits_per_page, key, sql, state, window

    def increment_hits(page):
        row = hits_per_page()          # or state("hits-per-page")
        row.hits += 1
        row.update()

Any other name that is imported from this module is the accessor of the state of that name. These
names can be used only while an operator calls the function; otherwise they raise
`StateAccessError`. Inline code in the YAML has them in scope.
"""

from __future__ import annotations

from typing import Any

from arroyo_dagster.dataflow.runtime.context import (
    Accessor,
    env,
    key,
    log_message,
    sql,
    state,
    window,
)
from arroyo_dagster.dataflow.runtime.record import Record, plain
from arroyo_dagster.dataflow.views.frames import col, lit

__all__ = ["Record", "col", "env", "key", "lit", "log_message", "plain", "sql", "state", "window"]


def __getattr__(name: str) -> Accessor:
    if name.startswith("_"):
        raise AttributeError(name)

    def access() -> Any:
        return state(name)

    return access
