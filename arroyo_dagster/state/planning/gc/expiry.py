"""Which epochs of a job expire, and what is deleted with them; for gc and the job's own retention.

Source: crates/arroyo-state-protocol/src/gc.rs, `classify_checkpoint_history`;
crates/arroyo-state/src/parquet.rs, `cleanup_checkpoint`; arroyo-state.md 9.5, 9.6, 9.8.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from arroyo_dagster.state.model.aliases import ReferencedPaths
from arroyo_dagster.state.model.checkpoints import CheckpointState
from arroyo_dagster.state.model.garbage import EpochRoot, GcPlan, PlanKind, Retention, Roots
from arroyo_dagster.state.model.ids import Epoch, StatePath
from arroyo_dagster.state.model.job_facts import JobAnswer
from arroyo_dagster.state.model.layout import JobPaths, Layout
from arroyo_dagster.state.model.objects import NOTHING, ObjectKind, Packed, object_name
from arroyo_dagster.state.planning.gc.reachability import (
    check_inside,
    check_nothing_lost,
    check_readable,
    check_whole,
    metadata_of,
    prove,
    records_of,
    referenced_by,
    refuse,
)
from arroyo_dagster.state.planning.gc.safety_checks import at_rest, check_clock, newest_restorable
from arroyo_dagster.state.planning.restore.partially_collected import LEGACY_EPOCHS_BEFORE_NEWEST


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpirePlan:
    """The objects to delete when epochs expire; each step completes before the next begins.

    Attributes:
        keep_from: the oldest epoch that stays, not counting pinned ones.
        epochs: the epochs that expire, oldest first.
        data: data files that no epoch which stays lists.
        records: markers, subtask objects, notes and epoch records.
        metadata: the objects that refer to the others, oldest first, deleted last: an interrupted
            run leaves no gap in the chain of parents, and the next run finds the remaining objects.
    """

    keep_from: Epoch
    epochs: tuple[Epoch, ...] = ()
    data: Packed = NOTHING
    records: Packed = NOTHING
    metadata: Packed = NOTHING


def plan_expiry(
    roots: Roots,
    retention: Retention,
    *,
    now_micros: int,
    answer: JobAnswer | None = None,
    listed_from: Epoch | None = None,
) -> GcPlan:
    """Plan a gc run that expires the epochs which `choose_expired` chooses.

    Args:
        retention: with one epoch only if `retention_now` has allowed it.
        now_micros: the time, by the clock of the store, as the times of the epochs are.
        answer: the status of the job; required for an Arroyo job, whose epochs may only expire
            while it is at rest.
        listed_from: the newest epoch when the listing began that the plan will be matched against;
            None without a listing. It and later epochs stay: the listing may show them in part.

    Raises:
        ProtocolError: the status is unknown or forbids it; the message contains the evidence.
    """
    if not roots.managed and not at_rest(roots, answer):
        raise refuse(
            "epochs of a running Arroyo job cannot be expired here: Arroyo expires them itself",
            roots.paths,
            next_step="delete its orphans instead, or stop it first; nothing was deleted",
        )
    if retention.keep_micros is not None:
        # An Arroyo job is at rest here.
        check_clock(roots, now_micros, live=roots.managed)
    stays, keep_from = epochs_that_stay(
        roots,
        retention,
        newest=newest_restorable(roots, answer),
        now_micros=now_micros,
        answer=answer,
        listed_from=listed_from,
    )
    referenced = referenced_by(roots, (*stays, *roots.attempts))
    expired = choose_expired(roots, stays, keep_from, referenced)
    timeless = 0 if retention.keep_micros is None else sum(map(_timeless, stays))
    return GcPlan(
        kind=PlanKind.EXPIRE,
        pipeline=roots.paths.pipeline,
        job=roots.paths.job,
        made_at_micros=now_micros,
        rule={"keep_epochs": retention.keep_epochs, "keep_micros": retention.keep_micros},
        proof=prove(roots, referenced, answer),
        keep_from=expired.keep_from,
        epochs=expired.epochs,
        data=expired.data,
        records=expired.records,
        metadata=expired.metadata,
        stays={} if not timeless else {"no_time": (timeless, 0)},
    )


def why_epochs_stay(roots: Roots, retention: Retention, *, now_micros: int) -> str:
    """Say in one sentence why no epoch of a job expires; for each epoch the first reason counts.

    Args:
        now_micros: as in `plan_expiry`.
    """
    newest = {roots.head.epoch, *(r.epoch for r in roots.current[: retention.keep_epochs or 0])}
    pinned, oldest = roots.job_pins.pinned, roots.head.epoch - LEGACY_EPOCHS_BEFORE_NEWEST
    since = None if retention.keep_micros is None else now_micros - retention.keep_micros
    reasons = collections.Counter(
        "newest kept"
        if root.epoch in newest
        else "pinned"
        if root.epoch in pinned
        else "of unknown age"
        if since is not None and _timeless(root)
        else "younger than asked"
        if since is not None and (root.written_at_micros or 0) >= since
        else "of the ten before the newest, which Arroyo's cleanup reads"
        if roots.paths.layout is Layout.LEGACY and root.epoch >= oldest
        else "needed to restore a newer one"
        for root in roots.epochs
    )
    counts = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
    return f"{len(roots.epochs)} epochs, all needed: {counts}"


def plan_own_expiry(roots: Roots, min_epoch: Epoch) -> ExpirePlan:
    """Plan what a job's own retention deletes: the same as gc with this number of epochs kept.

    Args:
        roots: as the writer reads them; their newest epoch is the one that a start restores.
        min_epoch: the oldest epoch to keep if no epoch was rolled back.

    Raises:
        ProtocolError: `min_epoch` is newer than the newest epoch, or an epoch to keep is incomplete
            or cannot be read.
    """
    newest = roots.head.epoch
    if newest < min_epoch:
        raise refuse(
            "min_epoch is newer than the newest checkpoint",
            roots.paths,
            min_epoch=min_epoch,
            newest=newest,
        )
    stays, keep_from = epochs_that_stay(roots, retention_since(newest, min_epoch), newest=newest)
    referenced = referenced_by(roots, (*stays, *roots.attempts))
    return choose_expired(roots, stays, keep_from, referenced)


def retention_since(newest: Epoch, min_epoch: Epoch) -> Retention:
    """Return the retention of as many epochs as from `min_epoch` to `newest`, at least two."""
    return Retention(keep_epochs=max(2, newest - min_epoch + 1))


def epochs_that_stay(
    roots: Roots,
    retention: Retention,
    *,
    newest: Epoch,
    now_micros: int = 0,
    answer: JobAnswer | None = None,
    listed_from: Epoch | None = None,
) -> tuple[list[EpochRoot], Epoch]:
    """Return the epochs that stay, newest first, and the oldest of them, not counting pinned ones.

    These always stay: the newest epoch and its parent, which recovery needs; the parent of a
    checkpoint that a start would publish; pinned epochs; in the legacy layout the ten before the
    newest. If only one epoch is to be kept, the caller has proved that none but the newest can be
    restored: then its parent goes, but for its metadata, which a start reads.

    Args:
        newest: the newest epoch that a start can certainly choose.
        now_micros, answer, listed_from: as in `plan_expiry`.

    Raises:
        ProtocolError: metadata is lost, an epoch that stays is incomplete, or one cannot be read
            while others expire.
    """
    check_inside(roots)
    keep_from = oldest_staying(roots, retention, newest=newest, now_micros=now_micros)
    if listed_from is not None:
        keep_from = min(keep_from, listed_from)
    pinned = roots.job_pins.pinned
    recovery = {root.ref for root in _needed_by_recovery(roots, retention, newest)}
    stays = [
        root
        for root in roots.epochs
        if root.epoch >= keep_from or root.epoch in pinned or root.ref in recovery
    ]
    check_whole(roots, stays)
    check_nothing_lost(roots, answer)
    if len(stays) < len(roots.epochs):
        check_readable(roots, stays)
    return stays, keep_from


def choose_expired(
    roots: Roots, stays: Sequence[EpochRoot], keep_from: Epoch, referenced: ReferencedPaths
) -> ExpirePlan:
    """Choose what is deleted with the epochs that do not stay.

    A file stays while any epoch that stays lists it, whichever epoch wrote it. The metadata of the
    parents of the newest epoch and of pinned ones stays, because a restore of these needs it.

    Args:
        referenced: every file that an epoch or record which stays refers to.
    """
    staying = {root.epoch for root in stays}
    expired = [root for root in reversed(roots.epochs) if root.epoch not in staying]
    needed = _parents_of_pinned(roots) | {roots.head.parent_ref}
    going = [root for root in expired if root.ref not in needed]
    paths = roots.paths
    return ExpirePlan(
        keep_from=keep_from,
        epochs=tuple(root.epoch for root in going),
        data=Packed.of_paths(_listed_by_none(expired, referenced)),
        records=Packed.of_paths(p for root in going for p in records_of(paths, root)),
        metadata=Packed.of_paths(p for root in going for p in metadata_of(paths, root)),
    )


def in_safe_groups(paths: JobPaths, metadata: Iterable[StatePath]) -> Iterator[list[StatePath]]:
    """Yield the metadata of expired epochs, oldest first, in groups that one request may delete.

    An interruption must never remove a newer manifest before an older one. In the legacy layout the
    operators of one epoch may be deleted in any order.
    """
    operators: list[StatePath] = []
    for path in metadata:
        if object_name(paths, path).kind is ObjectKind.OPERATOR:
            operators.append(path)
            continue
        if operators:
            yield operators
        yield [path]
        operators = []
    if operators:
        yield operators


def oldest_staying(
    roots: Roots, retention: Retention, *, newest: Epoch, now_micros: int = 0
) -> Epoch:
    """Return the oldest epoch that stays, not counting pinned ones and the parent of an epoch that
    a rollback published.

    Rolled-back epochs do not count towards `keep_epochs`, so that this many restorable epochs stay.
    While there are fewer, rolled-back epochs stay that are among the newest by number.

    Args:
        newest: the newest epoch that a start can certainly choose.
    """
    keeping = [root.epoch for root in roots.current[: retention.keep_epochs or 0]]
    if retention.keep_epochs is not None:
        lowest = roots.epochs[0].epoch - retention.keep_epochs + 1
        readable = [root.epoch for root in roots.epochs if root.unreadable is None]
        keeping += readable[: min(2, retention.keep_epochs)]
        keeping += [epoch for epoch in readable if epoch >= lowest]
    if retention.keep_micros is not None:
        since = now_micros - retention.keep_micros
        pinned = roots.job_pins.pinned
        keeping += [
            root.epoch
            for root in roots.epochs
            if root.epoch not in pinned
            and (_timeless(root) or (root.written_at_micros or 0) >= since)
        ]
    needed = _needed_by_recovery(roots, retention, newest)
    # The parent of an unclaimed checkpoint may have been rolled back. Without a gap above it and
    # above what recovery needs then, later plans find it.
    parents = _parents_of_unclaimed(roots)
    keeping += [root.epoch for root in parents]
    keeping += [
        root.epoch for root in needed if parents or not roots.behind_rollback(Epoch(root.epoch + 1))
    ]
    oldest = min(keeping)
    if roots.paths.layout is Layout.LEGACY:
        return min(oldest, Epoch(max(0, newest - LEGACY_EPOCHS_BEFORE_NEWEST)))
    return oldest


def _timeless(one: EpochRoot) -> bool:
    """Return whether the age of an epoch is unknown; it then stays, unless it is incomplete."""
    return not one.written_at_micros and not one.gone


def _needed_by_recovery(roots: Roots, retention: Retention, newest: Epoch) -> Sequence[EpochRoot]:
    """Return the newest epochs down to the parent of `newest`, which must be ready."""
    if retention.keep_epochs == 1:
        return ()
    after = [root for root in roots.current if root.epoch >= newest]
    needed = roots.current[: len(after) + 1]
    # The parent by reference too: after a rollback it may be much older than the newest.
    parent = {roots.head.parent_ref}.difference(root.ref for root in needed)
    return (*needed, *(root for root in roots.epochs if root.ref in parent))


def _parents_of_unclaimed(roots: Roots) -> list[EpochRoot]:
    """Return the epochs that a start needs to publish a checkpoint whose writer ended before."""
    parents = {
        root.parent_ref
        for root in roots.attempts
        if root.state is CheckpointState.UNCLAIMED and root.epoch > roots.head.epoch
    }
    return [root for root in roots.epochs if root.ref in parents]


def _parents_of_pinned(roots: Roots) -> frozenset[StatePath]:
    """Return the parents of all pinned epochs, also of recent ones, to keep them later."""
    pinned = roots.job_pins.pinned
    return frozenset(
        root.parent_ref
        for root in roots.epochs
        if root.epoch in pinned and root.parent_ref is not None
    )


def _listed_by_none(
    expired: Sequence[EpochRoot], referenced: ReferencedPaths
) -> Iterator[StatePath]:
    """Yield the files of expired epochs, oldest first, that nothing which stays refers to.

    A file that skips an epoch is yielded twice; deleting it twice is harmless.
    """
    before: frozenset[str] = frozenset()
    new = str.__new__  # checked when they were read
    for root in expired:
        files = frozenset(root.files.texts)
        unlisted = sorted(text for text in files - before if text not in referenced)
        # On a file system that ignores case, a similar name may denote a file that stays.
        yield from (new(StatePath, text) for text in unlisted if not referenced.resembles(text))
        before = files
