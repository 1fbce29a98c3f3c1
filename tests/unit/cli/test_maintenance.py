"""`arroyo-state compact` and `expire`: nothing changes until --yes."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from arroyo_dagster import cli
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.model.progress import Progress, ProgressUnit, format_progress
from arroyo_dagster.state.runtime.in_process import run_pipeline
from arroyo_dagster.state.storage import configure
from arroyo_dagster.state.storage.remote.open import open_store
from arroyo_dagster.state.storage.store import ObjectStore
from tests.compat.arroyo import unpack
from tests.jobs import listing, run_word_job, state_of, word_job

JOB: dict[str, Any] = {
    "rows": 24,
    "rows_per_epoch": 2,
    "sinks": 0,
    "keep_epochs": None,
    "merge_files_after": 99,
}


@pytest.fixture
def url(tmp_path: Path) -> Any:
    yield f"memory://cli-maintenance-{tmp_path.name}"
    configure(None)


@pytest.fixture
def store(url: str) -> ObjectStore:
    found = open_store(url)
    run_word_job(found, **JOB, max_epochs=8)
    return found


def run(url: str, *args: str) -> Result:
    return CliRunner().invoke(cli.main, [*args, "--url", url], catch_exceptions=False)


def document(url: str, *args: str) -> Any:
    result = run(url, *args, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_compact_shows_the_plan_and_changes_nothing_until_yes(url: str, store: ObjectStore) -> None:
    before, state = listing(store), state_of(store, word_job(store, **JOB))
    shown = run(url, "compact", "run", "main", "--policy", "full")
    assert shown.exit_code == 0
    assert "nothing was changed, add --yes to execute" in shown.stdout
    plan = document(url, "compact", "run", "main", "--policy", "full")
    assert plan["plan"]["merges"]
    assert not plan["done"]
    assert plan["plan"] == document(url, "compact", "plan", "main", "--policy", "full")
    assert listing(store) == before
    done = run(url, "compact", "run", "main", "--policy", "full", "--yes")
    assert "epoch 9 lists them" in done.stdout
    after = state_of(store, word_job(store, **JOB))
    assert after.pop("") != state.pop("")
    assert after == state
    again = run(url, "compact", "run", "main", "--policy", "full", "--yes")
    assert "nothing to merge at epoch 9" in again.stdout
    assert "merged already" in again.stdout or "one file or none" in again.stdout


def test_a_plan_names_its_inputs_what_a_restore_opens_and_why_the_rest_is_left(
    url: str, store: ObjectStore
) -> None:
    plan = document(url, "compact", "plan", "main", "--policy", "levels", "--max-tables", "1")
    taken = {path for one in plan["merges"] for path in _paths(one)}
    assert {one["path"] for one in plan["inputs"]} == taken
    assert all(one["size_bytes"] > 0 and one["stamp"] for one in plan["inputs"])
    assert len(plan["before"]["opens"]) == 2  # of each subtask
    assert sum(plan["after"]["opens"]) < sum(plan["before"]["opens"])
    reasons = {one["reason"] for one in plan["left_out"]}
    assert "over the budget of 1 tables" in reasons
    listed = set(ParquetBackend(store, word_job(store, **JOB).paths).load().paths)
    left = {path for one in plan["left_out"] for path in one["files"]}
    assert taken | left == listed
    words = run(url, "compact", "plan", "main", "--policy", "levels", "--max-tables", "1").stdout
    assert "skipped: " in words
    assert "would open" in words


def _paths(merge: Any) -> list[str]:
    return [one if isinstance(one, str) else one["path"] for one in merge["inputs"]]


def test_a_forecast_of_bytes_is_what_comes_of_it(url: str, store: ObjectStore) -> None:
    rough = document(url, "compact", "plan", "main", "--policy", "full")
    (close,) = document(url, "compact", "plan", "--policy", "full")
    done = document(url, "compact", "run", "main", "--policy", "full", "--yes")
    assert rough["after"]["files"] == close["after"]["files"] == done["files_after"]
    assert rough["after"]["size_bytes"] > 1.5 * done["size_bytes_after"]
    assert close["after"]["size_bytes"] == pytest.approx(done["size_bytes_after"], rel=0.02)
    assert "words/main" in run(url, "compact", "plan").stdout


def test_one_job_that_fails_does_not_hold_up_the_others(url: str, store: ObjectStore) -> None:
    run_word_job(store, **JOB, job="other", max_epochs=8)
    gone = ParquetBackend(store, word_job(store, **JOB).paths).load().paths[0]
    store.delete_many([gone])
    done = run(url, "compact", "run", "main", "other", "--policy", "full", "--yes")
    assert done.exit_code == 1
    assert "data files are missing" in done.stderr
    assert "words/other: " in done.stdout
    assert "epoch 9 lists them" in done.stdout


@pytest.mark.parametrize("wrong", [["--parallelism", "0"], ["--max-files", "0"], ["--sort", "no"]])
def test_settings_out_of_range_are_a_wrong_command_line(
    url: str, store: ObjectStore, wrong: list[str]
) -> None:
    assert run(url, "compact", "plan", "main", *wrong).exit_code == 2


def test_progress_is_formatted_in_its_unit() -> None:
    merge = Progress(
        step="merge", done=1 << 20, total=4 << 20, unit=ProgressUnit.BYTES, seconds=3.0
    )
    assert format_progress(merge) == "merge: 25%, 1.0 MB of 4.2 MB, 9 s left"
    assert format_progress(replace(merge, seconds=3000.0)).endswith(", 2.5 h left")
    unknown = "after 3 s, time left unknown"
    assert format_progress(replace(merge, done=0)) == f"merge: 0%, 0 B of 4.2 MB, {unknown}"
    listed = Progress(step="listed objects", done=20_000, seconds=3.0)
    assert format_progress(listed) == f"listed objects: 20,000, {unknown}"
    assert format_progress(replace(listed, step="data", total=40_000)) == (
        "data: 50%, 20,000 of 40,000 objects, 3 s left"
    )


def test_jobs_of_arroyo_are_not_touched_and_that_is_said(tmp_path: Path) -> None:
    url = unpack("flights", tmp_path)
    job = document(url, "jobs")[0]["job"]
    before = listing(open_store(url))
    unsaid = run(url, "compact", "run", job, "--policy", "full", "--yes")
    assert unsaid.exit_code == 1
    assert "the status of the job is unknown" in unsaid.stderr
    assert "--assume JOB=stopped" in unsaid.stderr
    refused = run(url, "gc", "run", "expire", job, "--keep", "2", "--yes")
    assert refused.exit_code == 1
    assert "the status of the job is unknown" in refused.stderr
    left = {path for path in listing(open_store(url)) if "/leases/" not in path}
    assert left == set(before)


def test_an_interval_keeps_epochs_apart_and_a_stop_request_does_not_wait_for_it() -> None:
    store = open_store("memory://cli-interval")
    begun = time.monotonic()
    run_pipeline(word_job(store, **JOB), store, max_epochs=3, interval_seconds=0.2)
    assert time.monotonic() - begun >= 0.4
