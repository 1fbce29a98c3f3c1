"""A job's own retention: how its writer reads and deletes old epochs.

`planning.gc.expiry` decides which epochs and which of their objects are deleted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from arroyo_dagster.errors import ArroyoStateError, FormatError, NotFoundError, ProtocolError
from arroyo_dagster.state.codec.references import manifest_references
from arroyo_dagster.state.metadata.lease import IN_FLIGHT_GRACE_SECONDS
from arroyo_dagster.state.metadata.tree import CheckpointTree
from arroyo_dagster.state.model.checkpoints import CheckpointState
from arroyo_dagster.state.model.clock import Clock, own_clock
from arroyo_dagster.state.model.garbage import EpochRoot, JobPins, Quarantined, Roots
from arroyo_dagster.state.model.ids import Epoch, StatePath
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.planning.gc.epoch_roots import epoch_root
from arroyo_dagster.state.planning.gc.expiry import (
    ExpirePlan,
    in_safe_groups,
    oldest_staying,
    plan_own_expiry,
    retention_since,
)
from arroyo_dagster.state.planning.restore import recovery
from arroyo_dagster.state.planning.restore.partially_collected import rolled_back
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.failures import DELETE_BATCH, delete_all

_PINS_TTL_MICROS = int(IN_FLIGHT_GRACE_SECONDS * 1e6) // 2
"""How long the pins that were read stay valid. A process that pins waits twice as long, until
requests in flight have arrived.
"""

_Found = Mapping[Epoch, EpochRoot | ArroyoStateError]


class ExpiringTree(CheckpointTree):
    """A job's metadata, of which old epochs expire on behalf of the job's writer."""

    clock: Clock
    _written: Epoch | None = None
    """The epoch that the writer published last; None if it has published none."""

    def cleanup_checkpoint(self, min_epoch: Epoch) -> ExpirePlan:
        """Delete the epochs below `min_epoch`: data, then records, then metadata, oldest first.

        Executes the expire plan of `planning.gc.expiry`, without logic of its own. The plan may
        keep more than `min_epoch` requires, for example after a rollback. If it is interrupted
        halfway, the next call finishes it. Epochs that are pinned or quarantined meanwhile are
        kept. While a pinned epoch does not exist, as during an undelete, nothing is deleted.

        Raises:
            ProtocolError: `min_epoch` is newer than the newest checkpoint, or a kept epoch is
                incomplete or cannot be read; nothing was deleted.
            NotFoundError, FormatError: an object of an epoch that was not rolled back is missing or
                broken; nothing was deleted.
            StorageError: objects could not be deleted; what refers to them still exists.
        """
        plan, job_pins = self._planned(min_epoch)
        while not self._executed(plan, job_pins):
            # Another process has pinned or quarantined an epoch after the plan was made.
            plan, job_pins = self._planned(min_epoch)
        return plan

    def expire_plan(self, min_epoch: Epoch) -> ExpirePlan:
        """Plan the deletion of the epochs below `min_epoch`. Errors as `cleanup_checkpoint`."""
        return self._planned(min_epoch)[0]

    # ---- an epoch that expires: what each form of the tree says of it ---------------------------

    def root(self, epoch: Epoch) -> EpochRoot:
        """Read which data files an epoch refers to. Objects that are missing are in `gone`.

        Raises:
            NotFoundError: the object that makes the epoch exist is missing, or its manifest.
            FormatError, ProtocolError: an object does not decode, or leads out of the job.
        """
        raise NotImplementedError

    def rolled_back_root(self, root: EpochRoot, head: EpochRoot) -> EpochRoot:
        """Mark an epoch that a rollback has abandoned.

        Args:
            head: the newest epoch.
        """
        return replace(root, state=CheckpointState.ROLLED_BACK, rolled_back=True)

    def unreadable_root(self, epoch: Epoch, reason: str, head: EpochRoot) -> EpochRoot:
        """Return the root of an abandoned epoch that cannot be read: its objects by name.

        Args:
            reason: why it cannot be read.
            head: the newest epoch.
        """
        raise NotImplementedError

    def note_min_epoch(self, min_epoch: Epoch) -> None:
        """Note the oldest epoch that is left, where the layout has a place for it."""

    # ---- planning --------------------------------------------------------------------------------

    def _planned(self, min_epoch: Epoch) -> tuple[ExpirePlan, JobPins]:
        """Return the plan, and the pins on which it is based."""
        job_pins, quarantined = self.objects.pins_in_full()
        roots = self._roots(min_epoch, job_pins, quarantined)
        if roots is None:
            raise ProtocolError(
                "min_epoch is newer than the newest checkpoint",
                job=self.paths.job,
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
        named = {*job_pins.pinned, *(() if self._written is None else (self._written,))}
        epochs = self.every_epoch(named)
        while epochs:
            results = dict(zip(epochs, concurrently(self._epoch, epochs), strict=True))
            before = epochs
            if any(map(_is_torn, results.values())):
                epochs = self.every_epoch(named)  # another process may have let some expire
            if epochs == before:
                break
        if not epochs:
            return None
        abandoned = rolled_back(epochs[-1], epochs, _restored(results))
        roots = Roots(
            paths=self.paths,
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
        unreadable = [
            self.unreadable_root(n, error.message, roots.head) for n, error in damaged.items()
        ]
        every = (*roots.epochs, *self._below_records(roots.current), *unreadable)
        return replace(roots, epochs=tuple(sorted(every, key=lambda root: -root.epoch)))

    def _marked(self, found: _Found, left: frozenset[Epoch]) -> tuple[EpochRoot, ...]:
        """Return the readable epochs, newest first, and mark those that a rollback abandoned."""
        results = [found[epoch] for epoch in sorted(found, reverse=True)]
        epochs = [root for root in results if isinstance(root, EpochRoot)]
        return tuple(
            self.rolled_back_root(root, epochs[0]) if root.epoch in left else root
            for root in epochs
        )

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
        present = dict(zip(goes, concurrently(self.exists, goes), strict=True))
        return {n: error for n, error in problems.items() if present.get(n, True)}

    # ---- one epoch -------------------------------------------------------------------------------

    def _epoch(self, epoch: Epoch) -> EpochRoot | ArroyoStateError:
        """Return what an epoch refers to, or the error if that cannot be read."""
        try:
            return self.root(epoch)
        except (NotFoundError, FormatError, ProtocolError) as error:
            return error

    def _below_records(self, current: Sequence[EpochRoot]) -> Iterator[EpochRoot]:
        """Yield manifests without a record, left by an interrupted cleanup, by their references."""
        by_ref = {root.ref: root for root in current}
        for root in current:
            newer = root
            while (ref := newer.parent_ref) is not None:
                recovery.expect_manifest_path(self.paths, ref)
                older = by_ref.get(ref) or self._without_record(ref)
                if older is None:
                    break
                self.check_older(ref, older.epoch, newer.epoch)
                if ref in by_ref:
                    break
                yield older
                by_ref[ref] = newer = older

    def _without_record(self, ref: StatePath) -> EpochRoot | None:
        try:
            manifest = self.objects.optional(ref, manifest_references)
        except FormatError:
            return None  # the chain ends at a manifest that does not decode
        if manifest is None:
            return None
        missing = (self.paths.epoch_record(manifest.epoch),)
        state = CheckpointState.PARTIALLY_COLLECTED
        return epoch_root(self.paths, ref, manifest, state, gone=missing)

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
        for batch in _batches(self.paths, plan):
            # By two clocks, because one of them may be set back.
            now = self.clock(), own_clock()
            if looked is None or not all(
                0 <= here - then < _PINS_TTL_MICROS for here, then in zip(now, looked, strict=True)
            ):
                looked = now
                if self.job_pins() != known:
                    return False
            delete_all(self.store, batch)
        if plan.epochs:
            self.note_min_epoch(plan.keep_from)
        return True


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
