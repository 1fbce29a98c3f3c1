"""Whether a compaction plan that was made earlier may still be executed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from arroyo_dagster.errors import ConflictError
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.compaction import CompactionPlan, CompactionRecord
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.planning.compaction.apply import adoptable, apply_merges
from arroyo_dagster.state.planning.compaction.plan import stand_in


def check_plan(
    plan: CompactionPlan,
    checkpoint: Checkpoint,
    pending: Sequence[CompactionRecord],
    sizes: Mapping[StatePath, int],
    stamps: Mapping[StatePath, str],
) -> None:
    """Check that a plan is for the newest epoch and that its input files are unchanged.

    At the epoch of the plan, each merge still takes neighbouring files and drops only rows that a
    restore drops. At any other epoch this is not guaranteed.

    Args:
        checkpoint: the newest epoch.
        pending: compactions that the job has not adopted yet.
        sizes, stamps: of its files, as in `plan_merges`.

    Raises:
        ConflictError: the plan no longer matches.
    """
    if (plan.pipeline, plan.job) != (checkpoint.pipeline, checkpoint.job):
        raise _stale(plan, "it is of another job")
    if plan.ref != checkpoint.ref:
        raise _stale(plan, f"it is of epoch {plan.epoch}, the job is at epoch {checkpoint.epoch}")
    for file in plan.inputs:
        if sizes.get(file.path) != file.size_bytes or stamps.get(file.path) != file.stamp:
            raise _stale(plan, "a file was written again", path=file.path)
    waiting = adoptable(checkpoint.operators, pending, checkpoint.epoch)
    operators = apply_merges(checkpoint.operators, waiting).operators
    planned = apply_merges(operators, [stand_in(i, merge) for i, merge in enumerate(plan.merges)])
    if planned.stale:
        raise _stale(plan, f"its files were merged meanwhile: {planned.stale[0].reason}")


def _stale(plan: CompactionPlan, reason: str, **facts: object) -> ConflictError:
    return ConflictError(
        f"the plan no longer matches the state: {reason}",
        job=JobPaths(plan.job, plan.pipeline).root,
        retryable=True,
        next_step="make a new plan; nothing was written",
        **facts,
    )
