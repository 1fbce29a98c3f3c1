"""Plan an edit of a managed job: what becomes of each table, and that no run is active."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from arroyo_dagster.errors import ConflictError, FormatError, InputError, NotFoundError
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.metadata.tree import CheckpointTree
from arroyo_dagster.state.model.changes import ChangeRecord
from arroyo_dagster.state.model.checkpoints import Checkpoint, CheckpointState, OperatorCheckpoint
from arroyo_dagster.state.model.ids import Epoch, StatePath
from arroyo_dagster.state.model.job_facts import JobCondition, JobFacts
from arroyo_dagster.state.model.layout import JobPaths, Layout
from arroyo_dagster.state.model.surgery.edits import (
    Edit,
    KeyDeletion,
    Rescale,
    RetainRows,
    SetEntry,
    SetOffsets,
    SetWatermark,
)
from arroyo_dagster.state.model.surgery.plans import (
    EditPlan,
    EditPrecondition,
    TableStep,
    WatermarkStep,
)
from arroyo_dagster.state.model.tables import ExpiringTimeKeyFiles
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
from arroyo_dagster.state.operations.gc.pins import read_pins
from arroyo_dagster.state.operations.restore.revision import OTHER_REVISIONS
from arroyo_dagster.state.operations.surgery.entries import ChangedEntries
from arroyo_dagster.state.operations.surgery.managed.entries import (
    moved_sources,
    moved_watermarks,
    set_entry,
)
from arroyo_dagster.state.operations.surgery.managed.rows import ShorterTable, shorter_tables
from arroyo_dagster.state.operations.surgery.plan import (
    check_approved,
    entries_step,
    kept_step,
    request_of,
)
from arroyo_dagster.state.operations.surgery.watermarks import watermark_steps, with_watermark
from arroyo_dagster.state.operations.verify.edits import read_edits
from arroyo_dagster.state.planning.compaction.rewrite import TableKey
from arroyo_dagster.state.planning.restore.reads import is_at_rest
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.restoring import restored_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagedEdit:
    """A planned edit of a managed job, and what its execution needs.

    Attributes:
        base: the epoch that is edited, the newest one.
        operators: its operators with their new watermarks, in its order.
        entries: the global keyed tables that get a file of changed entries.
        shorter: the tables that lose rows.
        offsets: of the sources, as `RunProgress` holds them; None = unchanged.
    """

    plan: EditPlan
    base: Checkpoint
    operators: tuple[OperatorCheckpoint, ...]
    entries: tuple[ChangedEntries, ...] = ()
    shorter: tuple[ShorterTable, ...] = ()
    offsets: str | None = None


def is_managed(store: ObjectStore, paths: JobPaths) -> bool:
    """Return whether a managed job wrote the newest epoch; False if it cannot be read."""
    try:
        return ParquetBackend(store, paths).load().progress is not None
    except (FormatError, NotFoundError):
        return False


def plan_managed_edit(
    store: ObjectStore, paths: JobPaths, directory: JobDirectory, edit: Edit
) -> EditPlan:
    """Plan an edit of the newest epoch of a managed job. Writes nothing: this is the dry run.

    Args:
        directory: a source that reports the job as stopped is evidence, where the last run did not
            end with an epoch of its own.

    Raises:
        InputError: the edit does not fit the job's tables.
        NotFoundError: the job has no epoch, or the named table or entry does not exist.
        FormatError: a file that the epoch lists is missing or broken.
        ConflictError: the newest epoch is this very edit, of relative positions.
    """
    return prepare_managed_edit(store, paths, directory, edit).plan


def prepare_managed_edit(
    store: ObjectStore, paths: JobPaths, directory: JobDirectory, edit: Edit
) -> ManagedEdit:
    """Plan an edit, and return what its execution needs; errors as `plan_managed_edit`."""
    base = ParquetBackend(store, paths).load()
    assert base.progress is not None
    _check_first_time(store, paths, base, edit)
    work = _ManagedWork(store, base)
    match edit:
        case Rescale():
            raise InputError(
                "a managed job needs no rescale: each run takes its rows by key range",
                job=paths.root,
                next_step="start it with another parallelism; nothing was changed",
            )
        case SetOffsets():
            work.move_sources(edit)
        case SetWatermark():
            work.move_watermark(edit)
        case SetEntry():
            work.entries = (set_entry(store, base, edit),)
            work.unknown = ("nobody checks whether the operator accepts the new value",)
        case _:
            work.remove_rows(edit)
    return work.prepared(paths, directory, edit)


def _check_first_time(store: ObjectStore, paths: JobPaths, base: Checkpoint, edit: Edit) -> None:
    """Check that the epoch was not published by this very request of relative positions."""
    request = request_of(edit)
    if request is None:
        return
    record = edit_of(store, paths, base)
    if record is None and _may_be_edited(store, paths, base):
        raise ConflictError(
            f"epoch {base.epoch} was published by an edit whose record is not listed, so it is "
            "unknown whether it was this one",
            job=paths.root,
            epoch=base.epoch,
            path=paths.changes,
            retryable=True,
            next_step="give absolute positions, or run it again once the store lists the record",
        )
    if record is not None and record.request == request:
        raise ConflictError(
            f"epoch {base.epoch} was already edited by these relative positions",
            job=paths.root,
            epoch=base.epoch,
            next_step="give absolute positions, or undo the edit first: `arroyo-state undo "
            f"{paths.root} --yes`",
        )


def _may_be_edited(store: ObjectStore, paths: JobPaths, checkpoint: Checkpoint) -> bool:
    """Return whether an edit may have published an epoch, by the pin of the epoch before: pins are
    read without a listing. A person's pin stands in place of that of a revision.
    """
    before = None if checkpoint.progress is None else checkpoint.progress.revises
    pins = (pin for pin in read_pins(store, paths).pins if pin.epoch == before)
    return any(not pin.released and not pin.reason.startswith(OTHER_REVISIONS) for pin in pins)


def edit_of(store: ObjectStore, paths: JobPaths, checkpoint: Checkpoint) -> ChangeRecord | None:
    """Return the record of the edit that published an epoch; None = no edit did."""
    if checkpoint.progress is None or checkpoint.progress.revises is None:
        return None
    records = read_edits(store, paths, [checkpoint]).records.values()
    return next((record for record in records if record is not None), None)


# ---- what changes --------------------------------------------------------------------------------


@dataclass(slots=True)
class _ManagedWork:
    """Collects what an edit changes."""

    store: ObjectStore
    base: Checkpoint
    entries: tuple[ChangedEntries, ...] = ()
    shorter: tuple[ShorterTable, ...] = ()
    operators: tuple[OperatorCheckpoint, ...] = ()
    offsets: str | None = None
    watermarks: tuple[WatermarkStep, ...] = ()
    stays: dict[TableKey, str] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    duplicate_outputs: tuple[str, ...] = ()
    missing_outputs: tuple[str, ...] = ()

    def move_sources(self, edit: SetOffsets) -> None:
        moved = moved_sources(self.store, self.base, edit)
        self.entries, self.offsets, self.duplicate_outputs, self.missing_outputs = moved
        self.unknown = ("whether the source still has the records at the new positions",)

    def move_watermark(self, edit: SetWatermark) -> None:
        self.entries = moved_watermarks(self.store, self.base, edit)
        self.operators = tuple(with_watermark(op, edit.at_micros) for op in self.base.operators)
        self.watermarks = tuple(watermark_steps(self.base, edit.at_micros))
        self.unknown = (
            "timers of event time fire, and windows close, by the new watermark once the job runs",
        )
        if self.base.progress is not None and self.base.progress.exhausted:
            self.unknown = (
                "the sources of the job have ended: a run of it ends at once, and nothing fires or "
                "closes by the new watermark",
            )
        never = []
        for before, after in zip(self.base.operators, self.operators, strict=True):
            for name, files in before.tables.items():
                if not isinstance(files, ExpiringTimeKeyFiles):
                    continue
                counts = [
                    restored_rows(self.store, side, name, managed=True, limit=0).count
                    for side in (before, after)
                ]
                key = before.operator, name
                self.stays[key] = f"a restore loads {counts[1]} of {counts[0]} rows"
                if counts[1] < counts[0]:
                    never.append(
                        f"{before.operator}.{name}: {counts[0] - counts[1]} rows are older than "
                        "the retention at the new watermark, and are dropped"
                    )
        self.missing_outputs = tuple(never)

    def remove_rows(self, edit: KeyDeletion | RetainRows) -> None:
        changes = shorter_tables(self.store, edit, self.base)
        self.shorter, self.stays, self.unknown = changes
        if isinstance(edit, KeyDeletion) and self.shorter:
            self.missing_outputs = (
                "no deletion is emitted: rows that were delivered downstream stay there, and must "
                "be removed there",
            )
            self.unknown += (
                f"epoch {self.base.epoch}, which stays pinned, older epochs and unlisted files "
                "still hold the key; `find-key` lists them. To delete them: unpin the epoch, "
                "then `gc run expire --keep 1`",
            )

    def prepared(self, paths: JobPaths, directory: JobDirectory, edit: Edit) -> ManagedEdit:
        base = self.base
        facts = directory.look_up([paths])[0].facts
        conditions = tuple(_preconditions(self.store, paths, base, facts))
        plan = EditPlan(
            pipeline=base.pipeline,
            job=base.job,
            edit=edit,
            epoch=base.epoch,
            worker_generation=base.worker_generation,
            ref=base.ref,
            condition=facts.condition,
            run_id=facts.run_id,
            why_not=next((check.evidence for check in conditions if not check.met), None),
            tables=tuple(self._steps()),
            watermarks=self.watermarks,
            preconditions=conditions,
            unknown=self.unknown,
            duplicate_outputs=self.duplicate_outputs,
            missing_outputs=self.missing_outputs,
            objects={
                path: hashlib.sha256(self.store.read(path)).hexdigest()
                for path in metadata_objects(paths, base)
            },
            publishes=Epoch(base.epoch + 1),
        )
        return ManagedEdit(
            plan=plan,
            base=base,
            operators=self.operators or base.operators,
            entries=tuple(changed for changed in self.entries if changed.files),
            shorter=self.shorter,
            offsets=self.offsets,
        )

    def _steps(self) -> Iterator[TableStep]:
        """Yield what becomes of each table, in the order of the epoch."""
        steps = {(table.step.operator, table.step.table): table.step for table in self.shorter}
        steps |= {
            (changed.table.operator.operator, changed.table.name): entries_step(changed)
            for changed in self.entries
            if changed.files
        }
        for operator in self.base.operators:
            for name in operator.tables:
                key = operator.operator, name
                yield steps.get(key) or kept_step(operator, name, self.stays.get(key))


def metadata_objects(paths: JobPaths, checkpoint: Checkpoint) -> tuple[StatePath, ...]:
    """Return the objects that hold the metadata of an epoch, the one that makes it exist first."""
    if paths.layout is Layout.PROTOCOL:
        return (checkpoint.ref,)
    operators = (
        paths.operator_metadata(op.operator, checkpoint.epoch) for op in checkpoint.operators
    )
    return (checkpoint.ref, *operators)


# ---- preconditions -------------------------------------------------------------------------------


def _preconditions(
    store: ObjectStore, paths: JobPaths, base: Checkpoint, facts: JobFacts
) -> Iterator[EditPrecondition]:
    yield rest_of(store, paths, base, facts)
    state = base.state.value
    ready = base.state is CheckpointState.READY
    yield EditPrecondition(
        name="the newest epoch is complete and committed",
        met=ready,
        evidence=f"epoch {base.epoch} is {state}"
        + ("" if ready else "; start the job once: that finishes the commit"),
    )


def rest_of(
    store: ObjectStore, paths: JobPaths, base: Checkpoint, facts: JobFacts
) -> EditPrecondition:
    """Return the evidence that no run of a job is active.

    In the protocol layout the edit fences a run that is active all the same, and in the legacy
    layout it takes the lease that every run holds: the state is safe even if the evidence is wrong.
    """
    rest = is_at_rest(base, CheckpointTree(store, paths).fence())
    if facts.condition is not JobCondition.UNKNOWN:
        evidence = f"{facts.condition.value}, by {facts.source}"
        rest = facts.condition.at_rest
    elif rest:
        evidence = f"its last run ended with epoch {base.epoch}"
        if paths.layout is Layout.LEGACY:
            evidence += "; a run that has begun since holds the writer's lease"
    else:
        evidence = (
            f"its last run did not end with epoch {base.epoch} and may be alive; end it with "
            f"`arroyo-state stop {paths.root}`, or add `--assume {paths.job}=stopped` if its "
            "process is gone"
        )
    return EditPrecondition(name="no run of the job is active", met=rest, evidence=evidence)


def checked(paths: JobPaths, prepared: ManagedEdit, approved: str | None) -> ManagedEdit:
    """Check that a planned edit may be executed now, and return it.

    Raises:
        InputError: a precondition is not met.
        ConflictError: another plan was approved, or the job has changed since the plan was made.
    """
    plan = prepared.plan
    if plan.why_not is not None:
        raise InputError(
            f"the job cannot be edited now: {plan.why_not}", job=paths.root, epoch=plan.epoch
        )
    check_approved(plan.digest, approved, job=paths.root, epoch=plan.epoch)
    return prepared
