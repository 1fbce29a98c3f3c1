"""A job that the store denies, or whose metadata is broken, hides no other job."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner, Result

from arroyo_dagster import Epoch, JobPaths, MemoryStore, cli, find_job, list_epochs
from arroyo_dagster.errors import StorageError
from arroyo_dagster.state.storage.remote import open as opening
from tests.denied import ALL, READS, Denied
from tests.fleets import Written, legacy_job, protocol_job

JOBS = [legacy_job("legacy"), protocol_job("pl_a"), protocol_job("pl_b")]


def fleet(denied: JobPaths, verbs: frozenset[str]) -> Denied:
    """Three jobs of which one is denied: its objects, or its listings too."""
    store = MemoryStore("denied-jobs")
    for paths in JOBS:
        job = Written(store, paths)
        job.epochs(3)
    prefix = denied.root if verbs is READS else str(denied.root).partition("/")[0]
    return Denied(store, prefix, verbs)


@pytest.fixture(params=[(JOBS[0], READS), (JOBS[1], READS), (JOBS[0], ALL), (JOBS[1], ALL)])
def denied(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Denied:
    store = fleet(*request.param)
    monkeypatch.setattr(opening, "get_storage_provider", lambda *_: store)
    return store


def run(*words: str) -> Result:
    result = CliRunner().invoke(
        cli.main, [*words, "--url", "file:///nowhere"], catch_exceptions=False
    )
    assert "Traceback" not in result.output
    return result


def test_jobs_lists_the_denied_job_as_unreadable_beside_the_others(denied: Denied) -> None:
    lines = run("jobs").stdout.splitlines()
    result = run("jobs", "--json")
    rows = {"/".join(filter(None, [r["pipeline"], r["job"]])): r for r in json.loads(result.stdout)}
    assert result.exit_code == 1
    assert "permission denied" in result.stderr
    assert len(rows) == 3
    [unreadable] = [row for name, row in rows.items() if name.startswith(denied.prefix)]
    assert "permission denied" in unreadable["problem"]
    assert unreadable["epochs"] is None or unreadable["newest_epoch"] == 3
    assert [row["newest_epoch"] for row in rows.values() if row["problem"] is None] == [3, 3]
    assert sum("unreadable" in line for line in lines) == 1


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["health"], 3),
        (["health", "--level", "4"], 3),
        (["sql", "@leases"], 0),
        (["compact", "plan"], 1),
        (["sql", "select * from jobs"], 0),
        (["sql", "select * from files"], 1),
        (["sql", "show tables"], 1),
    ],
    ids=lambda value: "-".join(value[:2]) if isinstance(value, list) else str(value),
)
def test_commands_over_all_jobs_name_the_denied_job_and_answer_for_the_others(
    denied: Denied, command: list[str], code: int
) -> None:
    result = run(*command, "--json")
    assert "permission denied" in result.output
    if command != ["sql", "@leases"]:  # its row of a lease that cannot be read has the problem
        assert result.exit_code == code, result.output
    readable = [str(paths.root) for paths in JOBS if not paths.root.startswith(denied.prefix)]
    if command != ["sql", "@leases"]:  # no job was ever leased
        assert [root for root in readable if root in result.stdout] == readable


def test_epochs_lists_the_denied_epoch_as_unreadable_beside_the_others() -> None:
    store = MemoryStore("denied-epoch")
    Written(store, JOBS[1]).epochs(3)
    denied = Denied(store, str(JOBS[1].epoch_record(Epoch(2))), READS)
    rows: list[Any] = list_epochs(denied, JOBS[1])
    assert [(row.epoch, row.problem is None) for row in rows] == [(1, True), (2, False), (3, True)]


def test_a_short_name_may_be_ambiguous_and_a_full_name_is_not() -> None:
    store = fleet(JOBS[1], ALL)
    assert find_job(store, str(JOBS[2].root)) == JOBS[2]
    with pytest.raises(StorageError, match="permission denied") as error:
        find_job(store, "main")
    assert error.value.next_step == "name it as pipeline/job"
