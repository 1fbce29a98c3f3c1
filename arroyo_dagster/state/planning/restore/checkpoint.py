"""From subtask reports to operator metadata: which files are carried forward, and which expire.

Source: crates/arroyo-worker/src/job_controller/checkpoint_state.rs, and `merge_checkpoint_metadata`
of crates/arroyo-state/src/tables/{global_keyed_map,expiring_time_key_map}.rs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from arroyo_dagster.errors import ProtocolError
from arroyo_dagster.state.model.checkpoints import (
    ExpiringTimeKeyReport,
    GlobalKeyedReport,
    LegacyCheckpoint,
    OperatorCheckpoint,
    SubtaskCheckpoint,
)
from arroyo_dagster.state.model.ids import Epoch, JobId, OperatorId, StatePath, TableName
from arroyo_dagster.state.model.json_fields import MAX_TIME_MICROS
from arroyo_dagster.state.model.keys import KeyRange
from arroyo_dagster.state.model.tables import (
    ExpiringTimeKeyFiles,
    GlobalKeyedConfig,
    GlobalKeyedFiles,
    TableConfig,
    TableFiles,
    TimeFile,
)


def cutoff_micros(watermark_micros: int | None, retention_micros: int) -> int:
    """Return the oldest event time still kept: watermark minus retention; 0 without a watermark.

    It is at most `MAX_TIME_MICROS`: the last watermark of a bounded source lies beyond the last
    event time that a row can have.
    """
    return min(max(0, (watermark_micros or 0) - retention_micros), MAX_TIME_MICROS)


def files_to_carry(files: Iterable[TimeFile], cutoff: int, keys: KeyRange) -> tuple[TimeFile, ...]:
    """Return the earlier files that a subtask still lists: unexpired, and in its key range."""
    return tuple(
        file
        for file in files
        if file.max_timestamp_micros >= cutoff
        and keys.intersects(file.min_routing_key, file.max_routing_key)
    )


def merge_operator(
    job: JobId,
    operator: OperatorId,
    epoch: Epoch,
    reports: Sequence[SubtaskCheckpoint],
    previous: OperatorCheckpoint | None,
) -> OperatorCheckpoint:
    """Merge the reports of all subtasks of one operator into its metadata.

    Args:
        reports: exactly one of every subtask 0 … n-1, in any order.
        previous: the same operator at the epoch before; None at the first.

    Returns:
        Global keyed tables list the files of the previous epoch, then this epoch's files by
        subtask (removals before inserts). Expiring tables list the files not expired by the
        smallest watermark: carried ones in the order of the previous epoch, then new ones by
        subtask.

    Raises:
        ProtocolError: a subtask reports twice or not at all, or subtasks disagree on a table.

    Differs: Arroyo lists a global keyed table's newest files only, since it writes every pair at
    every epoch; files are in random order there. Here a subtask without a watermark keeps every
    row, so nothing expires; Arroyo takes the smallest watermark of the others.
    """
    ordered = sorted(reports, key=lambda report: report.subtask_index)
    if [report.subtask_index for report in ordered] != list(range(len(ordered))) or not ordered:
        raise ProtocolError(
            "every subtask reports once",
            operator=operator,
            epoch=epoch,
            subtasks=[report.subtask_index for report in ordered],
        )
    watermarks = [report.watermark_micros for report in ordered]
    marks = [mark for mark in watermarks if mark is not None]
    complete = len(marks) == len(watermarks)
    configs = _merged_configs(operator, ordered)
    tables: dict[TableName, TableFiles] = {}
    for name, config in configs.items():
        before = previous.tables.get(name) if previous else None
        merged = _merge_table(config, name, ordered, before, min(marks) if complete else None)
        if merged is not None:
            tables[name] = merged
    return OperatorCheckpoint(
        job=job,
        operator=operator,
        epoch=epoch,
        parallelism=len(ordered),
        min_watermark_micros=min(marks) if complete else None,
        max_watermark_micros=max(marks) if complete else None,
        start_time_micros=min(report.start_time_micros for report in ordered),
        finish_time_micros=max(report.finish_time_micros for report in ordered),
        tables=tables,
        configs={name: config for name, config in configs.items() if name in tables},
    )


def _merged_configs(
    operator: OperatorId, reports: Sequence[SubtaskCheckpoint]
) -> dict[TableName, TableConfig]:
    configs: dict[TableName, TableConfig] = {}
    for report in reports:
        for name, config in report.configs.items():
            if configs.setdefault(name, config).kind is not config.kind:
                raise ProtocolError(
                    "subtasks disagree on the kind of a table", operator=operator, table=name
                )
    return dict(sorted(configs.items()))


def _merge_table(
    config: TableConfig,
    name: TableName,
    reports: Sequence[SubtaskCheckpoint],
    before: TableFiles | None,
    watermark_micros: int | None,
) -> TableFiles | None:
    if isinstance(config.config, GlobalKeyedConfig):
        files: list[StatePath] = list(before.files) if isinstance(before, GlobalKeyedFiles) else []
        commit_data: dict[int, bytes] = {}
        for report in reports:
            table = report.tables.get(name)
            if isinstance(table, GlobalKeyedReport):
                files.extend(table.paths)
                if table.commit_data is not None:
                    commit_data[report.subtask_index] = table.commit_data
        if not config.config.uses_two_phase_commit:
            commit_data = {}
        return GlobalKeyedFiles(
            files=tuple(dict.fromkeys(files)), commit_data_by_subtask=commit_data
        )
    cutoff = cutoff_micros(watermark_micros, config.config.retention_micros)
    listed: dict[StatePath, TimeFile] = {}
    for report in reports:
        table = report.tables.get(name)
        if isinstance(table, ExpiringTimeKeyReport):
            for file in table.files:
                listed.setdefault(file.path, file)
    if not listed:
        return None
    earlier = before.files if isinstance(before, ExpiringTimeKeyFiles) else ()
    # Replay order is the previous epoch's order, whichever subtask carried the files forward.
    carried = [listed.pop(file.path) for file in earlier if file.path in listed]
    kept = [f for f in (*carried, *listed.values()) if f.max_timestamp_micros >= cutoff]
    return ExpiringTimeKeyFiles(files=tuple(kept)) if kept else None


def carry_operator(operator: OperatorCheckpoint, epoch: Epoch) -> OperatorCheckpoint:
    """Carry forward the unchanged state of an operator that the pipeline does not contain.

    Its commit data is dropped, because it is committed already.
    """
    tables = {
        name: replace(files, commit_data_by_subtask={})
        if isinstance(files, GlobalKeyedFiles)
        else files
        for name, files in operator.tables.items()
    }
    return replace(operator, epoch=epoch, tables=tables)


def incomplete(
    checkpoint: LegacyCheckpoint, name: OperatorId, operator: OperatorCheckpoint | None
) -> str | None:
    """Return why one operator keeps a legacy epoch from being made visible; None = it does not.

    Arroyo loads the metadata of every operator before any task starts, creates the tables that its
    configurations name, and continues counting from its epoch.

    Args:
        operator: the object at the path of `name`'s merged metadata; None if there is none.
    """
    if operator is None:
        return "an operator has no metadata"
    if (operator.job, operator.operator, operator.epoch) != (
        checkpoint.job,
        name,
        checkpoint.epoch,
    ):
        return f"an operator's metadata belongs to {operator.operator} at epoch {operator.epoch}"
    if operator.subtask is not None:
        return "an operator's metadata belongs to a single subtask"
    bare = sorted(set(operator.tables) - set(operator.configs))
    if bare:
        return f"the table {bare[0]} has no configuration"
    return None if operator.parallelism > 0 else "an operator has no subtask"


def merged_needs_commit(operators: Mapping[OperatorId, OperatorCheckpoint]) -> bool:
    """Return whether any table of the checkpoint commits in two phases."""
    return any(operator.needs_commit for operator in operators.values())
