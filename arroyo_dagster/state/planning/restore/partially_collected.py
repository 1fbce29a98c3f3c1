"""Which epochs a cleanup has half removed, and which are damaged: both list what is gone.

A cleanup deletes oldest epochs first: data that no kept epoch lists, then what says that the epoch
exists, the object that refers to all others last. Stopped half way it leaves epochs of which
something is gone, all of them older than any it keeps; the next cleanup finishes them.

Source: crates/arroyo-state/src/parquet.rs, `cleanup_checkpoint`;
crates/arroyo-state-protocol/src/gc.rs; arroyo-state.md 9.5 and 9.6.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.ids import Epoch, StatePath
from arroyo_dagster.state.model.tables import ExpiringTimeKeyFiles
from arroyo_dagster.state.planning.gc.expiry import LEGACY_EPOCHS_BEFORE_NEWEST

ARROYO_KEEPS_LEGACY = 4
"""Epochs before the newest that no release's own cleanup touches: 4 up to v0.15, 10 since."""

ARROYO_KEEPS_PROTOCOL = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Remains:
    """What one epoch lists, and what of that is gone.

    Attributes:
        listed: the data files it lists.
        lost: of these, and of the objects of its metadata, those that are not there.
    """

    epoch: Epoch
    listed: frozenset[StatePath]
    lost: frozenset[StatePath]


def collected_before(newest: Checkpoint) -> Epoch:
    """The oldest epoch that no cleanup can have touched, as long as `newest` is the newest.

    Cleanups of ours keep the newest and its parent, in the legacy layout the ten before the newest.
    """
    legacy = newest.worker_generation is None
    if newest.progress is None:
        kept = ARROYO_KEEPS_LEGACY if legacy else ARROYO_KEEPS_PROTOCOL
    else:
        kept = LEGACY_EPOCHS_BEFORE_NEWEST if legacy else 1
    return Epoch(max(0, newest.epoch - kept))


def partially_collected(epochs: Sequence[Remains], newest: Checkpoint) -> frozenset[Epoch]:
    """Choose the epochs of which a cleanup explains all that is gone. The others are damaged.

    Args:
        epochs: every epoch that can be read, in any order.
        newest: the newest of them.
    """
    before = collected_before(newest)
    kept = {path for one in epochs if one.epoch >= before for path in one.listed}
    return frozenset(
        one.epoch for one in epochs if one.epoch < before and one.lost and not one.lost & kept
    )


def lies_at_the_bucket_root(checkpoint: Checkpoint, missing: Iterable[StatePath]) -> bool:
    """Whether what is missing is what releases before v0.12 wrote outside of the URL's prefix.

    They forgot the prefix for the files of expiring tables, and for none of the others.
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
