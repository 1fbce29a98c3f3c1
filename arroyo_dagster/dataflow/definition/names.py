"""How names of the YAML become names of Python and SQL.

Source: sdf-states.md 2.2, L6 and L8.
Differs: a name is also kept clear of the methods of a row and of the functions in scope, which
would otherwise hide it, in the way that L6 keeps it clear of keywords.
"""

from __future__ import annotations

import keyword

ROW_METHODS = frozenset({"update", "delete", "exists", "to_dict"})
CONTEXT_FUNCTIONS = frozenset({"sql", "key", "window", "env", "state"})


def column_attribute(column: str) -> str:
    """The attribute of a row that holds a column."""
    return _clear(mangled(column), ROW_METHODS)


def state_accessor(state: str) -> str:
    """The function that gives user code a state."""
    return _clear(mangled(state), CONTEXT_FUNCTIONS)


def mangled(name: str) -> str:
    """A name with underscores for dashes: an SQL table's, and how two names are compared."""
    return name.replace("-", "_")


def _clear(name: str, taken: frozenset[str]) -> str:
    return f"{name}_" if keyword.iskeyword(name) or name in taken else name
