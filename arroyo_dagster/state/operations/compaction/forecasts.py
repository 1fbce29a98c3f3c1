"""Forecast of the bytes of merged files: merges some of the inputs in memory and scales the result
up.

Sizes and footers alone do not determine it: how much smaller many small files become depends on
their pages, and on which rows replace others.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from arroyo_dagster.errors import ArroyoStateError
from arroyo_dagster.state.model.compaction import MEBIBYTE
from arroyo_dagster.state.model.rewrite import RewriteShard
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.storage.wrappers import Scratch
from arroyo_dagster.state.tables.merge.rewrite import RewriteTask, rewrite_shard
from arroyo_dagster.state.tables.merge.task import MergeTask, run_merge

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
