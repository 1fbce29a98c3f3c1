"""What functions of an SDF dataflow use, for those that live in modules of their own.

    from arroyo_dagster.sdf import key, sql, state, window

    def increment_hits(page):
        row = state("hits-per-page")
        row.hits += 1
        row.update()

They work while an operator calls the function, and raise `StateAccessError` at any other time. Code
written into the YAML has these names in scope, and one accessor a state besides.
"""

from __future__ import annotations

from arroyo_dagster.state.sdf.context import env, key, sql, state, window
from arroyo_dagster.state.sdf.converters import Record
from arroyo_dagster.state.sdf.frames import col, lit

__all__ = ["Record", "col", "env", "key", "lit", "sql", "state", "window"]
