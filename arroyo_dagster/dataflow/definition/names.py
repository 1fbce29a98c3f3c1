"""Map names of the YAML to names in Python and SQL.

Source: sdf-states.md 2.2, L6 and L8.
Differs: a name that equals a method of a row or a function in scope, which would hide it, also
has `_` appended, as L6 does for keywords.
"""

from __future__ import annotations

import keyword

ROW_METHODS = frozenset({"update", "delete", "exists", "to_dict"})
METRICS, LOG, SCHEMAS, WATERMARK = "metrics", "metrics.log", "schemas", "watermark"
"""The engine's own tables beside those of a service's states; `watermark` only in windows."""
CONTEXT_FUNCTIONS = frozenset({"sql", "key", "window", "env", "state"})


def column_attribute(column: str) -> str:
    """Return the name of a row's attribute for a column."""
    return _clear(mangled(column), ROW_METHODS)


def state_accessor(state: str) -> str:
    """Return the name of the function by which user code accesses a state."""
    return _clear(mangled(state), CONTEXT_FUNCTIONS)


def engine_table_error(state: str, *, windowed: bool) -> str | None:
    """Return what is wrong if the engine has a table of the name of a state beside it, else None.

    Args:
        state: the name of the state.
        windowed: whether its service has windows.
    """
    if state not in (METRICS, LOG, SCHEMAS) and not (windowed and state == WATERMARK):
        return None
    where = " of a service with windows" if state == WATERMARK else ""
    return f"state `{state}` has the name of a table of the engine{where}; choose another"


def mangled(name: str) -> str:
    """Replace dashes by underscores, for SQL table names and to compare two names."""
    return name.replace("-", "_")


def _clear(name: str, taken: frozenset[str]) -> str:
    return f"{name}_" if keyword.iskeyword(name) or name in taken else name
