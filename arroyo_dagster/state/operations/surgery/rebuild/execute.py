"""Write lost or damaged metadata of an epoch anew, from its data files and an older epoch.

Only Arroyo jobs. What the files do not prove is a doubt of the plan; what cannot be known is
refused. Readable metadata is never overwritten, and nothing is written before the epoch as it would
be passes verification.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from arroyo_dagster.errors import (
    FormatError,
    InputError,
    NotFoundError,
    ProtocolError,
)
from arroyo_dagster.state.codec import metadata
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.metadata.lease import LeaseOptions, lease
from arroyo_dagster.state.metadata.tree import legacy_checkpoint, legacy_head
from arroyo_dagster.state.model.changes import ChangeKind, JobHead
from arroyo_dagster.state.model.checkpoints import (
    Checkpoint,
    CheckpointState,
    LegacyCheckpoint,
    OperatorCheckpoint,
)
from arroyo_dagster.state.model.ids import (
    Epoch,
    JobId,
    OperatorId,
    PipelineId,
    StatePath,
    path_error,
)
from arroyo_dagster.state.model.job_facts import JobFacts
from arroyo_dagster.state.model.layout import JobPaths, Layout, written_epoch
from arroyo_dagster.state.model.surgery.rebuild import RebuildOutcome, RebuildPlan, RebuiltTable
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
from arroyo_dagster.state.operations.catalog.jobs import find_job
from arroyo_dagster.state.operations.compaction.rewrite_preconditions import (
    JobSnapshot,
    Unchanged,
    check_restorable,
    guards_of,
    list_objects,
    wait_until_quiet,
)
from arroyo_dagster.state.operations.compaction.rewrite_publish import (
    change_record,
    publish_change,
)
from arroyo_dagster.state.operations.surgery.execute import EditOptions
from arroyo_dagster.state.operations.surgery.plan import check_can_run
from arroyo_dagster.state.operations.surgery.rebuild.operator import (
    LostEpoch,
    LostOperator,
    RebuiltEpoch,
    cannot_rebuild,
    check_not_rewritten,
    managed_job,
    nothing_lost,
    read_whole,
)
from arroyo_dagster.state.operations.surgery.rebuild.protocol import ProtocolRebuild
from arroyo_dagster.state.planning.compaction.rewrite import why_not_now
from arroyo_dagster.state.planning.restore.lost_metadata import (
    NamedTables,
    cut_metadata,
    identity_mismatch,
)
from arroyo_dagster.state.planning.verify.starts import Origin, origin_of
from arroyo_dagster.state.storage.store import ObjectInfo, ObjectStore

_VERIFY_LEVEL = 2


def plan_rebuild(
    store: ObjectStore, paths: JobPaths, directory: JobDirectory, epoch: int | None = None
) -> RebuildPlan:
    """Plan a rebuild, and verify the epoch as it would be. Writes nothing: this is the dry run.

    Args:
        directory: the source of the job's status.
        epoch: the epoch to rebuild; None = the newest one that is visible.

    Raises:
        InputError: a managed job, or nothing is missing or damaged.
        NotFoundError: the job has no such epoch.
        ProtocolError: the metadata cannot be known, or the epoch as it would be does not pass
            verification.
        FormatError: a data file of the epoch is broken.
    """
    return _prepare(store, paths, directory, epoch)[0]


def run_rebuild(
    store: ObjectStore,
    paths: JobPaths,
    directory: JobDirectory,
    epoch: int | None = None,
    options: EditOptions | None = None,
) -> RebuildOutcome:
    """Rebuild the metadata of an epoch of a stopped Arroyo job.

    What leads to an object is written after it. An interrupted rebuild is continued by the next
    call. `run_undo` undoes it until the job is started.

    Raises:
        ConflictError: another plan was approved, or the job changed or was started meanwhile.
        LeaseHeldError: another process maintains the job.
        InputError, NotFoundError, ProtocolError, FormatError: as `plan_rebuild`; or the job is not
            at rest.
    """
    run_options = options or EditOptions()
    planned, snapshot = _prepare(store, paths, directory, epoch)
    check_can_run(paths, snapshot, planned, run_options.approved)
    with lease(store, paths, "arroyo-state rebuild", LeaseOptions.of(run_options)) as held:
        began = run_options.clock()
        # The previous holder of the lease may have changed the job.
        plan, snapshot = _prepare(held, paths, directory, planned.epoch)
        check_can_run(paths, snapshot, plan, planned.digest)
        wait_until_quiet(snapshot, began, run_options)
        change = change_record(
            held,
            snapshot.checkpoint,
            plan.before,
            plan.after,
            kind=ChangeKind.REBUILD,
            operation="rebuild",
            digest=plan.digest,
            created_at_micros=run_options.clock(),
            head=plan.head,
            written=plan.after,
            inputs=plan.unlisted,
            doubts=plan.doubts,
        )
        work = Unchanged(paths, directory, snapshot)
        record = publish_change(held, work, change, plan.after, _VERIFY_LEVEL)
    return RebuildOutcome(plan=plan, record=record)


# ---- planning ------------------------------------------------------------------------------------


def _prepare(
    store: ObjectStore, paths: JobPaths, directory: JobDirectory, epoch: int | None
) -> tuple[RebuildPlan, JobSnapshot]:
    # List first: objects written meanwhile then count as changed.
    listing = list_objects(store, paths)
    answer = directory.look_up([paths], checkpoints=True)[0]
    lost = LegacyRebuild if paths.layout is Layout.LEGACY else ProtocolRebuild
    rebuilt = lost(store, paths, _chosen(store, paths, epoch), listing).rebuilt(answer.facts)
    why_not = why_not_now(answer, rebuilt.checkpoint)
    plan = RebuildPlan(
        job=paths.job,
        pipeline=paths.pipeline,
        epoch=rebuilt.checkpoint.epoch,
        source=rebuilt.source,
        condition=answer.facts.condition,
        why_not=why_not,
        before=rebuilt.before,
        after=rebuilt.after,
        tables=rebuilt.tables,
        doubts=rebuilt.doubts,
        unlisted=rebuilt.unlisted,
        head=rebuilt.head,
    )
    view = rebuilt.over(store)
    check_restorable(view, paths, plan.epoch, _VERIFY_LEVEL)
    guards = guards_of(view, paths, rebuilt.checkpoint)
    snapshot = JobSnapshot(answer, rebuilt.checkpoint, {}, guards, listing, why_not)
    return plan, snapshot


def _chosen(store: ObjectStore, paths: JobPaths, epoch: int | None) -> Epoch:
    backend = ParquetBackend(store, paths)
    epochs = backend.epochs()
    if epoch is None and epochs:
        return epochs[-1]
    if epoch is not None:
        # A record, or a directory of any worker generation: either may be what is left.
        epochs = sorted({*epochs, *(number for _, number in backend.directories())})
    if epoch is None or epoch not in epochs:
        raise NotFoundError(
            "the job has no checkpoint" if epoch is None else "the job has no such epoch",
            job=paths.root,
            epoch=epoch,
            next_step="`arroyo-state epochs` lists those that exist; name one: `rebuild JOB EPOCH`",
        )
    return Epoch(epoch)


def find_damaged_job(store: ObjectStore, name: str) -> JobPaths:
    """Find a job as `find_job`, or by its full path `pipeline/job` if its fence is lost.

    Raises:
        NotFoundError, InputError: as `find_job`.
    """
    try:
        return find_job(store, name)
    except (NotFoundError, InputError):
        pipeline, _, job = name.rpartition("/")
        if not pipeline or path_error(name) is not None:
            raise
        paths = JobPaths(JobId(job), PipelineId(pipeline))
        if store.list_dir(paths.generations).prefixes and store.list_dir(paths.epochs).objects:
            return paths
        raise


# ---- legacy --------------------------------------------------------------------------------------
# What lost metadata of an epoch of the legacy layout was: each operator has its own object.

_T = TypeVar("_T")


@dataclass(slots=True)
class LegacyRebuild:
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
    unlisted: list[StatePath] = field(default_factory=list)

    def rebuilt(self, facts: JobFacts) -> RebuiltEpoch:
        """Return the epoch as it would be.

        Args:
            facts: what is known of the job's status.

        Raises:
            InputError: a managed job, or nothing is missing or damaged.
            ProtocolError: the metadata cannot be known.
            FormatError: a data file of the epoch is broken.
        """
        checkpoint = self._checkpoint(facts.newest_ready_epoch)
        after = self._encoded(checkpoint)
        newest = max((*ParquetBackend(self.store, self.paths).epochs(), self.epoch))
        return RebuiltEpoch(
            checkpoint=checkpoint,
            before={path: self.before[path] for path in after},
            after=after,
            source=self.source,
            tables=tuple(self.tables),
            doubts=tuple(dict.fromkeys(self.doubts)),
            unlisted=tuple(dict.fromkeys(self.unlisted)),
            head=JobHead(epoch=newest),
        )

    def _checkpoint(self, named: Epoch | None) -> Checkpoint:
        self.readable = list(self._older())
        head = self._head()
        if not self.readable:
            raise self._unknown("there is no older epoch that can be read")
        before = self.readable[0]
        if before.progress is not None or (head is not None and head.progress is not None):
            raise managed_job(self.paths)
        names = [op.operator for op in before.operators] if head is None else head.operators
        states = {name: self._read(name) for name in names}
        lost = [name for name, state in states.items() if state is None]
        if not self.before:
            raise nothing_lost(self.paths, self.epoch)
        check_not_rewritten(self.store, self.paths, self.epoch)
        if named is not None and self.epoch > named + 1:  # a database may be one epoch behind
            raise self._unknown(
                f"Arroyo names epoch {named} as its newest ready one, so a later run has begun at "
                "a lower number, and may have written files of this one again"
            )
        if head is not None and 0 < head.min_epoch == self.epoch - 1:
            raise self._unknown(
                "it is the first of a run that was started without state, which counts the "
                "directories of its files from 1"
            )
        self._check_names(before)
        intact = [state for state in states.values() if state is not None]
        ends = [state.finish_time_micros for state in (head, *intact) if state is not None]
        behind = named is not None and self.epoch == named + 1  # or Arroyo has given it up
        if behind and max(ends, default=before.start_time_micros) < before.start_time_micros:
            raise self._unknown(
                f"it ended before epoch {before.epoch} began: a later run has written that one, "
                "and may have written files of this one again"
            )
        if head is None:
            head = self._rebuilt_head(before, lost, intact)
        operators = [
            op or self._rebuilt_operator(head, name, intact, named) for name, op in states.items()
        ]
        ref = self.paths.legacy_metadata(self.epoch)
        return legacy_checkpoint(head, operators, ref, CheckpointState.READY)

    def _encoded(self, checkpoint: Checkpoint) -> dict[StatePath, bytes]:
        """Return the new bytes of each object, the checkpoint's own metadata last."""
        encoded = {}
        for operator in checkpoint.operators:
            path = self.paths.operator_metadata(operator.operator, self.epoch)
            if path in self.before:
                encoded[path] = metadata.encode_operator(operator)
        if checkpoint.ref in self.before:
            head = legacy_head(checkpoint.job, checkpoint)
            encoded[checkpoint.ref] = metadata.encode_legacy_checkpoint(head)
        return encoded

    # ---- what is there ---------------------------------------------------------------------------

    def _older(self) -> Iterator[Checkpoint]:
        backend = ParquetBackend(self.store, self.paths)
        for epoch in reversed(backend.epochs()):
            if epoch < self.epoch:
                try:
                    yield backend.load(epoch)
                except (FormatError, NotFoundError):
                    continue

    def _check_names(self, before: Checkpoint) -> None:
        """Refuse an epoch whose files a later run may have written again.

        A run that was started without state gives the names of older files again.

        Args:
            before: the newest readable epoch before this one.
        """
        backend = ParquetBackend(self.store, self.paths)
        for epoch in backend.epochs():
            if epoch <= self.epoch:
                continue
            try:
                later = backend.load(epoch)
            except (FormatError, NotFoundError):
                continue
            fresh = map(written_epoch, set(later.paths) - set(before.paths))
            again = any(number is not None and number <= before.epoch for number in fresh)
            if again or origin_of(before, later) is Origin.EMPTY:
                raise self._unknown(
                    f"epoch {epoch} is of a run that was started without state, which gives the "
                    "names of older files again: which rows they had is not known"
                )

    def _head(self) -> LegacyCheckpoint | None:
        def is_cut(head: LegacyCheckpoint) -> bool:
            # Tables are checked with the metadata of each operator.
            changes = f"{self.paths.changes}/"
            names = [
                path
                for path in self.listing
                if path.startswith(changes) or path.endswith("/metadata")
            ]
            named = NamedTables(epoch=self.epoch, tables=dict.fromkeys(head.operators, ()))
            return any(cut_metadata(self.paths, named, names))

        path = self.paths.legacy_metadata(self.epoch)
        return self._object(path, metadata.decode_legacy_checkpoint, is_cut)

    def _read(self, name: OperatorId) -> OperatorCheckpoint | None:
        def is_cut(operator: OperatorCheckpoint) -> bool:
            directory = f"{self.paths.operator(name, self.epoch)}/"
            changes = f"{self.paths.changes}/"
            names = [path for path in self.listing if path.startswith((changes, directory))]
            tables = {name: (*operator.tables, *operator.configs)}
            named = NamedTables(epoch=self.epoch, tables=tables)
            bare = operator.tables.keys() - operator.configs.keys()
            return bool(bare) or any(cut_metadata(self.paths, named, names))

        path = self.paths.operator_metadata(name, self.epoch)
        return self._object(path, metadata.decode_operator, is_cut)

    def _object(
        self, path: StatePath, decode: Callable[[bytes, str], _T], is_cut: Callable[[_T], bool]
    ) -> _T | None:
        """Return an object; None if it is missing, damaged or cut short, which is noted."""

        def is_damaged(value: _T) -> bool:
            return identity_mismatch(self.paths, path, value) is not None or is_cut(value)

        return read_whole(self.store, path, decode, is_damaged, self.before)

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
        expected = {self.paths.operator_metadata(state.operator, self.epoch) for state in there}
        for path in self.listing:
            if (
                path.startswith(f"{directory}/")
                and path.endswith("/metadata")
                and (path not in expected | {self.paths.legacy_metadata(self.epoch)})
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
            start_time_micros=min(state.start_time_micros for state in there),
            finish_time_micros=max(state.finish_time_micros for state in there),
            operators=tuple(operator.operator for operator in before.operators),
        )

    # ---- an operator -----------------------------------------------------------------------------

    def _rebuilt_operator(
        self,
        head: LegacyCheckpoint,
        name: OperatorId,
        there: Sequence[OperatorCheckpoint],
        named: Epoch | None,
    ) -> OperatorCheckpoint:
        lost = LostEpoch(self.epoch, head.start_time_micros, head.finish_time_micros)
        work = LostOperator(self.paths, name, lost, self.readable, there, self.listing)
        operator = work.rebuilt(self.store, named)
        self.source[name] = self.readable[0].epoch
        self.tables += work.tables
        self.doubts += work.doubts
        self.unlisted += work.unlisted
        return operator

    def _unknown(self, reason: str) -> ProtocolError:
        return cannot_rebuild(self.paths, self.epoch, reason)
