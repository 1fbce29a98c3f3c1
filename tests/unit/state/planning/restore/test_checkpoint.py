"""Reports of subtasks merged into the metadata of an operator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from arroyo_dagster.errors import ProtocolError
from arroyo_dagster.state import (
    Epoch,
    JobId,
    OperatorCheckpoint,
    OperatorId,
    StatePath,
    TableConfig,
    TableName,
)
from arroyo_dagster.state.model.checkpoints import (
    ExpiringTimeKeyReport,
    GlobalKeyedReport,
    TableReport,
)
from arroyo_dagster.state.planning.restore.checkpoint import (
    carry_operator,
    incomplete,
    merged_needs_commit,
)
from tests.formats import (
    MAX_ROUTING_KEY,
    ExpiringTimeKeyFiles,
    GlobalKeyedConfig,
    GlobalKeyedFiles,
    LegacyCheckpoint,
    SubtaskCheckpoint,
    TimeFile,
)
from tests.internals import merge_operator
from tests.unit.state.planning import values

JOB, OP, G, T = JobId("j"), OperatorId("o"), TableName("g"), TableName("t")
GLOBAL = values.pairs("g")
COMMITS = TableConfig(config=GlobalKeyedConfig(table=G, uses_two_phase_commit=True))
EXPIRING = TableConfig(config=values.expiring("t", 10))


def time_file(name: str, latest: int, low: int = 0, high: int = MAX_ROUTING_KEY) -> TimeFile:
    return values.time_file(
        name, min_routing_key=low, max_routing_key=high, max_timestamp_micros=latest
    )


def report(
    index: int,
    tables: Mapping[TableName, TableReport] | None = None,
    *,
    watermark: int | None = None,
    config: TableConfig = GLOBAL,
) -> SubtaskCheckpoint:
    configs = {G: config, T: EXPIRING}
    return SubtaskCheckpoint(
        subtask_index=index,
        start_time_micros=10 - index,
        finish_time_micros=20 + index,
        watermark_micros=watermark,
        size_bytes=0,
        tables=tables or {},
        configs={name: configs[name] for name in tables or {}},
    )


def wrote(file: str | None = None, removals: str | None = None) -> dict[TableName, TableReport]:
    return {
        G: GlobalKeyedReport(
            file=StatePath(file) if file else None,
            removals=StatePath(removals) if removals else None,
        )
    }


def listed(*files: TimeFile) -> dict[TableName, TableReport]:
    return {T: ExpiringTimeKeyReport(files=files)}


def merged(
    *reports: SubtaskCheckpoint, previous: OperatorCheckpoint | None = None
) -> OperatorCheckpoint:
    return merge_operator(JOB, OP, Epoch(2), reports, previous)


def paths(operator: OperatorCheckpoint, table: TableName) -> tuple[str, ...]:
    return tuple(operator.tables[table].paths)


@pytest.mark.parametrize("indices", [[], [1], [0, 0], [0, 2], [0, 1, 1]])
def test_a_subtask_that_reports_twice_or_not_at_all_is_refused(indices: list[int]) -> None:
    with pytest.raises(ProtocolError, match="reports once"):
        merged(*(report(index) for index in indices))


def test_subtasks_that_disagree_on_a_table_are_refused() -> None:
    other = report(1, listed(time_file("f", 1)))
    wrong = SubtaskCheckpoint(
        subtask_index=0,
        start_time_micros=0,
        finish_time_micros=0,
        watermark_micros=None,
        size_bytes=0,
        tables={T: GlobalKeyedReport()},
        configs={T: GLOBAL},
    )
    with pytest.raises(ProtocolError, match="disagree"):
        merged(wrong, other)


def test_commit_data_is_kept_by_subtask_even_when_it_is_empty() -> None:
    first: dict[TableName, TableReport] = {G: GlobalKeyedReport(commit_data=b"")}
    operator = merged(report(0, first, config=COMMITS), report(1, wrote(), config=COMMITS))
    files = operator.tables[G]
    assert isinstance(files, GlobalKeyedFiles)
    assert files.commit_data_by_subtask == {0: b""}
    assert operator.needs_commit
    assert merged_needs_commit({OP: operator})


def test_commit_data_of_the_epoch_before_is_not_carried_on() -> None:
    data: dict[TableName, TableReport] = {G: GlobalKeyedReport(commit_data=b"x")}
    before = merged(report(0, data, config=COMMITS))
    now = merged(report(0, wrote(), config=COMMITS), previous=before)
    assert now.commit_data() == {G: {}}
    assert now.needs_commit


def test_nothing_expires_while_a_subtask_has_no_watermark() -> None:
    now = merged(report(0, listed(time_file("old", 1)), watermark=90), report(1))
    assert paths(now, T) == ("old",)


def test_an_operator_that_left_the_pipeline_keeps_its_files_and_commits_nothing_again() -> None:
    data: dict[TableName, TableReport] = {
        G: GlobalKeyedReport(file=StatePath("f"), commit_data=b"x"),
        **listed(time_file("t", 1)),
    }
    before = merged(report(0, data, config=COMMITS, watermark=3))
    carried = carry_operator(before, Epoch(9))
    assert carried.paths == before.paths
    assert (carried.epoch, carried.min_watermark_micros) == (9, 3)
    assert isinstance(carried.tables[T], ExpiringTimeKeyFiles)
    assert carried.commit_data() == {G: {}}


def test_an_operator_without_which_arroyo_could_not_restore_is_told() -> None:
    whole = merged(report(0, wrote("a")), report(1))
    head = LegacyCheckpoint(
        job=JOB,
        epoch=Epoch(2),
        min_epoch=Epoch(1),
        start_time_micros=0,
        finish_time_micros=0,
        operators=(OP,),
    )
    assert incomplete(head, OP, whole) is None
    broken = {
        "no metadata": None,
        "at epoch 3": replace(whole, epoch=Epoch(3)),
        "to other": replace(whole, operator=OperatorId("other")),
        "to o at": replace(whole, job=JobId("k")),
        "a single subtask": replace(whole, subtask=report(0)),
        "no configuration": replace(whole, configs={}),
        "no subtask": replace(whole, parallelism=0),
    }
    for why, operator in broken.items():
        assert why in str(incomplete(head, OP, operator))
