"""Which objects nothing kept can reach, and in what order they go.

Source: crates/arroyo-state-protocol/src/gc.rs, `classify_checkpoint_history`;
crates/arroyo-state/src/parquet.rs, `cleanup_checkpoint`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from arroyo_dagster.errors import ProtocolError
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.ids import Epoch, StatePath
from arroyo_dagster.state.model.layout import JobPaths, Layout
from arroyo_dagster.state.planning.recovery import marker_path


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpirePlan:
    """What goes when epochs expire: each step is complete before the next begins.

    Attributes:
        epochs: the epochs that go, oldest first.
        data: data files that no kept epoch lists, in path order.
        records: markers, subtask objects and epoch records, oldest epoch first.
        manifests: what refers to the others, oldest first, last of all: a run that stops half way
            leaves no gap in the chain of parents, and the next finds again what is left.
    """

    min_epoch: Epoch
    epochs: tuple[Epoch, ...]
    data: tuple[StatePath, ...]
    records: tuple[StatePath, ...]
    manifests: tuple[StatePath, ...]

    @property
    def steps(self) -> tuple[tuple[StatePath, ...], ...]:
        # One manifest a step: an interruption must never remove a newer one before an older one.
        return (self.data, self.records, *((path,) for path in self.manifests))


def oldest_kept(epochs: Sequence[Epoch], min_epoch: Epoch) -> Epoch:
    """The oldest epoch that stays: `min_epoch`, or the newest one's parent if that is older.

    Args:
        epochs: every epoch of the job, newest first, never empty.
    """
    return min(min_epoch, *epochs[:2])


def plan_expire(paths: JobPaths, history: Sequence[Checkpoint], min_epoch: Epoch) -> ExpirePlan:
    """Choose what may go once `min_epoch` is the oldest epoch anyone will restore.

    A file stays while any kept checkpoint references it, whichever epoch wrote it. The newest
    checkpoint and its direct parent always stay: recovery needs both.

    Args:
        paths: the job.
        history: every checkpoint of the job, newest first, never empty.
        min_epoch: the oldest epoch to keep; itself kept.

    Raises:
        ProtocolError: `min_epoch` is newer than the newest checkpoint.
    """
    if not history or history[0].epoch < min_epoch:
        raise ProtocolError(
            "min_epoch is newer than the newest checkpoint",
            job=paths.job,
            min_epoch=min_epoch,
            newest=history[0].epoch if history else None,
        )
    keep_from = oldest_kept([checkpoint.epoch for checkpoint in history], min_epoch)
    expired = [checkpoint for checkpoint in reversed(history) if checkpoint.epoch < keep_from]
    kept = {path for c in history if c.epoch >= keep_from for path in c.paths}
    doomed = {path for c in expired for path in c.paths} - kept
    records: list[StatePath] = []
    manifests: list[StatePath] = []
    for checkpoint in expired:
        records.extend(_records(paths, checkpoint))
        manifests.extend(_manifests(paths, checkpoint))
    return ExpirePlan(
        min_epoch=min_epoch,
        epochs=tuple(checkpoint.epoch for checkpoint in expired),
        data=tuple(sorted(doomed)),
        records=tuple(records),
        manifests=tuple(manifests),
    )


def _records(paths: JobPaths, checkpoint: Checkpoint) -> list[StatePath]:
    generation = checkpoint.worker_generation
    found = [
        paths.subtask_metadata(operator.operator, index, checkpoint.epoch, generation)
        for operator in checkpoint.operators
        for index in range(operator.parallelism)
    ]
    if paths.layout is Layout.PROTOCOL:
        found += [marker_path(checkpoint.ref), paths.epoch_record(checkpoint.epoch)]
    return found


def _manifests(paths: JobPaths, checkpoint: Checkpoint) -> list[StatePath]:
    if paths.layout is Layout.PROTOCOL:
        return [checkpoint.ref]
    # Operators before the checkpoint: an interrupted run still finds what is left.
    operators = [
        paths.operator_metadata(operator.operator, checkpoint.epoch)
        for operator in checkpoint.operators
    ]
    return [*operators, checkpoint.ref]
