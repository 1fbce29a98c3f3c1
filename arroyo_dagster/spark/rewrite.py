"""Run the shards of a rewrite of Arroyo's state on Spark's workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from arroyo_dagster.spark.tasks import run_items
from arroyo_dagster.state.model.compaction import LeftOut
from arroyo_dagster.state.model.rewrite import RewriteShard
from arroyo_dagster.state.operations.compaction.rewrite import RunRewrites
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.merge.rewrite import RewriteTask, rewrite_shard

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def rewrites_on_spark(session: Callable[[], SparkSession]) -> RunRewrites:
    """Return a function for `run_rewrite` that runs the tasks of a rewrite on Spark.

    Args:
        session: returns the session; called only if there is something to write.
    """

    def run(store: ObjectStore, tasks: Sequence[RewriteTask]) -> Iterable[RewriteShard | LeftOut]:
        if not tasks:
            return []
        weights = [task.size_bytes + len(task.inputs) * 4096 for task in tasks]
        return run_items(session(), partial(rewrite_shard, store), tasks, weights, store=store)

    return run
