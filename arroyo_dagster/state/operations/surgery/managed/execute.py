"""Execute an edit of a managed job, and undo it: each is published as an epoch of its own.

The edited epoch stays, pinned, until the edit is undone or the pin is released. A run that is alive
against the evidence is fenced, so that it publishes nothing more. Nothing is deleted.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from arroyo_dagster.errors import (
    ConflictError,
    InputError,
    NotFoundError,
    ProtocolError,
    StorageError,
)
from arroyo_dagster.state.codec.derived import encode
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.metadata.lease import LeaseOptions, lease
from arroyo_dagster.state.model.changes import ChangeKind, ChangeRecord, JobHead
from arroyo_dagster.state.model.checkpoints import Checkpoint, OperatorCheckpoint
from arroyo_dagster.state.model.ids import Epoch, StatePath
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.rollback import RollbackPlan
from arroyo_dagster.state.model.surgery.edits import Edit
from arroyo_dagster.state.model.surgery.plans import EditOutcome
from arroyo_dagster.state.model.tables import ExpiringTimeKeyFiles, TimeFile
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
from arroyo_dagster.state.operations.gc.pins import put_pins, release
from arroyo_dagster.state.operations.restore.revision import (
    BEFORE_EDIT,
    PINS_OF_REVISIONS,
    RevisedContent,
    RevisionWriter,
    publish_revision,
)
from arroyo_dagster.state.operations.restore.rollback import plan_rollback, run_rollback
from arroyo_dagster.state.operations.surgery.execute import EditOptions
from arroyo_dagster.state.operations.surgery.managed.plan import (
    ManagedEdit,
    checked,
    edit_of,
    metadata_objects,
    prepare_managed_edit,
    rest_of,
)
from arroyo_dagster.state.operations.surgery.managed.rows import write_shorter
from arroyo_dagster.state.operations.surgery.plan import request_of, with_lists
from arroyo_dagster.state.planning.compaction.rewrite import TableKey
from arroyo_dagster.state.storage.store import ObjectStore


def run_managed_edit(
    store: ObjectStore,
    paths: JobPaths,
    directory: JobDirectory,
    edit: Edit,
    options: EditOptions | None = None,
) -> EditOutcome:
    """Edit the newest epoch of a managed job: publish the new content as the next epoch.

    The next run continues from it. If it is interrupted at any point, the job is unchanged or
    edited; files that were written and are not listed are orphans.

    Args:
        directory: as of `plan_managed_edit`; asked again under the lease.

    Raises:
        InputError: the evidence says that a run may be active, or the edit does not fit the tables.
        LeaseHeldError: another process maintains the job; in the legacy layout, or runs it.
        ConflictError: the job has changed since the plan was made, or another plan was approved.
        ProtocolError: a new file does not hold what it should; nothing was published.
        NotFoundError, FormatError: the epoch, or a file of it, is missing or broken.
        StorageError: the store failed; it is unknown whether the epoch was published.
    """
    chosen = options or EditOptions()
    prepared = checked(paths, prepare_managed_edit(store, paths, directory, edit), chosen.approved)
    if prepared.plan.empty:
        return EditOutcome(plan=prepared.plan)
    with lease(store, paths, chosen.owner, LeaseOptions.of(chosen)) as leased:
        again = prepare_managed_edit(leased, paths, directory, edit)
        checked(paths, again, prepared.plan.digest)
        work = _Publication(again, chosen, paths, leased.lease.token)
        epoch = publish_revision(
            leased,
            paths,
            again.base,
            work.write,
            reason=f"{BEFORE_EDIT}{edit.name} ({again.plan.digest})",
            owner=chosen.owner,
            clock=chosen.clock,
        )
        return work.finished(leased, epoch)


@dataclass(slots=True)
class _Publication:
    """Writes the content of the new epoch, and the record of the edit beside it."""

    edit: ManagedEdit
    options: EditOptions
    paths: JobPaths
    token: int
    record: ChangeRecord | None = None
    record_path: StatePath | None = None

    def write(self, base: Checkpoint, writer: RevisionWriter) -> RevisedContent:
        lists = self._new_lists(writer)
        operators = tuple(with_lists(operator, lists) for operator in self.edit.operators)
        # Before the epoch exists: without it, a request of relative positions could be repeated.
        self._put_record(writer, operators)
        return RevisedContent(operators, self.edit.offsets)

    def _new_lists(self, writer: RevisionWriter) -> dict[TableKey, Sequence[StatePath | TimeFile]]:
        lists: dict[TableKey, Sequence[StatePath | TimeFile]] = {}
        for changed in self.edit.entries:
            table = changed.table
            (new,) = changed.files.values()
            (old,) = table.files
            before = dict(old.pairs)
            pairs = {key: value for key, value in new.pairs if before[key] != value}
            path = writer.put_pairs(table.operator.operator, table.name, pairs, version=new.version)
            listed = table.operator.tables[table.name].paths
            lists[table.operator.operator, table.name] = [*listed, path]
        for cut in self.edit.shorter:
            files = cut.operator.tables[cut.config.table]
            former = files.files if isinstance(files, ExpiringTimeKeyFiles) else files.paths
            listed_now, removed = write_shorter(writer, cut, former)
            if removed != cut.step.removed:
                raise ProtocolError(
                    f"{removed} rows were left out, but the plan names {cut.step.removed}; nothing "
                    "was published",
                    job=self.paths.root,
                    operator=cut.operator.operator,
                    table=cut.config.table,
                    next_step="report it; the job is unchanged",
                )
            lists[cut.operator.operator, cut.config.table] = listed_now
        return lists

    def _put_record(self, writer: RevisionWriter, operators: Sequence[OperatorCheckpoint]) -> None:
        plan, base = self.edit.plan, self.edit.base
        listed = {path for op in operators for files in op.tables.values() for path in files.paths}
        self.record = ChangeRecord(
            kind=ChangeKind.EDIT,
            operation=plan.edit.name,
            digest=plan.digest,
            pipeline=base.pipeline,
            job=base.job,
            epoch=writer.epoch,
            worker_generation=writer.backend.generation,
            finish_time_micros=writer.finish_time_micros,
            token=self.token,
            created_at_micros=writer.finish_time_micros,
            head=JobHead(epoch=writer.epoch, worker_generation=writer.backend.generation),
            unlisted=tuple(path for path in dict.fromkeys(base.paths) if path not in listed),
            request=request_of(plan.edit),
        )
        self.record_path = self.paths.changes / self.record.name
        writer.store.put(self.record_path, encode(self.record))

    def finished(self, held: ObjectStore, epoch: Epoch) -> EditOutcome:
        """Prove the new epoch, complete the record, and return the outcome."""
        assert self.record is not None
        assert self.record_path is not None
        plan, backend = self.edit.plan, ParquetBackend(held, self.paths)
        after = backend.prepare_checkpoint_load(epoch)
        objects = _digests(held, self.paths, plan.objects, after)
        self.record = replace(self.record, objects=objects)
        held.put(self.record_path, encode(self.record))
        outcome = EditOutcome(
            plan=plan,
            published=True,
            record=self.record_path,
            objects=objects,
            unlisted=self.record.unlisted,
            older_epochs=tuple(older for older in backend.every_epoch() if older < epoch),
        )
        self.options.on_published(outcome)
        return outcome


def _digests(
    held: ObjectStore, paths: JobPaths, before: Mapping[StatePath, str], after: Checkpoint
) -> dict[StatePath, tuple[str, str]]:
    """Return for each metadata object of an epoch the digest of the one it replaces, and its own.

    An operator without tables that it had before is the same operator: both have equally many.
    """
    return {
        path: (old, hashlib.sha256(held.read(path)).hexdigest())
        for path, old in zip(metadata_objects(paths, after), before.values(), strict=True)
    }


# ---- undo ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagedUndo:
    """An edit of a managed job to undo.

    Attributes:
        operation: the name of the edit.
        edited: the epoch that the edit published.
        rollback: to the epoch before it.
        why_not: why it cannot be undone now; None = it can.
    """

    operation: str
    edited: Epoch
    rollback: RollbackPlan
    why_not: str | None


def plan_managed_undo(
    store: ObjectStore, paths: JobPaths, directory: JobDirectory
) -> ManagedUndo | None:
    """Plan to undo the newest edit that is not undone. Writes nothing.

    Returns:
        The plan; None if the job has run since, or nothing was edited.

    Raises:
        NotFoundError, FormatError, InputError: the epoch before the edit has expired, or cannot be
            restored.
    """
    backend = ParquetBackend(store, paths)
    newest = edited = backend.load()
    while edited.progress is not None and edited.progress.rolled_back_to is not None:
        try:
            edited = backend.load(edited.progress.rolled_back_to)
        except NotFoundError:
            return None  # what an earlier undo restored has expired: the job has run since
    record = edit_of(store, paths, edited)
    if record is None:
        return None
    assert record.operation is not None
    assert edited.progress is not None
    assert edited.progress.revises is not None
    facts = directory.look_up([paths])[0].facts
    rest = rest_of(store, paths, newest, facts)
    return ManagedUndo(
        operation=record.operation,
        edited=edited.epoch,
        rollback=plan_rollback(store, paths, edited.progress.revises, undoes=True),
        why_not=None if rest.met else rest.evidence,
    )


def run_managed_undo(
    store: ObjectStore,
    paths: JobPaths,
    directory: JobDirectory,
    options: EditOptions | None = None,
) -> ManagedUndo | None:
    """Publish the content from before the newest edit as the next epoch, and release its pin.

    A pin of the same epoch that somebody else has set stays.

    Raises:
        InputError: a run of the job may be active.
        ConflictError: the job has changed meanwhile, or is leased by another process.
        NotFoundError, FormatError, ProtocolError, StorageError: as `run_rollback`.
    """
    chosen = options or EditOptions()
    with lease(store, paths, chosen.owner, LeaseOptions.of(chosen)) as held:
        undo = plan_managed_undo(held, paths, directory)
        if undo is None:
            return None
        if undo.why_not is not None:
            raise InputError(f"the edit cannot be undone now: {undo.why_not}", job=paths.root)
        run_rollback(
            held, undo.rollback, owner=chosen.owner, clock=chosen.clock, sleep=chosen.sleep
        )
        # An epoch that was restored needs no pin: the newest one lists its files.
        done, reasons = {undo.rollback.epoch}, PINS_OF_REVISIONS
        with contextlib.suppress(ConflictError, StorageError):
            put_pins(held, paths, lambda kept: release(kept, epochs=done, reasons=reasons))
    return undo
