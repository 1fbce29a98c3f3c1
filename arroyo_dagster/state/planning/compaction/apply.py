"""The metadata of a job after files of it were merged.

In the replay order, merged files take the position of their inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from arroyo_dagster.state.model.checkpoints import OperatorCheckpoint
from arroyo_dagster.state.model.compaction import CompactionRecord, Merged, MergedPairs, MergedRows
from arroyo_dagster.state.model.ids import Epoch, OperatorId, StatePath
from arroyo_dagster.state.model.tables import (
    ExpiringTimeKeyConfig,
    ExpiringTimeKeyFiles,
    GlobalKeyedFiles,
    TableFiles,
)
from arroyo_dagster.state.planning.restore.checkpoint import cutoff_micros


@dataclass(frozen=True, slots=True)
class StaleMerge:
    """A merge that no longer matches the files that the job lists, and the reason."""

    merged: Merged
    reason: str


@dataclass(frozen=True, slots=True)
class Applied:
    """Operators that list merged files instead of their inputs, and the merges that were applied.

    Attributes:
        done: the merges that `operators` contains.
        stale: the merges that were not applied.
    """

    operators: tuple[OperatorCheckpoint, ...]
    done: tuple[Merged, ...]
    stale: tuple[StaleMerge, ...]


def adoptable(
    operators: Sequence[OperatorCheckpoint], records: Iterable[CompactionRecord], since: Epoch
) -> list[Merged]:
    """Return the merges of records that `apply_merges` may apply.

    A missing input counts as expired only in a record of an epoch from `since` on. Before it an
    edit or a rollback may have taken rows out of the input: the merge would bring them back.

    Args:
        operators: what the job lists now.
        since: the epoch from which the job's writer continued.
    """
    all_records, listed = list(records), frozenset[StatePath]()
    if any(record.epoch < since for record in all_records):
        listed = frozenset(path for operator in operators for path in operator.paths)
    return [
        merged
        for record in all_records
        for merged in record.merged
        if record.epoch >= since or listed.issuperset(merged.input_paths)
    ]


def apply_merges(operators: Sequence[OperatorCheckpoint], merged: Iterable[Merged]) -> Applied:
    """Replace the inputs of each merge by its outputs, where the inputs are still listed.

    A merge is applied completely or not at all. Inputs of an expiring table may be missing because
    they have expired: no row of them is loaded any more. If any other input is missing, another
    compaction has merged it: the merge is stale, because its rows would be loaded twice.
    """
    by_id: dict[OperatorId, OperatorCheckpoint] = {op.operator: op for op in operators}
    done: list[Merged] = []
    stale: list[StaleMerge] = []
    for merge in merged:
        operator = by_id.get(merge.operator)
        files = operator.tables.get(merge.table) if operator else None
        if operator is None or files is None:
            stale.append(StaleMerge(merge, "the table no longer exists"))
            continue
        changed = _applied(operator, files, merge)
        if isinstance(changed, str):
            stale.append(StaleMerge(merge, changed))
            continue
        by_id[merge.operator] = replace(operator, tables={**operator.tables, merge.table: changed})
        done.append(merge)
    return Applied(tuple(by_id.values()), tuple(done), tuple(stale))


def _applied(operator: OperatorCheckpoint, files: TableFiles, merged: Merged) -> TableFiles | str:
    listed = set(files.paths)
    if listed & set(merged.output_paths):
        return "it was already adopted"
    if isinstance(merged, MergedPairs) and isinstance(files, GlobalKeyedFiles):
        start = _index_of_run(files.files, merged.inputs)
        if start is None:
            return "its inputs are no longer listed side by side"
        end = start + len(merged.inputs)
        return replace(files, files=(*files.files[:start], *merged.outputs, *files.files[end:]))
    if isinstance(merged, MergedRows) and isinstance(files, ExpiringTimeKeyFiles):
        return _applied_rows(operator, files, merged)
    return "the table is of another kind now"


def _index_of_run(files: Sequence[StatePath], run: Sequence[StatePath]) -> int | None:
    if not run or run[0] not in files:
        return None
    start = files.index(run[0])
    return start if tuple(files[start : start + len(run)]) == tuple(run) else None


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
        return "none of its inputs is still listed"
    if any(inputs[path].max_timestamp_micros >= cutoff for path in missing):
        return "some of its inputs were merged by another compaction"
    outputs = [file for file in merged.outputs if file.max_timestamp_micros >= cutoff]
    kept = [file for file in files.files if file.path not in inputs]
    kept[places[0] : places[0]] = outputs
    return replace(files, files=tuple(kept))
