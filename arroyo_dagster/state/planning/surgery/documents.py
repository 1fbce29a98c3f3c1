"""Values of the document that a user writes for an evolve, checked by place; errors together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from arroyo_dagster.errors import InputError


def mapping_at(place: str, value: Any) -> Mapping[Any, Any]:
    """Return a mapping. Raises InputError: the value is none."""
    if not isinstance(value, Mapping):
        raise InputError(f"{place}: expected a mapping", found=f"{value!r:.80}")
    return value


def select_position_at(place: str, value: Any) -> int:
    """Return a position in a SELECT, from 0. Raises InputError: the value is none."""
    number = (
        int(value) if isinstance(value, str) and len(value) <= 10 and value.isdecimal() else value
    )
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 1 << 32:
        raise InputError(
            f"{place}: expected positions in the SELECT, from 0", found=f"{value!r:.80}"
        )
    return number


def raise_together(what: str, errors: Sequence[InputError]) -> None:
    """Raise several errors as one; the only one as it is.

    Args:
        what: has them, for people.
    """
    if len(errors) == 1:
        raise errors[0]
    if errors:
        lines = "".join(f"\n  {error}" for error in errors)
        raise InputError(f"{what} has {len(errors)} errors:{lines}")
