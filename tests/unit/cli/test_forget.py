"""`arroyo-state forget`: a vanished job is acknowledged, a job that is there is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from arroyo_dagster import cli
from arroyo_dagster.state.operations.catalog.epochs import refresh
from arroyo_dagster.state.operations.catalog.known_jobs import forgotten, known_jobs, remember
from arroyo_dagster.state.storage import open_store
from arroyo_dagster.state.storage.store import ObjectStore
from tests.fleets import Written, legacy_job, protocol_job

OLD, NEW = legacy_job("old"), protocol_job("words")


@pytest.fixture
def catalogue(tmp_path: Path) -> ObjectStore:
    return open_store(str(tmp_path / "catalogue"))


def run(*args: str) -> Result:
    env = {"ARROYO__CHECKPOINT_URL": None, "CHECKPOINT_URL": None}
    return CliRunner().invoke(cli.main, ["forget", *args], env=env, catch_exceptions=False)


def test_a_vanished_job_is_forgotten_with_its_last_epoch(
    catalogue: ObjectStore, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    store = open_store(str(root))
    job = Written(store, NEW)
    job.epochs(3)
    refresh(store, catalogue, NEW)
    Written(store, OLD).epochs(1)
    job.vanish()
    for _ in range(2):
        result = run("main", "--catalogue", str(tmp_path / "catalogue"), "--url", str(root))
        assert result.exit_code == 0, result.output
        assert result.stdout == "words/main is forgotten; its last epoch was 3\n"
    assert forgotten(catalogue) == {NEW}
    assert known_jobs(catalogue) == {NEW}  # its history stays


def test_a_job_of_which_nothing_is_catalogued_is_forgotten_without_a_url(
    catalogue: ObjectStore, tmp_path: Path
) -> None:
    remember(catalogue, [(OLD, None)], 7)
    result = run("old", "--catalogue", str(tmp_path / "catalogue"), "--json")
    assert json.loads(result.stdout) == {
        "job": "old",
        "last_epoch": None,
        "catalogue": catalogue.url,
    }
    assert forgotten(catalogue) == {OLD}


def test_a_job_that_is_there_or_unknown_is_not_forgotten(
    catalogue: ObjectStore, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    Written(open_store(str(root)), OLD).epochs(1)
    remember(catalogue, [(OLD, 1)], 7)
    where = ("--catalogue", str(tmp_path / "catalogue"), "--url", str(root))
    there = run("old", *where)
    assert (there.exit_code, there.stdout) == (1, "")
    assert "the job exists: there is nothing to forget" in there.stderr
    unknown = run("nobody", *where)
    assert unknown.exit_code == 1
    assert "there is no such job [job=nobody" in unknown.stderr
    assert forgotten(catalogue) == set()


def test_a_missing_catalogue_is_an_error(tmp_path: Path) -> None:
    result = run("old", "--catalogue", str(tmp_path / "nothing"))
    assert (result.exit_code, result.stdout) == (1, "")
    assert "there is no such job" in result.stderr
