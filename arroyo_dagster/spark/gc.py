"""Collect the garbage of one job, with data files deleted by Spark's workers.

Plan, checks, journal and read-back are as in process. Small numbers of objects are also deleted in
process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from arroyo_dagster.spark.orphans import plan_orphans_on_spark
from arroyo_dagster.spark.tasks import run_items
from arroyo_dagster.state.metadata.lease import Leased
from arroyo_dagster.state.model.garbage import GcPlan, PlanKind
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.operations.gc.execute import GcOptions, GcOutcome, run_gc
from arroyo_dagster.state.operations.gc.plan import GcRequest, plan_gc
from arroyo_dagster.state.operations.gc.steps import Delete, Pace, delete_here
from arroyo_dagster.state.storage.store import DeleteOutcome, ObjectStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FROM_OBJECTS = 20_000
"""Bulk deletes of fewer objects take less time than the start of Spark."""

BATCHES_AT_ONCE = 200


def run_gc_on_spark(
    session: Callable[[], SparkSession],
    store: ObjectStore,
    paths: JobPaths,
    request: GcRequest,
    options: GcOptions | None = None,
    *,
    plan: GcPlan | None = None,
    from_objects: int = FROM_OBJECTS,
) -> GcOutcome:
    """Run gc as `operations.gc.execute.run_gc`, with data files deleted by Spark's workers.

    Orphans are also planned on Spark, unless `options.make_plan` is given.

    Args:
        session: returns the session; called only if there is enough to delete or orphans to plan.
        store: the store of the job; workers must be able to open it too.
        paths: the paths of the job.
        request, options, plan: as in `run_gc`; `options.delete` and the number of batches in flight
            are replaced.
        from_objects: if fewer data files are in flight at once, this process deletes them.
    """
    chosen = options or GcOptions()
    make_plan = chosen.make_plan
    if request.kind is PlanKind.ORPHANS and make_plan is plan_gc:
        make_plan = partial(plan_orphans_on_spark, session)
    return run_gc(
        store,
        paths,
        request,
        replace(
            chosen,
            make_plan=make_plan,
            delete=deleting_on_spark(session, from_objects),
            pace=_wide(chosen.pace),
        ),
        plan=plan,
    )


def _wide(pace: Pace) -> Pace:
    return replace(pace, in_flight=BATCHES_AT_ONCE)


def deleting_on_spark(session: Callable[[], SparkSession], from_objects: int) -> Delete:
    """Return a function that deletes batches of objects on Spark.

    It deletes in this process if the objects are few, or if the job's status must be checked before
    each request.
    """

    def delete(held: ObjectStore, batches: Sequence[Sequence[StatePath]]) -> list[DeleteOutcome]:
        sizes = [len(batch) for batch in batches]
        ask = isinstance(held, Leased) and held.before_deleting is not None
        if ask or sum(sizes) < from_objects:
            return delete_here(held, batches)
        return run_items(session(), partial(delete_batch, held), list(batches), sizes, store=held)

    return delete


def delete_batch(store: ObjectStore, batch: Sequence[StatePath]) -> DeleteOutcome:
    """Delete one batch. Runs in a worker."""
    return store.delete_many(batch)
