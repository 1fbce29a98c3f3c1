"""Plan an edit of a stopped Arroyo job: facts, then what becomes of each table, with evidence."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from arroyo_dagster.errors import ConflictError, InputError, NotFoundError
from arroyo_dagster.state.codec.bincode.plain_values import typed_value
from arroyo_dagster.state.codec.iso_times import iso_micros
from arroyo_dagster.state.model.checkpoints import Checkpoint, CheckpointState, OperatorCheckpoint
from arroyo_dagster.state.model.ids import OperatorId, StatePath, TableName
from arroyo_dagster.state.model.job_facts import JobCondition
from arroyo_dagster.state.model.layout import JobPaths, is_rewritten
from arroyo_dagster.state.model.rewrite import RewriteRule
from arroyo_dagster.state.model.surgery.bootstrap import BootstrapRequest
from arroyo_dagster.state.model.surgery.edits import (
    AnyEdit,
    Edit,
    Fork,
    KeyDeletion,
    Rescale,
    RetainRows,
    SetEntry,
    SetOffsets,
    SetWatermark,
)
from arroyo_dagster.state.model.surgery.evolve import Evolve
from arroyo_dagster.state.model.surgery.plans import (
    EditPlan,
    EditPrecondition,
    TableAction,
    TableStep,
    WatermarkStep,
)
from arroyo_dagster.state.model.surgery.rebuild import RebuildPlan
from arroyo_dagster.state.model.tables import GlobalKeyedFiles, TimeFile
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
from arroyo_dagster.state.operations.compaction.rewrite_preconditions import (
    JobSnapshot,
    check_may,
    table_facts,
    take_snapshot,
)
from arroyo_dagster.state.operations.surgery.entries import (
    ChangedEntries,
    GlobalTable,
    changed_entries,
    json_of,
    plain_key,
    read_global_tables,
)
from arroyo_dagster.state.operations.surgery.graphs.find import find_graph
from arroyo_dagster.state.operations.surgery.offsets import offset_changes
from arroyo_dagster.state.operations.surgery.rescale import LoadedRows, not_tried, rescaled, to_do
from arroyo_dagster.state.operations.surgery.rows import RewrittenRows, expiring_tables, row_changes
from arroyo_dagster.state.operations.surgery.watermarks import (
    GENERATOR,
    check_joins,
    emitted_windows,
    has_unknown_join,
    watermark_changes,
)
from arroyo_dagster.state.operations.verify.edits import EditFacts, read_edits, read_rebuilds
from arroyo_dagster.state.planning.compaction.rewrite import TableFacts, TableKey, restart_losses
from arroyo_dagster.state.planning.verify.edits import was_applied
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.known.catalogue import Catalogue, default_catalogue
from arroyo_dagster.state.tables.restoring import restored_rows

_NOT_CONCERNED = "the edit does not concern it"
_COMMITS = "its entries belong to a commit in two phases"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedEdit:
    """A plan, and what its execution needs.

    Attributes:
        entries: the global keyed tables that change.
        rows: the expiring tables that change.
        loaded: of a rescale, the rows that the new subtasks load of each expiring table.
        operators: the epoch's operators with their new watermarks, in the epoch's order.
    """

    plan: EditPlan
    snapshot: JobSnapshot
    facts: TableFacts
    entries: tuple[ChangedEntries, ...] = ()
    rows: tuple[RewrittenRows, ...] = ()
    operators: tuple[OperatorCheckpoint, ...] = ()
    loaded: LoadedRows | None = None


def plan_edit(store: ObjectStore, paths: JobPaths, directory: JobDirectory, edit: Edit) -> EditPlan:
    """Plan an edit of the epoch that a stopped Arroyo job would restore. Writes nothing: this is
    the dry run.

    A job that is not stopped, or of unknown status, is planned as well; `why_not` then says why the
    edit cannot be executed now.

    Args:
        directory: the source of the job's status.

    Raises:
        InputError: it is a managed job; or the edit does not fit the job's tables; names the
            object, and what was expected.
        NotFoundError: the job has no checkpoint, or the named table or entry does not exist.
        FormatError: a file that the checkpoint lists is missing or broken.
        ConflictError: an earlier edit was interrupted; undo it first.
    """
    return prepare_edit(store, paths, directory, edit).plan


def prepare_edit(
    store: ObjectStore,
    paths: JobPaths,
    directory: JobDirectory,
    edit: Edit,
    catalogue: Catalogue | None = None,
) -> PreparedEdit:
    """Plan an edit, and return what its execution needs; errors as `plan_edit`."""
    snapshot = editable_snapshot(store, paths, directory, edit)
    facts = table_facts(store, snapshot)
    work = _Work(store, snapshot, facts, edit, directory)
    if isinstance(edit, KeyDeletion | RetainRows):
        work.remove_rows(edit)
    elif isinstance(edit, Rescale):
        work.rescale(edit)
    else:
        tables = read_global_tables(store, snapshot.checkpoint, catalogue or default_catalogue())
        work.change_entries(edit, tables)
    return work.prepared(paths)


def editable_snapshot(
    store: ObjectStore, paths: JobPaths, directory: JobDirectory, edit: AnyEdit
) -> JobSnapshot:
    """Read the facts about a job whose state is to change.

    Raises:
        InputError: it is a managed job.
        ConflictError: an earlier edit was interrupted, or was this very one.
        NotFoundError, FormatError: the job has no checkpoint, or one that cannot be read.
    """
    try:
        snapshot = take_snapshot(store, paths, directory)
    except NotFoundError as error:
        if "no checkpoint" not in error.message:
            raise
        other = ""
        if isinstance(edit, Fork):
            other = "; or see `arroyo-state fork --create`"
        elif isinstance(edit, Evolve | BootstrapRequest):
            other = (
                f", since {edit.name} reads the columns of its tables from one; or create one from "
                "a job of the same SQL with `arroyo-state fork --create`"
            )
        raise NotFoundError(
            "the job has no checkpoint",
            job=paths.root,
            next_step="let it finish a checkpoint, and stop it with one" + other,
        ) from error
    except InputError as error:
        if "managed job" not in error.message:
            raise
        raise InputError(
            "this is a managed job: its state is not changed in place",
            job=paths.root,
            next_step="edit it with `arroyo-state edit`, which publishes an epoch of its own; go "
            "back to an older epoch with `arroyo-state rollback`",
        ) from error
    check_earlier(store, paths, snapshot.checkpoint, edit)
    return snapshot


# ---- what changes --------------------------------------------------------------------------------


@dataclass(slots=True)
class _Work:
    """Collects what an edit changes."""

    store: ObjectStore
    snapshot: JobSnapshot
    facts: TableFacts
    edit: Edit
    directory: JobDirectory
    entries: tuple[ChangedEntries, ...] = ()
    rows: tuple[RewrittenRows, ...] = ()
    operators: tuple[OperatorCheckpoint, ...] = ()
    watermarks: tuple[WatermarkStep, ...] = ()
    stays: Mapping[TableKey, str] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    duplicate_outputs: tuple[str, ...] = ()
    missing_outputs: tuple[str, ...] = ()
    evidence: tuple[EditPrecondition, ...] = ()
    afterwards: tuple[str, ...] = ()
    loaded: LoadedRows | None = None

    @property
    def checkpoint(self) -> Checkpoint:
        return self.snapshot.checkpoint

    def remove_rows(self, edit: KeyDeletion | RetainRows) -> None:
        changes = row_changes(self.store, edit, self.checkpoint, self.facts)
        self.rows, self.stays, self.unknown = changes
        if not self.rows:
            return
        if isinstance(edit, KeyDeletion):
            self.missing_outputs = (
                "no retraction of the key is emitted: rows that were delivered downstream stay "
                "there, and must be removed there",
                "open windows, sessions and joins of the key emit nothing of the removed rows",
            )
            older = "epochs before this one, and files that it no longer lists, still hold the key"
            self.unknown = (*self.unknown, f"{older} until they expire; see `find-key`")
        else:
            self.missing_outputs = ("windows and joins of the removed rows emit nothing of them",)

    def rescale(self, edit: Rescale) -> None:
        outcome = rescaled(self.store, edit, self.checkpoint, self.facts)
        self.rows, self.stays = outcome.changed, outcome.stays
        self.evidence, self.loaded = (outcome.evidence,), outcome.loaded
        self.duplicate_outputs = outcome.duplicate_outputs
        self.missing_outputs = outcome.missing_outputs
        self.unknown = tuple(not_tried(self.checkpoint, edit.parallelism))
        self.afterwards = tuple(to_do(self.checkpoint, edit.parallelism))

    def change_entries(
        self, edit: SetOffsets | SetWatermark | SetEntry, tables: Sequence[GlobalTable]
    ) -> None:
        if isinstance(edit, SetOffsets):
            offsets = offset_changes(edit, tables)
            self.entries, self.unknown = offsets.tables, offsets.unknown
            self.duplicate_outputs, self.missing_outputs = (
                offsets.duplicate_outputs,
                offsets.missing_outputs,
            )
            if edit.at_micros is not None:
                name = f"first records at or after {iso_micros(edit.at_micros)}, as looked up"
                evidence = ", ".join(offsets.lookup)
                self.evidence = (EditPrecondition(name=name, met=True, evidence=evidence),)
            self._note_commits()
        elif isinstance(edit, SetEntry):
            self.entries = (_set_entry(edit, self.checkpoint, tables),)
            self.unknown = ("nobody checks whether the operator accepts the new value",)
        else:
            changes = watermark_changes(edit, self.checkpoint, tables)
            self.entries, self.operators = changes.tables, changes.operators
            self.watermarks = changes.steps
            self.duplicate_outputs, self.unknown = changes.duplicate_outputs, changes.unknown
            self._compare_restores(edit)

    def _note_commits(self) -> None:
        if self.duplicate_outputs and self.checkpoint.needs_commit:
            committed = "rows that sinks committed in two phases are written and committed again"
            self.duplicate_outputs = (*self.duplicate_outputs, committed)

    def _compare_restores(self, edit: SetWatermark) -> None:
        """Compare what a restore loads and emits at the old watermark and at the new one.

        Raises:
            InputError: a join of windows would fail at each start.
        """
        stays: dict[TableKey, str] = {}
        never, again = [], []
        windows = emitted_windows(self.store, self.checkpoint, self.operators)
        dropped: dict[OperatorId, int] = {}
        new = {operator.operator: operator for operator in self.operators}
        for table in expiring_tables(self.checkpoint):
            operator = table.operator.operator
            before = restored_rows(self.store, table.operator, table.name, managed=False, limit=0)
            after = restored_rows(self.store, new[operator], table.name, managed=False, limit=0)
            where = f"{operator}.{table.name}"
            stays[table.key] = f"a restore loads {after.count} of {before.count} rows"
            if operator in windows:
                stays[table.key] += f"; {windows[operator].summary}"
            if after.count < before.count:
                dropped[operator] = dropped.get(operator, 0) + before.count - after.count
                never.append(
                    f"{where}: {before.count - after.count} rows are older than the retention at "
                    "the new watermark, and are dropped"
                )
            elif after.count > before.count:
                again.append(
                    f"{where}: {after.count - before.count} rows that had expired are loaded again"
                )
        graph = None
        if has_unknown_join(self.checkpoint):
            job = JobPaths(self.checkpoint.job, self.checkpoint.pipeline)
            graph = find_graph(self.directory, job).graph
        check_joins(edit, self.checkpoint, windows.values(), dropped, graph)
        for w in windows.values():
            if w.never:
                never.append(f"{w.operator}: {w.summary}: the new watermark has passed them")
            if w.again:
                again.append(
                    f"{w.operator}: {w.again} windows that were emitted are emitted once more, "
                    "without new rows"
                )
        self.stays, self.missing_outputs = stays, tuple(never)
        self.duplicate_outputs = (*self.duplicate_outputs, *again)

    def prepared(self, paths: JobPaths) -> PreparedEdit:
        snapshot, checkpoint = self.snapshot, self.checkpoint
        plan = replace(
            bare_plan(snapshot, self.edit),
            tables=tuple(self._steps()),
            watermarks=self.watermarks,
            preconditions=(*preconditions(snapshot, self.facts), *self.evidence),
            unknown=self.unknown,
            duplicate_outputs=self.duplicate_outputs,
            missing_outputs=(*self.missing_outputs, *self._lost_at_start()),
            afterwards=self.afterwards,
        )
        return PreparedEdit(
            plan=plan,
            snapshot=snapshot,
            facts=self.facts,
            entries=tuple(changed for changed in self.entries if changed.files),
            rows=self.rows,
            operators=self.operators or checkpoint.operators,
            loaded=self.loaded,
        )

    def _lost_at_start(self) -> Iterator[str]:
        repaired = [
            (table.step.operator, table.step.table)
            for table in self.rows
            if table.rewrite.rule is RewriteRule.UNKEYED
        ]
        kept = {key: facts for key, facts in self.facts.unkeyed.items() if key not in repaired}
        yield from restart_losses(kept)

    def _steps(self) -> Iterator[TableStep]:
        """Yield what becomes of each table, in the order of the epoch."""
        rows = {(table.step.operator, table.step.table): table.step for table in self.rows}
        entries = {(e.table.operator.operator, e.table.name): e for e in self.entries if e.files}
        for operator in self.checkpoint.operators:
            for name, files in operator.tables.items():
                key = operator.operator, name
                if key in rows:
                    yield rows[key]
                elif key in entries:
                    yield entries_step(entries[key])
                else:
                    reason = self.stays.get(key)
                    if isinstance(files, GlobalKeyedFiles) and isinstance(self.edit, Rescale):
                        reason = "every subtask reads all of its entries"
                    elif isinstance(files, GlobalKeyedFiles) and self.rows:
                        reason = "it holds no rows of keys"
                    yield kept_step(operator, name, reason)


def kept_step(operator: OperatorCheckpoint, name: TableName, reason: str | None) -> TableStep:
    return TableStep(
        operator=operator.operator,
        table=name,
        action=TableAction.KEPT,
        reason=reason or _NOT_CONCERNED,
        files=operator.tables[name].paths,
    )


def entries_step(changed: ChangedEntries) -> TableStep:
    table = changed.table
    return TableStep(
        operator=table.operator.operator,
        table=table.name,
        action=TableAction.CHANGED,
        reason=f"{len(changed.changes)} entries of the {table.owner} change",
        rows=sum(len(file.pairs) for file in table.files),
        entries=changed.changes,
        files=tuple(file.path for file in table.files),
    )


def _set_entry(
    edit: SetEntry, checkpoint: Checkpoint, tables: Sequence[GlobalTable]
) -> ChangedEntries:
    where: dict[str, Any] = {"operator": str(edit.operator), "table": str(edit.table)}
    table = next(
        (t for t in tables if (t.operator.operator, t.name) == (edit.operator, edit.table)),
        None,
    )
    if table is None:
        raise InputError(
            f"epoch {checkpoint.epoch} has no such global keyed table",
            **where,
            next_step="`arroyo-state show` lists the tables; rows of others cannot be set",
        )
    if table.config.uses_two_phase_commit or table.config.config.description == "recovery data":
        raise InputError(f"the table cannot be edited: {_COMMITS}", **where)
    if table.config.config.description == GENERATOR:
        raise InputError(
            "the watermark of a generator belongs to the operators' watermarks",
            **where,
            next_step="use `arroyo-state edit watermark`",
        )
    key_text = json.dumps(json_of(edit.key, "key", where))
    keys = list(dict.fromkeys(plain_key(table, key) for _, key, _ in table.entries()))
    if key_text not in keys:
        raise InputError(
            f"the table has no entry with the key {edit.key:.80}",
            **where,
            keys=", ".join(keys[:20]) or "none",
        )
    assert table.form.value_type is not None
    value = typed_value(json_of(edit.value, "value", where), table.form.value_type)

    def change(key: Any, now: Any) -> Any:
        return value if plain_key(table, key) == key_text else now

    return changed_entries(table, change)


def bare_plan(snapshot: JobSnapshot, edit: AnyEdit) -> EditPlan:
    """Return the plan of an edit in place with the epoch and the status of a snapshot, and nothing
    of what becomes of the tables yet.
    """
    checkpoint, facts = snapshot.checkpoint, snapshot.answer.facts
    return EditPlan(
        pipeline=checkpoint.pipeline,
        job=checkpoint.job,
        edit=edit,
        epoch=checkpoint.epoch,
        worker_generation=checkpoint.worker_generation,
        ref=checkpoint.ref,
        condition=facts.condition,
        run_id=facts.run_id,
        why_not=snapshot.why_not,
        objects={path: hashlib.sha256(data).hexdigest() for path, data in snapshot.objects.items()},
    )


# ---- preconditions -------------------------------------------------------------------------------


def preconditions(snapshot: JobSnapshot, facts: TableFacts) -> Iterator[EditPrecondition]:
    job, checkpoint = snapshot.answer.facts, snapshot.checkpoint
    at_rest = snapshot.why_not is None
    status = f"{job.condition.value}" + (f" ({job.state})" if job.state else "")
    run = "" if job.run_id is None else f", run {job.run_id}"
    source = f", by {job.source}" if job.condition is not JobCondition.UNKNOWN else ""
    yield EditPrecondition(
        name="the job is stopped",
        met=at_rest,
        evidence=f"{status}{run}{source}" if at_rest else str(snapshot.why_not),
    )
    named = job.newest_ready_epoch
    yield EditPrecondition(
        name="the epoch is the one that the next start restores",
        met=checkpoint.state is CheckpointState.READY,
        evidence=f"epoch {checkpoint.epoch} is {checkpoint.state.value}; "
        + ("resolved from the store" if named is None else f"Arroyo names epoch {named}"),
    )
    yield EditPrecondition(
        name="every operator has metadata",
        met=True,
        evidence=f"{len(checkpoint.operators)} operators",
    )
    yield EditPrecondition(
        name="every listed file exists", met=True, evidence=f"{len(facts.sizes)} files"
    )
    yield EditPrecondition(
        name="no earlier edit was interrupted", met=True, evidence="records and metadata agree"
    )


def check_can_run(
    paths: JobPaths, snapshot: JobSnapshot, plan: EditPlan | RebuildPlan, approved: str | None
) -> None:
    """Check that a planned change in place may be executed now.

    Raises:
        InputError: the job is not at rest, or its status is unknown.
        ConflictError: another plan was approved.
    """
    check_may(paths, snapshot)
    check_approved(plan.digest, approved, job=paths.root, epoch=plan.epoch)


def check_approved(digest: str, approved: str | None, **facts: Any) -> None:
    """Check that a plan is the one that a person approved, or that was made without the lease.

    Raises:
        ConflictError: it is another one.
    """
    if approved is not None and approved != digest:
        raise ConflictError(
            f"plan {approved} was approved, but the current plan is {digest}",
            **facts,
            next_step="review the new plan and approve it; nothing was changed",
        )


def with_lists(
    operator: OperatorCheckpoint, lists: Mapping[TableKey, Sequence[StatePath | TimeFile]]
) -> OperatorCheckpoint:
    """Return an operator with new lists of files. An expiring table without a file vanishes, as
    Arroyo writes it.
    """
    tables, configs = dict(operator.tables), dict(operator.configs)
    for name, files in operator.tables.items():
        listed = lists.get((operator.operator, name))
        if listed is None:
            continue
        if isinstance(files, GlobalKeyedFiles):
            paths = tuple(file for file in listed if not isinstance(file, TimeFile))
            tables[name] = replace(files, files=paths)
        elif listed:
            time_files = tuple(file for file in listed if isinstance(file, TimeFile))
            tables[name] = replace(files, files=time_files)
        else:
            del tables[name]
            configs.pop(name, None)
    return replace(operator, tables=tables, configs=configs)


# ---- no earlier edit may stand in the way of another one -----------------------------------------

_ABSOLUTE = "give absolute positions"


def check_earlier(
    store: ObjectStore, paths: JobPaths, checkpoint: Checkpoint, edit: AnyEdit
) -> None:
    """Check that no earlier edit of this epoch was interrupted, or was this very one."""
    edits = read_edits(store, paths, [checkpoint])
    for path, record in edits.unfinished.items():
        raise ConflictError(
            f"the edit {record.operation!r} was interrupted: some operators have the new state, "
            "and some the old one",
            job=paths.root,
            path=path,
            next_step=f"undo it first: `arroyo-state undo {paths.root} --yes`",
        )
    request = request_of(edit)
    if request is not None:
        _check_first_time(store, paths, checkpoint, request, edits)


def _check_first_time(
    store: ObjectStore, paths: JobPaths, checkpoint: Checkpoint, request: str, edits: EditFacts
) -> None:
    """Check that the epoch was not edited by this very request of relative positions."""
    for path, earlier in edits.records.items():
        if earlier is None and path.name.startswith(f"{checkpoint.epoch:07}-"):
            raise ConflictError(
                f"an edit of epoch {checkpoint.epoch} has a record that does not decode, so it is "
                "unknown whether it was this one",
                job=paths.root,
                path=path,
                next_step=_ABSOLUTE,
            )
        if earlier is None or earlier.request != request:
            continue
        if was_applied(earlier, edits.digests):
            raise ConflictError(
                f"epoch {checkpoint.epoch} was already edited by these relative positions",
                job=paths.root,
                path=path,
                next_step=f"{_ABSOLUTE}, or undo the edit first: `arroyo-state undo "
                f"{paths.root} --yes`",
            )
    if not any(edits.records.values()) and _has_edited_entries(checkpoint):
        rebuilds = read_rebuilds(store, edits).values()
        if not any(record is not None and record.epoch == checkpoint.epoch for record in rebuilds):
            raise ConflictError(
                f"epoch {checkpoint.epoch} has entries that an edit has written, whose record is "
                "not listed, so it is unknown whether it was this one",
                job=paths.root,
                epoch=checkpoint.epoch,
                path=paths.changes,
                retryable=True,
                next_step=f"{_ABSOLUTE}, or run it again once the store lists the record",
            )


def _has_edited_entries(checkpoint: Checkpoint) -> bool:
    """Return whether the epoch lists entries that this package wrote: Arroyo writes all anew."""
    return any(
        isinstance(files, GlobalKeyedFiles) and any(map(is_rewritten, files.files))
        for operator in checkpoint.operators
        for files in operator.tables.values()
    )


def request_of(edit: AnyEdit) -> str | None:
    """Return what identifies an edit that must not be applied twice; None for any other."""
    return edit.request if isinstance(edit, SetOffsets) else None
