"""A copy of a whole job to another checkpoint URL as values: what is copied, in which order."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from arroyo_dagster.state.model.ids import Epoch, JobId, PipelineId, StatePath, WorkerGeneration
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.objects import Packed


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPlan:
    """The objects of one job to copy; each group is complete before the next begins.

    Attributes:
        source, target: the URLs.
        epoch: the newest epoch of the copy, from which a start continues.
        epochs: all epochs of the copy, ascending.
        worker_generation: that wrote the newest epoch; None in the legacy layout.
        data: data files, and records that sources and sinks keep beside the state.
        metadata: what describes the epochs, oldest first; in the legacy layout the objects that
            make epochs exist come last, that of the newest epoch before the others.
        left_out: epochs that exist and are not copied: others were asked for, or they cannot be
            read.
        warnings: what the user should know before.
    """

    pipeline: PipelineId | None
    job: JobId
    source: str
    target: str
    epoch: Epoch
    epochs: tuple[Epoch, ...]
    worker_generation: WorkerGeneration | None
    data: Packed
    metadata: Packed
    left_out: tuple[Epoch, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def paths(self) -> JobPaths:
        """The object paths of the job, at both URLs."""
        return JobPaths(self.job, self.pipeline)

    @property
    def objects(self) -> int:
        return len(self.data) + len(self.metadata)

    @property
    def size_bytes(self) -> int:
        return self.data.size_bytes + self.metadata.size_bytes

    @property
    def digest(self) -> str:
        """The identity that an approval refers to: changes with every object."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(repr((self.pipeline, self.job, self.epoch, self.epochs)).encode())
        digest.update(repr((self.source, self.target)).encode())
        for group in (self.data, self.metadata):
            for entry in group:
                digest.update(repr((str(entry.path), entry.size_bytes, entry.etag)).encode())
        return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOutcome:
    """What a copy did.

    Attributes:
        copied: the number of objects that were written now.
        present: the number of those that an interrupted copy had written before.
        digests: BLAKE2b of each object, equal at both URLs.
        done: whether the copy is complete, verified and active.
    """

    plan: CopyPlan
    copied: int = 0
    present: int = 0
    digests: Mapping[StatePath, str] = field(default_factory=dict)
    done: bool = False
