"""The spread of files over subtasks."""

from __future__ import annotations

import pytest

from arroyo_dagster.state import range_for_server
from arroyo_dagster.state.model.catalog import FileRow
from arroyo_dagster.state.model.keys import MAX_ROUTING_KEY
from arroyo_dagster.state.planning.table_sizes import bytes_by_subtask, skew


def file(low: int, high: int, size_bytes: int) -> FileRow:
    return FileRow(
        job="j",
        epoch=1,
        operator="o",
        parallelism=4,
        table="t",
        table_kind="expiring time-key",
        place=0,
        path="p",
        size_bytes=size_bytes,
        min_routing_key=low,
        max_routing_key=high,
    )


def test_files_are_shared_by_the_subtasks_of_their_keys() -> None:
    second = range_for_server(1, 4)
    files = [file(0, MAX_ROUTING_KEY, 400), file(second.start, second.end, 50)]
    assert bytes_by_subtask(files, 4) == pytest.approx([100, 150, 100, 100], rel=1e-6)
    assert bytes_by_subtask([file(5, 5, 9)], 4) == [9, 0, 0, 0]
    assert skew([1, 1, 4, 2]) == 2
    assert skew([0, 0]) is None
