"""Checks before a run continues from a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass

from arroyo_dagster.engine.operators import registered
from arroyo_dagster.engine.pipeline import Pipeline
from arroyo_dagster.engine.source_state import source_tables
from arroyo_dagster.errors import (
    ArroyoStateError,
    FormatError,
    InputError,
    NotFoundError,
    ProtocolError,
)
from arroyo_dagster.state.metadata.backend import StateBackend
from arroyo_dagster.state.metadata.own_records import check_records
from arroyo_dagster.state.model.checkpoints import Checkpoint, CheckpointState, OperatorCheckpoint
from arroyo_dagster.state.model.ids import Epoch
from arroyo_dagster.state.planning.restore.claims import Claims
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.registration import check_tables


@dataclass(frozen=True)
class StartChecks:
    """The checks of one start; their errors are those of `JobRun.start`.

    Attributes:
        allow_dropped: as in `JobRun.start`.
    """

    store: ObjectStore
    pipeline: Pipeline
    backend: StateBackend
    allow_dropped: Collection[str] = ()

    def before_start(self) -> Epoch | None:
        """Check the newest epoch and return it; None = the job has none.

        Bad input is detected here, before anything is written, including the new generation.
        """
        self._check_layout()
        check_records(self.store, self.pipeline.paths)
        newest = self._newest_epoch()
        checkpoint: Checkpoint | None = None
        while newest is not None:
            try:
                checkpoint = self.check_restorable(newest)
                break
            except (NotFoundError, FormatError, ProtocolError) as error:
                before, newest = newest, self._newest_epoch()
                if newest == before:
                    raise self._damaged(error) from error
                # else a running job has let the epoch expire while it was read
        if checkpoint is not None:
            self.check_sources(checkpoint)
        return newest

    def _damaged(self, error: ArroyoStateError) -> ArroyoStateError:
        """Return the error of an unrestorable newest epoch, with the command to roll back."""
        command = f"arroyo-state rollback {self.pipeline.paths.root}"
        step = f"restore the object, or go back to an older epoch: `{command}` lists them"
        damage = type(error)(error.message, next_step=step, retryable=error.retryable)
        damage.facts = error.facts
        return damage

    def _check_layout(self) -> None:
        other = self.pipeline.other_layout
        try:
            epochs = StateBackend(self.store, other).every_epoch()
        except NotFoundError:
            return
        if epochs:
            raise InputError(
                f"the job's state is stored in the {other.layout.value} layout, up to epoch "
                f"{epochs[-1]}: this run would start without it",
                job=other.root,
                next_step="give the pipeline that layout, or another name",
            )

    def checked_base(self, base: Checkpoint | None, newest: Epoch | None) -> Checkpoint | None:
        """Check the checkpoint from which the run, which has just been started, continues, and
        return it as `settled`.

        Args:
            newest: as `before_start` returned it.
        """
        if newest is not None and (base is None or base.epoch < newest):
            raise ProtocolError(
                f"epoch {newest} exists, but no worker generation leads to it",
                job=self.pipeline.job,
                restored=base.epoch if base else None,
                next_step="check it with `arroyo-state epochs`; nothing was deleted",
            )
        if base is not None and base.epoch != newest:
            self.check_restorable(base.epoch)
        return None if base is None else self.settled(base)

    def _newest_epoch(self) -> Epoch | None:
        try:
            epochs = self.backend.every_epoch()
        except NotFoundError:
            return None  # nothing was ever written below the URL: this is its first job
        # A listing may still show an epoch that has expired.
        return next((epoch for epoch in reversed(epochs) if self.backend.exists(epoch)), None)

    def check_restorable(self, epoch: Epoch) -> Checkpoint:
        """Check that this pipeline can continue from an epoch, and return it as `settled`."""
        checkpoint = self.backend.prepare_checkpoint_load(epoch)
        if checkpoint.progress is None:
            raise FormatError(
                "the checkpoint contains no source offsets: another program wrote it, or it is "
                "truncated",
                job=checkpoint.job,
                epoch=epoch,
                path=checkpoint.ref,
                next_step="keep the object and report it; start this pipeline under another job",
            )
        for operator in checkpoint.operators:
            self._check_commit(checkpoint, operator)
        settled = self.settled(checkpoint)
        for operator in settled.operators:
            node = self.pipeline.operators.get(operator.operator)
            if node is not None:
                check_tables(registered(node.operator), operator)
            elif operator.operator in self.pipeline.sources:
                check_tables(source_tables(), operator)
        return settled

    def check_sources(self, checkpoint: Checkpoint) -> None:
        """Check that the sources have the rows that were read at a checkpoint.

        Raises:
            InputError: one has not.
        """
        assert checkpoint.progress is not None
        offsets = json.loads(checkpoint.progress.offsets)
        for name, node in self.pipeline.sources.items():
            offset = offsets.get(name, offsets.get(self.pipeline.renamed_from.get(name)))
            if offset is None:
                continue
            try:
                node.source.check_offset(offset)
            except ArroyoStateError as error:
                error.facts.setdefault("operator", name)
                raise

    def settled(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return a checkpoint as this pipeline continues from it: see `Claims.settle`."""
        pipeline = self.pipeline
        tables = {name: [*source_tables()] for name in pipeline.sources}
        tables |= {name: [*registered(node.operator)] for name, node in pipeline.operators.items()}
        claims = Claims(
            tables=tables,
            renamed_from=pipeline.renamed_from,
            allow_dropped=self.allow_dropped,
            carries_unclaimed=pipeline.carries_unclaimed,
        )
        return claims.settle(checkpoint)

    def _check_commit(self, checkpoint: Checkpoint, operator: OperatorCheckpoint) -> None:
        waits = {name for name, data in operator.commit_data().items() if any(data.values())}
        stored = operator.operator
        names = {before: now for now, before in self.pipeline.renamed_from.items()}
        sink = self.pipeline.sinks().get(names.get(stored, stored))
        has_all = sink is not None and waits <= registered(sink).keys()
        if checkpoint.state is not CheckpointState.READY and waits and not has_all:
            raise InputError(
                "the checkpoint still has to commit the data of a sink that the pipeline no "
                "longer has",
                operator=operator.operator,
                epoch=checkpoint.epoch,
                next_step="run the pipeline once with the sink, then remove it",
            )
