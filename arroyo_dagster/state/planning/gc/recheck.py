"""Whether a gc plan that was made earlier may still be executed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from arroyo_dagster.errors import ConflictError
from arroyo_dagster.state.model.aliases import PathsDigest
from arroyo_dagster.state.model.garbage import GcPlan, PlanKind
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.objects import NOTHING, Packed, StoredObject

NEW_PLAN = "make a new plan; nothing was deleted"


def check_same_job(plan: GcPlan, fresh: GcPlan) -> None:
    """Check that a fresh plan is of the same job, in the same condition.

    Raises:
        ConflictError: the job or the kind of plan differs; or the job was started or fenced since,
            where that matters.
    """
    if (plan.kind, plan.pipeline, plan.job) != (fresh.kind, fresh.pipeline, fresh.job):
        raise _stale(plan, "it belongs to another job, or is of another kind")
    # Epochs may expire under any writer, but an unreferenced object may belong to a new run.
    watched = plan.kind is not PlanKind.EXPIRE or plan.proof.condition is not None
    before = (plan.proof.worker_generation, plan.proof.run_id)
    now = (fresh.proof.worker_generation, fresh.proof.run_id)
    if watched and before != now:
        raise _stale(
            plan, f"the job was started again: generation and run were {before} and are now {now}"
        )


def no_longer_planned(plan: GcPlan, fresh: GcPlan) -> Iterator[StatePath]:
    """Yield the objects of a plan that a fresh plan does not contain.

    The plan may run only if all of these are gone.
    """
    names = _names(fresh)
    return (entry.path for step in _steps(plan) for entry in step if _name(entry) not in names)


def check_gone(plan: GcPlan, there: Sequence[StatePath]) -> None:
    """Refuse a plan if objects that are no longer planned still exist.

    Args:
        there: these objects.

    Raises:
        ConflictError: `there` is not empty.
    """
    if there:
        raise _stale(
            plan, f"{len(there)} of its objects have changed or are needed now", path=there[0]
        )


def what_is_left(plan: GcPlan, fresh: GcPlan) -> GcPlan:
    """Return the part of a plan that a fresh plan contains as well."""
    planned = PathsDigest(entry.path for step in _steps(plan) for entry in step)
    left = [Packed(entry for entry in step if entry.path in planned) for step in _steps(fresh)]
    data, records, metadata = left
    purges = tuple(name for name in plan.purges if name in fresh.purges)
    return replace(plan, data=data, records=records, metadata=metadata, purges=purges)


def _steps(plan: GcPlan) -> tuple[Packed, Packed, Packed]:
    return plan.data, plan.records, plan.metadata


def _names(plan: GcPlan) -> PathsDigest:
    return PathsDigest(_name(entry) for step in _steps(plan) for entry in step)


def _name(one: StoredObject) -> str:
    """Return path and etag: an object that was overwritten counts as another object."""
    return f"{one.path}\0{one.etag or ''}"


def _stale(plan: GcPlan, reason: str, **facts: object) -> ConflictError:
    return ConflictError(
        f"the plan no longer matches the state: {reason}",
        job=plan.paths.root,
        next_step=NEW_PLAN,
        **facts,  # type: ignore[arg-type]
    )


def measured(
    plan: GcPlan, files: Packed, metadata: Packed, maintenance: Packed, foreign: Packed = NOTHING
) -> GcPlan:
    """Return a plan with sizes, times and etags as listed, without objects that no longer exist.

    Args:
        files, metadata, maintenance: the objects below the job, as listed.
        foreign: the others; they include the files of operators whose ids contain a slash, which
            only metadata identifies.
    """
    planned = PathsDigest(plan.data.paths)
    files = Packed.joined([files, foreign])
    small = {entry.path: entry for objects in (metadata, maintenance) for entry in objects}
    named = {*plan.records.paths, *plan.metadata.paths}
    small |= {entry.path: entry for entry in files if entry.path in named}
    return replace(
        plan,
        data=Packed(entry for entry in files if entry.path in planned),
        records=Packed(small[path] for path in plan.records.paths if path in small),
        metadata=Packed(small[path] for path in plan.metadata.paths if path in small),
    )
