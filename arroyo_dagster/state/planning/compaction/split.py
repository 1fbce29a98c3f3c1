"""Splitting a merge into shards that can run in parallel."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from arroyo_dagster.state.model.compaction import (
    Generations,
    Merge,
    PairsMerge,
    RowsMerge,
    SortOrder,
)
from arroyo_dagster.state.model.keys import KeyRange


def shards_of(merge: Merge, shard_bytes: int, *, divisible: bool) -> list[Merge]:
    """Split a merge of an expiring table into shards that can run in parallel.

    If rows are only copied, each shard takes neighbouring inputs. If all rows of a key are needed,
    each shard takes a key range and reads every input.

    Args:
        divisible: whether the key range of one subtask may be split as well: rows that depend on
            each other have the same routing key.

    Returns:
        Merges whose outputs, in order, are those of `merge`; only `merge` if it is small.
    """
    if isinstance(merge, PairsMerge) or merge.size_bytes <= shard_bytes:
        return [merge]
    by_key = merge.form.sort is SortOrder.KEY
    if merge.generations is Generations.ALL and merge.sizes and not by_key:
        return list(_by_inputs(merge, shard_bytes))
    count = -(-merge.size_bytes // shard_bytes)
    ranges = list(merge.ranges)
    if divisible and count > len(ranges):
        each = -(-count // len(ranges))
        ranges = [piece for keys in ranges for piece in subranges(keys, each)]
    groups = min(count, len(ranges))
    edges = [index * len(ranges) // groups for index in range(groups + 1)]
    return [
        replace(merge, ranges=tuple(ranges[start:end]), size_bytes=merge.size_bytes // groups)
        for start, end in itertools.pairwise(edges)
    ]


def _by_inputs(merge: RowsMerge, shard_bytes: int) -> Iterator[RowsMerge]:
    start = 0
    while start < len(merge.inputs):
        end, size = start + 1, merge.sizes[start]
        while end < len(merge.inputs) and size + merge.sizes[end] <= shard_bytes:
            size += merge.sizes[end]
            end += 1
        yield replace(
            merge,
            inputs=merge.inputs[start:end],
            sizes=merge.sizes[start:end],
            size_bytes=size,
            # Later shards keep deletes as rows: the rows that they apply to are in other shards.
            from_oldest=merge.from_oldest and start == 0,
        )
        start = end


def subranges(keys: KeyRange, count: int) -> list[KeyRange]:
    """Split a key range into `count` adjacent ranges, or fewer if it holds fewer keys."""
    width = keys.end - keys.start + 1
    count = min(count, width)
    edges = [keys.start + width * index // count for index in range(count + 1)]
    return [KeyRange(start, end - 1) for start, end in itertools.pairwise(edges)]
