"""Errors while a service runs or a state is read, with the numbers of the errors table.

Source: sdf-states.md 9, E26, E28, E29, E41 to E46, E50, E51.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

from arroyo_dagster.errors import ArroyoStateError, FormatError, InputError


class StateValueError(InputError):
    """E41: a value does not fit the type of its column or key."""


class OperatorResultError(InputError):
    """E28, E29, E41, E42: a function returned a result that its operator does not accept."""


class StateAccessError(InputError, AttributeError):
    """E43 to E45: invalid use of a state, row, column or cursor."""


class SqlError(InputError):
    """E46: a query cannot be executed."""


class UnboundOperatorError(InputError):
    """E26: a step has no Python body, and no Python function is bound to it."""


class OperatorError(InputError):
    """E27: a function does not fit its step, or cannot be loaded."""


class Unsupported(InputError):
    """E13, E17: a valid definition that this package cannot run."""


class StateSchemaError(InputError):
    """E50: a state was stored with another schema than that of its definition."""


class CheckpointError(FormatError):
    """E51: a checkpoint of the owner cannot be read."""


class StepFailed(ArroyoStateError):
    """A function failed on a record, and the run is configured to stop then."""


def access_error(number: str, message: str, **facts: Any) -> StateAccessError:
    """Return a `StateAccessError` with a number."""
    return StateAccessError(message, number=number, **facts)


def unknown_name(what: str, name: str, known: Sequence[str], **facts: Any) -> StateAccessError:
    """Return the error for an unknown attribute, column or state (E44)."""
    listed = ", ".join(known) or "none"
    return access_error("E44", f"{what} `{name}` not found; there are {listed}", **facts)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a message that names the nearest of the known names; empty = none is."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean `{near[0]}`?" if near else ""
