"""Evolve: give a stopped Arroyo job the state of another job whose SQL may differ.

Operators are matched by what they are, not by their ids. Rows keep their order, hashes and row
generations; columns are put into the order of the job's own tables, and filled or dropped.

Source: docs/spec/state-surgery.md, `The trick` and `Rules`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.checkpoints import Checkpoint, OperatorCheckpoint
from arroyo_dagster.state.model.ids import Epoch, OperatorId, StatePath, TableName
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.surgery.evolve import Evolve, OperatorMatch, Overrides
from arroyo_dagster.state.model.surgery.graphs import PipelineGraph, ProgrammedOperator
from arroyo_dagster.state.model.surgery.plans import (
    EditOutcome,
    EditPlan,
    EditPrecondition,
    TableAction,
    TableStep,
)
from arroyo_dagster.state.model.tables import ExpiringTimeKeyConfig, TableConfig
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
from arroyo_dagster.state.operations.surgery.carried_files import CarriedTable, StateSource
from arroyo_dagster.state.operations.surgery.carried_rows import TablePair, table_described
from arroyo_dagster.state.operations.surgery.execute import EditOptions
from arroyo_dagster.state.operations.surgery.graphs.find import (
    HOW,
    FoundGraph,
    find_graph,
    find_places,
)
from arroyo_dagster.state.operations.surgery.rescale import why_one_parallelism
from arroyo_dagster.state.operations.surgery.transfer import (
    Transfer,
    TransferJob,
    TwoJobs,
    entry_keys,
    of_sink,
    parallelism_not_tried,
)
from arroyo_dagster.state.planning.surgery.columns import ACCUMULATORS, BATCHES, columns_of
from arroyo_dagster.state.planning.surgery.matching import (
    OperatorShape,
    map_option,
    match_operators,
    shapes_of,
)
from arroyo_dagster.state.planning.surgery.overrides import check_overrides
from arroyo_dagster.state.storage.store import ObjectStore

_FILE_SOURCE = "file_source"


def plan_evolve(
    source: StateSource,
    store: ObjectStore,
    paths: JobPaths,
    directory: JobDirectory,
    overrides: Overrides | None = None,
) -> EditPlan:
    """Plan to give a stopped Arroyo job the state of a job of other SQL. Writes nothing: the dry
    run.

    Args:
        directory: the source of the stopped job's status, and of the graphs of both pipelines.
        overrides: what a person decides; None = nothing.

    Raises:
        InputError: a job is a managed job; both write one file; operators do not match for certain,
            with the pairs that are suggested; the state of an operator cannot be carried; or an
            override names something that does not exist.
        NotFoundError: a job has no checkpoint, or the source has no such epoch.
        ProtocolError: the source's epoch does not pass verification, or its keys are hashed
            otherwise.
        FormatError: metadata or a file is broken.
        ConflictError: an earlier edit was interrupted; undo it first.
    """
    return _job(source, paths, directory, overrides).prepare(store).plan


def run_evolve(
    source: StateSource,
    store: ObjectStore,
    paths: JobPaths,
    directory: JobDirectory,
    overrides: Overrides | None = None,
    options: EditOptions | None = None,
) -> EditOutcome:
    """Give a stopped Arroyo job the state of a job of other SQL, in place.

    The source is only read. Nothing is deleted, and `run_undo` restores the job's own state until
    it is started. If it is interrupted, see `run_edit`.

    Args:
        directory: the source of the stopped job's status; asked again before each change.
        overrides: as of `plan_evolve`.

    Raises:
        LeaseHeldError: another process maintains the job.
        ConflictError: the job changed or was started meanwhile; the source's epoch expired or
            changed while it was read; another plan was approved; or the evolve was cancelled.
        InputError, NotFoundError, ProtocolError, FormatError: as `plan_evolve`.
    """
    run_options = options or EditOptions(owner="arroyo-state evolve")
    return _job(source, paths, directory, overrides).run(store, run_options)


def _job(
    source: StateSource,
    paths: JobPaths,
    directory: JobDirectory,
    overrides: Overrides | None,
) -> TransferJob:
    user_overrides = overrides or Overrides()
    # Once: a plan and its execution match by the same graphs.
    graphs = [find_graph(directory, job) for job in (source.paths, paths)]

    def request(path: StatePath, epoch: Epoch) -> Evolve:
        return Evolve(source=path, epoch=epoch, overrides=user_overrides)

    return TransferJob(
        source, paths, directory, request, lambda jobs: _evolved(jobs, user_overrides, graphs)
    )


def _evolved(jobs: TwoJobs, overrides: Overrides, graphs: Sequence[FoundGraph]) -> Transfer:
    places = find_places(graphs, (jobs.taken, jobs.target))
    in_graphs = (None, None) if isinstance(places, str) else places
    theirs, ours = shapes_of(jobs.taken, in_graphs[0]), shapes_of(jobs.target, in_graphs[1])
    check_overrides(theirs, ours, overrides)
    matching = match_operators(theirs, ours, overrides)
    if matching.suggestions:
        raise InputError(
            f"the operators do not match for certain: {matching.suggestions[0]}",
            job=jobs.paths.root,
            further="; ".join(map(str, matching.suggestions[1:])) or "none",
            graphs=f"not known: {places}" if isinstance(places, str) else "known",
            next_step=f"if this is right, add {matching.decision}; if not, name other pairs, or "
            "let an operator start without state with --start-empty OPERATOR"
            + (f"; or {HOW}" if isinstance(places, str) else ""),
        )
    decoded = (
        [] if isinstance(places, str) else [job.graph for job in graphs if job.graph is not None]
    )
    transfer = _Evolution(jobs, overrides, matching.matches, ours, decoded).transfer()
    if isinstance(places, str):
        transfer.unknown.append(
            f"operators were matched without the graphs of the pipelines ({places}): {HOW}"
        )
    else:
        origins = ", ".join(dict.fromkeys(graph.origin for graph in decoded))
        transfer.evidence.append(
            EditPrecondition(
                name="the graphs of both pipelines have the operators of the epochs",
                met=True,
                evidence=f"from {origins}",
            )
        )
    return transfer


# ---- tables --------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Evolution:
    """Decides what becomes of each table of the job, and of each of the source.

    Attributes:
        graphs: of the source and of the job, if both are those of the epochs; else empty.
    """

    jobs: TwoJobs
    overrides: Overrides
    matches: tuple[OperatorMatch, ...]
    order: tuple[OperatorShape, ...]
    graphs: Sequence[PipelineGraph] = ()
    found: Transfer = field(default_factory=Transfer)
    problems: list[str] = field(default_factory=list)

    def transfer(self) -> Transfer:
        """Return what becomes of each table.

        Raises:
            InputError: the state of an operator cannot be carried.
        """
        self._check_columns()
        by_id = {match.operator: match for match in self.matches}
        for shape in self.order:
            operator = _operator(self.jobs.target, shape.operator)
            match = by_id.get(shape.operator)
            if match is None:
                self._unmatched(operator)
            else:
                self._matched(_operator(self.jobs.taken, match.source), operator)
            self.found.watermarks[operator.operator] = self._watermark(operator, match)
        self._dropped()
        if self.problems:
            raise InputError(
                f"the state cannot be carried: {self.problems[0]}",
                job=self.jobs.paths.root,
                further="; ".join(self.problems[1:]) or "none",
                next_step="let the operator start without state with --start-empty OPERATOR, or "
                "see docs/change-sql.md for the overrides",
            )
        self.found.matches = self.matches
        self.found.unknown.append(
            "filters and expressions before an operator are not in its state: if they were "
            "changed, carried rows are those of the SQL before"
        )
        self.found.evidence.append(
            EditPrecondition(
                name="every operator with state has one match, or starts without state",
                met=True,
                evidence=f"{len(self.matches)} of {len(self.order)} operators take the state of an "
                "operator of the source",
            )
        )
        return self.found

    def _check_columns(self) -> None:
        """Check that overrides of columns name columns that exist: a typing error must not fill."""
        sources = {match.operator: match.source for match in self.matches}
        overrides = self.overrides
        columns = [(fill.operator, fill.column) for fill in overrides.fills]
        columns += [(rename.operator, rename.column) for rename in overrides.renames]
        for operator, column in columns:
            names = _column_names(_operator(self.jobs.target, operator))
            _check_column(operator, column, names)
        for rename in overrides.renames:
            if rename.operator in sources:
                other = _operator(self.jobs.taken, sources[rename.operator])
                _check_column(other.operator, rename.source, _column_names(other))

        for move in overrides.accumulators:
            if table_described(_operator(self.jobs.target, move.operator), BATCHES) is None:
                raise InputError(
                    f"an override moves aggregates of {move.operator}, which keeps no arguments",
                    next_step="leave it out",
                )

    def _step(
        self,
        operator: OperatorCheckpoint,
        name: TableName,
        action: TableAction,
        reason: str,
        source: OperatorCheckpoint | None = None,
    ) -> None:
        holder = operator if source is None else source
        files = holder.tables.get(name)
        self.found.steps.append(
            TableStep(
                operator=operator.operator,
                table=name,
                action=action,
                reason=reason,
                files=() if files is None else files.paths,
                source=None if source is None else source.operator,
            )
        )

    def _keep(self, operator: OperatorCheckpoint, name: TableName) -> None:
        reason = "a sink's state means nothing to another job: the job keeps its own"
        self._step(operator, name, TableAction.KEPT, reason)

    # ---- operators without a match ---------------------------------------------------------------

    def _unmatched(self, operator: OperatorCheckpoint) -> None:
        start_empty = operator.operator in self.overrides.start_empty
        reason = "no operator of the source is like it"
        if start_empty:
            reason = "it starts without state, as asked"
        left = [other.operator for other in self._left_over()]
        for name in operator.tables:
            if of_sink(operator, name):
                self._keep(operator, name)
                continue
            self._step(operator, name, TableAction.EMPTIED, reason)
            if not start_empty and left:
                problem = (
                    f"{operator.operator}: {reason}, and {', '.join(left)} would be dropped; "
                    f"decide it with `{map_option(left[0], operator.operator)}` if it is of the "
                    f"same kind, or with --overrides: `drop: {json.dumps(left)}`"
                )
                self.problems = list(dict.fromkeys((*self.problems, problem)))
        emptied = any(not of_sink(operator, name) for name in operator.tables)
        if emptied and operator.operator.startswith("source_"):
            self.found.duplicate_outputs.append(
                f"{operator.operator}: it begins where its connector begins without state: rows "
                "that carried windows, joins and aggregates hold already are counted again"
            )

    def _left_over(self) -> Iterator[OperatorCheckpoint]:
        """Yield the operators of the source with state that nobody takes, and nobody drops."""
        taken = {match.source for match in self.matches} | set(self.overrides.drop)
        for op in self.jobs.taken.operators:
            if op.operator not in taken and any(not of_sink(op, name) for name in op.tables):
                yield op

    def _dropped(self) -> None:
        dropped = set(self.overrides.drop)
        named = [other for other in self.jobs.taken.operators if other.operator in dropped]
        for operator in (*named, *self._left_over()):
            reason = "no operator of the job takes it"
            if operator.operator in dropped:
                reason = "dropped, as asked"
            for name in operator.tables:
                self._step(operator, name, TableAction.DROPPED, reason, operator)
            self.found.missing_outputs.append(
                f"{operator.operator} of the source: rows that its state holds are never emitted"
            )

    def _watermark(
        self, operator: OperatorCheckpoint, match: OperatorMatch | None
    ) -> tuple[int | None, int | None]:
        """Return the watermark of the operator at the source's epoch: of its match; else of the
        operator of its id, if that is of its kind; else the smallest of all.
        """
        taken = self.jobs.taken
        if match is not None:
            other = _operator(taken, match.source)
            return other.min_watermark_micros, other.max_watermark_micros
        if operator.min_watermark_micros is None:
            return None, operator.max_watermark_micros
        timed = [other for other in taken.operators if other.min_watermark_micros is not None]
        same = [other for other in timed if other.operator == operator.operator]
        least = min(same or timed, key=lambda other: other.min_watermark_micros or 0, default=None)
        if least is None:
            return None, None
        return least.min_watermark_micros, least.max_watermark_micros

    # ---- operators with a match ------------------------------------------------------------------

    def _matched(self, other: OperatorCheckpoint, operator: OperatorCheckpoint) -> None:
        self.found.unknown += parallelism_not_tried(other, operator)
        reason = self._why_other_input(other, operator)
        if reason is not None:
            self.problems.append(f"{operator.operator}: {reason}")
            return
        for name in dict.fromkeys((*other.tables, *operator.tables)):
            if any(of_sink(side, name) for side in (other, operator)):
                if name in operator.tables:
                    self._keep(operator, name)
                continue
            if name not in other.tables:
                text = f"{other.operator} has no rows of it at epoch {self.jobs.taken.epoch}"
                self._step(operator, name, TableAction.EMPTIED, text, None)
                continue
            problem = self._carried(other, operator, name)
            if isinstance(problem, str):
                self.problems.append(f"{operator.operator}.{name}: {problem}")

    def _why_other_input(
        self, other: OperatorCheckpoint, operator: OperatorCheckpoint
    ) -> str | None:
        """Return why the positions of a source mean nothing to the job's; None if they may."""
        if not operator.operator.startswith("source_"):
            return None
        jobs = self.jobs
        theirs, ours = (
            entry_keys(store, checkpoint, _FILE_SOURCE, side.operator)
            for store, checkpoint, side in (
                (jobs.source.store, jobs.taken, other),
                (jobs.store, jobs.target, operator),
            )
        )
        if theirs and ours and theirs != ours:
            return (
                f"it reads {', '.join(sorted(ours))}, and {', '.join(sorted(theirs))} in the source"
            )
        names = (other.operator, operator.operator)
        tables = [str(name).rpartition("_")[0] for name in names]
        if tables[0] != tables[1]:
            self.found.unknown.append(
                f"{names[1]}: it takes the positions of {names[0]}; whether both read the same "
                "topic or path is not in the state"
            )
        return None

    def _carried(
        self, other: OperatorCheckpoint, operator: OperatorCheckpoint, name: TableName
    ) -> str | None:
        """Add a table that takes the source's rows; return why it cannot."""
        theirs, ours = other.configs.get(name), operator.configs.get(name)
        if theirs is None:
            return "the source has no configuration of it"
        if ours is None:
            return self._without_columns(other, operator, name, theirs)
        moved = why_one_parallelism(other, name, operator.parallelism)
        if moved is not None:
            return moved
        there, here = theirs.config, ours.config
        if isinstance(there, ExpiringTimeKeyConfig) and isinstance(here, ExpiringTimeKeyConfig):
            programs = _programs(self.graphs, other, operator)
            pair = TablePair(self.jobs, self.overrides, (other, operator), (there, here), programs)
            rows = pair.carried()
            if isinstance(rows, str):
                return rows
            keys = _keys(other, operator, name)
            self._add(other, operator, CarriedTable(*keys, ours, rows.conversion), rows.changes)
            self.found.missing_outputs += rows.missing_outputs
            self.found.unknown += rows.unknown
            return None
        if theirs != ours:
            return "its kind, description or version of values is another one in the source"
        self._add(other, operator, CarriedTable(*_keys(other, operator, name), ours))
        return None

    def _without_columns(
        self,
        other: OperatorCheckpoint,
        operator: OperatorCheckpoint,
        name: TableName,
        theirs: TableConfig,
    ) -> str | None:
        """Decide about a table whose columns are unknown: the job has not written it yet."""
        rows = isinstance(theirs.config, ExpiringTimeKeyConfig)
        if (
            theirs.config.description == BATCHES
            and table_described(operator, ACCUMULATORS) is not None
        ):
            text = "the job has no aggregate that keeps its arguments"
            self._step(other, name, TableAction.DROPPED, text, other)
            return None
        if rows and operator.operator not in self.overrides.same_columns:
            return (
                "the job has not written it yet, so its columns are not known; let the job process "
                "rows and stop it again, or name the operator under `same_columns` if its columns "
                "are those of the source"
            )
        moved = why_one_parallelism(other, name, operator.parallelism)
        if moved is not None:
            return moved
        if rows:
            self.found.unknown.append(
                f"{operator.operator}.{name}: its columns are taken for those of the source"
            )
        self._add(other, operator, CarriedTable(*_keys(other, operator, name), theirs))
        return None

    def _add(
        self,
        other: OperatorCheckpoint,
        operator: OperatorCheckpoint,
        table: CarriedTable,
        texts: tuple[str, ...] = (),
    ) -> None:
        files = other.tables[table.source[1]].paths
        epoch = self.jobs.taken.epoch
        whole = f"{len(files)} files of {other.operator} at epoch {epoch}"
        fills = table.conversion is not None and bool(table.conversion.columns.filled)
        action = TableAction.FILLED if fills else TableAction.CARRIED
        self.found.carried.append(table)
        self._step(operator, table.target[1], action, "; ".join((whole, *texts)), other)


def _programs(
    graphs: Sequence[PipelineGraph], other: OperatorCheckpoint, operator: OperatorCheckpoint
) -> tuple[ProgrammedOperator, ProgrammedOperator] | None:
    """Return what the programs say of an operator of the source and of one of the job."""
    if not graphs:
        return None
    theirs, ours = graphs[0].programmed(other.operator), graphs[1].programmed(operator.operator)
    return None if theirs is None or ours is None else (theirs, ours)


def _keys(
    other: OperatorCheckpoint, operator: OperatorCheckpoint, name: TableName
) -> tuple[tuple[OperatorId, TableName], tuple[OperatorId, TableName]]:
    return (other.operator, name), (operator.operator, name)


def _column_names(operator: OperatorCheckpoint) -> list[str]:
    return [
        column.name
        for config in operator.configs.values()
        if isinstance(config.config, ExpiringTimeKeyConfig)
        for column in columns_of(config.config)
    ]


def _check_column(operator: OperatorId, column: str, names: list[str]) -> None:
    if column not in names:
        raise InputError(
            f"an override names the column {column!r}, which {operator} does not have",
            columns=", ".join(dict.fromkeys(names)) or "none",
            next_step="name columns as `arroyo-state rows` prints them",
        )


def _operator(checkpoint: Checkpoint, name: OperatorId) -> OperatorCheckpoint:
    operator = checkpoint.operator(name)
    assert operator is not None
    return operator
