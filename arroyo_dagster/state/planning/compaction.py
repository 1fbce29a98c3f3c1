"""Which files to merge, and the metadata once they are merged.

Files are merged where they lie side by side in the replay order, so that later files still act on
what they acted on. Of an expiring table only the order within a key range counts: ranges are
merged apart, and each file that comes of it belongs to one subtask.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.checkpoints import Checkpoint, OperatorCheckpoint
from arroyo_dagster.state.model.compaction import (
    CompactionPlan,
    CompactionPolicy,
    CompactionRecord,
    CompactionSettings,
    LeftOut,
    Merge,
    Merged,
    MergedPairs,
    MergedRows,
    PairsMerge,
    RowsMerge,
)
from arroyo_dagster.state.model.ids import OperatorId, StatePath, TableName
from arroyo_dagster.state.model.keys import range_for_server, server_for_hash
from arroyo_dagster.state.model.layout import is_compacted
from arroyo_dagster.state.model.tables import (
    ExpiringTimeKeyConfig,
    ExpiringTimeKeyFiles,
    GlobalKeyedFiles,
    TableFiles,
    TimeFile,
)
from arroyo_dagster.state.planning.checkpoint import cutoff_micros

_F = TypeVar("_F", StatePath, TimeFile)
NOT_OURS = (
    "this is a job of Arroyo's: its files are shown, checked and compared, but not merged yet"
)


# ---- planning ------------------------------------------------------------------------------------


def plan_compaction(
    checkpoint: Checkpoint,
    sizes: Mapping[StatePath, int],
    settings: CompactionSettings,
    pending: Sequence[CompactionRecord] = (),
) -> CompactionPlan:
    """Choose what to merge at one epoch.

    Args:
        checkpoint: the newest epoch of the job.
        sizes: bytes of every file that it, or a pending record, lists.
        pending: compactions that the job has not taken over yet; they count as done.

    Returns:
        A plan, without merges where nothing would get smaller; `left_out` says why.

    Raises:
        InputError: the size of a listed file is not known.
    """
    waiting = [merged for record in pending for merged in record.merged]
    operators = apply_merged(checkpoint.operators, waiting).operators
    merges: list[Merge] = []
    left_out: list[LeftOut] = []
    if checkpoint.progress is None:
        operators = ()
        left_out.append(LeftOut(reason=NOT_OURS))
    for operator in operators:
        for name, files in operator.tables.items():
            _check_sizes(files.paths, sizes, checkpoint)
            found = list(_plan_table(operator, name, files, sizes, settings))
            merges.extend(found)
            if not found:
                reason = _why_not(files, settings)
                left_out.append(LeftOut(operator=operator.operator, table=name, reason=reason))
    listed = list(dict.fromkeys(path for operator in operators for path in operator.paths))
    gone = sum(len(merge.paths) - most_outputs(merge) for merge in merges)
    return CompactionPlan(
        pipeline=checkpoint.pipeline,
        job=checkpoint.job,
        epoch=checkpoint.epoch,
        ref=checkpoint.ref,
        merges=tuple(merges),
        left_out=tuple(left_out),
        pending=len(pending),
        files_before=len(listed),
        files_after=len(listed) - gone,
        size_bytes_before=sum(sizes[path] for path in listed),
    )


def backlog(checkpoint: Checkpoint) -> int:
    """How many data files of a job were never merged, beyond one for each subtask and table.

    From metadata alone, so that a schedule can ask it of hundreds of jobs.
    """
    if checkpoint.progress is None:
        return 0
    return sum(
        max(0, _fresh(files) - operator.parallelism)
        for operator in checkpoint.operators
        for files in operator.tables.values()
    )


def most_outputs(merge: Merge) -> int:
    """How many files a merge gives at most, values of several state versions aside."""
    if isinstance(merge, PairsMerge):
        return 1 if merge.from_oldest else 2
    return len(merge.ranges)


def _check_sizes(
    paths: Iterable[StatePath], sizes: Mapping[StatePath, int], checkpoint: Checkpoint
) -> None:
    unknown = [path for path in paths if path not in sizes]
    if unknown:
        raise InputError(
            f"{len(unknown)} listed files have no known size; they may be missing",
            job=checkpoint.job,
            epoch=checkpoint.epoch,
            path=unknown[0],
            next_step="check the epoch; nothing is merged while a file is missing",
        )


def _plan_table(
    operator: OperatorCheckpoint,
    name: TableName,
    files: TableFiles,
    sizes: Mapping[StatePath, int],
    settings: CompactionSettings,
) -> Iterator[Merge]:
    if isinstance(files, GlobalKeyedFiles):
        for run in _runs(files.files, str, sizes, settings):
            merge = PairsMerge(
                operator=operator.operator,
                table=name,
                inputs=run,
                size_bytes=sum(sizes[path] for path in run),
                from_oldest=run[0] == files.files[0],
            )
            if most_outputs(merge) < len(run):
                yield merge
        return
    config = operator.configs[name].config
    assert isinstance(config, ExpiringTimeKeyConfig)
    yield from _plan_rows(operator, name, config, files, sizes, settings)


def _plan_rows(
    operator: OperatorCheckpoint,
    name: TableName,
    config: ExpiringTimeKeyConfig,
    files: ExpiringTimeKeyFiles,
    sizes: Mapping[StatePath, int],
    settings: CompactionSettings,
) -> Iterator[RowsMerge]:
    cutoff = cutoff_micros(operator.min_watermark_micros, config.retention_micros)
    live = [file for file in files.files if file.max_timestamp_micros >= cutoff]
    for sequence in _sequences(live, operator.parallelism):
        for run in _runs(sequence, lambda file: str(file.path), sizes, settings):
            owners = sorted(set().union(*(_owners(file, operator.parallelism) for file in run)))
            if len(owners) < len(run):
                yield RowsMerge(
                    operator=operator.operator,
                    table=name,
                    inputs=run,
                    ranges=tuple(range_for_server(o, operator.parallelism) for o in owners),
                    cutoff_micros=cutoff,
                    size_bytes=sum(sizes[file.path] for file in run),
                    from_oldest=run[0] == sequence[0],
                )


def _owners(file: TimeFile, parallelism: int) -> range:
    """The subtasks whose key ranges a file reaches into."""
    first = server_for_hash(file.min_routing_key, parallelism)
    return range(first, server_for_hash(file.max_routing_key, parallelism) + 1)


def _sequences(files: Sequence[TimeFile], parallelism: int) -> list[tuple[TimeFile, ...]]:
    """Files that act on each other, in replay order: those of one subtask, if none is of two."""
    owners = [_owners(file, parallelism) for file in files]
    if any(len(owner) > 1 for owner in owners):
        return [tuple(files)]
    pairs = sorted(zip((owner[0] for owner in owners), range(len(files)), strict=True))
    return [
        tuple(files[index] for _, index in group)
        for _, group in itertools.groupby(pairs, key=lambda pair: pair[0])
    ]


def _runs(
    files: Sequence[_F],
    path: Callable[[_F], str],
    sizes: Mapping[StatePath, int],
    settings: CompactionSettings,
) -> Iterator[tuple[_F, ...]]:
    """Neighbours worth merging."""
    fresh = [not is_compacted(path(file)) for file in files]
    if settings.policy is CompactionPolicy.FULL:
        if len(files) > 1 and any(fresh):
            yield tuple(files)
        return
    small = settings.target_bytes * settings.small_share
    bytes_of = [sizes[StatePath(path(file))] for file in files]
    start = 0
    while start < len(files):
        end, total = start, 0
        while end < len(files) and bytes_of[end] < small and total < settings.target_bytes:
            total += bytes_of[end]
            end += 1
        new = sum(fresh[start:end])
        if new >= settings.min_files and 2 * new >= end - start:
            yield tuple(files[start:end])
        start = max(end, start + 1)


def _fresh(files: TableFiles) -> int:
    return sum(not is_compacted(path) for path in files.paths)


def _why_not(files: TableFiles, settings: CompactionSettings) -> str:
    if len(files.paths) < 2:
        return "it has one file or none"
    if not _fresh(files):
        return "all its files are merged ones already"
    if settings.policy is CompactionPolicy.FULL:
        return "no two files of it hold keys of one subtask"
    return (
        f"fewer than {settings.min_files} small files side by side that were never merged, or "
        "fewer of them than of merged ones"
    )


# ---- the metadata once they are merged -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Void:
    """A merge that no longer fits what the job lists, and why."""

    merged: Merged
    reason: str


@dataclass(frozen=True, slots=True)
class Applied:
    """Operators with merged files in place of their inputs, and which merges that took."""

    operators: tuple[OperatorCheckpoint, ...]
    done: tuple[Merged, ...]
    void: tuple[Void, ...]


def apply_merged(operators: Sequence[OperatorCheckpoint], merged: Iterable[Merged]) -> Applied:
    """Put merged files in the place of their inputs, where those are still listed.

    A merge counts as a whole or not at all. Inputs of an expiring table may be missing because
    they have expired: no row of theirs is loaded any more. Any other that is missing was merged by
    somebody else, and the merge is void: its rows would come twice.
    """
    by_id: dict[OperatorId, OperatorCheckpoint] = {one.operator: one for one in operators}
    done: list[Merged] = []
    void: list[Void] = []
    for one in merged:
        operator = by_id.get(one.operator)
        files = operator.tables.get(one.table) if operator else None
        if operator is None or files is None:
            void.append(Void(one, "the table is no longer there"))
            continue
        changed = _applied(operator, files, one)
        if isinstance(changed, str):
            void.append(Void(one, changed))
            continue
        by_id[one.operator] = replace(operator, tables={**operator.tables, one.table: changed})
        done.append(one)
    return Applied(tuple(by_id.values()), tuple(done), tuple(void))


def _applied(operator: OperatorCheckpoint, files: TableFiles, merged: Merged) -> TableFiles | str:
    known = set(files.paths)
    if known & set(merged.output_paths):
        return "it was taken over before"
    if isinstance(merged, MergedPairs) and isinstance(files, GlobalKeyedFiles):
        at = _index_of_run(files.files, merged.inputs)
        if at is None:
            return "its inputs are no longer listed side by side"
        after = at + len(merged.inputs)
        return replace(files, files=(*files.files[:at], *merged.outputs, *files.files[after:]))
    if isinstance(merged, MergedRows) and isinstance(files, ExpiringTimeKeyFiles):
        return _applied_rows(operator, files, merged)
    return "the table is of another kind now"


def _index_of_run(files: Sequence[StatePath], run: Sequence[StatePath]) -> int | None:
    if not run or run[0] not in files:
        return None
    at = files.index(run[0])
    return at if tuple(files[at : at + len(run)]) == tuple(run) else None


def _applied_rows(
    operator: OperatorCheckpoint, files: ExpiringTimeKeyFiles, merged: MergedRows
) -> ExpiringTimeKeyFiles | str:
    config = operator.configs[merged.table].config
    assert isinstance(config, ExpiringTimeKeyConfig)
    cutoff = cutoff_micros(operator.min_watermark_micros, config.retention_micros)
    inputs = {file.path: file for file in merged.inputs}
    places = [index for index, file in enumerate(files.files) if file.path in inputs]
    missing = set(inputs) - set(files.paths)
    if not places:
        return "none of its inputs is listed any more"
    if any(inputs[path].max_timestamp_micros >= cutoff for path in missing):
        return "some of its inputs were merged by somebody else"
    outputs = [file for file in merged.outputs if file.max_timestamp_micros >= cutoff]
    kept = [file for file in files.files if file.path not in inputs]
    kept[places[0] : places[0]] = outputs
    return replace(files, files=tuple(kept))
