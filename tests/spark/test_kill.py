"""SIGKILL on Spark: whatever moment it comes at, nothing is lost and nothing comes twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kills import kill_and_finish


def test_a_run_that_was_killed_goes_on_exactly_once(tmp_path: Path) -> None:
    kill_and_finish(tmp_path, "spark", kills=1, within_seconds=0.6)


@pytest.mark.soak
def test_a_run_killed_ten_times_goes_on_exactly_once(tmp_path: Path) -> None:
    kill_and_finish(tmp_path, "spark", kills=10, within_seconds=0.6)
