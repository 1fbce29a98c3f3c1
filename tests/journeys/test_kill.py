"""SIGKILL in process: whatever moment it comes at, nothing is lost and nothing comes twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kills import kill_and_finish


def test_a_run_killed_five_times_goes_on_exactly_once(tmp_path: Path) -> None:
    kill_and_finish(tmp_path, "in-process", kills=5, within_seconds=0.06)


@pytest.mark.soak
def test_a_run_killed_sixty_times_goes_on_exactly_once(tmp_path: Path) -> None:
    kill_and_finish(tmp_path, "in-process", kills=60, within_seconds=0.06)
