"""Format what `gc fate` prints about an object, or about the objects below a directory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from arroyo_dagster.cli.gc.rendering import entry_json, explained_lines
from arroyo_dagster.cli.rendering import clock, print_table
from arroyo_dagster.state.model.garbage import PURGE_MICROS
from arroyo_dagster.state.model.units import format_bytes
from arroyo_dagster.state.operations.gc.fate import DirectoryFate, Fate, FateEvent, FateState

_KINDS = {"expire": "as expired", "orphans": "as an orphan", "dead-job": "with the complete job"}
_OUTCOMES = {
    "moved": "moved to quarantine",
    "back": "restored from quarantine",
    "gone": "found missing after the run had died",
    "unknown": "to be deleted; the run has not ended",
}


def fate_json(found: Fate) -> dict[str, Any]:
    """Return a fate as one JSON document."""
    info, why, kept, copy = found.info, found.explained, found.quarantine, found.copy
    return {
        "path": found.path,
        "job": found.paths.root,
        "fate": found.state.name.lower(),
        "size_bytes": None if info is None else info.size_bytes,
        "modified_micros": None if info is None else info.modified_micros,
        "reason": None if why is None else why.reason.name.lower(),
        "deletable": None if why is None else why.reason.goes,
        "referenced_by": [] if why is None else list(why.by),
        "unexplained": found.unexplained,
        "quarantine": None if kept is None else kept.name,
        "copy": None if copy is None else copy.copy,
        "purgeable_from_micros": None if kept is None else kept.moved_at_micros + PURGE_MICROS,
        "purged": None if found.purged is None else entry_json(found.purged),
        "events": [{**entry_json(e.entry), "quarantine": e.quarantine} for e in found.events],
        "unreadable": list(found.unreadable),
    }


def print_fate(found: Fate) -> None:
    """Print a fate: the state of the object, why, then the runs that changed it."""
    click.echo(f"{found.path}: {found.state.value}")
    for line in _details(found):
        click.echo(line)
    for event in found.events:
        click.echo(_format_event(event))
    _print_unreadable(list(found.unreadable))


def _details(found: Fate) -> Iterator[str]:
    if found.explained is not None:
        yield from explained_lines(found.explained)
    elif found.unexplained is not None:
        yield f"whether it may be deleted is not known: {found.unexplained}"
    if found.quarantine is not None and found.copy is not None:
        until = clock(found.quarantine.moved_at_micros + PURGE_MICROS)
        yield f"its copy is {found.copy.copy}, {format_bytes(found.copy.size_bytes)}"
        yield f"`gc purge` deletes the copy from {until} on; nothing else does"
        yield (
            f"to restore it: arroyo-state gc undelete {found.paths.root} {found.quarantine.name} "
            "--yes"
        )
    if found.purged is not None:
        one = found.purged
        yield f"purged {clock(one.at_micros)} by {one.owner}, run {one.run}"
    if found.state in (FateState.NEVER_LISTED, FateState.LOST):
        yield (
            "what a job deletes itself (its own retention, Arroyo's cleanup) is in no journal; "
            "the path of a directory ends in a slash"
        )


def _format_event(event: FateEvent) -> str:
    one = event.entry
    outcome = one.outcome.partition(":")[0]
    what = _OUTCOMES.get(outcome, one.outcome)
    kind = f" {_KINDS[one.kind]}" if outcome in ("deleted", "moved") and one.kind in _KINDS else ""
    where = f" {event.quarantine}" if event.quarantine is not None else ""
    return (
        f"{clock(one.at_micros)}: {what}{where}{kind} by {one.owner}, plan {one.plan}, "
        f"run {one.run}"
    )


def directory_fate_json(found: DirectoryFate) -> dict[str, Any]:
    """Return what happened to the objects below a directory, as one JSON document."""
    counts = [
        {
            "outcome": outcome,
            "kind": kind,
            "objects": count.objects,
            "size_bytes": count.size_bytes,
            "first_micros": count.first_micros,
            "last_micros": count.last_micros,
        }
        for (outcome, kind), count in found.counts.items()
    ]
    return {
        "prefix": found.prefix,
        "job": found.paths.root,
        "present": found.present,
        "present_bytes": found.present_bytes,
        "journal": counts,
        "unreadable": list(found.unreadable),
    }


def print_directory_fate(found: DirectoryFate) -> None:
    """Print what happened to the objects below a directory, as a table."""
    click.echo(
        f"{found.prefix}: {found.present} objects, {format_bytes(found.present_bytes)} present"
    )
    if found.counts:
        columns = ("outcome", "kind", "objects", "bytes", "first", "last")
        print_table(
            columns,
            [
                (
                    *(outcome, kind, count.objects, format_bytes(count.size_bytes)),
                    *(clock(count.first_micros), clock(count.last_micros)),
                )
                for (outcome, kind), count in found.counts.items()
            ],
        )
    else:
        click.echo("no run of gc has listed an object below it")
    _print_unreadable(list(found.unreadable))


def _print_unreadable(paths: list[Any]) -> None:
    for path in paths[:20]:
        click.echo(f"not readable, so the answer may be incomplete: {path}")
