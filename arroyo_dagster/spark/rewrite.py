"""Run the shards of a rewrite of Arroyo's state on Spark's workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from arroyo_dagster.spark.tasks import BYTES_OF_A_FILE, BYTES_OF_A_TASK, run_items
from arroyo_dagster.spark.thresholds import SparkThresholds
from arroyo_dagster.state.model.compaction import LeftOut
from arroyo_dagster.state.model.rewrite import RewriteShard
from arroyo_dagster.state.operations.compaction.rewrite import RunRewrites, rewrite_here
from arroyo_dagster.state.planning.engines import StepEngine, WorkAmount
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.merge.rewrite import RewriteTask, rewrite_shard

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def rewrites_on_spark(
    session: Callable[[], SparkSession],
    thresholds: SparkThresholds | None = None,
) -> RunRewrites:
    """Return a function for `run_rewrite` that runs the tasks of a large rewrite on Spark.

    Args:
        session: returns the session; called only if the rewrite reaches a threshold.
        thresholds: smaller rewrites run in this process; None = the defaults.
    """
    limits = thresholds or SparkThresholds()

    def run(store: ObjectStore, tasks: Sequence[RewriteTask]) -> Iterable[RewriteShard | LeftOut]:
        amount = WorkAmount(
            size_bytes=sum(task.size_bytes for task in tasks),
            files=sum(len(task.inputs) for task in tasks),
        )
        if limits.choose("rewrite files", amount).engine is StepEngine.IN_PROCESS:
            return rewrite_here(store, tasks)
        weights = [task.size_bytes + len(task.inputs) * BYTES_OF_A_FILE for task in tasks]
        rewritten = partial(rewrite_shard, store)
        least = BYTES_OF_A_TASK
        return run_items(session(), rewritten, tasks, weights, store=store, least_weight=least)

    return run
