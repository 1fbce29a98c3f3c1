"""What can go wrong while a service runs or a state is read, numbered as the errors table does.

Source: sdf-states.md 9, E26, E28, E29, E41 to E46, E50, E51.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from arroyo_dagster.errors import ArroyoStateError, FormatError, InputError


class StateValueError(InputError):
    """E41: a value that its column, or the key's type, cannot hold."""


class OperatorResultError(InputError):
    """E28, E29, E42: a function returned what its operator cannot take."""


class StateAccessError(InputError, AttributeError):
    """E43 to E45: a state, row, column or cursor was used as it cannot be."""


class SqlError(InputError):
    """E46: a query that cannot be answered."""


class UnboundOperatorError(InputError):
    """E26: a step whose body nobody has bound to a Python function."""


class OperatorError(InputError):
    """E25, E27: a bound function that cannot serve its step."""


class Unsupported(InputError):
    """E17, E34: what a definition may say and no engine of ours does."""


class StateSchemaError(InputError):
    """E50: a state was stored with another schema than its definition's."""


class CheckpointError(FormatError):
    """E51: no checkpoint of the owner can be read."""


class StepFailed(ArroyoStateError):
    """A function failed on a record, and the run was told to stop then."""


def access_error(number: str, message: str, **facts: Any) -> StateAccessError:
    """A `StateAccessError` of one of its numbers."""
    return StateAccessError(message, number=number, **facts)


def unknown_name(what: str, name: str, known: Sequence[str], **facts: Any) -> StateAccessError:
    """E44: a name that is no attribute or column."""
    listed = ", ".join(known) or "none"
    return access_error("E44", f"{what} `{name}` not found; there are {listed}", **facts)
