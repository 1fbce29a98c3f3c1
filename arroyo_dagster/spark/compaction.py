"""Compaction of one job with its merges on Spark: planned, verified and published as in process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from arroyo_dagster.spark.tasks import run_items
from arroyo_dagster.state.local.compaction import CompactionOutcome, compact_job
from arroyo_dagster.state.model.compaction import CompactionSettings, MergeOutcome
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.merging import MergeTask, run_merge

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def compact_job_on_spark(
    session: Callable[[], SparkSession],
    store: ObjectStore,
    paths: JobPaths,
    settings: CompactionSettings | None = None,
    **options: Any,
) -> CompactionOutcome:
    """As `state.local.compaction.compact_job`, each merge a part of a Spark task.

    Args:
        session: gives the session; called only if there is something to merge.
        store: must be one that workers can open as well.
        options: as of `compact_job`.
    """

    def run(held: ObjectStore, tasks: Sequence[MergeTask]) -> Iterable[MergeOutcome]:
        weights = [task.merge.size_bytes + len(task.merge.paths) * 4096 for task in tasks]
        return run_items(session(), partial(run_merge, held), tasks, weights)

    return compact_job(store, paths, settings, run=run, **options)
