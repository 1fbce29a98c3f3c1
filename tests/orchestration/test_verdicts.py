"""Verdicts by job: no green light over a broken or vanished job, no red over a stopped one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import time
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.loader import LoadingContextForTest

from arroyo_dagster.errors import NotFoundError, StorageError
from arroyo_dagster.orchestration.catalog.checks import (
    EVERY_JOB_FILES_EXIST,
    EVERY_JOB_RECENT,
    EVERY_JOB_RESTORABLE,
)
from arroyo_dagster.orchestration.directory import ArroyoDirectory
from arroyo_dagster.orchestration.resources import ArroyoStateStore
from arroyo_dagster.orchestration.runners import InProcessRunner
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.operations.catalog import known_jobs
from arroyo_dagster.state.operations.catalog.verdicts import read_verdicts
from arroyo_dagster.state.planning.verify.fleet import CheckedJob
from arroyo_dagster.state.storage import open_store
from tests.fleets import SECOND, Written, legacy_job, protocol_job
from tests.jobs import run_word_job

FLEET_CHECKS = (EVERY_JOB_FILES_EXIST, EVERY_JOB_RESTORABLE, EVERY_JOB_RECENT)
OLD_JOB = legacy_job("old")
NOW = time.time_ns() // 1000 - 3600 * SECOND


def job_of(deployed: Any, paths: JobPaths, *, epochs: int = 2, start: int | None = None) -> Written:
    """A job with epochs of just now."""
    begun = time.time_ns() // 1000 - 60 * SECOND if start is None else start
    job = Written(deployed.store, paths, start=begun)
    job.epochs(epochs)
    return job


def break_job(deployed: Any, paths: JobPaths) -> str:
    path = ParquetBackend(deployed.store, paths).load().paths[-1]
    deployed.store.delete_many([path])
    return str(path)


def latest(deployed: Any, name: str) -> Any:
    """The evaluation of a fleet check that the UI shows; None if there was none."""
    key = dg.AssetCheckKey(dg.AssetKey(["arroyo", "fleet"]), name)
    storage = deployed.instance.event_log_storage
    records = storage.get_asset_check_execution_history(key, limit=1)
    if not records or not asyncio.run(
        records[0].targets_latest_materialization(LoadingContextForTest(deployed.instance))
    ):
        return None  # as the UI says: not evaluated
    return records[0].event.dagster_event.event_specific_data


def lines(evaluation: Any) -> list[dict[str, Any]]:
    return [dict(one.data) for one in evaluation.metadata["jobs"].records]


def fleet(deployed: Any) -> dict[str, Any]:
    result = deployed.run("arroyo_fleet")
    found = {one.check_name: one for one in result.get_asset_check_evaluations()}
    assert found.keys() == set(FLEET_CHECKS)
    return found


# ---- what other runs found -----------------------------------------------------------------------


def test_what_a_compaction_and_a_gc_find_is_the_last_verdict(deployed: Any) -> None:
    deployed.build(runner=InProcessRunner())
    run_word_job(deployed.store, sinks=0)
    paths = protocol_job("words")
    deployed.tick()
    deployed.run("arroyo_refresh", "words/main")
    before = verdicts_of(deployed, paths)
    assert deployed.run("arroyo_compaction", "words/main").success
    assert deployed.run("arroyo_gc", "words/main").success
    after = verdicts_of(deployed, paths)
    for kind in ("files_exist", "restorable"):
        assert after[kind].at_micros > before[kind].at_micros
        assert after[kind].verdict.passed


def verdicts_of(deployed: Any, paths: JobPaths) -> dict[str, CheckedJob]:
    kinds = ("files_exist", "restorable")
    return {kind: read_verdicts(deployed.catalogue, kind, [paths])[paths] for kind in kinds}


# ---- green while broken --------------------------------------------------------------------------


def test_a_refresh_of_a_healthy_job_does_not_turn_a_broken_ones_red_away(deployed: Any) -> None:
    for name in ("bad", "good"):
        job_of(deployed, protocol_job(name))
    deployed.tick()
    path = break_job(deployed, protocol_job("bad"))
    deployed.run("arroyo_refresh", "bad/main")
    deployed.run("arroyo_refresh", "good/main")
    for name in (EVERY_JOB_FILES_EXIST, EVERY_JOB_RESTORABLE):
        found = latest(deployed, name)
        assert not found.passed
        assert found.severity is dg.AssetCheckSeverity.ERROR
        first = found.description.splitlines()[0]
        assert first.startswith("1 of 2 jobs: bad/main: ")
        assert path in first
        assert "Next: restore the object" in first
        bad, good = lines(found)
        assert (bad["job"], bad["verdict"], bad["epoch"]) == ("bad/main", "failed", 2)
        assert (good["job"], good["verdict"], good["epoch"]) == ("good/main", "passed", 2)
        assert all(line["checked at"].startswith("20") for line in (bad, good))
        # A wider table pushes the description out of sight.
        assert bad.keys() == {"job", "verdict", "epoch", "checked at"}
        assert path in found.metadata["offenders"].value
        assert "good/main" not in found.metadata["offenders"].value


def test_new_epochs_do_not_make_a_red_check_one_that_was_never_evaluated(deployed: Any) -> None:
    written = [job_of(deployed, protocol_job(name)) for name in ("bad", "good")]
    deployed.tick()
    fleet(deployed)
    break_job(deployed, protocol_job("bad"))
    for refreshed in (False, True):
        if refreshed:
            deployed.run("arroyo_refresh", "bad/main")
        else:
            deployed.run("arroyo_fleet")
        written[1].write()
        assert deployed.tick().keys() == {"good/main"}
        for name in FLEET_CHECKS:
            assert latest(deployed, name) is not None, name
    assert not latest(deployed, EVERY_JOB_RESTORABLE).passed


def test_a_repaired_job_is_green_once_it_is_refreshed(deployed: Any) -> None:
    job_of(deployed, protocol_job("bad"))
    deployed.tick()
    path = ParquetBackend(deployed.store, protocol_job("bad")).load().paths[-1]
    data = deployed.store.read(path)
    break_job(deployed, protocol_job("bad"))
    deployed.run("arroyo_refresh", "bad/main")
    deployed.store.put(path, data)
    deployed.run("arroyo_refresh", "bad/main")
    found = fleet(deployed)
    assert all(one.passed for one in found.values())
    assert found[EVERY_JOB_RESTORABLE].description == "1 job, all passed"


def test_a_job_that_was_never_checked_is_not_passed(deployed: Any) -> None:
    for name in ("one", "two"):
        job_of(deployed, protocol_job(name))
    deployed.tick()
    deployed.run("arroyo_refresh", "one/main")
    found = latest(deployed, EVERY_JOB_RESTORABLE)
    assert not found.passed
    assert found.severity is dg.AssetCheckSeverity.WARN
    assert "two/main" in found.description
    assert "arroyo_refresh" in found.description
    assert [line["verdict"] for line in lines(found)] == ["never checked", "passed"]


# ---- vanished ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "paths",
    [
        pytest.param(protocol_job("gone"), id="new"),
        pytest.param(legacy_job("gone"), id="legacy", marks=pytest.mark.soak),
    ],
)
def test_a_vanished_job_is_an_error_with_its_last_epoch_until_it_is_forgotten(
    deployed: Any, paths: JobPaths
) -> None:
    job = job_of(deployed, paths, epochs=3)
    job_of(deployed, protocol_job("good"))
    deployed.tick()
    for key in (paths.root, "good/main"):
        deployed.run("arroyo_refresh", key)
    assert all(one.passed for one in fleet(deployed).values())
    job.vanish()
    deployed.tick()  # the cursor loses it
    deployed.run("arroyo_sync_partitions")  # and so do the partitions
    assert deployed.keys == ["good/main"]
    for _ in range(2):
        for name, found in fleet(deployed).items():
            assert not found.passed, name
            assert found.severity is dg.AssetCheckSeverity.ERROR
            assert f"1 of 2 jobs: {paths.root}: " in found.description
            assert "its last epoch was 3" in found.description
            assert f"the job arroyo_forget_job for {paths.root}" in found.description
            assert lines(found)[0]["verdict"] == "vanished"
    config = {"ops": {"arroyo_forget_job_op": {"config": {"job": paths.root}}}}
    assert deployed.run("arroyo_forget_job", run_config=config).success
    assert latest(deployed, EVERY_JOB_RECENT).passed
    assert all(one.passed for one in fleet(deployed).values())


def test_deleting_every_job_does_not_turn_failed_into_passed(deployed: Any) -> None:
    jobs = [job_of(deployed, protocol_job(f"p{at}"), start=NOW) for at in range(3)]
    deployed.tick()
    assert not fleet(deployed)[EVERY_JOB_RECENT].passed
    for job in jobs:
        job.vanish()
    found = fleet(deployed)
    for name in FLEET_CHECKS:
        assert not found[name].passed
        assert found[name].severity is dg.AssetCheckSeverity.ERROR
    with pytest.raises((StorageError, NotFoundError)):
        deployed.evaluate()


def test_a_job_that_comes_back_and_vanishes_again_is_an_error_again(deployed: Any) -> None:
    job_of(deployed, protocol_job("good"))
    job = job_of(deployed, OLD_JOB)
    deployed.tick()
    fleet(deployed)
    job.vanish()
    config = {"ops": {"arroyo_forget_job_op": {"config": {"job": "old"}}}}
    assert deployed.run("arroyo_forget_job", run_config=config).success
    assert fleet(deployed)[EVERY_JOB_RECENT].passed
    job = job_of(deployed, OLD_JOB)
    assert fleet(deployed)[EVERY_JOB_RECENT].passed
    job.vanish()
    assert not fleet(deployed)[EVERY_JOB_RECENT].passed


def test_a_job_that_is_there_cannot_be_forgotten(deployed: Any) -> None:
    job_of(deployed, OLD_JOB)
    deployed.tick()
    config = {"ops": {"arroyo_forget_job_op": {"config": {"job": "old"}}}}
    assert not deployed.run("arroyo_forget_job", run_config=config).success
    assert deployed.keys == ["old"]
    assert known_jobs.forgotten(deployed.catalogue) == set()


def test_a_job_that_a_collection_of_dead_jobs_removed_is_no_error(
    deployed: Any, tmp_path: Path
) -> None:
    deployed.store = open_store(str(tmp_path))
    Local(deployed, tmp_path)
    deployed.build(runner=InProcessRunner())
    job_of(deployed, protocol_job("good"))
    job_of(deployed, OLD_JOB, start=1_700_000_000 * SECOND)
    for path in (tmp_path / "old").rglob("*"):
        os.utime(path, (1_700_000_000, 1_700_000_000))
    deployed.tick()
    assert not fleet(deployed)[EVERY_JOB_RECENT].passed
    config = {"dry_run": False, "gone": True}
    run = deployed.run(
        "arroyo_remove_dead_jobs",
        "old",
        run_config={"ops": {"arroyo_dead_jobs": {"config": config}}},
    )
    assert run.success
    assert ParquetBackend(deployed.store, OLD_JOB).epochs() == []
    found = fleet(deployed)[EVERY_JOB_RECENT]
    assert found.passed, found.description


@pytest.mark.parametrize("quarantine", [False, True])
def test_a_root_whose_only_job_was_removed_is_a_root_without_jobs(
    deployed: Any, tmp_path: Path, quarantine: bool
) -> None:
    deployed.store = open_store(str(tmp_path))
    Local(deployed, tmp_path)
    deployed.build(runner=InProcessRunner())
    job_of(deployed, OLD_JOB, start=1_700_000_000 * SECOND)
    for path in (tmp_path / "old").rglob("*"):
        os.utime(path, (1_700_000_000, 1_700_000_000))
    deployed.tick()
    config = {"dry_run": False, "gone": True, "quarantine": quarantine}
    run = deployed.run(
        "arroyo_remove_dead_jobs",
        "old",
        run_config={"ops": {"arroyo_dead_jobs": {"config": config}}},
    )
    assert run.success
    assert deployed.evaluate().skip_message.startswith("0 new epochs of 0 of 0 jobs")
    found = fleet(deployed)
    assert not any(one.passed for one in found.values())
    assert "there is no job below the checkpoint URL" in found[EVERY_JOB_RECENT].description


def test_once_every_job_is_forgotten_the_sensor_goes_on(deployed: Any) -> None:
    jobs = [job_of(deployed, protocol_job(f"p{at}")) for at in range(2)]
    deployed.tick()
    fleet(deployed)
    for job in jobs:
        job.vanish()
    for at in range(2):
        with pytest.raises(StorageError, match="all 2 known jobs are missing"):
            deployed.evaluate()
        config = {"ops": {"arroyo_forget_job_op": {"config": {"job": f"p{at}/main"}}}}
        assert deployed.run("arroyo_forget_job", run_config=config).success
    assert deployed.tick() == {}
    assert deployed.evaluate().skip_message.startswith("0 new epochs of 0 of 0 jobs;")
    assert known_jobs.last_epoch(deployed.catalogue, protocol_job("p0")) == 2
    job_of(deployed, protocol_job("p0"))
    assert deployed.tick().keys() == {"p0/main"}


# ---- a root that is gone -------------------------------------------------------------------------


class Local:
    """A deployment on local disk, whose root can be taken away."""

    def __init__(self, deployed: Any, root: Path) -> None:
        deployed.resource = ArroyoStateStore(
            checkpoint_url=str(root), catalogue_url=deployed.catalogue.url
        )
        deployed.build()
        self.deployed, self.root = deployed, root


def test_a_missing_root_is_red_on_the_sensor_after_its_first_success(
    deployed: Any, tmp_path: Path
) -> None:
    local = Local(deployed, tmp_path / "root")
    assert local.deployed.evaluate().skip_message.startswith("the checkpoint URL holds no jobs yet")
    local.root.mkdir()
    deployed.tick()  # an empty root is a success
    local.root.rmdir()
    with pytest.raises(NotFoundError):
        deployed.evaluate()


@pytest.mark.parametrize("made", [False, True], ids=["missing", "empty"])
def test_a_root_without_a_job_never_passes_a_fleet_check(
    deployed: Any, tmp_path: Path, made: bool
) -> None:
    local = Local(deployed, tmp_path / "root")
    if made:
        local.root.mkdir()
    for name, found in fleet(deployed).items():
        assert not found.passed, name
        assert found.severity is dg.AssetCheckSeverity.ERROR
        assert "Next: check" in found.description


# ---- nothing looked at ---------------------------------------------------------------------------


def test_a_refresh_of_a_partition_without_a_job_fails(deployed: Any) -> None:
    job_of(deployed, protocol_job("good"))
    deployed.tick()
    deployed.instance.add_dynamic_partitions("arroyo_jobs", ["never/was"])
    result = deployed.run("arroyo_refresh", "never/was")
    assert not result.success
    assert not result.get_asset_materialization_events()
    found = {one.check_name: one for one in result.get_asset_check_evaluations()}
    assert found.keys() == {"files_exist", "restorable"}
    assert not any(one.passed for one in found.values())
    assert "never/was" in found["restorable"].description
    assert "Next: " in found["restorable"].description


def test_a_job_without_an_epoch_is_a_warning_and_no_pass(deployed: Any) -> None:
    Written(deployed.store, protocol_job("young"))
    deployed.tick()
    result = deployed.run("arroyo_refresh", "young/main")
    assert result.success
    for one in result.get_asset_check_evaluations():
        assert (one.passed, one.severity) == (False, dg.AssetCheckSeverity.WARN)
        assert "no epoch yet" in one.description


# ---- false alarms --------------------------------------------------------------------------------


def database(path: Path, states: dict[str, str]) -> str:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE job_configs (id TEXT, pipeline_id INTEGER)")
        connection.execute("CREATE TABLE job_statuses (id TEXT, state TEXT)")
        for job, state in states.items():
            connection.execute("INSERT INTO job_configs VALUES (?, NULL)", (job,))
            connection.execute("INSERT INTO job_statuses VALUES (?, ?)", (job, state))
        connection.commit()
    return str(path)


def test_a_job_that_arroyos_database_calls_stopped_does_not_fail(
    deployed: Any, tmp_path: Path
) -> None:
    for name in ("stopped", "finished", "running", "failed"):
        job_of(deployed, legacy_job(name), start=NOW)
    states = {name: name.capitalize() for name in ("stopped", "finished", "running", "failed")}
    where = database(tmp_path / "state.sqlite", states)
    deployed.build(directory=ArroyoDirectory(database=where))
    found = fleet(deployed)[EVERY_JOB_RECENT]
    verdicts = {line["job"]: line["verdict"] for line in lines(found)}
    assert verdicts == {
        "failed": "failed in Arroyo",
        "running": "stands still",
        "finished": "finished",
        "stopped": "stopped",
    }
    assert found.description.startswith("2 of 4 jobs: ")
