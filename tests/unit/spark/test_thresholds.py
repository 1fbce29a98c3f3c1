"""Which engine runs a step, by its amount of work, and how items are grouped for it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arroyo_dagster.errors import InputError
from arroyo_dagster.spark.items import SparkItems, grouped
from arroyo_dagster.spark.thresholds import SparkThresholds
from arroyo_dagster.state.model.settings import setting_fields, settings_from
from arroyo_dagster.state.operations.engines import HERE, Threads
from arroyo_dagster.state.planning.engines import StepEngine, WorkAmount
from arroyo_dagster.state.storage import MemoryStore

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
def test_any_threshold_that_is_reached_chooses_spark(
    amount: WorkAmount, engine: StepEngine, reason: str | None
) -> None:
    choice = LIMITS.choose("merge files", amount)
    assert choice.engine is engine
    assert reason is None or choice.reason == reason
    assert str(choice) == f"merge files: {engine.value} ({choice.reason})"
    assert choice.to_json() == {
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


@pytest.mark.parametrize("name", ["size_bytes", "files", "objects"])
def test_a_negative_threshold_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"the threshold {name} is negative"):
        SparkThresholds(**{name: -1})


def test_thresholds_are_settings_of_users() -> None:
    fields = {field.config: field for field in setting_fields(SparkThresholds)}
    assert list(fields) == ["spark_from_mb", "spark_from_files", "spark_from_objects"]
    assert fields["spark_from_mb"].given_default == 64
    assert fields["spark_from_mb"].option == "--spark-from-mb"
    given = {"size_bytes": 2, "files": 3}
    assert settings_from(SparkThresholds, given) == SparkThresholds(size_bytes=2 << 20, files=3)


def test_choices_are_kept_once_for_each_step_and_engine() -> None:
    def none() -> Any:
        raise AssertionError("a session was asked for")

    items = SparkItems(none, MemoryStore(), LIMITS)
    for count in (5, 6, 7):
        choice = items.choose("delete", WorkAmount(objects=count))
        assert items.run(choice, abs, [-1, -2], [1, 1]) == [1, 2]
    items.choose("delete", WorkAmount(objects=100))
    assert [(one.engine, one.reason) for one in items.choices] == [
        (StepEngine.IN_PROCESS, "5 objects, below 100 objects"),
        (StepEngine.SPARK, "100 objects, at least 100 objects"),
    ]


def test_in_process_items_keep_their_order_and_report_progress() -> None:
    done: list[int] = []
    choice = HERE.choose("step", WorkAmount(files=10**9))
    assert choice.engine is StepEngine.IN_PROCESS
    items = list(range(-50, 0))
    for threads in (Threads(), Threads(count=1)):
        found = HERE.run(choice, abs, items, items, threads=threads, on_items=done.append)
        assert found == [abs(item) for item in items]
    assert sum(done) == 100


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


def test_the_runner_of_dagster_has_the_same_defaults() -> None:
    from arroyo_dagster.orchestration.resources import SparkSessionResource
    from arroyo_dagster.orchestration.runners import SparkRunner

    spark = SparkSessionResource()
    assert SparkRunner(spark=spark).thresholds == SparkThresholds()
    given = SparkRunner(spark=spark, in_process_mb=1, spark_from_files=2, spark_from_objects=3)
    assert given.thresholds == SparkThresholds(size_bytes=1 << 20, files=2, objects=3)
