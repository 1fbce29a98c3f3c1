"""SIGKILL in process: whatever moment it comes at, nothing is lost and nothing comes twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kills import CLOCKS, kill_and_finish


def test_a_run_killed_three_times_goes_on_exactly_once(tmp_path: Path) -> None:
    kill_and_finish(tmp_path, "fewer-epochs", kills=3, within_seconds=0.06)


def test_a_run_killed_on_an_s3_server_goes_on_exactly_once(tmp_path: Path) -> None:
    kill_and_finish(tmp_path, "few-epochs", kills=2, within_seconds=0.3, server="gofakes3")


@pytest.mark.soak
@pytest.mark.parametrize("server", [None, "gofakes3", "versitygw"])
def test_sixty_kills_of_runs_whose_clocks_are_minutes_apart(
    tmp_path: Path, server: str | None
) -> None:
    kill_and_finish(
        tmp_path, "in-process", kills=60, within_seconds=0.3, server=server, clocks=CLOCKS
    )


@pytest.mark.soak
def test_a_run_killed_sixty_times_goes_on_exactly_once(tmp_path: Path) -> None:
    kill_and_finish(tmp_path, "in-process", kills=60, within_seconds=0.06)
