"""Fork: give a stopped Arroyo job the state of another job of the same SQL.

Operators match by their ids, and their tables must be equal; `evolve` is the general case.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.codec.schema import memory_schema
from arroyo_dagster.state.model.checkpoints import OperatorCheckpoint
from arroyo_dagster.state.model.ids import Epoch, StatePath, TableName
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.surgery.edits import Fork
from arroyo_dagster.state.model.surgery.plans import (
    EditOutcome,
    EditPlan,
    EditPrecondition,
    TableAction,
    TableStep,
)
from arroyo_dagster.state.model.tables import ExpiringTimeKeyConfig, TableConfig
from arroyo_dagster.state.model.units import plural
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
from arroyo_dagster.state.operations.surgery.carried_files import CarriedTable, StateSource
from arroyo_dagster.state.operations.surgery.execute import EditOptions
from arroyo_dagster.state.operations.surgery.graphs.find import check_same_graphs, find_graph
from arroyo_dagster.state.operations.surgery.rescale import why_one_parallelism
from arroyo_dagster.state.operations.surgery.transfer import (
    Transfer,
    TransferJob,
    TwoJobs,
    of_sink,
    parallelism_not_tried,
)
from arroyo_dagster.state.storage.store import ObjectStore


def plan_fork(
    source: StateSource,
    store: ObjectStore,
    paths: JobPaths,
    directory: JobDirectory,
    *,
    create: bool = False,
) -> EditPlan:
    """Plan to give a stopped Arroyo job the state of another one. Writes nothing: the dry run.

    Args:
        directory: the source of the stopped job's status, and of the graphs of both pipelines.
        create: the job has begun its first checkpoint and not finished it: create that epoch.

    Raises:
        InputError: a job is a managed job; their operators, tables or graphs differ; both write one
            file; or a table cannot be restored at the other parallelism.
        NotFoundError: a job has no checkpoint, or the source has no such epoch.
        ProtocolError: the source's epoch does not pass verification, or its keys are hashed
            otherwise.
        FormatError: metadata or a file is broken.
        ConflictError: an earlier edit was interrupted; undo it first.
    """
    return _job(source, paths, directory, create).prepare(store).plan


def run_fork(
    source: StateSource,
    store: ObjectStore,
    paths: JobPaths,
    directory: JobDirectory,
    options: EditOptions | None = None,
    *,
    create: bool = False,
) -> EditOutcome:
    """Give a stopped Arroyo job the state of another job of the same SQL, in place.

    The source is only read. Nothing is deleted, and `run_undo` restores the job's own state until
    it is started. If it is interrupted, see `run_edit`.

    Args:
        directory: the source of the stopped job's status; asked again before each change.
        create: as of `plan_fork`. `run_undo` undoes it, too.

    Raises:
        LeaseHeldError: another process maintains the job.
        ConflictError: the job changed or was started meanwhile; the source's epoch expired or
            changed while it was copied; another plan was approved; or the fork was cancelled.
        InputError, NotFoundError, ProtocolError, FormatError: as `plan_fork`.
    """
    run_options = options or EditOptions(owner="arroyo-state fork")
    return _job(source, paths, directory, create).run(store, run_options)


def _job(
    source: StateSource, paths: JobPaths, directory: JobDirectory, create: bool
) -> TransferJob:
    def request(path: StatePath, epoch: Epoch) -> Fork:
        return Fork(source=path, epoch=epoch)

    graphs = [find_graph(directory, job) for job in (source.paths, paths)]

    def decide(jobs: TwoJobs) -> Transfer:
        same = check_same_graphs(graphs, jobs.taken, paths)
        transfer = Match(jobs, f"epoch {jobs.taken.epoch} of the source").compared()
        if not isinstance(same, str):
            transfer.evidence.append(same)
        elif create:
            text = "whether the job has exactly the operators of the source"
            transfer.unknown.append(
                f"{text} ({same}): if not, its start fails, and nothing is lost"
            )
        return transfer

    return TransferJob(source, paths, directory, request, decide, create)


WhyKept = Callable[[OperatorCheckpoint, OperatorCheckpoint, TableName], str | None]
"""Says why the job keeps a table of its own, by the operator of the source and its own; None = it
takes the source's.
"""


def _of_another(
    other: OperatorCheckpoint, operator: OperatorCheckpoint, name: TableName
) -> str | None:
    if of_sink(operator, name) or of_sink(other, name):
        return "a sink's state means nothing to another job: the job keeps its own"
    return None


@dataclass(slots=True)
class Match:
    """Compares the tables of two jobs of the same SQL, or of two epochs of one job.

    Attributes:
        source: what the state is taken from, for people.
        otherwise: what to do where they differ.
    """

    jobs: TwoJobs
    source: str
    otherwise: str = "fork into a job that was created from the source's SQL"
    why_kept: WhyKept = _of_another
    found: Transfer = field(default_factory=Transfer)

    def compared(self) -> Transfer:
        """Return what becomes of each table.

        Raises:
            InputError: the jobs are not of the same SQL.
        """
        self._check_operators()
        for operator in self.jobs.target.operators:
            other = self._other(operator)
            for name in dict.fromkeys((*other.tables, *operator.tables)):
                self.found.steps.append(self._step(other, operator, name))
            least, most = other.min_watermark_micros, other.max_watermark_micros
            self.found.watermarks[operator.operator] = least, most
            self.found.unknown += parallelism_not_tried(other, operator)
        self.found.evidence.append(
            EditPrecondition(
                name="both epochs have the same operators and tables",
                met=True,
                evidence=f"{len(self.jobs.target.operators)} operators by id; configurations and "
                "columns are equal",
            )
        )
        return self.found

    def _other(self, operator: OperatorCheckpoint) -> OperatorCheckpoint:
        other = self.jobs.taken.operator(operator.operator)
        assert other is not None
        return other

    def _check_operators(self) -> None:
        ours = {operator.operator for operator in self.jobs.target.operators}
        theirs = {operator.operator for operator in self.jobs.taken.operators}
        if ours != theirs:
            raise InputError(
                f"{self.source} has other operators than the job, so it is not of the same SQL",
                job=self.jobs.paths.root,
                only_in_source=", ".join(sorted(theirs - ours)) or "none",
                only_in_job=", ".join(sorted(ours - theirs)) or "none",
                next_step=f"{self.otherwise}, or use `arroyo-state evolve` if the SQL was changed",
            )

    def _step(
        self, other: OperatorCheckpoint, operator: OperatorCheckpoint, name: TableName
    ) -> TableStep:
        theirs, ours = other.tables.get(name), operator.tables.get(name)
        now = () if ours is None else ours.paths
        kept = self.why_kept(other, operator, name)
        if kept is not None:
            reason, action = kept, TableAction.KEPT
        elif theirs is None:
            reason = f"{self.source} has no rows of it"
            action = TableAction.EMPTIED
        else:
            self._check_table(other, operator, name)
            reason = f"{plural(len(theirs.paths), 'file')} of {self.source}"
            if ours is None:
                reason += f"; the job has none now, so its columns are those of {self.source}"
            action = TableAction.CARRIED
            now = theirs.paths
            key = operator.operator, name
            self.found.carried.append(CarriedTable(key, key, other.configs[name]))
        return TableStep(
            operator=operator.operator, table=name, action=action, reason=reason, files=now
        )

    def _check_table(
        self, other: OperatorCheckpoint, operator: OperatorCheckpoint, name: TableName
    ) -> None:
        theirs, ours = other.configs.get(name), operator.configs.get(name)
        if theirs is None:
            raise InputError(
                f"a table of {self.source} has no configuration",
                operator=operator.operator,
                table=name,
                next_step="take another epoch",
            )
        if ours is not None and ours != theirs:
            raise InputError(
                f"the table is another one in {self.source}: {_difference(theirs, ours)}",
                operator=operator.operator,
                table=name,
                next_step=self.otherwise,
            )
        reason = why_one_parallelism(other, name, operator.parallelism)
        if reason is not None:
            raise InputError(
                reason,
                operator=operator.operator,
                table=name,
                next_step=f"give the job the parallelism {other.parallelism}, let it take a "
                "checkpoint, and stop it again",
            )


def _difference(theirs: TableConfig, ours: TableConfig) -> str:
    """Return how two configurations differ, for people."""
    if isinstance(theirs.config, ExpiringTimeKeyConfig) and isinstance(
        ours.config, ExpiringTimeKeyConfig
    ):
        columns = [memory_schema(config).to_string() for config in (theirs.config, ours.config)]
        if columns[0] != columns[1]:
            shown = [text.replace("\n", ", ") for text in columns]
            return f"its columns are ({shown[0]}), and here ({shown[1]})"
        if theirs.config.retention_micros != ours.config.retention_micros:
            return (
                f"its retention is {theirs.config.retention_micros} microseconds, and here "
                f"{ours.config.retention_micros}"
            )
    return "its kind, description, keys or version of values differ"
