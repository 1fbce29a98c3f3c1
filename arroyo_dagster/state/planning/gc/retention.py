"""Which objects nothing kept can reach, and in what order they go.

Source: crates/arroyo-state-protocol/src/gc.rs, `classify_checkpoint_history`;
crates/arroyo-state/src/parquet.rs, `cleanup_checkpoint`.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from arroyo_dagster.errors import ProtocolError
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.gc import ExpirePlan
from arroyo_dagster.state.model.ids import Epoch, OperatorId, StatePath
from arroyo_dagster.state.model.layout import JobPaths, Layout
from arroyo_dagster.state.planning.restore.recovery import marker_path

LEGACY_EPOCHS_BEFORE_NEWEST = 10


def oldest_kept(
    epochs: Sequence[Epoch], min_epoch: Epoch, layout: Layout = Layout.PROTOCOL
) -> Epoch:
    """The oldest epoch that stays: `min_epoch`, or the newest one's parent if that is older.

    In the legacy layout an Arroyo that resumes the job cleans up with the operators of an epoch up
    to ten before the newest at hand, and never checkpoints again if they are gone.

    Args:
        epochs: every epoch of the job, newest first, never empty.

    Source: crates/arroyo-state/src/parquet.rs, `cleanup_operator` (arroyo-state.md 9.6).
    """
    if layout is Layout.LEGACY:
        min_epoch = min(min_epoch, Epoch(max(0, epochs[0] - LEGACY_EPOCHS_BEFORE_NEWEST)))
    return min(min_epoch, *epochs[:2])


def behind_pinned(epochs: Sequence[Epoch], pinned: Collection[Epoch]) -> tuple[Epoch, ...]:
    """The epochs that follow each other, without the pinned ones that were left behind them.

    Args:
        epochs: those that exist, ascending.
    """
    start = 0
    for at, (earlier, later) in enumerate(itertools.pairwise(epochs), start=1):
        if later - earlier > 1 and earlier in pinned:
            start = at
    return tuple(epochs[start:])


def plan_expire(
    paths: JobPaths,
    history: Sequence[Checkpoint],
    min_epoch: Epoch,
    *,
    pinned: Collection[Epoch] = (),
    needed: Collection[StatePath] = (),
) -> ExpirePlan:
    """Choose what may go once `min_epoch` is the oldest epoch anyone will restore.

    A file stays while any kept checkpoint references it, whichever epoch wrote it. The newest
    checkpoint and its direct parent always stay: recovery needs both.

    Args:
        paths: the job.
        history: every checkpoint of the job, newest first, never empty.
        min_epoch: the oldest epoch to keep; itself kept.
        pinned: older epochs that stay as well; what makes one exist stays of its parent too.
        needed: files that stay for another reason.

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
    epochs = [checkpoint.epoch for checkpoint in history]
    keep_from = oldest_kept(epochs, min_epoch, paths.layout)
    parent = history[0].parent_ref  # of an epoch that a rollback published it may be much older
    stays = [
        one for one in history if one.epoch >= keep_from or one.epoch in pinned or one.ref == parent
    ]
    staying = {one.epoch for one in stays}
    expired = [checkpoint for checkpoint in reversed(history) if checkpoint.epoch not in staying]
    kept = {path for one in stays for path in one.paths} | set(needed)
    doomed = {path for c in expired for path in c.paths} - kept
    # Of young ones too: they grow old, and then it is too late.
    parents = {one.parent_ref for one in stays if one.epoch in pinned}
    expired = [one for one in expired if one.ref not in parents]
    records: list[StatePath] = []
    manifests: list[StatePath] = []
    for checkpoint in expired:
        records.extend(_records(paths, checkpoint))
        manifests.extend(_manifests(paths, checkpoint))
    return ExpirePlan(
        min_epoch=min_epoch,
        keep_from=keep_from,
        epochs=tuple(checkpoint.epoch for checkpoint in expired),
        data=tuple(sorted(doomed)),
        records=tuple(records),
        manifests=tuple(manifests),
    )


def unreadable_objects(
    paths: JobPaths, epoch: Epoch, ref: StatePath | None, operators: Iterable[OperatorId] = ()
) -> tuple[StatePath, ...]:
    """The metadata of an epoch that does not decode, by name; what makes it exist comes last.

    Args:
        ref: its manifest, in the protocol layout; None if that is not known.
        operators: those it may have, in the legacy layout.
    """
    if paths.layout is Layout.LEGACY:
        metadata = [paths.operator_metadata(name, epoch) for name in operators]
        return (*metadata, paths.commit_note(epoch), paths.legacy_metadata(epoch))
    named = () if ref is None else (marker_path(ref), ref)
    return (*named, paths.epoch_record(epoch))


def with_unreadable(
    plan: ExpirePlan, unreadable: Mapping[Epoch, Sequence[StatePath]]
) -> ExpirePlan:
    """A plan that takes epochs whose metadata does not decode as well.

    The files that only they list become orphans. What makes such an epoch exist goes in the last
    step, so that a plan which ends before finds it again.

    Args:
        unreadable: by epoch, as `unreadable_objects` gives it.
    """
    objects = list(unreadable.values())
    return replace(
        plan,
        epochs=tuple(sorted((*plan.epochs, *unreadable))),
        records=(*plan.records, *(path for one in objects for path in one[:-1])),
        manifests=(*(one[-1] for one in objects), *plan.manifests),
    )


def _records(paths: JobPaths, checkpoint: Checkpoint) -> list[StatePath]:
    generation = checkpoint.worker_generation
    found = [
        paths.subtask_metadata(operator.operator, index, checkpoint.epoch, generation)
        for operator in checkpoint.operators
        for index in range(operator.parallelism)
    ]
    if paths.layout is Layout.PROTOCOL:
        return [*found, marker_path(checkpoint.ref), paths.epoch_record(checkpoint.epoch)]
    managed = checkpoint.progress is not None and checkpoint.needs_commit
    return [*found, paths.commit_note(checkpoint.epoch)] if managed else found


def _manifests(paths: JobPaths, checkpoint: Checkpoint) -> list[StatePath]:
    if paths.layout is Layout.PROTOCOL:
        return [checkpoint.ref]
    # Operators before the checkpoint: an interrupted run still finds what is left.
    operators = [
        paths.operator_metadata(operator.operator, checkpoint.epoch)
        for operator in checkpoint.operators
    ]
    return [*operators, checkpoint.ref]
