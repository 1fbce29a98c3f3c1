"""Which epochs are partially collected, and which are damaged: both list missing objects.

A cleanup deletes the oldest epochs first: data that no kept epoch lists, then the objects that make
the epoch exist, the one that refers to all others last. An interrupted cleanup leaves incomplete
epochs, all of them older than any epoch that it keeps; the next cleanup finishes them.

Source: crates/arroyo-state/src/parquet.rs, `cleanup_checkpoint`;
crates/arroyo-state-protocol/src/gc.rs; arroyo-state.md 9.5 and 9.6.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.ids import Epoch, StatePath
from arroyo_dagster.state.model.tables import ExpiringTimeKeyFiles

ARROYO_KEEPS_LEGACY = 4
"""Number of epochs before the newest that no Arroyo release's cleanup deletes: 4 up to v0.15, 10
since.
"""

ARROYO_KEEPS_PROTOCOL = 10

LEGACY_EPOCHS_BEFORE_NEWEST = 10
"""When Arroyo resumes a job of the legacy layout, its cleanup uses the operators of an epoch up to
this many before the newest one. If they are missing, the job never checkpoints again.

Source: crates/arroyo-state/src/parquet.rs, `cleanup_operator` (arroyo-state.md 9.6).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remains:
    """The files that one epoch lists, and which of its objects are missing.

    Attributes:
        listed: the data files that it lists.
        lost: the missing ones of these and of its metadata objects.
    """

    epoch: Epoch
    listed: frozenset[StatePath]
    lost: frozenset[StatePath]


def collected_before(newest: Epoch, *, legacy: bool, managed: bool) -> Epoch:
    """Return the oldest epoch that no cleanup can have touched while `newest` is the newest epoch.

    Cleanups of managed jobs keep the newest epoch and its parent; in the legacy layout the ten
    before the newest.
    """
    if managed:
        kept = LEGACY_EPOCHS_BEFORE_NEWEST if legacy else 1
    else:
        kept = ARROYO_KEEPS_LEGACY if legacy else ARROYO_KEEPS_PROTOCOL
    return Epoch(max(0, newest - kept))


def partially_collected(epochs: Sequence[Remains], newest: Checkpoint) -> frozenset[Epoch]:
    """Return the epochs whose missing objects a cleanup explains. The others are damaged.

    Args:
        epochs: every readable epoch, in any order.
        newest: the newest of them.
    """
    before = collected_before(
        newest.epoch,
        legacy=newest.worker_generation is None,
        managed=newest.progress is not None,
    )
    kept = {path for epoch in epochs if epoch.epoch >= before for path in epoch.listed}
    return frozenset(
        one.epoch for one in epochs if one.epoch < before and one.lost and not one.lost & kept
    )


def metadata_only(
    epochs: Sequence[Remains], candidates: Collection[Epoch], numbers: Iterable[Epoch]
) -> frozenset[Epoch]:
    """Return the epochs of which an expiry has kept the metadata only, for the epoch after them.

    An expiry deletes the oldest epochs first. So an epoch is only damaged while an older one is
    left that no pin holds, or if it lacks a file that an epoch which stays lists.

    Args:
        epochs: the candidates and the epochs that stay, as far as they are readable.
        candidates: as `parents_kept` returns them.
        numbers: all visible epochs that are neither pinned nor candidates.

    Source: arroyo_dagster.state.planning.gc.expiry, `choose_expired`.
    """
    oldest = min(numbers, default=None)
    kept = {path for epoch in epochs if epoch.epoch not in candidates for path in epoch.listed}
    return frozenset(
        epoch.epoch
        for epoch in epochs
        if epoch.epoch in candidates
        and epoch.lost
        and not epoch.lost & kept
        and (oldest is None or epoch.epoch < oldest)
    )


def parents_kept(
    epochs: Iterable[Checkpoint],
    pinned: Collection[Epoch],
    newest: Checkpoint,
    expired_below: Epoch,
) -> dict[StatePath, Epoch]:
    """Return an epoch by the manifest of its parent, which an expiry keeps for it: the pinned ones.

    The parent of the newest epoch is left out, as all of it stays; unless an expiry has kept the
    newest alone.

    Args:
        epochs: those that are pinned, or were until the last expiry, and the newest.
        expired_below: the oldest epoch that the last expiry has kept.
    """
    alone = newest.epoch <= expired_below
    return {
        epoch.parent_ref: epoch.epoch
        for epoch in epochs
        if epoch.parent_ref is not None
        and (
            alone
            if epoch.epoch == newest.epoch
            else epoch.epoch in pinned and epoch.parent_ref not in (newest.ref, newest.parent_ref)
        )
    }


def lies_at_the_bucket_root(checkpoint: Checkpoint, missing: Iterable[StatePath]) -> bool:
    """Return whether the missing files are those that releases before v0.12 wrote outside the URL.

    These releases omitted the URL's prefix for files of expiring tables only, and wrote them at the
    root of the bucket.
    """
    expiring = {
        path
        for operator in checkpoint.operators
        for files in operator.tables.values()
        if isinstance(files, ExpiringTimeKeyFiles)
        for path in files.paths
    }
    others = any(path not in expiring for path in checkpoint.paths)
    legacy = checkpoint.worker_generation is None and checkpoint.progress is None
    return legacy and others and bool(expiring) and set(missing) == expiring


# ---- which epochs the newest one builds on, and which were rolled back ---------------------------


def rolled_back(
    newest: Epoch, epochs: Iterable[Epoch], restored: Mapping[Epoch, Epoch]
) -> frozenset[Epoch]:
    """Return the epochs that are neither `newest` nor its ancestors.

    Args:
        epochs: the existing epochs, in any order.
        restored: for each epoch that a rollback published, the epoch whose content it has.
    """
    left: set[Epoch] = set()
    ancestor = newest
    for epoch in sorted({*epochs}, reverse=True):
        if epoch > ancestor:
            left.add(epoch)
        else:
            ancestor = restored.get(epoch, Epoch(max(0, epoch - 1)))
    return frozenset(left)


def behind_pinned(epochs: Sequence[Epoch], pinned: Collection[Epoch]) -> tuple[Epoch, ...]:
    """Return the epochs after the last gap that follows a pinned epoch; all if there is none.

    Args:
        epochs: the existing epochs, ascending.
    """
    start = 0
    for index, (earlier, later) in enumerate(itertools.pairwise(epochs), start=1):
        if later - earlier > 1 and earlier in pinned:
            start = index
    return tuple(epochs[start:])
