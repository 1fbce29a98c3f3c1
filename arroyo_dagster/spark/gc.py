"""Garbage collection of one job with its data files deleted by Spark's workers.

Planned, checked, journalled and read back as in process; few objects are deleted there, too.
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
"""Starting Spark takes longer than this many bulk deletes."""

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
    """As `operations.gc.execute.run_gc`; Spark's workers delete the data files.

    Args:
        session: gives the session; called only if there is enough to delete.
        store: must be one that workers can open as well.
        from_objects: fewer data files in flight at once are deleted in this process.
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
    """What deletes batches on Spark, or here where they are few, or where something must be asked
    before each request.
    """

    def delete(held: ObjectStore, batches: Sequence[Sequence[StatePath]]) -> list[DeleteOutcome]:
        sizes = [len(batch) for batch in batches]
        ask = isinstance(held, Leased) and held.before_deleting is not None
        if ask or sum(sizes) < from_objects:
            return delete_here(held, batches)
        return run_items(session(), partial(delete_batch, held), list(batches), sizes)

    return delete


def delete_batch(store: ObjectStore, batch: Sequence[StatePath]) -> DeleteOutcome:
    """Delete one batch, in a worker."""
    return store.delete_many(batch)
