"""What the findings about metadata objects have in common: what was read, and whose it is."""

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
from arroyo_dagster.state.planning.verify.findings import KEEP_AND_REPORT, Finding, either, warning

NO_STATE_LOST = "no state is lost by it; find out what wrote it"


@dataclass(frozen=True, slots=True)
class Unreadable:
    """An object that is there and does not decode."""

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
        epoch: the one that is verified.
        newest: whether no later one is visible.
        epochs: the visible ones looked at, ascending; none later than `epoch`.
        objects: everything that was read: None = not there. What was not read is no key.
        managed: whether a job of ours wrote it.
        rollbacks: the epochs that rollbacks published, each with the one that it restored. What
            lies between the two is no ancestor of `epoch`.
    """

    paths: JobPaths
    epoch: Epoch
    newest: bool
    epochs: tuple[Epoch, ...]
    objects: Objects
    managed: bool
    rollbacks: Mapping[Epoch, Epoch] = field(default_factory=dict)

    def rolled_back(self, epoch: Epoch) -> bool:
        """Whether a rollback went back behind this number."""
        return any(restored < epoch < by for by, restored in self.rollbacks.items())

    def get(self, path: StatePath, kind: type[_T]) -> _T | None:
        """The object, if it is there and decodes."""
        found = self.objects.get(path)
        return found if isinstance(found, kind) else None


def identity_findings(
    path: StatePath, expected: Mapping[str, object], found: object, *, critical: bool
) -> Iterator[Finding]:
    """Tell an object whose fields say that it belongs elsewhere.

    Args:
        expected: what the object's path says of it, by field.
        critical: whether the epoch cannot be restored without it.
    """
    wrong = [
        f"{name.replace('_', ' ')} {getattr(found, name)!r}, expected {value!r}"
        for name, value in expected.items()
        if getattr(found, name) != value
    ]
    if wrong:
        step = KEEP_AND_REPORT if critical else NO_STATE_LOST
        evidence = f"belongs to another object: {'; '.join(wrong)}"
        yield either(critical, "metadata-of-another", path, evidence, step)


def unreadable_finding(path: StatePath, found: Unreadable, *, critical: bool) -> Finding:
    """Tell an object that does not decode."""
    step = KEEP_AND_REPORT if critical else NO_STATE_LOST
    return either(critical, "metadata-unreadable", path, found.problem, step)


def version_findings(path: StatePath, version: int) -> Iterator[Finding]:
    """Tell a record of another version: it may mean something else."""
    if version != RECORD_VERSION:
        evidence = f"is of version {version}, read as version {RECORD_VERSION}"
        step = "use a release of arroyo-dagster that knows this version"
        yield warning("record-version", path, evidence, step)
