"""The parent of a pinned epoch, of which an expiry keeps the metadata, is a state of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from arroyo_dagster import open_store
from tests.commands import document as answer
from tests.commands import run
from tests.compat.arroyo import unpack
from tests.jobs import run_word_job

JOB = "pl_4BjSq2rVmU/job_U5O5jKZxJg"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Epoch 15 is pinned, and all but the newest two expire: of 14 the metadata stays."""
    root = tmp_path_factory.mktemp("leader")
    unpack("leader", root)
    found = f"file://{root}"
    assert run(found, "pin", JOB, "15").exit_code == 0
    gc = run(
        found, "gc", "run", "expire", JOB, "--keep", "2", "--assume", f"{JOB}=stopped", "--yes"
    )
    assert gc.exit_code == 0, gc.output
    return found


def test_epochs_list_it_and_exit_with_0(url: str) -> None:
    states = {row["epoch"]: row["state"] for row in answer(url, "epochs", JOB)}
    assert states == {14: "metadata only", 15: "ready", 18: "invisible", 19: "ready", 20: "ready"}
    rows = answer(url, "sql", f'select epoch, state, problem from "{JOB}".epochs')
    assert [(row["epoch"], row["problem"]) for row in rows if row["state"] == "metadata only"] == [
        (14, None)
    ]


@pytest.mark.parametrize("command", ["@offsets", "@watermarks", "@growth"])
def test_histories_leave_it_out(url: str, command: str) -> None:
    answer(url, "sql", command, JOB)


@pytest.mark.parametrize("table", ["offsets", "files", "row_groups", "watermarks", "key_ranges"])
def test_sql_of_all_epochs_leaves_it_out(url: str, table: str) -> None:
    rows = answer(url, "sql", f'select distinct epoch from "{JOB}@all".{table} order by epoch')
    assert [row["epoch"] for row in rows] == [15, 19, 20]


@pytest.mark.parametrize(
    "words",
    [
        ["show", JOB, "14"],
        ["rows", f"{JOB}@14", "source_impulse_0", "i"],
        ["diff", f"{JOB}@14", f"{JOB}@15"],
        ["sql", f'select * from "{JOB}@14".offsets'],
        ["sql", f'select * from "{JOB}@14".source_impulse_0.i'],
    ],
    ids=lambda words: "-".join(words[:1]),
)
def test_readers_of_its_rows_name_the_state(url: str, words: list[str]) -> None:
    result = run(url, *words)
    assert result.exit_code == 1, result.output
    assert "metadata only" in result.stderr
    assert "stays for epoch 15" in result.stderr


def test_verify_says_that_it_cannot_be_restored(url: str) -> None:
    result = run(url, "verify", JOB, "14", "--json")
    findings = json.loads(result.stdout)["findings"]
    assert result.exit_code == 3
    assert [one["code"] for one in findings if one["severity"] == "error"] == ["metadata-only"]
    for epoch in ("15", "20"):
        assert run(url, "verify", JOB, epoch).exit_code == 0


def test_health_does_not_call_it_damaged(url: str) -> None:
    checks = answer(url, "health", JOB, "--level", "4")
    assert not [job for check in checks for job in check["jobs"] if job["finding"]]


def test_a_file_that_another_epoch_lists_is_damage_all_the_same(url: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    unpack("leader", root)
    assert run(f"file://{root}", "pin", JOB, "15").exit_code == 0
    lost = next((root / JOB).glob("generations/2/checkpoints/checkpoint-0000014/*/*"))
    lost.unlink()
    result = run(f"file://{root}", "epochs", JOB)
    assert result.exit_code == 1
    assert "metadata only" not in result.stdout


def test_a_managed_job_goes_back_to_no_such_epoch(tmp_path: Path) -> None:
    run_word_job(open_store(str(tmp_path)), rows=24, rows_per_epoch=2, keep_epochs=None)
    found = f"file://{tmp_path}"
    assert run(found, "pin", "words/main", "8").exit_code == 0
    gc = ("gc", "run", "expire", "words/main", "--keep", "3", "--yes")
    assert run(found, *gc).exit_code == 0
    states = {row["epoch"]: row["state"] for row in answer(found, "epochs", "words/main")}
    assert (states[7], states[8]) == ("metadata only", "ready")
    assert "epochs: 8, 10-11" in run(found, "rollback", "words/main").stdout
    assert "metadata only" in run(found, "rollback", "words/main", "7").stderr
    assert run(found, "unpin", "words/main", "8").exit_code == 0
    assert run(found, *gc).exit_code == 0
    assert [row["epoch"] for row in answer(found, "epochs", "words/main")] == [10, 11, 12]
