"""SIGKILL on Spark: whatever moment it comes at, nothing is lost and nothing comes twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from arroyo_dagster.spark.engine.pipeline import run_pipeline
from tests.kills import kill_and_finish, kill_and_finish_story

pytestmark = pytest.mark.usefixtures("session")  # in which the last run of each ends
ON_SPARK = ("--spark", "master=local[2]")


def test_a_dataflow_that_was_killed_goes_on_exactly_once(tmp_path: Path) -> None:
    kill_and_finish_story(tmp_path, kills=1, sentences=36, rows_per_epoch=12, how=ON_SPARK)


@pytest.mark.soak
def test_a_run_killed_ten_times_goes_on_exactly_once(tmp_path: Path) -> None:
    kill_and_finish(tmp_path, "spark", kills=10, within_seconds=0.6, finish=run_pipeline)


@pytest.mark.soak
def test_a_dataflow_killed_ten_times_goes_on_exactly_once(tmp_path: Path) -> None:
    kill_and_finish_story(tmp_path, kills=10, sentences=120, rows_per_epoch=10, how=ON_SPARK)
