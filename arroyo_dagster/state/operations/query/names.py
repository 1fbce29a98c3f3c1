"""The names of tables in queries: `arroyo."pipeline/job".operator.table`, in every engine.

| Name | Table |
|---|---|
| `arroyo."pl_1/job_1".join_2.left` | a table of an operator |
| `arroyo."pl_1/job_1@12".join_2.left` | at epoch 12; or `@latest`, `@2026-01-01T12:00:00Z` |
| `arroyo.words."count-words".hits` | a state of a dataflow: dataflow, service, state |
| `arroyo."pl_1/job_1".epochs` | a metadata table of a job |
| `arroyo.jobs` | a metadata table of the checkpoint URL |

The first part may be left out. Parts that are not plain identifiers stand in double quotes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from arroyo_dagster.errors import InputError, NotFoundError

CATALOG = "arroyo"
"""The first part of every name."""

KEY_HASH, SUBTASK = ROUTING = ("_key_hash", "_subtask")
"""Columns of live rows that a query gets if it names them: the routing key, and its subtask."""

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_SEGMENT = re.compile(r'"((?:[^"]|"")*)"|([^".\s]+)')


@dataclass(frozen=True, slots=True, order=True)
class QueryName:
    """The name of a table in queries.

    Attributes:
        table: the table.
        operator: its operator; None = a metadata table.
        job: `job` or `pipeline/job`, perhaps with `@epoch`; None = of the checkpoint URL.
    """

    table: str
    operator: str | None = None
    job: str | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of the name, without the catalog."""
        return tuple(part for part in (self.job, self.operator, self.table) if part is not None)

    def __str__(self) -> str:
        return ".".join(quoted(part) for part in (CATALOG, *self.parts))


def quoted(part: str) -> str:
    """Return a part of a name as SQL needs it: in double quotes, unless it is an identifier."""
    if _PLAIN.match(part):
        return part
    escaped = part.replace('"', '""')
    return f'"{escaped}"'


def parse_name(text: str) -> QueryName:
    """Parse the name of a table.

    Raises:
        InputError: not such a name.
    """
    parts = _parts(text)
    if parts and parts[0] == CATALOG and len(parts) > 1:
        parts = parts[1:]
    if not 1 <= len(parts) <= 3:
        raise _refused(text)
    table, *before = reversed(parts)
    job = before[-1] if before else None
    return QueryName(table, before[0] if len(before) == 2 else None, job)


def _parts(text: str) -> list[str]:
    parts: list[str] = []
    place = 0
    while match := _SEGMENT.match(text, place):
        within, plain = match.groups()
        parts.append(plain if within is None else within.replace('""', '"'))
        place = match.end()
        if place == len(text):
            return parts if all(parts) else []
        if text[place] != ".":
            break
        place += 1
    return []


def _refused(text: str) -> InputError:
    return InputError(
        f"not the name of a table: {text!r}",
        expected='"pipeline/job".operator.table',
        next_step='put parts that are not plain identifiers in double quotes; "arroyo." may come '
        "first",
    )


def split_epoch(job: str) -> tuple[str, str | None]:
    """Divide `job@epoch` into the job and the text that names the epoch; None = without one."""
    name, separator, epoch = job.rpartition("@")
    return (name, epoch) if separator and name and epoch else (job, None)


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Return up to three known names that are most like a name, best first."""
    import difflib

    by_folded = {candidate.casefold(): candidate for candidate in known}
    close = difflib.get_close_matches(name.casefold(), by_folded, cutoff=0.5)
    return [by_folded[folded] for folded in close]


def not_found(what: str, name: str, known: Iterable[str], **facts: object) -> NotFoundError:
    """Return the error for a name that does not exist; it lists the nearest that do.

    Args:
        what: for example `column`; also the name of the fact.
        known: the existing names; without any that is near, the first of them are listed.
    """
    existing = sorted(known)
    close = nearest(name, existing)
    listed = close or existing[:10]
    more = "" if close or len(existing) <= len(listed) else f" and {len(existing) - 10} more"
    choices = ", ".join(listed) + more or "none"
    error = NotFoundError(
        f"there is no such {what}",
        next_step=f"did you mean {choices}?" if close else f"choose one of: {choices}",
    )
    error.facts = {what: name} | facts
    return error
