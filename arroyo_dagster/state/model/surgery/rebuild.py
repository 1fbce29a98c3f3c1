"""A rebuild of an epoch's metadata as values: what is written anew, and what is doubtful."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from arroyo_dagster.state.model.ids import Epoch, JobId, OperatorId, StatePath, TableName
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
    """The metadata of one epoch of the legacy layout that is written anew.

    Attributes:
        source: the older epoch that each rebuilt operator starts from; empty if only the
            checkpoint's own metadata is rebuilt.
        why_not: why it cannot be executed now; None if it can.
        before: the bytes of each object that is rebuilt; None = it is missing.
        after: the bytes that it gets, in the order in which they are written.
        doubts: what is not known for certain, or is lost.
    """

    job: JobId
    epoch: Epoch
    source: Mapping[OperatorId, Epoch]
    condition: JobCondition
    why_not: str | None
    before: Mapping[StatePath, bytes | None]
    after: Mapping[StatePath, bytes]
    tables: tuple[RebuiltTable, ...]
    doubts: tuple[str, ...]

    @property
    def paths(self) -> JobPaths:
        """The object paths of the job."""
        return JobPaths(self.job)

    @property
    def digest(self) -> str:
        """The identity that an approval refers to: changes with every byte and every doubt."""
        found = hashlib.blake2b(digest_size=16)
        found.update(repr((self.job, self.epoch, sorted(self.source.items()))).encode())
        found.update(repr([(str(at), data) for at, data in self.before.items()]).encode())
        found.update(repr([(str(at), data) for at, data in self.after.items()]).encode())
        found.update(repr(self.doubts).encode())
        return found.hexdigest()

    def as_record(self, created_at_micros: int) -> dict[str, object]:
        """Return what the job keeps of the rebuild, with the damaged bytes."""
        return {
            "version": 1,
            "job": self.job,
            "epoch": self.epoch,
            "digest": self.digest,
            "created_at_micros": created_at_micros,
            "source_epochs": dict(self.source),
            "objects": {
                at: {
                    "before": None if (was := self.before[at]) is None else _text(was),
                    "after_sha256": hashlib.sha256(data).hexdigest(),
                }
                for at, data in self.after.items()
            },
            "doubts": list(self.doubts),
        }


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuildOutcome:
    """What a rebuild did.

    Attributes:
        record: the record of it in the job's own directory; None = nothing was written.
    """

    plan: RebuildPlan
    record: StatePath | None = None
