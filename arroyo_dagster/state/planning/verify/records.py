"""Findings about metadata objects: what both layouts have in common, then the legacy layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from arroyo_dagster.state.model.checkpoints import (
    RECORD_VERSION,
    CommittedMarker,
    CurrentGeneration,
    EpochRecord,
    GenerationManifest,
    LegacyCheckpoint,
    Manifest,
    OperatorCheckpoint,
)
from arroyo_dagster.state.model.ids import Epoch, OperatorId, StatePath
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.planning.restore.lost_metadata import identity_mismatch
from arroyo_dagster.state.planning.restore.partially_collected import LEGACY_EPOCHS_BEFORE_NEWEST
from arroyo_dagster.state.planning.verify.findings import (
    KEEP_AND_REPORT,
    Finding,
    either,
    error,
    note,
    warning,
)

NO_STATE_LOST = "no state is lost by it; find out what wrote it"


@dataclass(frozen=True, slots=True)
class Unreadable:
    """An object that exists and does not decode."""

    problem: str


MetadataObject = (
    Manifest
    | EpochRecord
    | CommittedMarker
    | GenerationManifest
    | CurrentGeneration
    | LegacyCheckpoint
    | OperatorCheckpoint
)
Objects = Mapping[StatePath, MetadataObject | Unreadable | None]
_T = TypeVar(
    "_T",
    Manifest,
    EpochRecord,
    CommittedMarker,
    GenerationManifest,
    CurrentGeneration,
    LegacyCheckpoint,
    OperatorCheckpoint,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataFacts:
    """The metadata around one epoch of a job.

    Attributes:
        epoch: the verified epoch.
        newest: whether no later epoch is visible.
        epochs: the visible epochs that were read, ascending; none later than `epoch`.
        objects: every object that was requested; None = it does not exist. Objects that were not
            requested have no key.
        managed: whether a managed job wrote it.
        rollbacks: the epochs that rollbacks published, each with the epoch that it restored. Epochs
            between the two are no ancestors of `epoch`.
    """

    paths: JobPaths
    epoch: Epoch
    newest: bool
    epochs: tuple[Epoch, ...]
    objects: Objects
    managed: bool
    rollbacks: Mapping[Epoch, Epoch] = field(default_factory=dict)

    def rolled_back(self, epoch: Epoch) -> bool:
        """Return whether a rollback has removed this number from the chain of epochs."""
        return any(restored < epoch < by for by, restored in self.rollbacks.items())

    def get(self, path: StatePath, kind: type[_T]) -> _T | None:
        """Return the object, if it exists and decodes."""
        record = self.objects.get(path)
        return record if isinstance(record, kind) else None


def identity_findings(
    paths: JobPaths, path: StatePath, found: object, *, critical: bool, **more: object
) -> Iterator[Finding]:
    """Find an object whose fields say that it belongs elsewhere.

    Args:
        critical: whether the epoch cannot be restored without it.
        more: values that other objects than the path require, by field.
    """
    problem = identity_mismatch(paths, path, found, **more)
    if problem is not None:
        step = KEEP_AND_REPORT if critical else NO_STATE_LOST
        yield either(critical, "metadata-of-another", path, problem, step)


def unreadable_finding(path: StatePath, found: Unreadable, *, critical: bool) -> Finding:
    """Return the finding about an object that does not decode."""
    step = KEEP_AND_REPORT if critical else NO_STATE_LOST
    return either(critical, "metadata-unreadable", path, found.problem, step)


def version_findings(path: StatePath, version: int) -> Iterator[Finding]:
    """Find a record of another version, whose meaning may differ."""
    if version != RECORD_VERSION:
        evidence = f"is of version {version}, read as version {RECORD_VERSION}"
        step = "use a release of arroyo-dagster that knows this version"
        yield warning("record-version", path, evidence, step)


# ---- an epoch of the legacy layout, and earlier ones that cleanup needs --------------------------
# Source: crates/arroyo-state/src/parquet.rs, `cleanup_operator` (arroyo-state.md 9.4 and 9.6).


@dataclass(frozen=True, slots=True, kw_only=True)
class LegacyFacts(MetadataFacts):
    """Like `MetadataFacts`, for the legacy layout.

    Attributes:
        min_epoch: the oldest epoch that a cleanup has kept, according to the newest epoch.
        unfinished: directories later than every visible epoch that contain operator metadata.
        committed: whether this package's commit note of the epoch exists; None if nothing is
            committed, or for an Arroyo job, whose database records commits.
    """

    min_epoch: Epoch
    unfinished: tuple[Epoch, ...] = ()
    committed: bool | None = None


def legacy_findings(facts: LegacyFacts) -> list[Finding]:
    """Find what is wrong with the objects of an epoch, and with those that a cleanup reads."""
    findings = list(_epoch_findings(facts))
    findings += _trap_findings(facts)
    for epoch in facts.unfinished:
        path = facts.paths.legacy_metadata(epoch)
        evidence = f"epoch {epoch} has operators, but no metadata: it is being written, or was lost"
        step = (
            "nothing, if the job runs; if Arroyo's database reports it as ready, "
            f"`arroyo-state rebuild {facts.paths.root} {epoch}` writes it anew"
        )
        findings.append(note("epoch-unfinished", path, evidence, step))
    return findings


def _epoch_findings(facts: LegacyFacts) -> Iterator[Finding]:
    path = facts.paths.legacy_metadata(facts.epoch)
    head = facts.objects.get(path)
    if isinstance(head, Unreadable):
        yield unreadable_finding(path, head, critical=True)
    if not isinstance(head, LegacyCheckpoint):
        return
    wrong = list(identity_findings(facts.paths, path, head, critical=True))
    yield from wrong
    for name in () if wrong else head.operators:
        yield from _operator_findings(facts, name)
    if facts.committed is False:
        note_path = facts.paths.commit_note(facts.epoch)
        evidence = (
            f"epoch {facts.epoch} is committing: there is no record that its commit is finished"
        )
        step = "nothing, if the job runs; else the next start commits it again, then continues"
        yield warning("commit-pending", note_path, evidence, step)


def _operator_findings(facts: LegacyFacts, name: OperatorId) -> Iterator[Finding]:
    path = facts.paths.operator_metadata(name, facts.epoch)
    operator = facts.objects.get(path)
    if operator is None:
        evidence = f"the metadata of operator {name} is missing; Arroyo starts no task without it"
        yield error("operator-metadata-missing", path, evidence, KEEP_AND_REPORT)
    elif isinstance(operator, Unreadable):
        yield unreadable_finding(path, operator, critical=True)
    elif isinstance(operator, OperatorCheckpoint):
        yield from identity_findings(facts.paths, path, operator, critical=True)


# ---- the cleanup trap ----------------------------------------------------------------------------


def _trap_findings(facts: LegacyFacts) -> Iterator[Finding]:
    head = facts.get(facts.paths.legacy_metadata(facts.epoch), LegacyCheckpoint)
    if head is None:
        return
    oldest = max(facts.epoch - LEGACY_EPOCHS_BEFORE_NEWEST, facts.min_epoch, 1)
    for number in range(oldest, facts.epoch):
        epoch = Epoch(number)
        if facts.rolled_back(epoch):
            continue
        lost = list(_lost_operators(facts, head, epoch))
        if lost:
            yield _trap(facts, epoch, lost)
        elif facts.paths.legacy_metadata(epoch) in facts.objects:
            path = facts.paths.legacy_metadata(epoch)
            metadata = facts.objects.get(path)
            step = f"epoch {epoch} cannot be restored; choose another"
            if isinstance(metadata, Unreadable):
                yield unreadable_finding(path, metadata, critical=False)
            elif metadata is None:
                evidence = f"epoch {epoch} has operators, but no metadata, though a later one has"
                yield warning("epoch-missing", path, evidence, step)


def _lost_operators(
    facts: LegacyFacts, head: LegacyCheckpoint, epoch: Epoch
) -> Iterator[StatePath]:
    for name in head.operators:
        path = facts.paths.operator_metadata(name, epoch)
        if facts.objects.get(facts.paths.operator_metadata(name, facts.epoch)) is None:
            continue  # reported as missing in the verified epoch, where it is an error
        if path in facts.objects and facts.get(path, OperatorCheckpoint) is None:
            yield path


def _trap(facts: LegacyFacts, epoch: Epoch, lost: list[StatePath]) -> Finding:
    evidence = (
        f"epoch {epoch} lacks the metadata of {len(lost)} operators; Arroyo, resumed at epoch "
        f"{facts.epoch}, reads it when it cleans up, and never checkpoints again without it"
    )
    step = f"restore the objects, or replace them by copies of those of epoch {epoch + 1}"
    return either(not facts.managed, "cleanup-trap", lost[0], evidence, step)
