"""What a listing shows: prefixes without a job, kinds by name, writes per day."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arroyo_dagster.state.model.ids import JobId, PipelineId
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.objects import ObjectKind
from arroyo_dagster.state.planning.fleet.usage import (
    DAY_MICROS,
    EpochWrites,
    kind_of,
    prefixes_without_job,
    writes_a_day,
)
from arroyo_dagster.state.planning.restore.reads import Level

SECOND = 1_000_000


def test_directories_without_a_job_are_returned_once_at_the_highest_level() -> None:
    known = {
        "": Level(directories=frozenset({"shop", "old", "job_1", "_arroyo_dagster"})),
        "shop": Level(directories=frozenset({"main", "gone", "_arroyo_dagster"})),
        "old": Level(directories=frozenset({"x", "y"})),
        "job_1": Level(directories=frozenset({"checkpoints", "other"})),
    }
    jobs = [JobPaths(JobId("main"), PipelineId("shop")), JobPaths(JobId("job_1"))]
    assert prefixes_without_job(known, jobs) == ["old", "shop/gone"]


@pytest.mark.parametrize(
    ("path", "kind", "epoch"),
    [
        ("a/checkpoints/checkpoint-0000007/operator-x/table-t-000", ObjectKind.DATA, 7),
        (
            "a/b/generations/1/checkpoints/checkpoint-0000002/operator-x/table-t-000",
            ObjectKind.DATA,
            2,
        ),
        ("a/b/generations/1/generation-manifest.json", ObjectKind.GENERATION, None),
        ("a/b/_arroyo_dagster/journal/x", ObjectKind.MAINTENANCE, None),
        ("a/_arroyo_dagster/journal/x", ObjectKind.MAINTENANCE, None),
        ("a/b/warehouse.parquet", ObjectKind.FOREIGN, None),
        ("a/x", ObjectKind.FOREIGN, None),
    ],
)
def test_remains_of_jobs_of_both_layouts_are_recognized(
    path: str, kind: ObjectKind, epoch: int | None
) -> None:
    assert kind_of(path, None) == (kind, epoch)


def epochs(count: int, interval_micros: int, objects: int = 6) -> dict[int, EpochWrites]:
    return {at: EpochWrites(objects, at * interval_micros) for at in range(1, count + 1)}


@given(
    count=st.integers(3, 80),
    seconds=st.integers(1, 3600),
    objects=st.integers(1, 1000),
    expired=st.integers(0, 5),
)
def test_writes_follow_from_the_interval_whatever_was_expired(
    count: int, seconds: int, objects: int, expired: int
) -> None:
    known = epochs(count + expired, seconds * SECOND, objects)
    now = max(one.last_micros for one in known.values()) + SECOND
    for number in range(1, expired + 1):
        del known[number]
    assert writes_a_day(known, now) == pytest.approx(86_400 / seconds * objects)


def test_a_gap_between_epochs_counts_as_several_intervals() -> None:
    known = epochs(10, SECOND)
    del known[5]
    assert writes_a_day(known, 11 * SECOND) == pytest.approx(86_400 * 6)


def test_a_job_that_stopped_and_a_job_with_one_epoch_write_nothing() -> None:
    assert writes_a_day(epochs(10, SECOND), DAY_MICROS) == 0
    assert writes_a_day(epochs(1, SECOND), 2 * SECOND) == 0
    assert writes_a_day({}, 0) == 0
