"""Marks: prefixes below the checkpoint URL whose state is seen, but not maintained from here.

A mark is a setting of one deployment, or an object below the URL that every release of this package
respects. Both forbid; neither lifts the other.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.ids import path_error

EVERYTHING = "."
"""The prefix that holds every job below the URL."""


class Ownership(enum.Enum):
    """Why a prefix is not maintained.

    Attributes:
        OTHER: somebody else maintains it.
        BORROWED: it was lent to be read, such as a copy or a shared bucket.
    """

    OTHER = "other"
    BORROWED = "borrowed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One mark.

    Attributes:
        prefix: `pipeline`, `pipeline/job`, a job of the legacy layout, or `EVERYTHING`.
        note: for people.
        stored: whether it is an object below the URL, and not a setting.
    """

    prefix: str
    ownership: Ownership
    note: str = ""
    stored: bool = False

    def covers(self, path: str) -> bool:
        """Return whether the mark holds for an object, or for the root of a job."""
        whole = self.prefix == EVERYTHING
        return whole or path == self.prefix or path.startswith(f"{self.prefix}/")


def parse_ownership(given: Mapping[str, str]) -> tuple[Mark, ...]:
    """Return the marks of a setting, by prefix.

    Raises:
        InputError: a prefix is no path below the URL, or a value is neither other nor borrowed.
    """
    return tuple(parse_mark(prefix, value) for prefix, value in given.items())


def parse_mark(prefix: str, ownership: str) -> Mark:
    """Return one mark; errors as `parse_ownership`."""
    found = check_prefix(prefix)
    known = [one.value for one in Ownership]
    if ownership not in known:
        raise InputError(
            f"a prefix is marked as other or borrowed, not as {ownership!r}",
            prefix=found,
            next_step=f"choose one of {', '.join(known)}; a prefix without a mark is maintained",
        )
    return Mark(prefix=found, ownership=Ownership(ownership))


def check_prefix(prefix: str) -> str:
    """Return a prefix without slashes around it.

    Raises:
        InputError: it is no path below the URL.
    """
    found = prefix.strip("/") or EVERYTHING
    problem = None if found == EVERYTHING else path_error(found)
    if problem is not None:
        raise InputError(
            f"not a prefix below the checkpoint URL: {problem}",
            prefix=prefix,
            next_step=f"give pipeline, pipeline/job, or {EVERYTHING} for everything",
        )
    return found


def mark_of(marks: Iterable[Mark], path: str) -> Mark | None:
    """Return the first mark that covers a path; None if it may be maintained."""
    return next((mark for mark in marks if mark.covers(path)), None)


def check_maintained(marks: Iterable[Mark], path: str) -> None:
    """Refuse to change what is marked.

    Raises:
        InputError: the same sentence at every door.
    """
    mark = mark_of(marks, path)
    if mark is None:
        return
    what = "everything below the URL" if mark.prefix == EVERYTHING else mark.prefix
    step = (
        f"`arroyo-state ownership clear {mark.prefix} --yes`"
        if mark.stored
        else "remove it from `ownership` of the component, of ArroyoStateStore, or of the command "
        "line's configuration"
    )
    raise InputError(
        f"{what} is marked as `{mark.ownership.value}`: it is shown and checked, and never "
        "compacted, rewritten or deleted",
        path=path,
        note=mark.note or None,
        next_step=f"leave it to its owner; if it is yours, remove the mark: {step}",
    )
