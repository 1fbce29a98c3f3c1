"""`arroyo-state health`: what is checked, what is found, and the exit code."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

from arroyo_dagster import ObjectStore, cli, open_store
from arroyo_dagster.errors import StorageError
from arroyo_dagster.state.operations.catalog import health
from arroyo_dagster.state.planning.rules import KINDS
from tests.fleets import Written, protocol_job
from tests.jobs import listing, run_word_job

NEED_A_LEVEL = {"not-restorable", "contended"}
"""The kinds that metadata and footers say nothing about."""
IN_PART = {"damaged", "space-amplification"}
"""The kinds of which metadata and footers show a part, of a small job."""


@pytest.fixture
def store(url: str) -> ObjectStore:
    found = open_store(url)
    run_word_job(found, rows=40, rows_per_epoch=2, sinks=0, keep_epochs=None, max_epochs=14)
    return found


@pytest.fixture
def fleet(url: str) -> ObjectStore:
    found = open_store(url)
    for name in ("words", "others"):
        Written(found, protocol_job(name), keep=2).epochs(3)
    return found


def run(url: str, *args: str) -> Result:
    return CliRunner().invoke(cli.main, ["health", *args, "--url", url], catch_exceptions=False)


def results(found: Result) -> dict[str, list[str]]:
    checks = json.loads(found.stdout)
    return {one["check"]: [job["result"] for job in one["jobs"]] for one in checks}


def test_a_healthy_job_passes_and_nothing_is_written(url: str, store: ObjectStore) -> None:
    before = listing(store)
    found = run(url, "main", "--json")
    assert found.exit_code == 0
    shown = {kind: result for kind, (result,) in results(found).items()}
    assert shown.keys() == KINDS.keys()
    assert len(shown) <= 10
    assert {"read-amplification", "write-amplification", "space-amplification"} <= shown.keys()
    assert {kind for kind, one in shown.items() if one == "not judged"} >= NEED_A_LEVEL
    assert {kind for kind, one in shown.items() if one == "passed in part"} == IN_PART
    assert "In part: a higher --level" in run(url, "main").stdout
    deep = run(url, "main", "--level", "4", "--json")
    assert deep.exit_code == 0
    assert {one for (one,) in results(deep).values()} <= {"passed", "not judged"}
    assert results(deep)["not-restorable"] == ["passed"]
    assert listing(store) == before


def test_limits_are_set_by_name(url: str, store: ObjectStore) -> None:
    found = run(url, "--limit", "epochs=3", "--limit", "future-hours=0.5")
    assert found.exit_code == 3
    assert "has 14 unpinned epochs; expected at most 3 (gc-behind)" in found.stdout


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("file=3", "there is no 'file'. The names and their defaults: overdue_intervals=5;"),
        ("budget=1", "budget_minutes=60"),
        ("level=1", "there is no 'level'"),
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


# ---- with a level --------------------------------------------------------------------------------


def test_a_job_that_the_budget_does_not_reach_is_a_finding(url: str, fleet: ObjectStore) -> None:
    words = ("--level", "2", "--limit", "budget_minutes=0.000001")
    first = run(url, *words)
    assert first.exit_code == 3
    assert "warning: not-restorable: words/main: was not verified: the budget ended" in first.stdout
    assert first.stdout.count("(not-verified). Next: ") == 1
    assert run(url, "words/main", *words).exit_code == 0


def test_a_job_that_cannot_be_verified_is_an_error(
    url: str, fleet: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StorageError("down")

    monkeypatch.setattr(health, "audit_job", fail)
    found = run(url, "--level", "4")
    assert (found.exit_code, found.stdout.count("down (health-unknown)")) == (3, 2)
