"""What a listing shows: prefixes without a job, kinds by name."""

from __future__ import annotations

import pytest

from arroyo_dagster.state.model.ids import JobId, PipelineId
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.objects import ObjectKind
from arroyo_dagster.state.planning.fleet.usage import (
    kind_of,
    prefixes_without_job,
)
from arroyo_dagster.state.planning.restore.reads import Level


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
    ("path", "kind"),
    [
        ("a/checkpoints/checkpoint-0000007/operator-x/table-t-000", ObjectKind.DATA),
        (
            "a/b/generations/1/checkpoints/checkpoint-0000002/operator-x/table-t-000",
            ObjectKind.DATA,
        ),
        ("a/b/generations/1/generation-manifest.json", ObjectKind.GENERATION),
        ("a/b/_arroyo_dagster/journal/x", ObjectKind.MAINTENANCE),
        ("a/_arroyo_dagster/journal/x", ObjectKind.MAINTENANCE),
        ("a/b/warehouse.parquet", ObjectKind.FOREIGN),
        ("a/x", ObjectKind.FOREIGN),
    ],
)
def test_remains_of_jobs_of_both_layouts_are_recognized(path: str, kind: ObjectKind) -> None:
    assert kind_of(path, None) is kind
