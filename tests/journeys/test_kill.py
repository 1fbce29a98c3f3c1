"""SIGKILL in process, of pipelines and of dataflows: whatever moment it comes at, nothing is lost
and nothing comes twice."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import TypeVar

import pytest

from arroyo_dagster.dataflow.topics import segments
from arroyo_dagster.state import MemoryStore
from tests.dataflows import KilledAt
from tests.faulty_stores import Crash
from tests.kills import CLOCKS, kill_and_finish, kill_and_finish_story
from tests.stories import outcome, run_story, write_story


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


T = TypeVar("T")


def same_however_it_is_killed(folder: Path, name: str, sentences: int, step: int) -> None:
    """Kill it before each `step`-th object of a name: it comes to what an undisturbed run does."""
    plain = MemoryStore(uuid.uuid4().hex)
    write_story(folder / "plain", sentences, seed=1)
    run_story(plain, folder / "plain", rows_per_epoch=6)
    expected = outcome(plain, folder / "plain")
    assert expected["closed"]
    for at in range(1, 1000, step):
        store, mine = MemoryStore(uuid.uuid4().hex), folder / str(at)
        write_story(mine, sentences, seed=1)
        killed = KilledAt(store, at, name)
        try:
            run_story(killed, mine, rows_per_epoch=6)
        except Crash:
            run_story(store, mine, rows_per_epoch=6)
        assert outcome(store, mine) == expected, at
        if killed.left > 0:
            assert at > 5
            return


def test_a20_killed_between_sink_write_and_commit_it_comes_to_the_same(tmp_path: Path) -> None:
    same_however_it_is_killed(tmp_path, "committed.json", 11, step=5)


def test_killed_anywhere_with_few_records_kept_between_services_it_comes_to_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "EPOCHS_KEPT", 1)
    same_however_it_is_killed(tmp_path, "committed.json", 24, step=8)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["committed.json", "checkpoint-manifest", "table-"])
def test_killed_before_any_object_it_comes_to_the_same(tmp_path: Path, name: str) -> None:
    same_however_it_is_killed(tmp_path, name, 24, step=1)


def test_a_dataflow_killed_twice_goes_on_exactly_once(tmp_path: Path) -> None:
    kill_and_finish_story(tmp_path, kills=2, sentences=36, rows_per_epoch=4)


@pytest.mark.soak
def test_a_dataflow_killed_forty_times_goes_on_exactly_once(tmp_path: Path) -> None:
    kill_and_finish_story(tmp_path, kills=40, sentences=480, rows_per_epoch=10)
