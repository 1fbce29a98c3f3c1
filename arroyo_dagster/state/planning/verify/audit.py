"""What an audit finds beside a verification: older epochs, leftovers, hot keys.

Pure functions from a listing of a job and its epochs to findings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.ids import Epoch, StatePath
from arroyo_dagster.state.model.layout import JobPaths, is_data_file, parse_manifest_path
from arroyo_dagster.state.model.units import format_bytes, format_micros
from arroyo_dagster.state.model.verify import AuditSettings
from arroyo_dagster.state.planning.verify.findings import Finding, either, warning

_MINUTE = 60_000_000
_HOUR = 60 * _MINUTE
_FENCE_MARGIN = 10 * _MINUTE
_HOT = 4


@dataclass(frozen=True, slots=True)
class ListedObject:
    """An object of a listing. `modified_micros` is None if the store has no times."""

    size_bytes: int
    modified_micros: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFacts:
    """What its epochs and one listing show of a job. The epochs were read first.

    Attributes:
        epochs: those that can be read, ascending; those that are metadata only list no files.
        problems: why other epochs cannot be read.
        complete: whether these are all epochs.
        listing: every object of the job.
        pinned: the pinned epochs.
        now_micros: the time of the audit.
    """

    paths: JobPaths
    epochs: Sequence[Checkpoint]
    problems: Mapping[Epoch, str] = field(default_factory=dict)
    complete: bool
    listing: Mapping[StatePath, ListedObject]
    pinned: frozenset[Epoch] = frozenset()
    now_micros: int

    @property
    def job(self) -> str:
        """The root of the job's paths."""
        return self.paths.root


def audit_findings(facts: AuditFacts, settings: AuditSettings) -> Iterator[Finding]:
    """Yield what the facts show."""
    # Find epochs before the newest with missing or changed files. `verify` judges the newest.
    kept = max((epoch.min_epoch for epoch in facts.epochs), default=0)
    lost = {
        epoch.epoch: [path for path in epoch.paths if path not in facts.listing]
        for epoch in facts.epochs
    }
    numbers = sorted({*lost, *facts.problems})
    for number in numbers[:-1]:
        root = facts.paths.head(number)
        # Arroyo's cleanup deletes the files of epochs below its minimum before their metadata.
        if number < kept or root not in facts.listing:
            continue
        evidence, gone = facts.problems.get(number), lost.get(number)
        if gone:
            evidence = f"lists {len(gone)} files that do not exist, first {gone[0]}"
        if evidence is None:
            continue
        pinned = number in facts.pinned
        evidence = f"epoch {number} {evidence}" + ("; it is pinned" if pinned else "")
        step = "`arroyo-state sql @fate` says what became of them; do not go back to this epoch"
        yield either(pinned, "older-epoch-incomplete", root, evidence, step)
    yield from _off_chain(facts, settings)
    yield from _orphans(facts, settings)


def _off_chain(facts: AuditFacts, settings: AuditSettings) -> Iterator[Finding]:
    """Find generations that write although a later one runs, and attempts that no epoch names."""
    manifests = {
        path: (address, listed)
        for path, listed in facts.listing.items()
        if (address := parse_manifest_path(path)) is not None
    }
    if not manifests:
        return
    current = max(address.worker_generation for address, _ in manifests.values())
    fence = facts.listing.get(facts.paths.current_generation)
    fenced = [
        path
        for path, (address, listed) in manifests.items()
        if fence is not None
        and fence.modified_micros is not None
        and address.worker_generation < current
        and (listed.modified_micros or 0) > fence.modified_micros + _FENCE_MARGIN
    ]
    if fenced:
        evidence = (
            f"{len(fenced)} checkpoints were written by a generation that a later one had "
            f"replaced, {format_micros(_FENCE_MARGIN)} ago or more"
        )
        step = "find the process of the older generation and stop it: its checkpoints are lost work"
        yield warning("fenced-generation-writes", fenced[0], evidence, step)
    refs = {epoch.ref for epoch in facts.epochs}
    abandoned = [path for path in manifests if path not in refs]
    if facts.complete and len(abandoned) > settings.abandoned_attempts:
        evidence = (
            f"{len(abandoned)} checkpoints belong to no epoch; expected at most "
            f"{settings.abandoned_attempts}"
        )
        step = "collect them: `arroyo-state gc run orphans`; many show a job that restarts often"
        yield warning("attempts-abandoned", facts.job, evidence, step)


def _orphans(facts: AuditFacts, settings: AuditSettings) -> Iterator[Finding]:
    """Estimate the size of files that no epoch lists."""
    if not facts.complete:
        return
    listed = {path for epoch in facts.epochs for path in epoch.paths}
    left = [
        info.size_bytes
        for path, info in facts.listing.items()
        if is_data_file(path)
        and path not in listed
        and (info.modified_micros or 0) < facts.now_micros - 24 * _HOUR
    ]
    if sum(left) > settings.orphan_bytes:
        evidence = (
            f"{format_bytes(sum(left))} in {len(left)} files are older than a day and in the list "
            "of no epoch"
        )
        step = "see what may be deleted: `arroyo-state gc plan orphans`"
        yield warning("orphans-large", facts.job, evidence, step)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyCounts:
    """How the rows of a table are distributed over its routing keys.

    Attributes:
        keys: how many there are, at least.
        most: the rows of the most frequent key.
    """

    rows: int
    keys: int
    most: int


def hot_key_finding(
    job: str, table: str, counts: KeyCounts, settings: AuditSettings
) -> Finding | None:
    """Return the finding about the most frequent routing key of a table, if it is hot.

    Args:
        table: operator and table.
    """
    rows, most = counts.rows, counts.most
    if rows < settings.hot_key_rows or not counts.keys:
        return None
    if most * 100 < settings.hot_key_percent * rows or most < _HOT * rows / counts.keys:
        return None
    evidence = f"one key has {most * 100 // rows}% of the {rows} rows of table {table}"
    step = "choose a key with more values, or add a salt to this one: one subtask does its work"
    return warning("hot-key", job, evidence, step)
