"""`arroyo-state audit`: what is checked, what is found, what is kept, and the exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from arroyo_dagster import cli
from arroyo_dagster.errors import StorageError
from arroyo_dagster.state.operations.verify import audit
from arroyo_dagster.state.storage import configure
from arroyo_dagster.state.storage.remote.open import open_store
from arroyo_dagster.state.storage.store import ObjectStore
from tests.fleets import Written, protocol_job
from tests.jobs import listing, run_word_job

CHECKS = 14


@pytest.fixture
def url(tmp_path: Path) -> Any:
    yield f"memory://cli-audit-{tmp_path.name}"
    configure(None)


@pytest.fixture
def store(url: str) -> ObjectStore:
    found = open_store(url)
    for name in ("words", "others"):
        Written(found, protocol_job(name), keep=2).epochs(3)
    return found


def run(url: str, *args: str) -> Result:
    return CliRunner().invoke(cli.main, ["audit", *args, "--url", url], catch_exceptions=False)


def results(found: Result) -> dict[str, list[str]]:
    checks = json.loads(found.stdout)
    return {one["check"]: [job["result"] for job in one["jobs"]] for one in checks}


def test_a_whole_job_passes_every_check_and_nothing_is_written(url: str) -> None:
    store = open_store(url)
    run_word_job(store, rows=8, sinks=0)
    before = listing(store)
    found = run(url, "--json")
    assert (found.exit_code, len(results(found))) == (0, CHECKS)
    assert set(map(tuple, results(found).values())) == {("passed",)}
    assert listing(store) == before


def test_a_lost_file_is_found_and_named(url: str, store: ObjectStore) -> None:
    lost = max(path for path in listing(store) if path.startswith("words/") and "table-" in path)
    store.delete_many([lost])
    found = run(url)
    assert found.exit_code == 3
    assert f"error: {lost}: " in found.stdout
    assert "(file-missing). Next: " in found.stdout
    assert results(run(url, "others/main", "--json"))["restore_dry_run"] == ["passed"]


def test_the_level_is_a_limit_and_checks_above_it_do_not_judge(
    url: str, store: ObjectStore
) -> None:
    found = results(run(url, "--limit", "level=1", "--json"))
    assert found["values_decode"] == ["not judged", "not judged"]
    assert found["restore_dry_run"] == ["passed", "passed"]
    wrong = run(url, "--limit", "budget=1")
    assert wrong.exit_code == 2
    assert "budget_minutes=60" in " ".join(wrong.stderr.split())


def test_the_budget_leaves_jobs_for_the_next_audit_with_the_same_catalogue(
    url: str, store: ObjectStore, tmp_path: Path
) -> None:
    budget = ("--limit", "budget_minutes=0.000001", "--catalogue", str(tmp_path))
    first = run(url, *budget)
    assert first.exit_code == 3
    assert "(never-audited). Next: " in first.stdout
    assert "the budget ended before 1 of the jobs" in first.stdout
    assert results(run(url, *budget, "--json"))["audited_recently"] == ["passed", "passed"]
    assert len(list((tmp_path / "audited_files").rglob("*.parquet"))) == 2


def test_a_catalogue_below_the_checkpoint_url_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    store = open_store(str(tmp_path))
    Written(store, protocol_job("words")).epochs(2)
    before = listing(store)
    for place in (tmp_path, tmp_path / "x", tmp_path / "y" / ".." / "x"):
        found = run(str(tmp_path), "--catalogue", str(place))
        assert found.exit_code == 1
        assert "cannot be stored below the checkpoint URL" in found.stderr
    assert listing(store) == before


def test_a_job_that_cannot_be_audited_is_an_error(
    url: str, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StorageError("down")

    monkeypatch.setattr(audit, "audit_job", fail)
    found = run(url)
    assert (found.exit_code, found.stderr.count("StorageError: down")) == (1, 2)


def test_a_root_without_jobs_is_named(tmp_path: Path) -> None:
    assert "holds no jobs." in run(str(tmp_path)).stdout
