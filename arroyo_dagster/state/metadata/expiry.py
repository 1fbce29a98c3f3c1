"""A job's own retention: how its writer reads and deletes old epochs.

`planning.gc.expiry` decides which epochs and which of their objects are deleted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from arroyo_dagster.errors import (
    ArroyoStateError,
    FormatError,
    NotFoundError,
    ProtocolError,
    StorageError,
)
from arroyo_dagster.state.codec import metadata
from arroyo_dagster.state.codec.references import manifest_references, operator_references
from arroyo_dagster.state.metadata.lease import IN_FLIGHT_GRACE_SECONDS
from arroyo_dagster.state.metadata.objects import MetadataReader, missing_epoch
from arroyo_dagster.state.metadata.reader import BackendReader
from arroyo_dagster.state.model.checkpoints import CheckpointState
from arroyo_dagster.state.model.clock import own_clock
from arroyo_dagster.state.model.garbage import (
    EpochRoot,
    ExpirePlan,
    JobPins,
    Quarantined,
    Roots,
)
from arroyo_dagster.state.model.ids import Epoch, StatePath
from arroyo_dagster.state.model.layout import JobPaths, Layout
from arroyo_dagster.state.planning.gc.epoch_roots import (
    check_inside_job,
    damaged_legacy_root,
    epoch_root,
    legacy_root,
    rolled_back_root,
    unreadable_objects,
    unreadable_root,
)
from arroyo_dagster.state.planning.gc.expiry import (
    in_safe_groups,
    oldest_staying,
    plan_own_expiry,
    retention_since,
)
from arroyo_dagster.state.planning.restore import recovery
from arroyo_dagster.state.planning.restore.lineage import rolled_back
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.failures import delete_step
from arroyo_dagster.state.storage.store import ObjectStore

DELETE_BATCH = 1000
_PINS_TTL_MICROS = int(IN_FLIGHT_GRACE_SECONDS * 1e6) // 2
"""How long the pins that were read stay valid. A process that pins waits twice as long, until
requests in flight have arrived.
"""

_Found = Mapping[Epoch, EpochRoot | ArroyoStateError]


@dataclass(frozen=True, slots=True)
class JobExpiry:
    """Expires old epochs of one job, on behalf of its writer.

    Attributes:
        clock: microseconds since the Unix epoch.
        written: the epoch that the writer published last; None if it has published none.
    """

    reader: BackendReader
    clock: Callable[[], int]
    written: Epoch | None = None

    def run(self, min_epoch: Epoch) -> ExpirePlan:
        """Delete epochs: data, then records, then metadata, oldest first.

        Raises:
            ProtocolError, NotFoundError, FormatError: as `plan`.
            StorageError: objects could not be deleted; what refers to them still exists.
        """
        plan, job_pins = self._planned(min_epoch)
        while not self._executed(plan, job_pins):
            # Another process has pinned or quarantined an epoch after the plan was made.
            plan, job_pins = self._planned(min_epoch)
        return plan

    def plan(self, min_epoch: Epoch) -> ExpirePlan:
        """Plan what is deleted, from every epoch's metadata.

        Raises:
            ProtocolError: as `plan_own_expiry`.
            NotFoundError, FormatError: an epoch that was not rolled back is missing or damaged.
        """
        return self._planned(min_epoch)[0]

    # ---- planning --------------------------------------------------------------------------------

    def _planned(self, min_epoch: Epoch) -> tuple[ExpirePlan, JobPins]:
        """Return the plan, and the pins on which it is based."""
        job_pins, quarantined = self._objects.pins_in_full()
        roots = self._roots(min_epoch, job_pins, quarantined)
        if roots is None:
            raise ProtocolError(
                "min_epoch is newer than the newest checkpoint",
                job=self._paths.job,
                min_epoch=min_epoch,
                newest=None,
            )
        partly = CheckpointState.PARTIALLY_COLLECTED
        if not job_pins.pinned <= {root.epoch for root in roots.epochs if root.state is not partly}:
            # A pinned epoch is being restored: its files are unknown, so nothing is deleted.
            return ExpirePlan(keep_from=roots.epochs[-1].epoch), job_pins
        return plan_own_expiry(roots, min_epoch), job_pins

    def _roots(
        self, min_epoch: Epoch, job_pins: JobPins, quarantined: tuple[Quarantined, ...]
    ) -> Roots | None:
        """Read every epoch, and what else is kept; None if there is no epoch.

        Raises:
            NotFoundError, FormatError, ProtocolError: an epoch that was not rolled back is damaged.
        """
        named = {*job_pins.pinned, *(() if self.written is None else (self.written,))}
        epochs = self.reader.every_epoch(named)
        while epochs:
            results = dict(zip(epochs, concurrently(self._epoch, epochs), strict=True))
            before = epochs
            if any(map(_is_torn, results.values())):
                epochs = self.reader.every_epoch(named)  # another process may have let some expire
            if epochs == before:
                break
        if not epochs:
            return None
        abandoned = rolled_back(epochs[-1], epochs, _restored(results))
        roots = Roots(
            paths=self._paths,
            worker_generation=None,
            epochs=self._marked(results, abandoned),
            job_pins=job_pins,
            quarantined=quarantined,
        )
        problems = {n: error for n, error in results.items() if isinstance(error, ArroyoStateError)}
        damaged = self._still_there(problems, roots, min_epoch)
        for epoch in sorted(damaged.keys() - abandoned):
            raise damaged[epoch]
        if not roots.epochs:
            return None
        unreadable = [self._unreadable(n, damaged[n].message, roots.head) for n in damaged]
        every = (*roots.epochs, *self._below_records(roots.current), *unreadable)
        return replace(roots, epochs=tuple(sorted(every, key=lambda root: -root.epoch)))

    def _marked(self, found: _Found, left: frozenset[Epoch]) -> tuple[EpochRoot, ...]:
        """Return the readable epochs, newest first, and mark those that a rollback abandoned."""
        results = [found[epoch] for epoch in sorted(found, reverse=True)]
        epochs = [root for root in results if isinstance(root, EpochRoot)]
        return tuple(
            self._rolled_back(root, epochs[0]) if root.epoch in left else root for root in epochs
        )

    def _rolled_back(self, one: EpochRoot, head: EpochRoot) -> EpochRoot:
        if self._legacy:
            return rolled_back_root(self._paths, one, head)
        return replace(one, state=CheckpointState.ROLLED_BACK, rolled_back=True)

    def _still_there(
        self, problems: Mapping[Epoch, ArroyoStateError], roots: Roots, min_epoch: Epoch
    ) -> Mapping[Epoch, ArroyoStateError]:
        """Return the problems without those of expiring epochs that only a stale listing shows."""
        if not problems or not roots.epochs:
            return problems
        newest = roots.head.epoch
        keep_from = oldest_staying(roots, retention_since(newest, min_epoch), newest=newest)
        pinned = roots.job_pins.pinned
        goes = [n for n in problems if n < keep_from and n not in pinned]
        present = dict(zip(goes, concurrently(self.reader.exists, goes), strict=True))
        return {n: error for n, error in problems.items() if present.get(n, True)}

    # ---- one epoch -------------------------------------------------------------------------------

    def _epoch(self, epoch: Epoch) -> EpochRoot | ArroyoStateError:
        """Return what an epoch refers to, or the error if that cannot be read."""
        try:
            return self._legacy_epoch(epoch) if self._legacy else self._protocol_epoch(epoch)
        except (NotFoundError, FormatError, ProtocolError) as error:
            return error

    def _legacy_epoch(self, epoch: Epoch) -> EpochRoot:
        paths = self._paths
        path = paths.legacy_metadata(epoch)
        head = self._objects.read(path, metadata.decode_legacy_checkpoint, missing_epoch(epoch))
        names = [paths.operator_metadata(name, epoch) for name in head.operators]
        refs = concurrently(lambda name: self._objects.optional(name, operator_references), names)
        return legacy_root(paths, head, dict(zip(head.operators, refs, strict=True)))

    def _protocol_epoch(self, epoch: Epoch) -> EpochRoot:
        ref = self._objects.epoch_record(epoch).checkpoint_ref
        manifest = self._objects.read(ref, manifest_references)
        check_inside_job(self._paths, epoch, manifest)
        return epoch_root(self._paths, ref, manifest, CheckpointState.READY)

    def _unreadable(self, epoch: Epoch, reason: str, head: EpochRoot) -> EpochRoot:
        paths = self._paths
        if self._legacy:
            return damaged_legacy_root(paths, epoch, reason, head)
        ref = None
        with contextlib.suppress(NotFoundError, FormatError, ProtocolError):
            ref = self._objects.epoch_record(epoch).checkpoint_ref
        by_name = unreadable_objects(paths, epoch, ref)
        finished = head.finish_time_micros
        return unreadable_root(epoch, reason, by_name, finish_time_micros=finished)

    def _below_records(self, current: Sequence[EpochRoot]) -> Iterator[EpochRoot]:
        """Yield manifests without a record, left by an interrupted cleanup, by their references."""
        by_ref = {root.ref: root for root in current}
        for root in current:
            newer = root
            while (ref := newer.parent_ref) is not None:
                recovery.expect_manifest_path(self._paths, ref)
                older = by_ref.get(ref) or self._without_record(ref)
                if older is None:
                    break
                if older.epoch >= newer.epoch:
                    raise ProtocolError(
                        f"the parent of epoch {newer.epoch} belongs to epoch {older.epoch}",
                        job=self._paths.job,
                        path=ref,
                        next_step="check it with `arroyo-state epochs`; nothing was deleted",
                    )
                if ref in by_ref:
                    break
                yield older
                by_ref[ref] = newer = older

    def _without_record(self, ref: StatePath) -> EpochRoot | None:
        try:
            manifest = self._objects.optional(ref, manifest_references)
        except FormatError:
            return None  # the chain ends at a manifest that does not decode
        if manifest is None:
            return None
        missing = (self._paths.epoch_record(manifest.epoch),)
        state = CheckpointState.PARTIALLY_COLLECTED
        return epoch_root(self._paths, ref, manifest, state, gone=missing)

    # ---- executing -------------------------------------------------------------------------------

    def _executed(self, plan: ExpirePlan, known: JobPins) -> bool:
        """Delete what a plan names, each step complete before the next; False if the plan is out of
        date.

        Epochs that were pinned or quarantined meanwhile are kept: the pins are read before the
        first request to delete, and again whenever the last read is too old.

        Args:
            known: the pins on which the plan is based.

        Raises:
            StorageError: objects could not be deleted; what refers to them still exists.
        """
        looked: tuple[int, int] | None = None
        for batch in _batches(self._paths, plan):
            # By two clocks, because one of them may be set back.
            now = self.clock(), own_clock()
            if looked is None or not all(
                0 <= here - then < _PINS_TTL_MICROS for here, then in zip(now, looked, strict=True)
            ):
                looked = now
                if self.reader.job_pins() != known:
                    return False
            delete_all(self.reader.store, batch)
        if self._legacy and plan.epochs:
            note_min_epoch(self.reader, plan.keep_from)
        return True

    @property
    def _paths(self) -> JobPaths:
        return self.reader.paths

    @property
    def _objects(self) -> MetadataReader:
        return self.reader.objects

    @property
    def _legacy(self) -> bool:
        return self._paths.layout is Layout.LEGACY


def _is_torn(found: EpochRoot | ArroyoStateError) -> bool:
    """Whether an object of an epoch is missing."""
    return bool(found.gone) if isinstance(found, EpochRoot) else isinstance(found, NotFoundError)


def _restored(found: _Found) -> dict[Epoch, Epoch]:
    roots = (root for root in found.values() if isinstance(root, EpochRoot))
    return {root.epoch: to for root in roots if (to := root.rolled_back_to) is not None}


def _batches(paths: JobPaths, plan: ExpirePlan) -> Iterator[list[StatePath]]:
    """Yield the objects of each delete request, in order."""
    for step in (plan.data, plan.records):
        files = list(dict.fromkeys(step.paths))
        yield from (files[i : i + DELETE_BATCH] for i in range(0, len(files), DELETE_BATCH))
    yield from in_safe_groups(paths, plan.metadata.paths)


def note_min_epoch(reader: BackendReader, min_epoch: Epoch) -> None:
    """Set `min_epoch` in the newest epoch of the legacy layout to the oldest remaining epoch, as
    Arroyo's cleanup does.
    """
    newest = reader.paths.legacy_metadata(reader.every_epoch()[-1])
    head = reader.objects.read(newest, metadata.decode_legacy_checkpoint)
    if head.min_epoch < min_epoch:
        changed = replace(head, min_epoch=min_epoch)
        reader.store.put(newest, metadata.encode_legacy_checkpoint(changed))


def delete_all(store: ObjectStore, paths: Sequence[StatePath]) -> None:
    """Delete objects in bulk; those that no longer exist count as deleted.

    Raises:
        StorageError: some could not be deleted.
    """
    for start in range(0, len(paths), DELETE_BATCH):
        outcome = store.delete_many(paths[start : start + DELETE_BATCH])
        if outcome.failed:
            path, reason = next(iter(outcome.failed.items()))
            raise StorageError(
                f"{len(outcome.failed)} objects could not be deleted; the first: {reason}",
                path=path,
                url=store.url,
                next_step=delete_step(reason, store.url, path),
            )
