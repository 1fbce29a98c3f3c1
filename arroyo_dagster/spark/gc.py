"""Collect the garbage of one job with Spark's workers: they list, copy and delete objects.

Plan, checks, journal and read-back are as in process. Small steps also run in process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from arroyo_dagster.spark.gc_plans import plan_with
from arroyo_dagster.spark.items import SparkItems
from arroyo_dagster.spark.thresholds import SparkThresholds
from arroyo_dagster.state.metadata.lease import Leased
from arroyo_dagster.state.model.garbage import GcPlan, Moved, UndeletePlan
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.operations.gc.execute import GcOptions, GcOutcome, run_gc
from arroyo_dagster.state.operations.gc.plan import GcRequest, plan_gc
from arroyo_dagster.state.operations.gc.steps import Delete, Pace, delete_here
from arroyo_dagster.state.operations.gc.undelete import UndeleteOptions, run_undelete
from arroyo_dagster.state.planning.engines import StepEngine, WorkAmount
from arroyo_dagster.state.storage.store import DeleteOutcome, ObjectStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BATCHES_AT_ONCE = 200
_CHECKED_HERE = "the job's status is checked before each request, by a source only this host has"


def run_gc_on_spark(
    session: Callable[[], SparkSession],
    store: ObjectStore,
    paths: JobPaths,
    request: GcRequest,
    options: GcOptions | None = None,
    *,
    plan: GcPlan | None = None,
    thresholds: SparkThresholds | None = None,
) -> GcOutcome:
    """Run gc as `operations.gc.execute.run_gc`, with its large steps on Spark's workers.

    They plan (unless `options.make_plan` is given), copy to quarantine, and delete.

    Args:
        session: returns the session; called only for a step that reaches a threshold.
        store: the store of the job; workers must be able to open it too.
        paths: the paths of the job.
        request, options, plan: as in `run_gc`; `options.delete`, `options.items` and the number of
            batches in flight are replaced.
        thresholds: from which amount of work a step runs on Spark; None = the defaults.

    Returns:
        The outcome; `engines` says where each step ran.
    """
    resolved = options or GcOptions()
    items = SparkItems(session, store, thresholds or SparkThresholds())
    make_plan = resolved.make_plan
    outcome = run_gc(
        store,
        paths,
        request,
        replace(
            resolved,
            make_plan=plan_with(items) if make_plan is plan_gc else make_plan,
            delete=deleting_on_spark(items),
            items=items,
            pace=_wide(resolved.pace),
            on_done=lambda done: resolved.on_done(replace(done, engines=tuple(items.choices))),
        ),
        plan=plan,
    )
    return replace(outcome, engines=tuple(items.choices))


def _wide(pace: Pace) -> Pace:
    return replace(pace, in_flight=BATCHES_AT_ONCE)


def deleting_on_spark(items: SparkItems) -> Delete:
    """Return a function that deletes batches of objects on Spark.

    It deletes in this process if the objects are few; or if the job's status must be checked before
    each request, and other machines may get other answers.
    """

    def delete(held: ObjectStore, batches: Sequence[Sequence[StatePath]]) -> list[DeleteOutcome]:
        sizes = [len(batch) for batch in batches]
        only_here = _CHECKED_HERE if isinstance(held, Leased) and held.deletes_here else None
        choice = items.choose("delete", WorkAmount(objects=sum(sizes)), only_here=only_here)
        if choice.engine is StepEngine.IN_PROCESS:
            return delete_here(held, batches)
        return items.run(choice, partial(delete_batch, held), list(batches), sizes)

    return delete


def delete_batch(store: ObjectStore, batch: Sequence[StatePath]) -> DeleteOutcome:
    """Delete one batch. Runs in a worker."""
    return store.delete_many(batch)


def run_undelete_on_spark(
    session: Callable[[], SparkSession],
    store: ObjectStore,
    paths: JobPaths,
    name: str,
    options: UndeleteOptions | None = None,
    *,
    plan: UndeletePlan | None = None,
    thresholds: SparkThresholds | None = None,
) -> list[Moved]:
    """Restore quarantined objects as `operations.gc.undelete.run_undelete`.

    Workers compare and copy data files if they are many or large. Metadata, which makes epochs
    visible, is restored by this process, one object after the other.

    Args:
        session, store, paths, thresholds: as in `run_gc_on_spark`.
        name, options, plan: as in `run_undelete`; `options.items` is replaced.
    """
    items = SparkItems(session, store, thresholds or SparkThresholds())
    resolved = replace(options or UndeleteOptions(), items=items)
    return run_undelete(store, paths, name, resolved, plan=plan)
