"""Which neighbouring files a policy merges, and why it does not merge the others; how many merges
fit into a budget, and how a large one is split.

Each rule is idempotent: applied to its own result it chooses no merge.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from arroyo_dagster.state.model.compaction import (
    Budget,
    CompactionPolicy,
    CompactionSettings,
    Generations,
    LeftOut,
    Merge,
    MergeOrder,
    PairsMerge,
    RowsMerge,
    SortOrder,
)
from arroyo_dagster.state.model.ids import OperatorId, StatePath, TableName
from arroyo_dagster.state.model.keys import KeyRange


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A file with the properties that the policies use.

    Attributes:
        level: how many times it was merged.
        latest_micros: its newest event time; None in global keyed tables.
        straddles: whether it holds keys of more than one subtask at the target parallelism.
    """

    path: StatePath
    size_bytes: int
    level: int
    latest_micros: int | None = None
    straddles: bool = False


@dataclass(frozen=True, slots=True)
class FileRun:
    """Neighbouring files to merge: from `start` (included) to `end` (excluded)."""

    start: int
    end: int


def choose(
    files: Sequence[Candidate], settings: CompactionSettings, window_micros: int | None = None
) -> list[FileRun]:
    """Choose the runs of neighbouring files to merge.

    Args:
        files: in replay order; they depend on each other and on no other files.
        window_micros: the length of a window of an expiring table; None for other tables.
    """
    if settings.parallelism is not None and any(file.straddles for file in files):
        return [FileRun(0, len(files))]
    return list(_RULES[settings.policy](files, settings, window_micros))


def why_left(
    files: Sequence[Candidate],
    at: int,
    settings: CompactionSettings,
    window_micros: int | None = None,
) -> str:
    """Return the reason why the file at `at`, which `choose` put into no run, is not merged."""
    if settings.policy is CompactionPolicy.WINDOW and window_micros is None:
        return "the window policy applies to expiring tables only"
    if len(files) < 2:
        return "it has one file or none"
    if all(file.level for file in files):
        return "all its files are merged already"
    if settings.policy is CompactionPolicy.BIN_PACK:
        if files[at].size_bytes >= settings.target_bytes * settings.small_share:
            return "it is not small"
        return (
            f"fewer than {settings.min_files} neighbouring small files that were never merged, "
            "or fewer of them than of merged ones"
        )
    if settings.policy is CompactionPolicy.LEVELS:
        if files[at].size_bytes >= settings.target_bytes:
            return "it has reached the target"
        return f"fewer than {settings.level_files} neighbouring files of its level"
    return "no neighbouring file has its newest rows in the same window"


# ---- the rules -----------------------------------------------------------------------------------


def _full(
    files: Sequence[Candidate], settings: CompactionSettings, window_micros: int | None
) -> Iterator[FileRun]:
    if len(files) > 1 and not all(file.level for file in files):
        yield FileRun(0, len(files))


def _bin_pack(
    files: Sequence[Candidate], settings: CompactionSettings, window_micros: int | None
) -> Iterator[FileRun]:
    small = settings.target_bytes * settings.small_share
    start = 0
    while start < len(files):
        end, total = start, 0
        while end < len(files) and files[end].size_bytes < small and total < settings.target_bytes:
            total += files[end].size_bytes
            end += 1
        fresh = sum(not file.level for file in files[start:end])
        if fresh >= settings.min_files and 2 * fresh >= end - start:
            yield FileRun(start, end)
        start = max(end, start + 1)


@dataclass(slots=True)
class _Level:
    """Neighbouring files that are, or would become, one file of a level."""

    level: int
    size_bytes: int
    start: int
    end: int


def _levels(
    files: Sequence[Candidate], settings: CompactionSettings, window_micros: int | None
) -> Iterator[FileRun]:
    """Merge neighbours of one level into the next level, repeatedly, until no merge is left."""
    levels = [_Level(file.level, file.size_bytes, i, i + 1) for i, file in enumerate(files)]
    while True:
        merged = list(_next_level(levels, settings))
        if len(merged) == len(levels):
            break
        levels = merged
    runs = [FileRun(level.start, level.end) for level in levels if level.end > level.start + 1]
    # A merged file may be smaller than its level's size, so only new files may trigger a merge.
    if any(not file.level for run in runs for file in files[run.start : run.end]):
        yield from runs


def _next_level(found: Sequence[_Level], settings: CompactionSettings) -> Iterator[_Level]:
    def kind(one: _Level) -> tuple[int, bool]:
        return one.level, one.size_bytes >= settings.target_bytes

    for (level, large), group in itertools.groupby(found, key=kind):
        run = list(group)
        if large or len(run) < settings.level_files:
            yield from run
        else:
            size = sum(entry.size_bytes for entry in run)
            yield _Level(level + 1, size, run[0].start, run[-1].end)


def _windows(
    files: Sequence[Candidate], settings: CompactionSettings, window_micros: int | None
) -> Iterator[FileRun]:
    """Merge neighbours of one window; in the newest, growing window only `min_files` new ones."""
    if window_micros is None:
        return
    windows = [(file.latest_micros or 0) // window_micros for file in files]
    newest = max(windows, default=0)
    start = 0
    for window, group in itertools.groupby(windows):
        end = start + len(list(group))
        fresh = sum(not file.level for file in files[start:end])
        enough = settings.min_files if window == newest else 1
        if end > start + 1 and fresh >= enough:
            yield FileRun(start, end)
        start = end


_Rule = Callable[[Sequence[Candidate], CompactionSettings, "int | None"], Iterator[FileRun]]
_RULES: dict[CompactionPolicy, _Rule] = {
    CompactionPolicy.FULL: _full,
    CompactionPolicy.BIN_PACK: _bin_pack,
    CompactionPolicy.LEVELS: _levels,
    CompactionPolicy.WINDOW: _windows,
}


# ---- the order of merges or rewrites, and how many fit into a budget -----------------------------


class Costly(Protocol):
    """Work on files of one table; its cost is the number of bytes to read."""

    @property
    def operator(self) -> OperatorId: ...
    @property
    def table(self) -> TableName: ...
    @property
    def paths(self) -> tuple[StatePath, ...]: ...
    @property
    def size_bytes(self) -> int: ...


_C = TypeVar("_C", bound=Costly)


def _first(order: MergeOrder, merges: Sequence[_C], gain: Callable[[_C], int]) -> list[_C]:
    if order is MergeOrder.GAIN:
        return sorted(merges, key=lambda one: gain(one) / max(1, one.size_bytes), reverse=True)
    if order is MergeOrder.SMALLEST:
        return sorted(merges, key=lambda merge: merge.size_bytes)
    return list(merges)


def within_budget(
    budget: Budget, merges: Sequence[_C], gain: Callable[[_C], int]
) -> tuple[list[_C], list[LeftOut]]:
    """Take the merges that fit into a budget, in its order, and return the reason for each other.

    Args:
        gain: returns by how many files at least one merge reduces the number of files.
    """
    taken: list[_C] = []
    left: list[LeftOut] = []
    tables: set[tuple[OperatorId, TableName]] = set()
    bytes_left, files_left = budget.size_bytes, budget.files
    for merge in _first(budget.order, merges, gain):
        table = (merge.operator, merge.table)
        reason = None
        if budget.min_gain_files > 1 and gain(merge) < budget.min_gain_files:
            reason = (
                f"it removes only {gain(merge)} files, less than the minimum of "
                f"{budget.min_gain_files}"
            )
        elif budget.merges is not None and len(taken) >= budget.merges:
            reason = budget.merges_reason
        elif bytes_left is not None and merge.size_bytes > bytes_left:
            reason = f"over the budget of {budget.size_bytes} bytes"
        elif files_left is not None and len(merge.paths) > files_left:
            reason = f"over the budget of {budget.files} files"
        elif budget.tables is not None and table not in tables and len(tables) == budget.tables:
            reason = f"over the budget of {budget.tables} tables"
        if reason is not None:
            left.append(
                LeftOut(operator=table[0], table=table[1], reason=reason, files=merge.paths)
            )
            continue
        taken.append(merge)
        tables.add(table)
        bytes_left = None if bytes_left is None else bytes_left - merge.size_bytes
        files_left = None if files_left is None else files_left - len(merge.paths)
    return taken, left


# ---- shards of a merge, which can run in parallel ------------------------------------------------


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
