"""A rebuild of an epoch's metadata as values: what is written anew, and what is doubtful."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from arroyo_dagster.state.model.changes import JobHead
from arroyo_dagster.state.model.ids import (
    Epoch,
    JobId,
    OperatorId,
    PipelineId,
    StatePath,
    TableName,
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
class RebuildOutcome:
    """What a rebuild did.

    Attributes:
        record: the record that undoes it, until the job is started; None = nothing was written.
    """

    plan: RebuildPlan
    record: StatePath | None = None
