"""Compact one job with merges on Spark. Plan, verification and publication are as in process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from arroyo_dagster.spark.tasks import BYTES_OF_A_FILE, BYTES_OF_A_TASK, run_items
from arroyo_dagster.spark.thresholds import SparkThresholds
from arroyo_dagster.state.model.compaction import CompactionPlan, CompactionSettings, MergeOutcome
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.operations.compaction.execute import merge_here
from arroyo_dagster.state.operations.compaction.job import CompactionOptions, run_compaction
from arroyo_dagster.state.operations.compaction.publish import CompactionOutcome
from arroyo_dagster.state.planning.engines import EngineChoice, StepEngine, WorkAmount
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.merge.task import MergeTask, combined, run_shard, split_task

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from arroyo_dagster.state.tables.merge.rows import OnBytes


def run_compaction_on_spark(
    session: Callable[[], SparkSession],
    store: ObjectStore,
    paths: JobPaths,
    settings: CompactionSettings | None = None,
    options: CompactionOptions | None = None,
    *,
    plan: CompactionPlan | None = None,
    thresholds: SparkThresholds | None = None,
) -> CompactionOutcome:
    """Run a compaction as `operations.compaction.job.run_compaction`, with the merges on Spark.

    Args:
        session: returns the session; called only if there is enough to merge.
        store: the store of the job; workers must be able to open it too.
        paths: the paths of the job.
        settings, options, plan: as in `run_compaction`; `options.run` is replaced.
        thresholds: smaller compactions run in this process, by the same code, since a session takes
            seconds to start; None = the defaults.

    Returns:
        The outcome; `engines` says where the merges ran.
    """
    limits = thresholds or SparkThresholds()
    choices: list[EngineChoice] = []

    def run(
        held: ObjectStore, tasks: Sequence[MergeTask], on_bytes: OnBytes
    ) -> Iterable[MergeOutcome]:
        choices.append(limits.choose("merge files", _amount(tasks)))
        if choices[-1].engine is StepEngine.IN_PROCESS:
            return merge_here(held, tasks, on_bytes)
        return _on_spark(session(), held, tasks, on_bytes)

    resolved = options or CompactionOptions()
    notify = resolved.on_published
    outcome = run_compaction(
        store,
        paths,
        settings,
        replace(
            resolved,
            run=run,
            on_published=lambda done: notify(replace(done, engines=tuple(choices))),
        ),
        plan=plan,
    )
    return replace(outcome, engines=tuple(choices))


def _amount(tasks: Sequence[MergeTask]) -> WorkAmount:
    return WorkAmount(
        size_bytes=sum(task.merge.size_bytes for task in tasks),
        files=sum(len(task.merge.paths) for task in tasks),
    )


def _on_spark(
    session: SparkSession, store: ObjectStore, tasks: Sequence[MergeTask], on_bytes: OnBytes
) -> Iterator[MergeOutcome]:
    shards = [split_task(task) for task in tasks]
    items = [part for piece in shards for part in piece]
    weights = [item.merge.size_bytes + len(item.merge.paths) * BYTES_OF_A_FILE for item in items]
    run = partial(run_shard, store)
    least = BYTES_OF_A_TASK
    found = iter(run_items(session, run, items, weights, on_bytes, store=store, least_weight=least))
    for task, piece in zip(tasks, shards, strict=True):
        yield combined(task, [next(found) for _ in piece])
