"""Which engine runs a step, by its amount of work, and how items are grouped for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arroyo_dagster.spark.items import grouped
from arroyo_dagster.spark.thresholds import SparkThresholds
from arroyo_dagster.state.codec.derived import plain_values
from arroyo_dagster.state.planning.engines import StepEngine, WorkAmount

LIMITS = SparkThresholds(size_bytes=1_000_000, files=10, objects=100)
SMALL = {"size_bytes": 999_999, "files": 9, "objects": 99}


@pytest.mark.parametrize(
    ("amount", "engine", "reason"),
    [
        (WorkAmount(), StepEngine.IN_PROCESS, "nothing to do"),
        (WorkAmount(files=9), StepEngine.IN_PROCESS, "9 files, below 10 files"),
        (WorkAmount(files=10), StepEngine.SPARK, "10 files, at least 10 files"),
        (WorkAmount(objects=99), StepEngine.IN_PROCESS, "99 objects, below 100 objects"),
        (WorkAmount(objects=12_345), StepEngine.SPARK, "12,345 objects, at least 100 objects"),
        (
            WorkAmount(size_bytes=500_000, files=9),
            StepEngine.IN_PROCESS,
            "500.0 kB, below 1.0 MB, 9 files, below 10 files",
        ),
        (WorkAmount(size_bytes=2_500_000, files=9), StepEngine.SPARK, "2.5 MB, at least 1.0 MB"),
        (WorkAmount(**SMALL), StepEngine.IN_PROCESS, None),
    ],
)
def test_thresholds_choose_spark(
    amount: WorkAmount, engine: StepEngine, reason: str | None
) -> None:
    choice = LIMITS.choose("merge files", amount)
    assert choice.engine is engine
    assert reason is None or choice.reason == reason
    assert str(choice) == f"merge files: {engine.value} ({choice.reason})"
    assert plain_values(choice) == {
        "step": "merge files",
        "engine": engine.value,
        "reason": choice.reason,
    }


def test_zero_always_chooses_spark_unless_there_is_nothing_to_do() -> None:
    always = SparkThresholds(size_bytes=0, files=0, objects=0)
    for amount in (WorkAmount(files=1), WorkAmount(objects=1), WorkAmount(size_bytes=1)):
        assert always.choose("step", amount).engine is StepEngine.SPARK
    assert always.choose("step", WorkAmount()).engine is StepEngine.IN_PROCESS


def test_a_step_that_only_this_process_can_run_says_why() -> None:
    choice = LIMITS.choose("delete", WorkAmount(objects=10**6), only_here="it is checked here")
    assert (choice.engine, choice.reason) == (StepEngine.IN_PROCESS, "it is checked here")


@given(st.lists(st.integers(0, 10_000), max_size=200), st.integers(1, 50))
def test_groups_are_neighbours_and_none_is_much_heavier_than_its_share(
    weights: list[int], groups: int
) -> None:
    found = grouped(weights, groups)
    assert [at for group in found for at in group] == list(range(len(weights)))
    assert all(len(group) for group in found)
    assert len(found) <= 2 * groups
    share = -(-sum(max(1, weight) for weight in weights) // groups)
    for group in found:
        assert len(group) == 1 or sum(max(1, weights[at]) for at in group) <= share
