"""Which objects of a job are unreferenced, and whether each may be deleted, with the reason.

An unreferenced file may be referenced soon. While a job's writer may be running, a file is deleted
only under the conditions of arroyo-state.md 9.8.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from arroyo_dagster.state.model.aliases import PathsDigest, ReferencedPaths
from arroyo_dagster.state.model.checkpoints import CheckpointState
from arroyo_dagster.state.model.garbage import MARGIN_MICROS, EpochRoot, GcPlan, PlanKind, Roots
from arroyo_dagster.state.model.ids import Epoch, StatePath, WorkerGeneration
from arroyo_dagster.state.model.job_facts import JobAnswer
from arroyo_dagster.state.model.layout import Layout, parse_manifest_path
from arroyo_dagster.state.model.objects import (
    ObjectKind,
    ObjectName,
    Packed,
    StoredObject,
    object_name,
)
from arroyo_dagster.state.planning.gc.reachability import (
    check_nothing_lost,
    check_readable,
    prove,
    referenced_by,
)
from arroyo_dagster.state.planning.gc.safety_checks import at_rest, check_clock, checked_grace

FOREIGN_LISTED = 1000


class Reason(enum.Enum):
    """Why an object stays or may be deleted."""

    REFERENCED = "an epoch that stays references it"
    METADATA = "it describes epochs or generations that stay"
    MAINTENANCE = "it belongs to maintenance (leases, journal, pins, quarantine)"
    ALIAS = "its name differs from a referenced one only by case, Unicode form or trailing dots"
    FOREIGN = "neither Arroyo nor this package creates such names"
    NO_TIME = "the store reports no modification time"
    YOUNG = "it is younger than the grace period"
    UNCOMMITTED = "its epoch may still be committed"
    IN_FLIGHT = "it may belong to an epoch in flight: it is not older than the newest epoch"
    MAY_COME_AGAIN = "a later attempt may write the same name again"
    MERGED_LATELY = "it was merged lately; the next epochs may still reference it"
    RESTORED_FROM = "the current run was restored from its epoch and may still read it"
    NEWER = "it is not in the listing: newer, or not complete there"
    CHANGED = "it has changed since the listing was made"
    UNDECIDED = "nothing references it; whether it may be deleted is not known"
    ORPHAN = "nothing references it"
    LOST = "another checkpoint owns its epoch"
    OLD_GENERATION = "its worker generation is too old to be restored"

    @property
    def goes(self) -> bool:
        """Whether an object may be deleted for this reason."""
        return self in (Reason.ORPHAN, Reason.LOST, Reason.OLD_GENERATION)


@dataclass(frozen=True, slots=True, kw_only=True)
class OrphanRules:
    """The facts that decide whether an object may be deleted.

    Attributes:
        referenced: the files that epochs and attempts which stay, compactions, and quarantines
            refer to.
        live: whether a writer may be running.
        began_micros: when the newest epoch began, by the clock of the store, less a margin.
        newest_written: the highest number of a directory in which the newest epoch wrote; None if
            it wrote no file, or if a run may be writing all names again.
        owned: the directories of epochs that stay.
        restored: the directory of the epoch that the run was restored from.
        lost: manifests that own no epoch and may be deleted.
    """

    roots: Roots
    referenced: ReferencedPaths
    live: bool
    now_micros: int
    grace_micros: int
    began_micros: int
    newest_written: Epoch | None
    owned: frozenset[tuple[WorkerGeneration | None, Epoch]]
    restored: tuple[WorkerGeneration, Epoch] | None
    lost: frozenset[StatePath]


def standing_of(
    roots: Roots,
    metadata: Iterable[StoredObject],
    *,
    now_micros: int,
    grace_micros: int,
    answer: JobAnswer | None = None,
    in_parts: bool = False,
) -> OrphanRules:
    """Collect the facts that decide about every object of a job.

    Args:
        metadata: the metadata objects of the job, as listed.
        now_micros: the time, by the clock of the store.
        in_parts: leave `referenced` empty; `judge_below` computes it for one directory at a time.

    Raises:
        InputError: a grace period below the floor, or negative.
        ProtocolError: the job's status is unknown, a clock is wrong, or an epoch is unreadable.
    """
    checked_grace(grace_micros)
    check_nothing_lost(roots, answer)
    check_readable(roots, roots.epochs)
    live = not at_rest(roots, answer)
    check_clock(roots, now_micros, live=live)
    times = {entry.path: entry.modified_micros for entry in metadata}
    old = now_micros - grace_micros
    lost = frozenset(root.ref for root in roots.attempts if _may_go(roots, root, live, times, old))
    stays = [*roots.epochs, *(root for root in roots.attempts if root.ref not in lost)]
    address = None if roots.restored is None else parse_manifest_path(roots.restored)
    return OrphanRules(
        roots=roots,
        referenced=ReferencedPaths(roots.paths.root) if in_parts else referenced_by(roots, stays),
        live=live,
        now_micros=now_micros,
        grace_micros=grace_micros,
        began_micros=_began(roots.head),
        newest_written=None if live and _may_begin_again(roots, answer) else _newest_written(roots),
        owned=frozenset((root.worker_generation, root.epoch) for root in stays),
        restored=None if address is None else (address.worker_generation, address.epoch),
        lost=lost,
    )


def _may_go(
    roots: Roots, one: EpochRoot, live: bool, times: Mapping[StatePath, int | None], old: int
) -> bool:
    """Return whether a manifest that owns no epoch is no longer needed and may be deleted."""
    if one.worker_generation is None or not times.get(one.ref):
        return False
    # Its generation manifest goes first: without the manifest that it names as the latest one, it
    # would show that metadata is lost.
    generation = roots.paths.generation_manifest(one.worker_generation)
    if any(time and time > old for time in map(times.get, (one.ref, generation))):
        return False
    if live and not roots.managed:
        return False  # the metadata of a running Arroyo job belongs to Arroyo
    read_by_a_start = any(root.path == one.ref for root in roots.more)
    past = one.epoch <= roots.head.epoch and not read_by_a_start
    fenced = roots.worker_generation is not None and one.worker_generation < roots.worker_generation
    lost = one.state is CheckpointState.ORPHANED or one.state is CheckpointState.UNCLAIMED
    return past and lost and (fenced or not live)


def _began(head: EpochRoot) -> int:
    """Return when the newest epoch began, by the clock that is behind; 0 if unknown."""
    duration = max(0, head.finish_time_micros - head.start_time_micros)
    began = (head.oldest_object_micros or 0) - duration
    return max(0, min(began, head.start_time_micros) - MARGIN_MICROS)


def _may_begin_again(roots: Roots, answer: JobAnswer | None) -> bool:
    """Return whether a running Arroyo job in the legacy layout may have started without its state.

    Such a run writes into directories from number 1 on. Until it has an epoch of its own, its
    status source names no old epoch as ready. A database may be one epoch behind the store.
    """
    if roots.paths.layout is not Layout.LEGACY or roots.managed:
        return False
    newest = None if answer is None else answer.facts.newest_ready_epoch
    return newest is None or newest not in [root.epoch for root in roots.epochs[:2]]


def _newest_written(roots: Roots) -> Epoch | None:
    """Return the highest directory number of files that only the newest epoch lists, or None."""
    before = frozenset(roots.epochs[1].files.paths) if len(roots.epochs) > 1 else frozenset()
    own = (path for path in roots.head.files.paths if path not in before)
    numbers = [object_name(roots.paths, path).epoch for path in own]
    return max((number for number in numbers if number is not None), default=None)


def reason_of(standing: OrphanRules, one: StoredObject, name: ObjectName) -> Reason:
    """Return why an object stays or may be deleted.

    Args:
        name: its parsed name; see `object_name`.
    """
    if name.kind is ObjectKind.FOREIGN:
        # Files of an operator with a slash in its id are identified only by metadata.
        return Reason.REFERENCED if one.path in standing.referenced else Reason.FOREIGN
    if name.kind is ObjectKind.MAINTENANCE:
        return Reason.MAINTENANCE
    if name.kind is ObjectKind.DATA and one.path in standing.referenced:
        return Reason.REFERENCED
    if name.kind in (ObjectKind.DATA, ObjectKind.SUBTASK):
        reason = _reason_of_file(standing, one, name)
        alias = reason.goes and standing.referenced.resembles(one.path)
        return Reason.ALIAS if alias else reason
    if name.kind is ObjectKind.STAGED:
        return _reason_of_staged(standing, one, name)
    if name.kind is ObjectKind.MANIFEST and one.path in standing.lost:
        return Reason.LOST
    if name.kind is ObjectKind.GENERATION:
        return _reason_of_generation(standing, one, name)
    return Reason.METADATA


def _reason_of_file(standing: OrphanRules, one: StoredObject, name: ObjectName) -> Reason:
    place = (name.worker_generation, name.epoch)
    if name.kind is ObjectKind.SUBTASK and place in standing.owned:
        return Reason.METADATA
    young = _young(standing, one)
    if young is not None:
        return young
    if place == standing.restored:
        return Reason.RESTORED_FROM
    if standing.live:
        return _reason_while_live(standing, one, name)
    return Reason.MAY_COME_AGAIN if _next_of_legacy(standing, name) else Reason.ORPHAN


def _reason_of_staged(standing: OrphanRules, one: StoredObject, name: ObjectName) -> Reason:
    """Return the reason for a staged sink file; those before the newest epoch are not needed.

    A run commits an epoch before it publishes the next one, and commits the newest again when it
    starts."""
    assert name.epoch is not None
    if name.epoch >= standing.roots.head.epoch:
        return Reason.UNCOMMITTED
    return _young(standing, one) or Reason.ORPHAN


def _next_of_legacy(standing: OrphanRules, name: ObjectName) -> bool:
    """Return whether the next epoch of a job at rest, which may start any time, uses the name."""
    if standing.roots.paths.layout is not Layout.LEGACY:
        return False
    newest = standing.newest_written or standing.roots.head.epoch
    return name.epoch is not None and name.epoch > newest


def _young(standing: OrphanRules, one: StoredObject) -> Reason | None:
    if not one.modified_micros:
        return Reason.NO_TIME
    if one.modified_micros > standing.now_micros - standing.grace_micros:
        return Reason.YOUNG
    return None


def _reason_while_live(standing: OrphanRules, one: StoredObject, name: ObjectName) -> Reason:
    """Apply the conditions for a job whose writer may be running; arroyo-state.md 9.8."""
    roots, head = standing.roots, standing.roots.head
    assert one.modified_micros is not None
    assert name.epoch is not None
    if one.modified_micros >= standing.began_micros:
        return Reason.IN_FLIGHT
    if roots.paths.layout is Layout.LEGACY:
        if standing.newest_written is None or name.epoch >= standing.newest_written:
            return Reason.MAY_COME_AGAIN
        if name.compacted and name.epoch > head.epoch - 2:
            return Reason.MERGED_LATELY
        return Reason.ORPHAN
    # Every worker generation has its own directories; only the newest generation writes to its own.
    own = name.worker_generation == roots.worker_generation
    published = head.worker_generation == roots.worker_generation
    if own and (not published or name.epoch >= head.epoch):
        return Reason.MAY_COME_AGAIN
    return Reason.ORPHAN


def _reason_of_generation(standing: OrphanRules, one: StoredObject, name: ObjectName) -> Reason:
    oldest = standing.roots.resolved_from
    assert name.worker_generation is not None
    if oldest is None or name.worker_generation >= oldest:
        return Reason.METADATA
    if standing.live and not standing.roots.managed:
        return Reason.METADATA
    return _young(standing, one) or Reason.OLD_GENERATION


# ---- the plan ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifiedObjects:
    """The decisions about a set of objects.

    Attributes:
        data, records: the objects that may be deleted.
        stays: for each reason the number and bytes of the objects that stay.
        referenced, digest: the number of referenced files, and the digest of this set.
    """

    data: Packed
    records: Packed
    stays: Mapping[str, tuple[int, int]]
    referenced: int = 0
    digest: str = "0"


def judge(standing: OrphanRules, files: Iterable[StoredObject]) -> ClassifiedObjects:
    """Decide about data files and subtask metadata, in order of name."""
    stays = _Stays()
    data, records = _split(_chosen(standing, files, stays))
    return ClassifiedObjects(
        data=data,
        records=records,
        stays=stays.counts(),
        referenced=len(standing.referenced),
        digest=standing.referenced.hexdigest,
    )


def judge_below(
    standing: OrphanRules, below: str, files: Iterable[StoredObject]
) -> ClassifiedObjects:
    """Decide about the files of one directory as `judge` does, using only references into it.

    Args:
        standing: as `standing_of` returns it; its `referenced` is computed anew.
        below: the directory, with a slash at the end.
    """
    roots = standing.roots
    stays = [*roots.epochs, *(root for root in roots.attempts if root.ref not in standing.lost)]
    return judge(replace(standing, referenced=referenced_by(roots, stays, below)), files)


def plan_orphans(
    standing: OrphanRules,
    parts: Sequence[ClassifiedObjects],
    metadata: Iterable[StoredObject],
    foreign: Iterable[StoredObject],
    *,
    listed: int,
    answer: JobAnswer | None = None,
    purge_after_micros: int | None = None,
) -> GcPlan:
    """Plan to delete the unreferenced objects that may be deleted.

    Args:
        parts: the decisions about data files and subtask metadata, in order of name.
        metadata, foreign: the other objects below the job, as listed.
        listed: the total number of objects.
        purge_after_micros: the age at which quarantines are purged; None = none is.
    """
    roots, stays = standing.roots, _Stays()
    objects = [entry for entry, _ in _chosen(standing, metadata, stays)]
    going = sorted(objects, key=lambda entry: _age(roots, entry.path))
    for part in parts:
        stays.add(part.stays)
    names = [entry.path for entry in foreign]
    stays.add({Reason.FOREIGN.name.lower(): (len(names), 0)})
    proof = replace(
        prove(roots, standing.referenced, answer, listed),
        referenced=sum(part.referenced for part in parts),
        digest=PathsDigest.joined(part.digest for part in parts),
    )
    purges = purge_after_micros is not None
    return GcPlan(
        kind=PlanKind.ORPHANS,
        pipeline=roots.paths.pipeline,
        job=roots.paths.job,
        made_at_micros=standing.now_micros,
        rule={
            "grace_micros": standing.grace_micros,
            **({"purge_after_micros": purge_after_micros} if purges else {}),
        },
        proof=proof,
        data=Packed.joined(part.data for part in parts),
        records=Packed.joined(part.records for part in parts),
        metadata=Packed(going),
        stays=stays.counts(),
        foreign=tuple(names[:FOREIGN_LISTED]),
        purges=tuple(
            quarantined.name
            for quarantined in roots.quarantined
            if purge_after_micros is not None
            and quarantined.moved_at_micros <= standing.now_micros - purge_after_micros
        ),
    )


class _Stays:
    """Counts objects that stay, by reason."""

    def __init__(self) -> None:
        self._objects: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    def count(self, reason: Reason, one: StoredObject) -> None:
        self._objects[reason.name.lower()] += 1
        self._bytes[reason.name.lower()] += one.size_bytes or 0

    def add(self, counts: Mapping[str, tuple[int, int]]) -> None:
        for name, (objects, size) in counts.items():
            self._objects[name] += objects
            self._bytes[name] += size

    def counts(self) -> dict[str, tuple[int, int]]:
        return {name: (n, self._bytes[name]) for name, n in sorted(self._objects.items()) if n}


def _chosen(
    standing: OrphanRules, objects: Iterable[StoredObject], stays: _Stays
) -> Iterator[tuple[StoredObject, ObjectName]]:
    paths = standing.roots.paths
    for entry in objects:
        name = object_name(paths, entry.path)
        reason = reason_of(standing, entry, name)
        if reason.goes:
            yield entry, name
        else:
            stays.count(reason, entry)


def _split(chosen: Iterable[tuple[StoredObject, ObjectName]]) -> tuple[Packed, Packed]:
    """Separate data files from subtask metadata, which is deleted after all data."""
    records: list[StoredObject] = []

    def data() -> Iterator[StoredObject]:
        for entry, name in chosen:
            if name.kind is ObjectKind.DATA:
                yield entry
            else:
                records.append(entry)

    packed = Packed(data())
    return packed, Packed(records)


def _age(roots: Roots, path: StatePath) -> tuple[int, int, str]:
    name = object_name(roots.paths, path)
    return (name.epoch or 0, name.worker_generation or 0, path)
