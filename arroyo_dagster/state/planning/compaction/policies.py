"""Which neighbouring files a policy merges, and why it does not merge the others.

Each rule is idempotent: applied to its own result it chooses no merge.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from arroyo_dagster.state.model.compaction import CompactionPolicy, CompactionSettings
from arroyo_dagster.state.model.ids import StatePath


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
