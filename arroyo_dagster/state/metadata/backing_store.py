"""What a backend is asked for, and what it answers with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from arroyo_dagster.state.model.checkpoints import (
    Checkpoint,
    CheckpointState,
    LegacyCheckpoint,
    Manifest,
    OperatorCheckpoint,
    RunProgress,
)
from arroyo_dagster.state.model.ids import Epoch, OperatorId, StatePath, WorkerGeneration
from arroyo_dagster.state.planning.gc.expiry import ExpirePlan


@runtime_checkable
class BackingStore(Protocol):
    """The interface of a checkpoint store. Synchronous; one instance per job.

    Source: crates/arroyo-state/src/lib.rs, `BackingStore`.
    """

    def name(self) -> str:
        """Return the name of this kind of backend in Arroyo's metadata."""

    def prepare_checkpoint_load(self, epoch: Epoch) -> Checkpoint:
        """Prove that everything the epoch refers to exists and decodes, then return the epoch."""

    def load_checkpoint_metadata(self, epoch: Epoch) -> Checkpoint:
        """Read the metadata of one epoch."""

    def load_operator_metadata(
        self, operator: OperatorId, epoch: Epoch
    ) -> OperatorCheckpoint | None:
        """Read one operator at one epoch; None if it does not exist."""

    def write_operator_checkpoint_metadata(
        self, operator: OperatorCheckpoint, subtask_index: int | None = None
    ) -> StatePath:
        """Write an operator's metadata: merged, or of one subtask."""

    def write_checkpoint_metadata(self, checkpoint: Manifest | LegacyCheckpoint) -> StatePath:
        """Write the record that makes the epoch visible."""

    def cleanup_checkpoint(self, min_epoch: Epoch) -> ExpirePlan:
        """Delete the epochs below `min_epoch` and the files that only they list."""


@dataclass(frozen=True, slots=True)
class Started:
    """A started run, and the checkpoint from which it continues.

    Attributes:
        worker_generation: None in the legacy layout, which has none.
    """

    worker_generation: WorkerGeneration | None
    restored: Checkpoint | None
    replay_commit: bool


@dataclass(frozen=True, slots=True)
class Published:
    """A checkpoint that is visible and owns its epoch."""

    ref: StatePath
    manifest: Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class NextEpoch:
    """What the next epoch of a managed job is written with.

    Attributes:
        parent_ref: the epoch before; None for the first, and of no use in the legacy layout.
        needs_commit: whether a commit of the epoch follows.
    """

    epoch: Epoch
    min_epoch: Epoch
    parent_ref: StatePath | None
    operators: tuple[OperatorCheckpoint, ...]
    progress: RunProgress
    start_time_micros: int
    finish_time_micros: int
    needs_commit: bool

    @property
    def state(self) -> CheckpointState:
        """The state of the epoch once it exists."""
        return CheckpointState.COMMITTING if self.needs_commit else CheckpointState.READY
