"""`arroyo-state health`: what is checked, what is found, and the exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from arroyo_dagster import cli
from arroyo_dagster.state.storage import configure
from arroyo_dagster.state.storage.remote.open import open_store
from arroyo_dagster.state.storage.store import ObjectStore
from tests.jobs import listing, run_word_job

CHECKS = 19


@pytest.fixture
def url(tmp_path: Path) -> Any:
    yield f"memory://cli-health-{tmp_path.name}"
    configure(None)


@pytest.fixture
def store(url: str) -> ObjectStore:
    found = open_store(url)
    run_word_job(found, rows=40, rows_per_epoch=2, sinks=0, keep_epochs=None, max_epochs=14)
    return found


def run(url: str, *args: str) -> Result:
    return CliRunner().invoke(cli.main, ["health", *args, "--url", url], catch_exceptions=False)


def test_a_healthy_job_passes_every_check_and_nothing_is_written(
    url: str, store: ObjectStore
) -> None:
    before = listing(store)
    found = run(url, "main", "--json")
    checks = json.loads(found.stdout)
    assert found.exit_code == 0
    assert len(checks) == CHECKS
    results = {one["check"]: one["jobs"][0]["result"] for one in checks}
    assert set(results.values()) <= {"passed", "not judged"}
    assert results["no_epoch_missing"] == results["durations_usual"] == "passed"
    assert results["epochs_on_time"] == "not judged"  # the job is at rest
    assert listing(store) == before


def test_a_missing_epoch_is_found_and_named(url: str, store: ObjectStore) -> None:
    (record,) = (path for path in listing(store) if path.endswith("epochs/epoch-0000007.record"))
    store.delete_many([record])
    found = run(url)
    assert found.exit_code == 3
    assert "warning: words/main: missing between epochs that are present: 7" in found.stdout
    assert "(epoch-gap). Next: " in found.stdout


def test_a_newest_epoch_that_cannot_be_read_is_an_error(url: str, store: ObjectStore) -> None:
    (record,) = (path for path in listing(store) if path.endswith("epochs/epoch-0000014.record"))
    store.put(record, b"junk")
    found = run(url)
    assert found.exit_code == 3
    assert "error: words/main: " in found.stdout
    assert "(newest-epoch-unreadable). Next: verify the job" in found.stdout


def test_a_root_without_jobs_is_named(tmp_path: Path) -> None:
    found = run(str(tmp_path))
    assert "holds no jobs." in found.stdout


def test_too_few_epochs_are_not_judged(url: str, store: ObjectStore) -> None:
    checks = {one["check"]: one for one in json.loads(run(url, "--epochs", "5", "--json").stdout)}
    assert checks["durations_usual"]["jobs"][0]["result"] == "not judged"


def test_a_job_that_does_not_exist_is_named(url: str, store: ObjectStore) -> None:
    found = run(url, "nothing")
    assert found.exit_code == 1
    assert "there is no such job [job=nothing" in found.stderr


def test_limits_are_set_by_name(url: str, store: ObjectStore) -> None:
    found = run(url, "--limit", "epochs=3", "--limit", "future-hours=0.5")
    assert found.exit_code == 3
    assert "has 14 unpinned epochs; expected at most 3 (gc-behind)" in found.stdout


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("file=3", "there is no 'file'. The names and their defaults: overdue_intervals=5;"),
        ("files=many", "files: 'many' is not a valid integer"),
        ("files=0", "The maximum number of files per table of an epoch."),
        ("files", "files: '' is not a valid integer"),
        ("future_hours=nan", "future_hours: nan is not a number"),
        ("stalled_minutes=inf", "stalled_minutes: inf is not a number"),
    ],
)
def test_a_wrong_limit_is_named_with_those_there_are(url: str, given: str, said: str) -> None:
    found = run(url, "--limit", given)
    assert found.exit_code == 2
    assert said in " ".join(found.stderr.split())
