"""The record of a change of an epoch: what was there before, and what explains it to a verifier.

One kind of record serves compactions in place, edits and rebuilds of Arroyo jobs, and edits of
managed jobs. What these operations plan and report is elsewhere.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.ids import Epoch, JobId, PipelineId, StatePath, WorkerGeneration
from arroyo_dagster.state.model.layout import JobPaths


class ChangeKind(enum.Enum):
    """What a change did to the metadata of an epoch.

    Attributes:
        COMPACTION: it lists other files with the same rows.
        EDIT: it lists other rows; of a managed job, a new epoch does.
        REBUILD: metadata that was missing or damaged was written.
    """

    COMPACTION = "compaction"
    EDIT = "edit"
    REBUILD = "rebuild"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHead:
    """How far a job is: a start, and every later epoch, changes it.

    Attributes:
        epoch: the newest epoch.
        worker_generation: that the fence names; None in the legacy layout.
    """

    epoch: Epoch
    worker_generation: WorkerGeneration | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeRecord:
    """A change of the metadata of one epoch. It holds no value of the state.

    Attributes:
        operation: the name of the edit, `rebuild`, or what else has created the epoch; None = a
            compaction.
        digest: of the plan; None = of a compaction, which is not approved.
        finish_time_micros: of the epoch: another attempt at the same number is another epoch.
        token: the lease under which it was done.
        head: of the job after the change.
        objects: the metadata objects, in the order in which they were written: SHA-256 before and
            after, in hex; None = it was missing.
        before: the bytes that an undo restores; None = it was missing. Empty if nothing can be
            undone any more, and for a managed job.
        written: of a rebuild, the bytes that the objects got.
        inputs: data files that only the metadata from before lists, or may have listed: gc keeps
            them while the change can be undone.
        unlisted: of an edit, data files that the epoch listed before and does not list any more,
            and those that had expired since the epoch before it.
        request: identifies a request that must not be applied twice: relative positions. None for
            any other change.
        doubts: of a rebuild, what is not known for certain, or is lost.
    """

    kind: ChangeKind
    operation: str | None
    digest: str | None
    pipeline: PipelineId | None
    job: JobId
    epoch: Epoch
    worker_generation: WorkerGeneration | None
    finish_time_micros: int
    token: int
    created_at_micros: int
    head: JobHead
    objects: Mapping[StatePath, tuple[str | None, str]] = field(default_factory=dict)
    before: Mapping[StatePath, bytes | None] = field(default_factory=dict)
    written: Mapping[StatePath, bytes] = field(default_factory=dict)
    inputs: tuple[StatePath, ...] = ()
    unlisted: tuple[StatePath, ...] = ()
    request: str | None = None
    doubts: tuple[str, ...] = ()
    version: int = 1

    def __post_init__(self) -> None:
        for name, held in (("before", self.before), ("written", self.written)):
            if held and held.keys() != self.objects.keys():
                raise InputError(f"a change has bytes of other objects in {name!r} than it changed")

    @property
    def name(self) -> str:
        """Return the name of the record: epoch, lease and kind can be told without reading it."""
        return f"{self.epoch:07}-{self.token:010}-{self.kind.value}.json"


def is_change_of(paths: JobPaths, path: str, kind: ChangeKind, epoch: Epoch | None = None) -> bool:
    """Return whether an object is the record of such a change; of this epoch, or of any."""
    start = f"{paths.changes}/" if epoch is None else f"{paths.changes}/{epoch:07}-"
    return path.startswith(start) and path.endswith(f"-{kind.value}.json")
