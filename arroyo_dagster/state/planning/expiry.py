"""Which epochs of a job expire, and what goes with them.

Source: crates/arroyo-state-protocol/src/gc.rs, `classify_checkpoint_history`;
crates/arroyo-state/src/parquet.rs, `cleanup_checkpoint`; arroyo-state.md 9.5, 9.6, 9.8.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from arroyo_dagster.state.model.aliases import ReferencedPaths
from arroyo_dagster.state.model.collecting import (
    EpochRoot,
    GcPlan,
    PlanKind,
    Retention,
    Roots,
)
from arroyo_dagster.state.model.directory import JobAnswer
from arroyo_dagster.state.model.ids import Epoch, StatePath
from arroyo_dagster.state.model.layout import Layout
from arroyo_dagster.state.model.objects import Packed
from arroyo_dagster.state.planning.gc import LEGACY_EPOCHS_BEFORE_NEWEST
from arroyo_dagster.state.planning.permission import at_rest, check_clock, newest_restorable
from arroyo_dagster.state.planning.reachable import (
    check_whole,
    metadata_of,
    prove,
    records_of,
    referenced_by,
    refuse,
)


def plan_expiry(
    roots: Roots,
    retention: Retention,
    *,
    now_micros: int,
    answer: JobAnswer | None = None,
    listed_from: Epoch | None = None,
) -> GcPlan:
    """Choose what goes once only the epochs of `retention`, and pinned ones, stay.

    A file stays while an epoch which stays lists it, whichever wrote it. Always staying: the newest
    epoch and its parent, which recovery needs; in the legacy layout the ten before the newest,
    which Arroyo's own cleanup needs when the job starts again; of the parent of a pinned epoch what
    makes the pinned one restorable.

    Args:
        now_micros: the time that ages are taken from.
        answer: what is known of the job; needed for a job of Arroyo's, of which only one at rest
            has epochs that may go.
        listed_from: the newest epoch when the listing began, from which the plan will take what is
            there. It and those after it stay: the listing may show a part of them.

    Raises:
        ProtocolError: it is not known, or not allowed; says why, with the evidence.
    """
    if not roots.ours and not at_rest(roots, answer):
        raise refuse(
            "Arroyo itself expires the epochs of a job of its own that runs",
            roots.paths,
            next_step="collect its orphans, or stop it first; nothing was deleted",
        )
    check_clock(roots, now_micros)
    keep_from = oldest_staying(roots, retention, now_micros, answer)
    if listed_from is not None:
        keep_from = min(keep_from, listed_from)
    pinned = roots.retained.pinned
    stays = [one for one in roots.epochs if one.epoch >= keep_from or one.epoch in pinned]
    check_whole(roots, stays)
    staying = {one.epoch for one in stays}
    expired = [one for one in reversed(roots.epochs) if one.epoch not in staying]
    needed = _parents_of_pinned(roots)
    referenced = referenced_by(roots, (*stays, *roots.attempts))
    going = [one for one in expired if one.ref not in needed]
    paths = roots.paths
    return GcPlan(
        kind=PlanKind.EXPIRE,
        pipeline=paths.pipeline,
        job=paths.job,
        made_at_micros=now_micros,
        rule={"keep_epochs": retention.keep_epochs, "keep_micros": retention.keep_micros},
        proof=prove(roots, referenced, answer),
        keep_from=keep_from,
        epochs=tuple(one.epoch for one in going),
        data=Packed.of_paths(_listed_by_none(expired, referenced)),
        records=Packed.of_paths(p for one in going for p in records_of(paths, one)),
        metadata=Packed.of_paths(p for one in going for p in metadata_of(paths, one)),
    )


def oldest_staying(
    roots: Roots, retention: Retention, now_micros: int, answer: JobAnswer | None = None
) -> Epoch:
    """The oldest epoch that stays, pinned ones aside."""
    epochs = roots.epochs
    keeping = [one.epoch for one in epochs[: retention.keep_epochs or 0]]
    if retention.keep_micros is not None:
        since = now_micros - retention.keep_micros
        keeping += [one.epoch for one in epochs if one.finish_time_micros >= since]
    newest = newest_restorable(roots, answer)
    keeping += [one.epoch for one in _needed_by_recovery(epochs, newest)]
    oldest = min(keeping)
    if roots.paths.layout is Layout.LEGACY:
        return min(oldest, Epoch(max(0, newest - LEGACY_EPOCHS_BEFORE_NEWEST)))
    return oldest


def _needed_by_recovery(epochs: Sequence[EpochRoot], newest: Epoch) -> Sequence[EpochRoot]:
    """The newest epochs down to the one before `newest`: its parent must be ready."""
    after = [one for one in epochs if one.epoch >= newest]
    return epochs[: len(after) + 1]


def _parents_of_pinned(roots: Roots) -> frozenset[StatePath]:
    """The parents of all pinned epochs, young ones too: they grow old, and then it is too late."""
    pinned = roots.retained.pinned
    return frozenset(
        one.parent_ref for one in roots.epochs if one.epoch in pinned and one.parent_ref is not None
    )


def _listed_by_none(
    expired: Sequence[EpochRoot], referenced: ReferencedPaths
) -> Iterator[StatePath]:
    """The files of epochs, oldest first, that nothing which stays refers to.

    A file that skips an epoch comes twice: deleting it twice is no harm.
    """
    before: frozenset[str] = frozenset()
    new = str.__new__  # checked when they were read
    for one in expired:
        files = frozenset(one.files.texts)
        found = sorted(text for text in files - before if text not in referenced)
        # Where a file system ignores case, the file of another name may be one that stays.
        yield from (new(StatePath, text) for text in found if not referenced.resembles(text))
        before = files
