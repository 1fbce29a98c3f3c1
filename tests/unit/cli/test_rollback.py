"""`arroyo-state rollback` and `run --from-epoch`: nothing changes until --yes, nothing twice."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from arroyo_dagster import ObjectStore, ParquetBackend, open_store
from tests.commands import run
from tests.compat.arroyo import unpack
from tests.jobs import listing, run_word_job, word_job

JOB: dict[str, Any] = {"rows": 40, "rows_per_epoch": 2, "sinks": 0, "keep_epochs": None}
CODE = f"""
from arroyo_dagster.state.storage.remote.open import open_store
from tests.commands import run
from tests.jobs import word_job

def pipeline():
    return word_job(open_store("memory://unused"), **{JOB!r})
"""


@pytest.fixture
def store(url: str) -> ObjectStore:
    found = open_store(url)
    run_word_job(found, **JOB, max_epochs=6)
    return found


def newest(store: ObjectStore) -> int:
    return ParquetBackend(store, word_job(store, **JOB).paths).epochs()[-1]


def test_rollback_shows_its_plan_and_waits_for_yes(url: str, store: ObjectStore) -> None:
    before = listing(store)
    shown = run(url, "rollback", "main", "4")
    assert shown.exit_code == 0
    assert "Given up: epochs 5-6" in shown.stdout
    assert 'source lines goes back from {"row": 12} to {"row": 8}' in shown.stdout
    assert "arroyo-state rollback words/main 4 --yes" in shown.stdout
    planned = json.loads(run(url, "rollback", "main", "4", "--json").stdout)
    assert (planned["done"], planned["plan"]["publishes"]) == (False, 7)
    assert listing(store) == before
    done = json.loads(run(url, "rollback", "main", "4", "--yes", "--json").stdout)
    assert (done["done"], done["epoch"]) == (True, 7)
    assert newest(store) == 7


def test_without_an_epoch_the_restorable_ones_are_listed(url: str, store: ObjectStore) -> None:
    assert "can go back to epochs: 1-5" in run(url, "rollback", "main").stdout
    listed = json.loads(run(url, "rollback", "main", "--json").stdout)
    assert listed["restorable_epochs"] == [1, 2, 3, 4, 5]
    assert run(url, "rollback", "main", "--yes").exit_code == 2


def test_run_from_epoch_goes_back_only_once(url: str, store: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "words.py").write_text(CODE)
    command = ("run", f"{tmp_path}/words.py:pipeline", "--from-epoch", "4", "--epochs", "2")
    first = run(url, *command)
    assert first.exit_code == 0, first.stderr
    assert "goes back to epoch 4" in first.stdout
    assert newest(store) == 9
    again = run(url, *command)
    assert "epoch 7 already restored epoch 4" in again.stdout
    assert newest(store) == 11


def test_verify_names_the_command_that_goes_back(url: str, store: ObjectStore) -> None:
    paths = word_job(store, **JOB).paths
    files = ParquetBackend(store, paths).load().paths
    store.delete_many([path for path in files if "checkpoint-0000006/" in path])
    found = run(url, "verify", "main", "--level", "0")
    assert found.exit_code == 3
    assert "To go back to epoch 5: arroyo-state rollback words/main 5" in found.stdout
    assert re.search(r"safely: (1 error|\d+ errors); \d+ objects checked", found.stdout)
    assert json.loads(run(url, "verify", "main", "--json").stdout)["rollback_to"] == 5


def test_verify_names_the_commands_for_an_arroyo_job(tmp_path: Path) -> None:
    url = unpack("flights", tmp_path)
    data, metadata = "operator-watermark_2/table-s-000", "operator-watermark_2/metadata"
    newest = tmp_path / "grand_total/checkpoints/checkpoint-0000008"
    fork, rebuild = (
        "arroyo-state fork grand_total@7 NEW_JOB",
        "arroyo-state rebuild grand_total 8",
    )
    for name, code, commands, back in (
        (data, 3, ["arroyo-state rollback grand_total 7"], 7),
        (metadata, 3, [rebuild, fork], None),
        ("metadata", 0, [], None),  # epoch 7 is the newest one then
    ):
        content = (newest / name).read_bytes()
        (newest / name).unlink()
        found = run(url, "verify", "grand_total", "--level", "1")
        assert found.exit_code == code
        assert all(text in found.stdout for text in commands or ["state rebuild grand_total 8`"])
        answer = json.loads(run(url, "verify", "grand_total", "--json").stdout)
        assert (answer["rollback_to"], answer["next_steps"]) == (back, commands)
        (newest / name).write_bytes(content)
