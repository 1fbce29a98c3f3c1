"""Checkpoints of a real Arroyo and of ours, whole and damaged: the right finding, nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from _pytest.mark import ParameterSet
from click.testing import CliRunner

from arroyo_dagster import cli
from arroyo_dagster.engine import run_pipeline
from arroyo_dagster.errors import ArroyoStateError
from arroyo_dagster.state import (
    JobId,
    JobPaths,
    Layout,
    MemoryStore,
    ObjectStore,
    PipelineId,
    ReadOptions,
    StatePath,
    WriteProtected,
    describe_epoch,
    find_hash_variant,
    list_jobs,
    open_store,
    read_rows,
    verify_job,
)
from tests import shares
from tests.compat.arroyo import ARCHIVES, unpack
from tests.damages import (
    ANY,
    COMMITS,
    LEGACY,
    OURS,
    PROTOCOL,
    Expected,
    Scene,
    commit_flag_wrong,
    copy_job,
    errors,
    value_broken,
    warnings,
)
from tests.formats import ExpiringTimeKeyFiles, decode_file, encode_rows
from tests.internals import load_epoch
from tests.jobs import copied, run_word_job, word_job
from tests.shares import Share, all_but, share_or_all

JOBS = {
    "legacy joins": ("legacy", JobPaths(JobId("job_d14OMmRXhf"))),
    "legacy tumble": ("legacy", JobPaths(JobId("job_mSLGII6lDN"))),
    "leader auctions": ("leader", JobPaths(JobId("job_oYFrrHarjc"), PipelineId("pl_j0nlvQZC9h"))),
    "leader joins": ("leader", JobPaths(JobId("job_kv98EQxj80"), PipelineId("pl_EkDb8RNAgx"))),
    "leader tumble": ("leader", JobPaths(JobId("job_U5O5jKZxJg"), PipelineId("pl_4BjSq2rVmU"))),
    "flights": ("flights", JobPaths(JobId("carrier_totals"))),
    "flights un-keyed": ("flights", JobPaths(JobId("grand_total"))),
}
OUR_JOB = JobPaths(JobId("main"), PipelineId("words"))
OUR_LEGACY_JOB = JobPaths(JobId("words"))

# Every subtask of Arroyo's single-file sink writes the same key, the path: where the lengths differ
# a restore truncates the file anywhere (arroyo-state.md 8.3).
FINDINGS_OF_THE_WHOLE = {"key-written-twice"}

# What the oldest epoch goes back to is gone, by right.
FINDINGS_OF_THE_OLDEST = {"parent-expired"}


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {name: unpack(name, tmp_path_factory.mktemp(name)) for name in ARCHIVES}


@pytest.fixture(scope="module")
def jobs(urls: dict[str, str]) -> dict[str, MemoryStore]:
    """Each job in a store of its own."""
    found = {
        name: copy_job(open_store(urls[archive]), paths) for name, (archive, paths) in JOBS.items()
    }
    for name, sinks in (("ours", 0), ("ours committing", 1)):
        found[name] = MemoryStore()
        # Twice: a fence can only be stale where a generation came before.
        run_word_job(found[name], sinks=sinks, keep_epochs=None, merge_files_after=512, rows=16)
        run_word_job(found[name], sinks=sinks, keep_epochs=None, merge_files_after=512, rows=24)
    found["ours legacy"] = MemoryStore()
    made = word_job(found["ours legacy"], sinks=0, keep_epochs=None, merge_files_after=512)
    made.layout = Layout.LEGACY
    run_pipeline(made, found["ours legacy"])
    return found


def scene_of(jobs: dict[str, MemoryStore], name: str) -> Scene:
    managed = OUR_LEGACY_JOB if name == "ours legacy" else OUR_JOB
    return Scene(copied(jobs[name]), JOBS[name][1] if name in JOBS else managed)


@pytest.fixture(scope="module")
def usually() -> dict[tuple[str, int], Expected]:
    """What was found in whole jobs, by name and epoch."""
    return {}


def found_in(
    store: ObjectStore, paths: JobPaths, level: int = 4, epoch: int | None = None
) -> Expected:
    verdict = verify_job(WriteProtected(store), paths, epoch, level=level).verdict
    assert all(one.evidence and one.next_step for one in verdict.findings)
    listed = [(one.severity.value, one.code, one.object) for one in verdict.findings]
    assert len(set(listed)) == len(listed), "told twice"
    return set(listed)


# ---- whole ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("archive", ARCHIVES)
@pytest.mark.parametrize("parallelism", all_but([None, 1, 2, 3], [1, 2]))
def test_what_arroyo_wrote_passes_at_any_parallelism(
    archive: str, parallelism: int | None, urls: dict[str, str]
) -> None:
    store = WriteProtected(open_store(urls[archive]))
    for paths in list_jobs(store):
        found = verify_job(store, paths, parallelism=parallelism)
        assert found.verdict.errors == ()
        assert {one.code for one in found.verdict.findings} <= FINDINGS_OF_THE_WHOLE
        assert found.verdict.inspected > 20
        assert found.restore
        if parallelism:
            assert {one.subtask for one in found.restore} == set(range(parallelism))


@share_or_all(4)
@pytest.mark.parametrize("archive", ARCHIVES)
def test_every_epoch_that_arroyo_kept_passes(
    archive: str, share: Share, urls: dict[str, str]
) -> None:
    store = WriteProtected(open_store(urls[archive]))
    for paths in list_jobs(store):
        for epoch in share(verify_job(store, paths, level=0).epochs):
            findings = verify_job(store, paths, epoch, level=1, history=1).verdict.findings
            assert {one.code for one in findings} <= FINDINGS_OF_THE_OLDEST


def test_each_row_is_kept_by_one_subtask_at_any_parallelism(urls: dict[str, str]) -> None:
    store = WriteProtected(open_store(urls["flights"]))
    for paths in list_jobs(store):
        sums = []
        for parallelism in (1, 2, 3, 7):
            by_table: dict[tuple[str, str], int] = {}
            for one in verify_job(store, paths, parallelism=parallelism).restore:
                assert one.rows is not None
                assert one.requests >= 3 * len(one.files)
                if one.kind.name == "EXPIRING_TIME_KEY":
                    key = (one.operator, one.table)
                    by_table[key] = by_table.get(key, 0) + one.rows
            sums.append(by_table)
        assert sums[0]
        assert all(one == sums[0] for one in sums)


@pytest.mark.parametrize("name", ["ours", "ours committing", "ours legacy"])
@pytest.mark.parametrize("parallelism", [None, 1, 2, 3])
def test_a_job_of_ours_passes(
    name: str, parallelism: int | None, jobs: dict[str, MemoryStore]
) -> None:
    scene = scene_of(jobs, name)
    found = verify_job(WriteProtected(scene.store), scene.paths, parallelism=parallelism)
    assert found.verdict.findings == ()


def test_a_job_of_ours_that_merges_and_expires_passes_at_every_epoch() -> None:
    store = MemoryStore()
    run_word_job(store, rows=48, keep_epochs=6, merge_files_after=3)
    for epoch in verify_job(store, OUR_JOB).epochs:
        assert verify_job(WriteProtected(store), OUR_JOB, epoch).passed


# ---- damaged -------------------------------------------------------------------------------------

DAMAGES: list[tuple[str, Callable[[Scene], Expected]]] = [
    *(
        (name, damage)
        for name in ("legacy joins", "flights", "ours legacy")
        for damage in (*ANY, *LEGACY)
    ),
    *((name, damage) for name in ("leader auctions", "ours") for damage in (*ANY, *PROTOCOL)),
    *(("leader joins", damage) for damage in ANY[::3]),  # the largest job takes ten times as long
    *(
        (name, damage)
        for name in ("leader tumble", "ours committing")
        for damage in (*COMMITS, *PROTOCOL)
    ),
    ("leader tumble", commit_flag_wrong),
    *(("ours", damage) for damage in OURS),
]


def dealt_out() -> list[ParameterSet]:
    """Each damage to the first job that it is done to, or to the next for every other damage: to
    all jobs in the soak.
    """
    jobs_of: dict[Any, list[str]] = {}
    for name, damage in DAMAGES:
        jobs_of.setdefault(damage, []).append(name)
    chosen = {
        (names[at % len(names)], damage) for at, (damage, names) in enumerate(jobs_of.items())
    }
    marks = {one: () if one in chosen else pytest.mark.soak for one in DAMAGES}
    return [
        pytest.param(name, damage, id=f"{name}-{damage.__name__}", marks=marks[name, damage])
        for name, damage in DAMAGES
    ]


@pytest.mark.parametrize(("name", "damage"), dealt_out())
def test_a_damage_gives_its_finding_and_nothing_else(
    name: str,
    damage: Callable[[Scene], Expected],
    jobs: dict[str, MemoryStore],
    usually: dict[tuple[str, int], Expected],
) -> None:
    scene = scene_of(jobs, name)
    before = scene.newest.epoch
    expected = damage(scene)
    # Where the damage hides the newest epoch, the one before it is what is looked at.
    newest = min(before, scene.backend.epochs()[-1])
    if (name, newest) not in usually:
        usually[name, newest] = found_in(jobs[name], scene.paths, epoch=newest)
    usual = usually[name, newest]
    found = found_in(scene.store, scene.paths)
    assert found - usual == expected
    # A table that cannot be read any more cannot be told to be as usual either.
    assert usual - found <= {one for one in usual if one[1] in FINDINGS_OF_THE_WHOLE}


@pytest.mark.parametrize(("name", "share"), shares.dealt_out(["flights", "ours"], 2))
def test_looking_at_what_is_damaged_ends_in_an_answer_or_a_named_error(
    name: str, share: Share, jobs: dict[str, MemoryStore]
) -> None:
    answered = 0
    for number, damage in share(enumerate(ANY)):
        scene = scene_of(jobs, name)
        whole = scene.newest
        damage(scene)
        store, paths = WriteProtected(scene.store), scene.paths
        calls: list[Callable[[], object]] = [
            partial(describe_epoch, store, paths),
            partial(lambda at: find_hash_variant(at[0], load_epoch(*at)), (store, paths)),
        ]
        options = ReadOptions(limit=(3, None)[number // 2 % 2])
        calls += [
            partial(read_rows, store, paths, operator.operator, table, options)
            for operator in whole.operators
            for table in operator.tables
        ]
        errors_met = [error for call in calls if (error := named_error(call)) is not None]
        assert all(one.facts for one in errors_met), damage.__name__
        answered += len(calls) - len(errors_met)
    assert answered > 4 * len(ANY) // share.of


def named_error(call: Callable[[], object]) -> ArroyoStateError | None:
    """What a call raises on purpose; anything else is a failure of the test."""
    try:
        call()
    except ArroyoStateError as error:
        return error
    return None


def test_what_is_damaged_is_shown_with_the_damage(jobs: dict[str, MemoryStore]) -> None:
    """A value as bytes with a hint; a page that says nothing of the hash as a problem."""
    scene = scene_of(jobs, "flights")
    value_broken(scene)
    operator, table, _ = scene.pairs(alone=True)
    found = read_rows(scene.store, scene.paths, operator, table)
    assert set(found.rows[0]) == {"key_hex", "value_hex"}
    assert found.problem is not None
    assert "register_table" in found.problem
    assert "they are damaged" in found.problem


def test_a_compaction_that_raced_a_barrier_lists_inputs_beside_outputs(
    jobs: dict[str, MemoryStore],
) -> None:
    """A real job that Arroyo compacted: an input of a merge comes back into the list."""
    scene = scene_of(jobs, "legacy joins")
    newest = scene.newest
    operator, table, outputs = next(
        (operator.operator, name, merged)
        for operator in newest.operators
        for name, files in operator.tables.items()
        if isinstance(files, ExpiringTimeKeyFiles)
        and (merged := [file for file in files.files if file.compaction_generation])
    )
    copy = StatePath(f"{outputs[0].path}-again")
    scene.store.put(copy, scene.store.read(outputs[0].path))
    again = replace(outputs[0], path=copy, compaction_generation=0)
    scene.edit_files(operator, table, lambda files: (*files.files, again))
    assert errors("file-doubled", copy) <= found_in(scene.store, scene.paths)


def test_a_late_compaction_loses_the_files_of_one_epoch(jobs: dict[str, MemoryStore]) -> None:
    """What 9.7 describes: merged files of epoch E appear at E+2, those of E+1 are gone."""
    scene = scene_of(jobs, "legacy joins")
    operator, table, file = scene.timed()
    late = replace(
        file,
        path=StatePath(f"{file.path}-compacted"),
        compaction_generation=1,
        epoch=file.epoch - 1,
    )
    scene.store.put(late.path, scene.store.read(file.path))
    scene.edit_files(
        operator, table, lambda files: (late if one == file else one for one in files.files)
    )
    assert errors("file-lost", file.path) <= found_in(scene.store, scene.paths)


def test_what_an_un_keyed_aggregate_loses_is_a_warning_that_says_what_repairs_it(
    jobs: dict[str, MemoryStore],
) -> None:
    scene = scene_of(jobs, "flights un-keyed")
    assert found_in(scene.store, scene.paths) == set()
    (operator,) = (one for one in scene.newest.operators if one.operator.startswith("updating"))
    path = operator.paths[-1]
    scene.edit_rows(path, lambda rows: pa.concat_tables([rows] * 20))
    assert found_in(scene.store, scene.paths) == warnings("unkeyed-aggregate", scene.newest.ref)
    finding = verify_job(scene.store, scene.paths).verdict.findings[0]
    assert "22 rows in 3 record batches" in finding.evidence
    assert "loses 19" in finding.evidence
    # Repaired: one row a row group.
    rows, _ = decode_file(scene.store.read(path), path)
    scene.store.put(path, encode_rows(rows.slice(0, 1)))
    assert found_in(scene.store, scene.paths) == set()


# ---- levels --------------------------------------------------------------------------------------


def test_each_level_finds_what_it_looks_at(jobs: dict[str, MemoryStore]) -> None:
    first = {
        "file_gone": 0,
        "listed_twice": 0,
        "dropped_from_the_list": 0,
        "footer_flipped": 1,
        "column_nullable": 1,
        "page_flipped": 2,
        "low_key_too_high": 2,
        "time_too_early": 2,
        "operation_unknown": 3,
        "value_broken": 3,
        "key_hash_changed": 4,
    }
    for damage in ANY:
        if damage.__name__ not in first or damage.__name__ == "key_hash_changed":
            continue
        scene = scene_of(jobs, "flights")
        expected = damage(scene)
        at = first[damage.__name__]
        for level in {max(0, at - 1), at, 4}:
            found = found_in(scene.store, scene.paths, level)
            assert found == (expected if level >= at else set()), (damage.__name__, level)


# ---- the command ---------------------------------------------------------------------------------


def run(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.main, ["verify", *args], catch_exceptions=False)
    return result.exit_code, result.stdout


def test_exit_codes_and_words(tmp_path: Path) -> None:
    at = ("--url", unpack("flights", tmp_path))
    code, words = run("carrier_totals", *at)
    assert code == 0
    assert "carrier_totals epoch 8 can be restored: nothing found" in words
    assert "updating_aggregate_4" in words
    assert run("carrier_totals", "99", *at)[0] == 1
    assert run("no_such_job", *at)[0] == 1
    assert run("carrier_totals", "--level", "9", *at)[0] == 2
    assert run("carrier_totals", "--parallelism", "0", *at)[0] == 2
    directory = tmp_path / "carrier_totals/checkpoints/checkpoint-0000008"
    gone = next(directory.glob("operator-updating*/table-a-000"))
    gone.unlink()
    code, words = run("carrier_totals", "--level", "0", *at)
    assert code == 3
    assert words.startswith("error: carrier_totals/checkpoints/checkpoint-0000008/")
    assert "(file-missing). Next: restore the object" in words
    assert "cannot be restored safely: 1 error" in words
    # The epoch before does not list it.
    assert run("carrier_totals", "7", *at)[0] == 0


def test_the_json_form(tmp_path: Path) -> None:
    at = ("--url", unpack("flights", tmp_path))
    code, text = run("grand_total", "--parallelism", "3", "--json", *at)
    found = json.loads(text)
    assert code == 0
    assert {name: found[name] for name in ("job", "pipeline", "epoch", "level", "passed")} == {
        "job": "grand_total",
        "pipeline": None,
        "epoch": 8,
        "level": 4,
        "passed": True,
    }
    assert found["epochs"] == list(range(1, 9))
    reads = [one for one in found["restore"] if one["table"] == "a"]
    assert [one["rows"] for one in reads] == [3, 0, 0]
    assert [len(one["files"]) for one in reads] == [3, 0, 0]
    assert reads[0]["bytes"] > 0
    assert reads[0]["requests"] == 9
