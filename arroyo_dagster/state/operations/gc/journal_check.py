"""Find runs of a journal that are missing, were changed, or cannot be read. Writes nothing.

Each run holds the digest of the run before, so nothing proves the newest one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from arroyo_dagster.errors import FormatError
from arroyo_dagster.state.codec.journal import RunHeader, decode_batch, is_end
from arroyo_dagster.state.model.garbage import digest_of
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.operations.gc.journal import (
    StoredRun,
    load_runs,
    record_name,
    records_of,
    run_path,
    stored_runs,
)
from arroyo_dagster.state.planning.verify.findings import Finding, warning
from arroyo_dagster.state.storage.store import ObjectStore

NEWEST = 64
"""How many of the newest runs a frequent check reads."""

_READ = "keep it and report it; gc refuses the job until it is moved out of the journal"
_KEPT = "restore it from the bucket's versions or a backup; gc goes on without it"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """The facts about a run that the checks of others need.

    Attributes:
        header: None if the run cannot be read.
        digest: of its object; None if it has not ended.
    """

    name: str
    path: StatePath
    header: RunHeader | None
    digest: str | None


def check_journal(
    store: ObjectStore, paths: JobPaths, newest: int | None = None
) -> tuple[Finding, ...]:
    """Return a finding for each run that is missing, was changed, or cannot be read.

    Args:
        newest: read only so many of the newest runs; None = all.
    """
    findings = list(_findings(store, paths, newest))
    if findings:  # A run may have begun or ended meanwhile.
        findings = list(_findings(store, paths, newest))
    first_of_each = {finding.object: finding for finding in reversed(findings)}
    return tuple(finding for finding in findings if first_of_each[finding.object] is finding)


def _findings(store: ObjectStore, paths: JobPaths, newest: int | None) -> Iterator[Finding]:
    listed = stored_runs(store, paths)
    for path in listed.unknown:
        yield warning("journal-unreadable", path, "this is no record of a journal", _READ)
    names = listed.names if newest is None else listed.names[-newest:]
    runs: list[_Run] = []
    for stored in load_runs(store, paths, names):
        run, problems = _inspected(stored)
        runs.append(run)
        yield from problems
        if stored.ended and stored.name in listed.directories:
            yield from _leftovers(store, paths, stored)
    # The oldest of some follows one that was not read.
    yield from _missing(paths, runs, runs[len(listed.names) > len(names) :])
    yield from _changed(runs)


def _inspected(stored: StoredRun) -> tuple[_Run, list[Finding]]:
    path, data = stored.objects[0]
    digest = digest_of(data) if stored.ended else None
    header, problems = None, []
    try:
        header, last = stored.header(), b""
        for part, last in stored.texts():
            if not stored.ended:
                decode_batch(last, part)
        if stored.ended and not is_end(last, path):
            raise FormatError("it was cut: its last part is missing", path=path)
    except FormatError as error:
        where = str(error.facts.get("path", path))
        problems.append(warning("journal-unreadable", where, error.message, _READ))
    return _Run(name=stored.name, path=path, header=header, digest=digest), problems


def _leftovers(store: ObjectStore, paths: JobPaths, stored: StoredRun) -> Iterator[Finding]:
    directory = paths.journal / stored.name
    for number, data in records_of(store, directory):
        if data not in stored.objects[0][1]:
            evidence = "this part was written after its run had ended: two processes maintained "
            evidence += "the job at once"
            yield warning("journal-changed", directory / record_name(number), evidence, _KEPT)


def _missing(paths: JobPaths, runs: list[_Run], followers: list[_Run]) -> Iterator[Finding]:
    """Find runs that a later one follows and that do not exist."""
    expired = max((run.header.expired or "" for run in runs if run.header), default="")
    names = {run.name for run in runs}
    for run in followers:
        before = None if run.header is None else run.header.previous
        if before is not None and expired < before.run and before.run not in names:
            evidence = f"this run is missing: {run.name} follows it"
            yield warning("journal-changed", run_path(paths, before.run), evidence, _KEPT)


def _changed(runs: list[_Run]) -> Iterator[Finding]:
    """Find runs of which the next one holds another digest, or that it does not follow."""
    for run, after in pairwise(runs):
        if after.header is None:
            continue
        before = after.header.previous
        if before is None or before.run < run.name:
            evidence = f"{after.name} does not follow this run: it was inserted, or two processes "
            yield warning("journal-changed", run.path, f"{evidence}maintained the job", _KEPT)
        elif before.run == run.name and before.digest != run.digest:
            evidence = f"this run was changed: {after.name} holds another digest"
            yield warning("journal-changed", run.path, evidence, _KEPT)
