"""Plan a compaction from the objects of one job, and forecast the sizes. Reads only."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from arroyo_dagster.errors import ArroyoStateError, FormatError, NotFoundError
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.metadata.restorable import restore_or_roll_back
from arroyo_dagster.state.metadata.tree import CheckpointTree
from arroyo_dagster.state.model.checkpoints import Checkpoint, CheckpointState
from arroyo_dagster.state.model.compaction import (
    MEBIBYTE,
    CompactionPlan,
    CompactionRecord,
    CompactionSettings,
)
from arroyo_dagster.state.model.ids import Epoch, StatePath
from arroyo_dagster.state.model.layout import JobPaths, Layout
from arroyo_dagster.state.model.progress import OnProgress, no_progress
from arroyo_dagster.state.model.rewrite import RewriteShard
from arroyo_dagster.state.operations.progress import CountedReads
from arroyo_dagster.state.operations.slowdown import last_slowdown
from arroyo_dagster.state.planning.compaction.apply import adoptable, apply_merges
from arroyo_dagster.state.planning.compaction.plan import backlog, plan_merges
from arroyo_dagster.state.planning.restore.reads import is_at_rest
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectInfo, ObjectStore
from arroyo_dagster.state.storage.wrappers import Scratch
from arroyo_dagster.state.tables.merge.rewrite import RewriteTask, rewrite_shard
from arroyo_dagster.state.tables.merge.task import MergeTask, run_merge

_ATTEMPTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionFacts:
    """The facts from which a job's compaction is planned.

    Attributes:
        checkpoint: the newest epoch.
        at_rest: whether no run is active and the epoch is committed.
        pending: compactions that the job has not adopted yet, with the paths of their records.
        sizes: the bytes of every file that the epoch or one of these lists.
        stamps: a value of each of these files that changes with its content: ETag, or the time of
            its last change.
    """

    checkpoint: Checkpoint
    at_rest: bool
    pending: tuple[tuple[StatePath, CompactionRecord], ...]
    sizes: dict[StatePath, int]
    stamps: dict[StatePath, str]

    def plan(
        self, settings: CompactionSettings, merged_bytes: Sequence[int] | None = None
    ) -> CompactionPlan:
        """Make the plan; `merged_bytes` as of `plan_merges`."""
        return plan_merges(
            self.checkpoint,
            self.sizes,
            settings,
            [record for _, record in self.pending],
            stamps=self.stamps,
            merged_bytes=merged_bytes,
        )


def plan_compaction(
    store: ObjectStore,
    paths: JobPaths,
    settings: CompactionSettings | None = None,
    *,
    sampled: bool = False,
    on_progress: OnProgress = no_progress,
) -> CompactionPlan:
    """Plan the compaction of a job's newest epoch. Writes nothing: this is the dry run.

    Args:
        sampled: merge some of the files in memory to forecast the number of bytes afterwards.
        on_progress: called after each file whose size was read, by any thread, by one at a time.

    Raises:
        NotFoundError: the job has no checkpoint.
        FormatError: a file that the checkpoint lists is missing.
    """
    facts = compaction_facts(store, paths, on_progress)
    return make_plan(store, paths, facts, settings or CompactionSettings(), sampled=sampled)


def make_plan(
    store: ObjectStore,
    paths: JobPaths,
    facts: CompactionFacts,
    settings: CompactionSettings,
    *,
    sampled: bool,
) -> CompactionPlan:
    """Make the plan from facts; `sampled` as of `plan_compaction`.

    If the last maintenance of a running job made its checkpoints slower, only one merge is planned.
    """
    effective = settings if facts.at_rest else _giving_way(store, paths, settings)
    plan = facts.plan(effective)
    if not sampled or not plan.merges:
        return plan
    return facts.plan(effective, forecast_merges(store, merge_tasks(paths, facts, plan, effective)))


def _giving_way(
    store: ObjectStore, paths: JobPaths, settings: CompactionSettings
) -> CompactionSettings:
    cause = last_slowdown(store, paths, settings.max_checkpoint_slowdown)
    if cause is None:
        return settings
    return limited(settings, 1, f"deferred, since {cause}, during the last maintenance of the job")


def limited(settings: CompactionSettings, merges: int, reason: str) -> CompactionSettings:
    """Return settings with which only this number of merges is planned."""
    return replace(settings, budget=replace(settings.budget, merges=merges, merges_reason=reason))


def merge_tasks(
    paths: JobPaths, facts: CompactionFacts, plan: CompactionPlan, settings: CompactionSettings
) -> list[MergeTask]:
    """Return the merges of a plan as tasks for this process or for Spark."""
    operators = {operator.operator: operator for operator in facts.checkpoint.operators}
    return [
        MergeTask(
            paths=paths,
            epoch=facts.checkpoint.epoch,
            worker_generation=facts.checkpoint.worker_generation,
            parallelism=plan.parallelism or operators[merge.operator].parallelism,
            config=operators[merge.operator].configs[merge.table],
            merge=merge,
            shard_bytes=settings.part_bytes,
        )
        for merge in plan.merges
    ]


def compaction_facts(
    store: ObjectStore, paths: JobPaths, on_progress: OnProgress = no_progress
) -> CompactionFacts:
    """Read the facts that a plan needs.

    Where files are missing because the job went on and the epoch expired meanwhile, the newest
    epoch is read again.

    Raises:
        NotFoundError, FormatError: as `plan_compaction`.
    """
    for _ in range(_ATTEMPTS - 1):
        newest = newest_epoch(store, paths)
        try:
            return _facts(store, paths, on_progress)
        except (FormatError, NotFoundError):
            if newest_epoch(store, paths) == newest:
                raise
    return _facts(store, paths, on_progress)


def newest_epoch(store: ObjectStore, paths: JobPaths) -> Epoch | None:
    """Return the newest epoch that is listed; None if there is none."""
    return max(ParquetBackend(store, paths).epochs(), default=None)


def _facts(store: ObjectStore, paths: JobPaths, on_progress: OnProgress) -> CompactionFacts:
    backend = ParquetBackend(store, paths)
    pending = [(p, r) for p, r in backend.compaction_records().items() if r is not None]
    checkpoint = backend.load()
    outputs = (path for _, r in pending for merged in r.merged for path in merged.output_paths)
    listed = list(dict.fromkeys((*checkpoint.paths, *outputs)))
    counted = CountedReads(store, listed, on_progress, "read file sizes")
    infos = concurrently(counted.head, listed)
    sizes = {info.path: info.size_bytes for info in infos if info is not None}
    stamps = {info.path: stamp for info in infos if info is not None and (stamp := _stamp(info))}
    missing = [path for path in dict.fromkeys(checkpoint.paths) if path not in sizes]
    if missing:
        raise FormatError(
            f"{len(missing)} of {len(listed)} data files are missing, so nothing is merged",
            job=paths.root,
            epoch=checkpoint.epoch,
            path=missing[0],
            next_step=f"{restore_or_roll_back(paths, checkpoint, 'file')}; if the job runs, run "
            "it again: this epoch may just have expired",
        )
    whole = [
        (path, record)
        for path, record in pending
        if all(p in sizes for merged in record.merged for p in merged.output_paths)
    ]
    # Until a commit is finished, only the job itself can write the next epoch.
    ready = checkpoint.state is CheckpointState.READY
    at_rest = ready and is_at_rest(checkpoint, CheckpointTree(store, paths).fence())
    return CompactionFacts(
        checkpoint=checkpoint, at_rest=at_rest, pending=tuple(whole), sizes=sizes, stamps=stamps
    )


def _stamp(info: ObjectInfo) -> str | None:
    return info.etag or (None if info.modified_micros is None else str(info.modified_micros))


def compaction_backlog(store: ObjectStore, paths: JobPaths) -> int:
    """Return how many files of a job's newest epoch were never merged, beyond one per subtask and
    table.

    Reads metadata only. Files of compactions that the job has not adopted yet count as merged. The
    backlog is 0 for jobs in the legacy layout and jobs without an epoch.
    """
    backend = ParquetBackend(store, paths)
    epochs = backend.epochs()
    if not epochs or paths.layout is Layout.LEGACY:
        return 0
    checkpoint = backend.load_checkpoint_metadata(epochs[-1])
    records = [record for record in backend.compaction_records().values() if record is not None]
    waiting = adoptable(checkpoint.operators, records, checkpoint.epoch)
    applied = apply_merges(checkpoint.operators, waiting)
    return backlog(replace(checkpoint, operators=applied.operators))


# ---- the bytes of merged files: some inputs are merged in memory, and scaled up ------------------
# Sizes and footers alone do not determine them: how much smaller many small files become depends on
# their pages, and on which rows replace others.

SAMPLE_BYTES = 8 * MEBIBYTE
"""How many bytes of a job's inputs a forecast reads. Up to that size it is exact. Above, it is an
upper bound if keys repeat so rarely that a sample does not show it.
"""


def forecast_merges(store: ObjectStore, tasks: Sequence[MergeTask]) -> list[int]:
    """Forecast how many bytes the outputs of each merge have. Writes nothing to the store."""
    share = _share([task.merge.size_bytes for task in tasks])

    def of_task(task: MergeTask) -> int:
        merge = task.merge

        def merged(chosen: Sequence[int]) -> int:
            sizes = tuple(merge.sizes[index] for index in chosen)
            inputs: Any = tuple(merge.inputs[index] for index in chosen)
            part = replace(merge, inputs=inputs, sizes=sizes, size_bytes=sum(sizes))
            return run_merge(Scratch(store), replace(task, merge=part)).size_bytes_out

        return _scaled_up(merge.sizes, share, merged) if merge.sizes else merge.size_bytes

    return concurrently(of_task, tasks)


def forecast_rewrites(store: ObjectStore, tasks: Sequence[RewriteTask]) -> list[int]:
    """Forecast how many bytes the new file of each rewrite task has, as `forecast_merges`."""
    share = _share([task.size_bytes for task in tasks])

    def of_task(task: RewriteTask) -> int:
        paths = {file.path for file in task.inputs}
        inputs = [source for source in task.table.inputs if source.file.path in paths]

        def rewritten(chosen: Sequence[int]) -> int:
            table = replace(task.table, inputs=tuple(inputs[index] for index in chosen))
            shard = rewrite_shard(Scratch(store), replace(task, table=table))
            # Files that cannot be rewritten keep their size.
            return shard.size_bytes_out if isinstance(shard, RewriteShard) else table.size_bytes

        return _scaled_up([source.size_bytes for source in inputs], share, rewritten)

    return concurrently(of_task, tasks)


def _share(sizes: Sequence[int]) -> float:
    return min(1.0, SAMPLE_BYTES / max(1, sum(sizes)))


def _scaled_up(sizes: Sequence[int], share: float, merged: Callable[[Sequence[int]], int]) -> int:
    """Forecast the bytes that merging all inputs would yield.

    Args:
        sizes: of the inputs.
        share: the share of their bytes that may be read. Below 1, two samples are merged, the
            smaller one a subset of the larger, to measure how the output grows with the input.
        merged: merges the inputs with these indices, ascending, and returns the bytes of the
            result.
    """
    total = sum(sizes)
    order = [*range(len(sizes))]
    random.Random(0).shuffle(order)  # mix old and new files: those of one time are alike
    sums = [*accumulate(sizes[index] for index in order)]
    count = sum(size <= total * share * 2 / 3 for size in sums)
    half = sum(size <= sums[count - 1] / 2 for size in sums) if count else 0
    try:
        if share >= 1.0:
            return merged(range(len(sizes)))
        if not half:
            return total  # files so few and so large hardly shrink
        small, large = merged(sorted(order[:half])), merged(sorted(order[:count]))
    except ArroyoStateError:
        return total  # the merge itself reports what is wrong with them
    growth = _growth(sums[half - 1], sums[count - 1], small, large)
    return round(large * math.pow(total / sums[count - 1], growth))


def _growth(half_in: int, whole_in: int, half_out: int, whole_out: int) -> float:
    """Return the power of the input by which the output grows: 1 where no row replaces another."""
    if not half_out or not whole_out or half_in == whole_in:
        return 1.0
    return min(1.0, max(0.0, math.log(whole_out / half_out) / math.log(whole_in / half_in)))
