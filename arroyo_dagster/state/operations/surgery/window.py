"""Edit, fork or evolve the state of a running Arroyo job: stop it with a checkpoint, change its
state, and start it again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from arroyo_dagster.errors import ConflictError, InputError
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.maintenance_window import WindowOutcome
from arroyo_dagster.state.model.surgery.plans import EditOutcome, EditPlan, TableStep
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
from arroyo_dagster.state.operations.compaction.controlled_job import JobControl
from arroyo_dagster.state.operations.compaction.job_window import (
    JobWindow,
    NewParallelism,
    WorkOptions,
)
from arroyo_dagster.state.operations.compaction.window_recovery import JobWindowOptions
from arroyo_dagster.state.operations.surgery.execute import EditOptions
from arroyo_dagster.state.storage.store import ObjectStore

EditWindow = WindowOutcome[EditPlan, EditOutcome]
"""What a window in which the state was edited did."""


@dataclass(frozen=True, slots=True)
class PlannableEdit:
    """An edit, fork or evolve of one job: how it is planned, and how it is executed.

    Attributes:
        plan: called with the job's store, and the source of its status.
        run: likewise, with the options of the execution.
        parallelism: at which the job is to start in a window; None = as it was.
    """

    paths: JobPaths
    plan: Callable[[ObjectStore, JobDirectory], EditPlan]
    run: Callable[[ObjectStore, JobDirectory, EditOptions], EditOutcome]
    parallelism: int | None = None


def run_edit_window(
    store: ObjectStore,
    control: JobControl,
    edit: PlannableEdit,
    options: JobWindowOptions | None = None,
) -> EditWindow:
    """Stop a running Arroyo job with a checkpoint, edit its state, and start it again.

    It is planned while the job runs, and again after the stop, since the stop writes an epoch: if
    other tables would change, or change otherwise, nothing is changed and the job is started. A
    job that was stopped before is edited and stays stopped. If the job does not run from the
    edited state, or an edit was published in part, the original metadata is restored before the
    start. While that fails, the job stays stopped: `recover_window` continues there.

    Args:
        control: Arroyo's own API; no other source is accepted here.

    Returns:
        The outcome. `started` is False if it is not certain that the job runs; its record then
        stays, and `recover_window` starts the job later.

    Raises:
        InputError: the job is neither running nor at rest, or the edit does not fit its tables.
        LeaseHeldError: another process maintains the job, or holds its window; the job was not
            touched.
        ConflictError, NotFoundError, FormatError, ProtocolError, StorageError: as the plan of the
            edit, before the job was touched.
    """
    chosen = options or JobWindowOptions(owner="arroyo-state edit")
    return JobWindow(store, edit.paths, control, chosen, _EditWork(edit, chosen.verify_level)).open(
        dry_run=False
    )


@dataclass(frozen=True, slots=True)
class _EditWork:
    """An edit, as the work of a window."""

    edit: PlannableEdit
    verify_level: int
    edits: bool = True

    def plan(self, store: ObjectStore, directory: JobDirectory) -> EditPlan:
        plan = self.edit.plan(store, directory)
        if self.edit.parallelism is not None:
            present_parallelism(store, plan)
        return plan

    def is_empty(self, plan: EditPlan) -> bool:
        return plan.empty and not (self.edit.parallelism is not None and plan.afterwards)

    def parallelism(self, store: ObjectStore, change: EditOutcome) -> NewParallelism | None:
        after = self.edit.parallelism
        if after is None:
            return None
        return NewParallelism(present_parallelism(store, change.plan), after)

    def run(
        self, store: ObjectStore, directory: JobDirectory, planned: EditPlan, options: WorkOptions
    ) -> EditOutcome:
        plan = self.edit.plan(store, directory)
        if self.edit.parallelism is None:  # a rescale changes no row, whatever files it splits
            _check_same_changes(planned, plan)
        how = options.into(EditOptions, approved=plan.digest, verify_level=self.verify_level)
        return self.edit.run(store, directory, how)

    def summarize(self, change: EditOutcome) -> str:
        if not change.published:
            return "nothing was changed"
        return f"{change.plan.edit.name} done: {len(change.plan.changed)} tables changed"


def present_parallelism(store: ObjectStore, plan: EditPlan) -> int:
    """Return the one parallelism of all operators of a job, which a window can set again.

    Raises:
        InputError: they differ. Arroyo's API sets one for all.
    """
    operators = ParquetBackend(store, plan.paths).load(plan.epoch).operators
    by_parallelism: dict[int, str] = {op.parallelism: op.operator for op in operators}
    if len(by_parallelism) == 1:
        return next(iter(by_parallelism))
    listed = ", ".join(f"{op}: {number}" for number, op in sorted(by_parallelism.items()))
    raise InputError(
        f"the operators of the job run at different parallelisms ({listed}), and Arroyo's API sets "
        "one for all: a window could not start the job as it was, if it does not run at the new "
        "one",
        job=plan.paths.root,
        next_step="stop the job with a checkpoint, call this without --window, set the parallelism "
        "and start the job",
    )


def _check_same_changes(before: EditPlan, after: EditPlan) -> None:
    """Check that the plan after the stop changes what the plan before it did.

    Rows, positions and files differ, as the job has gone on until its last checkpoint.
    """
    differ = set(map(_what_becomes, before.changed)) ^ set(map(_what_becomes, after.changed))
    if differ:
        operator, table, action, _ = min(differ)
        raise ConflictError(
            f"{operator}.{table} would be {action} by only one of the plans before and after the "
            "stop",
            job=after.paths.root,
            epoch=after.epoch,
            next_step="plan it again; nothing was changed",
        )


def _what_becomes(step: TableStep) -> tuple[str, str, str, str]:
    return step.operator, step.table, step.action.value, step.source or ""
