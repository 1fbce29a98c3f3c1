"""Map names of the YAML to names in Python and SQL.

Source: sdf-states.md 2.2, L6 and L8.
Differs: a name that equals a method of a row or a function in scope, which would hide it, also
has `_` appended, as L6 does for keywords.
"""

from __future__ import annotations

import keyword

ROW_METHODS = frozenset({"update", "delete", "exists", "to_dict"})
CONTEXT_FUNCTIONS = frozenset({"sql", "key", "window", "env", "state"})


def column_attribute(column: str) -> str:
    """Return the name of a row's attribute for a column."""
    return _clear(mangled(column), ROW_METHODS)


def state_accessor(state: str) -> str:
    """Return the name of the function by which user code accesses a state."""
    return _clear(mangled(state), CONTEXT_FUNCTIONS)


def mangled(name: str) -> str:
    """Replace dashes by underscores, for SQL table names and to compare two names."""
    return name.replace("-", "_")


def _clear(name: str, taken: frozenset[str]) -> str:
    return f"{name}_" if keyword.iskeyword(name) or name in taken else name
