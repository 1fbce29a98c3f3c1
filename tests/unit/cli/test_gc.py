"""`arroyo-state gc …`, `pin`, `unpin`: nothing is deleted until --yes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from arroyo_dagster import Epoch, ObjectStore, ParquetBackend, open_store
from tests.commands import document, run
from tests.compat.arroyo import unpack
from tests.gc_jobs import JOB, PATHS, restorable, without_ours
from tests.jobs import listing, run_word_job


@pytest.fixture
def store(url: str) -> ObjectStore:
    found = open_store(url)
    run_word_job(found, **{**JOB, "sinks": 0, "parallelism": 1}, max_epochs=6)
    return found


def test_plan_is_printed_stored_and_executed(url: str, store: ObjectStore, tmp_path: Path) -> None:
    before = listing(store)
    file = tmp_path / "plan.json"
    args = ("gc", "plan", "expire", "main", "--keep", "3")
    plan = document(url, *args, "--out", str(file))
    assert plan["epochs"] == [1, 2, 3]
    assert plan["objects"] == len(plan["data"]) + len(plan["records"]) + len(plan["metadata"])
    assert plan["proof"]["roots"]
    assert json.loads(file.read_text())["digest"] == plan["digest"]
    assert "nothing was deleted, add --yes to execute" in run(url, *args).stdout
    assert listing(store) == before
    other = run(url, "gc", "run", "orphans", "main", "--plan", str(file), "--yes")
    assert other.exit_code == 1
    assert "the stored plan is a plan of kind expire" in other.output
    stored = ("gc", "run", "expire", "main", "--plan", str(file))
    assert "would be deleted" in run(url, *stored).stdout
    done = document(url, *stored, "--yes")
    assert (done["done"], done["deleted"]) == (True, plan["objects"])
    restorable(store, PATHS, 4, 5, 6)
    entries = document(url, "sql", "@journal", "main")
    assert len(entries) == plan["objects"]
    assert {entry["outcome"] for entry in entries} == {"deleted"}
    shown = run(url, "sql", "@journal", "main", "--param", f"run={done['run']}").stdout
    assert "checkpoint-manifest.pb" in shown
    assert document(url, "sql", "@journal", "main", "--param", "run=another") == []
    shown = run(url, "gc", "plan", "expire", "main", "--keep", "3").stdout
    assert "nothing to delete: 3 epochs, all needed: 3 newest kept" in shown


def test_a_plan_of_an_arroyo_job_says_why_no_epoch_expires(tmp_path: Path) -> None:
    words = ("gc", "plan", "expire", "grand_total", "--assume", "grand_total=stopped")
    shown = run(unpack("flights", tmp_path), *words, "--keep", "2").stdout
    assert "8 epochs, all needed: 2 newest kept, 6 of the ten before the newest" in shown


def test_quarantine_is_listed_undeleted_and_purged(url: str, store: ObjectStore) -> None:
    before = without_ours(store)
    done = document(url, "gc", "run", "expire", "main", "--keep", "2", "--quarantine", "--yes")
    (there,) = document(url, "gc", "undelete", "main")
    assert there["quarantine"] == done["quarantine"]
    assert there["objects"] == done["deleted"]
    assert done["quarantine"] in run(url, "gc", "undelete", "main").stdout
    assert "nothing was changed" in run(url, "gc", "undelete", "main", done["quarantine"]).stdout
    planned = document(url, "gc", "undelete", "main", done["quarantine"])
    assert (planned["done"], len(planned["objects"])) == (False, done["deleted"])
    back = run(url, "gc", "undelete", "main", done["quarantine"], "--yes")
    assert "were restored" in back.stdout
    assert without_ours(store) == before
    assert [pin["epoch"] for pin in document(url, "sql", "@pins", "main")] == [1, 2, 3, 4]
    assert document(url, "gc", "purge", "main") == {"done": False, "quarantines": []}
    assert run(url, "gc", "purge", "main", "--older-than", "5m").exit_code == 1


def test_pins_are_set_listed_and_lifted(url: str, store: ObjectStore) -> None:
    assert document(url, "sql", "@pins", "main") == []
    run(url, "pin", "main", "2", "--reason", "before the migration")
    (pin,) = document(url, "sql", "@pins", "main")
    assert (pin["epoch"], pin["reason"]) == (2, "before the migration")
    document(url, "gc", "run", "expire", "main", "--keep", "2", "--yes")
    restorable(store, PATHS, 2, 5, 6)
    assert document(url, "unpin", "main", "2") == []
    document(url, "gc", "run", "expire", "main", "--keep", "2", "--yes")
    assert ParquetBackend(store, PATHS).epochs() == [5, 6]
    assert run(url, "unpin", "main", "2").exit_code == 1
    assert run(url, "pin", "main", "9").exit_code == 1


def test_every_object_is_explained(url: str, store: ObjectStore) -> None:
    listed = ParquetBackend(store, PATHS).load(Epoch(6)).paths[0]
    found = document(url, "gc", "explain", listed)
    assert (found["reason"], found["deletable"]) == ("referenced", False)
    assert "epoch 6" in found["referenced_by"]
    words = run(url, "gc", "explain", f"{store.url}/{listed}").stdout
    assert "stays: an epoch that stays references it" in words
    assert "referenced by epoch 6" in words
    store.put(PATHS.root / "notes.txt", b"of a person")
    assert document(url, "gc", "explain", "words/main/notes.txt")["reason"] == "foreign"
    whole = document(url, "gc", "explain", "words/main/")
    counts = {name: one["objects"] for name, one in whole["reasons"].items()}
    assert sum(counts.values()) == len(listing(store))
    assert counts["foreign"] == 1
    some = document(url, "gc", "explain", "words/main/epochs/")
    assert some["reasons"] == {
        "metadata": {
            "objects": 6,
            "size_bytes": some["reasons"]["metadata"]["size_bytes"],
            "deletable": False,
        }
    }
    assert "stays" in run(url, "gc", "explain", "words/main").stdout
    for missing in ("words/main/none", "elsewhere/x"):
        assert run(url, "gc", "explain", missing).exit_code == 1


def test_arroyo_job_is_explained_and_collected_once_it_has_stopped(tmp_path: Path) -> None:
    url = unpack("leader", tmp_path)
    root = "pl_4BjSq2rVmU/job_U5O5jKZxJg"
    directory = "generations/1/checkpoints/checkpoint-0000010/operator-SessionWindow%3C4s%3E"
    lost = tmp_path / root / directory / "table-s-001"
    lost.parent.mkdir(parents=True)
    lost.write_bytes(b"of an epoch that a crash left behind")
    os.utime(lost, (1_700_000_000, 1_700_000_000))
    undecided = document(url, "gc", "explain", f"{root}/")
    assert "unknown" in undecided["undecided"]
    assert undecided["reasons"]["undecided"]["objects"] > 0
    refused = run(url, "gc", "plan", "orphans", root)
    assert refused.exit_code == 1
    assert "the status of the job is unknown" in refused.stderr
    said = ("--assume", f"{root}=stopped", "--older-than", "1h")
    plan = document(url, "gc", "plan", "orphans", root, *said)
    raw = f"{root}/{directory}/table-s-001".replace("%3C", "<").replace("%3E", ">")
    assert [path for path, *_ in plan["data"]] == [raw]
    assert [path for path, *_ in plan["metadata"]] == [
        f"{root}/generations/1/generation-manifest.json"
    ]
    for name in (raw, f"{root}/{directory}/table-s-001"):
        explained = document(url, "gc", "explain", name, *said)
        assert explained["path"] == raw
        assert (explained["reason"], explained["deletable"]) == ("orphan", True)
    assert run(url, "gc", "run", "orphans", root, *said, "--yes").exit_code == 0
    assert not lost.exists()


def orphaned(root: Path, job: str) -> Path:
    """A file of an attempt that failed long ago."""
    path = root / job / "generations/1/checkpoints/checkpoint-0000010/operator-sink_out_u_6"
    path.mkdir(parents=True, exist_ok=True)
    file = path / "table-f-007"
    file.write_bytes(b"of an epoch that a crash left behind")
    os.utime(file, (1_700_000_000, 1_700_000_000))
    return file


def test_orphans_are_moved_to_quarantine_unless_delete_is_given(tmp_path: Path) -> None:
    url, job = unpack("leader", tmp_path), "pl_4BjSq2rVmU/job_U5O5jKZxJg"
    lost = orphaned(tmp_path, job)
    said = ("--assume", f"{job}=stopped", "--older-than", "1h", "--yes")
    moved = document(url, "gc", "run", "orphans", job, *said)
    assert moved["quarantine"] is not None
    assert not lost.exists()
    document(url, "gc", "undelete", job, moved["quarantine"], "--yes")
    assert lost.read_bytes() == b"of an epoch that a crash left behind"
    os.utime(lost, (1_700_000_000, 1_700_000_000))
    assert document(url, "gc", "run", "orphans", job, *said, "--delete")["quarantine"] is None
    assert not lost.exists()
    for words in (("orphans", job, "--quarantine"), ("expire", job, "--keep", "2")):
        refused = run(url, "gc", "run", *words, "--assume", f"{job}=stopped", "--delete", "--yes")
        assert refused.exit_code == 1
        assert "--delete" in refused.stderr


def test_orphans_first_purges_what_has_been_in_quarantine_for_a_week(tmp_path: Path) -> None:
    url, job = unpack("leader", tmp_path), "pl_4BjSq2rVmU/job_U5O5jKZxJg"
    orphaned(tmp_path, job)
    said = ("--assume", f"{job}=stopped", "--older-than", "1h")
    name = document(url, "gc", "run", "orphans", job, *said, "--yes")["quarantine"]
    assert document(url, "gc", "plan", "orphans", job, *said)["purges"] == []
    index = tmp_path / job / f"_arroyo_dagster/quarantine/{name}/index.json"
    fields = json.loads(index.read_bytes())
    fields["moved_at_micros"] -= 8 * 86_400_000_000
    index.write_text(json.dumps(fields))
    plan = document(url, "gc", "plan", "orphans", job, *said)
    assert plan["purges"] == [name]
    assert document(url, "gc", "plan", "orphans", job, *said, "--purge-after", "9d")["purges"] == []
    assert f"purged first: {name}" in run(url, "gc", "plan", "orphans", job, *said).stdout
    done = document(url, "gc", "run", "orphans", job, *said, "--yes")
    assert done["purged"] == [name]
    assert document(url, "gc", "undelete", job) == []


def test_unreadable_dead_job_goes_to_quarantine_only(tmp_path: Path) -> None:
    url = unpack("leader", tmp_path)
    root = "pl_4BjSq2rVmU/job_U5O5jKZxJg"
    store = open_store(url)
    doomed = [info.path for info in store.list(root) if info.path.name == "checkpoint-manifest.pb"]
    for path in doomed:
        store.put(path, b"\xff")
    for info in store.list(root):
        aged = Path(url.removeprefix("file://"), info.path)
        os.utime(aged, (aged.stat().st_mtime - 86_400,) * 2)
    before = without_ours(store)
    said = ("--assume", f"{root}=gone", "--older-than", "1h")
    refused = run(url, "gc", "run", "dead-job", root, *said, "--quarantine", "--yes")
    assert refused.exit_code == 1
    for_good = run(url, "gc", "run", "dead-job", root, *said, "--unreadable", "--yes")
    assert "--quarantine" in for_good.stderr
    assert without_ours(store) == before
    done = document(
        url, "gc", "run", "dead-job", root, *said, "--unreadable", "--quarantine", "--yes"
    )
    assert done["deleted"] == sum(path.startswith(f"{root}/") for path in before)
    run(url, "gc", "undelete", root, done["quarantine"], "--yes")
    assert without_ours(store) == before


@pytest.mark.parametrize(
    "args",
    [
        ("gc", "plan", "orphans", "main", "--older-than", "5m"),
        ("gc", "plan", "dead-job", "main"),
        ("gc", "plan", "expire", "nobody", "--keep", "3"),
    ],
)
def test_a_wrong_question_is_one_message_and_deletes_nothing(
    args: tuple[str, ...], url: str, store: ObjectStore
) -> None:
    before = listing(store)
    result = run(url, *args)
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 1
    assert "Next: " in result.stderr
    assert listing(store) == before


def test_words_that_are_no_time_are_a_wrong_command_line(url: str, store: ObjectStore) -> None:
    assert run(url, "gc", "plan", "orphans", "main", "--older-than", "soon").exit_code == 2
    assert run(url, "gc", "plan", "orphans", "main", "--keep", "3").exit_code == 2
    missing = run(url, "gc", "plan", "expire", "main")
    assert missing.exit_code == 2
    assert "needs --keep N, --keep-for AGE, or both" in missing.stderr
