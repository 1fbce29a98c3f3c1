"""`arroyo-state compact` and `expire`: nothing changes until --yes."""

from __future__ import annotations

from typing import Any

import pytest

from arroyo_dagster import ObjectStore, ParquetBackend, open_store
from tests.commands import document, run
from tests.jobs import listing, run_word_job, state_of, word_job

JOB: dict[str, Any] = {
    "rows": 24,
    "rows_per_epoch": 2,
    "sinks": 0,
    "keep_epochs": None,
    "merge_files_after": 99,
}


@pytest.fixture
def store(url: str) -> ObjectStore:
    found = open_store(url)
    run_word_job(found, **JOB, max_epochs=8)
    return found


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


def test_plan_names_inputs_files_opened_and_files_left(url: str, store: ObjectStore) -> None:
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


def test_one_job_that_fails_does_not_hold_up_the_others(url: str, store: ObjectStore) -> None:
    run_word_job(store, **JOB, job="other", max_epochs=8)
    gone = ParquetBackend(store, word_job(store, **JOB).paths).load().paths[0]
    store.delete_many([gone])
    done = run(url, "compact", "run", "main", "other", "--policy", "full", "--yes")
    assert done.exit_code == 1
    assert "data files are missing" in done.stderr
    assert "words/other: " in done.stdout
    assert "epoch 9 lists them" in done.stdout
