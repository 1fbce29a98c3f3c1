"""Epochs that a cleanup has half removed are told from damaged ones, in both layouts. The parent of
a pinned epoch, of which an expiry keeps the metadata, is a state of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from arroyo_dagster import cli
from arroyo_dagster.engine import run_pipeline
from arroyo_dagster.errors import FormatError
from arroyo_dagster.state import (
    CheckpointState,
    Epoch,
    JobPaths,
    Layout,
    MemoryStore,
    ObjectStore,
    ParquetBackend,
    StatePath,
    find_job,
    list_epochs,
    open_store,
)
from arroyo_dagster.state.operations.catalog.epoch_summaries import EpochSummary
from tests.commands import document as answer
from tests.commands import run
from tests.compat.arroyo import unpack
from tests.faulty_stores import Crash, FaultInjecting
from tests.jobs import copied, run_word_job, word_job

pytestmark = pytest.mark.usefixtures("one_at_a_time")

READY, COLLECTED = CheckpointState.READY, CheckpointState.PARTIALLY_COLLECTED
OPTIONS: dict[str, Any] = {
    "rows": 28,
    "rows_per_epoch": 2,
    "parallelism": 1,
    "keep_epochs": None,
    "merge_files_after": 512,
}
NEWEST = 14
KEPT_FROM = {Layout.PROTOCOL: 5, Layout.LEGACY: 4}


@pytest.fixture(scope="module", params=list(Layout), ids=lambda layout: layout.value)
def written(request: pytest.FixtureRequest) -> tuple[MemoryStore, JobPaths]:
    store = MemoryStore()
    pipeline = word_job(store, **OPTIONS)
    pipeline.layout = request.param
    run_pipeline(pipeline, store)
    return store, pipeline.paths


def states(found: list[EpochSummary]) -> dict[int, CheckpointState | None]:
    return {int(one.epoch): one.state for one in found}


def test_a_cleanup_that_stops_anywhere_leaves_epochs_that_say_so(
    written: tuple[MemoryStore, JobPaths],
) -> None:
    whole, paths = written
    kept_from = KEPT_FROM[paths.layout]
    seen: set[tuple[int, ...]] = set()
    at = 0
    while True:
        at += 1
        store = copied(whole)
        faulty = FaultInjecting(store, fail_at=at, mode="partial", crash=True)
        try:
            ParquetBackend(faulty, paths).cleanup_checkpoint(Epoch(kept_from))
        except Crash:
            found = list_epochs(store, paths)
            assert not any(one.problem for one in found), at
            told = states(found)
            assert {told[epoch] for epoch in range(kept_from, NEWEST + 1)} == {READY}
            older = {told[epoch] for epoch in told if epoch < kept_from}
            assert older <= {READY, COLLECTED}
            seen.add(tuple(epoch for epoch in told if told[epoch] is COLLECTED))
            continue
        break
    assert states(list_epochs(store, paths)) == dict.fromkeys(range(kept_from, NEWEST + 1), READY)
    # At first all that go are there still; in the end the last of them is alone.
    whole_range = tuple(range(1, kept_from))
    assert {whole_range, whole_range[-1:]} <= seen


def test_what_a_kept_epoch_lists_is_damage_in_every_epoch_that_lists_it(
    written: tuple[MemoryStore, JobPaths],
) -> None:
    whole, paths = written
    for epoch in (NEWEST, NEWEST - 1):
        store = copied(whole)
        checkpoint = ParquetBackend(store, paths).load(Epoch(epoch))
        doomed = next(p for p in checkpoint.paths if f"checkpoint-{epoch:07}" in p)
        store.delete_many([doomed])
        found = list_epochs(store, paths)
        assert COLLECTED not in states(found).values()
        broken = [one for one in found if one.problem]
        assert broken[0].epoch == epoch
        assert {one.missing for one in broken} == {1}
        assert all(one.problem.facts["path"] == doomed for one in broken if one.problem)


def test_a_lost_file_of_an_old_epoch_that_a_kept_one_lists_is_damage_too(
    written: tuple[MemoryStore, JobPaths],
) -> None:
    whole, paths = written
    store = copied(whole)
    old, new = (ParquetBackend(store, paths).load(Epoch(e)) for e in (2, NEWEST))
    both = [path for path in old.paths if path in new.paths]
    store.delete_many(both[:1])
    found = list_epochs(store, paths)
    assert COLLECTED not in states(found).values()
    assert isinstance(found[-1].problem, FormatError)
    assert isinstance(found[1].problem, FormatError)


# ---- what Arroyo's own cleanup leaves ------------------------------------------------------------


@pytest.fixture(scope="module")
def legacy_job(tmp_path_factory: pytest.TempPathFactory) -> tuple[MemoryStore, JobPaths]:
    return in_memory(unpack("legacy", tmp_path_factory.mktemp("legacy")), "job_TgS34gutlY")


@pytest.fixture(scope="module")
def leader_job(tmp_path_factory: pytest.TempPathFactory) -> tuple[MemoryStore, JobPaths]:
    return in_memory(unpack("leader", tmp_path_factory.mktemp("leader")), "job_U5O5jKZxJg")


def in_memory(url: str, name: str) -> tuple[MemoryStore, JobPaths]:
    store, copy = open_store(url), MemoryStore()
    paths = find_job(store, name)
    for info in store.list(paths.root):
        copy.put(info.path, store.read(info.path))
    return copy, paths


def own_files(store: ObjectStore, paths: JobPaths, epoch: int) -> list[StatePath]:
    """What only this epoch and older ones list."""
    backend = ParquetBackend(store, paths)
    newer = {p for e in backend.epochs() if e > epoch for p in backend.load(e).paths}
    return [path for path in backend.load(Epoch(epoch)).paths if path not in newer]


def test_a_legacy_cleanup_of_arroyo_half_way_is_no_damage(
    legacy_job: tuple[MemoryStore, JobPaths],
) -> None:
    whole, paths = legacy_job
    store = copied(whole)
    first = ParquetBackend(store, paths).epochs()[0]
    store.delete_many(own_files(store, paths, first)[:1])
    assert states(list_epochs(store, paths))[first] is COLLECTED
    checkpoint = ParquetBackend(store, paths).load(first)
    # Then the operators' metadata, one after the other.
    for count, operator in enumerate(checkpoint.operators, start=1):
        store.delete_many([paths.operator_metadata(operator.operator, first)])
        found = list_epochs(store, paths)
        assert [one.state for one in found][:2] == [COLLECTED, READY]
        assert found[0].problem is None
        assert found[0].missing >= count
    store.delete_many([paths.legacy_metadata(first)])
    assert first not in states(list_epochs(store, paths))


def test_an_epoch_that_no_cleanup_of_arroyo_touches_is_damaged(
    legacy_job: tuple[MemoryStore, JobPaths], leader_job: tuple[MemoryStore, JobPaths]
) -> None:
    for (whole, paths), back in ((legacy_job, 4), (leader_job, 10)):
        newest = ParquetBackend(whole, paths).epochs()[-1]
        for epoch, state in ((newest - back, READY), (newest - back - 1, COLLECTED)):
            store = copied(whole)
            store.delete_many(own_files(store, paths, epoch)[:1])
            found = {one.epoch: one for one in list_epochs(store, paths)}[Epoch(epoch)]
            assert found.state is state
            assert (found.problem is None) == (state is COLLECTED)
    whole, paths = legacy_job
    store = copied(whole)
    checkpoint = ParquetBackend(store, paths).load()
    lost = paths.operator_metadata(checkpoint.operators[0].operator, checkpoint.epoch)
    store.delete_many([lost])
    newest_found = list_epochs(store, paths)[-1]
    assert newest_found.problem is not None
    assert newest_found.problem.facts["path"] == lost


def test_a_gc_of_arroyo_half_way_is_no_damage(leader_job: tuple[MemoryStore, JobPaths]) -> None:
    whole, paths = leader_job
    store = copied(whole)
    first = ParquetBackend(store, paths).load(ParquetBackend(store, paths).epochs()[0])
    newest = ParquetBackend(store, paths).epochs()[-1]
    assert first.epoch < newest - 10
    assert first.worker_generation is not None
    store.delete_many([paths.committed(first.worker_generation, first.epoch)])
    assert states(list_epochs(store, paths))[first.epoch] is COLLECTED
    store.delete_many([paths.epoch_record(first.epoch)])
    found = list_epochs(store, paths)
    assert (found[0].epoch, found[0].state, found[0].problem) == (first.epoch, COLLECTED, None)
    store.delete_many([first.ref])
    assert first.epoch not in states(list_epochs(store, paths))


def test_files_that_old_releases_wrote_beside_the_prefix_are_pointed_at(
    legacy_job: tuple[MemoryStore, JobPaths],
) -> None:
    whole, paths = legacy_job
    store = copied(whole)
    newest = ParquetBackend(store, paths).load()
    aggregate = newest.operator("updating_aggregate_4")
    assert aggregate is not None
    store.delete_many(aggregate.paths)
    problem = list_epochs(store, paths)[-1].problem
    assert problem is not None
    assert "root of the bucket" in str(problem.next_step)


# ---- the command ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("archive", "name"), [("legacy", "job_TgS34gutlY"), ("leader", "job_U5O5jKZxJg")]
)
def test_the_command_says_so_and_finds_nothing_wrong(
    archive: str, name: str, tmp_path: Path
) -> None:
    url = unpack(archive, tmp_path)
    store = open_store(url)
    paths = find_job(store, name)
    first = ParquetBackend(store, paths).epochs()[0]
    doomed = own_files(store, paths, first)[:2]
    store.delete_many(doomed)
    shown = CliRunner().invoke(cli.main, ["epochs", name, "--url", url, "--json"])
    assert shown.exit_code == 0, shown.stderr
    epochs = json.loads(shown.stdout)
    assert (epochs[0]["state"], epochs[0]["missing"]) == ("partially collected", len(doomed))
    states = {one["state"] for one in epochs[1:]}
    assert states <= ({"ready"} if archive == "legacy" else {"ready", "invisible"})
    table = CliRunner().invoke(cli.main, ["epochs", name, "--url", url])
    assert "partially collected" in table.stdout
    # Its rows are not all there any more: asked for, it says which file is gone.
    refused = CliRunner().invoke(cli.main, ["show", name, str(first), "--url", url, "--json"])
    assert refused.exit_code == 1
    assert json.loads(refused.stderr)["error"]["type"] == "FormatError"


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
