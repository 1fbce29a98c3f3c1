"""A rebuild of an epoch's metadata as values: what is written anew, and what is doubtful."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.ids import (
    Epoch,
    JobId,
    OperatorId,
    PipelineId,
    StatePath,
    TableName,
    WorkerGeneration,
)
from arroyo_dagster.state.model.job_facts import JobCondition
from arroyo_dagster.state.model.layout import JobPaths


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuiltTable:
    """The files of one table as the rebuilt metadata lists them.

    Attributes:
        carried: files that the older epoch lists, too.
        added: files of the epoch itself.
    """

    operator: OperatorId
    table: TableName
    carried: tuple[StatePath, ...]
    added: tuple[StatePath, ...]


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
class RebuildPlan:
    """The metadata of one epoch that is written anew.

    Attributes:
        source: the older epoch that each rebuilt operator starts from; empty if no operator's
            metadata is rebuilt.
        why_not: why it cannot be executed now; None if it can.
        before: the bytes of each object that is rebuilt; None = it is missing.
        after: the bytes that it gets, in the order in which they are written.
        doubts: what is not known for certain, or is lost.
        unlisted: data files that the lost metadata may have listed, and the new one does not.
        head: of the job once it is rebuilt.
    """

    job: JobId
    pipeline: PipelineId | None
    epoch: Epoch
    source: Mapping[OperatorId, Epoch]
    condition: JobCondition
    why_not: str | None
    before: Mapping[StatePath, bytes | None]
    after: Mapping[StatePath, bytes]
    tables: tuple[RebuiltTable, ...]
    doubts: tuple[str, ...]
    unlisted: tuple[StatePath, ...]
    head: JobHead

    @property
    def paths(self) -> JobPaths:
        """The object paths of the job."""
        return JobPaths(self.job, self.pipeline)

    @property
    def digest(self) -> str:
        """The identity that an approval refers to: changes with every byte and every doubt."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(repr((self.paths.root, self.epoch, sorted(self.source.items()))).encode())
        digest.update(repr([(str(path), data) for path, data in self.before.items()]).encode())
        digest.update(repr([(str(path), data) for path, data in self.after.items()]).encode())
        digest.update(repr(self.doubts).encode())
        return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuildRecord:
    """Metadata objects that this package wrote where there was none, or a damaged one.

    Attributes:
        operation: `rebuild`, or what else has created the epoch.
        digest: of the plan.
        token: the lease under which it was done.
        before: the bytes of each object before; None = it was missing.
        after: the bytes that it got, in the order in which they were written.
        doubts, unlisted, head: as of the plan. gc keeps what is unlisted while the rebuild can
            be undone.
    """

    operation: str
    digest: str
    pipeline: PipelineId | None
    job: JobId
    epoch: Epoch
    token: int
    created_at_micros: int
    before: Mapping[StatePath, bytes | None]
    after: Mapping[StatePath, bytes]
    head: JobHead
    doubts: tuple[str, ...] = ()
    unlisted: tuple[StatePath, ...] = ()
    version: int = 1

    def __post_init__(self) -> None:
        if self.before.keys() != self.after.keys():
            raise InputError("a rebuild has bytes from before of other objects than it writes")


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuildOutcome:
    """What a rebuild did.

    Attributes:
        record: the record that undoes it, until the job is started; None = nothing was written.
    """

    plan: RebuildPlan
    record: StatePath | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuildUndo:
    """The metadata objects that undoing a rebuild restores, or would.

    Attributes:
        record: the record with their content from before.
        operation: as of the record.
        restored: objects that get their damaged bytes again.
        deleted: objects that were missing.
    """

    record: StatePath
    operation: str
    epoch: Epoch
    restored: tuple[StatePath, ...] = ()
    deleted: tuple[StatePath, ...] = ()
    done: bool = False
