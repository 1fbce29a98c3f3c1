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
    range_for_server,
)
from arroyo_dagster.state.model.checkpoints import (
    ExpiringTimeKeyReport,
    GlobalKeyedReport,
    LegacyCheckpoint,
    SubtaskCheckpoint,
    TableReport,
)
from arroyo_dagster.state.model.keys import MAX_ROUTING_KEY
from arroyo_dagster.state.model.tables import (
    ExpiringTimeKeyFiles,
    GlobalKeyedConfig,
    GlobalKeyedFiles,
    TimeFile,
)
from arroyo_dagster.state.planning.restore.checkpoint import (
    carry_operator,
    cutoff_micros,
    files_to_carry,
    incomplete,
    merge_operator,
    merged_needs_commit,
)
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


def test_a_global_table_lists_what_was_there_then_new_files_by_subtask_removals_first() -> None:
    before = merged(report(0, wrote("old1")), report(1, wrote("old2")))
    now = merged(report(1, wrote("b", "b-removed")), report(0, wrote("a")), previous=before)
    assert paths(now, G) == ("old1", "old2", "a", "b-removed", "b")


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


def test_an_expiring_table_lists_each_file_once_in_the_order_of_the_epoch_before() -> None:
    a, b, c, d = (time_file(name, 100) for name in "abcd")
    before = merged(report(0, listed(a, b, c)))
    now = merged(report(0, listed(c, a, d)), report(1, listed(b, a)), previous=before)
    assert paths(now, T) == ("a", "b", "c", "d")


def test_files_wholly_below_the_cutoff_of_the_smallest_watermark_expire() -> None:
    files = [time_file("old", 9), time_file("edge", 10), time_file("new", 11)]
    now = merged(report(0, listed(*files), watermark=20), report(1, listed(*files), watermark=90))
    assert paths(now, T) == ("edge", "new")


def test_nothing_expires_while_a_subtask_has_no_watermark() -> None:
    now = merged(report(0, listed(time_file("old", 1)), watermark=90), report(1))
    assert paths(now, T) == ("old",)


def test_an_expiring_table_that_nobody_lists_is_absent_with_its_configuration() -> None:
    before = merged(report(0, listed(time_file("f", 1))))
    now = merged(report(0), previous=before)
    assert (now.tables, now.configs) == ({}, {})
    gone = merged(report(0, listed(time_file("f", 1)), watermark=1000), previous=before)
    assert (gone.tables, gone.configs) == ({}, {})


@pytest.mark.parametrize(
    ("watermark", "retention", "cutoff"),
    [(None, 0, 0), (None, 5, 0), (3, 5, 0), (5, 5, 0), (9, 5, 4), (9, 0, 9)],
)
def test_the_cutoff_is_the_watermark_minus_the_retention_and_never_below_zero(
    watermark: int | None, retention: int, cutoff: int
) -> None:
    assert cutoff_micros(watermark, retention) == cutoff


def test_a_subtask_carries_on_what_touches_its_keys_and_is_not_expired() -> None:
    mine = range_for_server(1, 4)
    files = [
        time_file("below", 9, 0, mine.start - 1),
        time_file("touches", 9, 0, mine.start),
        time_file("above", 9, mine.end + 1, MAX_ROUTING_KEY),
        time_file("inside", 9, mine.start + 5, mine.end),
        time_file("around", 9),
        time_file("expired", 8),
    ]
    assert [f.path for f in files_to_carry(files, 9, mine)] == ["touches", "inside", "around"]


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
