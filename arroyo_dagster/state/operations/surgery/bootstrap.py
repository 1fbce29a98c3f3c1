"""Bootstrap: write tables of a stopped Arroyo job from computed rows, as of one cut of its inputs.

Tables that are not given start empty. Sources and watermarks are set to the cut, so that the job
goes on as if it had processed everything before.

Source: docs/spec/state-surgery.md, `The trick`, row Bootstrap.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pyarrow as pa

from arroyo_dagster.errors import InputError, ProtocolError
from arroyo_dagster.state.codec.hashing.ahash import HashVariant
from arroyo_dagster.state.metadata.lease import Leased
from arroyo_dagster.state.model.checkpoints import Checkpoint, OperatorCheckpoint
from arroyo_dagster.state.model.ids import OperatorId, StatePath
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.surgery.bootstrap import BootstrapRequest, BootstrapTable
from arroyo_dagster.state.model.surgery.edits import NewPosition, SetOffsets, SetWatermark
from arroyo_dagster.state.model.surgery.plans import (
    EditOutcome,
    EditPlan,
    EditPrecondition,
    TableAction,
    TableStep,
)
from arroyo_dagster.state.model.tables import (
    ExpiringTimeKeyConfig,
    ExpiringTimeKeyFiles,
    TimeFile,
)
from arroyo_dagster.state.operations.catalog.hash_variant import find_hash_variant
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
from arroyo_dagster.state.operations.compaction.rewrite_preconditions import (
    JobSnapshot,
    check_not_cancelled,
    table_facts,
)
from arroyo_dagster.state.operations.surgery.carried_files import without_rows
from arroyo_dagster.state.operations.surgery.computed_rows import ComputedRows, TableTarget
from arroyo_dagster.state.operations.surgery.entries import (
    ChangedEntries,
    GlobalTable,
    changed_entries,
    read_global_tables,
    write_entries,
)
from arroyo_dagster.state.operations.surgery.execute import (
    ChangeSteps,
    EditOptions,
    NewState,
    execute_change,
)
from arroyo_dagster.state.operations.surgery.offsets import OffsetChanges, offset_changes
from arroyo_dagster.state.operations.surgery.plan import (
    bare_plan,
    check_can_run,
    editable_snapshot,
    preconditions,
    with_lists,
)
from arroyo_dagster.state.operations.surgery.watermarks import WatermarkChanges, watermark_changes
from arroyo_dagster.state.operations.surgery.window import PlannableEdit
from arroyo_dagster.state.planning.compaction.rewrite import TableFacts, TableKey
from arroyo_dagster.state.planning.surgery.columns import SESSION
from arroyo_dagster.state.planning.surgery.overrides import raise_together
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.known.catalogue import default_catalogue
from arroyo_dagster.state.tables.known.positions import rule_of
from arroyo_dagster.state.tables.merge.rewrite import MAX_UNKEYED_ROWS


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapJob:
    """The computed tables of a stopped job, and the cut of its inputs that they are of.

    Attributes:
        tables: the rows by operator and table.
        watermark_micros: event time at the cut.
        positions: where the sources continue, absolute; see `arroyo-state sql @offsets JOB`.
    """

    paths: JobPaths
    directory: JobDirectory
    tables: Mapping[TableKey, ComputedRows]
    watermark_micros: int
    positions: tuple[tuple[OperatorId | None, NewPosition], ...] = ()

    def plan(self, store: ObjectStore) -> EditPlan:
        """Compute the rows and plan to write them. Writes nothing: the dry run.

        Raises:
            InputError: it is a managed job; a table does not exist; columns do not fit their table,
                which is found before rows are computed; rows do not; or a position or the watermark
                cannot be set.
            NotFoundError, FormatError: the job has no checkpoint, or one that cannot be read.
            ConflictError: an earlier edit was interrupted; undo it first.
        """
        return self._prepared(store).plan

    def run(
        self,
        store: ObjectStore,
        options: EditOptions | None = None,
        *,
        plan: EditPlan | None = None,
    ) -> EditOutcome:
        """Write the tables in place. `run_undo` restores the job's own state until it is started.

        Args:
            plan: a plan of this bootstrap that a person has reviewed; it saves computing the rows
                to make one. It is executed only if the job has not changed since.

        Raises:
            LeaseHeldError: another process maintains the job.
            ConflictError: the job changed or was started meanwhile; or another plan was approved.
            ProtocolError: the rows, computed again, are others; nothing was published.
            InputError, NotFoundError, FormatError: as `plan`.
        """
        run_options = options or EditOptions(owner="bootstrap")
        if plan is not None:
            run_options = replace(run_options, approved=plan.digest)
        prepared = self._prepared(store, None if plan is None else self._tables_of(plan))
        check_can_run(self.paths, prepared.snapshot, prepared.plan, run_options.approved)

        def write(held: Leased, again: _Prepared) -> NewState:
            checkpoint = again.snapshot.checkpoint
            lists: dict[TableKey, Sequence[StatePath | TimeFile]] = {
                key: files for key in self.tables if (files := self._written(held, again, key))
            }
            for changed in again.entries:
                table = changed.table.operator.operator, changed.table.name
                lists[table] = write_entries(held, self.paths, checkpoint, changed)
            check_not_cancelled(self.paths, run_options.cancelled)
            return NewState(
                tuple(
                    without_rows(
                        held,
                        checkpoint,
                        with_lists(operator, lists),  # a table without rows is emptied
                        [name for owner, name in again.emptied if owner == operator.operator],
                    )
                    for operator in again.operators
                )
            )

        # Rows that differ from the plan are found when they are written.
        again = partial(self._prepared, tables=prepared.request.tables)
        change = ChangeSteps(again, write)
        return execute_change(store, self.paths, self.directory, prepared, change, run_options)

    def edit(self) -> PlannableEdit:
        """Return this bootstrap as an edit that is planned and executed later, or in a window."""
        return PlannableEdit(
            self.paths,
            plan=lambda store, directory: replace(self, directory=directory).plan(store),
            run=lambda store, directory, options: replace(self, directory=directory).run(
                store, options
            ),
        )

    # ---- planning --------------------------------------------------------------------------------

    def _tables_of(self, plan: EditPlan) -> tuple[BootstrapTable, ...]:
        """Return the computed tables of a plan.

        Raises:
            InputError: it is a plan of other tables.
        """
        tables = plan.edit.tables if isinstance(plan.edit, BootstrapRequest) else ()
        if [(table.operator, table.table) for table in tables] != list(self.tables):
            raise InputError(
                "the plan is not of this bootstrap: it has other tables",
                job=self.paths.root,
                next_step="plan this one",
            )
        return tables

    def _prepared(
        self, store: ObjectStore, tables: tuple[BootstrapTable, ...] | None = None
    ) -> _Prepared:
        if any(position.relative for _, position in self.positions):
            raise InputError(
                "a bootstrap takes absolute positions: those of the cut",
                job=self.paths.root,
                next_step="give each as a number without a sign",
            )
        request = BootstrapRequest(
            tables=(),
            watermark_micros=self.watermark_micros,
            positions=tuple((name, new.partition, new.position) for name, new in self.positions),
        )
        snapshot = editable_snapshot(store, self.paths, self.directory, request)
        checkpoint = snapshot.checkpoint
        hashes = find_hash_variant(store, checkpoint)
        targets = self._targets(checkpoint, hashes.variant)
        if tables is None:
            tables = tuple(self._described(key, target) for key, target in targets.items())
        request = replace(request, tables=tables)
        globals_ = read_global_tables(store, checkpoint, default_catalogue())
        cut = _Cut.of(self, checkpoint, tables, globals_)
        steps = list(_steps(checkpoint, tables, cut))
        facts = table_facts(store, snapshot)
        plan = replace(
            bare_plan(snapshot, request),
            tables=tuple(steps),
            watermarks=cut.watermark.steps,
            preconditions=(
                *preconditions(snapshot, facts),
                EditPrecondition(
                    name="computed rows have the columns of the job's tables",
                    met=True,
                    evidence=f"{len(tables)} tables; keys: {hashes.summary}",
                ),
            ),
            unknown=tuple(_unknown(hashes.variant, cut)),
            duplicate_outputs=cut.offsets.duplicate_outputs,
            missing_outputs=(
                *_missing(tables, cut, globals_),
                *_half_given(steps, tables),
            ),
        )
        emptied = [step for step in steps if step.action is TableAction.EMPTIED]
        return _Prepared(
            plan=plan,
            request=request,
            snapshot=snapshot,
            facts=facts,
            targets=targets,
            entries=tuple(changed for changed in cut.changes if changed.files),
            operators=cut.watermark.operators,
            emptied=tuple((step.operator, step.table) for step in emptied),
        )

    def _targets(
        self, checkpoint: Checkpoint, variant: HashVariant | None
    ) -> dict[TableKey, TableTarget]:
        """Return the tables of the job that get the rows; errors of all columns together."""
        targets = {
            key: _target(checkpoint, key, variant, self.watermark_micros) for key in self.tables
        }
        errors = [
            error
            for (operator, name), target in targets.items()
            for error in column_errors(
                f"{operator}.{name}", self.tables[operator, name].schema, target.columns
            )
        ]
        raise_together("the bootstrap", errors)
        return targets

    def _described(self, key: TableKey, target: TableTarget) -> BootstrapTable:
        facts = self.tables[key].facts(target)
        where: dict[str, Any] = {"operator": key[0], "table": key[1]}
        if target.keys is not None and self.tables[key].doubled(target):
            raise InputError(
                f"several rows have the same key ({', '.join(target.keys)}): an aggregate has one"
                if target.keys
                else "there are several rows: an aggregate without GROUP BY has one",
                **where,
                next_step="group the rows by exactly these columns"
                if target.keys
                else "aggregate all rows to one",
            )
        if target.one_by_one and facts.digest.rows > MAX_UNKEYED_ROWS:
            raise InputError(
                f"{facts.digest.rows} rows of an aggregate without GROUP BY would need a row group "
                f"each; {MAX_UNKEYED_ROWS} are the most",
                next_step="leave the table out: it starts empty",
                **where,
            )
        return BootstrapTable(
            operator=key[0],
            table=key[1],
            digest=facts.digest,
            expired=facts.expired,
            oldest_nanos=facts.oldest_nanos,
        )

    # ---- execution -------------------------------------------------------------------------------

    def _written(self, held: Leased, again: _Prepared, key: TableKey) -> tuple[TimeFile, ...]:
        (planned,) = (rows for rows in again.request.tables if (rows.operator, rows.table) == key)
        facts, files = self.tables[key].write(again.targets[key], held)
        if facts.digest != planned.digest:
            raise ProtocolError(
                "the rows, computed again, are not those of the plan; nothing was published",
                operator=key[0],
                table=key[1],
                rows=facts.digest.rows,
                planned=planned.digest.rows,
                next_step="compute the same rows each time, for example from a stored table",
            )
        return tuple(files)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """A plan, and what its execution needs."""

    plan: EditPlan
    request: BootstrapRequest
    snapshot: JobSnapshot
    facts: TableFacts
    targets: Mapping[TableKey, TableTarget]
    entries: tuple[ChangedEntries, ...]
    operators: tuple[OperatorCheckpoint, ...]
    emptied: tuple[TableKey, ...]


@dataclass(frozen=True, slots=True)
class _Cut:
    """The sources, watermarks and open sessions of a job, set to the cut."""

    offsets: OffsetChanges
    watermark: WatermarkChanges
    sessions: tuple[ChangedEntries, ...]

    @classmethod
    def of(
        cls,
        job: BootstrapJob,
        checkpoint: Checkpoint,
        given: tuple[BootstrapTable, ...],
        tables: list[GlobalTable],
    ) -> _Cut:
        watermark = SetWatermark(at_micros=job.watermark_micros)
        offsets = OffsetChanges((), (), (), ())
        for operator in dict.fromkeys(operator for operator, _ in job.positions):
            positions = tuple(position for named, position in job.positions if named == operator)
            edit = SetOffsets(positions=positions, operator=operator)
            # Every table of rows holds computed ones or starts empty.
            changes = offset_changes(edit, tables, counted_in=None)
            offsets = OffsetChanges(
                tables=(*offsets.tables, *changes.tables),
                duplicate_outputs=(*offsets.duplicate_outputs, *changes.duplicate_outputs),
                missing_outputs=(),
                unknown=(*offsets.unknown, *changes.unknown),
                kept=(*offsets.kept, *changes.kept),
            )
        sessions = session_starts(given, checkpoint, tables)
        return cls(offsets, watermark_changes(watermark, checkpoint, tables), sessions)

    @property
    def changes(self) -> tuple[ChangedEntries, ...]:
        return (*self.offsets.tables, *self.watermark.tables, *self.sessions)


def _target(
    checkpoint: Checkpoint, key: TableKey, variant: HashVariant | None, watermark_micros: int
) -> TableTarget:
    """Return the table that takes computed rows.

    Raises:
        InputError: the job has no such table.
    """
    operator = checkpoint.operator(key[0])
    config = None if operator is None else operator.configs.get(key[1])
    if config is None or not isinstance(config.config, ExpiringTimeKeyConfig):
        raise InputError(
            f"epoch {checkpoint.epoch} has no such table of rows, so its columns are not known",
            operator=key[0],
            table=key[1],
            next_step="let the job process rows until it has written the table, and stop it again; "
            "`arroyo-state show` lists its tables",
        )
    return TableTarget(
        checkpoint=checkpoint,
        operator=key[0],
        config=config.config,
        variant=variant or HashVariant.FALLBACK,
        cutoff_micros=max(0, watermark_micros - config.config.retention_micros),
    )


def _steps(
    checkpoint: Checkpoint, tables: tuple[BootstrapTable, ...], cut: _Cut
) -> Iterator[TableStep]:
    """Yield what becomes of each table, in the order of the epoch."""
    computed = {(table.operator, table.table): table for table in tables}
    sessions = {session.table.operator.operator for session in cut.sessions}
    changed = {
        (edit.table.operator.operator, edit.table.name): edit for edit in cut.changes if edit.files
    }
    for operator in checkpoint.operators:
        for name, files in operator.tables.items():
            key = operator.operator, name
            description = operator.configs[name].config.description
            entries = changed[key].changes if key in changed else ()
            rows = computed[key].digest.rows if key in computed else None
            action, reason = TableAction.KEPT, "the bootstrap does not concern it"
            if key in computed:
                action = TableAction.CHANGED if rows else TableAction.EMPTIED
                reason = f"{rows} computed rows replace its rows"
            elif entries:
                action, reason = TableAction.CHANGED, f"{len(entries)} entries are set to the cut"
            elif isinstance(files, ExpiringTimeKeyFiles) or (
                description == SESSION_START and operator.operator not in sessions
            ):
                action, reason = TableAction.EMPTIED, "no rows are given for it"
            yield TableStep(
                operator=operator.operator,
                table=name,
                action=action,
                reason=reason,
                rows=rows,
                entries=entries,
                files=files.paths,
            )


def _unknown(variant: HashVariant | None, cut: _Cut) -> Iterator[str]:
    if variant is None:
        yield (
            "the job has no row that shows how its build hashes keys: they are hashed as official "
            "builds for Linux do"
        )
    yield from cut.offsets.unknown
    yield from cut.watermark.unknown
    yield "whether the rows are those that the job's SQL computes is not checked"


def _missing(
    tables: tuple[BootstrapTable, ...], cut: _Cut, globals_: list[GlobalTable]
) -> Iterator[str]:
    for new in tables:
        if new.expired:
            yield (
                f"{new.operator}.{new.table}: {new.expired} of {new.digest.rows} rows are older "
                "than the retention at the new watermark, and may not be loaded"
            )
    moved = {change.table.operator.operator for change in cut.offsets.tables}
    contained = "rows that it has read are processed only if the computed rows contain them"
    for table in globals_:
        if rule_of(table.config) is not None and table.operator.operator not in moved:
            yield f"{table.operator.operator} keeps its positions: {contained}"
    for partition in cut.offsets.kept:
        yield f"{partition} keeps its position: {contained}"
    # Records that positions leave out are in the computed rows: they are not missing.
    yield "outputs of the rows before the cut are not emitted"


def _half_given(steps: list[TableStep], tables: tuple[BootstrapTable, ...]) -> Iterator[str]:
    """Yield the tables that start empty beside a computed one of the same operator."""
    computed = {table.operator for table in tables}
    for step in steps:
        if step.action is TableAction.EMPTIED and step.operator in computed:
            yield (
                f"{step.operator}.{step.table} starts empty beside computed rows of its operator: "
                "outputs lack what it would hold"
            )


# ---- which sessions of a session window are open: its table `e`, beside the rows in `s` ----------
# Source: docs/spec/arroyo-state.md 5.6. A restore takes the earliest start of all subtasks, loads
# the rows since then, and closes the sessions that the watermark has passed.

SESSION_START = "earliest start time of all active batches."
"""The description of table `e`."""


def session_starts(
    given: Sequence[BootstrapTable], checkpoint: Checkpoint, tables: Sequence[GlobalTable]
) -> tuple[ChangedEntries, ...]:
    """Set the earliest start of each session window that gets computed rows, in every subtask.

    Args:
        given: the computed tables.
        tables: the global keyed tables of the job.

    Raises:
        InputError: the job has stored no start yet.
    """
    changed = []
    for table in given:
        operator = checkpoint.operator(table.operator)
        assert operator is not None
        if operator.configs[table.table].config.description == SESSION:
            starts = _starts_of(table.operator, tables)
            changed.append(changed_entries(starts, partial(_start, table)))
    return tuple(changed)


def _start(given: BootstrapTable, key: int, value: int | None) -> int | None:
    return given.oldest_nanos


def _starts_of(operator: OperatorId, tables: Sequence[GlobalTable]) -> GlobalTable:
    for table in tables:
        is_starts = table.config.config.description == SESSION_START
        if is_starts and table.operator.operator == operator and any(f.pairs for f in table.files):
            return table
    raise InputError(
        "the job has not stored which sessions are open, so the rows of sessions are not loaded",
        operator=operator,
        next_step="let the job process rows, and stop it with a checkpoint again",
    )


# ---- whether computed columns fit their table, before any row is computed ------------------------


def column_errors(place: str, found: pa.Schema, wanted: pa.Schema) -> Iterator[InputError]:
    """Yield what is wrong with computed columns, each column of another type with both types.

    Args:
        place: the operator and the table, for people.
        found: the columns as they will be computed.
        wanted: the columns of the job's table.
    """
    if found.names != wanted.names:
        yield InputError(
            f"{place}: computed rows have other columns than the table of the job",
            expected=", ".join(f"{column.name} {column.type}" for column in wanted),
            found=", ".join(f"{column.name} {column.type}" for column in found),
            next_step="select these columns in this order",
        )
        return
    for have, want in zip(found, wanted, strict=True):
        if not fits(have.type, want.type):
            yield InputError(
                f"{place}: column {want.name!r} does not fit the type {want.type} of the job: it "
                f"is {have.type}",
                next_step="give another expression, or cast it; of an aggregate cast the argument: "
                "sum(cast(price as double))",
            )


def fits(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether values of a type may be those of another one: each is converted or refused.

    Text is never a number, and a fraction never a whole one, whatever the values are.
    """
    is_ = pa.types
    if found.equals(wanted) or is_.is_null(found):
        return True
    if _is_list(wanted):
        return _is_list(found) and fits(found.value_type, wanted.value_type)
    if is_.is_struct(wanted):
        return (
            is_.is_struct(found)
            and [field.name for field in found] == [field.name for field in wanted]
            and all(fits(a.type, b.type) for a, b in zip(found, wanted, strict=True))
        )
    if is_.is_integer(wanted):
        whole = is_.is_integer(found) or (is_.is_decimal(found) and found.scale == 0)
        return bool(whole)
    if is_.is_floating(wanted) and is_.is_floating(found):
        return bool(found.bit_width <= wanted.bit_width)
    return any(is_kind(wanted) and is_source(found) for is_kind, is_source in _CONVERTED)


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


_CONVERTED = (
    (pa.types.is_floating, pa.types.is_integer),
    (pa.types.is_decimal, pa.types.is_decimal),
    (pa.types.is_timestamp, pa.types.is_timestamp),
    (pa.types.is_fixed_size_binary, _is_binary),
    (_is_binary, _is_binary),
    (_is_text, _is_text),
)
"""The kind of a column of the job, and a kind whose values are checked when they are converted."""
