"""Write lost or damaged metadata of an epoch anew, from its data files and an older epoch.

Only Arroyo jobs of the legacy layout, where each operator has metadata of its own. What the files
do not prove is a doubt of the plan; what cannot be known is refused. Readable metadata is never
overwritten, and nothing is written before the epoch as it would be passes verification.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from arroyo_dagster.errors import (
    ConflictError,
    FormatError,
    InputError,
    NotFoundError,
    ProtocolError,
)
from arroyo_dagster.state.codec import metadata
from arroyo_dagster.state.codec.records import encode_json
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.metadata.interrupts import uninterrupted
from arroyo_dagster.state.metadata.lease import Leased, LeaseOptions, lease
from arroyo_dagster.state.metadata.reader import legacy_checkpoint
from arroyo_dagster.state.model.checkpoints import (
    Checkpoint,
    CheckpointState,
    LegacyCheckpoint,
    OperatorCheckpoint,
)
from arroyo_dagster.state.model.ids import Epoch, OperatorId, StatePath
from arroyo_dagster.state.model.layout import JobPaths, Layout
from arroyo_dagster.state.model.surgery.rebuild import RebuildOutcome, RebuildPlan, RebuiltTable
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
from arroyo_dagster.state.operations.compaction.rewrite import quiet_seconds_left
from arroyo_dagster.state.operations.compaction.rewrite_preconditions import (
    JobSnapshot,
    Unchanged,
    check_may,
    check_restorable,
    guards_of,
    list_objects,
    overwrite,
)
from arroyo_dagster.state.operations.compaction.rewrite_publish import check_quiet
from arroyo_dagster.state.operations.surgery.execute import EditOptions
from arroyo_dagster.state.operations.surgery.rebuild_operator import LostOperator, cannot_rebuild
from arroyo_dagster.state.planning.compaction.rewrite import why_not_now
from arroyo_dagster.state.storage.store import ObjectInfo, ObjectStore
from arroyo_dagster.state.storage.wrappers import Extended, Overlaid

_VERIFY_LEVEL = 2


def plan_rebuild(
    store: ObjectStore, paths: JobPaths, directory: JobDirectory, epoch: int | None = None
) -> RebuildPlan:
    """Plan a rebuild, and verify the epoch as it would be. Writes nothing: this is the dry run.

    Args:
        directory: the source of the job's status.
        epoch: the epoch to rebuild; None = the newest one that is visible.

    Raises:
        InputError: a managed job, the protocol layout, or nothing is missing or damaged.
        NotFoundError: the job has no such epoch.
        ProtocolError: the metadata cannot be known, or the epoch as it would be does not pass
            verification.
        FormatError: a data file of the epoch is broken.
    """
    return _prepare(store, paths, directory, epoch).plan


def run_rebuild(
    store: ObjectStore,
    paths: JobPaths,
    directory: JobDirectory,
    epoch: int | None = None,
    options: EditOptions | None = None,
) -> RebuildOutcome:
    """Rebuild the metadata of an epoch of a stopped Arroyo job.

    Operators are written before the checkpoint's own metadata. An interrupted rebuild is continued
    by the next call.

    Raises:
        ConflictError: another plan was approved, or the job changed or was started meanwhile.
        LeaseHeldError: another process maintains the job.
        InputError, NotFoundError, ProtocolError, FormatError: as `plan_rebuild`; or the job is not
            at rest.
    """
    chosen = options or EditOptions()
    prepared = _prepare(store, paths, directory, epoch)
    check_may(paths, prepared.snapshot)
    _check_approved(prepared.plan, chosen.approved)
    with lease(store, paths, "arroyo-state rebuild", LeaseOptions.of(chosen)) as held:
        began = chosen.clock()
        # The previous holder of the lease may have changed the job.
        again = _prepare(held, paths, directory, prepared.plan.epoch)
        check_may(paths, again.snapshot)
        _check_approved(again.plan, prepared.plan.digest)
        quiet = quiet_seconds_left(again.snapshot, chosen.quiet_seconds, began, chosen.clock())
        if quiet > 0:
            chosen.sleep(quiet)
        check_quiet(held, paths, again.snapshot)
        record = _write(held, Unchanged(paths, directory, again.snapshot), again.plan, chosen)
    return RebuildOutcome(plan=again.plan, record=record)


def _check_approved(plan: RebuildPlan, approved: str | None) -> None:
    if approved is not None and approved != plan.digest:
        raise ConflictError(
            f"plan {approved} was approved, but the current plan is {plan.digest}",
            job=plan.paths.root,
            epoch=plan.epoch,
            next_step="review the new plan and approve it; nothing was changed",
        )


def _write(held: Leased, work: Unchanged, plan: RebuildPlan, options: EditOptions) -> StatePath:
    record = work.paths.rebuilds / f"{plan.epoch:07}-{held.lease.token:010}.json"
    held.put(record, encode_json(plan.as_record(options.clock())))
    with uninterrupted():
        for at, data in plan.after.items():
            work.check(held)
            before = plan.before[at]
            if before is not None:
                overwrite(held, work.paths, at, before, data)
            elif not held.create(at, data) and held.read(at) != data:
                raise work.changed("another process wrote the missing metadata")
    return record


# ---- planning ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _PreparedRebuild:
    plan: RebuildPlan
    snapshot: JobSnapshot


def _prepare(
    store: ObjectStore, paths: JobPaths, directory: JobDirectory, epoch: int | None
) -> _PreparedRebuild:
    if paths.layout is not Layout.LEGACY:
        raise InputError(
            "only metadata of the legacy layout can be rebuilt",
            job=paths.root,
            next_step="restore the manifest from a copy of the job",
        )
    # List first: objects written meanwhile then count as changed.
    listing = list_objects(store, paths)
    answer = directory.look_up([paths], checkpoints=True)[0]
    work = _Rebuild(store, paths, _chosen(store, paths, epoch), listing)
    checkpoint = work.checkpoint(answer.facts.newest_ready_epoch)
    after = work.encoded(checkpoint)
    why_not = why_not_now(answer, checkpoint)
    plan = RebuildPlan(
        job=paths.job,
        epoch=checkpoint.epoch,
        source=work.source,
        condition=answer.facts.condition,
        why_not=why_not,
        before={at: work.before[at] for at in after},
        after=after,
        tables=tuple(work.tables),
        doubts=tuple(dict.fromkeys(work.doubts)),
    )
    missing = {at: data for at, data in after.items() if plan.before[at] is None}
    damaged = {at: data for at, data in after.items() if plan.before[at] is not None}
    rebuilt = Overlaid(Extended(store, missing), damaged)
    check_restorable(rebuilt, paths, checkpoint.epoch, _VERIFY_LEVEL)
    guards = guards_of(store, paths, checkpoint)
    return _PreparedRebuild(plan, JobSnapshot(answer, checkpoint, {}, guards, listing, why_not))


def _chosen(store: ObjectStore, paths: JobPaths, epoch: int | None) -> Epoch:
    backend = ParquetBackend(store, paths)
    found = backend.checkpoint_dirs() if epoch is not None else backend.epochs()
    if epoch is None and found:
        return found[-1]
    if epoch is None or epoch not in found:
        raise NotFoundError(
            "the job has no checkpoint" if epoch is None else "the job has no such epoch",
            job=paths.root,
            epoch=epoch,
            next_step="`arroyo-state epochs` lists those that exist; name one with --epoch",
        )
    return Epoch(epoch)


@dataclass(slots=True)
class _Rebuild:
    """Collects the metadata of one epoch, and what is doubtful about it.

    Attributes:
        before: the bytes of each object that is missing (None) or damaged.
        readable: the readable epochs before this one, newest first.
    """

    store: ObjectStore
    paths: JobPaths
    epoch: Epoch
    listing: dict[StatePath, ObjectInfo]
    before: dict[StatePath, bytes | None] = field(default_factory=dict)
    readable: list[Checkpoint] = field(default_factory=list)
    source: dict[OperatorId, Epoch] = field(default_factory=dict)
    tables: list[RebuiltTable] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)

    def checkpoint(self, named: Epoch | None) -> Checkpoint:
        """Return the epoch as it would be.

        Args:
            named: the newest ready epoch that the job's controller names.
        """
        self.readable = list(self._older())
        head = self._head()
        if not self.readable:
            raise self._unknown("there is no older epoch that can be read")
        before = self.readable[0]
        if before.progress is not None or (head is not None and head.progress is not None):
            raise InputError(
                "this is a managed job",
                job=self.paths.root,
                next_step="go back to an older epoch with `arroyo-state rollback`",
            )
        names = [one.operator for one in before.operators] if head is None else head.operators
        found = {name: self._read(name) for name in names}
        lost = [name for name, one in found.items() if one is None]
        if not self.before:
            raise InputError(
                "no metadata of the epoch is missing or damaged",
                job=self.paths.root,
                epoch=self.epoch,
                next_step="check it with `arroyo-state verify`, or name another one with --epoch",
            )
        self._check_not_rewritten()
        there = [one for one in found.values() if one is not None]
        if head is None:
            head = self._rebuilt_head(before, lost, there)
        operators = [
            one or self._rebuilt_operator(head, name, there, named) for name, one in found.items()
        ]
        ref = self.paths.legacy_metadata(self.epoch)
        return legacy_checkpoint(head, operators, ref, CheckpointState.READY)

    def encoded(self, checkpoint: Checkpoint) -> dict[StatePath, bytes]:
        """Return the new bytes of each object, the checkpoint's own metadata last."""
        found = {}
        for one in checkpoint.operators:
            path = self.paths.operator_metadata(one.operator, self.epoch)
            if path in self.before:
                found[path] = metadata.encode_operator(one)
        if checkpoint.ref in self.before:
            head = LegacyCheckpoint(
                job=checkpoint.job,
                epoch=checkpoint.epoch,
                min_epoch=checkpoint.min_epoch,
                start_time_micros=checkpoint.start_time_micros,
                finish_time_micros=checkpoint.finish_time_micros,
                operators=tuple(one.operator for one in checkpoint.operators),
            )
            found[checkpoint.ref] = metadata.encode_legacy_checkpoint(head)
        return found

    # ---- what is there ---------------------------------------------------------------------------

    def _older(self) -> Iterator[Checkpoint]:
        backend = ParquetBackend(self.store, self.paths)
        for epoch in reversed(backend.epochs()):
            if epoch < self.epoch:
                try:
                    yield backend.load(epoch)
                except (FormatError, NotFoundError):
                    continue

    def _head(self) -> LegacyCheckpoint | None:
        path = self.paths.legacy_metadata(self.epoch)
        data = self._bytes(path)
        try:
            return None if data is None else metadata.decode_legacy_checkpoint(data, path)
        except FormatError:
            self.before[path] = data
            return None

    def _read(self, name: OperatorId) -> OperatorCheckpoint | None:
        path = self.paths.operator_metadata(name, self.epoch)
        data = self._bytes(path)
        try:
            return None if data is None else metadata.decode_operator(data, path)
        except FormatError:
            self.before[path] = data
            return None

    def _bytes(self, path: StatePath) -> bytes | None:
        """Return an object's bytes; None if it is missing, which is noted."""
        try:
            return self.store.read(path)
        except NotFoundError:
            self.before[path] = None
            return None

    def _check_not_rewritten(self) -> None:
        """Refuse an epoch that was edited or compacted in place: its lists are not Arroyo's."""
        name = f"{self.epoch:07}-"
        for directory in (self.paths.rewrites, self.paths.edits):
            for info in self.store.list_dir(directory).objects:
                if info.path.rpartition("/")[2].startswith(name):
                    raise ProtocolError(
                        "the epoch was edited or compacted in place, so that its lists cannot be "
                        "known from names",
                        job=self.paths.root,
                        epoch=self.epoch,
                        path=info.path,
                        next_step="the record beside it has the original metadata; nothing was "
                        "changed",
                    )

    # ---- the checkpoint's own metadata -----------------------------------------------------------

    def _rebuilt_head(
        self, before: Checkpoint, lost: Sequence[OperatorId], there: Sequence[OperatorCheckpoint]
    ) -> LegacyCheckpoint:
        """Return the metadata that Arroyo writes once all operators have theirs."""
        if lost:
            raise self._unknown(
                f"its own metadata and that of {lost[0]} are lost, so nothing shows that the epoch "
                "was ever complete"
            )
        directory = self.paths.checkpoint(self.epoch)
        known = {self.paths.operator_metadata(one.operator, self.epoch) for one in there}
        for path in self.listing:
            if (
                path.startswith(f"{directory}/")
                and path.endswith("/metadata")
                and (path not in known | {self.paths.legacy_metadata(self.epoch)})
            ):
                raise self._unknown(f"{path} belongs to an operator that the older epoch lacks")
        self.doubts.append(
            f"the times of the epoch are those of its operators, and its operators and oldest kept "
            f"epoch those of epoch {before.epoch}"
        )
        return LegacyCheckpoint(
            job=self.paths.job,
            epoch=self.epoch,
            min_epoch=before.min_epoch,
            start_time_micros=min(one.start_time_micros for one in there),
            finish_time_micros=max(one.finish_time_micros for one in there),
            operators=tuple(one.operator for one in before.operators),
        )

    # ---- an operator -----------------------------------------------------------------------------

    def _rebuilt_operator(
        self,
        head: LegacyCheckpoint,
        name: OperatorId,
        there: Sequence[OperatorCheckpoint],
        named: Epoch | None,
    ) -> OperatorCheckpoint:
        work = LostOperator(self.paths, name, head, self.readable, there, self.listing)
        found = work.rebuilt(self.store, named)
        self.source[name] = self.readable[0].epoch
        self.tables += work.tables
        self.doubts += work.doubts
        return found

    def _unknown(self, reason: str) -> ProtocolError:
        return cannot_rebuild(self.paths, self.epoch, reason)
