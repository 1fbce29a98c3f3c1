"""Publish an epoch, in both layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from arroyo_dagster.errors import ConflictError
from arroyo_dagster.state.metadata.backend import StateBackend
from arroyo_dagster.state.metadata.reader import as_checkpoint, legacy_checkpoint
from arroyo_dagster.state.model.checkpoints import (
    Checkpoint,
    CheckpointState,
    LegacyCheckpoint,
    Manifest,
    OperatorCheckpoint,
    RunProgress,
)
from arroyo_dagster.state.planning.restore.recovery import legacy_state
from arroyo_dagster.state.runtime.task import EpochPlan


@dataclass(frozen=True, slots=True)
class EpochPublisher:
    """Writes the metadata of epochs."""

    backend: StateBackend

    def publish(
        self,
        plan: EpochPlan,
        operators: Sequence[OperatorCheckpoint],
        base: Checkpoint | None,
        progress: RunProgress,
    ) -> Checkpoint:
        """Write the metadata of an epoch: from now on it exists.

        Args:
            base: the previous epoch; None for the first.

        Raises:
            ConflictError: another run owns the epoch, or a newer run was started.
        """
        if plan.generation is None:
            return self._publish_legacy(plan, operators, progress)
        manifest = self.manifest(plan, operators, base, progress)
        published = self.backend.publish(manifest)
        state = CheckpointState.COMMITTING if manifest.needs_commit else CheckpointState.READY
        return as_checkpoint(manifest, published.ref, state)

    def _publish_legacy(
        self, plan: EpochPlan, operators: Sequence[OperatorCheckpoint], progress: RunProgress
    ) -> Checkpoint:
        """Write every operator's object, then the checkpoint's, which makes the epoch exist."""
        if self.backend.exists(plan.epoch):
            raise ConflictError(
                f"epoch {plan.epoch} already exists: another run wrote it",
                job=self.backend.paths.job,
                next_step="start the job again: it continues from that epoch; nothing was written",
            )
        for operator in operators:
            self.backend.write_operator_checkpoint_metadata(operator)
        head = LegacyCheckpoint(
            job=self.backend.paths.job,
            epoch=plan.epoch,
            min_epoch=plan.min_epoch,
            start_time_micros=min(operator.start_time_micros for operator in operators),
            finish_time_micros=self.backend.clock(),
            operators=tuple(operator.operator for operator in operators),
            progress=progress,
        )
        path = self.backend.write_checkpoint_metadata(head)
        state = legacy_state(head, operators, committed=False)
        return legacy_checkpoint(head, operators, path, state)

    def manifest(
        self,
        plan: EpochPlan,
        operators: Sequence[OperatorCheckpoint],
        base: Checkpoint | None,
        progress: RunProgress,
    ) -> Manifest:
        """Return the manifest of an epoch in the protocol layout; arguments as of `publish`."""
        paths = self.backend.paths
        assert paths.pipeline is not None
        assert plan.generation is not None
        return Manifest(
            pipeline=paths.pipeline,
            job=paths.job,
            worker_generation=plan.generation,
            epoch=plan.epoch,
            min_epoch=plan.min_epoch,
            start_time_micros=min(operator.start_time_micros for operator in operators),
            finish_time_micros=self.backend.clock(),
            needs_commit=any(operator.needs_commit for operator in operators),
            operators=tuple(operators),
            parent_ref=base.ref if base else None,
            progress=progress,
        )
