"""What the findings about metadata objects have in common: the objects read, and their identity."""

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
from arroyo_dagster.state.model.ids import Epoch, StatePath
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.planning.restore.lost_metadata import identity_mismatch
from arroyo_dagster.state.planning.verify.findings import KEEP_AND_REPORT, Finding, either, warning

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
