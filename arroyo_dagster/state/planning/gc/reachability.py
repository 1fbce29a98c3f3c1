"""Which objects are referenced: consistency checks of the facts read, and a plan's proof.

Contradictory or incomplete facts are refused with the evidence, so that gc never deletes on an
incomplete view.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from arroyo_dagster.errors import ProtocolError
from arroyo_dagster.state.model.aliases import (
    PathsDigest,
    ReferencedPaths,
    fold,
    fold_numbers,
    second_names,
)
from arroyo_dagster.state.model.checkpoints import CheckpointState, LostObject
from arroyo_dagster.state.model.garbage import MARGIN_MICROS, EpochRoot, Proof, Root, Roots
from arroyo_dagster.state.model.ids import Epoch, StatePath
from arroyo_dagster.state.model.job_facts import JobAnswer
from arroyo_dagster.state.model.layout import (
    CURRENT_GENERATION,
    JobPaths,
    Layout,
    is_compacted,
    is_rewritten,
    parse_manifest_path,
    written_epoch,
)
from arroyo_dagster.state.model.objects import Packed, StoredObject
from arroyo_dagster.state.planning.restore.lost_metadata import (
    EpochObjects,
    lost_epochs,
    lost_metadata,
)
from arroyo_dagster.state.planning.restore.partially_collected import collected_before
from arroyo_dagster.state.planning.restore.recovery import marker_path

NOTHING_DELETED = "check it with `arroyo-state verify`; nothing was deleted"


def refuse(reason: str, paths: JobPaths, **facts: object) -> ProtocolError:
    """Return the error that states why gc deletes nothing of a job, with the evidence."""
    next_step = facts.pop("next_step", NOTHING_DELETED)
    assert isinstance(next_step, str)
    evidence: dict[str, object] = {"job": paths.root, **facts}
    return ProtocolError(f"gc refused: {reason}", next_step=next_step, **evidence)  # type: ignore[arg-type]


# ---- checks --------------------------------------------------------------------------------------


def check_roots(roots: Roots) -> None:
    """Check that the roots of a job are complete and consistent.

    Raises:
        ProtocolError: the job has no epoch; the chain of epochs has a gap or is out of order; a
            pinned epoch is missing; an epoch lists a file outside of its job.
    """
    if not roots.epochs:
        raise refuse("the job has no epoch, so it is unknown which objects are needed", roots.paths)
    missing = sorted(roots.job_pins.pinned - {root.epoch for root in roots.epochs})
    if missing:
        raise refuse(
            f"the pinned epoch {missing[0]} does not exist",
            roots.paths,
            epoch=missing[0],
            next_step="find out what deleted it, or unpin it with `arroyo-state unpin`; nothing "
            "was deleted",
        )
    check_inside(roots)
    for root in roots.attempts:
        if root.state is CheckpointState.READY:
            raise refuse(
                f"unexplained gap in the chain of epochs: epoch {root.epoch} exists, but no later "
                "epoch refers to it",
                roots.paths,
                path=root.ref,
            )
    for newer, older in itertools.pairwise(roots.current):
        if older.epoch >= newer.epoch:
            raise refuse(
                f"the chain of epochs is out of order: epoch {newer.epoch} follows epoch "
                f"{older.epoch}",
                roots.paths,
                path=older.ref,
            )
        gap = older.epoch not in (newer.epoch - 1, newer.rolled_back_to)
        if gap and not _may_follow_a_gap(roots, older.epoch, newer.epoch):
            raise refuse(
                f"unexplained gap in the chain of epochs: epoch {older.epoch} exists, but "
                f"{older.epoch + 1} is missing",
                roots.paths,
                path=older.ref,
                newer=newer.ref,
            )


def _may_follow_a_gap(roots: Roots, epoch: Epoch, newer: Epoch) -> bool:
    """Return whether a gap between this epoch and the next newer one is legitimate."""
    if roots.paths.layout is Layout.LEGACY and not roots.managed:
        # A run that ignored the state leaves older epochs unchanged (arroyo-state.md 9.6). Then no
        # object at all is between them; reads by name confirmed it, not only a listing. Remains of
        # an interrupted cleanup below `min_epoch` do not count; they stay.
        kept = max(epoch + 1, roots.head.min_epoch)
        return not any(kept <= root.epoch < newer for root in roots.attempts)
    pinned = roots.job_pins.ever_pinned
    # Below a pinned epoch are its parent's metadata, and the remains of an unfinished gc run.
    return any(pin >= epoch for pin in pinned)


def check_inside(roots: Roots) -> None:
    """Check that no epoch, and no attempt at one, lists a file outside of its job.

    Raises:
        ProtocolError: one lists such a file.
    """
    for root in (*roots.epochs, *roots.attempts):
        if root.outside is not None:
            raise refuse(
                f"epoch {root.epoch} lists a file outside of its job: two deployments may overlap",
                roots.paths,
                path=root.ref,
                reference=root.outside,
            )


def check_whole(roots: Roots, stays: Iterable[EpochRoot]) -> None:
    """Check that no metadata object of the epochs that stay is missing.

    Raises:
        ProtocolError: a metadata object is missing.
    """
    for root in stays:
        if root.gone:
            raise refuse(
                f"epoch {root.epoch} is to be kept, but {len(root.gone)} of its objects are "
                "missing",
                roots.paths,
                path=root.gone[0],
                epoch=root.epoch,
            )


def check_nothing_lost(roots: Roots, answer: JobAnswer | None = None) -> None:
    """Check that no metadata object is lost or damaged: it is unknown which files it lists.

    Args:
        answer: the status of an Arroyo job, which may name an epoch that the store lacks; None if
            only this package deletes epochs of the job.

    Raises:
        ProtocolError: an object is lost or damaged.
    """
    lost = lost_objects(roots, answer)
    if lost:
        first = lost[0]
        raise refuse(
            f"metadata of epoch {first.epoch} is lost or damaged, so it is unknown which files it "
            f"lists: {first.path}: {first.reason}"
            + (f", and {len(lost) - 1} more" if lost[1:] else ""),
            roots.paths,
            path=first.path,
            epoch=first.epoch,
            next_step="restore the object from a copy"
            + (
                ""
                if roots.managed
                else f", or write it again: `arroyo-state rebuild {roots.paths.root} {first.epoch}`"
            )
            + "; nothing was deleted",
        )


def lost_objects(roots: Roots, answer: JobAnswer | None = None) -> list[LostObject]:
    """Return the metadata objects of a job that are lost or damaged, newest epochs first.

    Objects that do not decode, or belong to another epoch or job, are errors of reading the roots.
    """
    paths, head = roots.paths, roots.head
    legacy = paths.layout is Layout.LEGACY
    kept = kept_beside(roots)
    epochs = [_objects_of(paths, root) for root in roots.current]
    facts = None if roots.managed or answer is None else answer.facts
    whole_from = collected_before(head.epoch, legacy=legacy, managed=facts is None)
    lost = list(roots.cut)
    if facts is not None:
        whole_from = max(whole_from, roots.job_pins.expired_below)
        lost += () if legacy else _lost_parent(roots, whole_from)
    if roots.lost is not None:
        address = parse_manifest_path(roots.lost)
        number = head.epoch if address is None else address.epoch
        lost += [LostObject(number, roots.lost, "the newest run published it, and it is missing")]
    if legacy and facts is not None:
        named = facts.newest_ready_epoch if facts.condition.at_rest else None
        if named is not None and named > head.epoch:
            reason = f"{facts.source} names the epoch as ready, and the store lacks it"
            lost.append(LostObject(named, paths.legacy_metadata(named), reason))
        lost += [
            LostObject(number, paths.legacy_metadata(number), "all others of its run exist")
            for number in lost_epochs(epochs, head.min_epoch, whole_from, kept)
        ]
    lost += lost_metadata(epochs, whole_from=whole_from, kept=kept)
    managed = [root for root in roots.current if root.managed]
    lost += [
        LostObject(root.epoch, root.ref, "it lacks the progress of its sources, cut off at its end")
        for root in roots.current
        if managed and not root.managed and root.epoch > managed[-1].epoch
    ]
    return sorted(lost, key=lambda loss: -loss.epoch)


def _lost_parent(roots: Roots, whole_from: Epoch) -> Iterator[LostObject]:
    """Yield the manifest at which the chain of an Arroyo job ends, if no cleanup has reached it."""
    oldest = roots.head
    for older in roots.current:
        if older.ref == oldest.parent_ref:
            oldest = older
    ref = oldest.parent_ref
    address = None if ref is None else parse_manifest_path(ref)
    if ref is not None and address is not None and address.epoch >= max(1, whole_from):
        reason = f"epoch {oldest.epoch} names it as its parent, and it is missing"
        yield LostObject(address.epoch, ref, reason)


def epoch_directories(roots: Roots) -> Iterator[tuple[EpochRoot, Epoch, bool]]:
    """Yield each epoch with the numbers of the directories in which it may have written its files,
    and whether another run may have written there, before or afterwards.

    A run of Arroyo that ignored the state counts from 1 (arroyo-state.md 1.5): its first epoch is
    the one behind `min_epoch`. Every epoch has files in a directory of its own, those of global
    keyed tables, unless its metadata is cut: so how far the numbers are apart shows in two epochs.
    """
    arroyo = roots.paths.layout is Layout.LEGACY and not roots.managed
    last = {root.ref: max(_directories(root), default=None) for root in roots.current if arroyo}
    newest = roots.current[: 2 if arroyo else 0]
    apart = min((root.epoch - (last[root.ref] or 0) for root in newest), default=0)
    first = {root.epoch for root in roots.current if arroyo and root.epoch == root.min_epoch + 1}
    for root in roots.current:
        numbers = {root.epoch, root.epoch - apart, *([1] if root.epoch in first else [])}
        numbers |= {last[root.ref] or root.epoch} if arroyo else set()
        shared = arroyo and (root is not roots.head or apart > 0 or bool(first - {1}))
        yield from ((root, Epoch(number), shared) for number in sorted(numbers) if number > 0)


def written_with(one: EpochRoot, stored: StoredObject, by_micros: int | None = None) -> bool:
    """Return whether an object was written while its epoch was, within a margin, and not later
    than `by_micros`, when the store wrote the object that makes the epoch exist.
    """
    written, last = stored.modified_micros, one.finish_time_micros + MARGIN_MICROS
    if written is None or (by_micros is not None and written > by_micros):
        return False
    return one.start_time_micros - MARGIN_MICROS <= written <= last


def _directories(one: EpochRoot) -> set[Epoch]:
    """Return the numbers of the directories in which subtasks wrote an epoch's files.

    Arroyo's compaction, and this package, write into the directory of the controller's epoch,
    whatever the workers count (arroyo-state.md 1.1).
    """
    texts = one.files.texts
    written = (written_epoch(p) for p in texts if not (is_compacted(p) or is_rewritten(p)))
    return {number for number in written if number is not None}


def kept_beside(roots: Roots) -> frozenset[Epoch]:
    """Return the epochs that outlive newer ones: those that were pinned, and their parents."""
    pinned = roots.job_pins.ever_pinned
    parents = {root.parent_ref for root in roots.epochs if root.epoch in pinned}
    return pinned | {root.epoch for root in roots.epochs if root.ref in parents}


def _objects_of(paths: JobPaths, one: EpochRoot) -> EpochObjects:
    if paths.layout is Layout.PROTOCOL:
        # A cleanup deletes the records of several epochs at once, in any order.
        objects = {f"record {one.epoch}": paths.epoch_record(one.epoch)}
    else:
        objects = {name: paths.operator_metadata(name, one.epoch) for name, _ in one.operators}
    return EpochObjects(
        epoch=one.epoch,
        objects=objects,
        missing=[name for name, path in objects.items() if path in one.gone],
        min_epoch=one.min_epoch,
        directories=partial(_directories, one),
    )


def check_readable(roots: Roots, stays: Iterable[EpochRoot]) -> None:
    """Check that the file lists of all epochs that stay can be read.

    Raises:
        ProtocolError: a rolled-back epoch is unreadable; it must expire first.
    """
    for root in stays:
        if root.unreadable is not None:
            raise refuse(
                f"epoch {root.epoch}, which was rolled back, cannot be read, so it is unknown "
                f"what it lists: {root.unreadable}",
                roots.paths,
                epoch=root.epoch,
                path=root.ref,
                next_step="run the job until an expiry that keeps only newer epochs removes this "
                "one; nothing was deleted",
            )


def check_listed(paths: JobPaths, unlisted: Sequence[StatePath]) -> None:
    """Check that a listing is complete: a truncated listing proves nothing.

    Args:
        unlisted: objects that existed before the listing and exist now, but were not listed.

    Raises:
        ProtocolError: `unlisted` is not empty.
    """
    if unlisted:
        raise refuse(
            f"the listing is incomplete: {len(unlisted)} metadata objects exist but were not "
            "listed",
            paths,
            path=unlisted[0],
            next_step="check the store and any proxy in front of it, then try again",
        )


def check_aliases(roots: Roots, foreign: Packed, known: Iterable[StoredObject]) -> None:
    """Check that no foreign name may be a second name of an object of the job.

    The copy of a directory has such names (`generations/01`, `Checkpoints`). It is unknown whether
    both names denote the same objects, so gc refuses the job.

    Args:
        foreign: the foreign objects below the job, as listed.
        known: the others, as listed.

    Raises:
        ProtocolError: a foreign name may be a second name.
    """
    aliases = second_names(foreign.paths, roots.paths.root)
    if not aliases:
        return
    root = f"{roots.paths.root}/"
    referenced = (path for epoch in (*roots.epochs, *roots.attempts) for path in epoch.files.texts)
    for path in itertools.chain((entry.path for entry in known), referenced):
        alias = aliases.get(fold_numbers(path.removeprefix(root)))
        if alias is not None and alias != path:
            raise refuse(
                f"{alias} may be a second name of {path}",
                roots.paths,
                path=alias,
                next_step="move the copy out of the job's directory; nothing was deleted",
            )


def nested_root(paths: JobPaths, path: str) -> bool:
    """Return whether an object below a job belongs to another job that is nested in it."""
    rest = path.removeprefix(f"{paths.root}/").split("/")
    for index, name in enumerate(rest):
        if name == CURRENT_GENERATION and index:
            return True
        follows = rest[index + 1 : index + 2]
        nested = name == "checkpoints" and follows and follows[0].startswith("checkpoint-")
        own = index == 0 or (index == 2 and fold(rest[0]) == "generations")
        if nested and not own:
            return "operator-" not in "/".join(rest[:index])
    return bool(rest) and rest[0] == "checkpoints" and paths.layout is Layout.PROTOCOL


# ---- the objects of an epoch ---------------------------------------------------------------------


def records_of(paths: JobPaths, one: EpochRoot) -> Iterator[StatePath]:
    """Yield the objects that describe an epoch without listing files."""
    if one.unreadable is not None:
        return
    for name, parallelism in one.operators:
        for index in range(parallelism if one.managed else 0):
            yield paths.subtask_metadata(name, index, one.epoch, one.worker_generation)
    if paths.layout is Layout.PROTOCOL:
        if one.needs_commit:
            yield marker_path(one.ref)
        yield paths.epoch_record(one.epoch)
    elif one.managed and one.needs_commit:
        yield paths.commit_note(one.epoch)


def metadata_of(paths: JobPaths, one: EpochRoot) -> Iterator[StatePath]:
    """Yield the objects that list the files of an epoch; the one that makes it exist comes last."""
    if one.unreadable is not None:
        yield from one.by_name
        return
    if paths.layout is Layout.LEGACY:
        for name, _ in one.operators:
            yield paths.operator_metadata(name, one.epoch)
    yield one.ref


# ---- the proof -----------------------------------------------------------------------------------


def referenced_by(roots: Roots, stays: Iterable[EpochRoot], below: str = "") -> ReferencedPaths:
    """Return every data file that epochs which stay, compactions or quarantines refer to.

    Args:
        stays: the epochs and attempts that stay.
        below: a prefix of paths; other files are left out.
    """
    referenced = ReferencedPaths(roots.paths.root)
    before: frozenset[str] = frozenset()
    for root in stays:
        files = frozenset(text for text in root.files.texts if text.startswith(below))
        referenced.add(files - before)
        before = files
    others = (*roots.compactions.values(), *(aside.needs for aside in roots.quarantined))
    for packed in others:
        referenced.add(text for text in packed.texts if text.startswith(below))
    return referenced


def prove(
    roots: Roots,
    referenced: PathsDigest,
    answer: JobAnswer | None = None,
    listed: int | None = None,
) -> Proof:
    """Build the proof of which files are referenced."""
    facts = None if answer is None else answer.facts
    condition = None if facts is None else f"{facts.condition.value} ({facts.source})"
    return Proof(
        roots=tuple(sorted(roots.read, key=_by_path)),
        epochs=len(roots.epochs),
        referenced=len(referenced),
        digest=referenced.hexdigest,
        head=roots.head.ref if roots.epochs else None,
        worker_generation=roots.worker_generation,
        run_id=None if facts is None else facts.run_id,
        condition=condition,
        listed=listed,
    )


def _by_path(root: Root) -> str:
    return root.path
