"""Forecasts of sizes, and the spread of files over subtasks."""

from __future__ import annotations

import pytest

from arroyo_dagster.state import range_for_server
from arroyo_dagster.state.model.catalog import FileRow
from arroyo_dagster.state.model.keys import MAX_ROUTING_KEY
from arroyo_dagster.state.planning.table_sizes import Growth, bytes_by_subtask, skew

DAY = 86_400_000_000


def test_a_line_is_continued() -> None:
    growth = Growth(sizes=tuple((at * DAY, 1000 + 10 * at) for at in range(5)))
    assert growth.bytes_per_day == pytest.approx(10)
    assert growth.after_days(30) == 1040 + 300


def test_noise_moves_the_line_little_and_a_size_is_never_negative() -> None:
    noisy = Growth(sizes=tuple((at * DAY, 100 * at + (7 if at % 2 else -7)) for at in range(20)))
    assert noisy.bytes_per_day == pytest.approx(100, abs=1)
    shrinking = Growth(sizes=((0, 100), (DAY, 10)))
    assert shrinking.after_days(30) == 0


@pytest.mark.parametrize("sizes", [(), ((5, 7),), ((5, 7), (5, 9))])
def test_one_moment_has_no_forecast(sizes: tuple[tuple[int, int], ...]) -> None:
    assert Growth(sizes=sizes).bytes_per_day is None
    assert Growth(sizes=sizes).after_days(1) is None


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
