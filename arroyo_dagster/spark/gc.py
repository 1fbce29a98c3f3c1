"""Expiry of one job with its data files deleted by Spark: planned and checked as in process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from arroyo_dagster.spark.tasks import run_items
from arroyo_dagster.state.backend import DELETE_BATCH, delete_all
from arroyo_dagster.state.local.gc import ExpireOutcome, expire_job
from arroyo_dagster.state.model.gc import ExpirePlan
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.storage.store import ObjectStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def expire_job_on_spark(
    session: Callable[[], SparkSession],
    store: ObjectStore,
    paths: JobPaths,
    *,
    keep_epochs: int,
    yes: bool = False,
    plan: ExpirePlan | None = None,
    owner: str = "arroyo-state gc",
) -> ExpireOutcome:
    """As `state.local.gc.expire_job`, the data files deleted in batches by Spark's workers.

    Args:
        session: gives the session; called only if there is something to delete.
        store: must be one that workers can open as well.
    """

    def delete(held: ObjectStore, files: Sequence[StatePath]) -> None:
        batches = [files[at : at + DELETE_BATCH] for at in range(0, len(files), DELETE_BATCH)]
        if batches:
            run_items(session(), partial(delete_all, held), batches, [len(b) for b in batches])

    return expire_job(
        store, paths, keep_epochs=keep_epochs, yes=yes, plan=plan, delete=delete, owner=owner
    )
